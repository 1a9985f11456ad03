"""Pages in Chromium, against a real service with real checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from playwright.sync_api import Error, Page, expect

import dcp
from tests.support.chromium import accessibility_faults
from tests.support.site import Site, resized, running_site

STEPS: Final = (100, 200, 400)
_TABLE: Final = "\n".join(f"{cell * 30}|" for cell in ("|a", "|-", "|1"))
NOTE: Final = f"## Spike\n\n{_TABLE}\n\n    {'x' * 300}\n\nhttps://e.org/{'y' * 300}"
WIDTHS: Final = (360, 1024, 1920)
COLOURS: Final = ("light", "dark")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start a service with a run of three steps."""
    folder = tmp_path_factory.mktemp("site")
    train(folder / "runs/llama/7b")
    (folder / "service").mkdir()
    with running_site(folder / "service", folder / "runs", len(STEPS)) as made:
        api = made.api
        api.finished(api.submit("verify", checkpoint_id=api.checkpoints(sort="step")[0]["id"]))
        api.http.post("/api/v1/runs/1/notes", json={"text": NOTE}).raise_for_status()
        for stage in ("candidate", "production"):
            body = {"stage": stage, "reason": "r" * 300}
            api.http.post("/api/v1/checkpoints/1/stage-requests", json=body).raise_for_status()
        yield made


def train(folder: Path) -> None:
    """Save three steps with metrics; one weight changes at each step."""
    model = torch.nn.ModuleDict({f"layers_{n}": torch.nn.Linear(16, 16) for n in range(3)})
    with dcp.CheckpointManager(folder, every_steps=100, no_dist=True) as manager:
        for step in STEPS:
            with torch.no_grad():
                model["layers_2"].weight.mul_(1.01)  # type: ignore[operator]
            manager.save(step, {"model": model, "step": step}, metrics={"loss": 100 / step, "accuracy": 0.5})


_HIDE: Final = """
isHidden => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}
"""
"""Script that hides or shows the document: in a headless browser each tab is visible."""

PATHS: Final = (
    "/",
    "/runs?sort=metric&of=min&metric=loss&run=1",
    "/runs/compare?run=1&scale=log",
    "/runs/1?keep_last=1",
    "/checkpoints?state=any",
    "/checkpoints/1?prefix=model",
    "/checkpoints/2?view=list",
    "/checkpoints/1/files",
    "/checkpoints/1/layers",
    "/checkpoints/2/tensors?fqn=model.layers_0.weight",
    "/checkpoints/2/tensors/slice?fqn=model.layers_0.weight&d0=0:8&d1=:",
    "/checkpoints/1/shards",
    "/checkpoints/1/anatomy",
    "/checkpoints/1/will-it-load?state_of=2",
    "/diff?a=1&b=3&tensor=model.layers_2.weight",
    "/runs/1/drift",
    "/search?q=layers",
    "/jobs?scans=true",
    "/jobs/1",
    "/roots",
    "/checkpoints/1/lineage",
    "/runs/1/notes",
    "/runs/1/stages",
    "/stage-requests",
    "/notes/1/edit",
    "/keys",
    "/audit",
)


RARE: Final = (
    "/checkpoints/1/shards/chunks",
    "/checkpoints/1/shards?first_rank=0&end=900&colour=bytes",
    "/keys/1/revoke",
)
"""Plain tables, and variants of other pages."""


def test_pages_at_three_widths_in_both_colours(site: Site) -> None:
    """Pages have no horizontal scrolling, error, foreign request or serious accessibility fault."""
    with site.kept_window() as seen:
        for number, path in enumerate(PATHS[::3]):
            seen.open(path)
            if number % 4 == 0:  # slow; the exhaustive test checks all pages
                assert accessibility_faults(seen.page) == [], path
            resized(seen, WIDTHS[0], COLOURS[number % 2])
            resized(seen, WIDTHS[1 + number % 2], COLOURS[1 - number % 2])
        assert seen.faults == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("colours", COLOURS)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_loaded_at_all_widths_and_colours(site: Site, width: int, colours: str) -> None:
    """Pages have no such fault when loaded at each width and color scheme, checked with axe-core."""
    with site.window(width, colours) as seen:
        for path in (*PATHS, *RARE):
            seen.open(path)
            resized(seen, width, colours)
            assert accessibility_faults(seen.page) == [], (path, width, colours)
        assert seen.faults == []


