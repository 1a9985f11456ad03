"""`dcp.async_save`: what it returns, what it has saved, and what becomes of its failures."""

from __future__ import annotations

import copy
import errno
import textwrap
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import staging as stock_staging
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.background.session import AsyncSession
from dcp.saving.options import SaveOptions
from dcp.state_dict_saver import AsyncSaveResponse
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.support.programs import run_program
from tests.support.ranks import run_ranks
from tests.support.values import leaves, raw
from tests.support.versions import seen_by_dcp, seen_by_stock, version_state


def overwrite(state: Any) -> None:
    """What a training step does: every tensor gets other values, every list and dict other entries."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["lr"][0] = -1.0
    state["step"] = -1


def test_one_future_serves_both_usages(tmp_path: Path) -> None:
    """`result()` gives the Metadata; the completions of torch's AsyncSaveResponse are there too."""
    state = version_state(7)
    future = dcp.async_save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert isinstance(future, Future)
    assert isinstance(future, AsyncSaveResponse)
    assert future.staging_completion.result(240) is None
    assert future.upload_completion.result(240) is future.result()
    assert isinstance(future.result(), Metadata)
    assert set(future.result().state_dict_metadata) >= {"model.w", "model.layers.0", "step"}
    assert future.outcome is not None
    assert future.outcome.attempts == 1
    assert future.outcome.seconds["write"] > 0
    assert seen_by_dcp(tmp_path / "x") == seen_by_stock(tmp_path / "x") == 7


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    """Tensors, lists and values are as they were when the call returned, whatever training does next."""
    for version in range(1, 6):
        state = version_state(version, large=1 << 18)
        future = dcp.async_save(state, checkpoint_id=tmp_path / str(version), no_dist=True)
        overwrite(state)
        future.result(240)
        assert seen_by_dcp(tmp_path / str(version), large=1 << 18) == version


def test_one_writer_may_be_pointed_at_the_next_id_while_it_saves(tmp_path: Path) -> None:
    """The caller's writer object is not the one that the save under way uses."""
    writer = dcp.FileSystemWriter(tmp_path)
    futures = [
        dcp.async_save(
            version_state(version), storage_writer=writer, checkpoint_id=tmp_path / str(version), no_dist=True
        )
        for version in range(1, 5)
    ]
    for version, future in enumerate(futures, start=1):
        future.result(240)
        assert seen_by_dcp(tmp_path / str(version)) == version


class Renaming(dcp.DefaultSavePlanner):
    """The first example of torch's documentation: it stays on columns."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Prefix every key."""
        super().set_up_planner({f"p_{key}": value for key, value in state_dict.items()}, *args, **kwargs)


class Halving(dcp.DefaultSavePlanner):
    """The second: it overrides steps, and takes torch's road."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Negate what is written."""
        object = super().transform_object(write_item, object)
        return -object if isinstance(object, torch.Tensor) else object


def test_custom_planners_and_stagers(tmp_path: Path) -> None:
    """Planners of torch's documentation, torch's own stagers and torch's own writer work as in torch."""
    w = torch.arange(6.0)
    dcp.async_save({"w": w}, checkpoint_id=tmp_path / "r", planner=Renaming(), no_dist=True).result(240)
    dcp.async_save({"w": w}, checkpoint_id=tmp_path / "h", planner=Halving(), no_dist=True).result(240)
    for name, stager in {
        "blocking": stock_staging.BlockingAsyncStager(),
        "default": stock_staging.DefaultStager(stock_staging.StagingOptions(False, False, True, False)),
    }.items():
        future = dcp.async_save({"w": w}, checkpoint_id=tmp_path / name, async_stager=stager, no_dist=True)
        future.staging_completion.result(240)
        future.result(240)
        stager.close()
    dcp.async_save({"w": w}, storage_writer=StockWriter(tmp_path / "stock"), no_dist=True).result(240)
    for folder, key, factor in (
        ("r", "p_w", 1.0),
        ("h", "w", -1.0),
        ("blocking", "w", 1.0),
        ("default", "w", 1.0),
        ("stock", "w", 1.0),
    ):
        state = {key: torch.zeros(6)}
        dcp.load(state, checkpoint_id=tmp_path / folder, no_dist=True)
        assert state[key].equal(w * factor), folder


class Stale(stock_staging.BlockingAsyncStager):
    """A stager with a cache that it forgets to fill again."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The first state for ever."""
        if self.state_dict_cache is None:
            self.state_dict_cache = copy.deepcopy(state_dict)
        return self.state_dict_cache


class Lazy(stock_staging.BlockingAsyncStager):
    """A stager that copies nothing."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state itself."""
        return dict(state_dict)


