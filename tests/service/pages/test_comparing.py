"""Pages that compare checkpoints and steps, without script, over real checkpoints and their jobs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.app import App
from tests.support.kind_runs import KindRuns
from tests.support.page_rows import scan
from tests.support.pages import Browser, PageText, faults_of

HOSTILE = "\"><img src=x onerror='alert(1)'>\u202e"


def state(step: int) -> dict[str, Any]:
    """The weight moves at each step, the head has a NaN from step 3 on, and one tensor comes and goes."""
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
    """Three steps of a run."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2, 3):
        dcp.save(state(step), checkpoint_id=folder / f"run/step-{step}", no_dist=True)
    return folder


class Site:
    """The application over the run, a browser without script, and somebody who carries out its jobs."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app = app
        self.browser = Browser(app.client())
        roots = {name: {"url": str(folder / name)} for name in ("main", "other")}
        self.runs = KindRuns(app.service.database, folder / "work", roots)
        scan(app)

    def id(self, step: int) -> int:
        """Of the checkpoint of a step."""
        return self.runs.id("main", f"run/step-{step}")

    def submit(self, path: str, action: str) -> PageText:
        """Send a form of a page; the page that answers."""
        answer = self.browser.submit(self.browser.page(path).form(action))
        assert answer.status_code == 200, answer.text
        return PageText(answer.text)


@pytest.fixture
def site(saved: Path, app: App, tmp_path: Path) -> Site:
    """Without keys."""
    shutil.copytree(saved, tmp_path / "main", dirs_exist_ok=True)
    return Site(app, tmp_path)


def rows_of(page: PageText) -> str:
    """The text of the tensors that differ."""
    return page.text.partition("Dtype and shape")[2].partition("Other values")[0]


# -- two checkpoints -----------------------------------------------------------------------------------------


def test_what_changed_at_once_and_by_values(site: Site) -> None:
    """By checksums which tensors; by the job, which the page follows, by how much."""
    a, b = site.id(2), site.id(3)
    path = f"/diff?a={a}&b={b}"
    page = site.browser.page(path)
    assert "5 differ" in page.text and "3 values changed" in page.text and "1 removed" in page.text
    assert "Checksums tell which tensors changed" in page.text
    assert "float32 2 \N{RIGHTWARDS ARROW} float32 3" in rows_of(page)
    begun = site.submit(path, "/diff/values")
    assert any("/api/v1/jobs/1/events" in given.get("sse-connect", "") for _, given in begun.elements)
    assert not [form for form in begun.forms if form.action == "/diff/values"]
    site.runs.drain()
    done = site.browser.page(path)
    assert "Checksums tell" not in done.text
    assert re.findall(r"m\.\S+", rows_of(done))[0] == f"m.{HOSTILE.split()[0]}"
    weight = rows_of(done).partition("m.layers.0.weight")[2]
    assert weight.split("m.")[0].split()[:4] == ["0.083333", "100", "%", "0.1"]
    assert "1 values changed float32 4" in rows_of(done).partition("m.head")[2]  # one NaN
    assert "first of all in m.head : 1. Those first" in done.text
    assert f"{path}&order=nonfinite" in done.links
    (twin,) = [given["href"] for _, given in done.elements if given.get("class") == "twin"]
    answer = site.app.base.get(twin).json()
    assert (answer["basis"], answer["matching"], answer["job_id"]) == ("values", 5, 1)


def test_which_tensors_in_which_order(site: Site) -> None:
    """Kinds with counts, parts of names, orders and pages: all in the address."""
    a, b = site.id(1), site.id(2)
    site.runs.do("diff", a=a, b=b)
    path = f"/diff?a={a}&b={b}"
    assert "m.extra" in rows_of(site.browser.page(f"{path}&kind=added"))
    assert "m.layers" not in rows_of(site.browser.page(f"{path}&kind=added"))
    found = site.browser.page(f"{path}&glob=layers")
    assert "1 of 4" in found.text and "m.grows" not in rows_of(found)
    by_share = rows_of(site.browser.page(f"{path}&order=changed"))
    assert by_share.index("m.layers.0") < by_share.index("m.extra")
    nothing = site.browser.page(f"{path}&glob=nothing")
    assert "No tensor that differs is like this." in nothing.text
    assert site.browser.get(f"{path}&kind=nonsense").status_code == 422
    assert site.browser.get(f"{path}&glob={'*a' * 100}").status_code == 422


def test_histograms_of_both_lie_over_each_other(site: Site) -> None:
    """Of a tensor in both, read when it is asked for; of one that is in one only why there is none."""
    a, b = site.id(1), site.id(2)
    page = site.browser.page(f"/diff?a={a}&b={b}&tensor=m.layers.0.weight")
    assert "before after" in page.text.partition("m.layers.0.weight")[2]
    assert "1 2 32 100 % 32 100 %" in page.text
    missing = site.browser.page(f"/diff?a={a}&b={b}&tensor=m.extra")
    assert "not in the checkpoint" in missing.text


def test_how_two_are_chosen(site: Site) -> None:
    """Ticked in a list in any order, from the page of one, with the step before; the way back is a link."""
    one, two, three = site.id(1), site.id(2), site.id(3)
    page = site.browser.page("/runs/1")
    ticks = [given["value"] for name, given in page.elements if given.get("name") == "of"]
    assert sorted(map(int, ticks)) == sorted((one, two, three))
    for given in ((one, three), (three, one)):
        answer = site.browser.get("/diff", params={"of": given})
        assert str(answer.url).endswith(f"/diff?a={one}&b={three}")
    assert f"/diff?a={two}&b={three}" in site.browser.page(f"/checkpoints/{three}").links
    assert str(site.browser.get(f"/diff?b={three}").url).endswith(f"/diff?a={two}&b={three}")
    assert f"/diff?a={three}&b={two}" in site.browser.page(f"/diff?a={two}&b={three}").links
    assert "Which two?" in site.browser.page("/diff").text
    assert str(site.browser.get(f"/diff?of={two}").url).endswith(f"/diff?a={one}&b={two}")
    for wrong in (f"of={one}", f"b={one}", "a=1&b=x", f"a={one}&b={three}&cursor=x"):
        assert site.browser.get(f"/diff?{wrong}").status_code == 422, wrong
    many = site.browser.page(f"/diff?of={three}&of={two}&of={one}")
    assert "3 checkpoints are ticked." in many.text
    chosen = site.browser.submit(many.form("/diff"))
    assert str(chosen.url).endswith(f"/diff?a={one}&b={three}"), (
        "the first and the last, if no other is chosen"
    )
    for gone in ("a=1&b=99", "of=1&of=99"):
        assert site.browser.get(f"/diff?{gone}").status_code == 404, gone


def test_what_was_deleted_is_told_as_such(site: Site) -> None:
    """Says which of two was deleted, the way to restore it, and a pair that can be compared instead."""
    one, two, three = site.id(1), site.id(2), site.id(3)
    site.app.base.delete(f"/api/v1/checkpoints/{two}").raise_for_status()
    answer = site.browser.get(f"/diff?a={two}&b={three}")
    page = PageText(answer.text)
    assert answer.status_code == 409 and faults_of(page) == []
    assert "Step 2 is deleted: it can be restored on its page until" in page.text
    assert {f"/checkpoints/{two}", f"/diff?b={three}", "/runs/1"} <= set(page.links)
    assert str(site.browser.get(f"/diff?b={three}").url).endswith(f"/diff?a={one}&b={three}")
    assert "It is deleted: its values" in site.browser.page(f"/checkpoints/{two}?colour=change").text


def test_a_difference_of_what_was_replaced_is_not_shown(site: Site, tmp_path: Path) -> None:
    """Shows no difference that a job found of other content."""
    a, b = site.id(1), site.id(2)
    site.runs.do("diff", a=a, b=b)
    assert "Compare the values" not in site.browser.page(f"/diff?a={a}&b={b}").text
    dcp.save(state(1), checkpoint_id=tmp_path / "main/run/step-2", no_dist=True)
    scan(site.app)
    page = site.browser.page(f"/diff?a={a}&b={b}")
    assert "as their checksums tell" in page.text and "Relative L2" not in page.text


def test_a_comparison_that_fails_says_so(site: Site, tmp_path: Path) -> None:
    """With what went wrong, and the button that tries it again."""
    a, b = site.id(1), site.id(2)
    path = f"/diff?a={a}&b={b}"
    site.submit(path, "/diff/values")
    for data in (tmp_path / "main/run/step-2").glob("*.distcp"):
        data.write_bytes(b"x" * data.stat().st_size)
    site.runs.drain()
    page = site.browser.page(path)
    assert "has failed" in page.text and "is damaged" in page.text
    assert [form for form in page.forms if form.action == "/diff/values"]


def test_hostile_names_are_text(site: Site) -> None:
    """Of tensors, values and runs, in rows, titles and addresses."""
    a, b = site.id(1), site.id(2)
    site.runs.do("diff", a=a, b=b)
    page = site.browser.page(f"/diff?a={a}&b={b}")
    (link,) = [link for link in page.links if "tensor=" in link and "onerror" in link]
    chosen = site.browser.page(link)
    assert faults_of(chosen) == [] and not [1 for name, _ in chosen.elements if name == "img"]
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert f"m.{shown}" in chosen.text and shown in page.text and "\u202e" not in page.text


def test_names_longer_than_addresses(site: Site, tmp_path: Path) -> None:
    """Rows of what changed, came and went lead to pages of the tensor, whatever its name."""
    name = "\N{COLLISION SYMBOL}" * 5000
    for step in (1, 2):
        state = {f"{name}{n}": torch.full((2,), float(step)) for n in (0, step)}
        dcp.save(state, checkpoint_id=tmp_path / f"main/long/step-{step}", no_dist=True)
    scan(site.app)
    a, b = (site.runs.id("main", f"long/step-{step}") for step in (1, 2))
    page = site.browser.page(f"/diff?a={a}&b={b}")
    rows = [link for link in page.links if "tensor=" in link or "fqn=" in link]
    assert len(rows) == 3
    for link in rows:
        assert "float32" in site.browser.page(link).text


# -- the steps of a run --------------------------------------------------------------------------------------


def test_the_drift_of_a_run(site: Site) -> None:
    """Offered, followed, shown: cells by level, NaNs, the table, and a way to each difference."""
    path = "/runs/1/drift"
    assert path in site.browser.page("/runs/1").links
    assert "have not been compared yet" in site.browser.page(path).text
    begun = site.submit(path, path)
    assert any("/api/v1/jobs/1/events" in given.get("sse-connect", "") for _, given in begun.elements)
    site.runs.drain()
    page = site.browser.page(path)
    kinds = [given["class"] for name, given in page.elements if name == "path" and "class" in given]
    assert {"l0", "l8", "nan"} <= set(kinds)
    assert f"/diff?a={site.id(1)}&b={site.id(2)}" in page.links
    table = page.text.partition("The same as a table")[2]
    assert "m.layers.0 0.090909 0.083333" in table and "m.layers.1 0 0" in table
    assert "1 NaN or ∞" in table and "tensors added 1" in table
    assert "NaN or infinity came first in m at step 3." in page.text
    changed = site.browser.page(f"{path}?value=changed").text.partition("The same as a table")[2]
    assert "m.layers.0 100 % 100 %" in changed
    assert site.browser.get(f"{path}?value=nonsense").status_code == 422
    assert site.browser.get("/runs/99/drift").status_code == 404


def test_weights_are_not_outshone_by_their_optimizer(site: Site, tmp_path: Path) -> None:
    """The strip is of weights alone, unless all is asked for; links narrow differences to a part."""
    for step in (1, 2):
        state = {"m.w": torch.full((4,), 1.0 + step / 100), "optim.exp_avg": torch.full((4,), 10.0**step)}
        dcp.save(state, checkpoint_id=tmp_path / f"main/both/step-{step}", no_dist=True)
    scan(site.app)
    a, b = (site.runs.id("main", f"both/step-{step}") for step in (1, 2))
    run = site.app.base.get(f"/api/v1/checkpoints/{a}").json()["run_id"]
    site.runs.do("drift", run_id=run)
    page = site.browser.page(f"/runs/{run}/drift")
    table = page.text.partition("The same as a table")[2]
    assert "m 0.0099" in table and "optim" not in table
    assert f"/runs/{run}/drift?of=all" in page.links
    assert "optim 9" in site.browser.page(f"/runs/{run}/drift?of=all").text
    path = f"/diff?a={a}&b={b}"
    site.runs.do("diff", a=a, b=b)
    rows = rows_of(site.browser.page(path))
    assert rows.index("m.w") < rows.index("optim.exp_avg"), "which moved most"
    assert {f"{path}&top=m", f"{path}&top=optim"} <= set(site.browser.page(path).links)
    assert "optim" not in rows_of(site.browser.page(f"{path}&top=m"))
    assert "1 of 2" in site.browser.page(f"{path}&top=optim&glob=avg").text
