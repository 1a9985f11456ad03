"""`dcp.async_save`: what it returns, what it has saved, and what becomes of its failures."""

from __future__ import annotations

import copy
import errno
import gc
import threading
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
from dcp.errors import PlanError, StagingError, StorageError, StorageFullError
from dcp.staging import BlockingAsyncStager, DefaultStager
from dcp.state_dict_saver import AsyncSaveResponse
from tests.support.background import FileGate, gated_writer, slow_writer
from tests.support.manager_runs import Fault, FaultyWriter, manager_of, until
from tests.support.ranks import run_ranks
from tests.support.values import leaves, raw
from tests.support.versions import seen_by_dcp, seen_by_stock, version_state

save = partial(dcp.async_save, no_dist=True)


def overwrite(state: Any) -> None:
    """What a training step does: every tensor gets other values, every list other entries."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["lr"][0] = -1.0
    state["step"] = -1


# -- what is saved -------------------------------------------------------------------------------------------


def test_one_future_serves_both_usages(tmp_path: Path) -> None:
    """`result()` gives the Metadata; the completions of torch's AsyncSaveResponse are there too."""
    future = save(version_state(7), checkpoint_id=tmp_path / "x")
    assert isinstance(future, Future) and isinstance(future, AsyncSaveResponse)
    assert future.staging_completion.result(240) is None
    assert future.upload_completion.result(240) is future.result()
    assert isinstance(future.result(), Metadata)
    assert set(future.result().state_dict_metadata) >= {"model.w", "model.layers.0", "step"}
    assert future.outcome is not None and future.outcome.attempts == 1 and future.outcome.seconds["write"] > 0
    assert seen_by_dcp(tmp_path / "x") == seen_by_stock(tmp_path / "x") == 7


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    """Tensors, lists and values are as they were when the call returned, though storage gets them later; two
    saves are under way, by one writer object that is pointed at the next id meanwhile."""
    gate = FileGate(tmp_path / "gate")
    futures = [save(version_state(1, large=1 << 18), storage_writer=gated_writer(tmp_path / "1", gate))]
    writer = dcp.FileSystemWriter(tmp_path)
    for version in range(2, 6):
        state = version_state(version, large=1 << 18)
        futures.append(save(state, storage_writer=writer, checkpoint_id=tmp_path / str(version)))
        overwrite(state)
        if version == 2:
            assert not futures[0].done()
            gate.open()
    for version, future in enumerate(futures, start=1):
        future.result(240)
        assert seen_by_dcp(tmp_path / str(version), large=1 << 18) == version


class Renaming(dcp.DefaultSavePlanner):
    """The first example of torch's documentation: it renames."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Prefix every key."""
        super().set_up_planner({f"p_{key}": value for key, value in state_dict.items()}, *args, **kwargs)


class Negating(dcp.DefaultSavePlanner):
    """The second: it overrides steps."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Negate what is written."""
        object = super().transform_object(write_item, object)
        return -object if isinstance(object, torch.Tensor) else object


