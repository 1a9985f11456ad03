"""Saves of a manager: policies, execution in the loop or in the background, and completion."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, SupportsIndex

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp.background.session import AsyncSession
from dcp.background.writers import RefusedWriter, SaveFuture, SaveOutcome
from dcp.calls.arguments import check_top_level
from dcp.engines.run import save_with
from dcp.features.plan_cache import PlanCache
from dcp.manager.coordination import Reason, StepCoordinator
from dcp.manager.events import Events
from dcp.saving.save import SaveOptions
from dcp.steps import PARTIAL, whole_step
from dcp.storage.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
    check_flags,
)
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageWriter

    from dcp.manager.after_commit import AfterCommit

logger = logging.getLogger(__name__)

Metrics = Mapping[str, SupportsFloat]
"""Metrics by name: Python and numpy numbers, or tensors and arrays without dimensions. NaN is allowed."""

_LONGEST_SHOWN = 200
_OURS = frozenset({"step", "metrics", "run", PARTIAL})


def user_metadata_of(
    step: int, metrics: Metrics | None, run: str | None, others: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the user metadata of a save, with ``metrics`` as floats.

    Raises OptionError for a metric that is not a number, data that is not plain, or reserved names.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"metrics must be a dict of names and numbers, not a {type(metrics).__name__}")
    try:  # check now: every background save would fail
        msgpack.packb(dict(others or {}))
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(
            f"user_metadata must be plain data (numbers, text, lists, dicts): {error}"
        ) from error
    taken = sorted(_OURS.intersection(others or {}))
    if taken:
        raise OptionError(f"user_metadata must not contain {taken[0]!r}, a name that the manager uses")
    described: dict[str, Any] = {**(others or {}), "step": step}
    if metrics:
        described["metrics"] = {name: _number(name, value) for name, value in metrics.items()}
    if run is not None:
        described["run"] = run
    return described


def _number(name: object, value: object) -> float:
    if not isinstance(name, str):
        raise OptionError(f"metrics: the name {name!r} is not a string")
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        raise OptionError(f"metrics: {name!r} is not reduced over the ranks yet: pass its full_tensor()")
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.dtype.is_complex:
        return float(value.item())
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    shown = repr(value) if len(repr(value)) < _LONGEST_SHOWN else f"a {type(value).__name__}"
    raise OptionError(f"metrics: {name!r} must be a number or a 0-d tensor of one, not {shown}")


def check_state(state_dict: Any, names: Sequence[str]) -> None:
    """Raise OptionError for a state that every save would fail on: not a dict, or without an entry of
    ``names``.
    """
    check_top_level(state_dict)
    for name in names:
        if not any(name == key or name.startswith(f"{key}.") for key in state_dict):
            keys = ", ".join(map(repr, [*state_dict][:8]))
            raise OptionError(
                f"grace_seconds: the state has no {name!r} to save when time is short; its keys are {keys}. "
                "Pass weights= with the key of the model, such as 'app.model', or weights=() to save the "
                "whole state"
            )


def weights_of(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the entries called ``names`` (keys joined by dots), nested as in ``state_dict``.

    Names below the top level are resolved by the save, which fails if an entry is missing.
    """
    found: dict[str, Any] = {}
    for key, value in state_dict.items():
        below = [name for name in names if name.startswith(f"{key}.")]
        if key in names:
            found[key] = value
        elif below:
            paths = {name: name.removeprefix(f"{key}.") for name in below}
            # a `Stateful` object, whose state is not needed here
            some = partial(_some_entries, value, paths)
            found[key] = SimpleNamespace(state_dict=some, load_state_dict=lambda _: None)
    return found


