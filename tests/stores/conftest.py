"""Selection of contract tests for every run; the others run with `make test-all`."""

from __future__ import annotations

import pytest

_REPEATED = ("TestMemoryStore", "TestS3", "TestFsspecMemory", "TestFsspecLocal")
"""Stores that do not write files themselves."""
_LARGE_BYTES = 16 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark contract tests as exhaustive that repeat others: durable writes and all sizes around buffers
    concern the disk, and fsspec's local store is like its memory store."""
    for item in items:
        if not isinstance(item, pytest.Function) or getattr(item.cls, "__name__", "") not in _REPEATED:
            continue
        kind, values = item.cls.__name__, item.callspec.params if hasattr(item, "callspec") else {}
        size = values.get("size", 1)
        is_large = isinstance(size, int) and size >= _LARGE_BYTES and kind != "TestS3"
        is_repeated = kind == "TestFsspecLocal" and item.originalname not in vars(item.cls)
        if (values.get("durable") and size) or is_large or is_repeated:
            item.add_marker(pytest.mark.exhaustive)
