"""The default planners compared with torch's: flat names, plans, metadata and attributes."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version

from dcp import DefaultLoadPlanner, DefaultSavePlanner, PerRank, load
from dcp.errors import PlanError
from tests.support.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSOR = torch.zeros(1)
leaves: st.SearchStrategy[Any] = st.one_of(
    st.integers(0, 3), st.just("text"), st.none(), st.just(TENSOR), st.just((TENSOR, {}))
)
keys = st.one_of(st.sampled_from(["a", "b", "c"]), st.integers(0, 2))
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.tuples(inner),
    ),
    max_leaves=12,
)


def flat(planner: Any, state: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flat state and the paths of its names."""
    planner.set_up_planner(state, is_coordinator=True)
    return planner.state_dict, planner.mappings


@examples(150)
@given(state=st.dictionaries(keys, values, max_size=4))
def test_keys_and_paths_equal_torchs(state: dict[Any, Any]) -> None:
    """Any nested state has torch's names in torch's order with the same values and paths, or is refused."""
    try:
        expected, paths = flat(stock.DefaultSavePlanner(), state)
    except ValueError:
        with pytest.raises(PlanError):
            flat(DefaultSavePlanner(), state)
        return
    found = flat(DefaultSavePlanner(), state)
    assert list(found[0]) == list(expected)
    assert all(found[0][key] is expected[key] for key in expected)
    assert found[1] == paths


def test_colliding_names_are_refused() -> None:
    """Dotted keys that collide with nested keys raise an error that lists each of them."""
    with pytest.raises(PlanError, match=r"'a\.b'.*'c\.0'") as caught:
        flat(DefaultSavePlanner(), {"a.b": 1, "a": {"b": 2}, "c.0": 3, "c": [TENSOR]})
    assert caught.value.fqns == ["a.b", "c.0"]


def test_per_rank_values_get_a_key_of_their_rank() -> None:
    """PerRank(value) is stored below rank-<n>, followed by nested keys, also in lists."""
    state = {"loader": PerRank({"position": 3}), "rng": PerRank(TENSOR), "l": [PerRank(1)]}
    names, paths = flat(DefaultSavePlanner(), state)
    assert list(names) == ["loader.rank-0.position", "rng.rank-0", "l.0.rank-0"]
    assert paths["l.0.rank-0"] == ("l", 0, "rank-0")


def test_a_read_only_mapping_is_an_error(tmp_path: Path) -> None:
    """A read-only mapping in the state raises PlanError, which recommends a dict."""
    stock.save({"a": {"b": 2}}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match=r"mappingproxy.*use a dict"):
        load({"a": MappingProxyType({"b": 1})}, checkpoint_id=tmp_path)


def test_checkpoints_of_torch_before_2_4_load(tmp_path: Path) -> None:
    """Keys of torch before 2.4, which keeps dicts without tensors whole, are recognised and loaded."""
    old = {"model": {"w": torch.ones(2)}, "opt": {"lr": 0.5, "betas": {"one": 1}}}
    _version._derived_version = "2_3"
    try:
        stock.save(old, checkpoint_id=tmp_path)
    finally:
        _version._derived_version = None
    assert "opt" in stock.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "opt": {"lr": 0.0, "betas": {"one": 0}}}
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert loaded["opt"] == old["opt"]
    assert loaded["model"]["w"].tolist() == [1, 1]


@pytest.mark.parametrize("flatten", [True, False])
def test_plans_and_metadata_equal_torchs(flatten: bool) -> None:
    """Items, metadata entries and planner data equal those of torch's planner, in the same order."""
    state: dict[str, Any] = {"w": torch.zeros(2), "b": torch.ones(4, dtype=torch.bfloat16), "epoch": 7}
    if flatten:
        state |= {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "list": [torch.tensor(3), {"lr": 0.5}]}
    results = []
    for planner in (DefaultSavePlanner(flatten), stock.DefaultSavePlanner(flatten)):
        planner.set_up_planner(state, is_coordinator=True)
        local = planner.create_local_plan()
        plans, metadata = planner.create_global_plan([local])
        items = [(item.index, item.index.index, item.type, item.tensor_data) for item in plans[0].items]
        entries = list(metadata.state_dict_metadata.items())
        results.append(([item.index for item in local.items], items, entries, metadata.planner_data))
    assert results[0] == results[1]


def test_planners_are_instances_of_torchs() -> None:
    """The planners are instances of torch's classes, and take torch's arguments."""
    saving, loading = DefaultSavePlanner(True, False, None, True, True), DefaultLoadPlanner(True, False, True)
    assert isinstance(saving, stock.DefaultSavePlanner) and isinstance(loading, stock.DefaultLoadPlanner)
    assert not saving.flatten_sharded_tensors and loading.allow_partial_load
    assert saving.dedup_save_to_lowest_rank and saving.enable_plan_caching
    loading.set_up_planner({"w": torch.zeros(1)})
    with pytest.raises(PlanError, match="metadata"):
        loading.create_local_plan()
