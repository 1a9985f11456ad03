"""Which tests of the contract of stores every run needs, and which only `make test-all`."""

from __future__ import annotations

import pytest

_NOT_OF_FILES = (
    "TestMemoryStore",
    "TestS3",
    "TestFsspecMemory",
    "TestFsspecLocal",
    "TestFaultInjectingStore",
)
_LARGE_BYTES = 16 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is to be durable is stored no otherwise by stores that do not write files themselves; that they
    take the option, a few tests of each try. And every size that buffers may break at, the disk's does."""
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and item.cls.__name__ in _NOT_OF_FILES:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            size = values.get("size", 1)
            is_large = isinstance(size, int) and size >= _LARGE_BYTES and item.cls.__name__ != "TestS3"
            if (values.get("durable") and size) or is_large:
                item.add_marker(pytest.mark.exhaustive)
