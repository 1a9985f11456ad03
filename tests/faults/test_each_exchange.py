"""Ctrl-C on one rank at each exchange of a save, load or proof: the others hear of it, a checkpoint stays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp
from dcp.inspection.verification import verify
from dcp.ranks.collectives import Ranks
from tests.support.ranks import run_ranks
from tests.support.versions import save_version, seen_by_dcp, version_state

OLD, NEW = 1, 2


def left_at(
    rank: int, world_size: int, root: Path, operation: str, victim: int, at: int
) -> tuple[str, float]:
    """How one operation ended, which ``victim`` leaves at its ``at``-th exchange, and lives on; seconds."""
    numbers, wait = itertools.count(1), Ranks._wait

    def interrupted(ranks: Ranks, work: Any) -> None:
        if rank == victim and next(numbers) == at:
            raise KeyboardInterrupt
        wait(ranks, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_wait", interrupted)
        act: Any = getattr(dcp, operation)
        begun, ended = time.monotonic(), "done"
        try:
            act(version_state(NEW), checkpoint_id=root, timeout_seconds=60)
        except KeyboardInterrupt:
            ended = "interrupted"
        except dcp.CheckpointError:
            ended = "failed"
        seconds = time.monotonic() - begun
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    store.set(f"done/{rank}", "1")  # who leaves the group sooner closes connections, which would tell as well
    store.wait([f"done/{other}" for other in range(world_size)], timedelta(seconds=120))
    return ended, seconds


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("operation", "victim", "exchanges"),
    [
        ("save", 1, [5]),
        *(
            pytest.param(operation, victim, itertools.count(1), marks=pytest.mark.exhaustive)
            for operation in ("save", "load", "prove")
            for victim in range(3)
        ),
    ],
)
def test_a_rank_that_leaves_an_exchange_keeps_nobody(
    tmp_path: Path, operation: str, victim: int, exchanges: Iterable[int]
) -> None:
    """The others fail long before their timeout, unless they have all that they need; what is under the id is
    whole, and the new one where a rank has said so."""
    found = 0
    for at in exchanges:
        root = tmp_path / str(at)
        save_version(root, OLD)
        results = run_ranks(3, left_at, root, operation, victim, at)
        if results[victim][0] != "interrupted":
            break  # there were no more exchanges
        found += 1
        others = [result for rank, result in enumerate(results) if rank != victim]
        assert all(ended in ("failed", "done") and seconds < 40 for ended, seconds in others), (at, results)
        version = seen_by_dcp(root)
        assert version in ((OLD, NEW) if operation == "save" else (OLD,)), (at, results)
        assert version == NEW or operation != "save" or "done" not in dict(others), (at, results)
        assert {found.kind for found in verify(root).findings} <= {"stray-file"}, at
    assert found
