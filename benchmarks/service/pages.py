"""`python -m benchmarks.service.pages`: how long pages of a large catalog take, and what they do in Chromium.

A real `dcp serve` over a run of 5,000 steps, a checkpoint of 50,000 tensors, 300 checkpoints of 12 runs with
5,000 names each, and the index of one that 1,024 ranks wrote 5,000 tensors to. Of each page: when its first
byte came, the first paint, and how long the main thread was held up and interactions took.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil  # type: ignore[import-untyped]
from playwright.sync_api import Page, sync_playwright

from benchmarks.service.catalog import database_of, service_of
from dcp.server.catalog.checkpoints import upsert_checkpoints
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex, starts
from dcp.storage.formats.native.manifest import encode_manifest

__all__ = ["main"]

_START: Final = 1_700_000_000.0
_PARTS: Final = ("q", "k", "v", "o", "gate", "up", "down", "norm", "bias", "scale")
_ROWS: Final = (16, 4, 4, 16, 24, 24, 24, 1, 1, 1)
"""Of a rank's box of such a tensor; it has 256 columns."""
_COLUMNS: Final = 256
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
    """Of one page, in milliseconds, as the middle of several visits.

    ``first_byte`` and ``paint`` are since the navigation began; ``longest_task`` is of the main thread, and
    ``interaction`` the longest that one of the interactions took until its paint. ``cpu`` is the service's,
    of the page and what it loads: it says more than times do where the machine is shared.
    """

    page: str
    cpu: float
    first_byte: float
    paint: float
    longest_task: float
    interaction: float
    bytes: int


def names_of(count: int, variant: int = 0) -> list[str]:
    """So many names of tensors, ten a layer; of another variant others."""
    end = f"_{variant}" if variant else ""
    return [f"model.layers.{number // 10}.{_PARTS[number % 10]}.weight{end}" for number in range(count)]


def _structure(count: int, variant: int = 0) -> StructureFacts:
    return StructureFacts.of(
        StructureTensor(name, "tensor", "bfloat16", (64, 64), 8192) for name in names_of(count, variant)
    )


def fill(database: Database) -> None:
    """All but the sharded one, which is scanned."""
    database.transact(lambda connection: sync_roots(connection, {"main": "./main", "archive": "./archive"}))
    small = _structure(260)
    _put(database, (_facts("long/run", step, small) for step in range(1, 5001)))
    _put(database, [_facts("wide/run", 1, _structure(50_000))])
    for run in range(12):
        shared = _structure(5_000, run + 1)
        _put(database, (_facts(f"team/run-{run}", 1000 * step, shared) for step in range(1, 26)))


def _facts(run: str, step: int, structure: StructureFacts) -> CheckpointFacts:
    return CheckpointFacts(
        root="archive",
        key=f"{run}/step-{step:08}",
        format="dcp",
        observed_seconds=_START,
        committed_seconds=_START + step,
        step=step,
        save_id=f"{run}-{step}",
        fingerprint=f"{run}-{step}"[:64],
        bytes=10**9 + step,
        structure=structure,
        metrics={"loss": 8.0 / step},
        world_size=8,
    )


def _put(database: Database, facts: Any) -> None:
    rows = list(facts)
    for begin in range(0, len(rows), 500):
        some = rows[begin : begin + 500]
        database.transact(lambda connection, some=some: upsert_checkpoints(connection, some))  # type: ignore[misc]


