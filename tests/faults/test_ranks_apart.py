"""Ranks that are not about the same, and ranks that are gone: found out at once, or within the timeout."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.ranks.channel import Channel
from tests.support.ranks import RankDied, RankRaised, run_ranks
from tests.support.ranks import Ranks as RankPool

STATE = {"w": torch.arange(6.0), "step": 3}


class CustomPlanner(DefaultLoadPlanner):
    """Takes torch's road, by objects."""

    def create_local_plan(self) -> Any:
        """As its base."""
        return super().create_local_plan()


class CustomSavePlanner(DefaultSavePlanner):
    """Takes torch's road, by objects."""

    def create_local_plan(self) -> Any:
        """As its base."""
        return super().create_local_plan()


def outcome(act: Callable[[], Any]) -> tuple[tuple[str, ...], str, Any, float]:
    """(classes, message, ranks, seconds) of what ``act`` raises."""
    begun = time.monotonic()
    try:
        act()
    except dcp.CheckpointError as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__)
        return names, str(error), error.facts.get("ranks"), time.monotonic() - begun
    return (), "", None, time.monotonic() - begun


# -- not about the same --------------------------------------------------------------------------------------


def load_different_ids(rank: int, world_size: int, root: Path, kind: str) -> Any:
    """Ranks 0 and 2 load one checkpoint, rank 1 another, or asks for nothing of it."""
    save = dcp.save
    if kind == "stock":
        save = torch.distributed.checkpoint.save
    for name in ("one", "other", "copy"):
        value = 1.0 if name == "other" else 0.0
        if kind != "stock" or rank == 0:
            save(
                {"w": torch.full((64,), value), "step": 1}, checkpoint_id=root / name, no_dist=kind == "stock"
            )
        dist.barrier()
    state: dict[str, Any] = {"w": torch.full((64,), -1.0)}
    if kind == "reads nothing" and rank == 1:
        state = {}
    planner = CustomPlanner() if kind == "objects" else None
    name = "other" if rank == 1 else "one"
    found = outcome(lambda: dcp.load(state, checkpoint_id=root / name, planner=planner, timeout_seconds=120))
    dcp.load({"w": torch.zeros(64)}, checkpoint_id=root / "one", timeout_seconds=120)
    return found, [float(value) for value in set(state.get("w", torch.zeros(0)).tolist())]


@pytest.mark.parametrize("kind", ["columns", "objects", "reads nothing", "stock"])
def test_ranks_that_load_different_ids_are_told(tmp_path: Path, kind: str) -> None:
    """Files of one checkpoint are not looked for in another, nor read there where they have the same names;
    the error has both ids, and the group serves on."""
    for (names, message, _, _), values in run_ranks(3, load_different_ids, tmp_path, kind):
        assert "PlanError" in names, message
        assert "rank 0, 2:" in message and str(tmp_path / "one") in message
        assert "rank 1:" in message and str(tmp_path / "other") in message
        assert values in ([-1.0], [])


def save_different_ids(rank: int, world_size: int, root: Path, kind: str) -> Any:
    """Ranks 0 and 2 save to one id, rank 1 to another; rank 1 or rank 0 may have nothing to write."""
    state: dict[str, Any] = dict(STATE)
    if kind == "writes":
        state["own"] = dcp.PerRank(torch.full((4,), float(rank)))
    if kind == "rank 1 alone writes":
        state = {"own": dcp.PerRank(torch.ones(4))} if rank == 1 else {}
    name = "other" if rank == 1 else "one"
    if kind == "over old ones":
        if rank != 2:
            dcp.save({"w": torch.full((6,), -1.0)}, checkpoint_id=root / name, no_dist=True)
        dist.barrier()
    planner = CustomSavePlanner() if kind == "objects" else None

    def act() -> None:
        if kind == "thread":
            dcp.async_save(state, checkpoint_id=root / name).result(120)
        else:
            dcp.save(state, checkpoint_id=root / name, planner=planner, timeout_seconds=120)

    found = outcome(act)
    dist.barrier()
    left = sorted(str(path.relative_to(root)) for path in root.glob("*/*"))
    if kind == "over old ones":
        old = {"w": torch.zeros(6)}
        dcp.load(old, checkpoint_id=root / name, no_dist=True)
        left = [] if old["w"].tolist() == [-1.0] * 6 and len(left) == 6 else left
    dcp.save(STATE, checkpoint_id=root / "one", timeout_seconds=120)
    return found, left


