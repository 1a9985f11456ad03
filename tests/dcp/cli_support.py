"""Checkpoints to look at, and the command line in this process."""

import io
import json
from collections import OrderedDict
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from dcp.cli.app import app


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, parsed."""
        return json.loads(self.out)


def run(*arguments: str | Path) -> Outcome:
    """Run ``dcp`` with ``arguments`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app(args=[str(argument) for argument in arguments], prog_name="dcp")
        except SystemExit as exit_:
            status = exit_.code
    assert isinstance(status, int | None)
    return Outcome(status or 0, out.getvalue(), err.getvalue())


def state() -> dict[str, Any]:
    """A small state dict: nesting, empty and scalar tensors, plain and other objects."""
    generator = torch.Generator().manual_seed(5)
    return {
        "model": {
            "embed": torch.randn(300, 70, generator=generator),
            "layers": [{"w": torch.randn(8, 8, generator=generator)}, {"w": torch.ones(8, 8)}],
            "empty": torch.zeros(0, 3),
            "scale": torch.tensor(2.0, dtype=torch.bfloat16),
        },
        "step": 7,
        "lr": [0.1, (1, 2)],
        "by_rank": {0: "zero"},
        "device": torch.device("cpu"),
        "schedule": OrderedDict(warmup=float("inf")),
    }


def save_ours(path: Path, state_dict: dict[str, Any] | None = None) -> Path:
    """A checkpoint of ours."""
    dcp.save(state() if state_dict is None else state_dict, checkpoint_id=path, no_dist=True)
    return path


def save_stock(path: Path, state_dict: dict[str, Any] | None = None) -> Path:
    """A checkpoint of stock torch."""
    stock_save(state() if state_dict is None else state_dict, checkpoint_id=path, no_dist=True)
    return path


def data_file(checkpoint: Path) -> Path:
    """The one data file of a checkpoint of one rank."""
    (path,) = checkpoint.glob("*.distcp")
    return path


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
