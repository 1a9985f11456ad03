"""K4: time from the start of `dcp serve` to its first response, and memory of its API process.

`python -m benchmarks.service.start`. Each start is a new process with an empty folder or, from the second on,
the previous database; the worker starts after the service listens. The limit is the time to import the
frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["main", "measure"]

_READY_SECONDS: Final = 120.0
_FRAMEWORKS: Final = "import fastapi, numpy, sqlalchemy, structlog, uvicorn"
_PATHS: Final = (
    "/healthz",
    "/openapi.json",
    "/metrics",
    "/api/v1/roots",
    "/api/v1/runs",
    "/api/v1/checkpoints?state=any&sort=step",
    "/api/v1/jobs",
)


def measure(starts: int, requests: int, folder: Path) -> dict[str, Any]:
    """Return medians over ``starts``; memory is that of the last process after ``requests`` of several
    paths."""
    seconds: list[float] = []
    processor_seconds: list[float] = []
    idle: list[float] = []
    used = 0.0
    for number in range(starts):
        port = _free_port()
        begun = time.perf_counter()
        server = subprocess.Popen(
            [sys.executable, "-m", "dcp", "serve", "--port", str(port)],
            cwd=folder,
            stderr=subprocess.DEVNULL,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("DCP_")},
                "DCP_SERVER_RATE_LIMIT": "1000000/second",  # requests follow each other without a pause
            },
        )
        try:
            _first_answer(port, server)
            seconds.append(time.perf_counter() - begun)
            processor_seconds.append(_processor_seconds(server.pid))
            idle.append(_resident_mebibytes(server.pid))
            if number == starts - 1:
                for _ in range(requests):
                    for path in _PATHS:
                        _get(port, path)
                used = _resident_mebibytes(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_READY_SECONDS)
    imports = [_import_seconds() for _ in range(starts)]
    return {
        "first_answer_seconds": statistics.median(seconds),
        "first_answer_seconds_all": seconds,
        "processor_seconds": statistics.median(processor_seconds),
        "import_of_frameworks_seconds": statistics.median(imports),
        "idle_mebibytes": statistics.median(idle),
        "used_mebibytes": used,
        "load_average": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _first_answer(port: int, server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _READY_SECONDS
    while time.monotonic() < give_up:
        if server.poll() is not None:
            raise RuntimeError(f"dcp serve ended with {server.returncode}")
        try:
            _get(port, "/healthz")
            return
        except OSError:
            time.sleep(0.002)
    raise RuntimeError("dcp serve does not answer")


def _get(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        client.sendall(request.encode())
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    answer = b"".join(parts)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"GET {path} was answered with {answer[:60]!r}")
    return answer


def _import_seconds() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", _FRAMEWORKS], check=True)
    return time.perf_counter() - begun


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mebibytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print the results as JSON, also to a file if named."""
    parser = argparse.ArgumentParser("python -m benchmarks.service.start", description=__doc__)
    parser.add_argument("--starts", type=int, default=7, help="number of starts: %(default)s")
    parser.add_argument("--requests", type=int, default=300, help="requests of each path: %(default)s")
    parser.add_argument("--out", type=Path, default=None, help="a file for the results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dcp-start-") as folder:
        found = measure(options.starts, options.requests, Path(folder))
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
