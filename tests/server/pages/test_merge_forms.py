"""Merges that somebody begins in a browser, against a real service with real checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

import dcp
from tests.server.pages.test_browser import STEPS, train
from tests.support.chromium import accessibility_faults
from tests.support.site import Site, resized, running_site

pytestmark = pytest.mark.exhaustive

_NAME = "model.layers_2.weight"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root with a run of three steps."""
    train(tmp_path / "runs/llama/7b")
    return tmp_path / "runs"


@pytest.fixture
def site(runs: Path, tmp_path: Path) -> Iterator[Site]:
    """Over that root."""
    (tmp_path / "service").mkdir()
    with running_site(tmp_path / "service", runs, len(STEPS)) as made:
        yield made


def succeeded(page: Page, button: str) -> None:
    """The form is sent, and its job comes to a good end, where a link leads to what it made."""
    page.get_by_role("button", name=button).click()
    page.wait_for_url("**/jobs/*")
    expect(page.locator("#job .head .badge")).to_have_text("succeeded", timeout=120_000)
    expect(page.get_by_text("Made of")).to_be_visible()
    page.get_by_role("link", name="Open what it made").click()
    page.wait_for_url("**/checkpoints/*")


def test_a_run_is_averaged_and_checkpoints_are_merged(site: Site, runs: Path) -> None:
    """Forms that are found, fit narrow windows and can be used without a mouse; the sums are right."""
    numbers = {one["step"]: one["id"] for one in site.api.checkpoints()}
    one, two, three = (numbers[step] for step in STEPS)
    with site.window() as seen:
        page = seen.page
        seen.open("/runs/1")
        page.get_by_text("Average…").click()
        assert accessibility_faults(page) == []
        page.get_by_label("How many").fill("2")
        page.get_by_label("Each older one weighs").fill("0.5")
        page.get_by_label("As", exact=True).fill("export/average.safetensors")
        page.get_by_label("leave out values").check()
        succeeded(page, "Average")
        seen.open(f"/checkpoints/{one}")
        page.get_by_text("Merge…").click()
        assert accessibility_faults(page) == []
        page.get_by_label("With", exact=True).fill(f"{two}, {site.service.url}/checkpoints/{three}")
        page.get_by_label("Or a formula").fill("A + 0.5*(B - C)")
        merge = page.locator("form[action$='/merge']")
        merge.get_by_label("As", exact=True).fill("export/merged.safetensors")
        merge.get_by_label("leave out values").check()
        succeeded(page, "Merge")
        for path, summary in (("/runs/1", "Average…"), (f"/checkpoints/{one}", "Merge…")):
            seen.open(path)
            page.get_by_text(summary).click()
            resized(seen, 360, "dark")
        assert seen.faults == []
    found = {name: dcp.read(runs / f"export/{name}.safetensors")[_NAME] for name in ("average", "merged")}
    steps = [dcp.read(runs / f"llama/7b/step-{step:08d}")["model"]["layers_2.weight"] for step in STEPS]
    torch.testing.assert_close(found["average"], (2 * steps[2] + steps[1]) / 3)
    torch.testing.assert_close(found["merged"], steps[0] + 0.5 * (steps[1] - steps[2]))
