"""Plans of saves and loads: the writes and reads of each rank, and states that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.errors import MissingKeyError, PlanError, ReplicaMismatchError, ShapeMismatchError
from tests.save_load.code_paths import error_of
from tests.support.examples import examples
from tests.support.ranks import run_ranks
from tests.support.reading_places import boxed
from tests.support.sharded import save_sharded

BIG = torch.arange(4000.0).view(1000, 4)


def part(offset: int, size: int, length: int = 4) -> torch.Tensor:
    """Return a part of a tensor that counts up."""
    return boxed(torch.arange(float(offset), offset + size), (length,), (offset,), (size,))


def save_replicas(rank: int, world_size: int, folder: str) -> None:
    """Save a large replica, tied and split, and rows of each rank, with more work on one rank at a time."""
    for busy in range(world_size):
        big = BIG.clone()
        state: dict[str, Any] = {"big": big, "tied": big, "own": part(200 * rank, 200, 600)}
        state |= {f"value{number}": {*range(20_000)} for number in range(3)}
        if rank == busy:
            state["more"] = torch.arange(900.0)
        planner = dcp.DefaultSavePlanner(split_bytes=512)
        dcp.save(state, checkpoint_id=f"{folder}/{busy}", planner=planner)
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save({"big": BIG.clone()}, checkpoint_id=f"{folder}/lowest", planner=planner)


def test_ranks_share_the_work_of_replicas(tmp_path: Path) -> None:
    """Ranks write parts of a replica in proportion to their other work; each element and value is written
    once, also tied ones. With dedup_save_to_lowest_rank the lowest rank writes all."""
    run_ranks(3, save_replicas, str(tmp_path))
    for busy in range(3):
        found = dcp.read(tmp_path / str(busy), weights_only=False)
        assert torch.equal(found["big"], BIG) and torch.equal(found["tied"], BIG)
        assert torch.equal(found["own"], torch.arange(600.0))
        index = dcp.open_index(tmp_path / str(busy))
        rows = [index.box(chunk)[1][0] for chunk in index.chunks(index.position["big"])]
        assert len(rows) == 3 and sum(rows) == 1000 and min(rows) < max(rows)
        big, tied = (index.payload_offsets[index.chunks(index.position[n])].tolist() for n in ("big", "tied"))
        assert len(index.files) == 3 and index.file_sizes.sum() < 120_000 and big == tied
    assert len([*(tmp_path / "lowest").glob("*.distcp")]) == 1


UNSOUND: dict[str, list[Any]] = {
    "overlap": [part(0, 3), part(2, 2)],
    "2 of its 4 elements": [part(0, 1), part(3, 1)],
    "float32 [4] on rank 0, but float32 [5] on rank 1": [torch.zeros(4), torch.zeros(5)],
    "float32 [4] on rank 0, but int64 [4] on rank 1": [torch.zeros(4), torch.zeros(4, dtype=torch.int64)],
    "a tensor on rank 0, but another value on rank 1": [torch.zeros(4), 1],
    "rank 0 has one value, rank 1 has another": [torch.zeros(4), torch.ones(4)],
}


def save_unsound(rank: int, world_size: int, folder: str) -> list[str]:
    """Save each unsound state; return the errors."""
    return [error_of(lambda s=s: dcp.save({"t": s[rank]}, checkpoint_id=folder)) for s in UNSOUND.values()]  # type: ignore[misc]


def test_unsound_states_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """Overlaps, gaps, and differing shapes, dtypes, kinds or values raise an error with tensor and ranks."""
    for found in run_ranks(2, save_unsound, str(tmp_path / "x")):
        for problem, text in zip(UNSOUND, found, strict=True):
            assert problem in text and "'t'" in text, text
        assert ReplicaMismatchError.__name__ in found[-1] and "dcp.PerRank" in found[-1]
    assert not (tmp_path / "x").exists()


def test_elements_that_are_not_stored_are_refused(tmp_path: Path) -> None:
    """Elements that no piece stores are an error, also if overlaps make up the volume; only the first few
    tensors are listed."""
    for name, boxes in (("hole", [((0,), (3,)), ((4,), (1,))]), ("overlap", [((0,), (3,)), ((1,), (3,))])):
        save_sharded(tmp_path / name, {"t": torch.arange(6.0)}, {"t": boxes})
        with pytest.raises(
            PlanError, match=r"'t': the checkpoint stores 4 of 6 elements of the box at \[0\]"
        ):
            dcp.load({"t": torch.zeros(6)}, checkpoint_id=tmp_path / name, no_dist=True)
    names = [f"t{number}" for number in range(40)]
    dcp.save({name: part(0, 1) for name in names}, checkpoint_id=tmp_path / "part", no_dist=True)
    with pytest.raises(PlanError, match="and 37 more"):
        dcp.load({name: torch.zeros(4) for name in names}, checkpoint_id=tmp_path / "part", no_dist=True)


PLACES = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6), st.integers(1, 6))


@examples(100, quick=15)
@given(extra=st.lists(PLACES, max_size=8), cut=st.integers(1, 5), order=st.randoms(use_true_random=False))
def test_overlapping_pieces_are_read_once(
    tmp_path_factory: pytest.TempPathFactory, extra: list[Any], cut: int, order: Any
) -> None:
    """For any overlap of stored pieces each wanted element is needed once and gets the right value."""
    boxes = [((0, 0), (cut, 6)), ((cut, 0), (6 - cut, 6))]
    boxes += [((row, col), (min(high, 6 - row), min(wide, 6 - col))) for row, col, high, wide in extra]
    order.shuffle(boxes)
    whole, memory = torch.arange(36.0).view(6, 6), torch.zeros(7, 6)
    path = save_sharded(tmp_path_factory.mktemp("x"), {"t": whole}, {"t": boxes})
    wanted = boxed(memory, (6, 6), (1, 2), (4, 4), (2, 1))
    report = dcp.load({"t": wanted}, checkpoint_id=path, no_dist=True)
    assert torch.equal(memory[2:6, 1:5], whole[1:5, 2:6]) and memory.sum() == whole[1:5, 2:6].sum()
    assert report.bytes_needed == 64


def test_problems_of_several_kinds_make_one_error(tmp_path: Path) -> None:
    """Missing keys, other kinds and other shapes are one error; problems of one kind have its class."""
    stored = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "t": torch.zeros(1), "o": 1}
    dcp.save(stored, checkpoint_id=tmp_path, no_dist=True)
    shapes: dict[str, Any] = {"a": torch.zeros(3, 2), "b": torch.zeros(4, 1)}
    others: dict[str, Any] = {"o": torch.zeros(1), "t": 0, "gone": 0}
    for state, kind, names in (
        (shapes, ShapeMismatchError, ["a", "b"]),
        ({"gone": 0, "lost": torch.zeros(1)}, MissingKeyError, ["gone", "lost"]),
        (shapes | others, PlanError, ["a", "b", "gone", "o", "t"]),
    ):
        with pytest.raises(kind) as caught:
            dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert sorted(caught.value.fqns) == names
    assert "'o' is a tensor in the state dict, but another value in the checkpoint" in str(caught.value)
    assert "Use the saved kind of value in the state dict" in str(caught.value)
    assert "Size mismatch between saved (2, 3) and current: (3, 2) for 'a'" in str(caught.value)