@pytest.mark.parametrize(
    "kind", ["one has nothing", "rank 1 alone writes", "writes", "objects", "thread", "over old ones"]
)
def test_ranks_that_save_to_different_ids_are_told(tmp_path: Path, kind: str) -> None:
    """Also where a rank has nothing to write, so that no file of its own is missing: the error has both ids,
    nothing is left behind, what was there stays, and the group serves on."""
    for (names, message, _, _), left in run_ranks(3, save_different_ids, tmp_path, kind):
        assert "PlanError" in names, message
        assert "rank 0, 2:" in message and str(tmp_path / "one") in message
        assert "rank 1:" in message and str(tmp_path / "other") in message
        assert left == []


def save_by_other_names(rank: int, world_size: int, root: Path) -> Any:
    """Each rank knows the folder by another name, and rank 1 has nothing to write."""
    if rank == 0:
        (root / "real").mkdir()
    dist.barrier()
    (root / f"name-{rank}").symlink_to(root / "real")
    dcp.save(STATE, checkpoint_id=root / f"name-{rank}" / "step-1")
    dcp.save(STATE, checkpoint_id=root / f"name-{rank}" / "step-1")
    state: dict[str, Any] = {"w": torch.zeros(6), "step": 0}
    dcp.load(state, checkpoint_id=root / "real" / "step-1")
    return state["w"].tolist(), state["step"], len(list((root / "real" / "step-1").iterdir()))


def test_one_target_may_have_several_names(tmp_path: Path) -> None:
    """Nothing but the checkpoint is there afterwards."""
    assert run_ranks(2, save_by_other_names, tmp_path) == [(STATE["w"].tolist(), 3, 3)] * 2  # type: ignore[attr-defined]


def load_by_other_names(rank: int, world_size: int, root: Path) -> Any:
    """Each rank knows the checkpoint by another name."""
    dcp.save(STATE, checkpoint_id=root / "real")
    (root / f"name-{rank}").symlink_to(root / "real")
    state: dict[str, Any] = {"w": torch.zeros(6), "step": 0}
    dcp.load(state, checkpoint_id=root / f"name-{rank}")
    return state["w"].tolist(), state["step"]


def test_one_checkpoint_may_have_several_names(tmp_path: Path) -> None:
    """A mount that is called otherwise on another host is the same storage."""
    assert run_ranks(2, load_by_other_names, tmp_path) == [(STATE["w"].tolist(), 3)] * 2  # type: ignore[attr-defined]


def different_operations(rank: int, world_size: int, root: Path, other: str) -> Any:
    """Rank 0 saves; rank 1 does something else."""
    target = root / "new"
    dcp.save(STATE, checkpoint_id=root / "old")

    def act() -> None:
        if rank == 0:
            dcp.save(STATE, checkpoint_id=target)
        elif other == "load":
            dcp.load({"w": torch.zeros(6)}, checkpoint_id=root / "old")
        elif other == "make a manager":
            dcp.CheckpointManager(root / "run")
        elif other == "save alone":
            dcp.save(STATE, checkpoint_id=target, use_collectives=False)
        elif other == "fail":
            dcp.save(STATE)

    found = outcome(act)
    dcp.save(STATE, checkpoint_id=target)
    return found


@pytest.mark.parametrize("other", ["load", "make a manager", "save alone", "fail"])
def test_ranks_in_different_operations_fail_at_once(tmp_path: Path, other: str) -> None:
    """Long before the timeout of 1800 s, by the names of the operations; the next one works."""
    words = {
        "load": ("rank 1: load ", "must call the same function"),
        "make a manager": ("rank 1: session", "must call the same function"),
        "save alone": ("without collectives", "the same options"),
        "fail": ("rank 1", "checkpoint_id"),
    }[other]
    for names, message, _, seconds in run_ranks(2, different_operations, tmp_path, other):
        assert "RankFailedError" in names, message
        assert all(word in message for word in words), message
        assert seconds < 60


def load_a_part(rank: int, world_size: int, root: Path) -> Any:
    """Only rank 1 chooses."""
    dcp.save(STATE, checkpoint_id=root)
    only = "w" if rank == 1 else None
    return outcome(lambda: dcp.load({"w": torch.zeros(6)}, checkpoint_id=root, only=only))


