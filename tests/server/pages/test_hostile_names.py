"""Every page that links lead to, of real checkpoints with names that none should have, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import pytest
import torch

import dcp
from tests.support.chromium import Window, accessibility_faults
from tests.support.site import Site, resized, running_site

pytestmark = pytest.mark.exhaustive

NAMES: Final = (
    "<script>window.caught=1<|script>",
    "\"><img src=x onerror='window.caught=1'>",
    "\u202egnp.exe \u2067\u05d0\u05d1\u05d2",
    "\U0001f4a5\U0001f469\u200d\U0001f680 caf\u00e9",
    "{{ 7*7 }}{% raw %}",
    "x" * 200,
)
_MOST: Final = 60


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two steps of a run each, with tensors of such names, and one of 10,000 characters; the first
    is converted."""
    folder = tmp_path_factory.mktemp("hostile")
    state = {
        "model": {f"{name}.{n}": torch.full((2, 3), float(n)) for name in NAMES for n in range(2)},
        "y" * 10_000: torch.ones(4),
        "note": NAMES[0],
    }
    for name in NAMES:
        for step in (1, 2):
            target = folder / "runs" / name / f"{name}-{step}"
            dcp.save(state, checkpoint_id=target, no_dist=True, user_metadata={name: name, "step": step})
    (folder / "service").mkdir()
    with running_site(folder / "service", folder / "runs", 2 * len(NAMES)) as made:
        first = made.api.checkpoints(sort="step")[0]["id"]
        for name in NAMES:
            made.api.finished(
                made.api.submit(
                    "convert",
                    checkpoint_id=first,
                    to="safetensors",
                    target_key=f"made {name}/{name}.safetensors",
                    drop_objects=True,
                )
            )
        yield made


def sort_of(link: str) -> tuple[str, str]:
    """What pages have in common that differ by numbers and by what is looked for."""
    parts = urlsplit(link)
    return re.sub(r"\d+", "1", parts.path), re.sub(r"=[^&]*", "", parts.query)


def check(seen: Window, path: str) -> None:
    """All of it lies in the window, is text, and can be read."""
    assert seen.page.evaluate("window.caught") is None, path
    assert seen.page.locator("main img").count() == 0, path
    for width in (360, 1024):
        resized(seen, width, "light")
    assert accessibility_faults(seen.page) == [], path
    assert seen.faults == [], (path, seen.faults)


def test_all_that_is_linked_is_text_and_stays_in_its_place(site: Site) -> None:
    """One page of each sort, beginning with each run and each checkpoint."""
    checkpoints = site.api.checkpoints(state="any")
    waiting = [f"/checkpoints/{one['id']}" for one in checkpoints]
    waiting += [f"/runs/{number}" for number in {one["run_id"] for one in checkpoints}]
    waiting += ["/", "/checkpoints", "/jobs", "/roots", "/audit", "/keys", "/search?q=script"]
    seen_sorts: set[tuple[str, str]] = set()
    asked_for = len(waiting)
    with site.window() as seen:
        while waiting and len(seen_sorts) < _MOST:
            path, asked_for = waiting.pop(0), asked_for - 1
            if asked_for < 0 and sort_of(path) in seen_sorts:
                continue
            seen_sorts.add(sort_of(path))
            seen.open(path)
            check(seen, path)
            links = seen.page.eval_on_selector_all(
                "a[href]", "all => all.map(one => one.getAttribute('href'))"
            )
            waiting += [
                link
                for link in links
                if link.startswith("/") and not link.startswith(("/api/", "/docs")) and "download" not in link
            ]
    assert ("/checkpoints/1/lineage", "") in seen_sorts
    assert len(seen_sorts) > 15
