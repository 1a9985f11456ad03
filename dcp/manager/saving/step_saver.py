"""One step's save from the decision to its end: what came before, the policies, what follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dcp.background.future import SaveFuture, SaveOutcome
from dcp.manager.cleanup.post_commit import PostCommitWorker
from dcp.manager.coordination.schedule import Reason
from dcp.manager.coordination.step_coordinator import StepCoordinator
from dcp.manager.events import EventKind, Events
from dcp.manager.saving.executor import SaveExecutor
from dcp.manager.saving.ledger import SaveLedger
from dcp.steps.states import PARTIAL
from dcp.storage.errors import CheckpointError
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["HANG_SECONDS", "StepSaver", "WhenBusy"]

logger = logging.getLogger(__name__)

WhenBusy = Literal["wait", "skip", "raise"]

HANG_SECONDS = 2.0
"""How long after a deadline a save is waited for that was called off: the storage may not answer."""

_PATIENT: frozenset[Reason] = frozenset({"last", "force", "stop"})
"""Saves that wait for the one before, whatever ``when_busy`` says."""


@dataclass(frozen=True)
class StepSaver:
    """Begins steps and saves; all ranks do so alike. The parts are the manager's."""

    coordinator: StepCoordinator
    executor: SaveExecutor
    ledger: SaveLedger
    events: Events
    post_commit: PostCommitWorker | None
    when_busy: WhenBusy
    timeout_seconds: float

    @property
    def patience_seconds(self) -> float:
        """How long a save may be waited for: not beyond a deadline, when it is called off."""
        left = max(0.0, self.coordinator.notices.seconds_left()) + HANG_SECONDS
        return min(self.timeout_seconds, left)

    def begin_step(self, step: int, *, last: bool, force: bool) -> Reason | None:
        """`exchange`, then why the step is saved; None if it is not, which is told of a repeated one."""
        self.exchange(step, last=last, force=force)
        reason = self.coordinator.reason(step, last=last)
        if force and reason not in ("last", "stop"):  # that of a stop is waited for, forced or not
            return "force"
        if reason is None and self.coordinator.is_repeated(step) and not last:
            logger.warning(
                "%s: save() was called again for step %d, which is saved or was restored already: "
                "nothing is done. Pass force=True to save it anew",
                self.events.root,
                step,
            )
        return reason

    def exchange(self, step: int, *, last: bool, force: bool = False) -> None:
        """Once a step: exchange with the other ranks what to do; raise what failed, on all of them."""
        was_stopping = self.coordinator.stopping
        agreed = self.coordinator.begin(step, failed=self.ledger.has_failure, last=last, force=force)
        if agreed.stop and not was_stopping:
            self.events.emit("stop_requested", step)
        if agreed.failed:
            self.ledger.settle(self.timeout_seconds)
            self.ledger.raise_failure(damage=True)
            raise CheckpointError("a save failed on another rank, whose log and exception say why", step=step)

    def may_begin(self, step: int, reason: Reason) -> bool:
        """Deal with a save that is not finished, and with one that failed; the same on all ranks."""
        impatient = self.when_busy != "wait" and reason not in _PATIENT
        if impatient and self.coordinator.any_rank(bool(self.ledger.running())):
            if self.when_busy == "raise":
                raise CheckpointError(
                    f"the save of step {step} came before the one before was finished, and "
                    "when_busy='raise'; save less often, or let it wait or be skipped",
                    step=step,
                )
            self.coordinator.skipped(step)
            self.events.emit("save_skipped", step, reason=reason)
            return False
        self.ledger.settle(self.patience_seconds)
        self.ledger.raise_failure(damage=False)
        return True

    def begin(
        self,
        step: int,
        reason: Reason,
        state_dict: dict[str, Any],
        writer: FileSystemWriter,
        user_metadata: Mapping[str, Any],
        *,
        overlap: bool,
    ) -> SaveFuture:
        """Save, behind the loop where the executor does."""
        self.coordinator.saved(step, reason)
        if self.post_commit is not None:
            self.post_commit.saving(step)
        try:
            future = self.executor.begin(state_dict, writer, user_metadata, overlap=overlap)
        except BaseException:
            if self.post_commit is not None:
                self.post_commit.failed(step)
            raise
        self.ledger.begun(step, future)
        what = {"partial": ", ".join(user_metadata[PARTIAL])} if PARTIAL in user_metadata else {}
        future.add_done_callback(partial(self._on_ended, step, {"reason": reason, **what}, future))
        if self.executor.ends_at_once and reason != "stop":
            self.ledger.raise_failure(damage=False)
        return future

    @contextmanager
    def refused_by_all(self, step: int, reason: Reason) -> Iterator[None]:
        """For what a rank does before `begin`: an error there fails, on all ranks, the save of ``step``
        that the others begin."""
        try:
            yield
        except Exception as error:
            if self.executor.refuse(error):
                self.coordinator.saved(step, reason)  # as on the others
            raise

    @contextmanager
    def step_refused_by_all(self, *, saves: bool) -> Iterator[None]:
        """The same for what finds out which step it is. At a step without an exchange the others hear of
        it only if they save whatever the step is, by the interval or because of the call (``saves``)."""
        try:
            yield
        except Exception as error:
            if self.coordinator.refuse(error, saves=saves):
                self.executor.refuse(error)
            raise

    def _on_ended(self, step: int, what: dict[str, Any], future: SaveFuture, _: object) -> None:
        """In the thread that carried out the save."""
        error = future.exception()
        try:
            committed = error is None or (isinstance(error, CheckpointError) and error.committed)
            self._tell_end(step, what, future, error, committed=committed)
            if self.post_commit is not None and committed:
                self.post_commit.committed(step, future.outcome.save_id if future.outcome else "")
            elif self.post_commit is not None:
                self.post_commit.failed(step)
        finally:
            self.ledger.ended(future, error)

    def _tell_end(
        self,
        step: int,
        what: dict[str, Any],
        future: SaveFuture,
        error: BaseException | None,
        *,
        committed: bool,
    ) -> None:
        if not committed:
            kind: EventKind = "save_cancelled" if future.cancelled() else "save_failed"
            self.events.emit(kind, step, error=error, **what)
            return
        outcome = future.outcome or SaveOutcome()
        if outcome.attempts > 1:
            self.events.emit("save_retried", step, attempts=outcome.attempts)
        self.events.emit(
            "saved",
            step,
            seconds=outcome.seconds,
            size_bytes=outcome.staged_bytes,
            error=error,
            save_id=outcome.save_id,
            **what,
        )
