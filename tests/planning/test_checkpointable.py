"""Plain tensors with boxes of a global tensor, by the attributes of torch 2.14's CheckpointableTensor."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import PlanError, StagingError
from tests.support.ranks import run_ranks

GLOBAL = torch.arange(40.0).reshape(8, 5)
HAS_PROTOCOL = hasattr(stock, "CheckpointableTensor")
PADDING = -7.0


class ShardClaim(NamedTuple):
    """The four attributes of torch's protocol."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


def with_claim(tensor: torch.Tensor, claim: ShardClaim) -> torch.Tensor:
    """Set the attributes of ``claim`` on ``tensor``, and return it."""
    for name, value in claim._asdict().items():
        setattr(tensor, name, value)
    return tensor


def rows(begin: int, end: int, *, filled: bool = True) -> torch.Tensor:
    """Return rows of `GLOBAL` as a rank holds them: two boxes in reverse order, surrounded by padding."""
    middle = (begin + end) // 2
    tensor = torch.full((end - begin + 2, 7), PADDING)
    places = [(middle, end, 0), (begin, middle, end - middle + 2)]
    for first, last, at in places if filled else ():
        tensor[at : at + last - first, 1:6] = GLOBAL[first:last]
    claim = ShardClaim(
        tuple(GLOBAL.shape),
        tuple((first, 0) for first, _, _ in places),
        tuple((at, 1) for _, _, at in places),
        tuple((last - first, 5) for first, last, _ in places),
    )
    return with_claim(tensor, claim)


OUTSIDE = "of sizes .2,. is outside"
WRONG = [
    (ShardClaim((4,), ((3,),), ((0,),), ((2,),)), rf"global_offsets\[0\] \(3,\) {OUTSIDE}"),
    (ShardClaim((4,), ((0,),), ((1,),), ((2,),)), rf"local_offsets\[0\] \(1,\) {OUTSIDE}"),
    (ShardClaim((4,), ((-1,),), ((0,),), ((2,),)), r"global_offsets\[0\]"),
    (ShardClaim((4,), ((0,),), ((0,), (0,)), ((2,),)), "same length"),
    (ShardClaim((4, 1), ((0, 0),), ((0,),), ((2, 1),)), r"local_offsets\[0\] and local_sizes must have 1"),
    (ShardClaim((4,), ((0, 0),), ((0,),), ((2,),)), r"global_offsets\[0\] and local_sizes must have 1"),
]


@pytest.mark.parametrize(("claim", "words"), WRONG)
def test_invalid_boxes_are_refused_by_name(claim: ShardClaim, words: str, tmp_path: Path) -> None:
    """Boxes outside of the tensors, and attributes of different lengths, raise PlanError."""
    with pytest.raises(PlanError, match=words) as caught:
        dcp.save({"layer": with_claim(torch.zeros(2), claim)}, checkpoint_id=tmp_path)
    assert "'layer' is a CheckpointableTensor" in str(caught.value)


def across_ranks(rank: int, world: int, root: str, pairs: list[tuple[str, str]]) -> list[bool]:
    """Save rows of each rank, and load the same rows, other rows, and the whole tensor."""
    packages: dict[str, Any] = {"dcp": dcp, "stock": stock}
    cuts, results = [8 * number // world for number in range(world + 1)], []
    own, uneven = cuts[rank : rank + 2], [(0, 3), (3, 8), (5, 8)][rank]
    for writers, readers in pairs:
        folder = f"{root}/{writers}-{readers}"
        packages[writers].save({"w": rows(*own)}, checkpoint_id=folder)
        for target, expected in (
            (rows(*own, filled=False), rows(*own)),
            (rows(*uneven, filled=False), rows(*uneven)),
            (torch.zeros(8, 5), GLOBAL),
        ):
            packages[readers].load({"w": target}, checkpoint_id=folder)
            results.append(torch.equal(target, expected))
    return results


PAIRS = [("dcp", "dcp")]
if HAS_PROTOCOL:  # torch has the protocol
    PAIRS += [("dcp", "stock"), ("stock", "dcp")]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_save_and_load_their_boxes(world: int, tmp_path: Path) -> None:
    """Stored boxes load into equal boxes, other boxes and whole tensors, also across dcp and stock torch."""
    results = run_ranks(world, across_ranks, str(tmp_path), PAIRS)
    assert results == [[True] * 3 * len(PAIRS)] * world


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_asynchronous_saves_keep_the_boxes(kind: str, tmp_path: Path) -> None:
    """The staged copy has the attributes of its source, and later writes to the source do not change it."""
    state: dict[str, Any] = {"w": rows(0, 8), "nested": [{"v": rows(0, 8)}]}
    chosen = dcp.AsyncCheckpointerType(kind)
    future = dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=chosen)
    state["w"].fill_(1e9)
    future.result()
    loaded: dict[str, Any] = {"w": rows(0, 8, filled=False), "nested": [{"v": rows(0, 8, filled=False)}]}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["w"], rows(0, 8)) and torch.equal(loaded["nested"][0]["v"], rows(0, 8))


