"""Pages that compare checkpoints and steps, without scripts, over real checkpoints and jobs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.app import App
from tests.support.catalog import Catalog
from tests.support.page_rows import scan
from tests.support.pages import Browser, PageText, faults_of

HOSTILE = "\"><img src=x onerror='alert(1)'>\u202e"


def state(step: int) -> dict[str, Any]:
    """Return a state with a weight that changes, a NaN from step 3 on, and a tensor of step 2 alone."""
    head = torch.ones(4)
    if step >= 3:
        head[1] = float("nan")
    tensors = {
        "m.layers.0.weight": torch.full((8, 4), 1.0 + step / 10),
        "m.layers.1.weight": torch.ones(6),
        "m.head": head,
        f"m.{HOSTILE}": torch.full((3,), float(step)),
        "m.grows": torch.ones(step),
    }
    return {**tensors, "note": HOSTILE * step, **({"m.extra": torch.ones(2)} if step == 2 else {})}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save three steps of a run."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2, 3):
        dcp.save(state(step), checkpoint_id=folder / f"run/step-{step}", no_dist=True)
    return folder


class Site:
    """The application over the run, a browser without scripts, and a worker for its jobs."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app = app
        self.browser = Browser(app.client())
        self.catalog = Catalog(app, folder)
        scan(app)

    def id(self, step: int) -> int:
        """Return the id of the checkpoint at a step."""
        return int(self.catalog.get("/checkpoints/lookup", run="run", step=step)["id"])

    def submit(self, path: str, action: str) -> PageText:
        """Submit a form of a page, and return the resulting page."""
        answer = self.browser.submit(self.browser.page(path).form(action))
        assert answer.status_code == 200, answer.text
        return PageText(answer.text)


@pytest.fixture
def site(saved: Path, app: App, tmp_path: Path) -> Site:
    """Start the application without keys."""
    shutil.copytree(saved, tmp_path / "main", dirs_exist_ok=True)
    return Site(app, tmp_path)


def rows_of(page: PageText) -> str:
    """Return the text of the table of different tensors."""
    return page.text.partition("Dtype and shape")[2].partition("Other values")[0]


# -- two checkpoints -----------------------------------------------------------------------------------------


def test_changes_by_checksums_and_by_values(site: Site) -> None:
    """Checksums show at once which tensors changed; a job, followed by the page, shows by how much."""
    a, b = site.id(2), site.id(3)
    path = f"/diff?a={a}&b={b}"
    page = site.browser.page(path)
    assert "5 differ" in page.text and "3 values changed" in page.text and "1 removed" in page.text
    assert "Checksums show which tensors changed" in page.text
    assert "float32 2 \N{RIGHTWARDS ARROW} float32 3" in rows_of(page)
    begun = site.submit(path, "/diff/values")
    assert any("/api/v1/jobs/1/events" in given.get("sse-connect", "") for _, given in begun.elements)
    assert not [form for form in begun.forms if form.action == "/diff/values"]
    site.catalog.work()
    done = site.browser.page(path)
    assert "Checksums tell" not in done.text and "\u202e" not in done.text
    assert re.findall(r"m\.\S+", rows_of(done))[0] == f"m.{HOSTILE.split()[0]}"
    weight = rows_of(done).partition("m.layers.0.weight")[2]
    assert weight.split("m.")[0].split()[:4] == ["0.083333", "100", "%", "0.1"]
    assert "1 values changed float32 4" in rows_of(done).partition("m.head")[2]  # one NaN
    assert "most of them in m.head : 1. Show them first" in done.text
    assert f"{path}&order=nonfinite" in done.links
    (twin,) = [given["href"] for _, given in done.elements if given.get("class") == "twin"]
    answer = site.app.base.get(twin).json()
    assert (answer["basis"], answer["matching"], answer["job_id"]) == ("values", 5, 1)


def test_deleted_checkpoints_show_how_to_restore(site: Site) -> None:
    """A deleted checkpoint gets the way to restore it and another pair to compare."""
    one, two, three = site.id(1), site.id(2), site.id(3)
    site.app.base.delete(f"/api/v1/checkpoints/{two}").raise_for_status()
    answer = site.browser.get(f"/diff?a={two}&b={three}")
    page = PageText(answer.text)
    assert answer.status_code == 409 and faults_of(page) == []
    assert "Step 2 is deleted: it can be restored on its page until" in page.text
    assert {f"/checkpoints/{two}", f"/diff?b={three}", "/runs/1"} <= set(page.links)
    assert str(site.browser.get(f"/diff?b={three}").url).endswith(f"/diff?a={one}&b={three}")
    page = site.browser.page(f"/checkpoints/{two}?colour=change")
    assert "Values of a checkpoint in the state deleted" in page.text


def test_a_failed_comparison_shows_its_error(site: Site, tmp_path: Path) -> None:
    """A failed comparison shows its error and a button to retry."""
    a, b = site.id(1), site.id(2)
    path = f"/diff?a={a}&b={b}"
    site.submit(path, "/diff/values")
    for data in (tmp_path / "main/run/step-2").glob("*.distcp"):
        data.write_bytes(b"x" * data.stat().st_size)
    site.catalog.work()
    page = site.browser.page(path)
    assert " failed." in page.text and "is damaged" in page.text
    assert [form for form in page.forms if form.action == "/diff/values"]


# -- the steps of a run --------------------------------------------------------------------------------------


def test_the_drift_of_a_run(site: Site) -> None:
    """The drift of a run is offered, followed and shown, with layers, NaNs and links to differences."""
    path = "/runs/1/drift"
    assert path in site.browser.page("/runs/1").links
    assert "have not been compared yet" in site.browser.page(path).text
    begun = site.submit(path, path)
    assert any("/api/v1/jobs/1/events" in given.get("sse-connect", "") for _, given in begun.elements)
    site.catalog.work()
    page = site.browser.page(path)
    kinds = [given["class"] for name, given in page.elements if name == "path" and "class" in given]
    assert {"l0", "l8", "nan"} <= set(kinds)
    assert f"/diff?a={site.id(1)}&b={site.id(2)}" in page.links
    table = page.text.partition("Show as table")[2]
    assert "m.layers.0 0.090909 0.083333" in table and "m.layers.1 0 0" in table
    assert "1 NaN or ∞" in table and "tensors added 1" in table
    assert "NaN or infinity first appeared in m at step 3." in page.text
    changed = site.browser.page(f"{path}?value=changed").text.partition("Show as table")[2]
    assert "m.layers.0 100 % 100 %" in changed
    assert site.browser.get(f"{path}?value=nonsense").status_code == 422
    assert site.browser.get("/runs/99/drift").status_code == 404