def test_planners_stagers_and_writers_of_torch_work(tmp_path: Path) -> None:
    """Planners of torch's documentation, torch's own stagers, and torch's own writer."""
    w = torch.arange(6.0)
    save({"w": w}, checkpoint_id=tmp_path / "r", planner=Renaming()).result(240)
    save({"w": w}, checkpoint_id=tmp_path / "h", planner=Negating()).result(240)
    for name, stager in {
        "blocking": stock_staging.BlockingAsyncStager(),
        "default": stock_staging.DefaultStager(stock_staging.StagingOptions(False, False, True, False)),
    }.items():
        future = save({"w": w}, checkpoint_id=tmp_path / name, async_stager=stager)
        future.staging_completion.result(240)
        future.result(240)
        stager.close()
    save({"w": w}, storage_writer=StockWriter(tmp_path / "stock")).result(240)
    wanted = {"r": ("p_w", w), "h": ("w", -w), "blocking": ("w", w), "default": ("w", w), "stock": ("w", w)}
    for folder, (key, value) in wanted.items():
        dcp.load(state := {key: torch.zeros(6)}, checkpoint_id=tmp_path / folder, no_dist=True)
        assert state[key].equal(value), folder


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, Negating])
def test_a_stager_that_uses_its_memory_again_harms_no_save(tmp_path: Path, planner: Any) -> None:
    """Three saves by one stager that has memory for one: each is its own snapshot."""
    stagers: list[Any] = [DefaultStager(), BlockingAsyncStager(cache_staged_state_dict=True)]
    for number, stager in enumerate(stagers):
        futures = []
        for version in (1, 2, 3):
            state = {"w": torch.full((1000,), float(version))}
            writer = slow_writer(tmp_path / f"{number}-{version}", 0.1)
            futures.append(save(state, storage_writer=writer, planner=planner(), async_stager=stager))
            state["w"].zero_()
        for version, future in enumerate(futures, start=1):
            future.result(240)
            found = dcp.read(tmp_path / f"{number}-{version}")["w"]
            assert found.abs().eq(version).all(), (number, version)


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
    """A stager whose copy is none of this state cannot make a silently wrong checkpoint."""
    stale, w = Stale(), torch.arange(100.0)
    save({"w": w}, checkpoint_id=tmp_path / "1", async_stager=stale).result(240)
    w += 1
    for name, stager in (("2", stale), ("3", Lazy())):
        future = save({"w": w}, checkpoint_id=tmp_path / name, async_stager=stager)
        for failed in (future, future.staging_completion):
            with pytest.raises(StagingError, match="'w'"):
                failed.result(240)
        assert not (tmp_path / name / ".metadata").exists()


def test_a_view_is_copied_alone(tmp_path: Path) -> None:
    """It takes no more host memory than what it views."""
    future = save({"view": torch.zeros(1 << 20)[:1000]}, checkpoint_id=tmp_path / "x")
    future.result(240)
    assert future.outcome is not None and future.outcome.staged_bytes == 4000


def test_saves_in_and_out_of_inference_mode(tmp_path: Path) -> None:
    """Host memory first used in inference mode takes the next state, too."""
    for version, mode in enumerate([True, False, True, False], start=1):
        with torch.inference_mode(mode):
            future = save(version_state(version), checkpoint_id=tmp_path / str(version))
        future.result(240)
        assert seen_by_dcp(tmp_path / str(version)) == version


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, Renaming])
def test_a_default_device_is_not_where_copies_are_made(tmp_path: Path, planner: Any) -> None:
    """Scripts set one for their models; host buffers are not affected."""
    w = torch.arange(1 << 18).view(512, 512).t()
    conj = torch.full((3,), 1j).conj()
    with torch.device("meta"):
        state = {"w": w, "none": torch.zeros(0, device="cpu"), "conj": conj}
        dcp.save(state, checkpoint_id=tmp_path / "sync", no_dist=True, planner=planner())
        save(state, checkpoint_id=tmp_path / "async", planner=planner()).result(240)
    for name in ("sync", "async"):
        found = dcp.read(tmp_path / name)
        key = "p_" if planner is Renaming else ""
        assert found[f"{key}w"].equal(w) and found[f"{key}conj"].equal(conj.resolve_conj())


# -- failures ------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_future(tmp_path: Path) -> None:
    """What fails behind the call raises at `result()`, typed and with the name; the next save is fine."""
    (tmp_path / "file").write_text("in the way")
    cases: list[tuple[dict[str, Any], Path, type[Exception], str]] = [
        ({"w": torch.ones(3)}, tmp_path / "file" / "x", StorageError, "file"),
        ({"s": torch.eye(3).to_sparse()}, tmp_path / "s", PlanError, "to_dense"),
        (
            {"hooks": {"scale": lambda loss: loss * 2}},
            tmp_path / "h",
            PlanError,
            r"'hooks\.scale', a function",
        ),
    ]
    for state, folder, kind, text in cases:
        with pytest.raises(kind, match=text):
            save(state, checkpoint_id=folder).result(240)
    save(version_state(3), checkpoint_id=tmp_path / "x").result(240)
    assert seen_by_dcp(tmp_path / "x") == 3
    with pytest.raises(dcp.CheckpointError, match="`checkpoint_id` must be specified"):
        save({"w": torch.ones(3)})


