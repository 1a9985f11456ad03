"""States that are saved again and again by one writer, which keeps the plan: each save is as a fresh one."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp
from dcp import PerRank
from dcp.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex
from tests.support.examples import examples
from tests.support.ranks import run_ranks

_COLUMNS = (
    "dtype_codes",
    "requires_grad",
    "shape_start",
    "shape_values",
    "chunk_start",
    "chunk_offsets",
    "chunk_sizes",
    "payload_lengths",
    "crcs",
)
_NOT_OF_THE_STATE = {"save_id", "time", "rank_seconds", "assemble_seconds"}


class Again:
    """Saves by one writer that is used again, each beside one by a writer of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer = dcp.FileSystemWriter(folder / "none", sync_files=False)
        self.saves = 0

    def save(self, state: dict[str, Any], **planning: Any) -> None:
        """Save and compare."""
        self.saves += 1
        places = [self.folder / f"{self.saves}{side}" for side in ("again", "fresh")]
        self.writer.reset(places[0])
        fresh = dcp.FileSystemWriter(places[1], sync_files=False)
        for writer in (self.writer, fresh):
            planner = dcp.DefaultSavePlanner(**planning)
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        assert self.writer.index is not None
        assert fresh.index is not None
        assert_same(self.writer.index, fresh.index)


def assert_same(one: CheckpointIndex, other: CheckpointIndex) -> None:
    """Names, forms, ties, values (by checksum), paths and notes."""
    assert list(one.fqns) == list(other.fqns)
    for name in _COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert ties(one) == ties(other)
    assert list(one.objects.fqns) == list(other.objects.fqns)
    assert [one.objects.values[row] for row in one.objects.plain] == [
        other.objects.values[row] for row in other.objects.plain
    ]
    assert dict(one.stride_orders) == dict(other.stride_orders)
    paths, expected = one.planner_data, other.planner_data
    assert (paths and list(paths.items())) == (expected and list(expected.items()))
    told = [{k: v for k, v in i.provenance.items() if k not in _NOT_OF_THE_STATE} for i in (one, other)]
    assert told[0] == told[1]


def ties(index: CheckpointIndex) -> list[int]:
    """By chunk the first one that shares its bytes."""
    places = index.payload_offsets.tolist()
    return [places.index(place) for place in places]


def training_state() -> dict[str, Any]:
    """A model, an optimizer and what else a trainer keeps."""
    weight = torch.nn.Parameter(torch.randn(4, 6))
    return {
        "model": OrderedDict(w=weight, tied=weight, b=torch.zeros(6), empty=torch.zeros(0, 3)),
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(4, 6).t()}},
            "groups": [{"lr": 0.1}],
        },
        "rng": PerRank({"cpu": torch.zeros(16, dtype=torch.uint8)}),
        "sizes": [1, 2, 3],
        "step": 7,
    }


def test_an_unchanged_state_is_not_planned_again(tmp_path: Path) -> None:
    """Other values, other memory, other tensor objects are no change; the values of now are stored."""
    job, state = Again(tmp_path), training_state()
    job.save(state)
    state["step"] = 8
    state["model"]["b"].add_(1)
    job.save(dict(state))
    state["model"]["b"] = torch.full((6,), 5.0)
    job.save(state)
    target = training_state()
    dcp.load(target, checkpoint_id=tmp_path / "3again", no_dist=True)
    assert target["step"] == 8
    assert target["model"]["b"].tolist() == [5.0] * 6


def retied(state: dict[str, Any]) -> None:
    """The second name gets a tensor of its own."""
    state["model"]["tied"] = torch.nn.Parameter(state["model"]["w"].detach().clone())


def renested(state: dict[str, Any]) -> None:
    """A key with a dot in the place of a nested one."""
    state["model.b"] = state["model"].pop("b")


def reordered(state: dict[str, Any]) -> None:
    """The same names the other way round."""
    state["model"] = OrderedDict(reversed(state["model"].items()))