def _some_entries(value: Any, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of ``value`` in ``paths``, nested."""
    whole = value.state_dict() if hasattr(value, "state_dict") else value
    found: dict[str, Any] = {}
    for name, path in paths.items():
        if not isinstance(whole, Mapping) or not _copy(whole, found, path):
            raise CheckpointError(f"weights={name!r}: the state has no entry of this name", fqn=name)
    return found


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: str) -> bool:
    """Copy the entry ``path`` from ``source`` to ``target``; return False if absent."""
    for key, value in source.items():
        if str(key) == path:
            target[key] = value
            return True
        if path.startswith(f"{key}.") and isinstance(value, Mapping):
            below = target.setdefault(key, {})
            if _copy(value, below, path.removeprefix(f"{key}.")):
                return True
    return False


Mode = Literal["thread", "process", "sync"]
WhenBusy = Literal["wait", "skip", "raise"]

_HANG_SECONDS = 2.0
"""Wait after a deadline for a cancelled save, because the storage may hang."""
_CAUTION = 2.0
"""Safety factor on the time of the slowest recent save."""
_PATIENT: frozenset[Reason] = frozenset({"last", "force", "stop"})
"""Reasons for which a save waits for the previous one, regardless of ``when_busy``."""
_REMEMBERED = 3


# -- a step --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StepSaver:
    """Begin steps and saves, and follow saves to their end, on all ranks.

    ``options`` and ``planner`` apply to all saves. ``resumed_from`` is recorded by later saves.
    ``after_commit`` follows saves on the coordinator. ``keeps_failures`` keeps the last failure until it is
    raised; otherwise only failures of every save are kept. After ``closing``, no save begins.
    """

    coordinator: StepCoordinator
    session: LoopSession | AsyncSession
    events: Events
    options: SaveOptions
    planner: SavePlanner | None
    when_busy: WhenBusy
    keeps_failures: bool
    after_commit: AfterCommit | None = None
    resumed_from: Mapping[str, Any] | None = None
    closing: bool = False

    def __post_init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._has_committed = False
        self.forget_saves()

    def forget_saves(self) -> None:
        """Forget running saves, in a forked child. Another thread may have held the lock."""
        self._changed = threading.Condition()
        self._running: dict[SaveFuture, int] = {}
        self.failures = 0
        """Number of failed saves and damaged checkpoints."""
        self._failure: BaseException | None = None
        self._unreported: BaseException | None = None
        self._damage: CorruptCheckpointError | None = None

    def exchange(self, step: SupportsIndex, *, last: bool, force: bool = False) -> int:
        """Exchange votes with other ranks once a step, and raise failures on all ranks; return ``step`` as an
        int.

        An invalid step fails on this rank, and on other ranks if they save. At a step without an exchange,
        other ranks notice only if they save.
        """
        try:
            check_flags(last=last, force=force)
            step = whole_step(step)
        except OptionError as error:
            if self.coordinator.refuse(error, saves=last or force):
                self.session.refuse(error, self.options)
            raise
        was_stopping = self.coordinator.stopping
        has_failed = self._failure is not None or self._damage is not None
        agreed = self.coordinator.begin(step, failed=has_failed, last=last, force=force)
        if "stop" in agreed and not was_stopping:
            self.events.emit("stop_requested", step)
        if "failed" in agreed:
            self.settle(self.options.timeout_seconds)
            self.raise_failure(damage=True)
            raise CheckpointError("a save failed on another rank; see its log and exception", step=step)
        return step

    def may_begin(self, step: int, reason: Reason) -> bool:
        """Handle a running or failed save before a new one; return the same on all ranks."""
        impatient = self.when_busy != "wait" and reason not in _PATIENT
        if impatient and self.coordinator.any_rank(bool(self._running)):
            if self.when_busy == "raise":
                raise CheckpointError(
                    f"the save of step {step} began before the previous save ended, and "
                    f"when_busy='raise'; save less often, or pass when_busy='wait' or 'skip'",
                    step=step,
                )
            self.coordinator.skipped(step)
            self.events.emit("save_skipped", step, reason=reason)
            return False
        if self._running:
            # a deadline cancels the save
            left = max(0.0, self.coordinator.notices.seconds_left()) + _HANG_SECONDS
            self.settle(min(self.options.timeout_seconds, left))
        try:
            self.raise_failure(damage=False)
        except BaseException:
            self.coordinator.forget_failure(step)
            raise
        return True

    def begin(
        self,
        step: int,
        reason: Reason,
        state_dict: dict[str, Any],
        writer: FileSystemWriter,
        user_metadata: dict[str, Any],
        *,
        overlap: bool = False,
    ) -> SaveFuture:
        """Save; in the background, unless the session saves in the loop."""
        self.coordinator.saved(step, reason)
        options = replace(
            self.options, step=step, resumed_from=self.resumed_from, user_metadata=user_metadata
        )
        self._follow("saving", step)
        try:
            future = self.session.save(
                state_dict, storage_writer=writer, planner=self.planner, options=options, overlap=overlap
            )
        except BaseException:
            self._follow("ended", step, None)
            raise
        with self._changed:
            self._running[future] = step
        what = {"partial": ", ".join(user_metadata[PARTIAL])} if PARTIAL in user_metadata else {}
        future.add_done_callback(partial(self._ended, step, {"reason": reason, **what}, future))
        if self.session.ends_at_once and reason != "stop":
            self.raise_failure(damage=False)
        return future

    def begin_last(
        self,
        step: int,
        state_dict: dict[str, Any],
        prepare: Callable[[], tuple[FileSystemWriter, dict[str, Any]]],
        weights: Sequence[str],
        is_whole: Callable[[], bool],
    ) -> SaveFuture | None:
        """Save before a stop and wait for the end; return None if the deadline has passed.

        If the time may be too short, the entries ``weights`` are saved first, then the whole state. `Notices`
        cancels a save at the deadline. ``prepare`` makes the writer and metadata. ``is_whole`` returns
        whether the step already has a whole checkpoint, which weights must not replace.
        """
        left, expected = self.coordinator.seconds_left(max(self._seconds, default=math.inf))
        if left <= 0:
            self.coordinator.saved(step, "stop")
            self.events.emit("save_cancelled", step, error="the deadline has passed", reason="stop")
            return None
        end, first = time.monotonic() + left, None
        is_short = bool(weights) and left < _CAUTION * expected and not math.isinf(left)
        if is_short and not self.coordinator.any_rank(is_whole()):
            writer, described = prepare()
            described[PARTIAL] = list(weights)
            first = self.begin(step, "stop", weights_of(state_dict, weights), writer, described)
            self._await_last(step, end)
            if not first.done() or first.cancelled():  # the same on all ranks
                return first
        whole = self.begin(step, "stop", state_dict, *prepare())
        self._await_last(step, end)
        self.raise_failure(damage=False)
        return first if first is not None and first.exception() is None and whole.cancelled() else whole

    def _await_last(self, step: int, end: float) -> None:
        if math.isinf(end):
            self.settle(self.options.timeout_seconds)
        elif not self.wait(max(0.0, end - time.monotonic()) + _HANG_SECONDS):
            error = "the storage did not respond before the deadline"
            self.events.emit("save_cancelled", step, error=error, reason="stop")

    def refuse(self, step: int, reason: Reason, error: Exception) -> None:
        """Fail the save of ``step`` on all ranks with an error that this rank raised before the save."""
        self.session.refuse(error, self.options)
        if self.session.world_size > 1:
            self.coordinator.saved(step, reason)  # as on the other ranks

    def _follow(self, method: Literal["saving", "ended"], step: int, *args: str | None) -> None:
        """Call a method of ``after_commit`` on the coordinator; log its errors."""
        try:
            if self.after_commit is not None:
                getattr(self.after_commit, method)(step, *args)
        except Exception:
            logger.exception("%s: post-commit work failed at step %d", self.events.root, step)

    def _ended(self, step: int, what: dict[str, Any], future: SaveFuture, _: object) -> None:
        """Record the end of a save, in its thread. A cancelled save has not failed, unless the manager was
        closing.
        """
        error, outcome, cancelled = future.exception(), future.outcome or SaveOutcome(), future.cancelled()
        committed = error is None or (isinstance(error, CheckpointError) and error.committed)
        try:
            if not committed:
                self.events.emit("save_cancelled" if cancelled else "save_failed", step, error=error, **what)
            elif outcome.attempts > 1:
                self.events.emit("save_retried", step, attempts=outcome.attempts)
            if committed:
                what |= {"save_id": outcome.save_id}
                size_bytes = outcome.staged_bytes
                self.events.emit(
                    "saved", step, seconds=outcome.seconds, size_bytes=size_bytes, error=error, **what
                )
            self._follow("ended", step, outcome.save_id if committed else None)
        finally:
            with self._changed:
                if error is None:
                    # consecutive phases: the copy, and everything until the commit
                    spent = outcome.seconds
                    self._seconds.append(spent.get("blocked", 0.0) + spent.get("save", 0.0))
                self._has_committed |= committed
                if error is not None and (self.closing or not cancelled):
                    self.failures += not committed
                    self._unreported = None if cancelled else error
                    if self.keeps_failures or _is_lasting(error):
                        self._failure = error
                self._running.pop(future, None)
                self._changed.notify_all()

    # -- running saves ---------------------------------------------------------------------------------------

    def damaged(self, error: CorruptCheckpointError) -> None:
        """Record a committed checkpoint that this rank found damaged."""
        with self._changed:
            self.failures += 1
            self._damage = error if self.keeps_failures else None

    def running(self) -> list[int]:
        """List the steps with running saves."""
        with self._changed:
            return sorted(self._running.values())

    def raise_failure(self, *, damage: bool) -> None:
        """Raise the recorded failure, once. All ranks know of a failed save; ``damage``, known only to the
        coordinator, is raised only at a point where other ranks are informed.
        """
        with self._changed:
            error, self._failure = self._failure, None
            if damage:
                error, self._damage = error or self._damage, None
            if error is not None:
                self._unreported = None
                raise error

    def raise_unsaved(self) -> None:
        """Raise CheckpointError if saves failed, none was committed, and the last failure was not raised."""
        with self._changed:
            error, self._unreported = self._unreported, None
        if error is not None and not self._has_committed:
            raise CheckpointError(
                f"no checkpoint was saved: no save of this manager was committed, and {self.failures} "
                f"failed. The last error: {error}"
            ) from error

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait for all saves; return False after ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_seconds)

    def settle(self, timeout_seconds: float) -> None:
        """Wait like `wait`. Raises CheckpointError if a save is still running."""
        if self._running and not self.wait(timeout_seconds):
            steps = ", ".join(map(str, self.running()))
            raise CheckpointError(
                f"the save of step {steps} has not ended within {timeout_seconds:g} s: the storage hangs, or "
                "timeout_seconds is too short"
            )


def _is_lasting(error: BaseException) -> bool:
    """Return whether later saves will fail too: an entry cannot be saved, or ranks no longer communicate."""
    if isinstance(error, PlanError):
        return bool(error.fqn or error.fqns or error.problems)
    return isinstance(error, CollectiveTimeoutError)


# -- in the loop, or behind it -------------------------------------------------------------------------------


class LoopSession:
    """Saves in the training loop, with the interface of `AsyncSession`. Any thread may cancel a save."""

    ends_at_once = True

    def __init__(self, process_group: ProcessGroup | None, *, no_dist: bool, world_size: int) -> None:
        self._process_group, self._no_dist = process_group, no_dist
        self.world_size = world_size
        self._current: SaveFuture | None = None
        self._cache = PlanCache()

    def save(
        self,
        state_dict: dict[str, Any],
        *,
        storage_writer: StorageWriter,
        planner: SavePlanner | None,
        options: SaveOptions,
        overlap: bool = False,
    ) -> SaveFuture:
        """Save ``state_dict``. All errors are raised by the future, on all ranks."""
        future = self._current = SaveFuture(getattr(storage_writer, "checkpoint_id", None) or "")
        future.staging_completion.set_result(None)
        begun = time.perf_counter()
        try:
            check_group(no_dist=self._no_dist)
            metadata, outcome = save_with(
                state_dict,
                options,
                storage_writer=storage_writer,
                planner=planner,
                process_group=self._process_group,
                no_dist=self._no_dist,
                abort=future.abort_event,
                cache=self._cache,
            )
        except BaseException as error:  # another thread may wait for the end of a cancelled save
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            spent = time.perf_counter() - begun
            future.outcome = replace(outcome, seconds=outcome.seconds | {"blocked": spent})
            future.set_result(metadata)
        finally:
            self._current = None
        return future

    def refuse(self, error: Exception, options: SaveOptions) -> None:
        """Fail the save of the other ranks with ``error``."""
        if self.world_size > 1:
            self.save({}, storage_writer=RefusedWriter(error), planner=None, options=options)

    def under_way(self) -> list[SaveFuture]:
        """List the running saves."""
        current = self._current
        return [] if current is None else [current]

    def lock(self) -> AbstractContextManager[None]:
        """Return a null context: saves in the loop make no concurrent copies."""
        return nullcontext()

    def close(self, timeout_seconds: float) -> None:
        """Do nothing, because no save is running."""


def check_group(*, no_dist: bool) -> None:
    """Raise CheckpointError if the process group was destroyed; each rank would then save alone."""
    if not no_dist and not dist.is_initialized():
        raise CheckpointError(
            "the process group of this manager has been destroyed; restore, and save in mode 'sync', before "
            "destroy_process_group()"
        )
