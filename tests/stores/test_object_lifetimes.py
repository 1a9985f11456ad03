"""How long connections, threads and buffers of an object store live: as long as they are used, and of the
last few places longer."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.asyn
from fsspec.implementations.memory import MemoryFileSystem

from dcp.demo.s3_server import S3Server
from dcp.errors import StorageError
from dcp.storage.stores import buffers
from dcp.storage.stores.buffers import BufferPool
from dcp.storage.stores.contract import pattern_bytes
from dcp.storage.stores.objects import shared as sharing
from dcp.storage.stores.objects.store import FsspecStore
from tests.support.fault_plan import STALLED
from tests.support.fault_proxy import FaultProxy
from tests.support.processes import open_files
from tests.support.s3 import raw_s3

_MIB = 1 << 20
_HANG_SECONDS = 60.0
_OTHERS = sharing._KEPT_PLACES + 1


def _store(server: S3Server | FaultProxy, url: str, token: int = 0, **options: object) -> FsspecStore:
    """As with credentials that are given out anew: to us other options are another place."""
    common = {**server.storage_options, "retry_seconds": 100.0 + token, "part_bytes": 5 * _MIB}
    return FsspecStore(url, common | options)


def _open_others(server: S3Server, url: str) -> None:
    for token in range(1, _OTHERS + 1):
        _store(server, url, token).list()


def _within(condition: Callable[[], bool]) -> bool:
    """Whether it comes to hold, which the event loop or the collector may take a moment for."""
    deadline = time.monotonic() + _HANG_SECONDS
    while not condition():
        gc.collect()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _session(store: FsspecStore) -> Any:
    """The HTTP session of the store's client."""
    return store._client._fs._s3._endpoint.http_session  # type: ignore[attr-defined]


def _connections(server: S3Server) -> int:
    """TCP connections of this process to the server that are established."""
    port = f":{int(server.endpoint_url.rpartition(':')[2]):04X}"
    ours = set(open_files())
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(port) and row[3] == "01" and f"socket:[{row[9]}]" in ours for row in rows)


def test_old_credentials_leave_nothing_behind(s3_server: S3Server, s3_root: str) -> None:
    """A process that is given new ones again and again has the connections and threads of a few."""
    first = _store(s3_server, s3_root)
    with first.create("data", durable=True) as handle:
        handle.write(pattern_bytes(6 * _MIB))
    session, threads = _session(first), [thread for thread in threading.enumerate() if _is_ours(thread)]
    client = weakref.ref(first._client)
    assert session._sessions
    assert threads
    del first, handle
    _open_others(s3_server, s3_root)
    assert _within(lambda: client() is None)
    assert _within(lambda: not session._sessions)
    assert _within(lambda: len(sharing._ALIVE) <= sharing._KEPT_PLACES)
    assert _within(lambda: _connections(s3_server) <= sharing._KEPT_PLACES)
    assert _within(lambda: not set(threads[-1:]) & set(threading.enumerate()))


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("dcp-object")


def test_the_steps_of_a_run_share_a_client(s3_server: S3Server, s3_root: str) -> None:
    """Each has a store of its own, which is gone when the next begins."""
    first = _store(s3_server, f"{s3_root}/step-1")
    first.list()
    client = weakref.ref(first._client)
    del first
    gc.collect()
    second = _store(s3_server, f"{s3_root}/step-2")
    assert second._client is client() is not None


def test_clients_share_the_descriptions_of_services(s3_server: S3Server, s3_root: str) -> None:
    """Each would parse megabytes of them for a tenth of a second."""
    stores = [_store(s3_server, s3_root, token) for token in (301, 302)]
    assert [store.list() for store in stores] == [[], []]
    one, other = (store._client._fs.session for store in stores)  # type: ignore[attr-defined]
    assert one is not other
    assert one.get_component("data_loader") is other.get_component("data_loader")


def test_what_is_used_stays_open(s3_server: S3Server, s3_root: str) -> None:
    """By a store or only a handle, however many others come; and a store beside it shares it still."""
    store = _store(s3_server, s3_root)
    with raw_s3(s3_server) as raw:
        raw.write(f"{s3_root}/data", b"12345")
    client, handle = weakref.ref(store._client), store.open_read("data", expected_bytes=5)
    del store
    _open_others(s3_server, s3_root)
    gc.collect()
    assert handle.pread(5, 0) == b"12345"
    assert _store(s3_server, s3_root)._client is client()
    handle.close()


