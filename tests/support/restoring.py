"""What tests of resuming share: steps whose every byte tells which one it is, and damage to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dcp
from dcp.manager.restore import Restored, restore
from dcp.steps.folders import StepFolders
from dcp.storage.errors import CheckpointError
from tests.support.versions import save_version

__all__ = [
    "Counted",
    "Heard",
    "break_payload",
    "data_file",
    "flip",
    "folder_of",
    "resume",
    "save_steps",
    "truncate",
]


def resume(root: Path | str, state: dict[str, Any], **options: Any) -> Restored | None:
    """`restore` as the manager calls it, without pauses."""
    folders = StepFolders(root)
    settings: dict[str, Any] = {
        "list_steps": folders.newest_first,
        "checkpoint_id": folders.checkpoint_id,
        "retry_pause_seconds": 0.0,
    }
    return restore(state, **(settings | options))


def folder_of(root: Path | str, step: int) -> Path:
    """Where a step is."""
    return Path(StepFolders(root).checkpoint_id(step))


def save_steps(root: Path, *steps: int) -> None:
    """Checkpoints whose every byte tells their step."""
    for step in steps:
        save_version(folder_of(root, step), step)


def flip(path: Path, position: int) -> None:
    """Invert a byte."""
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 0xFF
    path.write_bytes(data)


def data_file(folder: Path) -> Path:
    """The one data file of a checkpoint."""
    (path,) = folder.glob("*.distcp")
    return path


def break_payload(folder: Path) -> None:
    """Flip a bit of the largest tensor."""
    index = dcp.open_index(folder)
    chunk = int(index.payload_lengths.argmax())
    flip(data_file(folder), int(index.payload_offsets[chunk]))


def truncate(path: Path) -> None:
    """Cut a file in the middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Heard:
    """An `on_damage` that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int, error: CheckpointError) -> None:
        """One more."""
        assert isinstance(error, CheckpointError)
        self.steps.append(step)


class Counted:
    """A `Stateful` that counts how often it is given a state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"w": torch.zeros(64), "n": 0}
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        """The state itself."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """One more time."""
        self.state = state
        self.given += 1
