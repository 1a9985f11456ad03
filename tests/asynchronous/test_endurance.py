"""Many asynchronous saves in a row: each is its own snapshot, and after the second nothing grows.

What is saved changes in every way that training changes it: in place, by other tensors in the old ones'
places, by other memory under the same tensor. Each save begins before the one before it is looked at.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.state_dict_saver import SaveFuture
from tests.support.background import NotedPids
from tests.support.processes import open_files
from tests.support.ranks import run_ranks
from tests.support.values import local_parts

TIMEOUT_SECONDS = 240.0

ELEMENTS = 1 << 16
TENSORS = 8
STATE_BYTES = 4 * ELEMENTS * TENSORS

GROWTH_BYTES = 16 << 20
"""More than this after the second save is a leak: of a hundred saves 164 KiB each, of fourteen 1.2 MiB, where
the state has 2 MiB.

Measured were 0.3 to 4.3 MiB, most of it where the machine was busy: heaps of short-lived threads, and pages
that a process shares with the one that it was forked from until it counts a reference in them.
"""

RECORDED_COLLECTIVES = 2000
"""torch keeps a record of so many, about 1 KiB each, whoever makes them."""

Road = Literal["async_save", "thread", "process"]


@dataclass(frozen=True)
class Footprint:
    """What a process holds: resident and private dirty bytes, descriptors, threads, and what it maps or has
    open in /dev/shm."""

    resident_bytes: int
    dirty_bytes: int
    fds: int
    threads: int
    named: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Of a process of ours, now."""
        folder = Path(f"/proc/{pid}")
        lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        opened = open_files(pid)
        named = sum("/dev/shm/" in line for line in (folder / "maps").read_text().splitlines())
        return cls(
            sizes["Rss"],
            sizes["Private_Dirty"],
            len(opened),
            len(list((folder / "task").iterdir())),
            named + sum(path.startswith("/dev/shm/") for path in opened),
        )


def settled(pid: int, held: Footprint) -> Footprint:
    """What a process holds; what it has beyond ``held`` and is about to give back gets time to go."""
    deadline = time.monotonic() + 60.0
    while True:
        now = Footprint.of(pid)
        if (now.threads <= held.threads and now.fds <= held.fds) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


class Changing:
    """A state of which every element tells the version; with several ranks a quarter of it is sharded."""

    def __init__(self) -> None:
        self.whole = [torch.arange(ELEMENTS, dtype=torch.int32) * (k + 3) for k in range(TENSORS)]
        self.tensors = {f"t{k}": torch.zeros_like(whole) for k, whole in enumerate(self.whole)}
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for name in ("t0", "t4"):
                self.tensors[name] = distribute_tensor(self.tensors[name], mesh, [Shard(0)])
                self.whole[int(name[1])] = distribute_tensor(self.whole[int(name[1])], mesh, [Shard(0)])
        self.notes: list[Any] = []
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def become(self, version: int) -> dict[str, Any]:
        """The state of ``version``."""
        for k, whole in enumerate(self.whole):
            tensor, wanted = self.tensors[f"t{k}"], whole + version
            if k % 4 == 2:
                tensor.data = wanted
            elif k % 4 == 3:
                self.tensors[f"t{k}"] = wanted
            else:
                tensor.copy_(wanted)
        self.notes[:] = [version, ["none", None]]
        return self.state(version)

    def state(self, version: int) -> dict[str, Any]:
        """What is saved, or loaded into."""
        own = dcp.PerRank({"rank": self.rank, "version": version})
        return {"model": self.tensors, "notes": self.notes, "own": own, "version": version}

    def is_version(self, state: dict[str, Any], version: int) -> bool:
        """Whether a loaded ``state`` of this object is that version in every element."""
        pairs = zip(self.tensors.values(), self.whole, strict=True)
        return (
            all(
                torch.equal(got, wanted + version)
                for tensor, whole in pairs
                for got, wanted in zip(local_parts(tensor), local_parts(whole), strict=True)
            )
            and state["notes"] == [version, ["none", None]]
            and state["own"].value == {"rank": self.rank, "version": version}
            and state["version"] == version
        )


