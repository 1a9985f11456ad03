"""Processes of `dcp serve`: start, log, shutdown, several processes on a port, slow requests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.catalog_api import CatalogApi, create_key
from tests.support.catalog_roots import write_manifest
from tests.support.processes import caught_signals, command_of
from tests.support.programs import run_program
from tests.support.service import DcpProcess, Service, wait_until

_RSS_LIMIT_BYTES = 150 << 20
_ALONE = {"embedded_worker": False}


def test_defaults_without_configuration(tmp_path: Path) -> None:
    """By default the service offers ./checkpoints on SQLite and loopback, with a worker, and exits with 0."""
    with Service(tmp_path, is_fresh=True) as service:
        with service.client() as client:
            assert client.get("/readyz").json()["checks"] == {"database": "ok"}
            assert client.get("/api/v1/checkpoints").json()["items"] == []
            wait_until(lambda: service.pids("worker"), "a worker")
            for path in ("/openapi.json", "/docs", "/api/v1/runs", "/api/v1/roots", "/metrics"):
                assert client.get(path).status_code == 200, path
            for _ in range(50):
                client.get("/api/v1/checkpoints?state=any")
        assert (tmp_path / "dcp-catalog.sqlite").is_file()
        process = Path(f"/proc/{service.pid}")
        resident = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
        assert resident is not None and int(resident[1]) << 10 < _RSS_LIMIT_BYTES
        assert "libtorch" not in (process / "maps").read_text()
        with socket.socket() as other:  # another address of this machine, without a listener
            assert other.connect_ex(("127.0.0.2", int(service.settings["port"]))) != 0
        assert service.stop() == 0


ROOTS = {"My Runs/": "my-runs", "here=./here/": "here", "./lr=0.1": "lr-0.1", "away=./nowhere": "away"}
"""Arguments of --root, and the names of the roots."""


def test_start_messages_and_the_life_of_the_worker(tmp_path: Path) -> None:
    """The log has the roots, the new database, the address, the first scan, and a missing root once. A killed
    worker is replaced, and the new worker ends with the service."""
    write_manifest(tmp_path / "My Runs" / "one" / "step-1")
    service = Service(tmp_path, {"lease_seconds": 1, "poll_seconds": 0.1}, ready=False)
    for given in ROOTS:
        service.arguments += ["--root", given]
    with service, service.client() as client:
        wait_until(lambda: "scanned " in service.log(), "the first scan")
        log = service.log()
        for line in (
            r"root +\[.*name=my-runs place=.*My Runs",
            r"root does not exist.* name=away place=\S*nowhere",
            r"new database .* file=dcp-catalog.sqlite",
            rf"serving .*api={service.url}/api/v1 docs={service.url}/docs",
            r"scanned .* found=1 new=1 root=my-runs",
        ):
            assert re.search(line, log), line
        assert "alembic" not in log  # no details of migrations
        assert {root["name"] for root in client.get("/api/v1/roots").json()["items"]} == {*ROOTS.values()}
        checks = {one["root"]: one["detail"] for one in client.get("/api/v1/root-checks").json()["items"]}
        assert checks["away"] == "the folder of root away does not exist; is the disk mounted?"
        seen = wait_until(lambda: re.findall(r"\[warning *\] failed .*root=away.*", service.log()), "a scan")
        assert len(seen) == 1 and "the folder of root away does not exist; is the disk mounted?" in seen[0]
        first = service.pids("worker", "--until-input-ends")
        for pid in first:
            service.kill_pid(pid)
        wait_until(lambda: {*service.pids("worker", "--until-input-ends")} - {*first}, "another worker")
        wait_until(lambda: service.log().count("worker started") > 1, "a worker at work")
        service.kill_parent()
        wait_until(lambda: not service.pids(), "no process left")
        service.kill()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("number", "is_fresh"),
    [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.exhaustive)],
)
def test_a_signal_during_the_start(tmp_path: Path, number: signal.Signals, is_fresh: bool) -> None:
    """A signal during the start ends the service with status 0 and leaves no process."""
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
    """Return a sample of the metrics from any of the processes, or 0 if the sample is missing."""
    with service.client(key) as client:  # a new connection may reach another process
        text = client.get("/metrics").raise_for_status().text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return next((one.value for one in samples if (one.name, one.labels) == (name, labels)), 0.0)


@pytest.mark.exhaustive
def test_several_processes(tmp_path: Path) -> None:
    """Processes share the port, revocations and counts, also of a killed process; one signal ends all."""
    settings = {**_ALONE, "api_workers": 2, "auth": "keys", "rate_limit": "100000/minute"}
    service = Service(tmp_path, settings)
    upgraded = run_program("-m", "dcp", "db", "upgrade", cwd=tmp_path, env=service.environment())
    assert upgraded.returncode == 0, upgraded.stderr
    key, second = create_key(service, "a", ["admin"]), create_key(service, "b", ["admin"])
    with service:
        with service.client(key) as client:
            items = client.get("/api/v1/keys").json()["items"]
            (number,) = (one["id"] for one in items if one["name"] == "a")
            assert client.delete(f"/api/v1/keys/{number}").status_code == 200
        for _ in range(10):
            with service.client(key) as client:
                assert client.get("/api/v1/roots").status_code == 401
        assert len(service.pids()) >= 3
        _count_together(service, second)
        assert not any(part in service.log() for secret in (key, second) for part in (secret, secret[13:]))
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


SECRETS = {
    f"dcp_abcdefgh_{'S' * 43} refused": "dcp_abcdefgh_*** refused",
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw": "whsec_***",
    "Authorization: Bearer abc.def-ghijk": "Authorization: Bearer ***",
    "postgresql://dcp:hunter2@host/db": "postgresql://dcp:***@host/db",
    "b.s3/x%3FX-Amz-Signature=abc123&x=1": "b.s3/x?X-Amz-Signature=***&x=1",
    "dcp_step-1 at 12:30@night": "dcp_step-1 at 12:30@night",
}
"""Secrets in request paths, and their form in the log."""


def test_running_requests_end_after_sigterm(tmp_path: Path) -> None:
    """SIGTERM lets running requests end, takes no new requests and completes streams. The JSON log has actor,
    request and status, but no key, query, body or secret of a path."""
    settings = {**_ALONE, "auth": "keys", "log_format": "json"}
    service = Service(tmp_path, settings)
    key = create_key(service, "boss", ["admin"])
    with service, service.client(key) as client, service.client(key) as asking:
        for words in SECRETS:
            assert client.get(f"/{words}", headers={"X-Request-ID": "r1"}).status_code == 404
        client.get("/api/v1/checkpoints?tag=hidden-one")
        job = CatalogApi(client).submit("scan", root="checkpoints")
        seen: list[str] = []
        answers: list[int] = []

        def follow() -> None:
            with service.client(key) as other, other.stream("GET", f"/api/v1/jobs/{job}/events") as answer:
                seen.extend(answer.iter_lines())

        def ask() -> None:
            answers.append(asking.post("/api/v1/keys", json={"name": "hidden-two"}).status_code)

        database = sqlite3.connect(tmp_path / "dcp-catalog.sqlite", isolation_level=None)
        database.execute("BEGIN IMMEDIATE")  # holds the write lock, so that the request waits
        threads = [threading.Thread(target=one) for one in (follow, ask)]
        for thread in threads:
            thread.start()
        under_way = re.compile(r"dcp_http_requests_in_progress 3\b")
        wait_until(lambda: under_way.search(client.get("/metrics").text), "the requests, beside this one")
        os.kill(service.pid, signal.SIGTERM)
        time.sleep(0.5)
        assert answers == []
        database.close()
        for thread in threads:
            thread.join(60)
        assert answers == [201]
        assert "event: submitted" in seen and seen[-1] == ""
        wait_until(lambda: service.exit_status is not None, "the end")
        assert service.exit_status == 0
    lines = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    requests = {line["path"]: line for line in lines if line["event"] == "request"}
    assert {f"/{shown}" for shown in SECRETS.values()} <= requests.keys()
    assert requests["/whsec_***"].items() >= {"actor": "key:boss", "request_id": "r1", "status": 404}.items()
    assert (requests["/api/v1/keys"]["method"], requests["/api/v1/keys"]["status"]) == ("POST", 201)
    assert not any(hidden in service.log() for hidden in ("hidden-", "hunter2", key[13:]))


def test_a_second_signal_while_bodies_are_sent(tmp_path: Path) -> None:
    """A second Ctrl-C ends running downloads at once, with one line in the log."""
    root = tmp_path / "files"
    root.mkdir()
    header = b'{"w":{"dtype":"U8","shape":[134217728],"data_offsets":[0,134217728]}}'
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (128 << 20))
    settings = {**_ALONE, "roots": {"files": {"url": str(root)}}}
    with Service(tmp_path / "service", settings) as service, ExitStack() as bodies:
        client = bodies.enter_context(service.client())
        number = CatalogApi(client).register("files", "model.safetensors")
        for _ in range(2):
            other = bodies.enter_context(service.client())
            sent = other.stream("GET", f"/api/v1/checkpoints/{number}/download")
            assert bodies.enter_context(sent).status_code == 200
        for _ in range(2):
            os.kill(service.pid, signal.SIGINT)
            time.sleep(0.3)
        begun = time.monotonic()
        wait_until(lambda: service.exit_status is not None, "the end")
        assert time.monotonic() - begun < 10
        assert service.exit_status == 0
        assert "Traceback" not in service.log() and "Exception" not in service.log()
        assert service.log().count("stopped immediately; running requests were aborted") == 1


def test_a_taken_port_is_reported(tmp_path: Path) -> None:
    """A taken port is reported in one line, and nothing is created."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_program("-m", "dcp", "serve", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 3
    assert re.fullmatch(rf"dcp: port {port} of 127.0.0.1 is already in use.*--port\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


# -- slow request heads --------------------------------------------------------------------------------------

_QUICK = """
from dcp.server.serving import TimedHeads
TimedHeads.head_seconds = 1.0
from dcp.cli.app import app
app(["serve"], prog_name="dcp")
"""


class _QuickService(Service):
    """A service that waits one second for request heads instead of ten."""

    def command(self) -> tuple[str, ...]:
        """Return the arguments of Python."""
        return ("-c", _QUICK)


@pytest.fixture(scope="module")
def slow_heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Return the port of a service that waits one second for request heads."""
    with _QuickService(tmp_path_factory.mktemp("heads"), _ALONE) as service:
        yield int(service.settings["port"])


def _until_cut(connection: socket.socket, send: Callable[[], Any]) -> None:
    connection.settimeout(0.05)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            send()
            if connection.recv(100) == b"":
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return
    raise AssertionError("nothing cuts it off")


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_unfinished_request_heads_are_cut_off(slow_heads: int, head: bytes) -> None:
    """A connection with a missing, partial or very slow request head is closed."""
    with socket.create_connection(("127.0.0.1", slow_heads), 30) as connection:
        connection.sendall(head)
        _until_cut(connection, lambda: connection.sendall(b"X" if head else b""))


@pytest.mark.exhaustive
def test_idle_connections_are_kept(slow_heads: int) -> None:
    """Only request heads have the timeout, each of them: a connection may be idle between two requests."""
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow_heads), 30) as connection:
        for _ in range(2):
            connection.sendall(head[:20])
            time.sleep(0.05)
            connection.sendall(head[20:])
            answer = b""
            while b'"version"' not in answer:
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(1.3)
        connection.sendall(head[:20])
        _until_cut(connection, lambda: None)
