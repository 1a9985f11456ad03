"""`dcp.async_save`: the returned future, the saved values, and the errors of failed saves."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import staging as stock_staging
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.errors import PlanError, StorageError
from dcp.state_dict_saver import AsyncSaveResponse
from tests.support.background import FileGate, gated_writer
from tests.support.ranks import run_ranks
from tests.support.values import leaves, raw
from tests.support.versions import seen_by_dcp, seen_by_stock, version_state

save = partial(dcp.async_save, no_dist=True)


def overwrite(state: Any) -> None:
    """Overwrite all tensors, lists and values of a state, as a training step does."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["lr"][0] = -1.0
    state["step"] = -1


# -- saved values --------------------------------------------------------------------------------------------


def test_the_future_is_torchs_async_save_response(tmp_path: Path) -> None:
    """`result()` returns the Metadata, and both completions of torch's AsyncSaveResponse are set."""
    future = save(version_state(7), checkpoint_id=tmp_path / "x")
    assert isinstance(future, Future) and isinstance(future, AsyncSaveResponse)
    assert future.staging_completion.result(240) is None
    assert future.upload_completion.result(240) is future.result()
    assert isinstance(future.result(), Metadata)
    assert set(future.result().state_dict_metadata) >= {"model.w", "model.layers.0", "step"}
    assert future.outcome is not None and future.outcome.attempts == 1 and future.outcome.seconds["write"] > 0
    assert seen_by_dcp(tmp_path / "x") == seen_by_stock(tmp_path / "x") == 7


def test_changes_after_the_call_are_not_saved(tmp_path: Path) -> None:
    """A save holds the tensors, lists and values at the time of the call, although the write is later.
    Several saves are under way, most of them by one writer object, whose checkpoint_id changes meanwhile."""
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


class Lazy(stock_staging.BlockingAsyncStager):
    """A stager that copies nothing."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same state, without copies."""
        return dict(state_dict)


# -- failures ------------------------------------------------------------------------------------------------


def test_background_errors_are_raised_by_result(tmp_path: Path) -> None:
    """An error in the background is raised by `result()` with its type and name; the next save succeeds."""
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


# -- ranks ---------------------------------------------------------------------------------------------------


def sharded_state(rank: int, version: int) -> dict[str, Any]:
    """Return a state with a sharded tensor, a replicated tensor, a value per rank and a step."""
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
    """Return whether a checkpoint has exactly the values of a version."""
    wanted, state = sharded_state(rank, version), sharded_state(rank, 0)
    dcp.load(state, checkpoint_id=folder)
    return (
        raw(state["sharded"].to_local()) == raw(wanted["sharded"].to_local())
        and state["plain"].equal(wanted["plain"])
        and state["own"] == wanted["own"]
        and state["step"] == version
    )


def save_while_training(rank: int, world_size: int, root: Path) -> list[bool]:
    """Save while training runs collectives on the same group, and overwrite the state after each call."""
    for version in range(1, 5):
        state = sharded_state(rank, version)
        future = dcp.async_save(state, checkpoint_id=root / str(version))
        state["sharded"].to_local().zero_()
        state["plain"].zero_()
        for _ in range(5):
            value = torch.ones(3)
            dist.all_reduce(value)
            assert value.eq(world_size).all()
        if version % 3 == 0:
            future.result(240)
    future.result(240)
    return [is_saved(rank, root / str(version), version) for version in range(1, 5)]


def test_saves_run_beside_collectives_of_training(tmp_path: Path) -> None:
    """Saves use a process group of their own: each of four saves, two under way at a time, is consistent."""
    assert run_ranks(2, save_while_training, tmp_path) == [[True] * 4] * 2


class Refusing:
    """A `Stateful` whose `state_dict` raises."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        """Raise the error."""
        raise self.error("asked for the state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


UNSTAGED: dict[str, Any] = {
    "sparse": {"bad": torch.eye(2).to_sparse()},
    "failing": {"bad": Refusing(RuntimeError)},
    "interrupted": {"bad": Refusing(KeyboardInterrupt)},
    "changed": {},
}


def fail_on_one_rank(rank: int, world_size: int, root: Path, how: str) -> list[Any]:
    """Save when staging fails on one rank, save again, and return how both saves ended."""
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
        ("interrupted", "staging was interrupted by KeyboardInterrupt"),
        ("changed", "'plain'"),
    ],
)
def test_a_staging_error_on_one_rank_fails_all_ranks(tmp_path: Path, how: str, text: str) -> None:
    """If staging fails on one rank, all ranks raise its error without a wait, and the next save succeeds."""
    other, own, *_ = run_ranks(2, fail_on_one_rank, tmp_path, how)
    assert own[0] == ("KeyboardInterrupt" if how == "interrupted" else "RankFailedError")
    assert (other[0], other[1], own[1]) == ("RankFailedError", [1], [1])
    assert text in other[2] and own[3] and other[3]
    assert not (tmp_path / "bad" / "manifest.msgpack").exists()


def after_destroy(rank: int, world_size: int, root: Path) -> bool:
    """Destroy the script's process group before a save has ended."""
    gate = FileGate(root / f"gate-{rank}")
    future = dcp.async_save(sharded_state(rank, 1), storage_writer=gated_writer(root / "x", gate))
    dist.destroy_process_group()
    gate.open()
    future.result(240)
    return future.outcome is not None


def test_destroying_the_process_group_does_not_disturb_a_save(tmp_path: Path) -> None:
    """A script that calls destroy_process_group() at its end still completes its save."""
    assert run_ranks(2, after_destroy, tmp_path) == [True, True]
    assert {"sharded", "plain"} <= set(dcp.open_index(tmp_path / "x").fqns)
