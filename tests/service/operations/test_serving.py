"""Tests of `dcp serve` as a process. Internal: what a process left is read from the database.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

from dcp.server.database.engine import Database
from dcp.server.database.tables import jobs
from tests.support.catalog_api import create_key
from tests.support.catalog_roots import write_manifest
from tests.support.processes import caught_signals, command_of
from tests.support.programs import run_program
from tests.support.service import DcpProcess, Service, wait_until

_RSS_LIMIT_BYTES = 150 << 20


def test_with_nothing_configured(tmp_path: Path) -> None:
    """It serves ./checkpoints on SQLite to this machine, with a worker, and ends when told, with status 0."""
    with Service(tmp_path, is_fresh=True) as service:
        with service.client() as client:
            assert client.get("/readyz").json()["checks"] == {"database": "ok"}
            listed = client.get("/api/v1/checkpoints").json()
            assert (listed["items"], listed["next_cursor"]) == ([], None)
            wait_until(lambda: service.pids("worker"), "a worker")
            for path in ("/openapi.json", "/docs", "/api/v1/runs", "/api/v1/roots", "/metrics"):
                assert client.get(path).status_code == 200, path
            for _ in range(50):
                client.get("/api/v1/checkpoints?state=any")
        assert (tmp_path / "dcp-catalog.sqlite").is_file()
        process = Path(f"/proc/{service.pid}")
        resident = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
        assert resident is not None
        assert int(resident[1]) << 10 < _RSS_LIMIT_BYTES
        assert "libtorch" not in (process / "maps").read_text()
        with socket.socket() as other:  # another address of this machine: nobody listens there
            assert other.connect_ex(("127.0.0.2", int(service.settings["port"]))) != 0
        assert service.stop() == 0


def test_the_worker_beside_it(tmp_path: Path) -> None:
    """Killed, it is followed by another one; it ends with the service, even with a killed one."""
    service = Service(tmp_path).start()
    try:
        first = wait_until(lambda: service.pids("worker", "--until-input-ends"), "a worker")
        for pid in first:
            service.kill_pid(pid)

        def others() -> list[int]:
            return [pid for pid in service.pids("worker", "--until-input-ends") if pid not in first]

        wait_until(others, "another worker")
        wait_until(lambda: "worker started" in service.log(), "a worker at work")
        service.kill_only_it()
        wait_until(lambda: not service.pids(), "no process left")
    finally:
        service.kill()


@pytest.mark.parametrize(
    ("number", "is_fresh"),
    [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.exhaustive)],
)
def test_a_signal_while_it_starts(tmp_path: Path, number: signal.Signals, is_fresh: bool) -> None:
    """It ends before it listens as it does later: with status 0, and with nothing left behind."""
    process = DcpProcess(["serve", "--port", "0"], tmp_path, is_fresh=is_fresh).start()
    try:
        wait_until(lambda: signal.SIGTERM in caught_signals(process.pid), "that it listens to signals")
        process.kill_pid(process.pid, number)
        wait_until(lambda: process.exit_status is not None, "the end")
        assert process.exit_status == 0, process.log()
        assert process.pids() == []
        assert "Traceback" not in process.log()
    finally:
        process.kill()


def _metric(service: Service, key: str, name: str, **labels: str) -> float:
    """A sample of the metrics, as any of the processes tells it; 0 where it is missing."""
    with service.client(key) as client:  # a new connection
        text = client.get("/metrics").raise_for_status().text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return next((one.value for one in samples if (one.name, one.labels) == (name, labels)), 0.0)


def test_several_processes(tmp_path: Path) -> None:
    """They share the port; a key that one of them revokes is refused by all; whichever answers tells of both,
    and one that is killed keeps its counts, with nothing in progress; one signal ends all."""
    settings = {"api_workers": 2, "embedded_worker": False, "auth": "keys", "rate_limit": "100000/minute"}
    service = Service(tmp_path, settings)
    upgraded = run_program("-m", "dcp", "db", "upgrade", cwd=tmp_path, env=service.environment())
    assert upgraded.returncode == 0, upgraded.stderr
    key, ours = create_key(service, "a", ["admin"]), create_key(service, "ours", ["admin"])
    with service:
        with service.client(key) as client:
            assert client.get("/api/v1/roots").status_code == 200
            items = client.get("/api/v1/keys").json()["items"]
            (number,) = (one["id"] for one in items if one["name"] == "a")
            assert client.delete(f"/api/v1/keys/{number}").status_code == 200
        for _ in range(10):
            with service.client(key) as client:
                assert client.get("/api/v1/roots").status_code == 401
        assert len(service.pids()) >= 3
        _count_together(service, ours)
        for secret in (key, ours):
            assert secret not in service.log()
            assert secret[13:] not in service.log()
        assert service.stop() == 0


def _count_together(service: Service, key: str) -> None:
    def health_checks() -> float:
        route = {"method": "GET", "route": "/healthz", "status": "200"}
        return _metric(service, key, "dcp_http_requests_total", **route)

    wait_until(lambda: _metric(service, key, "dcp_api_processes") == 2, "both count")
    before = health_checks()
    for _ in range(30):
        with service.client() as client:
            client.get("/healthz").raise_for_status()
    for _ in range(10):
        assert health_checks() == before + 30
    assert _metric(service, key, "dcp_api_resident_bytes") > 60 << 20
    children = [pid for pid in service.pids() if pid != service.pid and "spawn_main" in command_of(pid)]
    service.kill_pid(children[0], signal.SIGKILL)
    wait_until(lambda: children[0] not in service.pids(), "it is gone")
    assert wait_until(health_checks, "the other one, or its successor, answers") >= before + 30
    wait_until(lambda: _metric(service, key, "dcp_http_requests_in_progress") == 1, "only the one that asks")


def test_requests_under_way_are_finished(tmp_path: Path) -> None:
    """SIGTERM lets a request that it has begun with come to its end, and takes no new ones."""
    with Service(tmp_path, {"embedded_worker": False}) as service, service.client() as client:
        database = Database(f"sqlite:///{tmp_path / 'dcp-catalog.sqlite'}")
        answers: list[int] = []

        def ask() -> None:
            with service.client() as client:
                answers.append(client.post("/api/v1/keys", json={"name": "slow"}).status_code)

        with database.write():  # so that the request has to wait for its turn to write
            thread = threading.Thread(target=ask)
            thread.start()
            under_way = re.compile(r"dcp_http_requests_in_progress 2\b")
            wait_until(lambda: under_way.search(client.get("/metrics").text), "the request, beside this one")
            os.kill(service.pid, signal.SIGTERM)
            time.sleep(0.5)
            assert answers == []
        thread.join(60)
        assert answers == [201]
        wait_until(lambda: service.exit_status is not None, "the end")
        assert service.exit_status == 0
        database.close()


def test_a_second_signal(tmp_path: Path) -> None:
    """Ctrl-C twice ends it at once and in good order: status 0, and nothing that reads as a fault."""
    with Service(tmp_path, {"embedded_worker": False}) as service:
        for _ in range(2):
            os.kill(service.pid, signal.SIGINT)
            time.sleep(0.02)
        wait_until(lambda: service.exit_status is not None, "the end")
        assert service.exit_status == 0
        assert "Traceback" not in service.log()
        assert "Application shutdown complete" in service.log()


def test_a_second_signal_while_bodies_are_sent(tmp_path: Path) -> None:
    """Ctrl-C twice, with downloads under way that nobody reads: at once, and one line says what was cut."""
    root = tmp_path / "files"
    root.mkdir()
    header = b'{"w":{"dtype":"U8","shape":[134217728],"data_offsets":[0,134217728]}}'
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (128 << 20))
    settings = {"embedded_worker": True, "roots": {"files": {"url": str(root), "scan_seconds": 0.2}}}
    with Service(tmp_path / "service", settings) as service, ExitStack() as bodies:
        client = bodies.enter_context(service.client())
        found = wait_until(lambda: client.get("/api/v1/checkpoints").json()["items"], "a scan")
        url = f"/api/v1/checkpoints/{found[0]['id']}/download"
        for _ in range(2):
            other = bodies.enter_context(service.client())
            assert bodies.enter_context(other.stream("GET", url)).status_code == 200
        for _ in range(2):
            os.kill(service.pid, signal.SIGINT)
            time.sleep(0.3)
        begun = time.monotonic()
        wait_until(lambda: service.exit_status is not None, "the end")
        assert time.monotonic() - begun < 10
        assert service.exit_status == 0
        assert "Traceback" not in service.log()
        assert "Exception" not in service.log()
        assert len(re.findall("ended at once; requests were cut short", service.log())) == 1


def test_a_root_that_is_away_for_long(tmp_path: Path) -> None:
    """The log says once which root the scans cannot find, and why."""
    root = tmp_path / "disk"
    service = Service(tmp_path, {"roots": {"disk": {"url": str(root), "scan_seconds": 0.2}}}, ready=False)
    with service:
        failed = re.compile(r"\[warning *\] failed .*")

        def attempts() -> int:
            database = Database(f"sqlite:///{tmp_path / 'dcp-catalog.sqlite'}")
            with database.read() as connection:
                waiting = connection.execute(select(jobs.c.waiting)).scalars().all()
            database.close()
            return max((job["count"] for job in waiting if job is not None), default=0)

        wait_until(lambda: attempts() > 1, "some attempts")
        told = failed.findall(service.log())
        assert len(told) == 1 and "root=disk" in told[0]
        assert "the folder of root disk is not there" in told[0]


def test_what_it_says_on_its_start(tmp_path: Path) -> None:
    """Its roots, that the database is new, where it listens and has its pages, and what the first scan finds;
    of a root that is not there that it is not, which is made by nobody."""
    write_manifest(tmp_path / "My Runs" / "one" / "step-1")
    service = Service(tmp_path, ready=False)
    service.arguments += ["--root", "My Runs", "--root", "away=./nowhere"]
    with service:
        wait_until(lambda: "scanned " in service.log(), "the first scan")
        log = service.log()
        assert re.search(r"root +\[.*name=my-runs place=.*My Runs", log)
        assert re.search(r"root is not there.* name=away place=\S*nowhere", log)
        assert re.search(r"new database .* file=dcp-catalog.sqlite", log)
        assert re.search(rf"serving .*api={service.url}/api/v1 docs={service.url}/docs", log)
        assert re.search(r"scanned .* found=1 new=1 root=my-runs", log)
        with service.client() as client:
            checks = client.get("/api/v1/root-checks").json()["items"]
            assert checks[0]["detail"] == "the folder of root away is not there"
            assert client.get("/").json()["docs"] == "/docs"
    assert not (tmp_path / "nowhere").exists()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """One line says so, and nothing has been made."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run_program("-m", "dcp", "serve", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 3
    assert re.fullmatch(rf"dcp: port {port} of 127.0.0.1 is taken.*--port\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
