"""Range requests: number of attempts, and use of a proxy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from dcp.storage.stores import Store, open_store
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3

_SIZE = 100_000


def _content(seed: object) -> bytes:
    return random.Random(str(seed)).randbytes(_SIZE)


def _store(proxy: FaultProxy, root: str, *names: str, **options: Any) -> Store:
    with raw_s3(proxy.server) as raw:
        for name in names:
            raw.write(f"{root}/{name}", _content(name))
    return open_store(root, {**proxy.storage_options, **options})


def _read(store: Store, name: str, begin: int = 0, size: int = _SIZE) -> bytes:
    with store.open_read(name, expected_bytes=_SIZE) as handle:
        return handle.pread(size, begin)


def test_final_errors_are_requested_once(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A missing, replaced or truncated object is requested once."""
    store = _store(s3_proxy, s3_root, "there", "replaced", "short")
    for number in range(3):
        with pytest.raises(CheckpointNotFoundError):
            _read(store, f"absent-{number}")
    s3_proxy.log.clear()
    handle = store.open_read("replaced", expected_bytes=_SIZE)
    assert handle.pread(5, 0) == _content("replaced")[:5]
    with raw_s3(s3_proxy.server) as raw:
        raw.write(f"{s3_root}/replaced", _content("other"))
        raw.write(f"{s3_root}/short", b"short")
    with pytest.raises(CorruptCheckpointError, match="was replaced while it was read"):
        handle.pread(5, 0)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        _read(store, "short", 50_000, 10)
    assert _read(store, "there") == _content("there")
    assert len(s3_proxy.requests("GetObject")) == 4


def test_a_proxy_is_used(s3_proxy: FaultProxy, s3_root: str) -> None:
    """All requests go through a configured proxy."""
    dead_proxies = {"http": "http://127.0.0.1:9", "https": "http://127.0.0.1:9"}
    store = _store(s3_proxy, s3_root, "key", config_kwargs={"proxies": dead_proxies}, retry_seconds=0)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"):
        _read(store, "key")
    assert s3_proxy.log == []