def test_browsing_the_catalog(site: Site) -> None:
    """Search by keyboard, charts, filters in the URL, the back button, copying and color schemes work."""
    with site.kept_window() as seen:
        page = seen.page
        seen.open("/")
        page.keyboard.press("/")
        page.keyboard.type("7b")
        expect(page.locator("#found .hits a").first).to_contain_text("llama/7b")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/1")
        expect(page.locator(".uplot canvas")).to_be_visible()
        page.get_by_label("Metric").select_option("accuracy")
        page.wait_for_url("**/runs/1?metric=accuracy*")
        page.wait_for_function("scrollY > 0")  # scrolled to the control, not to the top
        page.go_back()
        page.wait_for_url("**/runs/1")
        page.locator("#checkpoints").get_by_role("link", name="good").click()
        page.wait_for_url("**/runs/1?verification=good")
        expect(page.locator("#checkpoints tbody tr")).to_have_count(1)
        page.go_back()
        page.wait_for_url("**/runs/1")
        expect(page.locator("#checkpoints tbody tr")).to_have_count(len(STEPS))
        page.locator("#checkpoints").get_by_role("link", name="400", exact=True).click()
        page.wait_for_url("**/checkpoints/*")
        expect(page.locator("#stock, [hx-trigger=load]").first).to_contain_text(
            "torch.distributed.checkpoint"
        )
        assert page.title().startswith("Step 400"), "parts of other pages do not name the tab"
        page.get_by_label("Name").first.fill("layers_1.*weight")
        expect(page.locator("#tensors tbody tr")).to_have_count(1)
        assert "glob=layers_1" in seen.path
        page.get_by_role("button", name="Copy the key").click()
        assert page.evaluate("navigator.clipboard.readText()") == "llama/7b/step-00000400"
        seen.open("/checkpoints/1?prefix=model")
        expect(page.locator(".treemap a")).to_have_count(3)
        page.locator(".treemap a").first.click()
        page.wait_for_url("**/checkpoints/1?prefix=model.layers_*")
        page.get_by_role("button", name="Colors").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        light = page.evaluate("[getComputedStyle(document.body).color, colourOf('--ground')]")
        page.get_by_role("button", name="Colors").click()
        dark = page.evaluate("[getComputedStyle(document.body).color, colourOf('--ground')]")
        assert light == ["rgb(27, 28, 30)", "rgb(246, 246, 244)"]
        assert dark == ["rgb(236, 237, 237)", "rgb(19, 20, 22)"]
        assert seen.faults == []


@pytest.mark.exhaustive
def test_the_values_of_a_tensor(site: Site) -> None:
    """A tensor is found and drawn, and zoomed by dragging; results of jobs appear without a reload."""
    with site.kept_window() as seen:
        page = seen.page
        seen.open("/checkpoints/3?glob=layers_1.weight")
        page.locator("#entries tbody a").click()
        page.wait_for_url("**/checkpoints/3/tensors?fqn=model.layers_1.weight")
        expect(page.locator("#values .histogram svg")).to_have_count(2)
        expect(page.locator("#steps tbody tr")).to_have_count(len(STEPS))
        canvas = page.locator("#slice canvas")
        expect(canvas).to_be_visible()
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.02, box["y"] + box["height"] * 0.02)
        expect(page.locator("[data-readout]")).to_contain_text("0, 0:")
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.48, box["y"] + box["height"] * 0.23)
        page.mouse.up()
        page.wait_for_url("**/tensors/slice?**")
        expect(page.get_by_label("Dimension 0")).to_have_value("0:4")
        expect(page.get_by_label("Dimension 1")).to_have_value("0:8")
        page.get_by_label("Value of a cell").select_option("abs_max")
        page.wait_for_url("**value=abs_max**")
        expect(page.locator("#slice canvas")).to_be_visible()
        page.go_back()
        expect(page.get_by_label("Value of a cell")).to_have_value("mean")
        page.go_back()
        page.wait_for_url("**/checkpoints/3/tensors?fqn=**")
        seen.open("/checkpoints/3/layers")
        page.get_by_role("button", name="Compute statistics").click()
        expect(page.locator("#layers tbody tr")).to_have_count(3, timeout=120_000)
        seen.open("/checkpoints/3?prefix=model&colour=change")
        page.get_by_role("button", name="Compare with step 200").click()
        expect(page.locator(".legend.changes")).to_be_visible(timeout=120_000)
        expect(page.locator(".treemap .q0").first).to_be_visible()
        assert seen.faults == []


