"""Rules of `Rescale`. Internal: pure; what they make of the states of any other number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.planners.rescale import Rescale, rescaled_value
from dcp.storage.errors import CheckpointError, OptionError, PlanError

WORLDS = st.sampled_from([1, 2, 3, 8])


def remade(rule: Any, states: list[Any], world_size: int) -> list[Any]:
    """Of each of ``world_size`` ranks."""
    return [rescaled_value("v", rule, states, rank, world_size) for rank in range(world_size)]


@given(states=st.lists(st.integers(-(2**60), 2**60), min_size=1, max_size=8), world_size=WORLDS)
def test_sums_stay(states: list[int], world_size: int) -> None:
    """Whole numbers to the last one, dealt out evenly; also as tensors, and in dicts."""
    made = remade("sum", [{"seen": state, "t": torch.tensor([state])} for state in states], world_size)
    seen = [each["seen"] for each in made]
    assert sum(seen) == sum(states) and max(seen) - min(seen) <= 1
    assert [int(each["t"]) for each in made] == seen or abs(sum(states)) >= 2**63


@given(states=st.lists(st.lists(st.integers()), min_size=1, max_size=8), world_size=WORLDS)
def test_lists_are_joined_and_cut(states: list[list[int]], world_size: int) -> None:
    """Every item once, in the order of the ranks; the same of tensors."""
    joined = [item for state in states for item in state]
    made = remade("split", states, world_size)
    assert [item for part in made for item in part] == joined
    assert max(map(len, made)) - min(map(len, made)) <= 1
    rows = remade("split", [torch.arange(len(state) * 2).view(-1, 2) for state in states], world_size)
    assert list(map(len, rows)) == list(map(len, made))


def test_what_is_the_same_on_all_ranks_stays_so() -> None:
    """Compared with its tensors; a difference is an error."""
    state = {"epoch": 3, "l": [torch.ones(2), (1, "a")]}
    assert remade("same", [state, {"epoch": 3, "l": [torch.ones(2), (1, "a")]}], 3) == [state] * 3
    for other in ({"epoch": 4, "l": state["l"]}, {"epoch": 3, "l": [torch.zeros(2), (1, "a")]}, {"epoch": 3}):
        with pytest.raises(PlanError, match="differs"):
            remade("same", [state, other], 3)


@pytest.mark.parametrize(
    ("rule", "states"),
    [("sum", ["a", "b"]), ("sum", [True, False]), ("split", [1, 2]), ("sum", [{"a": 1}, {"b": 1}])],
)
def test_values_that_a_rule_is_not_for(rule: Any, states: list[Any]) -> None:
    """An error, not a guess."""
    with pytest.raises(CheckpointError):
        remade(rule, states, 2)


def test_no_rule_is_an_error_at_once() -> None:
    """Where the value is marked, not in the resume that needs it."""
    for rule in ("mean", None):
        with pytest.raises(OptionError, match=re.escape('"same", "sum", "split", "keep" or a function')):
            Rescale(1, rule)  # type: ignore[arg-type]