def test_a_stale_or_shared_copy_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    """A stager whose copy is not a copy of this state cannot make a silently wrong checkpoint."""
    stale = Stale()
    w = torch.arange(100.0)
    dcp.async_save({"w": w}, checkpoint_id=tmp_path / "1", async_stager=stale, no_dist=True).result(240)
    w += 1
    future = dcp.async_save({"w": w}, checkpoint_id=tmp_path / "2", async_stager=stale, no_dist=True)
    with pytest.raises(dcp.errors.StagingError, match="'w'"):
        future.result(240)
    shared = dcp.async_save({"w": w}, checkpoint_id=tmp_path / "3", async_stager=Lazy(), no_dist=True)
    with pytest.raises(dcp.errors.StagingError, match="'w'"):
        shared.result(240)
    assert isinstance(shared.staging_completion.exception(240), dcp.errors.StagingError)
    assert not (tmp_path / "2" / ".metadata").exists()


def test_errors_are_those_of_the_future(tmp_path: Path) -> None:
    """What fails in the background raises at `result()`, typed; the next save is not affected by it."""
    (tmp_path / "file").write_text("in the way")
    future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "file" / "x", no_dist=True)
    with pytest.raises(dcp.errors.StorageError):
        future.result(240)
    bad = dcp.async_save({"s": torch.eye(3).to_sparse()}, checkpoint_id=tmp_path / "s", no_dist=True)
    with pytest.raises(dcp.errors.PlanError, match="to_dense"):
        bad.result(240)
    dcp.async_save(version_state(3), checkpoint_id=tmp_path / "x", no_dist=True).result(240)
    assert seen_by_dcp(tmp_path / "x") == 3
    with pytest.raises(dcp.CheckpointError, match="`checkpoint_id` must be specified"):
        dcp.async_save({"w": torch.ones(3)}, no_dist=True)


def failing(path: Any, *, faults: tuple[Fault, ...]) -> FaultInjectingStore:
    """A local folder whose operations fail as told."""
    return FaultInjectingStore(PosixStore(path), *faults)


def test_failed_attempts_are_repeated_from_the_same_copy(tmp_path: Path) -> None:
    """With retries a passing fault costs an attempt, not the checkpoint, and what is saved is the copy."""
    faults = (Fault("create", at=1, error=dcp.errors.StorageError("injected", errno=errno.EIO)),)
    stores: list[FaultInjectingStore] = []

    def open_store(path: Any) -> FaultInjectingStore:
        if not stores:
            stores.append(failing(path, faults=faults))
        return stores[0]

    session = AsyncSession(no_dist=True, timeout_seconds=240)
    writer = dcp.FileSystemWriter(tmp_path / "x", open_store=open_store)
    state = version_state(5)
    future = session.save(
        state, storage_writer=writer, options=SaveOptions(retries=2, retry_pause_seconds=0.01)
    )
    overwrite(state)
    future.result(240)
    session.close()
    assert future.outcome is not None
    assert future.outcome.attempts == 2
    assert seen_by_dcp(tmp_path / "x") == 5


def test_a_full_disk_is_not_tried_again(tmp_path: Path) -> None:
    """It stays full until somebody frees space: the error comes at once, from the first attempt."""
    faults = tuple(
        Fault("create", at=at, error=dcp.errors.StorageFullError("injected", errno=errno.ENOSPC))
        for at in (1, 2, 3)
    )
    stores: list[FaultInjectingStore] = []

    def open_store(path: Any) -> FaultInjectingStore:
        stores.append(failing(path, faults=faults))
        return stores[-1]

    session = AsyncSession(no_dist=True, timeout_seconds=240)
    writer = dcp.FileSystemWriter(tmp_path / "x", open_store=open_store)
    future = session.save(
        version_state(5), storage_writer=writer, options=SaveOptions(retries=2, retry_pause_seconds=60)
    )
    with pytest.raises(dcp.errors.StorageFullError):
        future.result(30)
    session.close()
    assert sum(operation.op == "create" for store in stores for operation in store.log) == 1


def test_abort_calls_a_save_off(tmp_path: Path) -> None:
    """A save that was called off leaves nothing, and the session goes on."""
    reached, gate = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        reached.set()
        gate.wait(240)

    session = AsyncSession(no_dist=True, timeout_seconds=240)
    open_store = partial(failing, faults=(Fault("create", hook=hold),))
    writer = dcp.FileSystemWriter(tmp_path / "x", open_store=open_store)
    future = session.save(version_state(1), storage_writer=writer)
    assert reached.wait(240)
    future.abort()
    gate.set()
    with pytest.raises(dcp.errors.SaveAbortedError):
        future.result(240)
    assert not (tmp_path / "x").exists()
    session.save(version_state(2), storage_writer=dcp.FileSystemWriter(tmp_path / "x")).result(240)
    session.close()
    assert seen_by_dcp(tmp_path / "x") == 2


