"""Storage that waits until it may go on, in whatever process it works."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["FileGate", "open_gated"]

_PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class FileGate:
    """A hook of a fault that waits until `open` was called, by any process; it pickles."""

    path: Path

    def __call__(self, operation: Operation) -> None:
        """Say that somebody is here, and wait."""
        self._reached.touch()
        _wait_for(self.path)

    @property
    def _reached(self) -> Path:
        return self.path.with_name(f"{self.path.name}.reached")

    def wait_until_reached(self) -> None:
        """Until somebody waits here."""
        _wait_for(self._reached)

    def open(self) -> None:
        """Let everybody through from now on."""
        self.path.touch()


def open_gated(path: str | os.PathLike[str], gate: FileGate, op: str = "write") -> FaultInjectingStore:
    """A local folder each of whose operations ``op`` waits for the gate."""
    return FaultInjectingStore(PosixStore(path), Fault(op, onwards=True, hook=gate))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} did not appear within {_PATIENCE_SECONDS:g} s")
        time.sleep(0.002)
