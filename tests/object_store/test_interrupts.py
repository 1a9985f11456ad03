"""Ctrl-C while the service does not answer: the caller is back at once, and nothing is under way any more."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from dcp.storage.stores.objects.store import FsspecStore
from tests.support.fault_plan import HANG, INTERNAL_ERROR, STALLED, Fault
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3

_MIB: Final = 1 << 20
_PATIENCE_SECONDS: Final = 600.0
"""Of the requests; an interrupt that waited for them would take as long."""
_HANG_SECONDS: Final = 120.0
_OTHERS: Final = [pytest.param(fault, marks=pytest.mark.exhaustive) for fault in (STALLED, INTERNAL_ERROR)]


@contextmanager
def _interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Press Ctrl-C once ``condition`` holds; the interrupt must end the block, and soon.

    The signal reaches another thread. So does it wake none that waits, as where one is just about to.
    """
    pressed, left = [0.0], threading.Event()

    def press() -> None:
        while not condition():
            if left.wait(0.05):
                return
        pressed[0] = time.monotonic()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        assert time.monotonic() - pressed[0] < _HANG_SECONDS
    finally:
        left.set()
        thread.join()


def _store(proxy: FaultProxy, url: str) -> FsspecStore:
    patience = {"retry_seconds": _PATIENCE_SECONDS, "request_timeout_seconds": _PATIENCE_SECONDS}
    return FsspecStore(url, {**proxy.storage_options, **patience, "concurrency": 4, "part_bytes": 5 * _MIB})


@pytest.mark.parametrize("fault", [HANG, *_OTHERS], ids=str)
def test_reading_in_several_requests(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """Also those that other threads have under way end, and nothing is written to the memory afterwards."""
    size = 40 * _MIB  # three requests
    with raw_s3(s3_proxy.server) as raw:
        raw.write(f"{s3_root}/data", b"x" * size)
    handle = _store(s3_proxy, s3_root).open_read("data", expected_bytes=size)
    rule = s3_proxy.spoil(fault, operation="GetObject", times=None)
    memory = bytearray(size)
    with _interrupted_when(lambda: rule.seen >= 3):
        handle.preadv([memoryview(memory)], 0)
    s3_proxy.heal()
    memory[:] = bytes(size)
    assert handle.pread(5, size - 5) == b"xxxxx"
    assert not any(memory)


@pytest.mark.parametrize("fault", [HANG, _OTHERS[-1]], ids=str)
def test_writing_in_parts(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """The parts that are being sent are given up, the upload is ended, and their buffers are free again."""
    store = _store(s3_proxy, s3_root)
    handle = store.create("data", durable=True)
    rule = s3_proxy.spoil(fault, operation="UploadPart", times=None)
    with _interrupted_when(lambda: rule.seen >= 3):
        for _ in range(8):
            handle.write(bytes(5 * _MIB))
        handle.finish()
    handle.abort()
    with raw_s3(s3_proxy.server) as raw:
        assert raw.uploads(s3_root) == {}
    pool = store._shared().pool(5 * _MIB)
    taken = [pool.try_take() for _ in range(pool.count)]
    assert None not in taken
    for buffer in taken:
        assert buffer is not None
        pool.give(buffer)
    s3_proxy.heal()
    assert store.list() == []
