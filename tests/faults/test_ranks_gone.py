"""Ranks that are absent, or end while the group forms: an error within the timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.processes import busy_seconds
from tests.support.rank_acts import STATE, outcome

_OWN_STATUS = 7


def _rank_2_stays_away(rank: int, world_size: int, root: Path, how: str, bound_seconds: float) -> Any:
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    try:
        act = _prepared(rank, root, how, bound_seconds)
        _meet(store, "ready", rank, world_size)
        begun = time.monotonic() - busy_seconds()
        found = (*outcome(act), time.monotonic() - busy_seconds() - begun) if rank != 2 else None
        _meet(store, "done", rank, world_size)
    finally:  # no rank waits for a failed rank
        for word in ("ready", "done"):
            store.set(f"{word}/{rank}", "1")
    os._exit(0) if found is None else None
    return found


def _meet(store: dist.Store, word: str, rank: int, world_size: int) -> None:
    store.set(f"{word}/{rank}", "1")
    store.wait([f"{word}/{other}" for other in range(world_size)], timedelta(seconds=120))


def _prepared(rank: int, root: Path, how: str, bound_seconds: float) -> Callable[[], Any]:
    """Prepare all that takes time once, so that only the call without rank 2 is left to measure."""
    bound: dict[str, Any] = {"timeout_seconds": bound_seconds}
    if how in ("thread", "process"):
        manager = dcp.CheckpointManager(root, mode=how, **bound)  # type: ignore[arg-type]
        manager.save(1, STATE)
        manager.wait()

        def save() -> None:
            future = manager.save(2, STATE)
            assert future is not None
            future.result()

        return save
    if how == "save after a refused one":
        a_class: Any = dcp.FileSystemWriter if rank == 1 else None
        names, *_ = outcome(lambda: dcp.save(STATE, checkpoint_id=root, storage_writer=a_class))
        assert "RankFailedError" in names
    elif how.startswith("first"):
        dcp.save(STATE, checkpoint_id=root / f"alone-{rank}", no_dist=True)
    else:
        dcp.save(STATE, checkpoint_id=root)
    return {
        "save": lambda: dcp.save(STATE, checkpoint_id=root, **bound),
        "load": lambda: dcp.load({"w": torch.zeros(6)}, checkpoint_id=root, **bound),
        "manager": lambda: dcp.CheckpointManager(root, **bound),
    }[how.removeprefix("first ").split()[0]]


_WAITS = ("first save", "manager", "thread")
_OTHER_WAITS = (*("process", "first load", "first manager", "load", "save", "save after a refused one"),)


@pytest.mark.parametrize("waits", [_WAITS, pytest.param(_OTHER_WAITS, marks=pytest.mark.exhaustive)])
def test_the_timeout_bounds_the_whole_wait(tmp_path: Path, waits: tuple[str, ...]) -> None:
    """The timeout bounds the whole wait, including heartbeats and messages between trainers and writers. The
    error names the absent rank alone. If others are late on a busy machine, the test repeats with more
    time."""
    late = {}
    for factor in (1, 2, 4):
        bounds = [factor * (10.0 if how == "process" else 3.0) for how in waits]
        groups = [
            Group(3, _rank_2_stays_away, (tmp_path / f"{how} {bound}", how, bound))
            for how, bound in zip(waits, bounds, strict=True)
        ]
        found = zip(waits, bounds, in_lab(run_groups, groups), strict=True)
        late = {
            how: endings
            for how, bound, (*endings, _) in found
            if not all(_raises_in_time(ending, bound) for ending in endings)
        }
        if not late:
            return
        waits = tuple(late)
    raise AssertionError(late)


def _raises_in_time(ending: Ending, bound_seconds: float) -> bool:
    if ending.value is None:
        return False
    names, message, _, seconds = ending.value
    is_named = "CollectiveTimeoutError" in names and "rank 2 of 3 died or did not answer" in message
    return is_named and seconds < bound_seconds + 1.5


def _rank_0_ends_while_the_group_forms(rank: int, world_size: int, root: Path, kind: str, when: str) -> Any:
    store = _store_of_rank_0(rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    dist.barrier()
    dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=5))  # type: ignore[union-attr]
    if rank == 0:

        def end(*args: Any, **options: Any) -> Any:
            if when == "late":
                time.sleep(1.0)
            os._exit(_OWN_STATUS)

        dist.ProcessGroupGloo = end  # type: ignore[misc, assignment]
    return outcome(
        lambda: dcp.async_save(
            STATE, checkpoint_id=root, async_checkpointer_type=dcp.AsyncCheckpointerType(kind)
        ).result(240)
    )


def _store_of_rank_0(rank: int) -> dist.Store:
    group_store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    timeout = timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timeout)
        group_store.set("port of rank 0", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(group_store.get("port of rank 0")), None, timeout=timeout)


@pytest.mark.parametrize("kind", [pytest.param("thread", marks=pytest.mark.exhaustive), "process"])
def test_survivors_name_rank_0_if_group_setup_fails(tmp_path: Path, kind: str) -> None:
    """The survivors raise a dcp error that names rank 0, instead of torch's socket error."""
    groups = [
        Group(3, _rank_0_ends_while_the_group_forms, (tmp_path / when, kind, when))
        for when in ("early", "late")
    ]
    for first, *others in in_lab(run_groups, groups):
        assert first == Ending(signal=-_OWN_STATUS)
        for ending in others:
            assert ending.raised is None, ending.raised.traceback_text
            assert ending.value is not None, ending
            names, message, ranks = ending.value
            assert "CollectiveTimeoutError" in names, ending
            assert ranks == [0], message
