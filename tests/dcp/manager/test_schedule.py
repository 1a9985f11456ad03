"""When a loop saves: the rules of `dcp.manager.coordination.schedule`, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.manager.coordination.schedule import Reason, Schedule


def schedule(
    every_steps: int | None = None, every_seconds: float | None = None, save_first: bool = False
) -> Schedule:
    """A schedule made at time 0."""
    return Schedule(
        every_steps=every_steps, every_seconds=every_seconds, save_first=save_first, now_seconds=0.0
    )


def saved_steps(rule: Schedule, steps: range, *, seconds_a_step: float = 0.0, last: int = -1) -> list[int]:
    """The steps that a loop over ``steps`` saves, each begun when the steps before took their time."""
    saved = []
    for number, step in enumerate(steps, start=1):
        now = number * seconds_a_step
        rule.begin(step, time_is_up=rule.time_is_up(now))
        first_answer = rule.reason(step, last=step == last)
        assert rule.reason(step, last=step == last) == first_answer
        if first_answer:
            rule.saved(step, now)
            saved.append(step)
            assert rule.reason(step, last=step == last) is None
    return saved


def test_steps_are_multiples_and_zero_is_none() -> None:
    """A loop from 0 saves at 100, 200, ..., not before anything was trained."""
    assert saved_steps(schedule(100), range(301)) == [100, 200, 300]


def test_a_restored_run_goes_on_with_the_same_steps() -> None:
    """Restored at 137 it saves at 200, neither at once nor 100 steps later; at 200, at 300."""
    rule = schedule(100, save_first=True)
    rule.restored(137, 0.0)
    assert saved_steps(rule, range(138, 301)) == [200, 300]
    rule = schedule(100)
    rule.restored(200, 0.0)
    assert saved_steps(rule, range(200, 301)) == [300]


def test_a_loop_that_does_not_ask_at_each_step_saves_when_a_multiple_was_passed() -> None:
    """Asked at 30, 60, ... with an interval of 100 it saves at 120, 210, 300."""
    assert saved_steps(schedule(100), range(30, 331, 30)) == [120, 210, 300]


def test_going_back_to_an_older_step_saves_its_multiples_again() -> None:
    """After a rollback from 250 to 100, 200 is due again; also where the loop just counts anew."""
    rule = schedule(100)
    assert saved_steps(rule, range(1, 251)) == [100, 200]
    rule.restored(100, 0.0)
    assert saved_steps(rule, range(101, 251)) == [200]
    assert saved_steps(rule, range(1, 151)) == [100]


def test_first_last_and_every_call() -> None:
    """The first step where asked for, the last whatever the interval, and all without an interval."""
    assert saved_steps(schedule(100, save_first=True), range(7, 251), last=250) == [7, 100, 200, 250]
    assert saved_steps(schedule(100), range(1, 201), last=200) == [100, 200]
    assert saved_steps(schedule(), range(0, 50, 7)) == list(range(0, 50, 7))


def test_time_counts_from_the_last_save() -> None:
    """Every 10 s with 3 s a step: at 12 s, then 12 s later; a restored run waits 10 s too."""
    assert saved_steps(schedule(every_seconds=10.0), range(1, 13), seconds_a_step=3.0) == [4, 8, 12]
    rule = schedule(every_seconds=10.0)
    rule.restored(100, 5.0)
    assert not rule.time_is_up(14.9)
    assert rule.time_is_up(15.0)


def test_steps_and_seconds_whichever_comes_first() -> None:
    """A save by one interval restarts the clock of the other."""
    assert saved_steps(schedule(5, 4.0), range(1, 13), seconds_a_step=1.0) == [4, 5, 9, 10]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((10, None, False), "steps"), ((None, 1.0, False), "seconds"), ((None, None, False), "call")],
)
def test_the_reason_is_told(arguments: tuple[int | None, float | None, bool], reason: Reason) -> None:
    """Step 10 after 2 s is due for the one rule that there is."""
    rule = schedule(*arguments)
    rule.begin(10, time_is_up=rule.time_is_up(2.0))
    assert rule.reason(10) == reason
    assert rule.reason(10, last=True) == "last"


def test_intervals_that_make_no_sense_are_refused() -> None:
    """ValueError names the argument and the value."""
    with pytest.raises(ValueError, match=r"every_steps .* not 0"):
        schedule(0)
    with pytest.raises(ValueError, match=r"every_seconds .* not nan"):
        schedule(every_seconds=float("nan"))


@given(
    every=st.integers(1, 50),
    stride=st.integers(1, 60),
    start=st.integers(0, 200),
    restored=st.none() | st.integers(0, 200),
)
def test_no_two_saves_are_further_apart_than_interval_and_stride(
    every: int, stride: int, start: int, restored: int | None
) -> None:
    """Whatever the stride of the loop and wherever it began: a multiple that is passed leads to one save."""
    rule = schedule(every)
    begin = start
    if restored is not None:
        rule.restored(restored, 0.0)
        begin = restored + 1
    steps = range(begin, begin + 400, stride)
    saved = saved_steps(rule, steps)
    base = restored if restored is not None else begin
    for step in steps:
        passed = range(base - base % every + every, step + 1, every)
        if step == base:  # the very first: due if it is a multiple itself
            passed = range(step, step + 1) if step > 0 and step % every == 0 else range(0)
        assert (step in saved) == (len(passed) > 0), step
        base = step if step in saved else base
