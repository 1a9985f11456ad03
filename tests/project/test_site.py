"""Documentation site: pages in the navigation, a complete Python reference, search, no foreign requests."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import dcp
import dcp.errors
from tests.support.chromium import running_chromium, window

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = ROOT / "site"


def listed(nav: Any) -> Iterator[str]:
    """Yield the pages of the navigation."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from listed(part)


def test_every_page_is_in_the_navigation() -> None:
    """Each page is in the navigation once."""
    pages = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(listed(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])) == pages


def test_every_public_name_is_in_the_reference() -> None:
    """Each name of dcp has a directive, a row of torch's names, or a section of the errors."""
    pages = "\n".join(page.read_text() for page in (DOCS / "reference/python").glob("*.md"))
    directives = {name.removeprefix("dcp.") for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE)}
    torch_names = {*re.findall(r"`(\w+)`", pages.split("## Names of torch", 1)[1].split("\n\n\n")[0])}
    errors = {*re.findall(r"^## (\w+)", (DOCS / "reference/generated/errors.md").read_text(), re.MULTILINE)}
    assert not {*dcp.__all__} - directives - torch_names - errors
    assert {*dcp.errors.__all__, "RankFailedError"} == errors


def build() -> None:
    """Build the site, unless the site of `make docs` is newer than all pages."""
    index = SITE / "index.html"
    sources = [ROOT / "zensical.toml", *DOCS.rglob("*.md")]
    if not index.exists() or index.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_COLOR": "1"})


def test_links_of_docstrings_have_targets() -> None:
    """The strict build checks links of pages, but not those in the docstrings that pages show."""
    build()
    pages = {page: page.read_text() for page in SITE.rglob("*.html") if page.name != "404.html"}
    anchors = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()}
    wrong = []
    for page, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]*)"', text):
            place, _, anchor = unquote(unescape(link)).partition("#")
            target = (page.parent / place).resolve() if place else page
            target = target / "index.html" if target.is_dir() else target
            is_known = ":" in link or (target.exists() and (not anchor or anchor in anchors.get(target, ())))
            wrong += [] if is_known else [(str(page.relative_to(SITE)), link)]
    assert not wrong


class Quiet(http.server.SimpleHTTPRequestHandler):
    """HTTP handler that serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the URL of a server of a folder."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def test_the_site_works_in_a_browser_without_another_host() -> None:
    """Navigation and search find a page, and no page requests another host, also not an API page."""
    build()
    with served(SITE) as address, running_chromium() as browser, window(browser, address, 1400) as opened:
        page = opened.page
        page.goto(address)
        page.get_by_role("link", name="Settings", exact=True).first.click()
        page.wait_for_url("**/reference/generated/settings/")
        assert page.get_by_text("delete_grace_seconds").first.is_visible()
        page.goto(f"{address}reference/python/manager/")
        assert page.locator("[id='dcp.CheckpointManager']").is_visible()
        page.keyboard.press("Control+k")
        page.keyboard.type("retention")
        page.get_by_text(re.compile(r"^\d+ results$")).wait_for()
        assert not [fault for fault in opened.faults if not fault.startswith(("blob:", "data:"))]
