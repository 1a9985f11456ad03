"""Try the extras of an installed dcphub with the standard library alone.

Run ``python -I package_trials.py EXTRA...`` in an environment with these extras, outside a checkout.
"""

from __future__ import annotations

import importlib
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
from pathlib import Path

_DCP = Path(sys.executable).with_name("dcp")
_SECONDS = 900.0  # for each wait; the demo takes a minute on an idle machine
_SILENT = "127.0.0.1:9"  # no process listens there
_MODULES = {
    "accelerate": ["accelerate", "dcp.integrations.accelerate"],
    "bench": ["torch_checkpointing"],
    "catalog": ["dcp.server.client"],
    "dask": ["distributed"],
    "lightning": ["lightning.pytorch", "dcp.integrations.lightning"],
    "postgres": ["psycopg"],
    "ray": ["ray.train", "dcp.integrations.ray"],
    "torchdata": ["dcp.integrations.torchdata"],
    "torchtitan": ["torchtitan", "dcp.integrations.torchtitan"],
    "transformers": ["transformers", "dcp.integrations.huggingface"],
    "wandb": ["wandb", "dcp.server.features.handover"],
}
"""Modules to import by extra; tests/trainers trains with each."""


def dcp(*arguments: object, fails: bool = False) -> str:
    """Run the command; return its standard output, or its standard error if it must fail."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "AWS_ENDPOINT_URL": f"http://{_SILENT}"}
    environment |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    command = [str(_DCP), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS)
    assert (done.returncode != 0) == fails, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if fails else done.stdout


def try_commands(folder: Path, extras: set[str]) -> None:
    """Convert, list, show, verify and compare weights without torch; errors name a missing extra."""
    from dcp import version

    heavy = "import sys, dcp.cli; assert not {'msgpack', 'numpy', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-I", "-c", heavy], check=True)  # the command line starts without them
    assert version.__version__ == importlib.metadata.version("dcphub")
    assert Path(version.__file__).is_relative_to(sys.prefix)
    header = {"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}
    start = json.dumps(header).encode()
    weights = struct.pack("<Q", len(start)) + start + struct.pack("<8f", *range(8))
    (folder / "w.safetensors").write_bytes(weights)
    dcp("convert", folder / "w.safetensors", folder / "runs/run/step-1", "--to", "dcp")
    dcp("convert", folder / "runs/run/step-1", folder / "w.pt", "--to", "torch")
    assert "step-1" in dcp("ls", folder / "runs/run")
    assert "float32" in dcp("show", folder / "runs/run/step-1")
    dcp("verify", folder / "runs/run/step-1")
    dcp("diff", folder / "w.pt", folder / "w.safetensors")
    if "s3" in extras:
        assert "Could not connect" in dcp("ls", "s3://bucket/run", fails=True)
    elif not importlib.util.find_spec("s3fs"):
        assert "dcphub[s3]" in dcp("ls", "s3://bucket/run", fails=True)
    if "server" not in extras and not importlib.util.find_spec("uvicorn"):
        assert "dcphub[server]" in dcp("serve", fails=True)
    if "torch" not in extras:
        assert not importlib.util.find_spec("torch")


def try_torch(folder: Path) -> None:
    """Save and load; stock torch loads the converted checkpoint."""
    import torch
    import torch.distributed.checkpoint as stock

    import dcp as package

    weights, loaded = torch.arange(8.0).reshape(2, 4), torch.zeros(2, 4)
    package.async_save({"w": weights, "epoch": 3}, checkpoint_id=folder / "saved").result()
    package.load({"w": loaded, "epoch": 0}, checkpoint_id=folder / "saved")
    assert torch.equal(loaded, weights)
    stock.load({"w": loaded.zero_()}, checkpoint_id=folder / "runs/run/step-1")
    assert torch.equal(loaded, weights)


def try_server(folder: Path) -> None:
    """Start the service, ask for the checkpoint by API and page, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [str(_DCP), "serve", "--port", url.rpartition(":")[2], "--root", f"runs={folder / 'runs'}"]
    with (folder / "log").open("w") as log:
        service = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    deadline = time.monotonic() + _SECONDS
    try:
        while "run" not in _page(f"{url}/api/v1/checkpoints"):
            assert service.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        assert "stylesheet" in _page(f"{url}/jobs")
        service.send_signal(signal.SIGTERM)
        assert service.wait(_SECONDS) == 0, (folder / "log").read_text()
    finally:
        service.kill()


def _page(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def main() -> None:
    """Try these extras; the first failure ends the program."""
    extras = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try_commands(folder, extras)
        for trial in (try_torch, try_server):
            if trial.__name__.removeprefix("try_") in extras:
                trial(folder)
        for module in [module for extra in extras for module in _MODULES.get(extra, ())]:
            importlib.import_module(module)
        if "demo" in extras:
            assert "checks passed" in dcp("demo", *(["--s3"] if "demo-s3" in extras else []))


if __name__ == "__main__":
    main()