def test_ranks_that_load_otherwise_fail_at_once(tmp_path: Path) -> None:
    """``only`` on some ranks takes a step that the others do not."""
    for names, message, _, seconds in run_ranks(2, load_a_part, tmp_path / "x"):
        assert "PlanError" in names, message
        assert "rank 0: only=None; rank 1: only='w'" in message
        assert seconds < 60


LOAD_OPTIONS: dict[str, tuple[Any, Any]] = {
    "only": ("w", ["step", "w"]),
    "exclude": (None, "step"),
    "per_rank": ("exact", "keep"),
    "unexpected": ("error", "ignore"),
    "dtype": ("exact", "cast"),
    "allow_partial_load": (False, True),
    "weights_only": (True, False),
    "verify": ("blocks", "none"),
}
SAVE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "overwrite": (True, False),
    "torch_compatible": (True, False),
    "sync_files": (True, False),
    "single_file_per_rank": (True, False),
    "replica_check": ("sampled", "off"),
    "split_bytes": (1 << 20, None),
    "dedup_save_to_lowest_rank": (False, True),
}


def options_apart(rank: int, world_size: int, root: Path, way: str) -> Any:
    """For each option the outcome where rank 1 is given another value; then all ranks agree again."""
    dcp.save(STATE, checkpoint_id=root / "old")
    found: dict[str, Any] = {}

    def load(name: str, value: Any) -> None:
        planner = CustomPlanner() if way == "objects" else None
        dcp.load(
            {"w": torch.zeros(6), "step": 0},
            checkpoint_id=root / "old",
            planner=planner,
            timeout_seconds=120,
            **{name: value},
        )

    def save(name: str, value: Any) -> None:
        of_writer = {name: value} if name in signature(dcp.FileSystemWriter).parameters else {}
        cls = CustomSavePlanner if way == "objects" else DefaultSavePlanner
        planner = cls(**({} if of_writer else {name: value}))
        writer = dcp.FileSystemWriter(root / "new" / name, **of_writer)
        if way == "async":
            dcp.async_save(STATE, storage_writer=writer, planner=planner).result(120)
        else:
            dcp.save(STATE, storage_writer=writer, planner=planner, timeout_seconds=120)

    for name, values in LOAD_OPTIONS.items() if way != "async" else ():
        found[name] = outcome(lambda: load(name, values[rank]))  # noqa: B023
    for name, values in SAVE_OPTIONS.items():
        found[name] = outcome(lambda: save(name, values[rank]))  # noqa: B023
    save("overwrite", True)
    load("only", ["w"] if rank == 0 else "w")
    return found, sorted(path.name for path in (root / "new").iterdir())


@pytest.mark.parametrize("way", ["columns", "objects", "async"])
def test_options_that_differ_by_rank_are_told(tmp_path: Path, way: str) -> None:
    """Each by its name, with what each rank has, on all ranks, before anything is written; the group serves
    on, and a list of one pattern is that pattern."""
    for found, left in run_ranks(2, options_apart, tmp_path, way):
        values = SAVE_OPTIONS if way == "async" else LOAD_OPTIONS | SAVE_OPTIONS
        assert found.keys() == values.keys()
        for name, (names, message, ranks, _) in found.items():
            assert "PlanError" in names and "RankFailedError" in names, (name, message)
            for rank, value in enumerate(values[name]):
                assert f"rank {rank}: {name}={value!r}" in message, message
            assert ranks == [1]
        assert left == ["overwrite"]


