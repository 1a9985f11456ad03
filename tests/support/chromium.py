"""The system's Chromium, driven by Playwright; records forbidden actions of a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["AXE", "Window", "accessibility_faults", "running_chromium", "window"]

AXE: Final = Path(__file__).parents[1] / "service/pages/vendor/axe-core-4.14.1.min.js"
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_QUIET: Final = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_SERIOUS: Final = ("serious", "critical")


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """Start a browser for all tests of a file. Without Chromium they fail: no other test renders pages."""
    path = os.environ.get("DCP_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.fail(
            "Chromium is missing: apt-get install chromium (make test does it as root on Debian), or say "
            "where it is by DCP_TEST_CHROMIUM"
        )
    arguments = [*_QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(slots=True)
class Window:
    """A page of a browser; ``faults`` are console errors and requests to other hosts."""

    page: Page
    base_url: str
    faults: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        """Open ``path``, and wait until the page is loaded and processed by htmx."""
        answer = self.page.goto(self.base_url + path)
        assert answer is not None and answer.ok, (path, answer and answer.status)
        self.page.wait_for_load_state("load")
        assert self.page.evaluate("document.documentElement.classList.contains('has-script')"), path

    @property
    def path(self) -> str:
        """Return the current path."""
        parts = urlsplit(self.page.url)
        return parts.path + (f"?{parts.query}" if parts.query else "")


@contextmanager
def window(
    browser: Browser,
    base_url: str,
    width: int = 1024,
    colours: Literal["light", "dark"] = "light",
    state: Any = None,
) -> Iterator[Window]:
    """Open a window of this width with the cookies of ``state``."""
    host = urlsplit(base_url).netloc
    viewport: Any = {"width": width, "height": 800}
    context = browser.new_context(viewport=viewport, color_scheme=colours, storage_state=state)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=base_url)
    found = Window(context.new_page(), base_url)
    faults = found.faults
    page = found.page
    page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda one: None if urlsplit(one.url).netloc == host else faults.append(one.url))
    try:
        yield found
    finally:
        context.close()


def accessibility_faults(page: Page, rule: str | None = None) -> list[str]:
    """Return serious problems found by axe-core with their places, by all rules or one."""
    # by the DevTools protocol: the content security policy of the page would block a script element
    page.evaluate(AXE.read_text())
    wanted = {"resultTypes": ["violations"], **({"runOnly": [rule]} if rule else {})}
    found = page.evaluate("wanted => axe.run(document, wanted)", wanted)
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        if one["impact"] in _SERIOUS
        for node in one["nodes"]
    ]
