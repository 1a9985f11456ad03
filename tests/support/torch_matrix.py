"""Checkpoints written by each version of torch, read by each other.

``python -m tests.support.torch_matrix PYTHON...``: interpreters of environments with a torch of their own
each. Two ranks write what has DTensors, plain tensors and values, by stock torch and, where that version is
supported, by ours; one rank reads it whole, and two ranks read it sharded otherwise, by both again. The table
goes to stdout, what failed to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # up to 2.4
    from torch.distributed._tensor import (  # type: ignore[attr-defined]
        Replicate,
        Shard,
        distribute_tensor,
    )

__all__ = ["matrix", "table"]

RANKS = 2
OURS = ((2, 10), (2, 15))
"""Versions that ours is for; others are stock alone."""

NAMES = ("rows", "columns", "replicated")
SIZES = {"rows": (5, 4), "columns": (3, 6), "replicated": (4,)}


def packages() -> list[str]:
    """Whose save and load this interpreter has."""
    major, minor = torch.__version__.split(".")[:2]
    return ["stock", "ours"] if OURS[0] <= (int(major), int(minor)) <= OURS[1] else ["stock"]


def package(name: str) -> Any:
    """The module with save and load."""
    if name == "ours":
        import dcp

        return dcp
    return torch.distributed.checkpoint


def full(name: str) -> torch.Tensor:
    """The values of a tensor."""
    size = SIZES[name]
    count = int(torch.tensor(size).prod())
    return torch.arange(float(count)).reshape(size) + NAMES.index(name) / 10


def state(*, filled: bool, swapped: bool = False, sharded: bool = True) -> dict[str, Any]:
    """What is saved, or the same with other values to load into; ``swapped`` shards rows by columns."""
    tensors = {name: full(name) if filled else torch.zeros(SIZES[name]) for name in NAMES}
    plain = torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16)
    return {
        "model": {name: shard(name, value, swapped) for name, value in tensors.items()}
        if sharded
        else tensors,
        "plain": plain if filled else torch.zeros_like(plain),
        "optimizer": {"step": torch.tensor(3 if filled else 0), "lr": 0.1 if filled else 0.0},
        "epoch": 7 if filled else 0,
        "names": ["a", "b"] if filled else [],
    }


def shard(name: str, value: torch.Tensor, swapped: bool) -> Any:
    """A DTensor over all ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))
    dims = {"rows": 1 if swapped else 0, "columns": 0 if swapped else 1}
    placement = Shard(dims[name]) if name in dims else Replicate()
    return distribute_tensor(value, mesh, [placement])


def differing(loaded: dict[str, Any]) -> list[str]:
    """Names of entries that are not what was saved."""
    tensors = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in loaded["model"].items()
    }
    expected = state(filled=True, sharded=False)
    wrong = [name for name in NAMES if not torch.equal(tensors[name], expected["model"][name])]
    wrong += ["plain"] if not torch.equal(loaded["plain"], expected["plain"]) else []
    wrong += ["step"] if not torch.equal(loaded["optimizer"]["step"], expected["optimizer"]["step"]) else []
    wrong += [name for name in ("epoch", "names") if loaded[name] != expected[name]]
    return wrong + (["lr"] if loaded["optimizer"]["lr"] != expected["optimizer"]["lr"] else [])


def _begin(rank: int, meeting: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(meeting, RANKS), rank=rank, world_size=RANKS)


def _end() -> None:
    dist.barrier()
    os._exit(0)  # at the end of the interpreter a thread of torch's may abort the process


def _write(rank: int, meeting: str, whose: str, folder: str) -> None:
    _begin(rank, meeting)
    package(whose).save(state(filled=True), checkpoint_id=folder)
    _end()


def _read(rank: int, meeting: str, whose: str, folders: list[str], answer: str) -> None:
    _begin(rank, meeting)
    found = {folder: _attempt(whose, folder) for folder in folders}
    everybody: list[Any] = [None] * RANKS
    dist.all_gather_object(everybody, found)
    if rank == 0:
        told = {folder: next(filter(None, (part[folder] for part in everybody)), "") for folder in folders}
        Path(answer).write_text(json.dumps(told))
    _end()


def _attempt(whose: str, folder: str) -> str:
    """What is wrong with a checkpoint that this rank reads together with the others; empty for nothing."""
    target = state(filled=False, swapped=True)
    try:
        package(whose).load(target, checkpoint_id=folder)
        wrong = differing(target)
    except BaseException as error:  # noqa: BLE001 - whatever stock torch raises is the answer
        return f"{type(error).__name__}: {error}"
    return f"differs: {wrong}" if wrong else ""


def _alone(whose: str, folder: str) -> str:
    target = state(filled=False, sharded=False)
    try:
        package(whose).load(target, checkpoint_id=folder)
        wrong = differing(target)
    except BaseException as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {error}"
    return f"differs: {wrong}" if wrong else ""


def _spawn(function: Any, *args: Any) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        # torch takes a process longer to import than all that is done here; nothing has a thread yet
        start_processes(function, (f"{meeting}/store", *args), nprocs=RANKS, start_method="fork")  # type: ignore[no-untyped-call]


def write(folder: Path) -> dict[str, str]:
    """By name the folders of what this interpreter writes."""
    made = {}
    version = torch.__version__.partition("+")[0]
    for whose in packages():
        name = f"{whose} {version}"
        _spawn(_write, whose, str(folder / name))
        made[name] = str(folder / name)
    return made


def read(folders: list[str]) -> dict[str, dict[str, str]]:
    """By reader and folder what was wrong."""
    version = torch.__version__.partition("+")[0]
    together = {}
    for whose in packages():
        with tempfile.TemporaryDirectory() as place:
            answer = Path(place) / "answer"
            _spawn(_read, whose, folders, str(answer))
            together[whose] = json.loads(answer.read_text())
    return {
        f"{whose} {version}": {folder: found[folder] or _alone(whose, folder) for folder in folders}
        for whose, found in together.items()
    }


def _ask(python: str, *arguments: str) -> Any:
    run = subprocess.run(
        [python, "-m", "tests.support.torch_matrix", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def matrix(pythons: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """By reader and writer what was wrong, empty for nothing; checkpoints go below ``folder``."""
    written: dict[str, str] = {}
    for python in pythons:
        written |= _ask(python, "--write", str(folder))
    names = {place: name for name, place in written.items()}
    found: dict[str, dict[str, str]] = {}
    for python in pythons:
        answers = _ask(python, "--read", *written.values())
        for reader, by_folder in answers.items():
            found[reader] = {names[place]: wrong for place, wrong in by_folder.items()}
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """The matrix as Markdown: a line for each writer, a column for each reader."""
    readers = list(found)
    lines = ["| written by | " + " | ".join(readers) + " |", "|---" * (len(readers) + 1) + "|"]
    for writer in found[readers[0]]:
        cells = [found[reader][writer].partition(":")[0] or "yes" for reader in readers]
        lines.append(f"| {writer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Carry out the command line."""
    warnings.simplefilter("ignore")
    if arguments[0] == "--write":
        print(json.dumps(write(Path(arguments[1]))))
    elif arguments[0] == "--read":
        print(json.dumps(read(arguments[1:])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = matrix(arguments, Path(folder))
        for reader, answers in found.items():
            for writer, wrong in answers.items():
                if wrong:
                    print(f"{reader} reading {writer}: {wrong}", file=sys.stderr)
        print(table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