def test_a_full_disk_is_not_tried_again(tmp_path: Path) -> None:
    """It stays full until somebody frees space: the error comes from the first attempt."""
    seen: list[object] = []
    full = StorageFullError("injected", errno=errno.ENOSPC)
    writer = FaultyWriter([Fault("create", onwards=True, hook=seen.append, error=full)])
    options: dict[str, Any] = {"retries": 2, "retry_pause_seconds": 60, "on_failure": "raise"}
    manager = manager_of(tmp_path, writer=writer, **options)
    future = manager.save(1, version_state(5))
    assert future is not None and isinstance(future.exception(30), StorageFullError)
    with pytest.raises(StorageFullError):
        manager.close()
    assert len(seen) == 1


def leave(progress: Any) -> None:
    """A progress callback that ends the program."""
    raise SystemExit(progress.phase)


def test_a_failing_progress_callback_harms_no_save(tmp_path: Path) -> None:
    """The checkpoint is more than its progress bar; not even SystemExit ends the thread that writes."""
    for version in (1, 2):
        save(version_state(version), checkpoint_id=tmp_path / str(version), progress=leave).result(240)
        assert seen_by_dcp(tmp_path / str(version)) == version


# -- the end -------------------------------------------------------------------------------------------------


def test_a_dropped_manager_ends_with_its_last_save(tmp_path: Path) -> None:
    """Without close its writer goes when what is under way is committed."""

    def threads() -> int:
        gc.collect()
        return sum(thread.name == "dcp-writer" for thread in threading.enumerate())

    before, gate = threads(), FileGate(tmp_path / "gate")
    writer = partial(gated_writer, gate=gate)
    manager: Any = manager_of(tmp_path, writer=writer, handle_sigterm=False)
    future = manager.save(1, version_state(1))
    del manager
    gate.open()
    future.result(240)
    del future
    until(lambda: threads() <= before, "the end of its thread")
    assert seen_by_dcp(tmp_path / "step-00000001") == 1


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


def is_saved(rank: int, folder: Path, version: int) -> bool:
    """Whether a checkpoint is that of a version in every bit."""
    wanted, state = sharded_state(rank, version), sharded_state(rank, 0)
    dcp.load(state, checkpoint_id=folder)
    return (
        raw(state["sharded"].to_local()) == raw(wanted["sharded"].to_local())
        and state["plain"].equal(wanted["plain"])
        and state["own"] == wanted["own"]
        and state["step"] == version
    )


def save_while_training(rank: int, world_size: int, root: Path) -> list[bool]:
    """Saves while the training's own collectives run on the same group; what was staged changes at once."""
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
    return [is_saved(rank, root / str(version), version) for version in range(1, 9)]


def test_saves_run_beside_the_trainings_collectives(tmp_path: Path) -> None:
    """They have a group of their own: eight of them, two under way at a time, each its own snapshot."""
    assert run_ranks(2, save_while_training, tmp_path) == [[True] * 8] * 2


