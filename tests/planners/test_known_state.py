"""An unchanged state dict is not looked at in full again, and a changed one never taken for it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp.planners.cache.known_state import KnownState, Sources
from dcp.planners.columns import SaveColumns
from dcp.planners.layout.tensor_facts import TensorFacts
from dcp.planners.per_rank import PerRank
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.storage.errors import PlanError
from tests.support.ranks import run_ranks

Local = tuple[SaveColumns, list[torch.Tensor], list[Any]]

_ARRAYS = (
    "dtype_codes",
    "requires_grad",
    "shape_start",
    "shape_values",
    "item_tensors",
    "item_offsets",
    "item_sizes",
    "item_local_offsets",
    "item_sources",
    "item_sharded",
    "item_ties",
)


def collect(state: dict[str, Any], known: KnownState | None, *, rank: int = 0, flatten: bool = True) -> Local:
    """What a planner makes of a state dict."""
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    planner.rank, planner.known = rank, known
    planner.set_up_planner(state)
    return planner.create_local_columns(digests=False)


def leaves(value: Any) -> list[Any]:
    """All values in a nested state dict."""
    if isinstance(value, PerRank):
        return leaves(value.value)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if inner is None else [leaf for entry in inner for leaf in leaves(entry)]


def assert_as_fresh(state: dict[str, Any], known: KnownState, **how: Any) -> Local:
    """What is known of earlier states changes nothing in what comes out."""
    given, fresh = collect(state, known, **how), collect(state, None, **how)
    for name in _ARRAYS:
        assert np.array_equal(getattr(given[0], name), getattr(fresh[0], name)), name
    assert list(given[0].fqns) == list(fresh[0].fqns)
    assert list(given[0].objects.fqns) == list(fresh[0].objects.fqns)
    assert dict(given[0].stride_orders) == dict(fresh[0].stride_orders)
    paths, expected = given[0].planner_data, fresh[0].planner_data
    assert (paths and list(paths.items())) == (expected and list(expected.items()))
    stored = [source for source in fresh[1] if any(source is value for value in leaves(state))]
    assert all(any(source is mine for mine in given[1]) for source in stored)
    assert all(torch.equal(a, b) for a, b in zip(given[1], fresh[1], strict=True))
    assert all(a is b for a, b in zip(given[2], fresh[2], strict=True))
    return given


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


def test_an_unchanged_state_is_recognised() -> None:
    """The second time the very same columns come back, with the tensors and values of now."""
    known, state = KnownState(), training_state()
    first = assert_as_fresh(state, known)
    state["step"] = 8
    state["model"]["b"].add_(1)
    second = assert_as_fresh(dict(state), known)
    assert second[0] is first[0]
    assert isinstance(first[1], Sources)
    assert isinstance(second[1], Sources)
    assert second[1].memory is first[1].memory is not None
    assert second[2][-1] == 8


def test_other_memory_is_noticed_and_costs_nothing_else() -> None:
    """Tensors of the same kind elsewhere give the same columns, and another mark of where they lie."""
    known, state = KnownState(), training_state()
    first = assert_as_fresh(state, known)
    state["model"]["b"] = torch.full((6,), 5.0)
    second = assert_as_fresh(state, known)
    assert second[0] is first[0]
    assert isinstance(second[1], Sources)
    assert isinstance(first[1], Sources)
    assert second[1].memory is not first[1].memory


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
    "negated view": lambda state: state["model"].update(b=torch._neg_view(torch.ones(6))),
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
def test_every_change_is_noticed(change: str) -> None:
    """Whatever changes, in place or by another object, the columns are those of a fresh look; and so again
    when it is changed back."""
    known, state = KnownState(), training_state()
    before = assert_as_fresh(state, known)
    shallow = copy.copy(state) | {"model": copy.copy(state["model"]), "optim": copy.copy(state["optim"])}
    CHANGES[change](shallow)
    after = assert_as_fresh(shallow, known)
    assert after[0] is not before[0]
    assert assert_as_fresh(shallow, known)[1] is not None
    assert_as_fresh(training_state(), known)


def test_ranks_and_unflattened_states_are_told_apart() -> None:
    """PerRank entries are named by rank, and a flat state dict has no paths."""
    known, state = KnownState(), training_state()
    assert_as_fresh(state, known, rank=0)
    assert "rng.rank-1.cpu" in assert_as_fresh(state, known, rank=1)[0].fqns
    flat = {"model.w": state["model"]["w"]}
    assert_as_fresh(flat, known)
    assert assert_as_fresh(flat, known, flatten=False)[0].planner_data is None
    assert assert_as_fresh(flat, known, flatten=False)[0].planner_data is None
    assert assert_as_fresh(flat, known)[0].planner_data == {"model.w": ("model.w",)}


@pytest.mark.parametrize("how", ["freed", "meta", "sparse", "nested"])
def test_what_cannot_be_stored_any_more_is_told_as_ever(how: str) -> None:
    """A parameter whose memory is gone fails the save by name, known or not. Strides of nested tensors are
    never compared: torch would abort the process."""
    known, state = KnownState(), {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
    assert_as_fresh(state, known)
    if how == "freed":
        state["w"].untyped_storage().resize_(0)
    else:
        state["w"] = {
            "meta": lambda: torch.zeros(4, 4, device="meta"),
            "sparse": lambda: torch.zeros(4, 4).to_sparse(),
            "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        }[how]()
    with pytest.raises(PlanError, match="'w'"):
        collect(state, known)


def test_states_with_unusual_parts_are_looked_at_each_time() -> None:
    """A conjugated view is stored by value, so nothing vouches for where it lies."""
    known, state = KnownState(), {"c": torch.ones(3, dtype=torch.complex64).conj()}
    for _ in range(2):
        _, sources, _ = collect(state, known)
        assert isinstance(sources, Sources)
        assert sources.memory is None
        assert torch.equal(sources[0], state["c"])


def test_a_planner_that_chooses_for_itself_is_not_second_guessed() -> None:
    """What an overridden set_up_planner does to the state dict is done each time."""

    class Every(DefaultSavePlanner):
        skipped = ""

        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.state_dict = {k: v for k, v in self.state_dict.items() if k != self.skipped}

    known, planner = KnownState(), Every()
    planner.known = known
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    names = []
    for planner.skipped in ("", "a", ""):
        planner.set_up_planner(state)
        names.append(list(planner.create_local_columns(digests=False)[0].fqns))
    assert names == [["a", "b"], ["b"], ["a", "b"]]


def test_no_tensor_is_kept_and_copies_know_nothing() -> None:
    """What is known are facts: the state may go, and neither a pickle nor a copy takes anything along."""
    known, tensor = KnownState(), torch.zeros(3)
    gone = weakref.ref(tensor)
    collect({"a": tensor}, known)
    del tensor
    gc.collect()
    assert gone() is None
    for other in (pickle.loads(pickle.dumps(known)), copy.deepcopy(known)):
        assert_as_fresh({"a": torch.zeros(3)}, other)


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
@settings(max_examples=60, deadline=None)
def test_no_history_changes_what_comes_out(states: list[dict[str, Any]], data: st.DataObject) -> None:
    """States in any order, some of them again: each gives what a planner gives that knows none before it."""
    known = KnownState()
    for state in data.draw(st.lists(st.sampled_from(states), min_size=2, max_size=6)):
        try:
            collect(state, None)
        except PlanError as refused:
            with pytest.raises(PlanError) as same:
                collect(state, known)
            assert str(same.value) == str(refused)
        else:
            assert_as_fresh(state, known)


FACTS: dict[str, Callable[[], torch.Tensor]] = {
    "sizes": lambda: torch.zeros(2, 8),
    "strides": lambda: torch.zeros(4, 4).t(),
    "dtype": lambda: torch.zeros(4, 4, dtype=torch.int32),
    "device": lambda: torch.zeros(4, 4, device="meta"),
    "requires_grad": lambda: torch.zeros(4, 4, requires_grad=True),
    "class": lambda: torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False),
    "layout": lambda: torch.zeros(4, 4).to_sparse(),
    "negation": lambda: torch._neg_view(torch.zeros(4, 4)),
}


@pytest.mark.parametrize("fact", list(FACTS))
@pytest.mark.parametrize("grad", [True, False])
def test_each_fact_is_compared(fact: str, grad: bool) -> None:
    """torch's guard is not public, so what is relied on is spelled out: any of these facts tells tensors
    apart, whatever the grad mode, and contents and addresses do not."""
    with torch.set_grad_enabled(grad):
        facts = TensorFacts([torch.zeros(3), torch.zeros(4, 4)])
        assert facts.are_of([torch.ones(3), torch.ones(32)[16:].view(4, 4)])
        assert not facts.are_of([torch.zeros(3), FACTS[fact]()])
        assert not facts.are_of([torch.zeros(3)])
    one, other = torch.zeros(2), torch.zeros(2)
    assert TensorFacts([one, other, one]).are_of([other, one, other])
    assert not TensorFacts([one, other, one]).are_of([one, one, one])
    assert not TensorFacts([one, other]).are_of([one, one])
    conjugated = TensorFacts([torch.zeros(2, dtype=torch.complex64)])
    assert not conjugated.are_of([torch.zeros(2, dtype=torch.complex64).conj()])


def look_at_dtensors(rank: int, world_size: int) -> list[bool]:
    """Whether columns are taken over, for DTensors whose facts differ in one way after the other."""
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

    changed_in_place = state([Replicate()], other)
    changed_in_place["kept"]._spec.placements = (Replicate(), Shard(0))
    states = [state([Shard(0)]), state([Shard(0)]), state([Shard(1)]), state([Replicate()])]
    states += [state([Replicate()], other), state([Replicate()], other), changed_in_place]
    known, last, same = KnownState(), None, []
    for now in states:
        columns = assert_as_fresh(now, known)[0]
        same.append(columns is last)
        last = columns
    return same


def test_dtensors_are_known_by_mesh_and_placements() -> None:
    """Equal placements on one mesh are taken over, a rank's empty shard included; other placements or another
    mesh, be it by a change of the spec in place, are not."""
    for same in run_ranks(2, look_at_dtensors):
        assert same == [False, True, False, False, False, True, False]
