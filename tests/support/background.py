"""Asynchronous saves: storage that waits in any process, and the writer processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dcp
from dcp.storage.stores import PosixStore, Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall

__all__ = ["FileGate", "NotedPids", "gated_writer", "slow_writer"]

_PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class FileGate:
    """A fault hook that waits until any process calls `open`; picklable."""

    path: Path

    def __call__(self, _: StoreCall) -> None:
        """Record the arrival, and wait."""
        self._reached.touch()
        _wait_for(self.path)

    @property
    def _reached(self) -> Path:
        return self.path.with_name(f"{self.path.name}.reached")

    def wait_until_reached(self) -> None:
        """Wait until a store reaches the gate."""
        _wait_for(self._reached)

    def open(self) -> None:
        """Let all operations through from now on."""
        self.path.touch()


def _faulty(path: str | os.PathLike[str], fault: Fault) -> Store:
    return FaultInjectingStore(PosixStore(path), fault)


def gated_writer(folder: Path, gate: FileGate, op: str = "create") -> dcp.FileSystemWriter:
    """Return a writer to a local folder whose operations ``op`` wait for the gate."""
    fault = Fault(op, onwards=True, hook=gate)
    return dcp.FileSystemWriter(folder, sync_files=False, open_store=partial(_faulty, fault=fault))


def slow_writer(folder: Path, seconds: float) -> dcp.FileSystemWriter:
    """Return a writer to a local folder whose writes take ``seconds`` each."""
    fault = Fault("write", onwards=True, delay_seconds=seconds)
    return dcp.FileSystemWriter(folder, sync_files=False, open_store=partial(_faulty, fault=fault))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within {_PATIENCE_SECONDS:g} s"
        time.sleep(0.002)


@dataclass(frozen=True)
class NotedPids:
    """Opens local folders and records the opening processes in a folder; picklable."""

    place: Path

    def __call__(self, path: str | os.PathLike[str]) -> Store:
        """Open the folder at ``path``."""
        self.place.mkdir(parents=True, exist_ok=True)
        (self.place / str(os.getpid())).touch()
        return PosixStore(path)

    def writer(self, checkpoint_id: str | os.PathLike[str]) -> dcp.FileSystemWriter:
        """Return a writer to a folder opened by this object."""
        return dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=self)

    def others(self) -> list[int]:
        """Return the process ids of writer processes: all but this process."""
        return sorted({int(path.name) for path in self.place.iterdir()} - {os.getpid()})
