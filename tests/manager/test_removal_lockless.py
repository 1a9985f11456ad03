"""A removal during a save, in every order. Internal: only single operations can be interleaved."""

from __future__ import annotations

import itertools

import pytest

from dcp.manager.removal import Removed, remove_checkpoint
from dcp.steps import read_notes
from dcp.storage.commit import Previous
from dcp.storage.commit_names import MANIFEST_NAME, NOTES_NAME
from dcp.storage.errors import CheckpointConflictError
from dcp.storage.stores.base import Store
from tests.support.commit_scenes import (
    Scene,
    Stage,
    bare,
    check_leftovers,
    save,
    save_id,
    two_switches,
    version_in,
)
from tests.support.lockless import by_plan

NOW = 1e9

removed: list[Removed] = []


def remove(version: int, store: Store) -> tuple[int, Previous]:
    """Remove the checkpoint, as an actor of a scene."""
    removed.append(remove_checkpoint(store, NOW))
    return version, Previous()


class RemovalStage(Stage):
    """A stage that lets only the checkpoint disappear that the removal has read."""

    def look(self) -> None:
        """Check after an operation that a whole checkpoint is visible, or the removed one is gone."""
        manifest = self.model.content(MANIFEST_NAME)
        if manifest is not None:
            self.published.add(version_in(manifest))
        truth = self.truth()
        if truth != self.truths[-1]:
            if truth == 0:
                tombstone = read_notes(self.model).deleting
                assert tombstone is not None
                assert tombstone.save_id == save_id(self.truths[-1])
            self.truths.append(truth)


@pytest.mark.parametrize(
    ("kind", "every"),
    [(save, 5), *(pytest.param(kind, 1, marks=pytest.mark.exhaustive) for kind in (save, bare))],
)
def test_a_save_during_a_removal(kind: object, every: int) -> None:
    """The removed checkpoint is gone, and a checkpoint committed since stays whole. A save that began before
    the removal and ends after it raises CheckpointConflictError, and leaves no files."""
    scene = Scene((save,), [remove, save if kind is save else bare], compares_deletions=True)
    ends: set[tuple[str, bool, int]] = set()
    for plan in itertools.islice(two_switches(scene, RemovalStage), 0, None, every):
        removed.clear()
        stage = RemovalStage(scene)
        removal, other = stage.play(by_plan(plan))
        assert removal.error is None, plan
        saved = other.error is None
        assert saved or isinstance(other.error, CheckpointConflictError)
        assert saved == (2 in stage.published), plan
        last = stage.truths[-1]
        if saved and removed[0].outcome == "replaced":
            assert last == 2, plan
        if last == 0:
            assert stage.model.list() == [], plan
            assert stage.model.uploads == {}, plan
        else:
            if stage.model.content(NOTES_NAME) is not None:
                assert read_notes(stage.model).deleting is None, plan
                stage.model.delete(NOTES_NAME)
            check_leftovers(stage)
        ends.add((removed[0].outcome, saved, last))
    # Replaced before or after the removal; both gone; the save is too late; the removal is too late.
    assert ends == {("deleted", True, 2), ("deleted", True, 0), ("deleted", False, 0), ("replaced", True, 2)}