def given_other_data(state: dict[str, Any]) -> None:
    """Another storage and shape under the same tensor object."""
    state["model"]["b"].data = torch.zeros(7)


def transposed_in_place(state: dict[str, Any]) -> None:
    """Other strides under the same tensor object."""
    state["optim"]["state"][0]["m"].t_()


def opened_list(state: dict[str, Any]) -> None:
    """A list that was kept whole gets an entry that is not."""
    state["sizes"][1] = {"a": 1}


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape in place": given_other_data,
    "strides in place": transposed_in_place,
    "dtype in place": lambda state: setattr(state["model"]["b"], "data", torch.zeros(6, dtype=torch.float64)),
    "requires_grad in place": lambda state: state["model"]["w"].requires_grad_(False),
    "resized in place": lambda state: state["model"]["b"].resize_(3),
    "class": lambda state: state["model"].update(b=torch.nn.Parameter(torch.zeros(6))),
    "conjugated view": lambda state: state["model"].update(b=torch.ones(6, dtype=torch.complex64).conj()),
    "ties": retied,
    "nesting with the same flat names": renested,
    "order": reordered,
    "a key less": lambda state: state["model"].pop("b"),
    "a key more": lambda state: state["model"].update(c=torch.zeros(1)),
    "a key's type": lambda state: state["optim"].update(state={"0": state["optim"]["state"][0]}),
    "a key that is equal and has another name": lambda state: state["optim"].update(
        state={False: state["optim"]["state"][0]}
    ),
    "a tensor becomes a value": lambda state: state["model"].update(b=0.0),
    "a value becomes a tensor": lambda state: state.update(step=torch.tensor(7)),
    "a list is opened": opened_list,
    "a list is longer": lambda state: state["optim"]["groups"].append({"lr": 0.2}),
    "per rank no more": lambda state: state.update(rng=state["rng"].value),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_is_noticed(tmp_path: Path, change: str) -> None:
    """Whatever changes, in place or by another object, is planned anew; and so again when it is changed
    back."""
    job, state = Again(tmp_path), training_state()
    job.save(state)
    shallow = copy.copy(state) | {"model": copy.copy(state["model"]), "optim": copy.copy(state["optim"])}
    CHANGES[change](shallow)
    job.save(shallow)
    job.save(shallow)
    job.save(training_state())


@pytest.mark.parametrize("how", ["freed", "meta", "sparse", "nested"])
def test_what_cannot_be_stored_any_more_is_told_as_ever(tmp_path: Path, how: str) -> None:
    """A parameter whose memory is gone fails the save by name, whatever was saved before."""
    job, state = Again(tmp_path), {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
    job.save(state)
    if how == "freed":
        state["w"].untyped_storage().resize_(0)
    else:
        state["w"] = {
            "meta": lambda: torch.zeros(4, 4, device="meta"),
            "sparse": lambda: torch.zeros(4, 4).to_sparse(),
            "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        }[how]()
    job.writer.reset(tmp_path / "refused")
    with pytest.raises(PlanError, match="'w'"):
        dcp.save(state, storage_writer=job.writer, no_dist=True)
    job.save({"b": torch.zeros(4)})


def test_a_planner_that_chooses_for_itself_is_not_second_guessed(tmp_path: Path) -> None:
    """What an overridden set_up_planner does to the state dict is done each time."""

    class Every(dcp.DefaultSavePlanner):
        skipped = ""

        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.state_dict = {k: v for k, v in self.state_dict.items() if k != self.skipped}

    writer, planner = dcp.FileSystemWriter(tmp_path / "none", sync_files=False), Every()
    names: list[list[str]] = []
    for planner.skipped in ("", "a", "b", ""):
        writer.reset(tmp_path / str(len(names)))
        state = {"a": torch.zeros(2), "b": torch.zeros(2)}
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        assert writer.index is not None
        names.append(list(writer.index.fqns))
    assert names == [["a", "b"], ["b"], ["a"], ["a", "b"]]


def test_no_tensor_is_kept(tmp_path: Path) -> None:
    """The plan may stay, the state may go."""
    job, tensor = Again(tmp_path), torch.zeros(3)
    gone = weakref.ref(tensor)
    job.save({"a": tensor})
    job.save({"a": tensor})
    del tensor
    gc.collect()
    assert gone() is None


MAKERS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.zeros(2, 3),
    lambda: torch.zeros(3, 2).t(),
    lambda: torch.zeros(2, 3, dtype=torch.int16),
    lambda: torch.nn.Parameter(torch.zeros(2, 3)),
    lambda: torch.zeros(0),
    lambda: torch.zeros(()),
]
TENSORS = st.sampled_from(MAKERS).map(lambda make: make())
LEAVES = TENSORS | st.sampled_from([1, "x", None, (1, 2), [1, 2], []])
STATES = st.dictionaries(
    st.sampled_from(["a", "a.b", "b", "0"]),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["b", "c", 0]), inner, max_size=3)
        ),
        max_leaves=4,
    ),
    max_size=3,
)