def test_working_on_a_checkpoint(site: Site) -> None:
    """A checkpoint is converted with live progress, its target tagged, then deleted and restored."""
    with site.kept_window() as seen:
        page = seen.page
        seen.open("/checkpoints/2")
        page.get_by_text("Convert…").click()
        form = page.locator("form[action$='/convert']")
        form.get_by_label("Target key").fill("export/model.safetensors")
        form.get_by_label("drop values").check()
        page.get_by_role("button", name="Convert").click()
        page.wait_for_url("**/jobs/*")
        expect(page.locator("#job .head .badge")).to_have_text("succeeded", timeout=120_000)
        page.get_by_role("link", name="Open result").click()
        page.wait_for_url("**/checkpoints/*")
        page.get_by_label("New tag").fill("release")
        page.get_by_role("button", name="Add tag").click()
        expect(page.get_by_role("status").filter(has_text="Tag added.")).to_be_visible()
        seen.open("/checkpoints/3")
        page.get_by_text("Delete…").click()
        page.get_by_role("button", name="Delete Step 400").click()
        page.get_by_role("button", name="Restore").click()
        expect(page.get_by_role("status").filter(has_text="Restored.")).to_be_visible()
        assert seen.faults == []


_FOCUSED: Final = """
() => {
  const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
  if (at === document.body) return null;
  const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  const isMarked = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  const isSeen = box.width > 0 && box.bottom > 0 && box.top < innerHeight;
  const isCovered = top && !at.contains(top) && !top.contains(at);
  return [at.outerHTML.slice(0, 90), isMarked && isSeen && !isCovered];
}
"""
"""Return the focused element and whether it is visible and marked; null at the end of the page."""


@pytest.mark.exhaustive
def test_tab_reaches_each_control(site: Site) -> None:
    """Tab reaches each control of a page, visible and marked, and leaves the page, also on the map of shards.
    The skip link skips, and Escape closes a menu and returns the focus."""
    with site.window() as seen:
        press = seen.page.keyboard.press
        for path in (*PATHS, *RARE):
            seen.open(path)
            places = _tabbed(seen.page)
            assert [place for place, is_seen in places if not is_seen] == [], path
            if "/shards?" in path or path.endswith("/shards"):
                assert any(place.startswith("<canvas") for place, _ in places)
        seen.open("/checkpoints/1")
        press("Tab")
        press("Enter")
        press("Tab")
        assert seen.page.evaluate("document.activeElement.closest('main') !== null")
        seen.page.locator("details.menu summary").focus()
        press("Enter")
        press("Tab")
        assert seen.page.evaluate("document.activeElement.closest('.sheet') !== null")
        press("Escape")
        assert seen.page.locator("details.menu[open]").count() == 0
        assert seen.page.evaluate("document.activeElement.localName") == "summary"
        assert seen.faults == []


def _tabbed(page: Page) -> list[Any]:
    found: list[Any] = []
    while len(found) < 400:
        page.keyboard.press("Tab")
        place = page.evaluate(_FOCUSED)
        if place is None:
            return found
        found.append(place)
    raise AssertionError(f"{page.url}: no end of {found[-3:]}")


@pytest.mark.exhaustive
def test_hidden_tabs_free_their_connections(site: Site) -> None:
    """Hidden tabs, more than a browser has connections, free them; a visible tab shows missed changes."""
    with site.window() as seen:
        pages = [seen.page, *(seen.page.context.new_page() for _ in range(7))]
        for page in pages:
            page.goto(f"{site.service.url}/jobs")
            page.evaluate(_HIDE, True)
        seen.open("/roots")
        page = pages[-1]
        job = site.api.submit("verify", checkpoint_id=site.api.checkpoints(sort="step")[1]["id"])
        site.api.finished(job)
        page.wait_for_timeout(1500)
        expect(page.get_by_role("link", name=f"verify {job}")).to_have_count(0)
        page.evaluate(_HIDE, False)
        expect(page.get_by_role("link", name=f"verify {job}")).to_be_visible()
        assert seen.faults == []


