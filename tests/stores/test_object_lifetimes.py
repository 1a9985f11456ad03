"""Lifetime of connections and threads of object stores: while in use, and longer for a few places."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from dcp.storage.stores import Store, open_store
from dcp.storage.stores.contract import pattern_bytes
from tests.support.processes import open_files
from tests.support.s3 import raw_s3

_MIB = 1 << 20
_HANG_SECONDS = 60.0
_FEW = 4
"""The number of places that may keep an unused connection. The tests use more, one after the other."""


def _store(server: Any, url: str, token: int = 0, **options: object) -> Store:
    """Open a store as with new credentials: other options are another place."""
    common = {**server.storage_options, "retry_seconds": 100.0 + token, "part_bytes": 5 * _MIB}
    return open_store(url, common | options)


def _open_others(server: Any, url: str) -> None:
    for token in range(1, _FEW + 6):
        _store(server, url, token).list()


def _becomes_true(condition: Callable[[], bool]) -> bool:
    """Wait for a condition that the event loop or the garbage collector may delay."""
    deadline = time.monotonic() + _HANG_SECONDS
    while not condition():
        gc.collect()
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.05)
    return True


def _connections(server: Any) -> int:
    port = f":{int(server.endpoint_url.rpartition(':')[2]):04X}"
    own = set(open_files())
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(port) and row[3] == "01" and f"socket:[{row[9]}]" in own for row in rows)


def test_old_credentials_leave_no_connections(s3_proxy: Any, s3_root: str) -> None:
    """With frequently renewed credentials only the connections and threads of a few places exist."""
    first = _store(s3_proxy, s3_root)
    before = set(threading.enumerate())
    with first.create("data", durable=True) as handle:
        handle.write(pattern_bytes(11 * _MIB))
    threads = [
        one for one in threading.enumerate() if one not in before and one.name.startswith("dcp-object")
    ]
    assert threads
    del first, handle
    _open_others(s3_proxy, s3_root)
    assert _becomes_true(lambda: 0 < _connections(s3_proxy) <= _FEW)
    assert _becomes_true(lambda: threads[-1] not in threading.enumerate())


def test_stores_in_use_stay_open(s3_server: Any, s3_root: str) -> None:
    """The connections of a store or an open handle stay, however many other places are used."""
    with raw_s3(s3_server) as raw:
        raw.write(f"{s3_root}/data", b"12345")
    handle = _store(s3_server, s3_root).open_read("data", expected_bytes=5)
    _open_others(s3_server, s3_root)
    gc.collect()
    assert handle.pread(5, 0) == b"12345"
    handle.close()


def test_idle_connections_are_not_reused(s3_server: Any, s3_root: str, monkeypatch: Any) -> None:
    """A connection that was idle for long is not reused, because the network may have dropped it."""
    connected = Mock(side_effect=socket.socket.connect)
    monkeypatch.setattr(socket.socket, "connect", lambda *to: connected(*to))
    store, now = _store(s3_server, s3_root, token=90), time.monotonic
    for silent_seconds, count in ((0.0, 1), (60.0, 2)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=silent_seconds: now() + seconds)
        assert [store.stat("absent"), store.stat("absent")] == [None, None]
        assert connected.call_count == count


def test_a_fork_keeps_the_connections_of_its_parent(s3_server: Any, s3_root: str) -> None:
    """A fork releases the parent's stores when it opens its own; the parent's requests need no retry."""
    with raw_s3(s3_server) as raw:
        raw.write(f"{s3_root}/data", b"12345")
    store = _store(s3_server, s3_root)
    assert store.read("data", limit_bytes=5) == b"12345"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del store
            _open_others(s3_server, s3_root)
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("data", limit_bytes=5) == b"12345"
    assert store.traffic()["retries"] == 0