def write_sharded(folder: Path, ranks: int, tensors: int) -> None:
    """A checkpoint with the index of one that ``ranks`` wrote, each its share of all tensors; no bytes."""
    folder.mkdir(parents=True)
    codes = np.array(
        [dtypes.BY_NAME["float32" if n % 10 > 6 else "bfloat16"].code for n in range(tensors)], np.uint8
    )
    rows = np.resize(_ROWS, tensors).astype(np.int64)
    lengths = rows * _COLUMNS * np.where(np.arange(tensors) % 10 > 6, 4, 2)
    records = lengths + 256
    offsets = np.cumsum(records) - records
    tensor, rank = np.repeat(np.arange(tensors), ranks), np.tile(np.arange(ranks), tensors)
    sizes = np.stack([rows[tensor], np.full(len(tensor), _COLUMNS)], 1)
    index = CheckpointIndex(
        "dcp",
        fqns=names_of(tensors),
        dtype_codes=codes,
        shape_start=starts([2] * tensors),
        shape_values=np.stack([rows * ranks, np.full(tensors, _COLUMNS)], 1).reshape(-1),
        requires_grad=np.zeros(tensors, np.uint8),
        chunk_start=np.arange(tensors + 1) * ranks,
        chunk_offsets=np.stack([rank * rows[tensor], np.zeros_like(rank)], 1).reshape(-1),
        chunk_sizes=sizes.reshape(-1),
        chunk_files=rank,
        record_offsets=offsets[tensor],
        record_lengths=records[tensor],
        payload_offsets=offsets[tensor] + 192,
        payload_lengths=lengths[tensor],
        crc_start=np.arange(len(tensor) + 1),
        crcs=np.random.default_rng(1).integers(0, 1 << 32, len(tensor), dtype=np.uint32),
        files=[f"__{number}_0.0badc0de.distcp" for number in range(ranks)],
        file_sizes=np.full(ranks, records.sum()),
        planner_data={name: tuple(name.split(".")) for name in names_of(tensors)},
        provenance={
            "world_size": ranks,
            "rank_seconds": [{"plan": 0.1, "write": 2.0 + 3 * (number == 7)} for number in range(ranks)],
        },
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(index))
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        with (folder / name).open("wb") as file:
            file.truncate(size)


# -- what is done on each page -------------------------------------------------------------------------------


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
    "1,024 x 5,000 chunks": ("/checkpoints/{sharded}/shards/chunks", _press),
    "save of 1,024 ranks": ("/checkpoints/{sharded}/anatomy", _press),
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
        with service_of(url, Path(name)) as (client, process, _):
            numbers = _numbers(client)
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
    write_sharded(folder / "main/huge/step-00000001", options.ranks, options.tensors)
    with database_of(options.database, folder) as url:
        database = Database(url)
        upgrade(database)
        fill(database)
        database.close()
        yield url


def _numbers(client: Any) -> dict[str, int]:
    """Those of the run and the checkpoints that are looked at; the sharded one is registered."""
    body = {"root": "main", "key": "huge/step-00000001"}
    sharded = client.post("/api/v1/checkpoints", json=body, timeout=600).raise_for_status().json()["id"]
    lookup = "/api/v1/checkpoints/lookup"
    wide = (
        client.get(lookup, params={"root": "archive", "key": "wide/run/step-00000001"})
        .raise_for_status()
        .json()
    )
    long = (
        client.get(lookup, params={"root": "archive", "key": "long/run/step-00000001"})
        .raise_for_status()
        .json()
    )
    return {"sharded": sharded, "wide": wide["id"], "long": long["run_id"]}


def _searched(client: Any) -> dict[str, str]:
    """Milliseconds of searches, the best and the middle of several."""
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
        f"{result.page:22} {result.cpu:4.0f} ms of CPU, first byte {result.first_byte:6.0f} ms, "
        f"first paint {result.paint:6.0f}, "
        f"longest task {result.longest_task:5.0f}, interaction {result.interaction:5.0f}, "
        f"{result.bytes / 1024:.0f} KiB"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.service.pages", description=__doc__)
    parser.add_argument("--database", default="sqlite", choices=("sqlite", "postgresql"))
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5, help="visits of each page: %(default)s")
    parser.add_argument("--only", default="", help="pages with this in their names")
    parser.add_argument("--tmp", type=Path, default=None, help="where all of it goes, and is removed")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
