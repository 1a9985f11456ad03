"""Processes that kill themselves in the middle of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["die_in_commit"]


def die_in_commit(number: int) -> None:
    """From now on: kill this process where it is about to publish its so many-th manifest."""
    left = [number]
    commit = PosixStore._commit

    def counted(self: Any, temporary: Path, name: str, expected: Any) -> None:
        left[0] -= name == MANIFEST_NAME
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, temporary, name, expected)

    PosixStore._commit = counted  # type: ignore[method-assign]
