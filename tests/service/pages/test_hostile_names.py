"""Every page that links lead to, of real checkpoints with names that none should have, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import pytest
import torch

import dcp
from tests.support.catalog_api import CatalogApi
from tests.support.chromium import Window, accessibility_faults
from tests.support.pages import HOSTILE
from tests.support.site import Site, resized, running_site

pytestmark = pytest.mark.exhaustive

NAMES: Final = [name.replace("/", "|")[:200] for name in HOSTILE]
LABEL: Final = "w" * 128
"""Tags, aliases and keys are of few characters; this is the longest."""
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
        worked_on(made.api)
        yield made


def worked_on(api: CatalogApi) -> None:
    """The first is converted; of each run both steps are merged, compared and followed, and one loses a part.
    Names that are given to the service are as long as it allows."""
    steps = {key: number for number, key in ((one["id"], one["key"]) for one in api.checkpoints())}
    first = api.checkpoints(sort="step")[0]["id"]
    jobs = []
    for name in NAMES:
        a, b = (steps[f"{name}/{name}-{step}"] for step in (1, 2))
        run = api.get(f"/checkpoints/{b}")["run_id"]
        written = {"to": "safetensors", "drop_objects": True}
        key = f"made {name}/{name}.safetensors"
        jobs.append(api.submit("convert", checkpoint_id=first, target_key=key, **written))
        key = f"merged {name}/{name}.safetensors"
        jobs.append(api.submit("merge", sources=[a, b], target_key=key, **written))
        jobs += [
            api.submit("diff", a=a, b=b),
            api.submit("drift", run_id=run),
            api.submit("stats", checkpoint_id=a),
        ]
    for job in jobs:
        api.finished(job)
    for name in NAMES:
        pruned = api.submit("prune", checkpoint_id=steps[f"{name}/{name}-2"], parts=[f"model.{name}.0"])
        assert api.finished(pruned)["result"]["outcome"] == "dropped"
    labels = (f"/checkpoints/{a}/tags/{LABEL}", None), (f"/runs/{run}/aliases/{LABEL}", {"checkpoint_id": a})
    for label, body in labels:
        api.http.put(f"/api/v1{label}", json=body).raise_for_status()
    api.post("/keys", {"name": LABEL, "scopes": ["read"]})


def sort_of(link: str) -> tuple[str, str]:
    """What pages have in common that differ by numbers and by what is looked for."""
    parts = urlsplit(link)
    return re.sub(r"\d+", "1", parts.path), re.sub(r"=[^&]*", "", parts.query)


def check(seen: Window, path: str) -> None:
    """All of it lies in the window, is text, and can be read."""
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
    waiting += [f"/checkpoints/{one['id']}/lineage" for one in checkpoints if "merged" in one["key"]]
    waiting += [f"/runs/{one['id']}/drift" for one in site.api.get("/runs")["items"]]
    for kind in ("merge", "prune", "drift", "diff", "stats"):
        waiting += [f"/jobs/{one['id']}" for one in site.api.get("/jobs", kind=kind)["items"]]
    waiting += [f"/keys/{one['id']}/revoke" for one in site.api.get("/keys")["items"]]
    asked_for = len(waiting)
    with site.window() as seen:
        while waiting and (asked_for > 0 or len(seen_sorts) < _MOST):
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
