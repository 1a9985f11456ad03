"""Concurrent commits. Internal: thousands of orders of single operations, which no public call can choose.

The store has no lock between writers, as an object store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import CheckpointConflictError
from tests.support.commit_scenes import (
    SCENES,
    THREE,
    Stage,
    check_end,
    check_leftovers,
    save,
    two_switches,
)
from tests.support.examples import examples
from tests.support.lockless import Stopped, by_plan

LONG = ("create, create bare", "overwrite, overwrite bare", "overwrite bare with both", "overwrite stock")
"""Scenes with the most plans. `test_three_writers_in_any_order` and `test_a_writer_killed_beside_another`
sample similar orders."""


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, 6) for name in SCENES if name not in LONG),
        *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in SCENES),
    ],
)
def test_two_writers_interleaved_anywhere(name: str, every: int) -> None:
    """A whole checkpoint is visible at any time. Of writers that saw the same state one commits. The others
    raise CheckpointConflictError; `.metadata` is the winner's, and no file is left over."""
    scene = SCENES[name]
    played = 0
    for plan in itertools.islice(two_switches(scene), 0, None, every):
        stage = Stage(scene)
        try:
            check_end(stage, stage.play(by_plan(plan)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {plan}: {error}") from error
        played += 1
    assert played > 10


def by_draws(draw: Callable[[st.SearchStrategy[int]], int]) -> Callable[[list[int]], int]:
    """Return a scheduler whose order of actors and length of turns hypothesis draws."""
    left = [0, 0]

    def choose(waiting: list[int]) -> int:
        if left[1] == 0 or left[0] not in waiting:
            left[:] = draw(st.sampled_from(waiting)), draw(st.integers(1, 8))
        left[1] -= 1
        return left[0]

    return choose


@pytest.mark.parametrize("name", THREE)
@examples(20)
@given(data=st.data())
def test_three_writers_in_any_order(name: str, data: st.DataObject) -> None:
    """The guarantees for two writers hold for three."""
    stage = Stage(THREE[name])
    check_end(stage, stage.play(by_draws(data.draw)))


@pytest.mark.parametrize("name", ["create, create bare", "overwrite, overwrite", "overwrite stock"])
@examples(20)
@given(data=st.data())
def test_a_writer_killed_beside_another(name: str, data: st.DataObject) -> None:
    """Readers always see a whole checkpoint, and the next save commits and removes all leftovers."""
    scene = SCENES[name]
    stage = Stage(scene)
    outcomes = stage.play(by_draws(data.draw), {0: data.draw(st.integers(1, 24))})
    killed = isinstance(outcomes[0].error, Stopped)
    assert killed or outcomes[0].error is None or isinstance(outcomes[0].error, CheckpointConflictError)
    save(50, stage.model)
    stage.look()
    assert stage.truths[-1] == 50
    check_leftovers(stage)
