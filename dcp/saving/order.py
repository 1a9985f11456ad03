"""One save as data, and the one piece of logic that carries it out.

The training loop runs it itself, the thread writer in the background, the process writer in a process of its
own.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial

from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.save.plan_cache import PlanCache
from dcp.ranks.collectives import Ranks
from dcp.ranks.retrying import retried
from dcp.saving.engine import GivesPart, SaveOrder
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    StorageError,
    StorageFullError,
)

__all__ = ["SaveOutcome", "agreeing_seconds", "carry_out", "is_passing"]

_LONGEST_AGREEING_SECONDS = 20.0


@dataclass(frozen=True)
class SaveOutcome:
    """What a save did on this rank: ``seconds`` by phase, ``attempts`` (1 if it worked at once) and
    ``staged_bytes`` of this rank's tensors."""

    save_id: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    staged_bytes: int = 0


def carry_out(
    order: SaveOrder, part: GivesPart, ranks: Ranks, *, cache: PlanCache | None = None
) -> tuple[Metadata, SaveOutcome]:
    """Save what ``part`` gives: what this rank has, or a staged copy of it.

    It is asked within the first step, so that a failed staging of one rank fails the save on all. ``cache``
    keeps the plan for the saves to come; all ranks have one, or none. Attempts end alike on all ranks, since
    all see the same error. The abort of ``ranks`` calls the save off.
    """
    options = order.options
    return retried(
        partial(_attempt, order, part, ranks, cache),
        f"the save to {getattr(order.engine.writer, 'checkpoint_id', None)}",
        retries=options.retries,
        pause_seconds=options.retry_pause_seconds,
        is_passing=is_passing,
        wait=(ranks.abort or threading.Event()).wait,
    )


def is_passing(error: CheckpointError) -> bool:
    """Return whether another attempt may succeed: not on a full disk, which stays full until somebody frees
    space.

    The class of the error is the same on all ranks."""
    if error.committed or isinstance(error, CheckpointConflictError | StorageFullError):
        return False
    return isinstance(error, StorageError)


def agreeing_seconds(timeout_seconds: float) -> float:
    """Return how much of the time that a save may wait for other ranks is for the trainers, who agree on how
    it ended once their writer processes have given up."""
    return min(_LONGEST_AGREEING_SECONDS, timeout_seconds / 4)


def _attempt(
    order: SaveOrder, part: GivesPart, ranks: Ranks, cache: PlanCache | None, number: int
) -> tuple[Metadata, SaveOutcome]:
    if number > 1:
        order.engine.writer.reset()
    begun = time.perf_counter()
    attempt = order.engine.attempt(order, part, ranks, cache)
    metadata = attempt.run()
    save_id = str(getattr(order.engine.writer, "save_id", ""))
    seconds = attempt.seconds | {"save": time.perf_counter() - begun}
    return metadata, SaveOutcome(save_id, seconds, number, attempt.size_bytes)
