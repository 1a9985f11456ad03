"""Concurrent saves to one id on S3, ordered only by the conditional request for the manifest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest

from dcp.errors import CheckpointConflictError
from tests.support.crashes import Child, in_lab
from tests.support.fault_doors import METADATA_NAME, Fault, StoreCall
from tests.support.s3 import S3Server
from tests.support.s3_versions import CLEAN, Place
from tests.support.versions import ABSENT

ROUNDS = 2
OLD = 100
MIB = 1 << 18
"""Number of 4-byte elements."""


def race(place: Place, version: int, barrier: Barrier) -> list[bool]:
    """Return by round whether this writer's save committed. Errors other than conflicts end the test."""
    outcomes = []
    for number in range(ROUNDS):
        try:
            # All writers have seen the same state of the id when the first begins to write.
            place.at(str(number)).save(version, Fault("create", hook=_once(lambda: _meet(barrier))))
        except CheckpointConflictError:
            outcomes.append(False)
        else:
            outcomes.append(True)
        _meet(barrier)  # no writer begins the next round before all ended this one
    return outcomes


def _meet(barrier: Barrier) -> None:
    barrier.wait(240)


def _once(act: Callable[[], object]) -> Callable[[StoreCall], None]:
    done: list[bool] = []

    def hook(operation: StoreCall) -> None:
        if not done:
            done.append(True)
            act()

    return hook


def _races(place: Place, overwrite: bool, count: int) -> list[Any]:
    if overwrite:
        for number in range(ROUNDS):
            place.at(str(number)).save(OLD)
    barrier = multiprocessing.get_context("fork").Barrier(count)
    writers = [Child(race, place, version, barrier) for version in range(1, count + 1)]
    endings = [writer.wait() for writer in writers]
    for ending in endings:
        if ending.raised is not None:
            raise AssertionError(ending.raised.traceback_text)
    return [
        (
            [version for version, ending in enumerate(endings, start=1) if ending.value[number]],
            look(place.at(str(number))),
        )
        for number in range(ROUNDS)
    ]


def look(place: Place) -> tuple[Any, ...]:
    """Return the versions that dcp and stock see, the findings of `dcp verify`, objects and uploads."""
    return place.seen(), place.seen_by_stock(), place.findings(), place.listing(), place.uploads()


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("overwrite", [False, True], ids=["create", "overwrite"])
def test_one_of_several_saves_commits(s3_server: S3Server, s3_root: str, overwrite: bool, count: int) -> None:
    """Exactly one save commits, the others raise CheckpointConflictError. The winner's checkpoint is whole,
    also for stock torch, without leftovers."""
    place = Place(s3_root, s3_server.storage_options)
    for winners, seen in in_lab(_races, place, overwrite, count):
        assert len(winners) == 1, winners
        assert seen == (winners[0], winners[0], set(), CLEAN, 0)


def test_an_aborted_upload_is_a_conflict(s3_server: S3Server, s3_root: str) -> None:
    """The winner aborts the uploads of the loser, whose error is a conflict."""
    options = {**s3_server.storage_options, "part_bytes": 5 << 20}
    place = Place(s3_root, options, large=12 * MIB)
    place.save(OLD)
    began: list[int] = []

    def overtake() -> None:
        began.append(place.uploads())
        place.save(2)

    with pytest.raises(CheckpointConflictError, match="was aborted and its data discarded: another writer"):
        place.save(1, Fault("finish", hook=_once(overtake)))
    assert began == [1]
    assert look(place) == (2, 2, set(), CLEAN, 0)


@pytest.mark.parametrize(("old", "bare"), [(OLD, False), (OLD, True), (None, True)])
def test_late_metadata_is_refused_or_removed(
    s3_server: S3Server, s3_root: str, old: int | None, bare: bool
) -> None:
    """Another save commits between a manifest and its `.metadata`: finally both files are the other save's,
    or `.metadata` is absent if that save writes none, also if the first save had none to compare."""
    place = Place(s3_root, s3_server.storage_options)
    if old is not None:
        place.save(old)
    overtake = _once(lambda: place.save(2, torch_compatible=not bare))
    place.save(1, Fault("publish", name=METADATA_NAME, hook=overtake))
    assert look(place) == (
        (2, ABSENT, set(), {"manifest": 1, "data": 1}, 0) if bare else (2, 2, set(), CLEAN, 0)
    )