def test_close_waits_for_the_saves_under_way(tmp_path: Path) -> None:
    """After close everything that was begun is committed; a closed session takes no more."""
    slow = Fault("write", delay_seconds=0.3)
    session = AsyncSession(no_dist=True, in_flight=2, timeout_seconds=240)
    futures = [
        session.save(
            version_state(version),
            storage_writer=dcp.FileSystemWriter(
                tmp_path / str(version), open_store=partial(failing, faults=(slow,))
            ),
        )
        for version in (1, 2)
    ]
    session.close()
    assert all(future.done() for future in futures)
    assert [seen_by_dcp(tmp_path / str(version)) for version in (1, 2)] == [1, 2]
    with pytest.raises(dcp.CheckpointError, match="closed"):
        session.save({}, storage_writer=dcp.FileSystemWriter(tmp_path / "3"))


def test_a_script_that_ends_has_saved(tmp_path: Path) -> None:
    """Interpreter exit waits for the commit, also after an exception in the main thread."""
    script = textwrap.dedent(
        """
        import sys, torch, dcp
        dcp.async_save({"w": torch.arange(1 << 22)}, checkpoint_id=sys.argv[1], no_dist=True)
        raise SystemExit(3)
        """
    )
    ended = run_program("-c", script, tmp_path / "x", finalizes=True)
    assert ended.returncode == 3
    state = {"w": torch.zeros(1 << 22, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert state["w"].equal(torch.arange(1 << 22))


# -- ranks ---------------------------------------------------------------------------------------------------


def sharded_state(rank: int, version: int) -> dict[str, Any]:
    """A sharded and a replicated tensor, a value of the rank's own, a step."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(version)
    whole = torch.randn(13, 5)
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "plain": whole.sum(0),
        "own": dcp.PerRank(rank * 100 + version),
        "step": version,
    }


def save_while_training(rank: int, world_size: int, root: Path) -> list[Any]:
    """Saves in the background while the training's own collectives run on the same group, and changes what
    was staged at once."""
    results = []
    for version in range(1, 9):
        state = sharded_state(rank, version)
        future = dcp.async_save(state, checkpoint_id=root / str(version))
        state["sharded"].to_local().zero_()
        state["plain"].zero_()
        for _ in range(20):
            value = torch.ones(3)
            dist.all_reduce(value)
            assert value.eq(world_size).all()
        if version % 3 == 0:
            future.result(240)
    future.result(240)
    for version in range(1, 9):
        wanted, state = sharded_state(rank, version), sharded_state(rank, 0)
        dcp.load(state, checkpoint_id=root / str(version))
        same = [raw(state[k].to_local()) == raw(wanted[k].to_local()) for k in ("sharded",)]
        same += [
            state["plain"].equal(wanted["plain"]),
            state["own"] == wanted["own"],
            state["step"] == version,
        ]
        results.append(all(same))
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_saves_run_beside_the_trainings_collectives(tmp_path: Path, world_size: int) -> None:
    """The saves have a group of their own: eight of them under way in turn, each is its own snapshot."""
    for result in run_ranks(world_size, save_while_training, tmp_path):
        assert result == [True] * 8


def fail_on_one_rank(rank: int, world_size: int, root: Path) -> list[Any]:
    """A state that only one rank cannot stage, and a save after it."""
    state = sharded_state(rank, 1)
    if rank == 1:
        state["bad"] = torch.eye(2).to_sparse()
    future = dcp.async_save(state, checkpoint_id=root / "bad")
    error = future.exception(240)
    dcp.async_save(sharded_state(rank, 2), checkpoint_id=root / "good").result(240)
    return [
        type(error).__mro__[1].__name__,
        getattr(error, "ranks", None),
        isinstance(error, dcp.errors.PlanError),
    ]


def test_staging_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    """Nobody waits for a rank whose state could not be staged: all get its error, the next save works."""
    results = run_ranks(3, fail_on_one_rank, tmp_path)
    assert results == [["RankFailedError", [1], True]] * 3
    assert not (tmp_path / "bad" / "manifest.msgpack").exists()


def abort_on_one_rank(rank: int, world_size: int, root: Path) -> list[Any]:
    """One of the ranks calls the save off while another holds it up."""
    gate = threading.Event()

    def hold(operation: Operation) -> None:
        gate.wait(240)

    session = AsyncSession(timeout_seconds=240)
    writer = dcp.FileSystemWriter(
        root / "x", open_store=partial(failing, faults=(Fault("create", hook=hold),))
    )
    future = session.save(sharded_state(rank, 1), storage_writer=writer)
    time.sleep(0.2)
    if rank == world_size - 1:
        future.abort()
    gate.set()
    error = future.exception(240)
    session.save(sharded_state(rank, 2), storage_writer=dcp.FileSystemWriter(root / "x")).result(240)
    session.close()
    return [isinstance(error, dcp.errors.SaveAbortedError), getattr(error, "ranks", None)]


def test_an_abort_reaches_all_ranks(tmp_path: Path) -> None:
    """Any rank may call a save off; it fails on all, and the session goes on."""
    assert run_ranks(2, abort_on_one_rank, tmp_path) == [[True, [1]]] * 2


def after_destroy(rank: int, world_size: int, root: Path) -> bool:
    """The script's own group is gone before the save has ended."""
    slow = Fault("write", delay_seconds=0.5)
    session = AsyncSession(timeout_seconds=240)
    writer = dcp.FileSystemWriter(root / "x", open_store=partial(failing, faults=(slow,)))
    future = session.save(sharded_state(rank, 1), storage_writer=writer)
    dist.destroy_process_group()
    future.result(240)
    session.close()
    return future.outcome is not None


def test_destroying_the_process_group_does_not_disturb_a_save(tmp_path: Path) -> None:
    """A script that ends with destroy_process_group() has saved nevertheless."""
    assert run_ranks(2, after_destroy, tmp_path) == [True, True]
    index = dcp.open_index(tmp_path / "x")
    assert {"sharded", "plain"} <= set(index.fqns)


def two_sessions(rank: int, world_size: int, root: Path) -> list[bool]:
    """Two sessions of one process in turn; one of them fails all the time."""
    good, bad = AsyncSession(timeout_seconds=240), AsyncSession(timeout_seconds=240)
    broken = partial(
        failing,
        faults=(Fault("create", onwards=True, error=dcp.errors.StorageError("injected", errno=errno.EIO)),),
    )
    results = []
    for version in range(1, 5):
        failed = bad.save(
            sharded_state(rank, version), storage_writer=dcp.FileSystemWriter(root / "b", open_store=broken)
        )
        saved = good.save(
            sharded_state(rank, version), storage_writer=dcp.FileSystemWriter(root / str(version))
        )
        results += [saved.exception(240) is None, isinstance(failed.exception(240), dcp.errors.StorageError)]
    good.close()
    bad.close()
    return results


def test_two_sessions_do_not_influence_each_other(tmp_path: Path) -> None:
    """Failures of one leave the other alone."""
    assert run_ranks(2, two_sessions, tmp_path) == [[True] * 8] * 2


def test_views_are_copied_alone(tmp_path: Path) -> None:
    """A view of a large tensor takes no more host memory than what it views."""
    session = AsyncSession(no_dist=True, timeout_seconds=240)
    big = torch.zeros(1 << 20)
    future = session.save({"view": big[:1000]}, storage_writer=dcp.FileSystemWriter(tmp_path / "x"))
    future.result(240)
    session.close()
    assert future.outcome is not None
    assert future.outcome.staged_bytes == 4000


def plans_of_saves(rank: int, world_size: int, root: Path) -> list[bool]:
    """Which saves of a session used a plan again; in the third a tensor has grown."""
    session = AsyncSession(timeout_seconds=240)
    reused = []
    for version in range(1, 5):
        state = sharded_state(rank, version)
        if version > 2:
            state["plain"] = torch.arange(7.0)
        writer = dcp.FileSystemWriter(root / str(version))
        future = session.save(state, storage_writer=writer)
        future.result(240)
        assert future.outcome is not None
        assert {"digests", "write", "blocked", "staging"} <= set(future.outcome.seconds)
        reused.append(future.outcome.plan_reused)
    session.close()
    return reused


def test_a_session_plans_an_unchanged_structure_once(tmp_path: Path) -> None:
    """The second save of a session exchanges digests only; a changed structure is planned anew."""
    assert run_ranks(2, plans_of_saves, tmp_path) == [[False, True, False, True]] * 2
    for version in range(1, 5):
        state: dict[str, Any] = {"plain": torch.zeros(7 if version > 2 else 5), "step": 0}
        dcp.load(state, checkpoint_id=tmp_path / str(version), no_dist=True)
        assert state["step"] == version
        if version > 2:
            assert state["plain"].equal(torch.arange(7.0))
