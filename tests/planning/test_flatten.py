"""Flattening. Internal: pure; torch's keys and paths for any nesting, and this rank's own values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as torch_flatten
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict as torch_unflatten

from dcp.planners.flatten import flatten_state_dict, replace_element, set_element
from dcp.planners.per_rank import PerRank
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import Path
from tests.support.examples import examples

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
state_dicts = st.dictionaries(keys, values, max_size=4)


def unflatten(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The nested state dict of flat values and their paths."""
    nested: dict[str, Any] = {}
    for fqn, value in flat.items():
        set_element(nested, paths[fqn], value)
    return nested


def torch_result(state_dict: dict[Any, Any], *, legacy: bool) -> Any:
    """What torch makes of it; None where it refuses."""
    _version._derived_version = "2_3" if legacy else None
    try:
        return torch_flatten(state_dict)
    except ValueError:
        return None
    finally:
        _version._derived_version = None


@examples(150)
@given(state_dict=state_dicts, legacy=st.booleans())
def test_keys_and_paths_are_those_of_torch(state_dict: dict[Any, Any], legacy: bool) -> None:
    """Same keys in the same order with the same values and paths, by today's rules and by those before
    2.4."""
    expected = torch_result(state_dict, legacy=legacy)
    if expected is None:
        with pytest.raises(PlanError):
            flatten_state_dict(state_dict, legacy=legacy)
        return
    flat, paths = flatten_state_dict(state_dict, legacy=legacy)
    assert list(flat) == list(expected[0])
    assert all(flat[key] is expected[0][key] for key in flat)
    assert paths == expected[1]
    if not legacy:
        assert unflatten(flat, paths) == torch_unflatten(*expected)


def test_duplicate_keys_are_named() -> None:
    """A dotted key that collides with nesting is an error which lists every such key."""
    with pytest.raises(PlanError, match=r"'a\.b'.*'c\.0'") as caught:
        flatten_state_dict({"a.b": 1, "a": {"b": 2}, "c.0": 3, "c": [TENSOR]})
    assert caught.value.fqns == ["a.b", "c.0"]


def test_per_rank_values_get_a_key_of_their_rank() -> None:
    """PerRank(value) is stored below rank-<n>, nested values below that; also in lists, and by the old
    rules."""
    state = {
        "loader": PerRank({"position": 3}),
        "rng": PerRank(TENSOR),
        "l": [PerRank(1)],
        "d": {"x": PerRank(2)},
    }
    flat, paths = flatten_state_dict(state, rank=5)
    assert list(flat) == ["loader.rank-5.position", "rng.rank-5", "l.0.rank-5", "d.x.rank-5"]
    assert paths["l.0.rank-5"] == ("l", 0, "rank-5")
    assert unflatten(flat, paths)["loader"] == {"rank-5": {"position": 3}}
    assert "d.x.rank-5" in flatten_state_dict(state, rank=5, legacy=True)[0]


def test_keys_that_are_no_strings_are_found_again() -> None:
    """An optimizer's state[0] is replaced, where torch's set_element would add a '0' beside it."""
    state: dict[str, Any] = {"state": {0: {"step": 1}, True: {"step": 1}, None: 1}}
    for path in (("state", "0", "step"), ("state", "True", "step"), ("state", "None")):
        replace_element(state, path, 7)
    assert state == {"state": {0: {"step": 7}, True: {"step": 7}, None: 7}}


def test_a_container_that_cannot_be_set_is_an_error() -> None:
    """A read-only mapping on the way gives a typed error which says what to use."""
    with pytest.raises(PlanError, match=r"mappingproxy.*use a dict"):
        replace_element({"a": MappingProxyType({"b": 1})}, ("a", "b"), 2)
