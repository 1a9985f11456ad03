"""Ctrl-C while a service has stopped to answer: the caller is back however patient its requests are, and
nothing is under way any more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import dcp
from dcp.storage.stores import Store, open_store
from tests.support.fault_plan import HANG, INTERNAL_ERROR, STALLED, Fault
from tests.support.fault_proxy import FaultProxy
from tests.support.programs import Program
from tests.support.s3 import raw_s3

_MIB: Final = 1 << 20
_PATIENCE_SECONDS: Final = 600.0
"""Of the requests: more than a test may take, so that an interrupt that waited for them fails it."""
_HANG_SECONDS: Final = 60.0
_rare = pytest.mark.exhaustive


def _options_of(proxy: FaultProxy) -> dict[str, Any]:
    patience = {"retry_seconds": _PATIENCE_SECONDS, "request_timeout_seconds": _PATIENCE_SECONDS}
    return {**proxy.storage_options, **patience, "concurrency": 4, "part_bytes": 5 * _MIB}


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Press Ctrl-C once ``condition`` holds; the interrupt must end the block. The signal reaches another
    thread: so does it wake none that waits, as where one is just about to."""
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
def test_reading_in_several_requests(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """Ends those that other threads have under way, and writes nothing to the memory afterwards."""
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
def test_writing_in_parts(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """Gives up the parts that are being sent, ends the upload, and has all buffers for the next file."""
    store = open_store(s3_root, _options_of(s3_proxy))
    rule = s3_proxy.spoil(fault, operation="UploadPart", times=None)
    with interrupted_when(lambda: rule.seen >= 3):
        _write_parts(store, "data", 8)
    with raw_s3(s3_proxy.server) as raw:
        assert (raw.uploads(s3_root), raw.list(s3_root)) == ({}, {})
    s3_proxy.heal()
    _write_parts(store, "again", 8)
    assert [info.size_bytes for info in store.list()] == [40 * _MIB]


_STATE: Final = """
import json, sys
import torch, dcp
url, options = sys.argv[1], json.loads(sys.argv[2])
state = {f"w{i}": torch.full((3, 1 << 20), float(i)) for i in range(8)}
"""
_COMMAND: Final = "import runpy, sys\nsys.argv = ['dcp', {}]\nrunpy.run_module('dcp', run_name='__main__')"
_ACTS: Final = {
    "load": _STATE + "dcp.load(state, checkpoint_id=url, storage_options=options, no_dist=True)",
    "save": _STATE + "dcp.save(state, checkpoint_id=url + '/more', storage_options=options, no_dist=True)",
    "save in partitions": _STATE + "writer = dcp.FsspecWriter(url + '/more', thread_count=3, **options)\n"
    "dcp.save(state, storage_writer=writer, no_dist=True)",
    "convert": _STATE + "dcp.convert(url, sys.argv[3] + '/out', to='safetensors', storage_options=options)",
    "verify": _COMMAND.format("'verify', sys.argv[1]"),
    "list": _COMMAND.format("'ls', sys.argv[1].rpartition('/')[0]"),
    "statistics": _COMMAND.format("'stats', sys.argv[1]"),
}


@pytest.mark.parametrize(
    ("act", "operation", "fault", "count"),
    [
        ("load", "GetObject", HANG, 3),  # as many as it has threads beside the main one, which then waits
        pytest.param("load", "GetObject", STALLED, 3, marks=_rare),
        pytest.param("save", "UploadPart", HANG, 2, marks=_rare),
        pytest.param("save in partitions", "UploadPart", HANG, 3, marks=_rare),
        pytest.param("verify", "GetObject", HANG, 2, marks=_rare),
        pytest.param("list", "GetObject", HANG, 2, marks=_rare),
        pytest.param("convert", "GetObject", HANG, 2, marks=_rare),
        pytest.param("statistics", "GetObject", HANG, 1, marks=_rare),
    ],
    ids=str,
)
def test_a_process_is_gone(
    s3_proxy: FaultProxy, s3_root: str, tmp_path: Path, act: str, operation: str, fault: Fault, count: int
) -> None:
    """Ends by one interrupt of its main thread, though nothing can be cleared up."""
    log, options = tmp_path / "log.txt", json.dumps(_options_of(s3_proxy))
    state = {f"w{i}": torch.full((3, 1 << 20), float(i)) for i in range(8)}
    for name in ("run/step-1", "run/step-2"):
        url, direct = f"{s3_root}/{name}", s3_proxy.server.storage_options
        dcp.save(state, checkpoint_id=url, storage_options=direct, no_dist=True)
    times = count if (act, fault) == ("load", HANG) else None
    key = None if act == "list" else r"\.distcp$"
    rule = s3_proxy.spoil(fault, operation=operation, key=key, times=times)
    with log.open("wb") as out:
        child = Program(
            *("-c", _ACTS[act], f"{s3_root}/run/step-1", options, str(tmp_path)),
            stdout=out,
            stderr=out,
            env=os.environ | {"DCP_STORAGE_OPTIONS": options},
            start_new_session=True,
        )
    left = threading.Event()
    try:
        while rule.seen < count:
            assert child.poll() is None, log.read_text()
            left.wait(0.05)
        left.wait(2.0 if times else 0.5)  # so that the main thread waits, too
        s3_proxy.spoil(HANG, times=None)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does
        assert child.wait(_HANG_SECONDS) in (-signal.SIGINT, 130), log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