class _Forgetful(dcp.FileSystemWriter):
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: value.clone() for name, value in state_dict.items()}


def test_a_stager_that_loses_the_boxes_is_an_error(tmp_path: Path) -> None:
    """A stager that drops the attributes is an error; no local tensor is saved as the global one."""
    with pytest.raises(StagingError, match="does not describe its shards"):
        dcp.async_save({"w": rows(0, 8)}, storage_writer=_Forgetful(tmp_path)).result()
    assert not list(tmp_path.glob("*.dcp"))


def test_a_reused_writer_sees_changed_boxes(tmp_path: Path) -> None:
    """A plan is reused only while the boxes are unchanged."""
    writer = dcp.FileSystemWriter(tmp_path / "none")
    dcp.save({"w": rows(0, 8)}, storage_writer=writer, checkpoint_id=tmp_path / "1")
    tensor = rows(0, 8)
    swapped = ShardClaim((8, 5), ((0, 0), (4, 0)), ((0, 1), (6, 1)), ((4, 5), (4, 5)))
    dcp.save({"w": with_claim(tensor, swapped)}, storage_writer=writer, checkpoint_id=tmp_path / "2")
    loaded = {"w": torch.zeros(8, 5)}
    dcp.load(loaded, checkpoint_id=tmp_path / "2")
    assert torch.equal(loaded["w"], torch.cat([GLOBAL[4:], GLOBAL[:4]]))
    moved = rows(0, 8)
    with_claim(moved, swapped._replace(local_offsets=((6, 1), (0, 1))))
    dcp.save({"w": moved}, storage_writer=writer, checkpoint_id=tmp_path / "3")
    dcp.load(loaded, checkpoint_id=tmp_path / "3")
    assert torch.equal(loaded["w"], GLOBAL)


def test_torchs_and_dcps_protocols_agree(tmp_path: Path) -> None:
    """isinstance() holds for both protocols, and plans equal those of torch's planner."""
    tensor = rows(0, 8)
    assert isinstance(tensor, dcp.CheckpointableTensor)
    assert not isinstance(torch.zeros(2), dcp.CheckpointableTensor)
    if not HAS_PROTOCOL:
        return
    protocol = importlib.import_module("torch.distributed.checkpoint.protocol")
    assert isinstance(tensor, protocol.CheckpointableTensor)
    assert set(protocol.CheckpointableTensor.__annotations__) == set(ShardClaim._fields)
    plans = []
    for planner in (dcp.DefaultSavePlanner(), stock.DefaultSavePlanner()):
        planner.set_up_planner({"w": tensor}, is_coordinator=True)
        plans.append(planner.create_local_plan().items)
    for own, torchs in zip(*plans, strict=True):
        assert (own.index, own.type, own.tensor_data) == (torchs.index, torchs.type, torchs.tensor_data)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path, planner=stock.DefaultSavePlanner())
    loaded = {"w": rows(0, 8, filled=False)}
    dcp.load(loaded, checkpoint_id=tmp_path, planner=stock.DefaultLoadPlanner())
    assert torch.equal(loaded["w"], rows(0, 8))
