"""What a restore leaves behind: nothing of the loads that failed, and the same step on all ranks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from dcp.errors import CorruptCheckpointError
from dcp.steps.folders import StepFolders
from dcp.storage.errors import CheckpointError, PlanError
from tests.support.ranks import RankRaised, run_ranks
from tests.support.restoring import (
    Counted,
    Heard,
    break_payload,
    flip,
    folder_of,
    resume,
    save_steps,
    truncate,
)
from tests.support.versions import version_state

# -- nothing of a failed load stays --------------------------------------------------------------------------


class Opaque:
    """A value that is stored as a pickled blob, read after the tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


def save_own(rank: int, world_size: int, root: str, step: int) -> None:
    """A step with a generator and a position by rank."""
    own = {"gen": torch.full((4,), step), "pos": step}
    state = {"w": torch.full((4,), float(step)), "loader": dcp.PerRank(own), "o": Opaque(step)}
    dcp.save(state, checkpoint_id=folder_of(root, step))


def break_object(folder: Path, fqn: str) -> None:
    """Flip a bit in the blob of a value, so that a load fails when all tensors have been filled."""
    index = dcp.open_index(folder)
    objects, row = index.objects, index.objects.position[fqn]
    middle = int(objects.offsets[row] + objects.lengths[row] // 2)
    flip(folder / index.files[int(objects.files[row])], middle)


def test_kept_values_are_not_those_of_the_damaged_step(tmp_path: Path) -> None:
    """The newest was saved by as many ranks and is damaged, the older one by others: what was there stays."""
    run_ranks(2, save_own, str(tmp_path), 1)
    save_own(0, 1, str(tmp_path), 2)
    break_object(folder_of(tmp_path, 2), "o")
    own: dict[str, Any] = {"gen": torch.full((4,), -1), "pos": -1}
    state: dict[str, Any] = {"w": torch.zeros(4), "loader": dcp.PerRank(own), "o": None}
    restored = resume(tmp_path, state, per_rank="keep", weights_only=False)
    assert restored is not None
    assert (restored.step, restored.report.kept_per_rank) == (1, ["loader"])
    assert own["gen"].tolist() == [-1] * 4
    assert own["pos"] == -1
    assert state["o"].number == 1
    assert state["w"].tolist() == [1] * 4


def test_kept_values_are_loaded_where_they_fit(tmp_path: Path) -> None:
    """The same with an older step of this rank."""
    for step in (1, 2):
        save_own(0, 1, str(tmp_path), step)
    break_object(folder_of(tmp_path, 2), "o")
    own: dict[str, Any] = {"gen": torch.full((4,), -1), "pos": -1}
    state: dict[str, Any] = {"w": torch.zeros(4), "loader": dcp.PerRank(own), "o": None}
    restored = resume(tmp_path, state, per_rank="keep", weights_only=False)
    assert restored is not None
    assert own["gen"].tolist() == [1] * 4
    assert own["pos"] == 1


def test_a_partial_load_does_not_mix_two_steps(tmp_path: Path) -> None:
    """The damaged step had filled a head that the older one lacks: no older step can be told from it now."""
    dcp.save({"w": torch.ones(2), "o": 1}, checkpoint_id=folder_of(tmp_path, 1))
    dcp.save(
        {"w": torch.ones(2), "head": torch.ones(2), "o": Opaque(2)}, checkpoint_id=folder_of(tmp_path, 2)
    )
    break_object(folder_of(tmp_path, 2), "o")

    def state() -> dict[str, Any]:
        return {"w": torch.zeros(2), "head": torch.zeros(2), "o": None}

    options: dict[str, Any] = {"allow_partial_load": True, "weights_only": False}
    with pytest.raises(PlanError, match=r"'head'.*two checkpoints"):
        resume(tmp_path, state(), **options)
    new = state()
    restored = resume(tmp_path, new, step=1, **options)
    assert restored is not None
    assert restored.report.missing == ["head"]
    assert (new["w"].tolist(), new["head"].tolist(), new["o"]) == ([1, 1], [0, 0], 1)


def test_a_planner_serves_again_after_a_failed_load(tmp_path: Path) -> None:
    """What it had to fill is forgotten."""
    save_steps(tmp_path, 1)
    break_payload(folder_of(tmp_path, 1))
    planner = dcp.DefaultLoadPlanner()
    with pytest.raises(CorruptCheckpointError):
        dcp.load(version_state(0), checkpoint_id=folder_of(tmp_path, 1), planner=planner)
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "x")
    dcp.load({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "x", planner=planner)


def test_a_part_is_restored_from_the_older_step(tmp_path: Path) -> None:
    """Objects get their state once, from the good step; what is not selected stays as it was."""
    for step in (1, 2):
        part = {"w": torch.full((64,), float(step)), "n": step}
        dcp.save({"model": part, "opt": dict(part)}, checkpoint_id=folder_of(tmp_path, step))
    break_payload(folder_of(tmp_path, 2))
    state = {"model": Counted(), "opt": Counted()}
    restored = resume(tmp_path, state, only="model")
    assert restored is not None
    assert (restored.step, state["model"].given, state["opt"].given) == (1, 1, 0)
    assert state["model"].state["w"].eq(1).all()
    assert state["model"].state["n"] == 1
    assert not state["opt"].state["w"].any()


def test_trouble_with_noting_damage_does_not_end_the_restore(tmp_path: Path) -> None:
    """It is logged; the step is passed over all the same."""
    save_steps(tmp_path, 1, 2)
    break_payload(folder_of(tmp_path, 2))

    def fail(step: int, error: CheckpointError) -> None:
        raise OSError(errno.EROFS, "read-only")

    restored = resume(tmp_path, version_state(0), on_damage=fail)
    assert restored is not None
    assert restored.step == 1


# -- ranks ---------------------------------------------------------------------------------------------------


def sharded(world_size: int, value: float) -> DTensor:
    """Rows over all ranks, each of them in the rank's own file."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(torch.full((6, 8), float(value)), mesh, [Shard(0)], src_data_rank=None)


def save_sharded(rank: int, world_size: int, root: str, steps: list[int]) -> None:
    """Steps of all ranks."""
    for step in steps:
        dcp.save({"w": sharded(world_size, step), "n": step}, checkpoint_id=folder_of(root, step))


def resume_sharded(rank: int, world_size: int, root: str, lists: bool, **options: Any) -> Any:
    """(step, values, skipped steps, damage told) of one rank; only the coordinator can list steps."""
    folders, heard = StepFolders(root), Heard()

    def list_steps() -> list[int]:
        assert rank == 0
        return list(folders.newest_first()) if lists else []

    state: dict[str, Any] = {"w": sharded(world_size, 0.0), "n": 0, "part": Counted()}
    state["part"].state.clear()
    restored = resume(root, state, list_steps=list_steps, on_damage=heard, timeout_seconds=200, **options)
    if restored is None:
        return None
    local = state["w"].to_local()
    assert local.eq(local.flatten()[0]).all()
    return (
        restored.step,
        float(local.flatten()[0]),
        state["n"],
        restored.skipped,
        heard.steps,
        state["part"].given,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_damage_that_one_rank_sees_turns_all_ranks_back(tmp_path: Path, world_size: int) -> None:
    """Each rank reads its own file; the other ranks have filled theirs by the time they hear of it."""
    root = str(tmp_path)
    run_ranks(world_size, save_sharded, root, [1, 2, 3])
    for step, rank in ((3, world_size - 1), (2, 0)):
        (path,) = folder_of(root, step).glob(f"__{rank}_0.*.distcp")
        truncate(path)
    results = run_ranks(world_size, resume_sharded, root, True)
    skipped = results[0][3]
    assert [step for step, _ in skipped] == [3, 2]
    assert results == [(1, 1.0, 1, skipped, [3, 2], 1)] * world_size


def test_all_ranks_hear_that_nothing_is_left(tmp_path: Path) -> None:
    """The same error on each of them, and None where nothing was committed."""
    root = str(tmp_path)
    assert run_ranks(2, resume_sharded, root, True) == [None, None]
    run_ranks(2, save_sharded, root, [1, 2])
    assert run_ranks(2, resume_sharded, root, False) == [None, None]
    for step in (1, 2):
        (path,) = folder_of(root, step).glob("__1_0.*.distcp")
        truncate(path)
    results = run_ranks(2, resume_sharded, root, True, failures=True)
    for result in results:
        assert isinstance(result, RankRaised)
        assert result.type_name == "CorruptCheckpointError"
        assert result.facts["steps"] == [2, 1]
    assert results[0].message == results[1].message


def resume_misfit(rank: int, world_size: int, root: str) -> Any:
    """Rank 0 finds damage, rank 1 has another model."""
    w = sharded(world_size, 0.0)
    state = {"w": w} if rank == 0 else {"w": w, "absent": torch.zeros(2)}
    return resume(root, state, timeout_seconds=200)


def test_damage_does_not_hide_a_wrong_model_on_another_rank(tmp_path: Path) -> None:
    """No older step is taken where a rank's state dict does not fit, which is known before data is read."""
    root = str(tmp_path)
    run_ranks(2, save_sharded, root, [1, 2])
    (path,) = folder_of(root, 2).glob("__0_0.*.distcp")
    truncate(path)
    for result in run_ranks(2, resume_misfit, root, failures=True):
        assert isinstance(result, RankRaised)
        assert result.type_name == "MissingKeyError"
        assert "Missing key in checkpoint state_dict: 'absent'" in result.message
