"""Processes that kill themselves during a save."""

from __future__ import annotations

import os
import signal
from typing import Any

from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.stores import PosixStore, Version

__all__ = ["die_in_commit"]


def die_in_commit(number: int) -> None:
    """Make this process kill itself immediately before the publication of manifest ``number``."""
    left = [number]
    publish = PosixStore.publish

    def counted(self: PosixStore, name: str, data: bytes, **options: Any) -> Version:
        left[0] -= name == MANIFEST_NAME
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self, name, data, **options)

    PosixStore.publish = counted  # type: ignore[method-assign]
