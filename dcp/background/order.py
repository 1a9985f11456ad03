"""One save behind the training loop, as data, and the one piece of logic that carries it out.

The thread writer runs it in the trainer, the process writer in a process of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcp.background.future import SaveOutcome
from dcp.planners.cache.plan_cache import PlanCache
from dcp.progress import Progress, ProgressCallback
from dcp.ranks.collectives import Ranks
from dcp.saving.engine import ColumnarSave
from dcp.saving.provenance import provenance_of
from dcp.saving.rank_state import PlanOptions, RankState
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    SaveAbortedError,
    StorageError,
    StorageFullError,
)
from dcp.storage.writer import FileSystemWriter
from dcp.torch_protocol import save as object_steps

__all__ = ["RanksFor", "SaveOrder", "agreeing_seconds", "carry_out", "is_passing"]

logger = logging.getLogger(__name__)

_LONGEST_AGREEING_SECONDS = 20.0

RanksFor = Callable[[threading.Event], Ranks]
"""Makes the ranks of one attempt; the event is the save's abort."""


@dataclass
class SaveOrder:
    """What to save and how.

    ``options`` are set where planner and storage are ours (columns), ``planner`` where torch's protocol is
    taken. ``seconds`` are phases that came before. ``retries`` further attempts follow on storage errors,
    after ``retry_pause_seconds``, doubled each time.
    """

    serial: int
    writer: StorageWriter
    options: PlanOptions | None = None
    planner: SavePlanner | None = None
    use_collectives: bool = True
    user_metadata: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    timeout_seconds: float = 1800.0
    retries: int = 0
    retry_pause_seconds: float = 1.0


def carry_out(
    order: SaveOrder,
    payload: Callable[[], RankState | dict[str, Any]],
    ranks_for: RanksFor,
    *,
    abort: threading.Event,
    progress: bool | ProgressCallback | None = None,
    cache: PlanCache | None = None,
) -> tuple[Metadata, SaveOutcome]:
    """Save what ``payload`` gives: a staged `RankState`, or a staged state dict for torch's protocol.

    It is asked within the first step, so that a failed staging of one rank fails the save on all. ``cache``
    keeps the plan for the saves to come; all ranks have one, or none. Attempts end alike on all ranks, since
    all see the same error.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return _attempt(order, payload, ranks_for(abort), attempt, abort, progress, cache)
        except CheckpointError as error:
            if attempt > order.retries or not is_passing(error):
                raise
            pause = order.retry_pause_seconds * 2 ** (attempt - 1)
            logger.warning("attempt %d of a save failed, the next follows in %g s: %s", attempt, pause, error)
            abort.wait(pause)
            order.writer.reset()


def is_passing(error: CheckpointError) -> bool:
    """Whether another attempt may succeed: not on a full disk, which stays full until somebody frees space.

    The class of the error is the same on all ranks."""
    if error.committed or isinstance(error, CheckpointConflictError | StorageFullError):
        return False
    return isinstance(error, StorageError)


def agreeing_seconds(timeout_seconds: float) -> float:
    """How much of the time that a save may wait for other ranks is for the trainers, who agree on how it
    ended once their writer processes have given up."""
    return min(_LONGEST_AGREEING_SECONDS, timeout_seconds / 4)


def _attempt(
    order: SaveOrder,
    payload: Callable[[], RankState | dict[str, Any]],
    ranks: Ranks,
    attempt: int,
    abort: threading.Event,
    progress: bool | ProgressCallback | None,
    cache: PlanCache | None,
) -> tuple[Metadata, SaveOutcome]:
    begun = time.perf_counter()
    writer, options = order.writer, order.options
    staged: list[RankState | dict[str, Any]] = []

    def given() -> RankState | dict[str, Any]:
        staged[:] = [payload()]
        return staged[0]

    if isinstance(writer, FileSystemWriter):
        writer.user = dict(order.user_metadata)
        writer.provenance = provenance_of(ranks)
    if options is not None and isinstance(writer, FileSystemWriter):

        def local() -> RankState:
            state = given()
            if not isinstance(state, RankState):
                raise CheckpointError("a save on columns was given a state dict")
            save.seconds.update(order.seconds)  # staging may have ended only now
            return state

        save = ColumnarSave(
            local,
            writer,
            ranks,
            options,
            use_collectives=order.use_collectives,
            progress=_watched(abort, progress, show=ranks.is_coordinator),
            cache=cache,
        )
        metadata, seconds, reused = save.run(), save.seconds, save.plan_reused
    else:
        if order.planner is None:
            raise CheckpointError("a save by torch's protocol was given no planner")

        def state_dict() -> dict[str, Any]:
            state = given()
            if isinstance(state, RankState):
                raise CheckpointError("a save by torch's protocol was given columns")
            return state

        seconds, reused = dict(order.seconds), False
        metadata = object_steps.save(
            state_dict, writer, ranks, order.planner, use_collectives=order.use_collectives
        )
    seconds["save"] = time.perf_counter() - begun
    state = staged[0] if staged else {}
    size = sum(source.nbytes for source in state.sources) if isinstance(state, RankState) else 0
    return metadata, SaveOutcome(str(getattr(writer, "save_id", "")), seconds, attempt, size, reused)


def _watched(
    abort: threading.Event, progress: bool | ProgressCallback | None, *, show: bool
) -> bool | ProgressCallback | None:
    """``progress`` that also ends the writing soon after ``abort`` is set."""
    if progress is True and show:
        return True  # the bar; an abort then takes effect after this rank has written

    def watch(done: Progress) -> None:
        if abort.is_set():
            raise SaveAbortedError("the save was called off while it was writing")
        if callable(progress):
            progress(done)

    return watch