def other_kinds(rank: int, world_size: int, root: Path, what: str) -> Any:
    """Rank 0 loads into an optimizer, rank 1 into something else at its key."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    others = {
        "its state dict": fresh.state_dict(),
        "an empty dict": {},
        "a module": torch.nn.Linear(3, 2),
        "state dicts on both": fresh.state_dict(),
    }
    state: dict[str, Any] = {"optim": fresh}
    if what == "state dicts on both":
        state["optim"] = {**optimizer.state_dict()}
    if rank == 1:
        state["optim"] = others[what]
    planner = CustomPlanner() if root.name == "objects" else None
    found = outcome(lambda: dcp.load(state, checkpoint_id=root, planner=planner, timeout_seconds=120))
    ignored = outcome(
        lambda: dcp.load(state, checkpoint_id=root, planner=planner, unexpected="ignore", timeout_seconds=120)
    )
    return found, len(fresh.state), ignored


@pytest.mark.parametrize("way", ["columns", "objects"])
@pytest.mark.parametrize("what", ["its state dict", "an empty dict", "a module", "state dicts on both"])
def test_another_kind_of_object_on_one_rank_is_told(tmp_path: Path, what: str, way: str) -> None:
    """It would stay empty there without a word, as the other rank takes what the checkpoint has: the error
    names the key and the rank."""
    for (names, message, ranks, _), filled, (ignored, *_) in run_ranks(2, other_kinds, tmp_path / way, what):
        if what == "state dicts on both":
            assert "UnexpectedKeyError" in names and "'optim.state" in message and ignored == ()
            assert "on rank 1 " in message
        else:
            kind = {"a module": "an object"}.get(what, "a dict")
            assert "PlanError" in names, message
            assert f"'optim' is not of one kind on all ranks: rank 0: an optimizer; rank 1: {kind}" in message
            assert ranks == [1]
        assert filled == 0


def parts_of_a_pipeline(rank: int, world_size: int, root: Path) -> Any:
    """Each rank has layers and an optimizer of its own, under one key; rank 1 has a key more."""
    name = f"layers.{rank}"
    own: Any = {"state": {name: {"step": torch.ones(2)}}, "param_groups": [{"params": [name]}]}
    state: dict[str, Any] = {"model": {name: torch.ones(2)}, "optim": own["state"]}
    if rank == 1:
        state["head"] = {"w": torch.ones(2)}
    dcp.save(state, checkpoint_id=root)
    for tensor in (state["model"][name], own["state"][name]["step"]):
        tensor.zero_()
    dcp.load(state, checkpoint_id=root)
    return state["model"][name].tolist(), own["state"][name]["step"].tolist()


def test_parts_of_a_pipeline_differ(tmp_path: Path) -> None:
    """Keys of one rank alone, and other entries below a key, are no difference of kind."""
    assert run_ranks(2, parts_of_a_pipeline, tmp_path / "x") == [([1.0, 1.0], [1.0, 1.0])] * 2


MANAGER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "mode": ("thread", "sync"),
    "every_steps": (10, 20),
    "every_seconds": (None, 60.0),
    "save_first": (False, True),
    "when_busy": ("wait", "skip"),
    "on_failure": ("warn", "raise"),
    "retries": (2, 0),
    "handle_sigterm": (True, False),
    "agree_every_steps": (1, 2),
}


def managers_apart(rank: int, world_size: int, root: Path) -> Any:
    """For each option the outcome where rank 1 is given another value."""
    found = {
        name: outcome(lambda: dcp.CheckpointManager(root, timeout_seconds=120, **{name: values[rank]}))  # noqa: B023
        for name, values in MANAGER_OPTIONS.items()
    }
    with dcp.CheckpointManager(root, timeout_seconds=120) as manager:
        manager.save(1, STATE, last=True)
    return found


def test_managers_that_are_not_made_alike_are_told(tmp_path: Path) -> None:
    """Their ranks would save other steps, or wait where the others do not; the group serves on."""
    for found in run_ranks(2, managers_apart, tmp_path / "run"):
        for name, (names, message, _, _) in found.items():
            assert "PlanError" in names, (name, message)
            for rank, given in enumerate(MANAGER_OPTIONS[name]):
                value = "given" if name == "every_seconds" and given else given
                assert f"rank {rank}: {name}={value!r}" in message, message


def a_save_meets_a_restore(rank: int, world_size: int, root: Path, mode: Any, due: bool) -> Any:
    """Of one manager: rank 1 restores where the others save, at the second step."""
    every = 1 if due else 100
    manager = dcp.CheckpointManager(root, mode=mode, every_steps=every, timeout_seconds=300)
    state: dict[str, Any] = {"w": torch.ones(6)}
    manager.restore(state)
    manager.save(1, state, force=True)
    told: list[Any] = []

    def save() -> None:
        future = manager.save(2, state)
        if future is not None:
            told.append(outcome(lambda: future.result(120)))
        manager.save(3, state)

    found = outcome(lambda: manager.restore(state)) if rank == 1 else outcome(save)
    begun = time.monotonic()
    manager.close()
    return [*told, found], manager.all_steps(), time.monotonic() - begun


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("mode", ["thread", "process", "sync"])
def test_a_save_that_meets_a_restore_fails_at_once(tmp_path: Path, mode: str, due: bool) -> None:
    """Each rank is told which does what, where the save is waited for, or else at the next step."""
    for told, steps, closing in run_ranks(3, a_save_meets_a_restore, tmp_path / "run", mode, due):
        for names, message, _, seconds in told:
            assert "CheckpointError" in names, message
            assert "rank 1: restore()" in message and "save() or should_save() of step 2" in message
            assert "rank 2:" in message
            assert seconds < 60
        assert steps == [1] and closing < 60


def save_in_other_ways(rank: int, world_size: int, root: Path) -> Any:
    """Rank 1 saves in a process, rank 0 in a thread."""
    kind = dcp.AsyncCheckpointerType.PROCESS if rank == 1 else dcp.AsyncCheckpointerType.THREAD
    return outcome(lambda: dcp.async_save(STATE, checkpoint_id=root, async_checkpointer_type=kind).result(60))


def test_ranks_that_save_in_other_ways_are_told(tmp_path: Path) -> None:
    """A thread and a process would never meet, and wait for each other until the timeout of 1800 s."""
    for names, message, _, _ in run_ranks(2, save_in_other_ways, tmp_path / "x"):
        assert "PlanError" in names, message
        assert "(thread)" in message and "(process)" in message


# -- the timeout ---------------------------------------------------------------------------------------------


def rank_2_stays_away(rank: int, world_size: int, root: Path, how: str) -> Any:
    """Ranks 0 and 1 begin, rank 2 never does."""
    first = how.startswith("first")
    how = how.removeprefix("first ")
    manager = None
    if how in ("thread", "process"):
        manager = dcp.CheckpointManager(root, mode=how, timeout_seconds=4.0)  # type: ignore[arg-type]
        manager.save(1, STATE)
        manager.wait()
    elif not first:
        dcp.save(STATE, checkpoint_id=root)
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{other}" for other in range(world_size)], timedelta(seconds=120))

    def act() -> None:
        if how == "save":
            dcp.save(STATE, checkpoint_id=root, timeout_seconds=4.0)
        elif how == "load":
            dcp.load({"w": torch.zeros(6)}, checkpoint_id=root, timeout_seconds=4.0)
        elif how == "manager":
            dcp.CheckpointManager(root, timeout_seconds=4.0)
        elif manager is not None and (future := manager.save(2, STATE)) is not None:
            future.result()

    found = outcome(act) if rank != 2 else None
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(world_size)], timedelta(seconds=120))
    os._exit(0) if found is None else None
    return found


_OTHER_WAITS = [
    pytest.param(how, marks=pytest.mark.exhaustive)
    for how in ("first save", "first manager", "load", "thread")
]


@pytest.mark.parametrize("how", ["first load", "save", "manager", "process", *_OTHER_WAITS])
def test_the_timeout_is_all_that_a_wait_takes(tmp_path: Path, how: str) -> None:
    """Signs of life, and what trainers and writers tell each other, included; who is missing is named, and
    nobody else."""
    pool = RankPool()
    try:
        results = pool.run(3, rank_2_stays_away, (tmp_path / "x", how), timeout_seconds=240)
    finally:
        pool.close()
    for result in results[:2]:
        names, message, _, seconds = result
        assert "CollectiveTimeoutError" in names, result
        assert "rank 2 of 3 died or did not answer" in message
        assert seconds < 5.5, result


# -- ended while the group forms -----------------------------------------------------------------------------


def rank_0_ends_while_the_group_forms(
    rank: int, world_size: int, root: Path, port: int, kind: str, when: str
) -> Any:
    """Rank 0, which hosts the store, ends where the saves' own group is made."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    dist.barrier()
    dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=5))  # type: ignore[union-attr]
    if rank == 0:

        def end(*args: Any, **options: Any) -> Any:
            if when == "late":
                time.sleep(1.0)
            os._exit(7)

        Channel.own_gloo = end  # type: ignore[method-assign]
    return outcome(
        lambda: dcp.async_save(
            STATE,
            checkpoint_id=root,
            async_checkpointer_type=dcp.AsyncCheckpointerType(kind),
        ).result(240)
    )


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_end_of_rank_0_while_the_group_forms_is_told(tmp_path: Path, kind: str, when: str) -> None:
    """The survivors get an error of ours that names it, and not torch's about sockets."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    pool = RankPool()
    try:
        args = (tmp_path / "x", port, kind, when)
        results = pool.run(3, rank_0_ends_while_the_group_forms, args, timeout_seconds=240)
    finally:
        pool.close()
    assert isinstance(results[0], RankDied)
    for result in results[1:]:
        assert not isinstance(result, RankRaised), result.traceback_text
        names, message, ranks, _ = result
        assert "CollectiveTimeoutError" in names, result
        assert ranks == [0], message
