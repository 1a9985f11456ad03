"""Real ranks for tests: processes that stay alive between tests and join a new gloo group for each job.

Importing torch costs seconds in each process; with a pool that is kept for the session, a test with four
ranks costs milliseconds. A rank that dies or hangs ends the pool, and the next job starts a new one.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from tests.support.forking import forkserver_context

__all__ = ["RankDied", "RankRaised", "Ranks", "run_ranks", "wait_for_all_ranks"]

_MOST_THREADS: Final = 32
"""Limit of threads in a process of the pool.

A group referenced by garbage has three threads, one of which polls a hundred times a second: 160 of them take
a seventh of a core. Collecting garbage is no solution: gloo may wait forever while it ends a group of DDP.
"""


@dataclass(frozen=True)
class RankRaised:
    """The result of `run_ranks` for a rank that raised, if the caller asked for exceptions."""

    type_name: str
    message: str
    class_names: tuple[str, ...]
    facts: dict[str, Any]
    traceback_text: str
    seconds: float


@dataclass(frozen=True)
class RankDied:
    """The result of a rank whose process ended (killed, or os._exit)."""

    exit_code: int | None


def wait_for_all_ranks(store: Any, rank: int, world_size: int) -> None:
    """Wait until all ranks have connected: a rank that ends earlier would prevent others from connecting."""
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(world_size)], timedelta(seconds=240))


def _serve(connection: Connection, number: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        function, args, rank, world_size, path, timeout_seconds = job
        begun = time.monotonic()
        try:
            if rank >= 0:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
                os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
                store = dist.FileStore(path, world_size)
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_seconds),
                )
                wait_for_all_ranks(store, rank, world_size)
            connection.send(function(rank, world_size, *args))
        except BaseException as error:  # noqa: BLE001 - reported to the test
            facts = {
                k: v for k, v in getattr(error, "facts", {}).items() if isinstance(v, (int, str, bool, list))
            }
            connection.send(
                RankRaised(
                    type(error).__name__,
                    str(error),
                    tuple(cls.__name__ for cls in type(error).__mro__),
                    facts,
                    traceback.format_exc(),
                    time.monotonic() - begun,
                )
            )
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _is_worn(pid: int) -> bool:
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > _MOST_THREADS
    except FileNotFoundError:  # the process has just ended
        return True


class Ranks:
    """A pool of rank processes."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], *, timeout_seconds: float
    ) -> list[Any]:
        """Run a function on ``world_size`` ranks and return the results by rank, with RankDied and RankRaised
        for failed ranks. AssertionError on a hang."""
        if any(not process.is_alive() or _is_worn(process.pid) for process, _ in self._workers):
            self.close()  # a process has ended between two jobs, or has had many groups
        self._grow(world_size)
        with tempfile.TemporaryDirectory(prefix="dcp-ranks-") as folder:
            path = os.path.join(folder, "store")  # noqa: PTH118 - FileStore requires a str
            for rank, (_, connection) in enumerate(self._workers[:world_size]):
                connection.send((function, args, rank, world_size, path, timeout_seconds))
            return self._collect(world_size, timeout_seconds)

    def _collect(self, world_size: int, timeout_seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(results) < world_size:
            waiting = {self._workers[r][1]: r for r in range(world_size) if r not in results}
            sentinels = {self._workers[r][0].sentinel: r for r in waiting.values()}
            ready = wait([*waiting, *sentinels], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                late = sorted(waiting.values())
                raise AssertionError(
                    f"ranks {late} did not end within {timeout_seconds} s; the others did with {results}"
                )
            for item in ready:
                rank = waiting[item] if isinstance(item, Connection) else sentinels[item]
                if rank in results:
                    continue
                process, connection = self._workers[rank]
                if connection.poll():
                    try:
                        results[rank] = connection.recv()
                        continue
                    except EOFError:
                        pass
                process.join(60)
                results[rank] = RankDied(process.exitcode)
        ordered = [results[rank] for rank in range(world_size)]
        if any(isinstance(result, RankDied) for result in ordered):
            self.close()
        return ordered

    def _grow(self, world_size: int) -> None:
        while len(self._workers) < world_size:
            context = forkserver_context()
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, len(self._workers)), daemon=True)
            process.start()
            child_end.close()
            self._workers.append((process, parent_end))

    def close(self) -> None:
        """End all processes of the pool."""
        workers, self._workers = self._workers, []
        for _, connection in workers:
            connection.close()
        for process, _ in workers:
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join(5)


_pool = Ranks()


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 240.0,
    failures: bool = False,
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on ``world_size`` processes in one gloo group; return the
    results by rank.

    ``function`` is a module-level function of a test module. Unless ``failures`` is set, a rank that raised
    or died fails the test with its traceback.
    """
    results = _pool.run(world_size, function, args, timeout_seconds=timeout_seconds)
    if not failures:
        for rank, result in enumerate(results):
            if isinstance(result, RankRaised):
                raise AssertionError(f"rank {rank} raised:\n{result.traceback_text}")
            if isinstance(result, RankDied):
                raise AssertionError(f"rank {rank} died with exit code {result.exit_code}")
    return results
