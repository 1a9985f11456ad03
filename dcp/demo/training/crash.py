"""Ways for a job to go down while it saves, all of it at once, as with a machine's power."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dcp.demo.training.rank_notes import KILL_VARIABLE
from dcp.storage.stores import OpenStore, Store, open_store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["CrashPoint"]

_WRITES = frozenset({"write", "pwrite"})
_MEETING_SECONDS = 30.0


class CrashPoint:
    """When to die, and who started this process and is to die too. Made early in a rank's life."""

    def __init__(self, setting: str) -> None:
        step, when = setting.split(":")
        self._step = int(step)
        self._nth_write = 0 if when == "staged" else int(when)
        self._launcher = os.getppid()

    @classmethod
    def from_environment(cls) -> CrashPoint | None:
        """What `KILL_VARIABLE` says; None unless it is set, for a rank of a job."""
        setting = os.environ.get(KILL_VARIABLE)
        if setting and "RANK" in os.environ:
            return cls(setting)
        return None

    def is_in_save_of(self, step: int) -> bool:
        """Whether the job is to die while the checkpoint of ``step`` is being written."""
        return step == self._step and self._nth_write > 0

    def is_after_staging_of(self, step: int) -> bool:
        """Whether the job is to die when the copy of ``step`` has been handed over."""
        return step == self._step and self._nth_write == 0

    def open_store(self, folder: Path, rank: int, world_size: int) -> OpenStore:
        """What opens the stores of a `dcp.FileSystemWriter` that is to be killed.

        The ranks meet in ``folder`` before they die: one that died alone would keep the others from coming
        as far.
        """

        def come_to_the_end() -> None:
            (folder / f"about-to-die-{rank}").touch()
            _await(lambda: len(list(folder.glob("about-to-die-*"))) == world_size)
            self.die()

        def open_dying(checkpoint_id: str | os.PathLike[str]) -> Store:
            store = open_store(checkpoint_id)
            if isinstance(store, PosixStore):
                return PosixStore(checkpoint_id, _after_writes(self._nth_write, come_to_the_end))
            return FaultInjectingStore(store, _after_parts(store, self._nth_write, come_to_the_end))

        return open_dying

    def die(self) -> None:
        """Kill the launcher and this process."""
        # The launcher first: it would notice a dead rank, and end the others with SIGTERM. The other rank may
        # have killed it already; then this process has another parent, which must live.
        if os.getppid() == self._launcher:
            os.kill(self._launcher, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _after_writes(nth: int, end: Callable[[], None]) -> Callable[[str, str], None]:
    """A hook for `PosixStore`, which calls it before each of its system calls that change storage."""
    writes = itertools.count(1)

    def observe(step: str, name: str) -> None:
        if step in _WRITES and name.endswith(".distcp") and next(writes) == nth:
            end()

    return observe


def _after_parts(store: Store, nth: int, end: Callable[[], None]) -> Fault:
    """On an object store: the parts of a data file before its ``nth`` are with the service, and no other."""
    given: Counter[str] = Counter()

    def observe(operation: Operation) -> None:
        if given[operation.name] >= (nth - 1) * ObjectOptions().part_bytes:
            _await(lambda: store.traffic().get("put_part", 0) >= nth - 1)
            end()
        given[operation.name] += operation.size_bytes

    return Fault("write", name="*.distcp", onwards=True, hook=observe)


def _await(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _MEETING_SECONDS
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.01)