@given(st.lists(STATES, min_size=2, max_size=5), st.data())
@examples(30)
def test_no_history_changes_what_comes_out(states: list[dict[str, Any]], data: st.DataObject) -> None:
    """States in any order, some of them again: each gives what a writer gives that knows none before it."""
    with tempfile.TemporaryDirectory() as folder:
        job = Again(Path(folder))
        for state in data.draw(st.lists(st.sampled_from(states), min_size=2, max_size=6)):
            try:
                job.save(state)
            except PlanError as refused:
                fresh = dcp.FileSystemWriter(Path(folder) / "refused", sync_files=False)
                with pytest.raises(PlanError) as same:
                    dcp.save(state, storage_writer=fresh, no_dist=True)
                assert str(same.value) == str(refused)


def save_dtensors(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether the plan served, and the values came back, for DTensors that differ in one way after the
    other."""
    mesh, other = (init_device_mesh("cpu", (world_size, 1)) for _ in range(2))
    few = torch.zeros(1, 2)[rank:]

    def state(placements: list[Any], mesh: Any = mesh) -> dict[str, Any]:
        some = [*placements, Replicate()]
        return {
            "kept": DTensor.from_local(torch.ones(2, 2), mesh, some, run_check=False),
            "few": DTensor.from_local(
                few, mesh, [Shard(0), Replicate()], run_check=False, shape=torch.Size((1, 2)), stride=(2, 1)
            ),
            "plain": torch.zeros(3),
            "step": 1,
        }

    states = [state([Shard(0)]), state([Shard(0)]), state([Shard(1)]), state([Replicate()])]
    states += [state([Replicate()], other)]
    shapes = [(4, 2), (4, 2), (2, 4), (2, 2), (2, 2)]
    writer = dcp.FileSystemWriter(f"{folder}/none", sync_files=False)
    seen = []
    for number, (now, shape) in enumerate(zip(states, shapes, strict=True)):
        writer.reset(f"{folder}/{number}")
        dcp.save(now, storage_writer=writer)
        kept, plain = torch.zeros(shape), torch.ones(3)
        dcp.load({"kept": kept, "plain": plain}, checkpoint_id=f"{folder}/{number}")
        seen.append(bool(kept.all()) and not plain.any())
    changed_in_place = state([Shard(0)])
    writer.reset(f"{folder}/before")
    dcp.save(changed_in_place, storage_writer=writer)
    changed_in_place["kept"]._spec.placements = (Replicate(), Replicate())
    writer.reset(f"{folder}/after")
    with pytest.raises(PlanError, match="'kept'"):
        dcp.save(changed_in_place, storage_writer=writer)
    return seen


def test_dtensors_are_known_by_their_boxes(tmp_path: Path) -> None:
    """Equal boxes are planned once, on any mesh, a rank's empty shard included; other placements are planned
    anew, and a spec that was changed in place is looked at as it is now."""
    for seen in run_ranks(2, save_dtensors, str(tmp_path)):
        assert seen == [True] * 5
