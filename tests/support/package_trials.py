"""What the extras of an installed package promise, tried with that package: the standard library is all else.

``python -I package_trials.py EXTRA...`` in an environment with these extras, and nothing of a checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DCP = Path(sys.executable).with_name("dcp")
_SECONDS = 300.0  # for whatever is waited for
_SILENT = "127.0.0.1:9"  # nobody listens there
_ELEMENTS = struct.pack("<8f", *range(8))


def dcp(*arguments: object, fails: bool = False) -> str:
    """What the command says; on standard error where it is expected to fail."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "AWS_ENDPOINT_URL": f"http://{_SILENT}"}
    environment |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    command = [str(_DCP), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS)
    assert (done.returncode != 0) == fails, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if fails else done.stdout


def has(module: str) -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec(module) is not None


def try_commands(folder: Path) -> None:
    """The weights of others are converted, listed, shown, verified and compared, with torch or without."""
    from dcp import version

    assert version.__version__ == importlib.metadata.version("dcphub")
    assert Path(version.__file__).is_relative_to(sys.prefix)
    assert "convert" in dcp("--help")
    header = {"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, len(_ELEMENTS)]}}
    start = json.dumps(header).encode()
    (folder / "w.safetensors").write_bytes(struct.pack("<Q", len(start)) + start + _ELEMENTS)
    dcp("convert", folder / "w.safetensors", folder / "runs/run/step-1", "--to", "dcp")
    dcp("convert", folder / "runs/run/step-1", folder / "w.pt", "--to", "torch")
    assert "step-1" in dcp("ls", folder / "runs/run")
    assert "float32" in dcp("show", folder / "runs/run/step-1")
    dcp("verify", folder / "runs/run/step-1")
    dcp("diff", folder / "w.pt", folder / "w.safetensors")


def try_what_is_left_out(folder: Path, extras: set[str]) -> None:
    """A command that needs another extra names it."""
    if "s3" not in extras and not has("s3fs"):
        assert "dcphub[s3]" in dcp("ls", "s3://bucket/run", fails=True)
    if "server" not in extras and not has("uvicorn"):
        assert "dcphub[server]" in dcp("serve", fails=True)
    if "torch" not in extras:
        assert not has("torch")


def try_torch(folder: Path) -> None:
    """Saved, loaded, also behind the loop and by stock torch, also from what was converted without it."""
    import torch
    import torch.distributed.checkpoint as stock

    import dcp as package

    weights = torch.arange(8.0).reshape(2, 4)
    state = {"w": weights, "epoch": 3}
    package.save(state, checkpoint_id=folder / "saved")
    package.async_save(state, checkpoint_id=folder / "behind").result()
    for where in ("saved", "behind"):
        loaded = torch.zeros(2, 4)
        target = {"w": loaded, "epoch": 0}
        package.load(target, checkpoint_id=folder / where)
        assert torch.equal(loaded, weights)
        assert target["epoch"] == 3
    loaded = torch.zeros(2, 4)
    stock.load({"w": loaded}, checkpoint_id=folder / "runs/run/step-1")
    assert torch.equal(loaded, weights)


def try_s3(folder: Path) -> None:
    """The service of objects is asked, which is not there."""
    assert "Could not connect" in dcp("ls", "s3://bucket/run", fails=True)


def try_catalog(folder: Path) -> None:
    """The client asks the service, which is not there."""
    from dcp.server.client import Client, TransportError

    try:
        list(Client(f"http://{_SILENT}").checkpoints())
    except TransportError:
        return
    raise AssertionError("somebody answered")


def try_server(folder: Path) -> None:
    """It gets ready, has the checkpoint, which its client reads, and ends when it is told to."""
    from dcp.server.client import Client

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(_DCP), "serve", "--port", str(port), "--root", f"runs={folder / 'runs'}"]
    with (folder / "log").open("w") as log:
        service = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        client = Client(f"http://127.0.0.1:{port}")
        until(lambda: service.poll() is not None or _is_ready(port), folder / "log")
        until(lambda: [found.step for found in client.checkpoints(run="run")] == [1], folder / "log")
        service.send_signal(signal.SIGTERM)
        assert service.wait(_SECONDS) == 0, (folder / "log").read_text()
    finally:
        service.kill()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until(holds: Callable[[], bool], log: Path) -> None:
    """Waits; what the service said is told where it was in vain."""
    deadline = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def try_postgres(folder: Path) -> None:
    """The driver is there with its library; with the service it asks the database, which is not there."""
    import psycopg

    assert psycopg.pq.version() > 0
    if has("uvicorn"):
        url = f"postgresql://user@{_SILENT}/catalog"
        assert "Connection refused" in dcp("db", "status", "--database", url, fails=True)


def try_dask(folder: Path) -> None:
    """A conversion by a cluster of one process."""
    from distributed import LocalCluster

    options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 1, "host": "127.0.0.1"}
    with LocalCluster(**options, dashboard_address=None) as cluster:  # type: ignore[no-untyped-call]
        where = cluster.scheduler_address.replace("tcp", "dask")
        source, target = folder / "runs/run/step-1", folder / "by-dask"
        dcp("convert", source, target, "--to", "safetensors", "--executor", where)


def main() -> None:
    """Every trial of these extras; the first that fails ends it."""
    extras = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try_commands(folder)
        try_what_is_left_out(folder, extras)
        for extra in sorted(extras):
            if trial := globals().get(f"try_{extra}"):
                trial(folder)
                print(f"tried {extra}")


if __name__ == "__main__":
    main()
