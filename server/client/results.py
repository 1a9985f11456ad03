"""What both clients make of several answers, or of bytes. Pure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dcp.server.client.errors import AnswerError, JobCancelledError, JobFailedError, WaitTimeoutError
from dcp.server.records.contents import Diff, Statistics
from dcp.server.records.jobs import Job

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["array_of", "ended", "joined_diff", "joined_statistics", "late", "next_pause"]

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0


def array_of(data: bytes) -> npt.NDArray[np.generic]:
    """The array of an .npy file; nothing in it is unpickled. Raises AnswerError."""
    import numpy as np

    try:
        found: npt.NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise AnswerError(f"the service answered with no array: {error}") from error
    return found


def joined_diff(parts: Sequence[Diff]) -> Diff:
    """All pages as one."""
    return replace(parts[0], tensors=tuple(tensor for part in parts for tensor in part.tensors))


def joined_statistics(parts: Sequence[Statistics]) -> Statistics:
    """All pages as one."""
    return replace(parts[0], tensors=tuple(tensor for part in parts for tensor in part.tensors))


def ended(job: Job) -> Job:
    """A job that has ended, if it has succeeded. Raises JobFailedError and JobCancelledError."""
    if job.state == "failed":
        why = job.error.detail if job.error is not None else "nobody knows why"
        raise JobFailedError(f"job {job.id} ({job.kind}) failed: {why}", job)
    if job.state == "cancelled":
        raise JobCancelledError(f"job {job.id} ({job.kind}) was cancelled", job)
    return job


def late(job: Job, seconds: float) -> WaitTimeoutError:
    """It has not ended in time."""
    return WaitTimeoutError(f"job {job.id} ({job.kind}) is {job.state} after {seconds:g} s, and goes on", job)


def next_pause(pause_seconds: float) -> float:
    """How long to wait before looking again."""
    return min(_LONGEST_PAUSE_SECONDS, max(_FIRST_PAUSE_SECONDS, pause_seconds * 1.5))
