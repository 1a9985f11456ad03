"""Ctrl-C while a service has stopped to answer: the process ends soon, however patient its requests are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Final

import pytest
import torch

import dcp
from tests.support.fault_plan import HANG, STALLED, Fault
from tests.support.fault_proxy import FaultProxy
from tests.support.programs import Program

_PATIENCE_SECONDS: Final = 600.0
_HANG_SECONDS: Final = 60.0
"""Far below the patience, far above the ten seconds that it takes on an idle machine."""

_DATA: Final = r"\.distcp$"
_STATE: Final = """
import json, sys
import torch, dcp
url, options = sys.argv[1], json.loads(sys.argv[2])
state = {f"w{i}": torch.full((3, 1 << 20), float(i)) for i in range(8)}
"""
_ACTS: Final = {
    "load": _STATE + "dcp.load(state, checkpoint_id=url, storage_options=options, no_dist=True)",
    "save": _STATE + "dcp.save(state, checkpoint_id=url + '/more', storage_options=options, no_dist=True)",
    "save in partitions": _STATE + "writer = dcp.FsspecWriter(url + '/more', thread_count=3, **options)\n"
    "dcp.save(state, storage_writer=writer, no_dist=True)",
    "verify": _STATE + "from dcp.inspection.verification import verify\nverify(url, storage_options=options)",
    "list": _STATE + "from dcp.inspection.checkpoints import list_checkpoints\n"
    "list_checkpoints(url.rpartition('/')[0], storage_options=options)",
    "convert": _STATE + "dcp.convert(url, sys.argv[3] + '/out', to='safetensors', storage_options=options)",
    "statistics": "import sys\nsys.argv = ['dcp', 'stats', sys.argv[1]]\n"
    "from dcp.cli.app import main\nmain()",
}


def _options(proxy: FaultProxy) -> str:
    patience = {"retry_seconds": _PATIENCE_SECONDS, "request_timeout_seconds": _PATIENCE_SECONDS}
    return json.dumps({**proxy.storage_options, **patience, "concurrency": 4, "part_bytes": 5 << 20})


def _start(act: str, url: str, options: str, log: Path) -> Program:
    with log.open("wb") as out:
        return Program(
            *("-c", act, url, options, str(log.parent)),
            stdout=out,
            stderr=out,
            env=os.environ | {"DCP_STORAGE_OPTIONS": options},
            start_new_session=True,
        )


_rare = pytest.mark.exhaustive


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
def test_the_process_is_gone(
    s3_proxy: FaultProxy, s3_root: str, tmp_path: Path, act: str, operation: str, fault: Fault, count: int
) -> None:
    """By one interrupt of the main thread, and with KeyboardInterrupt."""
    log = tmp_path / "log.txt"
    state = {f"w{i}": torch.full((3, 1 << 20), float(i)) for i in range(8)}
    for name in ("run/step-1", "run/step-2"):
        dcp.save(
            state,
            checkpoint_id=f"{s3_root}/{name}",
            storage_options=s3_proxy.server.storage_options,
            no_dist=True,
        )
    times = count if (act, fault) == ("load", HANG) else None
    rule = s3_proxy.spoil(fault, operation=operation, key=None if act == "list" else _DATA, times=times)
    child = _start(_ACTS[act], f"{s3_root}/run/step-1", _options(s3_proxy), log)
    try:
        deadline = time.monotonic() + _HANG_SECONDS
        while rule.seen < count:
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        time.sleep(2.0 if times else 0.5)
        s3_proxy.spoil(HANG, times=None)  # nothing can be cleared up either
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does
        assert child.wait(_HANG_SECONDS) in (-signal.SIGINT, 130), log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
