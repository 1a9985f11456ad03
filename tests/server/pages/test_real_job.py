"""The pages on what a real training job has left: two ranks under torchrun, FSDP2, a manager with metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from dcp.demo.text import write_corpus
from tests.support.chromium import Window, accessibility_faults, window
from tests.support.site import Site, resized, running_site
from tests.support.torchrun import torchrun

pytestmark = pytest.mark.exhaustive

STEPS: Final = (2, 4, 6, 8)
WAIT_MS: Final = 240_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With the checkpoints of the demo's own job."""
    folder = tmp_path_factory.mktemp("job")
    write_corpus(folder / "corpus.txt")
    for name in ("results", "service"):
        (folder / name).mkdir()
    given: dict[str, str | Path] = {
        "--corpus": folder / "corpus.txt",
        "--checkpoints": folder / "runs/llama/7b",
        "--results": folder / "results",
        "--steps": "8",
        "--save-every": "2",
        "--writer": "thread",
    }
    torchrun("dcp.demo.training.train", [part for pair in given.items() for part in pair], ranks=2)
    with running_site(folder / "service", folder / "runs", len(STEPS)) as made:
        yield made


def checkpoint(site: Site, step: int) -> int:
    """The number of the job's checkpoint of this step."""
    found = site.api.get("/checkpoints/lookup", root="main", run="llama/7b", step=step)
    return int(found["id"])


def said(page: Page, text: str) -> None:
    """The page has told so, also to who does not see it."""
    expect(page.get_by_role("status").filter(has_text=text)).to_be_visible()


def convert(page: Page, seen: Window, number: int, target: str) -> None:
    """By the form of the checkpoint's page; then one is on the page of the job."""
    seen.open(f"/checkpoints/{number}")
    page.get_by_text("Convert…").click()
    form = page.locator("form[action$='/convert']")
    form.get_by_label("As", exact=True).fill(target)
    form.get_by_label("leave out values").check()
    page.get_by_role("button", name="Convert").click()
    page.wait_for_url("**/jobs/*")


def test_a_wrong_key_first(site: Site) -> None:
    """It is said, on the same form, and the right one leads to where one wanted to go."""
    with window(site.browser, site.service.url) as seen:
        page = seen.page
        page.goto(f"{site.service.url}/runs/1?verification=good")
        page.get_by_label("API key").fill("dcp_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown")
        seen.faults.clear()  # Chromium reports the 403 of the answer
        page.get_by_label("API key").fill(site.key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/runs/1?verification=good")
        assert seen.faults == []


def test_searching_and_inspecting(site: Site) -> None:
    """From the search as one types to a tensor of the optimizer that two ranks wrote."""
    with site.window() as seen:
        page = seen.page
        seen.open("/")
        page.keyboard.press("/")
        page.keyboard.type("LLAMA")
        page.locator("#found .hits a").first.click()
        page.wait_for_url("**/runs/1")
        expect(page.locator("#checkpoints tbody tr")).to_have_count(len(STEPS))
        expect(page.locator(".uplot canvas")).to_be_visible()
        page.locator("#checkpoints").get_by_role("link", name="8", exact=True).click()
        page.wait_for_url("**/checkpoints/*")
        strip = page.get_by_role("region", name="Health")
        expect(strip).to_contain_text("written by 2 ranks")
        expect(strip).to_contain_text("torch.distributed.checkpoint")
        expect(strip).to_contain_text("nobody has read its bytes yet")
        expect(page.locator("dl.facts").first).to_contain_text("loss")
        page.get_by_label("Name").first.fill("exp_avg_sq")
        expect(page.locator("#tensors tbody tr").first).to_contain_text("exp_avg_sq")
        assert "glob=exp_avg_sq" in seen.path
        page.locator("#find").fill("pair.weight")
        expect(page.locator("#found .hits a").first).to_contain_text("pair.weight")
        assert seen.faults == []


def test_verified_by_somebody(site: Site) -> None:
    """The strip says whose job it was, and the run's timeline has it in another colour."""
    number = checkpoint(site, 4)
    with site.window() as seen:
        page = seen.page
        seen.open(f"/checkpoints/{number}")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator("#job .head .badge")).to_have_text("succeeded", timeout=WAIT_MS)
        seen.open(f"/checkpoints/{number}")
        expect(page.get_by_role("region", name="Health")).to_contain_text("of key:ada")
        seen.open("/runs/1?verification=good")
        expect(page.locator("#checkpoints tbody tr")).to_have_count(1)
        assert seen.faults == []


