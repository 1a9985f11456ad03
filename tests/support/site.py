"""A real service with a signed-in browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser

from tests.support.catalog_api import CatalogApi, create_key
from tests.support.chromium import Window, running_chromium, window
from tests.support.service import Service, Worker, wait_until

__all__ = ["Site", "resized", "running_site"]

_SETTINGS: Final = {
    "auth": "keys",
    "rate_limit": "100000/minute",
    "concurrency": 1,
    "embedded_worker": False,
    "log_level": "warning",
}


class Site:
    """A service, a key for it, and a browser signed in with the key."""

    def __init__(self, service: Service, key: str, browser: Browser, api: CatalogApi) -> None:
        self.service = service
        self.key = key
        self.browser = browser
        self.api = api
        self.state: Any = None
        self._kept: Window | None = None
        self._windows = ExitStack()

    def sign_in(self) -> None:
        """Sign in by the form, like any user."""
        with window(self.browser, self.service.url) as seen:
            seen.page.goto(f"{self.service.url}/jobs")
            seen.page.get_by_label("API key").fill(self.key)
            seen.page.get_by_role("button", name="Sign in").click()
            seen.page.wait_for_url("**/jobs")
            assert seen.faults == []
            self.state = seen.page.context.storage_state()

    def window(self, width: int = 1024, colours: Any = "light") -> Any:
        """Open a signed-in window."""
        return window(self.browser, self.service.url, width, colours, self.state)

    @contextmanager
    def kept_window(self) -> Iterator[Window]:
        """Provide a signed-in window shared by successive tests, since a new one costs a second. Only its
        history differs from a new window; after a failed test it is replaced."""
        seen, self._kept = self._kept or self._windows.enter_context(self.window()), None
        page = seen.page
        page.context.clear_cookies()
        page.context.add_cookies(self.state["cookies"])
        yield seen
        page.unroute_all()
        page.goto("about:blank")
        storage = {"origin": self.service.url, "storageTypes": "local_storage"}
        page.context.new_cdp_session(page).send("Storage.clearDataForOrigin", storage)
        page.set_viewport_size({"width": 1024, "height": 800})
        page.emulate_media(color_scheme="light")
        seen.faults.clear()
        self._kept = seen

    def close(self) -> None:
        """Close the browser and its windows."""
        self._windows.close()


@contextmanager
def running_site(folder: Path, runs: Path, checkpoints: int) -> Iterator[Site]:
    """Run a service over the root "main" at ``runs``, until it has found ``checkpoints`` checkpoints; its
    files are in ``folder``."""
    service = Service(folder, {**_SETTINGS, "roots": {"main": {"url": str(runs)}}})
    key = create_key(service, "ada", ["admin"])
    worker = Worker(folder, service.settings)
    with running_chromium() as browser, service, worker, service.client(key) as client:
        api = CatalogApi(client)
        wait_until(lambda: len(api.checkpoints()) == checkpoints, "the scan finds them")
        with closing(Site(service, key, browser, api)) as made:
            made.sign_in()
            yield made


def resized(seen: Window, width: int, colours: Any) -> None:
    """Set the width and colours of a window; its page must fit into the width."""
    seen.page.set_viewport_size({"width": width, "height": 800})
    seen.page.emulate_media(color_scheme=colours)
    wide = seen.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, (seen.path, width, wide)
