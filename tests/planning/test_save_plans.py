"""Save plans. Internal: pure planning on columns: replicas, balance, ties, and everything that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dcp.planners.layout.placements import LocalBox
from dcp.planners.save.dealing import LARGE_OBJECT_BYTES
from dcp.planners.save.global_plan import plan_save
from dcp.planners.value_digests import NOT_COMPARABLE
from dcp.storage.errors import PlanError, ReplicaMismatchError
from tests.support.planning_simulation import Held, save_columns, whole_tensor, write


def whole(shape: tuple[int, ...], *, tie: int = -1, digest: int = 0, number: int = 0) -> Held:
    """A plain tensor."""
    zeros = (0,) * len(shape)
    return Held(shape, whole_tensor(shape, number), (LocalBox(zeros, shape, zeros),), tie, digest)


def part(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], **facts: Any) -> Held:
    """One box of a sharded tensor."""
    region = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    local = whole_tensor(shape)[region]
    return Held(shape, local, (LocalBox(offsets, sizes, (0,) * len(shape)),), **facts)


def test_replicas_are_dealt_out_evenly() -> None:
    """Ten replicated tensors on four ranks: largest first, so loads differ by less than one small tensor."""
    tensors = {f"t{number}": whole((8 * (number + 1),), number=number) for number in range(10)}
    ranks = [tensors] * 4
    disk = write(plan_save([save_columns(held) for held in ranks]), ranks)
    assert sum(disk.written_bytes) == sum(8 * 8 * (number + 1) for number in range(10))
    assert max(disk.written_bytes) - min(disk.written_bytes) <= 8 * 16


def test_the_lowest_rank_can_write_all_replicas() -> None:
    """dedup_to_lowest_rank gives every replica to the lowest rank that has it, however large."""
    tensors = {"a": whole((64,)), "b": whole((8,))}
    plan = plan_save([save_columns(tensors)] * 3, dedup_to_lowest_rank=True, split_bytes=16)
    assert [len(writes.sources) for writes in plan.writes] == [2, 0, 0]


def test_a_large_replica_is_split_over_its_holders() -> None:
    """A replicated tensor above split_bytes is written in row ranges, so that all ranks end up level."""
    ranks = [{"big": whole((1000, 4)), "own": part((3 * 200,), (200 * rank,), (200,))} for rank in range(3)]
    plan = plan_save([save_columns(held) for held in ranks], split_bytes=4096)
    disk = write(plan, ranks)
    assert len(plan.index.chunks(plan.index.position["big"])) == 3
    assert max(disk.written_bytes) - min(disk.written_bytes) <= 2 * 4 * 8
    rows = [plan.index.box(chunk) for chunk in plan.index.chunks(plan.index.position["big"])]
    assert [offsets[0] for offsets, _ in rows] == sorted(offsets[0] for offsets, _ in rows)


def test_tied_tensors_are_stored_once() -> None:
    """Tensors with the same memory go to one rank, in parts too, and share the payload there."""
    for split in (None, 64):
        ranks = [{"a": whole((40,), tie=0), "x": whole((3,), number=5), "b": whole((40,), tie=0)}] * 2
        plan = plan_save([save_columns(held) for held in ranks], split_bytes=split)
        disk = write(plan, ranks)
        assert sum(disk.written_bytes) == 8 * 43
        assert sum(int((writes.shares >= 0).sum()) for writes in plan.writes) == (1 if split is None else 2)


def test_ties_that_other_ranks_do_not_have_are_kept_apart() -> None:
    """A tie holds only where the writing rank has it; two tensors tied on rank 0 only stay right
    everywhere."""
    ranks = [
        {"a": whole((4,), tie=0), "b": whole((4,), tie=0)},
        {"a": whole((4,)), "b": whole((4,))},
    ]
    write(plan_save([save_columns(held) for held in ranks]), ranks)


def test_the_index_lists_chunks_by_tensor_and_position() -> None:
    """Names by first appearance, chunks ascending, payload lengths known, places still open, paths merged."""
    ranks = [{"b": part((4, 2), (2, 0), (2, 2))}, {"b": part((4, 2), (0, 0), (2, 2)), "a": whole(())}]
    paths = [{"b": ("b",)}, {"b": ("b",), "a": ("n", 0)}]
    columns = [
        save_columns(held, planner_data=path)  # type: ignore[arg-type]
        for held, path in zip(ranks, paths, strict=True)
    ]
    index = plan_save(columns).index
    assert list(index.fqns) == ["b", "a"]
    assert [index.box(chunk) for chunk in index.chunks(0)] == [((0, 0), (2, 2)), ((2, 0), (2, 2))]
    assert index.payload_lengths.tolist() == [32, 32, 8]
    assert index.chunk_files.tolist() == [0, 0, 0]
    assert index.planner_data == {"b": ("b",), "a": ("n", 0)}


def test_objects_go_to_the_lowest_rank_and_large_ones_are_balanced() -> None:
    """Small values to the lowest holder; values of many bytes each to the least loaded rank."""
    small = [save_columns({}, {"lr": 1, "mine": 2} if rank else {"lr": 1}) for rank in range(3)]
    plan = plan_save(small)
    assert [writes.object_rows.tolist() for writes in plan.writes] == [[0], [1], []]
    names = {f"o{number}": 1 for number in range(3)}
    large = [save_columns({}, names, object_bytes=LARGE_OBJECT_BYTES + 1)] * 3
    assert [len(writes.objects) for writes in plan_save(large).writes] == [1, 1, 1]


def test_replicas_that_differ_are_refused() -> None:
    """Different digests of one box or object: the error names it, the ranks on each side, and PerRank."""
    ranks = [{"w": whole((4,), digest=digest)} for digest in (5, 5, 9, 0)]
    columns = [save_columns(held, {"seed": 1 + rank % 2}) for rank, held in enumerate(ranks)]
    with pytest.raises(ReplicaMismatchError, match=r"dcp\.PerRank") as caught:
        plan_save(columns)
    assert "tensor 'w', box [0:4]" in str(caught.value)
    assert "ranks 0, 1 have one value, rank 2 has another" in str(caught.value)
    assert "object 'seed' differs: ranks 0, 2 have one value, ranks 1, 3 have another" in str(caught.value)
    assert caught.value.fqns == ["seed", "w"]
    assert plan_save(columns, check_replicas=False).index.chunk_count == 1


@pytest.mark.parametrize("digests", [(0, 7, 7), (7, 0, 7), (7, 7, 0)])
def test_a_value_that_cannot_be_compared_differs_from_one_that_can(digests: tuple[int, ...]) -> None:
    """Plain on some ranks and opaque on others, it is not the same value; opaque on all, it is refused,
    unless the plan was made elsewhere (0), and on one alone it need not be compared."""
    columns = [save_columns({}, {"hook": digest}) for digest in digests]
    told = r"object 'hook' differs: rank.* one value, rank.* another"
    with pytest.raises(ReplicaMismatchError, match=told):
        plan_save(columns)
    opaque = [save_columns({}, {"hook": 0})] * 3
    assert [writes.object_rows.tolist() for writes in plan_save(opaque).writes] == [[0], [], []]
    opaque = [save_columns({}, {"hook": NOT_COMPARABLE}) for _ in range(2)]
    with pytest.raises(ReplicaMismatchError, match="'hook' of ranks 0, 1 cannot be compared"):
        plan_save(opaque)
    assert len(plan_save([opaque[0], save_columns({}, {})]).index.objects.fqns) == 1


PROBLEMS = {
    "outside of its shape": [
        {"t": part((4,), (0,), (4,))},
        {"t": Held((4,), whole_tensor((3,)), (LocalBox((2,), (3,), (0,)),))},
    ],
    "overlap": [{"t": part((4,), (0,), (3,))}, {"t": part((4,), (2,), (2,))}],
    "2 of its 4 elements": [{"t": part((4,), (0,), (1,))}, {"t": part((4,), (3,), (1,))}],
    r"int64 \[4\] on rank 0, but int64 \[5\] on rank 1": [{"t": whole((4,))}, {"t": whole((5,))}],
    r"int64 \[4\] on rank 0, but int64 \[4, 1\] on rank 1": [{"t": whole((4,))}, {"t": whole((4, 1))}],
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_unsound_plans_are_refused(problem: str) -> None:
    """Out of bounds, overlap, a gap, differing shapes: an error that names the tensor and the ranks."""
    with pytest.raises(PlanError, match=problem) as caught:
        plan_save([save_columns(held) for held in PROBLEMS[problem]])
    assert "'t'" in str(caught.value)


def test_a_dtype_that_differs_is_refused() -> None:
    """One name with two dtypes: the error tells both and who has which."""
    one, other = save_columns({"t": whole((4,))}), save_columns({"t": whole((4,))}, dtype_code=1)
    with pytest.raises(PlanError, match=r"'t' is int64 \[4\] on rank 0, but float32 \[4\] on ranks 1, 2"):
        plan_save([one, other, other])


def test_a_name_that_is_tensor_and_object_is_refused() -> None:
    """A tensor on one rank and a number on another under one name."""
    with pytest.raises(PlanError, match=r"'t' is a tensor on rank 0, but another value on rank 1"):
        plan_save([save_columns({"t": whole((4,))}), save_columns({}, {"t": 1})])


def test_all_problems_are_told_at_once_and_the_list_is_bounded() -> None:
    """Forty gaps make one error that counts them all and lists the first twenty."""
    names = [f"t{number}" for number in range(40)]
    ranks = [{name: part((4,), (rank,), (1,)) for name in names} for rank in range(2)]
    with pytest.raises(PlanError, match=r"40 problems.*and 20 more") as caught:
        plan_save([save_columns(held) for held in ranks])
    assert len(caught.value.problems) == 20


def test_a_rank_alone_may_save_its_own_part() -> None:
    """Coverage is demanded of several ranks; of one only when asked."""
    columns = save_columns({"t": part((4,), (0,), (2,))})
    assert plan_save([columns]).index.chunk_count == 1
    with pytest.raises(PlanError, match="2 of its 4"):
        plan_save([columns], check_coverage=True)
