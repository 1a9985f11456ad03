"""Runs with a manager: states that contain their step, recorded events, and storage that fails or waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import dcp
from dcp.errors import StorageError
from dcp.manager.events import Event
from dcp.storage.stores import Capabilities, FileInfo, PosixStore, Store, StoreType, register_store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall

__all__ = [
    "MODES",
    "PATIENCE_SECONDS",
    "Event",
    "Failing",
    "Fault",
    "FaultyWriter",
    "Gate",
    "Recorder",
    "StoreCall",
    "WatchedRoot",
    "contents",
    "damage",
    "data_files",
    "flip",
    "loaded_step",
    "manager_of",
    "plain_writer",
    "state_at",
    "steps_on_disk",
    "truncate",
    "until",
    "writer_with",
]

PATIENCE_SECONDS: Final = 240.0
MANIFEST: Final = "manifest.msgpack"
MODES: Final = ["thread", "sync"]

Writer = Callable[[str], dcp.FileSystemWriter]


def manager_of(root: Path | str, **options: Any) -> dcp.CheckpointManager:
    """Return a manager with a fast writer and short pauses between attempts of a save."""
    settings: dict[str, Any] = {"writer": plain_writer, "retry_pause_seconds": 0.01}
    settings["timeout_seconds"] = PATIENCE_SECONDS
    return dcp.CheckpointManager(root, **(settings | options))


def until(condition: Callable[[], object], description: str = "the awaited condition") -> None:
    """Wait until ``condition`` returns a true value; AssertionError after some minutes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not happen"
        time.sleep(0.005)


# -- states --------------------------------------------------------------------------------------------------


def state_at(step: int, rank: int = 0) -> dict[str, Any]:
    """Return a state whose values all contain the step (values of a single rank also the rank)."""
    return {
        "model": {"weight": torch.full((64,), float(step)), "bias": torch.arange(4) + step},
        "step": step,
        "own": dcp.PerRank({"rank": rank, "step": step}),
    }


def loaded_step(checkpoint_id: str | Path) -> int:
    """Return the step in all replicated values of a checkpoint of `state_at`."""
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(64), "bias": torch.zeros(4, dtype=torch.int64)},
        "step": -1,
    }
    dcp.load(state, checkpoint_id=checkpoint_id, no_dist=True)
    step = int(state["step"])
    assert state["model"]["weight"].tolist() == [float(step)] * 64
    assert state["model"]["bias"].tolist() == [step, step + 1, step + 2, step + 3]
    return step


class Recorder:
    """An ``on_event`` that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)

    def kinds(self, *kinds: str) -> list[tuple[str, int | None]]:
        """Return kind and step of the events, of all or of some kinds, in order."""
        return [(event.kind, event.step) for event in self.events if not kinds or event.kind in kinds]

    def steps(self, kind: str) -> list[int | None]:
        """Return the steps of the events of a kind."""
        return [event.step for event in self.events if event.kind == kind]

    def one(self, kind: str) -> Event:
        """Return the only event of a kind."""
        (event,) = [event for event in self.events if event.kind == kind]
        return event


# -- files on disk -------------------------------------------------------------------------------------------


def steps_on_disk(root: Path) -> list[int]:
    """Return the steps that have a folder."""
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def data_files(folder: Path) -> list[Path]:
    """Return the data files of a checkpoint."""
    return sorted(folder.glob("*.distcp"))


def contents(root: Path) -> dict[int, list[str]]:
    """Return the files of each step's folder without notes; data files as "data"."""
    return {
        int(folder.name.removeprefix("step-")): sorted(
            {"data" if path.suffix == ".distcp" else path.name for path in folder.iterdir()}
            - {"notes.msgpack"}
        )
        for folder in sorted(root.glob("step-*"))
    }


def flip(path: Path, position: int | None = None) -> None:
    """Invert a byte of a file, by default in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position % len(data)] ^= 0xFF
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Cut a file in the middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage(folder: Path) -> Path:
    """Invert a byte of the largest tensor in the file of rank 0; return the file."""
    index = dcp.open_index(folder)
    (path,) = folder.glob("__0_0.*distcp")
    own = index.chunk_files == index.files.index(path.name)
    chunk = int((index.payload_lengths * own).argmax())
    flip(path, int(index.payload_offsets[chunk]))
    return path


# -- storage that fails or waits -----------------------------------------------------------------------------


def plain_writer(checkpoint_id: str) -> dcp.FileSystemWriter:
    """Return a writer that does not wait for the disk."""
    return dcp.FileSystemWriter(checkpoint_id, sync_files=False)


@dataclass(frozen=True)
class FaultyWriter:
    """Makes writers to local folders whose operations have ``faults``; picklable."""

    faults: Sequence[Fault]

    def __call__(self, checkpoint_id: str | Path) -> dcp.FileSystemWriter:
        """Return the writer of a checkpoint."""
        return dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=self.open_store)

    def open_store(self, path: str | os.PathLike[str]) -> Store:
        """Open a folder with the faults."""
        return FaultInjectingStore(PosixStore(path), *self.faults)


def writer_with(hook: Callable[[StoreCall], None], op: str = "publish", name: str = MANIFEST) -> Writer:
    """Return a maker of writers that call ``hook`` before operations of a kind; by default before commits."""
    return FaultyWriter([Fault(op, name=name, onwards=True, hook=hook)])


class Failing:
    """A hook that fails the first ``times`` operations (all, if None)."""

    def __init__(self, times: int | None = None) -> None:
        self.times = times
        self.calls = 0

    def __call__(self, operation: StoreCall) -> None:
        """Fail, or count."""
        self.calls += 1
        if self.times is None or self.calls <= self.times:
            raise StorageError("injected: the storage is away", path=operation.name, op=operation.op)


class Gate:
    """A hook that waits until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, _: object = None) -> None:
        """Wait until the gate opens."""
        self.reached.set()
        assert self._open.wait(PATIENCE_SECONDS), "the gate was never opened"

    def wait_until_reached(self) -> None:
        """Wait until a caller has reached the gate."""
        assert self.reached.wait(PATIENCE_SECONDS), "the gate was never reached"

    def open(self) -> None:
        """Let all callers through from now on."""
        self._open.set()


class _WatchedStore(FaultInjectingStore):
    """A local folder under a URL of its own scheme, so that every opening of the URL gets its faults."""

    capabilities = Capabilities(lists_folders=True)

    def __init__(self, path: str) -> None:
        super().__init__(PosixStore(path))
        self.url = f"watched://{path}"

    def folders(self) -> Sequence[str]:
        return self.inner.folders()

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        return self.inner.tree()


_watched: Final[dict[str, _WatchedStore]] = {}


def _open_watched(url: str, _: Mapping[str, Any] | None) -> Store:
    path = url.removeprefix("watched://").rstrip("/")
    return _watched.setdefault(path, _WatchedStore(path))


register_store(StoreType(schemes=("watched",), open=_open_watched))


class WatchedRoot:
    """A root below a folder, as ``url``, with a fault-injecting store for each step in every operation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"watched://{folder}"

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"step-{step:08d}"

    def store(self, step: int) -> FaultInjectingStore:
        """Return the store of a step."""
        store = _open_watched(f"{self.url}/{self.path(step).name}", None)
        assert isinstance(store, FaultInjectingStore)
        return store
