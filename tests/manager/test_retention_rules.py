"""Plans of retention. Internal: pure functions of steps, rules and time."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.manager.retention import Best, Keep, Retention, plan
from dcp.steps import OPTIMIZER, StepState

NOW = 1_000_000.0


def good(*steps: int, **metrics: float) -> list[StepState]:
    """Return good steps with the same metrics, committed one second apart, the last one now."""
    last = max(steps)
    return [StepState(step, NOW - (last - step), metrics) for step in steps]


def kept(retention: Retention | None, states: list[StepState], now: float = NOW) -> list[int]:
    """Return the steps that a plan keeps, and check that it deletes all others."""
    result = plan(retention, states, now)
    assert sorted([*result.keep, *result.delete]) == sorted(state.step for state in states)
    assert all(result.keep.values())
    return list(result.keep)


def test_younger_than_uses_commit_times() -> None:
    """The commit time counts; an unknown or future time counts as young."""
    states = [
        StepState(1, NOW - 61),
        StepState(2, NOW - 59),
        StepState(3, None),
        StepState(4, NOW + 5),
        StepState(5, NOW - 90),
        StepState(6, NOW - 90),
    ]
    assert kept(Retention(younger_than_seconds=60), states) == [2, 3, 4, 6]


@pytest.mark.parametrize(("mode", "expected"), [("min", [2, 5, 9]), ("max", [1, 5, 9])])
def test_best_keeps_lowest_or_highest_values(mode: Any, expected: list[int]) -> None:
    """The lowest or highest values are kept at any age; missing, NaN and infinite values never."""
    values = {1: 9.0, 2: 1.0, 3: math.nan, 4: -math.inf, 5: 5.0, 6: math.inf}
    states = [StepState(step, NOW, {"loss": value}) for step, value in values.items()]
    states += [StepState(7, NOW, {"accuracy": 0.0}), StepState(8, NOW), StepState(9, NOW)]
    assert kept(Retention(best=Best("loss", 2, mode)), states) == expected
    assert kept(Retention(last=1, best=Best("loss", 2, mode)), states) == expected


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_best_without_finite_metrics_deletes_nothing(mode: Any, value: float | None) -> None:
    """If no step has the metric as a finite number, all steps are kept until a step has it."""
    metrics = {} if value is None else {"val_loss": value}
    states = [StepState(step, NOW, {"valloss": float(step), **metrics}) for step in range(1, 6)]
    retention = Retention(last=1, best=Best("val_loss", 1, mode))
    found = plan(retention, states, NOW)
    assert (list(found.keep), found.delete) == ([1, 2, 3, 4, 5], ())
    assert "best val_loss" in found.keep[1][0]
    assert "'val_loss'" in found.unjudged["val_loss"]
    assert ("did you mean 'valloss'" in found.unjudged["val_loss"]) == (value is None)
    judged = plan(retention, [*states, StepState(6, NOW, {"val_loss": 1.0})], NOW)
    assert (list(judged.keep), judged.unjudged) == ([6], {})


def test_a_damaged_step_is_deleted_after_newer_good_steps() -> None:
    """A damaged step is deleted once as many good steps are newer as `last` says, at least one."""
    damaged = StepState(5, NOW, health="damaged")
    assert kept(Retention(last=2), [damaged]) == [5]
    assert kept(Retention(last=2), [*good(1, 2), damaged]) == [1, 2, 5]
    assert kept(Retention(last=2), [damaged, *good(6)]) == [5, 6]
    assert kept(Retention(last=2), [damaged, *good(6, 7)]) == [6, 7]
    assert kept(Retention(every_steps=1), [damaged, *good(6)]) == [6]
    assert kept(Retention(last=1), [replace(damaged, pinned=True), *good(6)]) == [5, 6]


@pytest.mark.parametrize(
    "retention",
    [
        Retention(last=3),
        Retention(every_steps=1000, younger_than_seconds=3600.5),
        Retention(last=1, best=Best("eval/loss")),
        Retention(best=[Best("a", 2, "max"), Best("b")]),
        Retention(last=3, optimizer=Keep(last=2, best=Best("loss")), parts={"ema.*": Keep(every_steps=10)}),
    ],
)
def test_rules_are_data(retention: Retention) -> None:
    """The output of to_dict survives JSON, and from_dict restores the same rules."""
    assert Retention.from_dict(json.loads(json.dumps(retention.to_dict()))) == retention
    assert hash(Retention.from_dict({"last": 3})) == hash(Retention(last=3))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "Retention: give at least one"),
        ({"last": 0}, "last:"),
        ({"every_steps": -1}, "every_steps:"),
        ({"younger_than_seconds": 0}, "younger_than_seconds:"),
        ({"younger_than_seconds": math.nan}, "younger_than_seconds:"),
        ({"best": ["loss"]}, "best:"),
        ({"best": {"metric": "loss", "mode": "lowest"}}, "best.mode:"),
        ({"best": {"metric": "loss", "top": 1}}, "best: unknown field 'top'"),
        ({"lasst": 3}, "Retention: unknown field 'lasst'"),
        ({"optimizer": {"lats": 2}}, "Keep: unknown field 'lats'"),
    ],
)
def test_an_invalid_rule_names_its_field(data: Any, field: str) -> None:
    """An invalid rule raises a ValueError that begins with the field."""
    with pytest.raises(ValueError, match=f"^{re.escape(field)}"):
        Retention.from_dict(data)


# -- properties ----------------------------------------------------------------------------------------------

METRICS = st.dictionaries(
    st.sampled_from(["loss", "acc"]), st.floats(allow_nan=True, width=16) | st.sampled_from([0.0, 1.0])
)
STATES = st.lists(
    st.builds(
        StepState,
        step=st.integers(0, 60),
        committed_seconds=st.none() | st.floats(NOW - 100, NOW + 10),
        metrics=METRICS,
        health=st.sampled_from(["good", "good", "good", "pending", "damaged"]),
        pinned=st.sampled_from([False, False, False, True]),
    ),
    unique_by=lambda state: state.step,
    max_size=25,
)
BESTS = st.builds(Best, st.sampled_from(["loss", "acc"]), st.integers(1, 4), st.sampled_from(["min", "max"]))


def rules(**fixed: Any) -> st.SearchStrategy[Retention]:
    """Draw any combination of at least one rule."""
    fields: dict[str, Any] = {
        "last": st.none() | st.integers(1, 5),
        "every_steps": st.none() | st.integers(1, 20),
        "best": st.none() | BESTS | st.lists(BESTS, max_size=2),
        "younger_than_seconds": st.none() | st.floats(0.5, 200),
        **fixed,
    }
    whole = st.fixed_dictionaries(fields).filter(lambda given: any(given.values()))
    return whole.map(lambda given: Retention(**given))


@given(states=STATES, retention=rules())
def test_the_newest_good_and_the_pinned_are_never_deleted(
    states: list[StepState], retention: Retention
) -> None:
    """No rules delete the newest good step, a pinned step, or a pending step."""
    deleted = set(plan(retention, states, NOW).delete)
    newest = max((state.step for state in states if state.health == "good"), default=None)
    assert newest not in deleted
    assert not deleted & {state.step for state in states if state.pinned or state.health == "pending"}


@given(states=STATES, retention=rules())
def test_a_second_plan_deletes_no_more(states: list[StepState], retention: Retention) -> None:
    """A second plan for the kept steps deletes no step, and gives the same reasons."""
    first = plan(retention, states, NOW)
    second = plan(retention, [state for state in states if state.step in first.keep], NOW)
    assert second.delete == ()
    assert second.keep == first.keep


def dropped(retention: Retention, states: list[StepState], now: float = NOW) -> dict[int, list[str]]:
    """Return the names of the dropped parts by step, and check that only kept steps lose parts."""
    result = plan(retention, states, now)
    assert result.drop.keys() <= result.keep.keys()
    return {step: [part.name for part in parts] for step, parts in result.drop.items()}


def test_steps_without_the_part_do_not_count() -> None:
    """Steps without the part do not count; the newest steps with it keep it, the newest of all always."""
    gone = frozenset(OPTIMIZER)
    states = [*good(1, 2, 3), StepState(4, NOW, dropped=gone), StepState(5, NOW, dropped=gone)]
    assert dropped(Retention(optimizer=Keep(last=2)), states) == {1: ["optimizer"]}
    assert dropped(Retention(optimizer=Keep(every_steps=100)), states) == {1: ["optimizer"], 2: ["optimizer"]}


def test_pinned_and_damaged_steps_keep_their_parts() -> None:
    """Pinned, damaged, partial and pending steps keep their parts. A rule with an unknown metric drops none,
    and the plan says so."""
    held = [StepState(1, NOW, pinned=True)]
    for step, health in enumerate(("damaged", "partial", "pending"), start=2):
        held.append(StepState(step, NOW, health=health))  # type: ignore[arg-type]
    assert dropped(Retention(optimizer=Keep(last=1)), [*held, *good(5, 6)]) == {5: ["optimizer"]}
    result = plan(Retention(optimizer=Keep(best=Best("los"))), good(1, 2, 3, loss=1.0), NOW)
    assert result.drop == {} and "did you mean 'loss'" in result.unjudged["los"]
