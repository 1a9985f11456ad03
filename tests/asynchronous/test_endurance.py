"""Many asynchronous saves in a row: each holds its own version, and resource use does not grow.

The state changes in every way that training changes it: in place, by a new tensor under an old key, and by
new memory of the same tensor. Each save begins before the previous checkpoint is checked.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import dcp
from tests.support.background import NotedPids
from tests.support.processes import open_files
from tests.support.ranks import run_ranks

TIMEOUT_SECONDS = 240.0
ELEMENTS = 1 << 16
TENSORS = 8

GROWTH_BYTES = 8 << 20
"""Largest growth of memory after the second save that is not a leak.

A leak of 84 KiB a save exceeds this after a hundred saves, one of 1.6 MiB after seven; the state has 2 MiB.
Measured growth is 0.3 to 4.3 MiB, most of it on a busy machine: heaps of short-lived threads, and pages of a
forked process that are copied when a reference count in them changes.
"""

RECORDED_COLLECTIVES = 2000
"""torch keeps a record of the last 2000 collectives, about 1 KiB each."""


@dataclass(frozen=True)
class Footprint:
    """Resources of a process: resident and private dirty bytes, descriptors, threads, and files in /dev/shm
    that are mapped or open."""

    resident_bytes: int
    dirty_bytes: int
    fds: int
    threads: int
    named: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Measure a process now."""
        folder, opened = Path(f"/proc/{pid}"), open_files(pid)
        lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        named = (folder / "maps").read_text().count("/dev/shm/")
        named += sum(path.startswith("/dev/shm/") for path in opened)
        return cls(
            sizes["Rss"], sizes["Private_Dirty"], len(opened), len(list((folder / "task").iterdir())), named
        )


def settled(pid: int, held: Footprint) -> Footprint:
    """Measure a process, after up to 60 s for threads and descriptors beyond ``held`` to be released."""
    deadline = time.monotonic() + 60.0
    while True:
        now = Footprint.of(pid)
        if (now.threads <= held.threads and now.fds <= held.fds) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


class Changing:
    """A state in which every element depends on the version."""

    def __init__(self) -> None:
        self.whole = [torch.arange(ELEMENTS, dtype=torch.int32) * (k + 3) for k in range(TENSORS)]
        self.tensors = {f"t{k}": torch.zeros_like(whole) for k, whole in enumerate(self.whole)}
        self.notes: list[Any] = []

    def become(self, version: int) -> dict[str, Any]:
        """Change to ``version``, and return the state."""
        for k, whole in enumerate(self.whole):
            tensor, wanted = self.tensors[f"t{k}"], whole + version
            if k % 4 == 2:
                tensor.data = wanted
            elif k % 4 == 3:
                self.tensors[f"t{k}"] = wanted
            else:
                tensor.copy_(wanted)
        self.notes[:] = [version, ["none", None]]
        return {"model": self.tensors, "notes": self.notes, "version": version}

    def is_saved(self, checkpoint_id: str, version: int) -> bool:
        """Return whether every element of a checkpoint is that of ``version``."""
        found = dcp.read(checkpoint_id, no_dist=True)
        pairs = [(found["model"][f"t{k}"], whole + version) for k, whole in enumerate(self.whole)]
        same = all(torch.equal(*pair) for pair in pairs)
        return same and (found["notes"], found["version"]) == ([version, ["none", None]], version)


def save_many_times(
    rank: int, world_size: int, root: Path, mode: Literal["thread", "process"], saves: int
) -> dict[str, Any]:
    """Save many times; return the versions with wrong values, and footprints after two and all saves."""
    for _ in range(RECORDED_COLLECTIVES):
        dist.all_reduce(torch.zeros(1))
    noted, changing, wrong = NotedPids(root.with_name(f"{root.name}-pids-{rank}")), Changing(), []
    options: dict[str, Any] = {"keep": dcp.Retention(last=2), "timeout_seconds": TIMEOUT_SECONDS}
    with dcp.CheckpointManager(root, mode=mode, writer=noted.writer, **options) as manager:

        def look(version: int) -> None:
            if not changing.is_saved(manager.checkpoint_id(version), version):
                wrong.append(version)

        def pids() -> list[int]:
            assert manager.wait(TIMEOUT_SECONDS)
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            return [os.getpid(), *(noted.others() if mode == "process" else ())]

        previous: Any = None
        for version in range(1, saves + 1):
            future = manager.save(version, changing.become(version))
            changing.become(-version)  # the save must not see these values
            if previous is not None:
                previous.result(TIMEOUT_SECONDS)
                look(version - 1)
            previous = future
            if version == 2:
                before = {pid: Footprint.of(pid) for pid in pids()}
        pids()
        look(saves)
        after = {pid: settled(pid, before[pid]) for pid in pids()}
    return {"wrong": wrong, "before": [*before.values()], "after": [*after.values()]}


_LONG = [("thread", 1, 14), ("thread", 2, 100), ("process", 1, 100)]


@pytest.mark.parametrize(
    ("mode", "world_size", "saves"),
    [("process", 1, 7), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _LONG)],
)
def test_many_saves_keep_their_values_and_leak_nothing(
    tmp_path: Path, mode: str, world_size: int, saves: int
) -> None:
    """Each save has the values of its version, and memory, descriptors and threads of trainers and the one
    writer process do not grow. /dev/shm has no named file."""
    for result in run_ranks(world_size, save_many_times, tmp_path / "run", mode, saves):
        assert result["wrong"] == []
        for before, after in zip(result["before"], result["after"], strict=True):
            assert after.resident_bytes - before.resident_bytes < GROWTH_BYTES
            assert after.dirty_bytes - before.dirty_bytes < GROWTH_BYTES
            assert after.fds <= before.fds
            assert after.threads <= before.threads
            assert (before.named, after.named) == (0, 0)
    assert len(list((tmp_path / "run").iterdir())) == 2