def test_a_conversion_as_it_goes_on(site: Site) -> None:
    """The page follows by itself; what was made says what of, as a graph with links and a table."""
    number = checkpoint(site, 8)
    with site.window() as seen:
        page = seen.page
        convert(page, seen, number, "export/model.safetensors")
        page.evaluate("window.isTheSame = true")
        expect(page.locator("#job .head .badge")).to_have_text("succeeded", timeout=WAIT_MS)
        assert page.evaluate("window.isTheSame"), "nothing was loaded anew"
        expect(page.locator(".log")).to_contain_text("publish")
        page.get_by_role("link", name="Open what it made").click()
        page.wait_for_url("**/checkpoints/*")
        made = seen.path
        page.get_by_role("link", name="As a graph").click()
        expect(page.locator(".graph .node")).to_have_count(2)
        assert accessibility_faults(page) == []
        for width in (360, 1024, 1920):
            resized(seen, width, "dark")
        page.locator(".graph .node").first.click()
        page.wait_for_url(f"**/checkpoints/{number}/lineage")
        expect(page.locator(".graph .node.here")).to_contain_text("step-00000008")
        page.locator(".graph .node").last.click()
        page.wait_for_url(f"**{made}/lineage")
        page.go_back()
        page.wait_for_url(f"**/checkpoints/{number}/lineage")
        assert seen.faults == []


def test_a_job_is_cancelled_and_tried_again(site: Site) -> None:
    """While it waits behind others; nothing is left of it, and the second time it succeeds."""
    number = checkpoint(site, 6)
    for place in range(6):
        site.api.submit(
            "convert", checkpoint_id=number, to="safetensors", target_key=f"queue/{place}", drop_objects=True
        )
    with site.window() as seen:
        page = seen.page
        convert(page, seen, number, "queue/last")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#job .head .badge")).to_have_text("cancelled", timeout=WAIT_MS)
        expect(page.locator(".log")).to_contain_text("ada")
        assert not [one for one in site.api.checkpoints() if one["key"] == "queue/last"]
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#job .head .badge")).to_have_text("succeeded", timeout=WAIT_MS)
        seen.open("/jobs?kind=convert")
        expect(page.locator("#jobs tbody tr").first).to_contain_text("succeeded")
        assert seen.faults == []


def test_an_alias_is_moved_and_moved_back(site: Site) -> None:
    """After asking, by the button of the page that says so; removed and given again."""
    first, second = checkpoint(site, 2), checkpoint(site, 4)
    with site.window() as seen:
        page = seen.page
        for number in (first, second):
            seen.open(f"/checkpoints/{number}")
            page.get_by_label("Alias", exact=True).fill("best")
            page.get_by_role("button", name="Name it so").click()
        page.get_by_role("button", name="Move it").click()
        said(page, "names this checkpoint now")
        page.get_by_role("button", name="Undo: let it name step 2 again").click()
        page.wait_for_url(f"**/checkpoints/{first}?*")
        said(page, "names this checkpoint now")
        page.get_by_role("button", name="Remove the alias best").click()
        said(page, "is removed")
        page.get_by_role("button", name="Undo: let it name this one again").click()
        expect(page.locator(".head .flag")).to_have_text("best")
        seen.open("/runs/1")
        expect(page.locator("dl.facts .flag")).to_have_attribute("href", f"/checkpoints/{first}")
        assert seen.faults == []


def test_deleted_and_restored(site: Site) -> None:
    """What is pinned is not; the way back is on the page that says it is deleted."""
    number = checkpoint(site, 6)
    with site.window() as seen:
        page = seen.page
        seen.open(f"/checkpoints/{number}")
        page.get_by_role("button", name="Pin").click()
        said(page, "It is pinned")
        page.get_by_text("Delete…").click()
        expect(page.get_by_text("It is pinned: that is to be taken away before.")).to_be_visible()
        page.get_by_role("button", name="Unpin").click()
        page.get_by_text("Delete…").click()
        page.get_by_role("button", name="Delete Step 6").click()
        said(page, "Its bytes are there until")
        assert site.api.get(f"/checkpoints/{number}")["state"] == "deleted"
        page.get_by_role("button", name="Undo: restore it").click()
        said(page, "It is restored.")
        assert seen.faults == []


def test_the_log_knows_all_of_it(site: Site) -> None:
    """Filtered as one types, in the address; a name leads to what else it did."""
    number = checkpoint(site, 8)
    site.api.http.put(f"/api/v1/checkpoints/{number}/tags/release").raise_for_status()
    with site.window() as seen:
        page = seen.page
        seen.open("/audit")
        page.get_by_label("What", exact=True).fill("checkpoint.tag")
        page.keyboard.press("Enter")
        page.wait_for_url("**/audit?*action=checkpoint.tag*")
        seen.open("/audit")
        page.locator("#audit").get_by_role("link", name="key:ada").first.click()
        page.wait_for_url("**/audit?actor=key%3Aada")
        assert accessibility_faults(page) == []
        assert seen.faults == []
