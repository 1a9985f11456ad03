"""SIGKILL before each request of a save on S3: readers find the old checkpoint or the new one."""

from __future__ import annotations

import bisect
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.crashes import Child, in_lab
from tests.support.fault_doors import METADATA_NAME, Fault, StoreCall
from tests.support.s3 import S3Server
from tests.support.s3_versions import CLEAN, Place
from tests.support.versions import ABSENT

pytestmark = pytest.mark.timeout(900)

OLD, NEW, NEXT = 1, 2, 3
MIB = 1 << 18
"""Number of 4-byte elements."""


def _kill(operation: StoreCall) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Scenario:
    """A save over an existing state. ``old`` and ``old_stock``: versions that dcp and stock see before."""

    before: Callable[[Place], object] | None = None
    old: int | str = ABSENT
    old_stock: int | str = ABSENT
    options: dict[str, Any] = field(default_factory=dict)
    new_stock: int | str = NEW


def half_published(place: Place) -> None:
    """Run a save that is killed between the manifest and `.metadata`."""
    place.save(4)
    Child(place.save, OLD, Fault("publish", name=METADATA_NAME, hook=_kill)).wait()


WITHOUT_REQUEST = ("make_root", "create", "write", "sync", "lock")
"""Operations without a request, apart from parts of large files: a kill there equals a later kill."""

SCENARIOS = {
    "first": Scenario(),
    "overwrite": Scenario(lambda place: place.save(OLD), OLD, OLD),
    "bare over compatible": Scenario(
        lambda place: place.save(OLD), OLD, OLD, {"torch_compatible": False}, ABSENT
    ),
    "over a killed save": Scenario(half_published, OLD, 4),
    "over stock": Scenario(lambda place: place.stock_save(OLD), OLD, OLD),
}


@dataclass
class Crash:
    """State after one kill: versions that readers see, findings of `verify`, and the next save's result."""

    step: str
    killed: bool
    dcp: int | str
    stock: int | str | None
    findings: set[str]
    uploads: int
    next_seen: int | str
    next_listing: dict[str, int]
    next_uploads: int
    next_findings: set[str]


def crash(place: Place, step: str, fault: Fault, *, ask_stock: bool = True, **options: Any) -> Crash:
    """Save in a child that the fault kills. Look, save again, and look once more."""
    ending = Child(_run_save, place, NEW, fault, options).wait()
    if ending.raised is not None:
        raise AssertionError(ending.raised.traceback_text)
    stock = place.seen_by_stock() if ask_stock else None
    seen = place.seen(), stock, place.findings(), place.uploads()
    place.save(NEXT)
    # Findings include a `.metadata` that differs from the manifest's, which stock torch would read.
    return Crash(step, ending.killed, *seen, place.seen(), place.listing(), place.uploads(), place.findings())


def _run_save(place: Place, version: int, fault: Fault, options: dict[str, Any]) -> None:
    place.save(version, fault, **options)


def every_crash(place: Place, name: str, each: int) -> list[Crash]:
    """Kill the save of a scenario before each ``each``-th request, until a save completes."""
    scenario = SCENARIOS[name]
    before, count = place.at("before"), place.at("count")
    if scenario.before is not None:
        scenario.before(before)
    before.copy_to(count)
    steps = [step for step in count.save(NEW, **scenario.options).log if step.op not in WITHOUT_REQUEST]
    moments = [(f"{step.op} {step.name}", step.number) for step in steps[::each]]
    # A load by stock takes many requests, and before the publication its result is that of the first step.
    publishing = next(step.number for step in steps if step.op == "publish")
    crashes: list[Crash] = []
    for step, number in [*moments, ("none", 1 << 30)]:
        target = place.at(str(number))
        before.copy_to(target)
        asked = not crashes or number >= publishing
        fault = Fault(at=number, hook=_kill)
        crashes.append(crash(target, step, fault, ask_stock=asked, **scenario.options))
    return crashes


@pytest.mark.parametrize(
    ("name", "each"),
    [("overwrite", 3), *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in SCENARIOS)],
)
def test_a_save_killed_before_any_request(s3_server: S3Server, s3_root: str, name: str, each: int) -> None:
    """Readers, dcp and stock, see the whole old version up to one request and the whole new version
    afterwards. The next save commits, and removes all leftovers and unfinished uploads."""
    scenario = SCENARIOS[name]
    crashes = in_lab(every_crash, Place(s3_root, s3_server.storage_options), name, each, timeout_seconds=800)
    assert len(crashes) > 8 // each
    assert [crash.killed for crash in crashes] == [True] * (len(crashes) - 1) + [False]
    for seen, old, new in (
        ([crash.dcp for crash in crashes], scenario.old, NEW),
        ([crash.stock for crash in crashes if crash.stock], scenario.old_stock, scenario.new_stock),
    ):
        turn = seen.index(new) if new in seen else len(seen)
        assert seen == [old] * turn + [new] * (len(seen) - turn)
        assert seen[-1] == new
    assert crashes[0].dcp == scenario.old
    assert crashes[-1].findings == set()
    for crash in crashes:
        assert crash.findings <= {"stray-file", "metadata"}, crash
        assert crash.next_seen == NEXT, crash
        assert (crash.next_listing, crash.next_uploads, crash.next_findings) == (CLEAN, 0, set()), crash


def crashes_while_parts_are_sent(place: Place, each: int) -> list[Crash]:
    """Kill a save at every ``each``-th moment: during parts, after all parts, and around the commit."""
    before = place.at("before")
    log = before.save(OLD).log
    written = list(itertools.accumulate(step.size_bytes for step in log if step.op == "write"))
    moments = [
        *(Fault("write", at=bisect.bisect(written, size) + 2, hook=_kill) for size in (5 << 20, 11 << 20)),
        Fault("finish", hook=_kill),
        Fault("version", name=METADATA_NAME, at=2, hook=_kill),
        Fault("publish", name=METADATA_NAME, hook=_kill),
    ]
    crashes = []
    for number, moment in enumerate(moments[::each]):
        target = place.at(str(number))
        before.copy_to(target)
        crashes.append(crash(target, f"{moment.op} {moment.at}", moment))
    return crashes


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_save_killed_while_parts_are_sent(s3_server: S3Server, s3_root: str, each: int) -> None:
    """The next save aborts the unfinished uploads of a killed save, whose names it knows."""
    options = {**s3_server.storage_options, "part_bytes": 5 << 20}
    place = Place(s3_root, options, large=17 * MIB)
    crashes = in_lab(crashes_while_parts_are_sent, place, each, timeout_seconds=800)
    left = [*[(True, OLD, 1)] * 3, (True, OLD, 0), (True, NEW, 0)]
    assert [(crash.killed, crash.dcp, crash.uploads) for crash in crashes] == left[::each]
    for crash in crashes:
        assert crash.findings <= {"stray-file", "metadata"}, crash
        assert crash.next_seen == NEXT, crash
        assert (crash.next_listing, crash.next_uploads, crash.next_findings) == (CLEAN, 0, set()), crash
