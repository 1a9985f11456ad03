"""Servers that the processes of a run share are started once, and go with the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.support.processes import environment_of
from tests.support.service import wait_until

_RUN = """
import json, pathlib, sys
from tests.support.shared_servers import shared_server

class Folders:
    def getbasetemp(self):
        return pathlib.Path(sys.argv[2])

for _ in range(2):
    told = shared_server(sys.argv[1], Folders(), lambda told: print("prepared", flush=True))
    print(json.dumps(told), flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
@pytest.mark.parametrize("name", ["postgres", "s3"])
def test_a_server_ends_with_the_run(tmp_path: Path, name: str, number: signal.Signals) -> None:
    """However that ends: no process and no folder is left."""
    mark = f"DCP_TEST_RUN={uuid.uuid4().hex}"
    environment = os.environ | {"DCP_TEST_RUN": mark.partition("=")[2]}
    environment.pop("PYTEST_XDIST_WORKER", None)  # it is a run of its own

    def marked() -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in pids if mark.encode() in environment_of(pid).split(b"\0")]

    command = [sys.executable, "-c", _RUN, name, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "prepared\n"
        told, again = (json.loads(run.stdout.readline()) for _ in range(2))
        assert told == again
        folder = Path(told["folder"] if name == "s3" else str(make_url(told["url"]).query["host"]))
        assert folder.is_dir()
        assert len(marked()) >= 3
        run.send_signal(number)
    wait_until(lambda: not marked(), "no process left", 60)
    assert not folder.exists()
