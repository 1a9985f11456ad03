"""SIGKILL of one of two ranks before every step that either takes on storage; the other says so in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import dcp
from dcp.inspection.verification import verify
from dcp.storage.stores import PosixStore
from tests.support.crashes import Ending, Group, in_lab, kill_rank, run_groups
from tests.support.versions import (
    ABSENT,
    TOGETHER,
    copy_folder,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    version_apart,
    version_state,
)

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
TIMEOUT_SECONDS = 60.0
SURVIVAL_SECONDS = 150.0
"""Three of them are spent on waiting for the killed rank; the rest is room for a busy machine."""

NOBODY = -1


pytestmark = pytest.mark.timeout(900)


def save_together(
    rank: int, world_size: int, folder: Path, victim: int, observer: int, at: int, *, mapped: bool = False
) -> list[str]:
    """One save; ``victim`` is killed when ``observer`` is about to take its ``at``-th step. Steps taken.
    ``mapped``: each rank has a half of some tensors, which a weight map puts together."""
    steps: list[str] = []

    def observe(op: str, name: str) -> None:
        steps.append(op)
        if rank == observer and len(steps) == at:
            kill_rank(victim)

    writer = dcp.FileSystemWriter(folder, open_store=partial(PosixStore, observe=observe))
    state = version_apart(NEW, own=rank) if mapped else version_state(NEW)
    weights = TOGETHER if mapped else None
    dcp.save(state, storage_writer=writer, map=weights, timeout_seconds=TIMEOUT_SECONDS)
    return steps


@dataclass
class Loss:
    """What one killed rank left."""

    victim: int
    observer: int
    step: str
    endings: list[Ending]
    dcp: int | str
    stock: int | str
    findings: set[str]
    left: dict[str, int]
    next_seen: tuple[int | str, int | str]
    next_listing: dict[str, int]


def every_loss(root: Path, old: int | str, mapped: bool, every: int, at_once: int) -> list[Loss]:
    """For each (victim, observer): kill at the observer's first step, its second, and so on. Where a rank is
    killed at a step of the other one, at each ``every``-th of them and at the last."""
    save = partial(save_together, mapped=mapped)
    before = root / "before"
    if old != ABSENT:
        save_version(before, OLD)
    copy_folder(before, root / "count")
    (counted,) = run_groups([Group(2, save, (root / "count", NOBODY, NOBODY, 0))])
    steps = [ending.value for ending in counted]
    cases = [
        (victim, observer, number, step)
        for victim, observer in ((0, 0), (1, 1), (1, 0), (0, 1))
        for number, step in enumerate(steps[observer], start=1)
        if victim == observer or number % every == 0 or number == len(steps[observer])
    ]
    folders = [root / f"{victim}-{observer}-{number}" for victim, observer, number, _ in cases]
    for folder in folders:
        copy_folder(before, folder)
    groups = [
        Group(2, save, (folder, victim, observer, number))
        for folder, (victim, observer, number, _) in zip(folders, cases, strict=True)
    ]
    losses = []
    for endings, folder, (victim, observer, _, step) in zip(
        run_groups(groups, at_once=at_once), folders, cases, strict=True
    ):
        seen, left = seen_by_dcp(folder), listing(folder)
        kinds = {finding.kind for finding in verify(folder).findings} if seen != ABSENT else set()
        stock = seen_by_stock(folder)
        save_version(folder, NEXT)
        after = seen_by_dcp(folder), seen_by_stock(folder)
        losses.append(Loss(victim, observer, step, endings, seen, stock, kinds, left, after, listing(folder)))
    return losses


LOST = [
    pytest.param((OLD, False, 3), id="overwrite"),
    pytest.param((OLD, False, 1), id="overwrite, at all steps", marks=pytest.mark.exhaustive),
    pytest.param((ABSENT, False, 1), id="first, at all steps", marks=pytest.mark.exhaustive),
    pytest.param((OLD, True, 1), id="mapped, at all steps", marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module", params=LOST)
def lost(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int | str, list[Loss]]]:
    """What was there before, and every loss of a rank in the save over it."""
    root = tmp_path_factory.mktemp("lost")
    old, mapped, every = request.param
    yield old, in_lab(every_loss, root, old, mapped, every, 12, timeout_seconds=800)


def test_a_killed_rank_leaves_the_old_or_the_new_checkpoint(lost: tuple[int | str, list[Loss]]) -> None:
    """Neither dcp nor stock torch ever sees anything but one of the two versions, whole and verified."""
    old, losses = lost
    assert len(losses) > 20
    for loss in losses:
        assert loss.dcp in (old, NEW), loss
        assert loss.stock in (old, NEW), loss
        assert loss.findings <= {"stray-file", "metadata"}, loss
    for victim, observer in ((0, 0), (1, 0)):
        seen = [loss.dcp for loss in losses if (loss.victim, loss.observer) == (victim, observer)]
        assert seen == sorted(seen, key=lambda version: version == NEW)
        assert NEW in seen
    # Rank 1 takes no step in the commit, which cannot happen without its part.
    assert all(loss.dcp == old for loss in losses if (loss.victim, loss.observer) == (1, 1))


def test_the_survivor_names_the_killed_rank_in_time(lost: tuple[int | str, list[Loss]]) -> None:
    """It raises RankFailedError with the victim's number, unless the checkpoint was committed by then."""
    for loss in lost[1]:
        assert loss.endings[loss.victim].killed, loss
        survivor = loss.endings[1 - loss.victim]
        assert not survivor.hung
        assert survivor.signal == 0
        assert survivor.seconds < SURVIVAL_SECONDS
        if survivor.raised is None:
            assert loss.dcp == NEW, loss
            continue
        assert "RankFailedError" in survivor.raised.class_names, survivor.raised.traceback_text
        assert "CheckpointException" in survivor.raised.class_names
        assert survivor.raised.facts["failed_ranks"] == [loss.victim], loss
        assert f"rank {loss.victim}" in survivor.raised.message


def test_a_surviving_coordinator_cleans_up(lost: tuple[int | str, list[Loss]]) -> None:
    """When rank 1 is lost before the commit, rank 0 leaves the folder as it was."""
    old, losses = lost
    for loss in losses:
        if loss.victim == 1 and loss.dcp == old:
            assert loss.left == (CLEAN if old == OLD else {}), loss


def test_a_save_after_the_loss_works_and_cleans_up(lost: tuple[int | str, list[Loss]]) -> None:
    """The next save to the id commits whatever the lost rank left, and removes it."""
    for loss in lost[1]:
        assert loss.next_seen == (NEXT, NEXT), loss
        assert loss.next_listing == CLEAN, loss
