"""Checkpoints written by each version of torch, read by each other version.

``python -m tests.support.torch_matrix PYTHON...``: interpreters of environments with different versions of
torch. Two ranks write DTensors, plain tensors and values by stock torch and, for supported versions, by dcp.
A single rank reads each checkpoint whole, and two ranks read it with another sharding, by both libraries
again. The table goes to stdout, failures to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4 and earlier
    from torch.distributed._tensor import (  # type: ignore[attr-defined]
        Replicate,
        Shard,
        distribute_tensor,
    )

__all__ = ["matrix", "table"]

RANKS = 2
SUPPORTED = ((2, 10), (2, 15))
"""Versions supported by dcp; all others use stock torch alone."""

SIZES = {"rows": (5, 4), "columns": (3, 6), "replicated": (4,)}
VERSION = torch.__version__.partition("+")[0]
PACKAGES = {"stock": "torch.distributed.checkpoint"}
if SUPPORTED[0] <= tuple(map(int, VERSION.split(".")[:2])) <= SUPPORTED[1]:
    PACKAGES["dcp"] = "dcp"


def state(*, filled: bool, swapped: bool = False, sharded: bool = True) -> dict[str, Any]:
    """Return the state to save, or with other values to load into; ``swapped`` shards rows by columns."""
    model: dict[str, Any] = {}
    for name, size in SIZES.items():
        full = torch.arange(float(torch.tensor(size).prod())).reshape(size) + 0.5
        model[name] = full if filled else torch.zeros(size)
        if sharded:
            placement = Replicate() if name == "replicated" else Shard(int((name == "columns") != swapped))
            model[name] = distribute_tensor(model[name], init_device_mesh("cpu", (RANKS,)), [placement])
    plain = torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16)
    return {
        "model": model,
        "plain": plain if filled else torch.zeros_like(plain),
        "optimizer": {"step": torch.tensor(3 if filled else 0), "lr": 0.1 if filled else 0.0},
        "epoch": 7 if filled else 0,
        "names": ["a", "b"] if filled else [],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _attempt(side: str, folder: str, **options: bool) -> str:
    """Read a checkpoint on all ranks of the process group, and return its problem; empty for none."""
    target = state(filled=False, **options)
    try:
        import_module(PACKAGES[side]).load(target, checkpoint_id=folder)
    except BaseException as error:  # noqa: BLE001 - part of the result
        return f"{type(error).__name__}: {error}"
    found, wanted = _plain(target), _plain(state(filled=True, sharded=False))
    return "" if found == wanted else f"differs: {found}"


def _rank(rank: int, meeting: str, side: str, folders: list[str], answer: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(meeting, RANKS), rank=rank, world_size=RANKS)
    if not answer:
        import_module(PACKAGES[side]).save(state(filled=True), checkpoint_id=folders[0])
    else:
        ranks: list[Any] = [None] * RANKS
        own = {folder: _attempt(side, folder, swapped=True) for folder in folders}
        dist.all_gather_object(ranks, own)
        if rank == 0:
            faults = {folder: next(filter(None, (each[folder] for each in ranks)), "") for folder in folders}
            Path(answer).write_text(json.dumps(faults))
    dist.barrier()
    os._exit(0)  # torch may abort the process in a thread during interpreter shutdown


def _spawn(side: str, folders: list[str], answer: str) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        # fork, since importing torch takes longer than the work; this process has no threads yet
        arguments = (f"{meeting}/store", side, folders, answer)
        start_processes(_rank, arguments, nprocs=RANKS, start_method="fork")  # type: ignore[no-untyped-call]


def write(folder: str) -> dict[str, str]:
    """Write checkpoints with this interpreter; return their folders by name."""
    made = {f"{side} {VERSION}": f"{folder}/{side} {VERSION}" for side in PACKAGES}
    for name, place in made.items():
        _spawn(name.partition(" ")[0], [place], "")
    return made


def read(*folders: str) -> dict[str, dict[str, str]]:
    """Read checkpoints; return the problems by reader and folder."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for side in PACKAGES:
            _spawn(side, [*folders], f"{place}/{side}")
            found[side] = json.loads(Path(place, side).read_text())
    return {
        f"{side} {VERSION}": {each: faults[each] or _attempt(side, each, sharded=False) for each in folders}
        for side, faults in found.items()
    }


def _ask(python: str, *arguments: str) -> Any:
    command = [python, "-m", "tests.support.torch_matrix", *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def matrix(pythons: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return the problems by reader and writer, empty for none; checkpoints go below ``folder``."""
    written: dict[str, str] = {}
    for python in pythons:
        written |= _ask(python, "write", str(folder))
    found: dict[str, dict[str, str]] = {}
    for python in pythons:
        for reader, faults in _ask(python, "read", *written.values()).items():
            found[reader] = {name: faults[place] for name, place in written.items()}
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """Format the matrix as Markdown: a row for each writer, a column for each reader."""
    readers = list(found)
    lines = ["| written by | " + " | ".join(readers) + " |", "|---" * (len(readers) + 1) + "|"]
    for writer in found[readers[0]]:
        cells = [found[reader][writer].partition(":")[0] or "yes" for reader in readers]
        lines.append(f"| {writer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] in ("write", "read"):
        print(json.dumps(write(sys.argv[2]) if sys.argv[1] == "write" else read(*sys.argv[2:])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = matrix(sys.argv[1:], Path(folder))
        for reader, faults in found.items():
            wrong = [f"{reader}, {each}: {faults[each]}" for each in faults if faults[each]]
            print("\n".join(wrong), file=sys.stderr)
        print(table(found))