class Refusing:
    """A `Stateful` whose state cannot be asked for."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        """Raise."""
        raise self.error("asked for the state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


UNSTAGED: dict[str, Any] = {
    "sparse": {"bad": torch.eye(2).to_sparse()},
    "failing": {"bad": Refusing(RuntimeError)},
    "interrupted": {"bad": Refusing(KeyboardInterrupt)},
    "changed": {},
}


def fail_on_one_rank(rank: int, world_size: int, root: Path, how: str) -> list[Any]:
    """How a save ends that only one rank cannot stage, and a save after it."""
    state = sharded_state(rank, 1) | (UNSTAGED[how] if rank == 1 else {})
    stager = Lazy() if how == "changed" and rank == 1 else stock_staging.BlockingAsyncStager()
    options: dict[str, Any] = {"async_stager": stager} if how == "changed" else {}
    try:
        error = dcp.async_save(state, checkpoint_id=root / "bad", **options).exception(240)
        ended = [type(error).__mro__[1].__name__, list(getattr(error, "ranks", [])), str(error)]
    except KeyboardInterrupt:
        ended = ["KeyboardInterrupt", [1], ""]
    dcp.async_save(sharded_state(rank, 2), checkpoint_id=root / "good").result(240)
    return [*ended, is_saved(rank, root / "good", 2)]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("sparse", "to_dense"),
        ("failing", "asked for the state"),
        ("interrupted", "staging was ended by a KeyboardInterrupt"),
        ("changed", "'plain'"),
    ],
)
def test_staging_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path, how: str, text: str) -> None:
    """Nobody waits for a rank whose state could not be staged: all get its error, the next save works."""
    other, own, *_ = run_ranks(2, fail_on_one_rank, tmp_path, how)
    assert own[0] == ("KeyboardInterrupt" if how == "interrupted" else "RankFailedError")
    assert (other[0], other[1], own[1]) == ("RankFailedError", [1], [1])
    assert text in other[2] and own[3] and other[3]
    assert not (tmp_path / "bad" / "manifest.msgpack").exists()


def after_destroy(rank: int, world_size: int, root: Path) -> bool:
    """The script's own group is gone before the save has ended."""
    gate = FileGate(root / f"gate-{rank}")
    future = dcp.async_save(sharded_state(rank, 1), storage_writer=gated_writer(root / "x", gate))
    dist.destroy_process_group()
    gate.open()
    future.result(240)
    return future.outcome is not None


def test_destroying_the_process_group_does_not_disturb_a_save(tmp_path: Path) -> None:
    """A script that ends with destroy_process_group() has saved nevertheless."""
    assert run_ranks(2, after_destroy, tmp_path) == [True, True]
    assert {"sharded", "plain"} <= set(dcp.open_index(tmp_path / "x").fqns)


def save_by_a_subgroup(rank: int, world_size: int, root: Path) -> str:
    """What a rank sees that is no member of the group it saves with, and the group's only member."""
    group = dist.new_group([1])
    try:
        dcp.async_save(version_state(1), checkpoint_id=root / "x", process_group=group).result(240)
    except dcp.CheckpointError as error:
        return str(error)
    return "saved"


def test_only_members_of_a_group_save_with_it(tmp_path: Path) -> None:
    """Others get an error that says so."""
    other, member = run_ranks(2, save_by_a_subgroup, tmp_path)
    assert "not a member" in other and member == "saved"


def wait_for_a_key_while_saving(rank: int, world_size: int, root: Path) -> bool:
    """Rank 0 waits for a key, as new groups do, which rank 1 sets after its save has ended."""
    first = dist.distributed_c10d._get_default_store()
    port = 0 if rank == 0 else int(first.get("port"))
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        first.set("port", str(store.port))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    state = {**version_state(1), "own": dcp.PerRank(torch.ones(100))}
    future = dcp.async_save(state, storage_writer=slow_writer(root / "x", 0.3 if rank else 0.0))
    if rank == 0:
        store.get("go")
    else:
        future.result(240)
        store.set("go", "1")
    return future.result(240) is not None


def test_a_save_makes_progress_while_training_waits_for_its_store(tmp_path: Path) -> None:
    """A wait for a key occupies the training's connection to the store; saves have their own."""
    assert run_ranks(2, wait_for_a_key_while_saving, tmp_path) == [True, True]
