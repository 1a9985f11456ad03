"""Ranks as processes that run each function in a new gloo group and always end.

After one rank raises, dies or hangs, the others have a few seconds to end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Final

from dcp.storage.errors import OptionError

_GRACE_SECONDS: Final = 20.0
"""Time for other ranks to end after a failure."""

_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankFailure:
    """The reason for a missing result of a rank: an exception, or the end of the process."""

    rank: int
    message: str


class RankProcesses:
    """Processes for the largest world, reused by each `run`. Use as a context manager, which ends them."""

    def __init__(self, context: BaseContext | None = None) -> None:
        self._context: Any = context or multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout_seconds: float
    ) -> list[Any | RankFailure]:
        """Run ``function(rank, world, *args)`` on each rank; return results or failures by rank.

        Raises OptionError for arguments that cannot be pickled.
        """
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory(prefix="dcp-ranks-") as folder:
            for rank in range(world):
                job = (function, args, rank, world, str(Path(folder) / "store"), timeout_seconds)
                try:
                    self._workers[rank][1].send(job)
                except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
                    self.close()
                    raise OptionError(
                        f"the function must be importable by name from a module, not a local one: {error}"
                    ) from error
            return self._results(world, timeout_seconds)

    def _results(self, world: int, timeout_seconds: float) -> list[Any | RankFailure]:
        found: dict[int, Any] = {}
        missing = f"did not end within {timeout_seconds:g} s"
        deadline = time.monotonic() + timeout_seconds
        while len(found) < world:
            waiting: dict[Any, int] = {}
            for rank in set(range(world)) - found.keys():
                process, connection = self._workers[rank]
                # a child process may keep the pipe open
                waiting |= {connection: rank, process.sentinel: rank}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {waiting[one] for one in ready}:
                found[rank] = self._received(rank)
                if isinstance(found[rank], RankFailure):
                    missing = "was killed, because it waited for a failed rank"
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if len(found) < world or not all(process.is_alive() for process, _ in self._workers):
            self.close()
        return [found.get(rank, RankFailure(rank, missing)) for rank in range(world)]

    def _received(self, rank: int) -> Any:
        process, connection = self._workers[rank]
        with contextlib.suppress(EOFError, ConnectionResetError):
            if connection.poll():
                return connection.recv()
        process.join(_GRACE_SECONDS)
        return RankFailure(rank, f"its process ended with exit code {process.exitcode}")

    def close(self) -> None:
        """End all processes."""
        workers, self._workers = self._workers, []
        for _, connection in workers:
            connection.close()
        for process, _ in workers:
            process.join(0.5)
            if process.is_alive():
                process.kill()
            process.join(_GRACE_SECONDS)


def _serve(connection: Connection) -> None:
    """Serve as a rank's process, until the other end is closed."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(_carried_out(*connection.recv()))


def _end_with_parent() -> None:
    """End this process together with its parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _carried_out(
    function: Callable[..., Any], args: Any, rank: int, world: int, store: str, timeout_seconds: float
) -> Any:
    import torch.distributed as dist

    os.environ.update(zip(_VARIABLES, map(str, (rank, rank, world, world)), strict=True))
    try:
        shared, timeout = dist.FileStore(store, world), timedelta(seconds=timeout_seconds)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=timeout)
        shared.set(f"here/{rank}", "1")  # an early exit would keep other ranks from joining
        shared.wait([f"here/{other}" for other in range(world)], timeout)
        return function(rank, world, *args)
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        return RankFailure(rank, f"{type(error).__name__}: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
