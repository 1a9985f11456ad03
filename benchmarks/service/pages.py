"""`python -m benchmarks.service.pages`: time of the pages of a large catalog, measured in Chromium.

A real `dcp serve` over a run of 5,000 steps, checkpoints of 50,000 tensors, 300 checkpoints of 12 runs with
5,000 names each, and the index of a checkpoint of 1,024 ranks with 5,000 tensors each; jobs have computed the
displayed results. Measured for each page: first byte, first paint, blocking of the main thread, and
interactions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
from playwright.sync_api import Page, sync_playwright

from benchmarks.service.catalog import database_of, service_of
from benchmarks.service.large_catalog import Sizes, fill, found_by_jobs, numbers_of, write_checkpoints
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade

__all__ = ["main"]

_OBSERVED: Final = """
(() => {
  window.found = { tasks: [], events: [] };
  new PerformanceObserver((list) => list.getEntries().forEach((one) => found.tasks.push(one.duration)))
    .observe({ type: "longtask", buffered: true });
  const seen = (one) => one.interactionId && found.events.push(one.duration);
  new PerformanceObserver((list) => list.getEntries().forEach(seen))
    .observe({ type: "event", durationThreshold: 16, buffered: true });
})();
"""


@dataclass(frozen=True, slots=True)
class PageResult:
    """Figures of one page in milliseconds, as the median of several visits.

    ``first_byte`` and ``paint`` count from the start of the navigation; ``longest_task`` is the longest task
    of the main thread, and ``interaction`` the longest interaction until its paint. ``cpu`` is the processor
    time of the service for the page and its resources.
    """

    page: str
    cpu: float
    first_byte: float
    paint: float
    longest_task: float
    interaction: float
    bytes: int


# -- interactions of each page -------------------------------------------------------------------------------


def _type_a_search(page: Page) -> None:
    page.locator("#find").press_sequentially("layers.4", delay=60)
    page.wait_for_selector("#found .hits a", timeout=60_000)
    page.keyboard.press("ArrowDown")


def _search_on(page: Page) -> None:
    page.locator("#find").press_sequentially(".4", delay=60)
    page.wait_for_selector("main .hits a", timeout=60_000)


def _filter_tensors(page: Page) -> None:
    page.locator("#glob").press_sequentially("layers.49", delay=60)
    page.wait_for_url(lambda url: "glob" in url, timeout=60_000)


def _zoom(page: Page) -> None:
    page.wait_for_selector(".shardmap .state:empty", state="attached", timeout=120_000)
    box = page.locator(".shardmap canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 300, box["y"] + 100)
    for turn in range(6):
        page.mouse.wheel(0, -120)
        page.mouse.move(box["x"] + 300 + 9 * turn, box["y"] + 100 + 5 * turn)
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(120)
    page.wait_for_timeout(600)


def _walk(page: Page) -> None:
    """Zoom in while finer bins arrive, move by keys and by drag, and zoom out."""
    page.wait_for_selector(".shardmap .state:empty", state="attached", timeout=120_000)
    box = page.locator(".shardmap canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 300, box["y"] + 100)
    for turn in range(40):
        page.mouse.wheel(0, -120 if turn < 24 else 120)
        page.keyboard.press(("Shift+ArrowRight", "+", "Shift+ArrowDown", "ArrowRight", "-")[turn % 5])
        page.mouse.move(box["x"] + 250, box["y"] + 100)
        page.mouse.down()
        page.mouse.move(box["x"] + 200 + 3 * turn, box["y"] + 120, steps=4)
        page.mouse.up()
        page.wait_for_timeout(100)
    page.wait_for_timeout(600)


def _point_at_cells(page: Page) -> None:
    canvas = page.locator("#slice canvas")
    canvas.wait_for(timeout=60_000)
    canvas.scroll_into_view_if_needed()
    _move_over(page, canvas.bounding_box())


def _look_at_drift(page: Page) -> None:
    page.locator(".heat svg").scroll_into_view_if_needed()
    _move_over(page, page.locator(".heat svg").bounding_box())
    page.get_by_role("link", name="Elements changed").click()
    page.wait_for_url("**value=changed**", timeout=60_000)


def _move_over(page: Page, box: Any) -> None:
    for turn in range(12):
        page.mouse.move(box["x"] + 20 + turn * (box["width"] - 40) / 12, box["y"] + box["height"] * turn / 14)
        page.wait_for_timeout(30)
    page.keyboard.press("/")


def _filter_differences(page: Page) -> None:
    page.locator("#glob").press_sequentially("layers.49", delay=60)
    page.wait_for_url(lambda url: "glob" in url, timeout=60_000)
    page.locator(".differences tbody a").first.click()
    page.wait_for_selector("#tensor .histogram svg", timeout=60_000)


def _press(page: Page) -> None:
    page.keyboard.press("/")


_PAGES: Final[dict[str, tuple[str, Callable[[Page], None]]]] = {
    "overview": ("/", _type_a_search),
    "run of 5,000 steps": ("/runs/{long}", _press),
    "50,000 tensors, tree": ("/checkpoints/{wide}?prefix=model.layers", _filter_tensors),
    "50,000 tensors, list": ("/checkpoints/{wide}?view=list", _press),
    "search": ("/search?q=layers", _search_on),
    "checkpoints": ("/checkpoints", _press),
    "1,024 x 5,000 shards": ("/checkpoints/{sharded}/shards", _zoom),
    "the same, walked on and on": ("/checkpoints/{sharded}/shards", _walk),
    "1,024 x 5,000 chunks": ("/checkpoints/{sharded}/shards/chunks", _press),
    "save of 1,024 ranks": ("/checkpoints/{sharded}/anatomy", _press),
    "tensor, one of 50,000": (
        "/checkpoints/{wide}/tensors?fqn=model.layers.50.gate.weight",
        _point_at_cells,
    ),
    "tensor of 32 MiB": ("/checkpoints/{wide}/tensors?fqn=model.embed.weight", _point_at_cells),
    "5,000 layers": ("/checkpoints/{wide}/layers", _press),
    "50,000 tensors, by change": ("/checkpoints/{wide}?prefix=model.layers&colour=change", _filter_tensors),
    "difference of 50,000": ("/diff?a={before}&b={wide}", _filter_differences),
    "drift, 200 x 600": ("/runs/{long}/drift", _look_at_drift),
    "lineage of 300": ("/checkpoints/{origin}/lineage", _press),
}


def _visit(
    page: Page, base_url: str, path: str, act: Callable[[Page], None], service: psutil.Process
) -> dict[str, float]:
    before = sum(service.cpu_times()[:2])
    answer = page.goto(base_url + path, wait_until="load", timeout=120_000)
    if answer is None or not answer.ok:
        raise RuntimeError(f"{path}: {answer and answer.status}")
    page.wait_for_timeout(500)
    cpu = 1e3 * (sum(service.cpu_times()[:2]) - before)
    act(page)
    page.wait_for_timeout(300)
    found: dict[str, Any] = page.evaluate(
        """() => ({
          first_byte: performance.getEntriesByType("navigation")[0].responseStart,
          paint: performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN,
          longest_task: Math.max(0, ...found.tasks),
          interaction: Math.max(0, ...found.events),
          bytes: performance.getEntriesByType("navigation")[0].decodedBodySize })"""
    )
    return found | {"cpu": cpu}


def _measure(
    base_url: str, numbers: dict[str, int], rounds: int, only: str, service: psutil.Process
) -> Iterator[PageResult]:
    path = os.environ.get("DCP_TEST_CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, (template, act) in _PAGES.items():
            if only not in name:
                continue
            visits = []
            for _ in range(rounds):
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                context.add_init_script(_OBSERVED)
                visits.append(_visit(context.new_page(), base_url, template.format(**numbers), act, service))
                context.close()
            middle = {key: statistics.median(visit[key] for visit in visits) for key in visits[0]}
            yield PageResult(name, **{**middle, "bytes": int(middle["bytes"])})
        browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill, serve, visit, print."""
    options = _parse(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="dcp-pages-", dir=options.tmp) as name,
        _filled(Path(name), options) as url,
    ):
        results = []
        with service_of(url, Path(name), has_worker=True) as (client, process, _):
            database = Database(url)
            numbers = numbers_of(client, database, options.sizes)
            database.close()
            print(f"jobs: {found_by_jobs(client, numbers, options.sizes)}", flush=True)
            print(f"searches: {_searched(client)}", flush=True)
            for result in _measure(
                str(client.base_url), numbers, options.rounds, options.only, psutil.Process(process.pid)
            ):
                results.append(result)
                print(_line(result), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


@contextmanager
def _filled(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    write_checkpoints(folder / "main", options.sizes)
    with database_of(options.database, folder) as url:
        database = Database(url)
        upgrade(database)
        fill(database)
        database.close()
        yield url


def _searched(client: Any) -> dict[str, str]:
    """Return the best and the median milliseconds of several searches."""
    found = {}
    for text in ("layers", "weight_7", "layers.4", "layers.49.gate", "run-1", "step-0000", "nothing", "q"):
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            client.get("/api/v1/search", params={"q": text}).raise_for_status()
            times.append(1e3 * (time.perf_counter() - begin))
        found[text] = f"{min(times):.0f}/{statistics.median(times):.0f} ms"
    return found


def _line(result: PageResult) -> str:
    return (
        f"{result.page:26} {result.cpu:4.0f} ms of CPU, first byte {result.first_byte:6.0f} ms, "
        f"first paint {result.paint:6.0f}, "
        f"longest task {result.longest_task:5.0f}, interaction {result.interaction:5.0f}, "
        f"{result.bytes / 1024:.0f} KiB"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.service.pages", description=__doc__)
    parser.add_argument("--database", default="sqlite", choices=("sqlite", "postgresql"))
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--rounds", type=int, default=5, help="visits of each page: %(default)s")
    parser.add_argument("--only", default="", help="pages whose names contain this")
    parser.add_argument("--tmp", type=Path, default=None, help="temporary folder, removed at the end")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    options.sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    return options


if __name__ == "__main__":
    sys.exit(main())