def test_a_request_under_way_is_carried_out(s3_proxy: FaultProxy, s3_root: str) -> None:
    """The client that it is made by is not closed before it has its answer, though nobody else knows it."""
    rule = s3_proxy.spoil(STALLED, operation="GetObject", times=None)
    with raw_s3(s3_proxy.server) as raw:
        raw.write(f"{s3_root}/data", b"1" * _MIB)
    with ThreadPoolExecutor(1) as pool:
        store = _store(s3_proxy, s3_root, request_timeout_seconds=1.0)
        client, handle = weakref.ref(store._client), store.open_read("data", expected_bytes=_MIB)
        del store
        reading = pool.submit(handle.pread, _MIB, 0)
        del handle
        assert _within(lambda: rule.seen > 0)
        _open_others(s3_proxy.server, s3_root)
        gc.collect()
        assert client() is not None
        s3_proxy.heal()
        assert reading.result(_HANG_SECONDS) == b"1" * _MIB
        del reading
    assert _within(lambda: client() is None)


def test_the_collector_may_run_anywhere(s3_server: S3Server, s3_root: str) -> None:
    """Also in the thread of the event loop, and with the lock held: closing waits for nothing."""

    def leave_a_cycle(token: int) -> Any:
        store = _store(s3_server, s3_root, token)
        store.list()
        store.itself = store  # type: ignore[attr-defined]
        return _session(store)

    sessions = [leave_a_cycle(200), leave_a_cycle(201)]
    with sharing._guard:
        sharing._KEPT.clear()
        gc.collect()
    assert _within(lambda: not any(session._sessions for session in sessions))

    async def collect() -> None:
        sharing._KEPT.clear()
        gc.collect()

    sessions = [leave_a_cycle(202)]
    fsspec.asyn.sync(fsspec.asyn.get_loop(), collect, timeout=_HANG_SECONDS)
    assert _within(lambda: not sessions[0]._sessions)
    assert _store(s3_server, s3_root, 203).list() == []


def test_a_child_leaves_the_connections_of_its_parent_alone(s3_server: S3Server, s3_root: str) -> None:
    """It lets go of the parent's stores as it opens its own, and the parent's requests go on."""
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
            sharing._KEPT.clear()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("data", limit_bytes=5) == b"12345"
    assert store.traffic()["retries"] == 0


def test_locks_of_places_are_not_kept(s3_server: S3Server, s3_root: str) -> None:
    """Stores of one place exclude each other while one holds its lock; afterwards nothing is left of it."""
    with _store(s3_server, s3_root).lock(timeout_seconds=1):
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(_takes, _store(s3_server, s3_root)).result(_HANG_SECONDS)
        with _store(s3_server, s3_root).lock(timeout_seconds=1):
            assert (os.getpid(), s3_root) in sharing._LOCKS
    assert _within(lambda: (os.getpid(), s3_root) not in sharing._LOCKS)


def _takes(store: FsspecStore) -> bool:
    try:
        with store.lock(timeout_seconds=0.05):
            return True
    except StorageError:
        return False


class _Cloud(MemoryFileSystem):  # type: ignore[misc]  # it comes without types
    """A file system that has credentials."""

    protocol = "lifetimecloud"
    made: list[weakref.ref[_Cloud]] = []  # noqa: RUF012

    def __init__(self, token: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.made.append(weakref.ref(self))

    @classmethod
    def alive(cls) -> int:
        """How many there are."""
        return sum(reference() is not None for reference in cls.made)


def test_file_systems_are_shared_and_let_go() -> None:
    """Folders of one place share a file system, and fsspec does not keep those with old credentials."""
    fsspec.register_implementation("lifetimecloud", _Cloud, clobber=True)
    stores = [FsspecStore(f"lifetimecloud://bucket/{step}", {"token": "1"}) for step in range(3)]
    for store in stores:
        assert store.list() == []
    assert _Cloud.alive() == 1
    del store, stores
    for token in range(_OTHERS):
        FsspecStore("lifetimecloud://bucket/run", {"token": str(token)}).list()
    assert _within(lambda: _Cloud.alive() <= sharing._KEPT_PLACES)


def test_pools_that_are_gone_cost_a_fork_nothing() -> None:
    """A child's buffers start afresh, and of pools that were let go nothing is left to be called."""
    pool = BufferPool(2, 4096)
    taken = pool.take()
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.try_take() is not None and pool.try_take() is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.give(taken)
    gone = weakref.ref(pool)
    del pool
    assert gone() is None


def test_uploads_to_many_places_keep_the_buffers_of_one(s3_server: S3Server, s3_root: str) -> None:
    """Of the last one, however many there were and whatever the size of their parts."""
    data = pattern_bytes(11 * _MIB, seed=1)
    for token, part_bytes in enumerate((5 * _MIB, 6 * _MIB, 5 * _MIB)):
        store = _store(s3_server, f"{s3_root}/{token}", token, part_bytes=part_bytes, concurrency=2)
        with store.create("file", durable=True) as handle:
            handle.write(data)
    assert store.read("file", limit_bytes=len(data)) == data
    gc.collect()
    pools = [pool for pool in buffers._POOLS if pool.size_bytes in (5 * _MIB, 6 * _MIB)]
    assert [(pool.size_bytes, len(pool._out)) for pool in pools] == [(5 * _MIB, 0)]
    assert 1 <= len(pools[0]._free) <= 2
