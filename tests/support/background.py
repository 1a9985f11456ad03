"""Saves behind the loop: storage that waits in whatever process it works, and the writer processes."""

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
    """A hook of a fault that waits until `open` was called, by any process; it pickles."""

    path: Path

    def __call__(self, _: StoreCall) -> None:
        """Say that it was reached, and wait."""
        self._reached.touch()
        _wait_for(self.path)

    @property
    def _reached(self) -> Path:
        return self.path.with_name(f"{self.path.name}.reached")

    def wait_until_reached(self) -> None:
        """Until a store waits here."""
        _wait_for(self._reached)

    def open(self) -> None:
        """Let all through from now on."""
        self.path.touch()


def _faulty(path: str | os.PathLike[str], fault: Fault) -> Store:
    return FaultInjectingStore(PosixStore(path), fault)


def gated_writer(folder: Path, gate: FileGate, op: str = "create") -> dcp.FileSystemWriter:
    """A writer to a local folder each of whose operations ``op`` waits for the gate."""
    fault = Fault(op, onwards=True, hook=gate)
    return dcp.FileSystemWriter(folder, sync_files=False, open_store=partial(_faulty, fault=fault))


def slow_writer(folder: Path, seconds: float) -> dcp.FileSystemWriter:
    """A writer to a local folder each of whose writes of bytes takes that long."""
    fault = Fault("write", onwards=True, delay_seconds=seconds)
    return dcp.FileSystemWriter(folder, sync_files=False, open_store=partial(_faulty, fault=fault))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within {_PATIENCE_SECONDS:g} s"
        time.sleep(0.002)


@dataclass(frozen=True)
class NotedPids:
    """Opens local folders, and notes in a folder of its own in which processes it does so; it pickles."""

    place: Path

    def __call__(self, path: str | os.PathLike[str]) -> Store:
        """The folder at ``path``."""
        self.place.mkdir(parents=True, exist_ok=True)
        (self.place / str(os.getpid())).touch()
        return PosixStore(path)

    def writer(self, checkpoint_id: str | os.PathLike[str]) -> dcp.FileSystemWriter:
        """A writer to such a folder."""
        return dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=self)

    def others(self) -> list[int]:
        """The processes other than this one: writer processes."""
        return sorted({int(path.name) for path in self.place.iterdir()} - {os.getpid()})
