"""Ctrl-C during requests without an answer: the call ends at once and leaves no request running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from dcp.storage.stores import Store, open_store
from tests.support.fault_plan import HANG, INTERNAL_ERROR, STALLED, Fault
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3

_MIB: Final = 1 << 20
_PATIENCE_SECONDS: Final = 600.0
"""Time limit of requests: longer than a test may take, so an interrupt that waits for them fails the test."""
_rare = pytest.mark.exhaustive


def _options_of(proxy: FaultProxy) -> dict[str, Any]:
    patience = {"retry_seconds": _PATIENCE_SECONDS, "request_timeout_seconds": _PATIENCE_SECONDS}
    return {**proxy.storage_options, **patience, "concurrency": 4, "part_bytes": 5 * _MIB}


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Send SIGINT to another thread once ``condition`` holds; the interrupt must end the block. So the signal
    does not wake a wait of the main thread, as if it arrived just before the wait."""
    left = threading.Event()

    def press() -> None:
        while not condition():
            if left.wait(0.05):
                return
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        left.set()
        thread.join()


def _write_parts(store: Store, name: str, count: int) -> None:
    with store.create(name, durable=True) as handle:
        for _ in range(count):
            handle.write(bytes(5 * _MIB))
        handle.finish()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "fault", [HANG, *(pytest.param(fault, marks=_rare) for fault in (STALLED, INTERNAL_ERROR))], ids=str
)
def test_ctrl_c_ends_requests_of_a_read(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """An interrupted read ends the requests of other threads, which then do not write to the memory."""
    size = 40 * _MIB  # three requests
    with raw_s3(s3_proxy.server) as raw:
        raw.write(f"{s3_root}/data", b"x" * size)
    handle = open_store(s3_root, _options_of(s3_proxy)).open_read("data", expected_bytes=size)
    rule = s3_proxy.spoil(fault, operation="GetObject", times=None)
    memory = bytearray(size)
    with interrupted_when(lambda: rule.seen >= 3):
        handle.preadv([memoryview(memory)], 0)
    s3_proxy.heal()
    memory[:] = bytes(size)
    assert handle.pread(5, size - 5) == b"xxxxx"
    assert not any(memory)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [HANG, pytest.param(INTERNAL_ERROR, marks=_rare)], ids=str)
def test_ctrl_c_aborts_an_upload(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """An interrupted write cancels parts, aborts the upload, and releases all buffers for the next file."""
    store = open_store(s3_root, _options_of(s3_proxy))
    rule = s3_proxy.spoil(fault, operation="UploadPart", times=None)
    with interrupted_when(lambda: rule.seen >= 3):
        _write_parts(store, "data", 8)
    with raw_s3(s3_proxy.server) as raw:
        assert (raw.uploads(s3_root), raw.list(s3_root)) == ({}, {})
    s3_proxy.heal()
    _write_parts(store, "again", 8)
    assert [info.size_bytes for info in store.list()] == [40 * _MIB]
