"""Trying again after an error that may pass. Errors are of all ranks alike, so that all of them do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from dcp.storage.errors import CheckpointError

__all__ = ["retried"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


def retried(
    attempt: Callable[[int], T],
    what: str,
    *,
    retries: int,
    pause_seconds: float,
    is_passing: Callable[[CheckpointError], bool],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what ``attempt`` gives, which is called with its number, from 1 on; ``what`` names it in the
    log.

    ``retries`` further ones follow on errors that are passing, each after a ``wait`` of ``pause_seconds``,
    doubled each time. Raises the last one's error.
    """
    number = 1
    while True:
        try:
            return attempt(number)
        except CheckpointError as error:
            if number > retries or not is_passing(error):
                raise
            logger.warning("%s failed and is tried again in %g s: %s", what, pause_seconds, error)
        wait(pause_seconds)
        number, pause_seconds = number + 1, pause_seconds * 2
