"""The optimizer of old steps is dropped from what several ranks have saved, in files of their own; ranks are
killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

import dcp
from dcp.inspection.verification import verify
from dcp.manager.cleanup import post_commit
from dcp.manager.cleanup.dropping import Drop, drop_parts
from dcp.storage.stores import PosixStore
from dcp.storage.stores.base import Store
from dcp.storage.stores.names import TEMPORARY_PREFIX
from tests.support.crashes import Ending, Group, in_lab, kill_rank, run_groups
from tests.support.with_optimizer import full_state, parts_there, stock_sees

KEEP = dcp.Retention(optimizer=dcp.Keep(last=1))
NOBODY = -1
LAST = 3


def sharded_state(world_size: int, version: int) -> dict[str, Any]:
    """`full_state`, whose tensors are cut by rows over all ranks."""
    mesh = init_device_mesh("cpu", (world_size,))

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return distribute_tensor(value, mesh, [Shard(0)])

    state: dict[str, Any] = tree_map(cut, full_state(version))
    return state


def train(rank: int, world_size: int, root: Path, victim: int, at: int) -> list[str]:
    """Three steps are saved; ``victim`` is killed before the drops' step ``at`` on storage. Their steps."""
    steps: list[str] = []

    def observe(op: str, name: str) -> None:
        steps.append(op)
        if len(steps) == at:
            kill_rank(victim)

    def watched(store: Store, *args: Any) -> Drop:
        assert isinstance(store, PosixStore)
        return drop_parts(PosixStore(store.url, observe=observe), *args)

    pytest.MonkeyPatch().setattr(post_commit, "drop_parts", watched)  # this process is of this run alone
    with dcp.CheckpointManager(root, keep=KEEP, mode="sync", timeout_seconds=30.0) as manager:
        for step in range(1, LAST + 1):
            # A survivor's failed saves are told by events; what is on the storage is looked at.
            manager.save(step, sharded_state(world_size, step))
            manager.wait()
        dist.barrier()  # who may be killed by the last drop must be there
    return steps


def there(root: Path) -> list[tuple[str, str]]:
    """By step that is there what dcp and stock torch find; each is readable, whoever was killed."""
    folders = [folder for folder in sorted(root.iterdir()) if (folder / "manifest.msgpack").exists()]
    for folder in folders:
        assert {found.kind for found in verify(folder).findings} <= {"stray-file", "metadata"}, folder
    return [
        (parts_there(path, number), stock_sees(path, number)) for number, path in enumerate(folders, start=1)
    ]


@dataclass(frozen=True)
class Loss:
    """What one killed rank left, and what the next manager, of one process, made of it."""

    case: tuple[int, int]
    endings: list[Ending]
    seen: list[tuple[str, str]]
    after: list[tuple[str, str]]
    findings: list[Any]


def every_loss(root: Path, some: Callable[[list[str]], list[int]]) -> tuple[list[Ending], Any, list[Loss]]:
    """An undisturbed run, what it left by step, and what each kill did at ``some`` of its steps."""
    (endings,) = run_groups([Group(2, train, (root / "whole", NOBODY, 0))])
    apart = [
        sorted(path.name.split(".")[0] for path in folder.glob("*.distcp"))
        for folder in steps_in(root / "whole")
    ]
    cases = [(victim, at) for at in some(endings[0].value) for victim in (0, 1)]
    groups = [Group(2, train, (root / f"{victim}-{at}", victim, at)) for victim, at in cases]
    losses = []
    for case, ended in zip(cases, run_groups(groups, at_once=4), strict=True):
        folder = root / "-".join(map(str, case))
        seen = there(folder)
        with dcp.CheckpointManager(folder, keep=KEEP, no_dist=True) as manager:
            manager.save(len(seen) + 1, full_state(len(seen) + 1))
        findings = [found for step in steps_in(folder) for found in verify(step).findings]
        losses.append(Loss(case, ended, seen, there(folder), findings))
    return endings, (apart, there(root / "whole")), losses


def steps_in(root: Path) -> list[Path]:
    """Folders of steps."""
    return sorted(root.iterdir())


def around_the_commit(steps: list[str]) -> list[int]:
    """The first drop's first commit, and what follows it."""
    first = steps.index("rename") + 1
    return [first, first + 1]


def all_of_them(steps: list[str]) -> list[int]:
    """Each step of the drops."""
    return [*range(1, len(steps) + 1)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "some",
    [around_the_commit, pytest.param(all_of_them, marks=pytest.mark.exhaustive)],
    ids=lambda one: one.__name__,
)
def test_ranks_that_are_killed_while_a_part_is_dropped(tmp_path: Path, some: Any) -> None:
    """Each rank's own files of the optimizer go, and nothing else. If a rank is killed, every step is
    whole or without it, for dcp and for stock, and the next manager, of one process, ends the work."""
    endings, (apart, whole), losses = in_lab(every_loss, tmp_path, some, timeout_seconds=800)
    assert all(ending.raised is None for ending in endings)
    assert apart == [["__0_0", "__1_0"]] * 2 + [["__0_0", "__0_1", "__1_0", "__1_1"]]
    assert whole == [("weights", "weights")] * 2 + [("whole", "whole")]
    for loss in losses:
        victim, _ = loss.case
        assert loss.endings[victim].killed and not loss.endings[1 - victim].hung, loss
        assert 2 <= len(loss.seen) <= LAST, loss
        assert {dcp_sees for dcp_sees, _ in loss.seen} <= {"whole", "weights"}, loss
        assert {by_stock for _, by_stock in loss.seen} <= {"whole", "weights"}, loss
        assert loss.seen[-1] == ("whole", "whole"), loss
        assert loss.after == [("weights", "weights")] * len(loss.seen) + [("whole", "whole")], loss
        # Of a publish that was cut off its temporary file is left, which dcp gc removes.
        assert all((found.file or "").startswith(TEMPORARY_PREFIX) for found in loss.findings), loss
