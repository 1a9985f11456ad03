"""What the tests of the manager share: storage that fails or waits on purpose, and a look at the results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dcp
from dcp.manager.events import Event
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.errors import StorageError
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from dcp.storage.stores.posix.store import PosixStore

Writer = Callable[[str], dcp.FileSystemWriter]


class Recorder:
    """An ``on_event`` that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def kinds(self, *kinds: str) -> list[tuple[str, int | None]]:
        """Kind and step of the events, of all or of some kinds, in order."""
        return [(event.kind, event.step) for event in self.events if not kinds or event.kind in kinds]

    def steps(self, kind: str) -> list[int | None]:
        """The steps of the events of a kind."""
        return [event.step for event in self.events if event.kind == kind]

    def one(self, kind: str) -> Event:
        """The only event of a kind."""
        (event,) = [event for event in self.events if event.kind == kind]
        return event


def state_at(step: int, rank: int = 0) -> dict[str, Any]:
    """A state whose every value tells the step (and, where it is a rank's own, the rank)."""
    return {
        "model": {"weight": torch.full((64,), float(step)), "bias": torch.arange(4) + step},
        "step": step,
        "own": dcp.PerRank({"rank": rank, "step": step}),
    }


def loaded_step(checkpoint_id: str) -> int:
    """The step that all replicated values of a checkpoint of `state_at` tell."""
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(64), "bias": torch.zeros(4, dtype=torch.int64)},
        "step": -1,
    }
    dcp.load(state, checkpoint_id=checkpoint_id, no_dist=True)
    step = state["step"]
    assert isinstance(step, int)
    assert state["model"]["weight"].tolist() == [float(step)] * 64
    assert state["model"]["bias"].tolist() == [step, step + 1, step + 2, step + 3]
    return step


def writer_with(hook: Callable[[Operation], None], op: str = "publish", name: str = MANIFEST_NAME) -> Writer:
    """Writers that call ``hook`` before the operations of a kind; by default before each commit."""

    def open_store(path: Any) -> Store:
        return FaultInjectingStore(PosixStore(path), Fault(op, name=name, onwards=True, hook=hook))

    return lambda checkpoint_id: dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=open_store)


def plain_writer(checkpoint_id: str) -> dcp.FileSystemWriter:
    """A writer that does not wait for the disk."""
    return dcp.FileSystemWriter(checkpoint_id, sync_files=False)


class Failing:
    """A hook that fails the first ``times`` operations (all, if None)."""

    def __init__(self, times: int | None = None) -> None:
        self.times = times
        self.calls = 0

    def __call__(self, operation: Operation) -> None:
        """Fail, or count."""
        self.calls += 1
        if self.times is None or self.calls <= self.times:
            raise StorageError("injected: the storage is away", path=operation.name, op=operation.op)


class Gate:
    """A hook that waits until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, operation: Operation) -> None:
        """Wait here."""
        self.reached.set()
        assert self._open.wait(240.0), "nobody opened the gate"

    def open(self) -> None:
        """Let everybody through from now on."""
        self._open.set()


def data_files(folder: Path) -> list[Path]:
    """The data files of a checkpoint."""
    return sorted(folder.glob("*.distcp"))


MODES = ["thread", "sync"]


def manager_of(root: Path, **options: Any) -> dcp.CheckpointManager:
    """A manager with a fast writer."""
    options.setdefault("writer", plain_writer)
    return dcp.CheckpointManager(root, retry_pause_seconds=0.01, **options)
