"""Ranges that are read by a URL which was signed once: by which, and what happens if it is refused."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from dcp.storage.stores import Store, open_store
from tests.support.fault_plan import Fault, Kind
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3

_SIZE = 100_000
_DENIED = Fault(Kind.ANSWER, status=403, code="AccessDenied")
_EXPIRED = Fault(Kind.ANSWER, status=400, code="ExpiredToken")


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


def _signed(proxy: FaultProxy) -> list[bool]:
    gets = proxy.requests("GetObject")
    assert all(("X-Amz-Signature" in get.query) != ("authorization" in get.headers) for get in gets)
    return ["X-Amz-Signature" in get.query for get in gets]


def test_ranges_go_by_one_signed_url(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Reads all ranges of an object by one URL, also where threads begin it together."""
    store = _store(s3_proxy, s3_root, "a b+ü", "b")
    with ThreadPoolExecutor(8) as pool:
        ranges = [(name, begin) for name in ("a b+ü", "b") for begin in range(0, _SIZE, _SIZE // 5)]
        parts = list(pool.map(lambda one: _read(store, one[0], one[1], _SIZE // 5), ranges))
    assert b"".join(parts) == _content("a b+ü") + _content("b")
    assert _signed(s3_proxy) == [True] * 10
    urls = {(get.key, get.query["X-Amz-Signature"]) for get in s3_proxy.requests("GetObject")}
    assert len(urls) == 2


def test_a_refused_url_is_asked_for_the_ordinary_way(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Gets the bytes all the same; where URLs are refused again and again, none is tried any more."""
    names = [str(number) for number in range(5)]
    store = _store(s3_proxy, s3_root, *names)
    for name in names[:3]:
        s3_proxy.spoil(_DENIED, operation="GetObject", key=f"/{name}$")
    assert [_read(store, name) for name in names] == [_content(name) for name in names]
    assert _signed(s3_proxy) == [True, False] * 3 + [False] * 2


def test_urls_that_end_do_not_end_the_way(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Signs URLs anew when credentials expire in a load, which makes all of them void at once."""
    names = [str(number) for number in range(4)]
    store = _store(s3_proxy, s3_root, *names)
    for name in names:
        _read(store, name)
    s3_proxy.log.clear()
    for name in names:
        s3_proxy.spoil(_EXPIRED, operation="GetObject", key=f"/{name}$")
    for _ in range(2):
        assert [_read(store, name) for name in names] == [_content(name) for name in names]
    assert _signed(s3_proxy) == [True, False] * 4 + [True] * 4


def test_answers_that_settle_it_do_not_end_the_way(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Asks once for what is gone, replaced or too short, and by a signed URL for the next object."""
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
    assert _signed(s3_proxy) == [True] * 4


def test_a_proxy_is_used(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Sends nothing past a proxy that was set."""
    nobody = {"http": "http://127.0.0.1:9", "https": "http://127.0.0.1:9"}
    store = _store(s3_proxy, s3_root, "key", config_kwargs={"proxies": nobody}, retry_seconds=0)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"):
        _read(store, "key")
    assert s3_proxy.log == []
