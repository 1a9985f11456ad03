"""What the tests of stores share."""

from __future__ import annotations

import pytest

_NOT_OF_FILES = (
    "TestMemoryStore",
    "TestS3",
    "TestFsspecMemory",
    "TestFsspecLocal",
    "TestFaultInjectingStore",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is to be durable is stored no otherwise by stores that do not write files themselves; that they
    take the option, a few tests of each try."""
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and item.cls.__name__ in _NOT_OF_FILES:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            if values.get("durable") and values.get("size", 1):
                item.add_marker(pytest.mark.exhaustive)