class Saving:
    """One of the roads: `dcp.async_save` to a folder for each version, or a manager that keeps two."""

    def __init__(self, root: Path, road: Road) -> None:
        self.root, self.road = root, road
        self.noted = NotedPids(root.with_name(f"{root.name}-pids"))
        self.future: SaveFuture | None = None
        self.manager: dcp.CheckpointManager | None = None
        if road != "async_save":
            self.manager = dcp.CheckpointManager(
                root,
                mode=road,
                keep=dcp.Retention(last=2),
                writer=self.noted.writer,
                timeout_seconds=TIMEOUT_SECONDS,
            )

    def save(self, version: int, state: dict[str, Any]) -> SaveFuture:
        """Begin a save of ``state``."""
        if self.manager is not None:
            self.future = self.manager.save(version, state)
        else:
            shutil.rmtree(self.checkpoint_id(version - 2), ignore_errors=True)
            writer = dcp.FileSystemWriter(self.checkpoint_id(version), sync_files=False)
            self.future = dcp.async_save(state, storage_writer=writer)
        assert self.future is not None
        return self.future

    def checkpoint_id(self, version: int) -> str:
        """Where a version is."""
        return str(self.root / str(version)) if self.manager is None else self.manager.checkpoint_id(version)

    def settle(self) -> None:
        """Until nothing is under way, and what was freed is given back."""
        assert self.future is not None
        self.future.result(TIMEOUT_SECONDS)
        if self.manager is not None:
            assert self.manager.wait(TIMEOUT_SECONDS)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def pids(self) -> list[int]:
        """This process, and the one that writes for it."""
        return [os.getpid(), *(self.noted.others() if self.road == "process" else ())]

    def close(self) -> None:
        """The end."""
        if self.manager is not None:
            self.manager.close()


def endure(rank: int, world_size: int, root: Path, road: Road, saves: int) -> dict[str, Any]:
    """So many saves: which were not their own snapshot, and what was held after two and at the end."""
    for _ in range(RECORDED_COLLECTIVES):
        dist.all_reduce(torch.zeros(1))
    changing, target = Changing(), Changing()
    saving = Saving(root, road)
    wrong: list[int] = []

    def look(version: int) -> None:
        state = target.state(0)
        dcp.load(state, checkpoint_id=saving.checkpoint_id(version))
        if not target.is_version(state, version):
            wrong.append(version)

    previous: SaveFuture | None = None
    for version in range(1, saves + 1):
        future = saving.save(version, changing.become(version))
        changing.become(-version)  # what the save must not see
        if previous is not None:
            previous.result(TIMEOUT_SECONDS)
            look(version - 1)
        previous = future
        if version == 2:
            saving.settle()
            pids = saving.pids()
            before = [Footprint.of(pid) for pid in pids]
    saving.settle()
    look(saves)
    saving.settle()
    after = [settled(pid, held) for pid, held in zip(pids, before, strict=True)]
    same_process = saving.pids() == pids
    saving.close()
    return {"wrong": wrong, "before": before, "after": after, "same process": same_process}


@pytest.mark.parametrize("saves", [14, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("road", "world_size"),
    [("async_save", 1), ("thread", 2), ("process", 1)],
)
def test_saves_are_their_own_snapshots_and_leave_nothing(
    tmp_path: Path, road: Road, world_size: int, saves: int
) -> None:
    """Every element of each is of its version. Memory, descriptors and threads of trainers and writer are as
    after the second save, nothing has a name in /dev/shm, and one writer process did all of it."""
    for result in run_ranks(world_size, endure, tmp_path, road, saves):
        assert result["wrong"] == []
        assert result["same process"]
        for before, after in zip(result["before"], result["after"], strict=True):
            assert after.resident_bytes - before.resident_bytes < GROWTH_BYTES
            assert after.dirty_bytes - before.dirty_bytes < GROWTH_BYTES
            assert after.fds <= before.fds
            assert after.threads <= before.threads
            assert (before.named, after.named) == (0, 0)
    assert len(list(tmp_path.iterdir())) == 2
