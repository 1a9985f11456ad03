"""SIGKILL before every single step that a drop takes on storage: the checkpoint is as before, or without the
part; never in between, and a later prune or gc ends the work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from dcp.inspection.verification import verify
from dcp.manager.cleanup.dropping import drop_parts
from dcp.manager.cleanup.leftovers import find_leftovers, remove_leftovers
from dcp.storage.stores import PosixStore
from tests.support.crashes import in_lab, kill_at_each_step
from tests.support.versions import copy_folder, listing
from tests.support.with_optimizer import (
    OPTIMIZER_PART,
    parts_there,
    save_apart,
    save_mixed,
    save_stock,
    stock_sees,
)


def by_us_and_then_stock(folder: Path) -> None:
    """Stock torch's, over another one of ours."""
    save_apart(folder, 2)
    save_stock(folder)


SCENARIOS: dict[str, tuple[Callable[[Path], None], bool, bool]] = {
    "files of their own": (save_apart, False, True),
    "one file": (save_mixed, True, True),
    "stock": (save_stock, True, True),
    "stock over ours": (by_us_and_then_stock, True, True),
    "bare": (partial(save_apart, torch_compatible=False), False, False),
}
"""What it is dropped from, whether files are rewritten, and whether stock sees it."""

WHOLE, LESS = "whole", "weights"
LATER_SECONDS = 100_000.0


@dataclass(frozen=True)
class Crash:
    """What one kill left, and what a prune made of it, and a gc a day later."""

    killed: bool
    dcp: str
    stock: str
    sound: bool
    pruned: tuple[str, str, bool, dict[str, int]]
    collected: tuple[str, str, bool]


def prune(folder: Path, observe: Callable[[str, str], None], *, rewrite: bool) -> None:
    """Drop the optimizer."""
    drop_parts(PosixStore(folder, observe=observe), [OPTIMIZER_PART], time.time(), rewrite=rewrite)


def every_crash(base: Path, name: str) -> list[Crash]:
    """Kill the drop before its first step, its second, and so on until it gets through."""
    save, rewrite, by_stock = SCENARIOS[name]
    template = base / "template"
    save(template)
    return kill_at_each_step(
        template, base, partial(prune, rewrite=rewrite), partial(look, rewrite=rewrite, by_stock=by_stock)
    )


def look(folder: Path, step: str, killed: bool, *, rewrite: bool, by_stock: bool) -> Crash:
    """Load and verify; prune again in one copy, and a day later collect in another."""

    def seen(place: Path) -> tuple[str, str]:
        return parts_there(place), stock_sees(place) if by_stock else ""

    def sound(place: Path) -> bool:
        return {finding.kind for finding in verify(place).findings} <= {"stray-file", "metadata"}

    again, later = folder.with_name(f"{folder.name}-again"), folder.with_name(f"{folder.name}-later")
    copy_folder(folder, again)
    copy_folder(folder, later)
    drop_parts(PosixStore(again), [OPTIMIZER_PART], time.time(), rewrite=rewrite)
    collect(again)
    for path in later.iterdir():
        os.utime(path, (1, 1))
    collect(later)
    return Crash(
        killed,
        *seen(folder),
        sound(folder),
        (*seen(again), verify(again).findings == [], listing(again)),
        (*seen(later), sound(later)),
    )


def collect(folder: Path) -> None:
    """What killed ones left, once it is a day old."""
    now = time.time() + LATER_SECONDS
    for store, left in find_leftovers(folder, now):
        remove_leftovers(store, left, now)


@pytest.mark.parametrize(
    "name",
    [
        "files of their own",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(SCENARIOS)[1:]),
    ],
)
def test_a_drop_killed_before_any_step_leaves_all_or_the_rest(tmp_path: Path, name: str) -> None:
    """Whole until one step and without the optimizer after it, for dcp and, by a step of its own, for stock.

    A prune after it gets through, and leaves what an undisturbed one leaves; after a gc both load the same.
    """
    crashes: list[Crash] = in_lab(every_crash, tmp_path, name)
    assert [crash.killed for crash in crashes] == [True] * (len(crashes) - 1) + [False]
    seen, by_stock = [crash.dcp for crash in crashes], [crash.stock for crash in crashes]
    cut = seen.index(LESS)
    assert 0 < cut < len(seen) - 1
    assert seen == [WHOLE] * cut + [LESS] * (len(seen) - cut)
    if SCENARIOS[name][2]:
        cut = by_stock.index(LESS)
        assert by_stock == [WHOLE] * cut + [LESS] * (len(seen) - cut)
    assert all(crash.sound for crash in crashes)
    for crash in crashes:
        assert crash.pruned == crashes[-1].pruned, crash
        assert crash.pruned[0] == LESS
        assert crash.pruned[2]
        assert crash.collected[0] == crash.dcp
        assert crash.collected[1] in ("", crash.dcp), crash
        assert crash.collected[2]
