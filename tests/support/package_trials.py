"""What the extras of an installed package promise, tried with that package: the standard library is all else.

``python -I package_trials.py EXTRA...`` in an environment with these extras, and nothing of a checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
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
_SECONDS = (
    900.0  # for whatever is waited for; the demo takes a minute on a machine that has nothing else to do
)
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
    """It gets ready, has the checkpoint, which its client reads, has pages, and ends when it is told to."""
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
        style = re.search(r'href="(/[^"]+\.css)"', _text(port, "/jobs"))
        assert style
        assert "{" in _text(port, style[1])
        service.send_signal(signal.SIGTERM)
        assert service.wait(_SECONDS) == 0, (folder / "log").read_text()
    finally:
        service.kill()


def _is_ready(port: int) -> bool:
    try:
        return bool(_text(port, "/readyz"))
    except OSError:
        return False


def _text(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


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


def try_accelerate(folder: Path) -> None:
    """A state is saved by Accelerate's call, and comes back by it."""
    import torch
    from accelerate import Accelerator

    import dcp.integrations.accelerate as plugin

    accelerator = Accelerator(cpu=True)
    plugin.use(accelerator)
    layer: Any = accelerator.prepare(torch.nn.Linear(2, 2))
    weights = layer.weight.detach().clone()
    accelerator.save_state(str(folder / "accelerate"))
    accelerator.end_training()
    torch.nn.init.zeros_(layer.weight)
    accelerator.load_state(str(folder / "accelerate"))
    assert torch.equal(layer.weight, weights)


def try_transformers(folder: Path) -> None:
    """The Trainer goes on from what it saved: with one step, then with one more."""
    import torch
    from transformers import TrainingArguments

    from dcp.integrations.huggingface import DcpTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.trained = torch.nn.Linear(2, 2), 0

        def forward(self, x: Any, labels: Any) -> Any:
            self.trained += 1
            return {"loss": (self.layer(x) - labels).square().mean()}

    data: Any = [{"x": torch.ones(2), "labels": torch.zeros(2)}] * 8
    for steps in (1, 2):
        options = TrainingArguments(
            str(folder / "trainer"), max_steps=steps, save_steps=1, use_cpu=True, report_to=[]
        )
        trainer = DcpTrainer(model := Model(), options, train_dataset=data)
        trainer.train(resume_from_checkpoint=steps == 2)
        assert (trainer.state.global_step, model.trained) == (steps, 1)
    dcp("verify", folder / "trainer/checkpoint-2")


def try_lightning(folder: Path) -> None:
    """The same by Lightning's Trainer."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp.integrations.lightning import DcpCheckpointIO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.trained = torch.nn.Linear(2, 2), 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trained += 1
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader: Any = torch.utils.data.DataLoader(torch.ones(8, 2))  # type: ignore[arg-type]
    for steps in (1, 2):
        saves = ModelCheckpoint(dirpath=folder / "lightning", every_n_train_steps=1, save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=steps, logger=False, plugins=[DcpCheckpointIO()], callbacks=[saves]
        )
        trainer.fit(module := Module(), loader, ckpt_path="last" if steps == 2 else None)
        assert module.trained == 1
    dcp("verify", folder / "lightning/last.ckpt")


def try_torchdata(folder: Path) -> None:
    """A loader goes on with the batch after those that were taken."""
    import dcp as package
    from dcp.integrations.torchdata import RescalableDataLoader

    def loader() -> Any:
        return RescalableDataLoader(range(6), batch_size=2)

    state = {"loader": loader()}
    assert next(iter(state["loader"])).tolist() == [0, 1]
    package.save(state, checkpoint_id=folder / "torchdata")
    state = {"loader": loader()}
    package.load(state, checkpoint_id=folder / "torchdata")
    assert [batch.tolist() for batch in state["loader"]] == [[2, 3], [4, 5]]


def try_ray(folder: Path) -> None:
    """A training of one worker reports what it saved."""
    os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    def train() -> None:
        import torch

        from dcp.integrations.ray import RayCheckpointManager

        with RayCheckpointManager(every_steps=1) as manager:
            manager.save(1, {"w": torch.ones(2)})

    ray.init("local", num_cpus=2, include_dashboard=False)  # none that somebody else has started
    config = ray.train.RunConfig(name="run", storage_path=str(folder / "ray"))
    result: Any = TorchTrainer(train, torch_config=TorchConfig(backend="gloo"), run_config=config).fit()
    dcp("verify", result.checkpoint.path)
    ray.shutdown()


def try_torchtitan(folder: Path) -> None:
    """The manager that its trainer makes saves a step, and goes on with it."""
    import torch
    import torch.distributed as dist

    from dcp.integrations.torchtitan import DcpCheckpointManager

    class Part:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def manager(model: torch.nn.Module, part: Part) -> Any:
        parts: dict[str, Any] = dict.fromkeys(("optimizers", "dataloader", "lr_schedulers"), Part(0))
        parts |= {"model_parts": [model], "states": {"train_state": part}, "sd_adapter": None}
        parts["base_folder"] = str(folder / "torchtitan")
        options: Any = {"enable": True, "interval": 1, "async_mode": "async"}
        if hasattr(DcpCheckpointManager, "Config"):
            return DcpCheckpointManager.Config(**options).build(**parts)
        from torchtitan.config import Checkpoint  # before 0.3

        return DcpCheckpointManager(checkpoint_config=Checkpoint(**options), **parts)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved, loaded = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    writing, reading = manager(saved, Part(7)), manager(loaded, part := Part(0))
    assert writing.save(1)
    writing.close()
    assert reading.load()
    reading.close()
    assert torch.equal(loaded.weight, saved.weight)
    assert part.value == 7
    dist.destroy_process_group()


def try_demo(folder: Path, *options: str) -> None:
    """Training, kills, resumption, service: each of its checks passes."""
    assert "checks passed" in dcp("demo", *options)


def try_demo_s3(folder: Path) -> None:
    """The same on an S3 server, which it starts."""
    try_demo(folder, "--s3")


def try_bench(folder: Path) -> None:
    """What the benchmarks time ours beside is there."""
    import torch_checkpointing

    assert torch_checkpointing


def main() -> None:
    """Every trial of these extras; the first that fails ends it."""
    extras = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try_commands(folder)
        try_what_is_left_out(folder, extras)
        for extra in sorted(extras - ({"demo"} if "demo-s3" in extras else set())):
            if trial := globals().get(f"try_{extra.replace('-', '_')}"):
                trial(folder)
                print(f"tried {extra}")


if __name__ == "__main__":
    main()
