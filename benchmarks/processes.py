"""Spawned ranks in one gloo group, which report progress and end with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.machine.process_tree import descendants

__all__ = ["BenchmarkError", "Progress", "run_ranks"]

Progress: TypeAlias = Callable[[str], None]

_TIMEOUT = timedelta(minutes=10)


_context = multiprocessing.get_context("forkserver")
# The server imports torch once and has no threads: forking from it saves each rank seconds of importing.
_context.set_forkserver_preload(
    [
        "benchmarks.rounds",
        "benchmarks.resharding",
        "benchmarks.machine.memory",
        "benchmarks.asynchronous.saving",
        "benchmarks.s3.store",
        "benchmarks.converting.conversion",
    ]
)


class BenchmarkError(Exception):
    """A rank failed; the message has its traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    progress: Progress,
    folder: Path,
    daemon: bool = True,
) -> list[Any]:
    """Run ``function(rank, world_size, progress, *args)`` on each rank and return the results by rank.

    One rank runs without a process group, which is the fastest setting for stock torch. The processes end
    when this function returns or raises, including KeyboardInterrupt. ``folder`` is the rendezvous. Ranks
    that start children by multiprocessing, such as stock's process writer, must not be daemons.
    """
    workers: dict[int, tuple[BaseProcess, Connection]] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=folder) as meeting:
        try:
            for rank in range(world_size):
                ours, theirs = _context.Pipe()
                arguments = (theirs, rank, world_size, meeting, function, args)
                process: BaseProcess = _context.Process(target=_serve, args=arguments, daemon=daemon)
                process.start()
                theirs.close()
                workers[rank] = (process, ours)
            return _collect(workers, progress)
        finally:
            for process, connection in workers.values():
                connection.close()
                _end(process, patience_seconds=5)


def _end(process: BaseProcess, *, patience_seconds: float) -> None:
    """End a rank and its descendants; a writer process would otherwise write to a removed folder."""
    if process.pid is None:
        return
    started = descendants(process.pid)
    process.join(patience_seconds)
    if process.is_alive():
        process.kill()
        process.join()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _collect(workers: dict[int, tuple[BaseProcess, Connection]], progress: Progress) -> list[Any]:
    results: dict[int, Any] = {}
    ranks = {connection: rank for rank, (_, connection) in workers.items()}
    while len(results) < len(workers):
        for connection in wait([c for c, rank in ranks.items() if rank not in results]):
            if not isinstance(connection, Connection):
                continue
            rank = ranks[connection]
            try:
                kind, value = connection.recv()
            except EOFError:
                process = workers[rank][0]
                process.join(5)
                raise BenchmarkError(f"rank {rank} died with exit code {process.exitcode}") from None
            if kind == "progress":
                progress(value)
            elif kind == "error":
                for process, _ in workers.values():
                    _end(process, patience_seconds=0)
                raise BenchmarkError(f"rank {rank} failed:\n{value}")
            else:
                results[rank] = value
    return [results[rank] for rank in range(len(workers))]


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    meeting: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Ctrl-C reaches the whole process group; only the parent handles it and ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)

    def progress(text: str) -> None:
        if rank == 0:
            connection.send(("progress", text))

    try:
        connection.send(("result", _in_group(rank, world_size, meeting, progress, function, args)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise


def _in_group(
    rank: int,
    world_size: int,
    meeting: str,
    progress: Progress,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    import torch
    import torch.distributed as dist

    if world_size == 1:
        return function(rank, world_size, progress, *args)
    torch.set_num_threads(1)  # the default of torchrun for several ranks
    store = dist.FileStore(str(Path(meeting) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        return function(rank, world_size, progress, *args)
    finally:
        dist.destroy_process_group()
