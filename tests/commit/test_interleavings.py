"""Commits beside each other. Internal: thousands of orders of single operations, which no door can choose.

The store has no lock that keeps the writers apart, as an object service.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import CheckpointConflictError
from dcp.storage.commit import Previous
from dcp.storage.commit_names import METADATA_NAME
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.stores import Store
from tests.support.commit_scenes import (
    SCENES,
    STOCK,
    STOCK_FILE,
    THREE,
    Stage,
    bare,
    check_end,
    check_what_is_left,
    save,
    stock_save,
    two_switches,
    version_of,
)
from tests.support.examples import examples
from tests.support.lockless import ObjectModel, Stopped, by_plan, run_in_turns

LONG = ("create, create bare", "overwrite, overwrite bare", "overwrite bare with both", "overwrite stock")
"""They have the most plans; `test_three_writers_in_any_order` and `test_a_writer_is_killed_beside_another`
draw from their like."""


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, 3) for name in SCENES if name not in LONG),
        *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in SCENES),
    ],
)
def test_two_writers_interrupt_each_other_anywhere(name: str, every: int) -> None:
    """At every instant a whole checkpoint is visible; one of those that saw the same state commits, the
    others raise CheckpointConflictError; `.metadata` is the winner's, and no file is left over."""
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCENES)
def test_two_writers_interrupt_each_other_twice(name: str) -> None:
    """As above, with one more switch anywhere."""
    scene = SCENES[name]
    for plan in two_switches(scene):
        first, second = plan[0][0], plan[1][0]
        for again in range(1, 16):
            stage = Stage(scene)
            check_end(stage, stage.play(by_plan([*plan[:2], (first, again), (second, 99)])))


def by_draws(draw: Callable[[st.SearchStrategy[int]], int]) -> Callable[[list[int]], int]:
    """Actors that go on for a while, in an order that hypothesis looks for."""
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
    """As two do."""
    stage = Stage(THREE[name])
    check_end(stage, stage.play(by_draws(data.draw)))


@pytest.mark.parametrize("name", ["create, create bare", "overwrite, overwrite", "overwrite stock"])
@examples(20)
@given(data=st.data())
def test_a_writer_is_killed_beside_another(name: str, data: st.DataObject) -> None:
    """Readers see whole checkpoints all the time, and the next save commits and clears all away."""
    scene = SCENES[name]
    stage = Stage(scene)
    outcomes = stage.play(by_draws(data.draw), {0: data.draw(st.integers(1, 24))})
    killed = isinstance(outcomes[0].error, Stopped)
    assert killed or outcomes[0].error is None or isinstance(outcomes[0].error, CheckpointConflictError)
    save(50, stage.model)
    stage.look()
    assert stage.truths[-1] == 50
    check_what_is_left(stage)


def test_a_save_whose_files_were_cleared_away_does_not_commit() -> None:
    """It was the first to the id and slow: another save has taken its files for remains of a killed one, and
    was deleted since, so that there is no manifest again. Nothing is left of both."""
    model = ObjectModel("tests/commit-interleavings")
    model.clear()
    alone = run_in_turns(model, [partial(save, 1)], by_plan([]))[0]
    before_the_lock = [step.op for step in alone.log].index("lock")
    model.clear()

    def save_and_delete(store: Store) -> tuple[int, Previous]:
        saved = save(2, store)
        for info in store.list():
            store.delete(info.name)
        return saved

    actors: list[Callable[[Store], tuple[int, Previous]]] = [partial(save, 1), save_and_delete]
    first, second = run_in_turns(model, actors, by_plan([(0, before_the_lock), (1, 99)]))
    assert second.error is None
    assert isinstance(first.error, CheckpointConflictError)
    assert "are not there" in str(first.error)
    assert model.list() == []


def test_a_late_metadata_leaves_a_place_that_stock_took_alone() -> None:
    """A save is replaced right after its `.metadata`, by one without; when it finds out, stock has saved
    there. What stock wrote stays."""
    model = ObjectModel("tests/commit-interleavings")
    model.clear()
    log = run_in_turns(model, [partial(save, 1)], by_plan([]))[0].log
    written = [step.op for step in log if step.name == METADATA_NAME].index("publish")
    after = [step.number for step in log if step.name == METADATA_NAME][written]
    model.clear()

    def others(store: Store) -> tuple[int, Previous]:
        bare(2, store)
        return stock_save(3, store)

    actors: list[Callable[[Store], tuple[int, Previous]]] = [partial(save, 1), others]
    first, _ = run_in_turns(model, actors, by_plan([(0, after), (1, 99)]))
    assert first.error is None
    assert version_of(open_index(model)) == STOCK
    assert {info.name for info in model.list()} >= {STOCK_FILE, METADATA_NAME}
