"""K2: download a sharded checkpoint from a real `dcp serve` on loopback as one file that is made while it
is sent.

`python -m benchmarks.service.download`. For comparison: the same bytes from a file that was converted before,
and a bare socket with `sendfile` as the limit. The client is a separate process that discards the bytes. The
source is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

__all__ = ["DownloadResult", "main", "measure"]

_TENSOR_BYTES: Final = 64 << 20
_SMALL_TENSORS: Final = 200
_READY_SECONDS: Final = 120.0
_CLIENT: Final = """
import socket, sys, time
host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
buffer = bytearray(1 << 20)
with socket.create_connection((host, port)) as client:
    begun = time.perf_counter()
    client.sendall(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n".encode())
    received = client.recv_into(buffer)
    first = time.perf_counter() - begun
    status = bytes(buffer[9:12])
    while count := client.recv_into(buffer):
        received += count
    print(status.decode(), received, first, time.perf_counter() - begun)
"""


@dataclass(frozen=True)
class DownloadResult:
    """Seconds of each round of one contender, for the whole file and until the first bytes."""

    contender: str
    size_bytes: int
    seconds: tuple[float, ...]
    first_seconds: tuple[float, ...]

    @property
    def megabytes_per_second(self) -> float:
        """Median throughput."""
        return self.size_bytes / statistics.median(self.seconds) / 1e6


@contextmanager
def _serving(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "DCP_SERVER_ROOTS": json.dumps({"main": {"url": str(folder), "scan_seconds": 0}}),
        "DCP_SERVER_DATABASE_URL": f"sqlite:///{folder / 'catalog.sqlite'}",
        "DCP_SERVER_PORT": str(port),
        "DCP_SERVER_EMBEDDED_WORKER": "false",
        "DCP_SERVER_LOG_LEVEL": "warning",
        "DCP_SERVER_CONFIG": str(folder / "none.toml"),
    }
    process = subprocess.Popen([sys.executable, "-m", "dcp", "serve"], env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _sending(file: Path) -> Iterator[int]:
    """Open a socket that sends the file by `sendfile` to each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, file.open("rb") as source:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                client.sendfile(source)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def _prepare(folder: Path, gigabytes: float) -> int:
    import torch

    import dcp

    count = max(1, round(gigabytes * 1e9 / _TENSOR_BYTES))
    generator = torch.Generator().manual_seed(0)
    state = {
        f"layers.{n}.weight": torch.randint(-(2**62), 2**62, (_TENSOR_BYTES // 8,), generator=generator).view(
            torch.float32
        )
        for n in range(count)
    }
    state |= {f"layers.{n}.bias": torch.ones(1024) for n in range(_SMALL_TENSORS)}
    dcp.save(state, checkpoint_id=folder / "step-1")
    dcp.convert(folder / "step-1", folder / "model.safetensors", to="safetensors", progress=False)
    return (folder / "model.safetensors").stat().st_size


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _register(port: int, key: str) -> int:
    url = f"http://127.0.0.1:{port}/api/v1/checkpoints"
    answer = httpx.post(url, json={"root": "main", "key": key}, timeout=60)
    answer.raise_for_status()
    number: int = answer.json()["id"]
    return number


def _get(port: int, path: str) -> tuple[int, float, float]:
    command = [sys.executable, "-c", _CLIENT, "127.0.0.1", str(port), path]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.split()
    if output[0] != "200":
        raise RuntimeError(f"GET {path} was answered with {output[0]}")
    return int(output[1]), float(output[2]), float(output[3])


def _memory_mebibytes(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Run rounds of all contenders in turn; record the memory of the server process."""
    size = _prepare(folder, gigabytes)
    port = _free_port()
    with _serving(folder, port) as server, _sending(folder / "model.safetensors") as bare:
        made = f"/api/v1/checkpoints/{_register(port, 'step-1')}"
        file = f"/api/v1/checkpoints/{_register(port, 'model.safetensors')}/files/model.safetensors"
        idle = _memory_mebibytes(server.pid, "VmRSS:")
        paths = {
            "made, safetensors": (port, f"{made}/download?format=safetensors"),
            "made, torch": (port, f"{made}/download?format=torch"),
            "file": (port, file),
            "bare sendfile": (bare, "/"),
        }
        samples: dict[str, list[tuple[int, float, float]]] = {name: [] for name in paths}
        for place in paths.values():  # the first download of each warms caches and does not count
            _get(*place)
        for _ in range(rounds):
            for name, place in paths.items():
                samples[name].append(_get(*place))
        peak = _memory_mebibytes(server.pid, "VmHWM:")
    results = [
        DownloadResult(name, size, tuple(total for *_, total in found), tuple(first for _, first, _ in found))
        for name, found in samples.items()
    ]
    return {
        "gigabytes": size / 1e9,
        "idle_mebibytes": idle,
        "peak_mebibytes": peak,
        "load_average": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "results": [
            asdict(result) | {"megabytes_per_second": result.megabytes_per_second} for result in results
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print the results as JSON, also to a file if named."""
    parser = argparse.ArgumentParser("python -m benchmarks.service.download", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of tensors: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all contenders: %(default)s")
    parser.add_argument("--tmp", type=Path, default=None, help="where the checkpoint goes, and is removed")
    parser.add_argument("--out", type=Path, default=None, help="a file for the results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.tmp) as name:
        found = measure(options.gigabytes, options.rounds, Path(name))
    text = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.write_text(text)
    print(text)
    for result in found["results"]:
        first = statistics.median(result["first_seconds"]) * 1000
        speed = result["megabytes_per_second"]
        print(
            f"{result['contender']:20} {speed:7.0f} MB/s, first bytes after {first:.0f} ms", file=sys.stderr
        )
    print(
        f"memory {found['idle_mebibytes']:.0f} MiB, peak {found['peak_mebibytes']:.0f} MiB", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