def test_keys_are_created_copied_and_revoked(site: Site) -> None:
    """A key is created and copied, is gone when the page is shown again, and is revoked."""
    with site.window() as seen:  # a window of its own, because this test ends at an error page
        page = seen.page
        seen.open("/keys")
        page.get_by_label("Name").fill("robot")
        page.get_by_role("button", name="Create key").click()
        page.get_by_role("button", name="Copy", exact=True).click()
        key = page.evaluate("navigator.clipboard.readText()")
        with site.service.client(key) as robot:
            assert robot.get("/api/v1/whoami").json()["name"] == "key:robot"
            page.get_by_role("link", name="Revoke robot").click()
            page.get_by_role("button", name="Revoke robot").click()
            expect(page.get_by_role("status").filter(has_text="Key revoked")).to_be_visible()
            assert robot.get("/api/v1/whoami").status_code == 401
        assert seen.faults == []
        page.go_back()
        with pytest.raises(Error, match="ERR_CACHE_MISS"):  # the page with the secret is not cached
            page.go_back()


def test_signing_out(site: Site) -> None:
    """Signing out ends the session, also for the page behind the back button."""
    with site.kept_window() as seen:
        page = seen.page
        seen.open("/roots")
        page.locator("details.menu summary").click()
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")
        assert seen.faults == []
        page.goto(f"{site.service.url}/roots")
        page.wait_for_url("**/sign-in?next=%2Froots")
    site.sign_in()


@pytest.mark.exhaustive
def test_slow_responses_do_not_overwrite_typed_text(site: Site) -> None:
    """A slow response does not overwrite text typed meanwhile."""
    with site.window() as seen:
        page = seen.page
        seen.open("/checkpoints/1?view=list")
        slow = page.context.new_cdp_session(page)
        slow.send("Network.enable")
        rates = {"downloadThroughput": -1, "uploadThroughput": -1}
        slow.send("Network.emulateNetworkConditions", {"offline": False, "latency": 500, **rates})
        page.locator("#glob").click()
        page.keyboard.type("laye", delay=20)
        with page.expect_response("**glob=laye*"):
            page.wait_for_timeout(700)
            page.keyboard.type("rs_1", delay=30)
        page.wait_for_url("**glob=layers_1*")
        expect(page.locator("#glob")).to_have_value("layers_1")
        expect(page.locator("#glob")).to_be_focused()


def test_new_checkpoints_arrive_on_an_open_page(site: Site) -> None:
    """New checkpoints arrive by one stream and keep selections and open tables; a hidden tab requests
    nothing; the page has the same text without scripts."""
    folder = site.service.folder.parent / "runs/live"

    def train(*steps: int) -> int:
        with dcp.CheckpointManager(folder, every_steps=1, no_dist=True) as manager:
            for step in steps:
                manager.save(step, {"w": torch.ones(2)}, metrics={"loss": 1 / step})
        names = [next(folder.glob(f"step-*{step}")).name for step in steps]
        number = [site.api.register("main", f"live/{name}") for name in names][-1]
        return int(site.api.get(f"/checkpoints/{number}")["run_id"])

    run_id = train(10_001, 10_002)
    with site.kept_window() as seen:
        page = seen.page
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        seen.open(f"/runs/{run_id}")
        rows, facts = page.locator("#checkpoints tbody tr"), page.locator("#live-facts")
        expect(rows).to_have_count(2)
        expect(page.locator("#live-activity")).not_to_contain_text("Training")
        page.locator("#live-metric details summary").click()
        train(10_003, 10_004)
        expect(rows).to_have_count(4)
        expect(facts).to_contain_text("10,004")
        expect(page.locator("#live-activity")).to_contain_text("Training: last checkpoint just now, every")
        expect(page.locator("#live-metric .uplot canvas")).to_be_visible()
        expect(page.locator("#live-metric details")).to_have_attribute("open", "")
        assert sum(url.endswith("/events") for url in urls) == 1
        page.locator("#checkpoints input[name=of]").first.check()
        train(10_005)
        expect(facts).to_contain_text("10,005")
        expect(rows).to_have_count(4)
        page.get_by_role("button", name="Show changes").click()
        expect(rows).to_have_count(5)
        page.evaluate(_HIDE, True)
        page.wait_for_timeout(500)
        before = len(urls)
        train(10_006)
        page.wait_for_timeout(2500)
        assert len(urls) == before
        page.evaluate(_HIDE, False)
        expect(rows).to_have_count(6)
        assert seen.faults == []
    with site.service.client(site.key) as client:
        assert "Training" in client.get(f"/runs/{run_id}", headers={"accept": "text/html"}).text


def _end(url: str) -> int:
    return int(parse_qs(urlsplit(url).query)["end"][0])
