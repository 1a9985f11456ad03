"""What the tests of the engine put into stores in memory goes with each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp.storage.stores.memory import MemoryStore, folder_names


@pytest.fixture(autouse=True)
def emptied_stores() -> Iterator[None]:
    """Delete the files of stores that the test made; together they would take hundreds of megabytes."""
    before = set(folder_names())
    yield
    for name in set(folder_names()) - before:
        store = MemoryStore(name)
        for info in store.list():
            store.delete(info.name)
