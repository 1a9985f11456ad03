"""`CheckpointManager`: checkpoints of one training run, from the first save to a resume."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp.background.session import AsyncSession, own_channel
from dcp.background.writers import SaveFuture
from dcp.calls.arguments import with_options, works_alone
from dcp.calls.plain_errors import plain_errors
from dcp.engines.run import load_with
from dcp.manager.after_commit import AfterCommit, Check
from dcp.manager.catalog import CatalogRegistration, Registrar, registration_of
from dcp.manager.coordination import Grace, Notices, StepCoordinator
from dcp.manager.events import EventCallback, Events
from dcp.manager.restore import Restored, Restoring
from dcp.manager.retention import Best, Retention, why_no_best
from dcp.manager.saving import (
    LoopSession,
    Metrics,
    Mode,
    StepSaver,
    WhenBusy,
    check_group,
    check_state,
    user_metadata_of,
)
from dcp.planners.load.selection import LoadKeywords
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.ranks.agreement import raise_on_all_ranks
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.saving.save import SaveOptions
from dcp.steps import StepFolders, whole_step
from dcp.storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    OptionError,
    PlanError,
    StorageError,
    check_flags,
    check_numbers,
)
from dcp.storage.stores.opening import OpenWith
from dcp.storage.stores.posix.files import step as storage_step
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager

_AFTER_ERROR_SECONDS = 60.0
"""Timeout of a running save after training ended with an exception, because other ranks may be dead."""

_AFTER_COMMIT_SECONDS = 5.0
"""Minimum time for verification and deletions at the end."""


OnFailure = Literal["warn", "raise"]
_CHOICES = {"mode": Mode, "when_busy": WhenBusy, "on_failure": OnFailure, "verify_saved": Check}


def _check_choices(**given: object) -> None:
    """Raise OptionError for an option with a value that its Literal does not list."""
    for option, value in given.items():
        if value not in (choices := get_args(_CHOICES[option])):
            known = ", ".join(map(repr, choices))
            raise OptionError(f"{option} must be one of {known}, not {value!r}")


def _check_parts(writer: object, stager: object, keep: object) -> None:
    """Raise OptionError for a writer, stager or retention that cannot be used as one."""
    if not callable(writer):
        raise OptionError(
            f"writer must be a function that takes a path and returns a storage writer, such as "
            f"partial(dcp.FileSystemWriter, sync_files=False), not {writer!r}"
        )
    if stager is not None and not callable(getattr(stager, "stage", None)):
        raise OptionError(f"stager must have a method stage(), as dcp.staging.DefaultStager, not {stager!r}")
    if keep is not None and not isinstance(keep, Retention):
        raise OptionError(f"keep must be a Retention, such as Retention(last=3), not {keep!r}")


def _check_root(path: Path | None) -> None:
    """Raise StorageError if the local ``path`` of a run is a file."""
    if path is None:
        return
    with storage_step(None, "stat", path):
        is_file = path.is_file()
    if is_file:
        raise StorageError(f"{path} is not a folder, so no checkpoint can be stored in it")


def _call_off(session: weakref.ref[LoopSession | AsyncSession]) -> None:
    there = session()
    for future in there.under_way() if there is not None else ():
        if not future.abort_event.is_set():
            future.abort()


class CheckpointManager:
    """Save, retain and restore the checkpoints of one training run.

    Make the manager on all ranks with the same options, call `save` or `should_save` for the same steps, and
    call `restore` and `close` on all ranks. The manager opens gloo groups of its own. Each checkpoint is a
    folder below ``root``. A process may have several managers.

    Args:
        root: Folder or URL of the run.
        process_group: Ranks that save together; all ranks if None.
        no_dist: Save from this process alone.
        mode: "thread" and "process" copy the state and write in the background, in a thread or a separate
            process. The process commits a copied state even if this process is killed. "sync" writes before
            `save` returns.
        every_steps: Save at multiples of this number. Without ``every_steps`` and ``every_seconds``, every
            call of `save` saves.
        every_seconds: Save if this time has passed since the last save.
        save_first: Also save the first step of a run that was not restored.
        keep: Retention rules; None keeps all steps. Damaged steps do not count and pinned steps stay. The
            highest step is the newest: to train again from an older step, `delete` the steps after it.
        when_busy: Action of a scheduled save while the previous save is running: "wait", "skip" (until the
            next interval) or "raise". Last, forced and stopping saves wait.
        on_failure: "warn" logs a save that failed after ``retries``, emits an event and counts it in
            `failures`. Errors that would fail every save (PlanError, CollectiveTimeoutError) are raised by
            the next call, on all ranks at the same step. "raise" raises every failure this way.
        retries: Number of further attempts after an error of the storage.
        retry_pause_seconds: Pause before the first retry of a save or restore, doubled each time.
        verify_saved: Check after each commit, in the background: "sizes" compares file sizes, "full" reads
            all bytes, "off" does nothing. Results are stored beside the checkpoint.
        handle_sigterm: On SIGTERM on any rank, the next `save` saves, waits for the commit and sets
            `stop_requested` on all ranks. An existing Python handler is called too.
        grace_seconds: Seconds from SIGTERM to the end of the machine, or a dict of seconds by signals and by
            files that appear: ``{signal.SIGUSR1: 120, "/run/preempted": 25}``. By then, every save is
            committed or cancelled.
        weights: Names of entries to save first if the grace is too short for the whole state, such as
            ``"app.model"``; () for none.
        name: Format of folder names with the field ``{step}``, or a function of the step. Names must contain
            the step in decimal digits.
        writer: Function from a checkpoint id to a writer, such as ``partial(FileSystemWriter,
            torch_compatible=False)``.
        planner: Planner, as for `dcp.async_save`.
        stager: Stager, as for `dcp.async_save`.
        run: Name of the run, stored with each checkpoint.
        on_event: Function or functions that receive each `Event`. Events are also logged and sent to
            `torch.monitor`.
        progress: True for a bar, or a function that receives `dcp.progress.Progress`.
        timeout_seconds: Longest wait for other ranks, in seconds.
        agree_every_steps: Number of steps between exchanges of stop requests and clock-based saves.
        storage_options: Options for the URL ``root``, as for `dcp.save`. Options of ``writer`` take
            precedence.
        catalog: URL of a service (``dcp serve``) to notify of commits and deletions, or a
            `CatalogRegistration`. An unavailable service neither delays nor fails training.
        map: Map for saves, as for `dcp.save`; restores use its inverse. Entries that the inverse cannot
            restore fail the save.

    Raises:
        OptionError: An option is invalid.
        ModuleNotFoundError: ``catalog`` needs httpx.
        CheckpointError: Several ranks have no process group.
        CollectiveTimeoutError: Other ranks did not answer in time.

    Examples:
        ```python
        with dcp.CheckpointManager("ckpt", every_steps=100, keep=dcp.Retention(last=3)) as manager:
            restored = manager.restore(state)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                loss = train_step()
                manager.save(step, state, metrics={"loss": loss}, last=step == steps)
                if manager.stop_requested:
                    break
        ```
    """

    @plain_errors
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        mode: Mode = "thread",
        every_steps: int | None = None,
        every_seconds: float | None = None,
        save_first: bool = False,
        keep: Retention | None = None,
        when_busy: WhenBusy = "wait",
        on_failure: OnFailure = "warn",
        retries: int = 2,
        retry_pause_seconds: float = 1.0,
        verify_saved: Check = "sizes",
        handle_sigterm: bool = True,
        grace_seconds: Grace | None = None,
        weights: str | Sequence[str] = "model",
        name: Callable[[int], str] | str = "step-{step:08d}",
        writer: Callable[[str], FileSystemWriter] | None = None,
        planner: SavePlanner | None = None,
        stager: AsyncStager | None = None,
        run: str | None = None,
        on_event: EventCallback | Sequence[EventCallback] | None = None,
        progress: bool | ProgressCallback | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        agree_every_steps: int = 1,
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | CatalogRegistration | None = None,
        map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        self._closed = False
        self._no_dist = works_alone(process_group, no_dist=no_dist, operation="save")
        self._mode, self._run, self._may_be_alone = mode, run, no_dist
        self._process_group = process_group
        self._make_writer = writer if writer is not None else FileSystemWriter
        names = (weights,) if isinstance(weights, str) else tuple(weights)
        self._saved_first = names if grace_seconds is not None else ()
        """Entries to save first before a deadline; () without a deadline."""
        ranks = Ranks(
            process_group,
            use_dist=not self._no_dist,
            timeout_seconds=timeout_seconds,
            operation="CheckpointManager",
        )
        # options that must be equal on all ranks
        alike: dict[str, Any] = {
            "mode": mode,
            "every_steps": every_steps,
            "every_seconds": every_seconds and "given",  # by the clock of rank 0
            "save_first": save_first,
            "when_busy": when_busy,
            "on_failure": on_failure,
            "retries": retries,
            "handle_sigterm": handle_sigterm,
            "grace_seconds": grace_seconds is not None,
            "weights": weights,
            "agree_every_steps": agree_every_steps,
        }
        with raise_on_all_ranks(ranks):
            check_flags(save_first=save_first, handle_sigterm=handle_sigterm, progress=progress)
            check_numbers(
                every_steps=every_steps,
                every_seconds=every_seconds,
                agree_every_steps=agree_every_steps,
                retries=retries,
                retry_pause_seconds=retry_pause_seconds,
            )
            _check_choices(mode=mode, when_busy=when_busy, on_failure=on_failure, verify_saved=verify_saved)
            _check_parts(self._make_writer, stager, keep)
            weight_map = None if map is None else WeightMap.of(map)  # a file is read once
            notices = Notices(grace_seconds, handle_sigterm=handle_sigterm)
            self._opener = OpenWith(storage_options)
            self._folders = StepFolders(root, name, open_store=self._opener)
            _check_root(self._folders.root.local_path)
            registration = registration_of(catalog)
        if weight_map is not None:
            alike["map"] = weight_map.mark
        channel = None if self._no_dist else own_channel(ranks, options=alike)
        self.rank, self.world_size = (0, 1) if channel is None else (channel.rank, channel.world_size)
        seen_by_one = handle_sigterm or grace_seconds is not None or every_seconds is not None
        coordinator = StepCoordinator(
            notices=notices,
            channel=channel,
            every_steps=every_steps,
            every_seconds=every_seconds,
            save_first=save_first,
            exchanges=seen_by_one or on_failure == "raise",
            agree_every_steps=agree_every_steps,
            timeout_seconds=timeout_seconds,
        )
        self._coordinator = coordinator
        self._options = SaveOptions(
            progress=progress,
            timeout_seconds=timeout_seconds,
            retries=retries,
            retry_pause_seconds=retry_pause_seconds,
            map=weight_map,
            map_must_invert=True,
            apart=() if keep is None else tuple(part.patterns for part in keep.dropping),
        )
        url, follows = self._folders.root.url, [on_event] if callable(on_event) else [*(on_event or ())]
        self._registrar = self._after_commit = None
        if registration is not None and self.rank == 0:
            self._registrar = Registrar(registration, url, self._folders.name)
            follows.insert(0, self._registrar.on_event)
        self._events = Events(url, self.rank, follows)
        self._session: LoopSession | AsyncSession
        if mode == "sync":
            self._session = LoopSession(process_group, no_dist=self._no_dist, world_size=self.world_size)
        else:
            self._session = AsyncSession(
                process_group,
                no_dist=self._no_dist,
                kind=AsyncCheckpointerType(mode),
                stager=stager,
                timeout_seconds=timeout_seconds,
                start=mode == "process",
            )
        notices.see_to_it(partial(_call_off, weakref.ref(self._session)))
        self._saver = StepSaver(
            coordinator,
            self._session,
            self._events,
            self._options,
            planner,
            when_busy,
            keeps_failures=on_failure == "raise",
        )
        if self.rank == 0:
            self._after_commit = self._saver.after_commit = AfterCommit(
                self._folders, keep, verify_saved, self._events, self._saver.damaged
            )
        _open.add(self)

    # -- saving ----------------------------------------------------------------------------------------------

    @plain_errors
    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Return whether `save` would save this step. Call it on all ranks.

        Use it to prepare data for a save. With ``when_busy="skip"``, the save may still be skipped.

        Args:
            step: As for `save`.
            last: As for `save`.

        Returns:
            True if the step is due; equal on all ranks.

        Raises:
            OptionError: ``step`` is not an integer from 0.
            CheckpointError: The manager is closed, or an earlier save failed (see ``on_failure``).
        """
        self._check_open()
        step = self._saver.exchange(step, last=last)
        return self._coordinator.reason(step, last=last) is not None

    @plain_errors
    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        metrics: Metrics | None = None,
        force: bool = False,
        last: bool = False,
        overlap: bool = False,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> SaveFuture | None:
        """Save ``state_dict`` if ``step`` is due. Call it at every step, on all ranks.

        A step is due by the interval, as the ``last`` step, after SIGTERM (`save` then waits for the commit),
        or with ``force``. The state may change after the return; with ``overlap``, only inside `lock`.

        Args:
            step: Training step, which names the checkpoint.
            state_dict: State for `dcp.save`: `Stateful` objects, tensors, values, `PerRank` values.
            metrics: Numbers by name, also tensors and arrays without dimensions. NaN is allowed. `Best`
                compares them. The metrics of rank 0 are stored; a difference on another rank causes a
                warning.
            force: Save this step even if it is not due or was saved before.
            last: True at the last step of the run.
            overlap: Copy the state during the next forward and backward pass.
            user_metadata: Further plain data to store, from rank 0.

        Returns:
            The future of the save, whose ``result()`` waits for the commit; None if the step is not saved.

        Raises:
            CheckpointError: The manager is closed, or busy with ``when_busy="raise"``, or an earlier save
                failed (see ``on_failure``).
            PlanError: ``state_dict`` is not a dict.
            OptionError: ``step`` is not an integer from 0, a metric is not a number, ``user_metadata`` is not
                plain data, or a flag is not a bool.
        """
        self._check_open()
        self._events.refuse_to_wait("save()")
        saver = self._saver
        step = saver.exchange(step, last=last, force=force)
        reason = self._coordinator.reason(step, last=last, force=force)
        if reason is None:
            check_state(state_dict, self._saved_first)  # at every step, before the first save
            if not last:
                self._coordinator.warn_if_repeated(step)
            return None
        if not saver.may_begin(step, reason):
            return None

        def prepare() -> tuple[FileSystemWriter, dict[str, Any]]:
            try:
                check_flags(overlap=overlap)
                check_state(state_dict, self._saved_first)
                described = user_metadata_of(step, metrics, self._run, user_metadata)
                writer = self._make_writer(self._folders.checkpoint_id(step))
                return with_options(writer, self._opener), described
            except Exception as error:
                saver.refuse(step, reason, error)
                raise

        if reason == "stop":

            def is_whole() -> bool:
                return self.rank == 0 and self._folders.has_whole(step)

            return saver.begin_last(step, state_dict, prepare, self._saved_first, is_whole)
        return saver.begin(step, reason, state_dict, *prepare(), overlap=overlap)

    @property
    def failures(self) -> int:
        """Number of failed saves and of checkpoints found damaged after their commit."""
        return self._saver.failures

    @plain_errors
    def request_stop(self) -> None:
        """Request a stop as SIGTERM does: all ranks save the next step and set `stop_requested`.

        Call it on one rank. Several ranks need ``handle_sigterm`` or another option that exchanges votes at
        each step.

        Raises:
            CheckpointError: The manager is closed, or the ranks exchange no votes.
        """
        self._check_open()
        self._coordinator.request_stop()

    @property
    def stop_requested(self) -> bool:
        """True after the ranks have agreed to stop. `save` has saved this step; leave the loop."""
        return self._coordinator.stopping

    @plain_errors
    def cancel(self) -> bool:
        """Cancel the running save and wait until it has ended. Call it on one rank, from any thread.

        A cancelled save does not count as a failure. The next due step is saved.

        Returns:
            True if the save left neither a checkpoint nor files, on all ranks; False if it had committed, or
            no save was running.

        Raises:
            CheckpointError: A callback of the running save called `cancel`.
        """
        self._events.refuse_to_wait("cancel()")
        ended = [future.cancel() for future in self._session.under_way()]
        self._saver.wait(self._options.timeout_seconds)
        return any(ended)

    def lock(self) -> AbstractContextManager[None]:
        """Return a context manager for ``optimizer.step()`` with ``overlap=True``.

        Entering waits for a running copy of the state and delays the next one.
        """
        return self._session.lock()

    # -- restoring -------------------------------------------------------------------------------------------

    @plain_errors
    def restore(
        self, state_dict: dict[str, Any], step: int | None = None, **options: Unpack[LoadKeywords]
    ) -> Restored | None:
        """Load the newest good checkpoint, or the checkpoint of ``step``, into ``state_dict``. Call it on all
        ranks.

        A damaged or partial checkpoint is skipped with an event and the next older one is loaded. ``only``
        and ``step`` can select a partial one. Errors of the storage are retried, then raised. Other errors
        are raised at once. The intervals of later saves count from the restored step.

        Args:
            state_dict: State in the form given to `save`.
            step: Step to restore; None for the newest good step.
            **options: Options of `dcp.load`, such as ``only``, ``exclude``, ``rename``, ``map``, ``dtype``,
                ``verify`` and ``per_rank="keep"``.

        Returns:
            The restored step with its report and metadata; None if the run has no checkpoint.

        Raises:
            CorruptCheckpointError: All steps are damaged.
            CheckpointNotFoundError: ``step`` has no committed checkpoint.
            CheckpointError: Further errors of `dcp.load`.
            OptionError: ``step`` is not an integer from 0.
        """
        self._check_open()
        self._events.refuse_to_wait("restore()")
        check_group(no_dist=self._no_dist)
        self._saver.settle(self._options.timeout_seconds)
        try:
            self._coordinator.meet()
        except PlanError as error:
            # the other ranks save; in the background they would wait elsewhere than this rank
            if error.saving:
                self._session.refuse(error, self._options)
            raise
        options.setdefault("progress", self._options.progress)
        if (weights := self._options.map) is not None:
            options.setdefault("map", weights.inverse)
        group, timeout_seconds, no_dist = self._process_group, self._options.timeout_seconds, self._no_dist
        restored = Restoring(
            Ranks(group, use_dist=not no_dist, timeout_seconds=timeout_seconds, operation="restore"),
            self._folders,
            self._newest_first,
            partial(
                load_with,
                state_dict,
                process_group=group,
                no_dist=no_dist,
                timeout_seconds=timeout_seconds,
                storage_options=self._opener.storage_options,
            ),
            None if self._after_commit is None else self._after_commit.doubt,
            self._options.retry_pause_seconds,
        ).restored(step, options)
        if restored is not None:
            self._coordinator.restored(restored.step)
            report, url = restored.report, f"{self._folders.root.url}/{self._folders.name(restored.step)}"
            # recorded in the provenance of later saves
            self._saver.resumed_from = {"url": url, "step": restored.step, "save_id": report.save_id}
            for skipped, reason in restored.skipped:
                is_partial = skipped in restored.skipped_partial
                self._events.emit(
                    "skipped_partial" if is_partial else "skipped_damaged", skipped, error=reason
                )
            seconds, size_bytes = report.seconds, report.bytes_needed
            self._events.emit("restored", restored.step, seconds=seconds, size_bytes=size_bytes)
        return restored

    # -- committed steps -------------------------------------------------------------------------------------

    def checkpoint_id(self, step: int) -> str:
        """Return the path or URL of ``step`` for `dcp.load`, whether or not the checkpoint exists.

        Args:
            step: Training step.

        Returns:
            A path or URL.

        Raises:
            OptionError: ``step`` is not an integer from 0.
        """
        return self._folders.checkpoint_id(step)

    @plain_errors
    def all_steps(self) -> list[int]:
        """List the committed steps, ascending, without steps queued for deletion.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return sorted(self._folders.committed().keys() - self._going())

    @plain_errors
    def latest(self) -> int | None:
        """Return the newest of `all_steps`. `restore` may skip it if it is damaged.

        Returns:
            The step; None without a committed checkpoint.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return next(self._newest_first(), None)

    @plain_errors
    def best_step(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the committed step with the best ``metric``, without steps that are damaged, partial or
        saved without this metric.

        Args:
            metric: Name of a metric given to `save`.
            mode: "min" or "max". Of equal values, the newer step is better.

        Returns:
            The step; None without such a checkpoint.

        Raises:
            OptionError: No checkpoint has a finite value of ``metric``, or ``mode`` is invalid.
            StorageError: The storage cannot be listed.

        Examples:
            >>> dcp.load(state, checkpoint_id=manager.checkpoint_id(manager.best_step("val_loss")))
        """
        rule, going = Best(metric, mode=mode), self._going()
        states = [state for state in self._folders.survey() if state.step not in going]
        whole = [state for state in states if state.health == "good"]
        if whole and not rule.pick(whole):
            raise OptionError(f"{self._folders.root.url} has no best step: {why_no_best(rule, whole)}")
        return next(iter(rule.pick(whole)), None)

    def _newest_first(self) -> Iterator[int]:
        return self._folders.newest_first(self._going())

    def _going(self) -> set[int]:
        return set() if self._after_commit is None else self._after_commit.deleting()

    @plain_errors
    def delete(self, step: int) -> None:
        """Delete the checkpoint of ``step`` in the background. `all_steps` omits it at once.

        Rank 0 acts; other ranks need not call it.

        Args:
            step: One of `all_steps`.

        Raises:
            CheckpointNotFoundError: The step has no checkpoint.
            CheckpointError: The step is pinned, or is being saved or verified, or the manager is closed.
            OptionError: ``step`` is not an integer from 0.
        """
        self._check_open()
        if self._after_commit is None:
            return
        step = whole_step(step)
        self._require(step)
        if self._folders.notes(step).pinned:
            raise CheckpointError(f"step {step} is pinned: unpin it before it is deleted", step=step)
        self._after_commit.delete(step)

    @plain_errors
    def pin(self, step: int) -> None:
        """Keep ``step`` regardless of `Retention`. Rank 0 acts.

        Args:
            step: One of `all_steps`.

        Raises:
            CheckpointNotFoundError: The step has no checkpoint.
            CheckpointError: The manager is closed.
        """
        self._set_pin(step, True)

    @plain_errors
    def unpin(self, step: int) -> None:
        """Remove the pin of ``step``; `Retention` applies after the next save. Rank 0 acts.

        Args:
            step: One of `all_steps`.

        Raises:
            CheckpointNotFoundError: The step has no checkpoint.
            CheckpointError: The manager is closed.
        """
        self._set_pin(step, False)

    def _set_pin(self, step: int, pinned: bool) -> None:
        self._check_open()
        if self.rank != 0:
            return
        self._require(step)
        self._folders.update_notes(step, lambda notes: replace(notes, pinned=pinned))

    def _require(self, step: int) -> None:
        if step in self._going() or not self._folders.has(step):
            raise CheckpointNotFoundError(f"{self.checkpoint_id(step)} holds no checkpoint", step=step)

    @plain_errors
    def pinned(self) -> list[int]:
        """List the pinned steps.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return sorted(set(self._folders.pinned()) - self._going())

    # -- the end ---------------------------------------------------------------------------------------------

    @plain_errors
    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for all saves, and on rank 0 for verifications and deletions.

        Args:
            timeout_seconds: Longest wait; None for no limit.

        Returns:
            True if all have ended.

        Raises:
            CheckpointError: A save failed (see ``on_failure``), or, with ``on_failure="raise"``, a checkpoint
                is damaged.
        """
        self._events.refuse_to_wait("wait()")
        begun = time.monotonic()
        done = self._saver.wait(timeout_seconds)
        if done and self._after_commit is not None:
            left = None if timeout_seconds is None else timeout_seconds - (time.monotonic() - begun)
            done = self._after_commit.wait(None if left is None else max(0.0, left))
        if done:
            self._saver.raise_failure(damage=True)
        return done

    @plain_errors
    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait for running saves and their verification, then release all resources. Idempotent.

        A save that has not ended in time is cancelled. Call it on all ranks. Leaving a ``with`` block and
        exiting the interpreter also close. After an exception, a running save gets one minute.

        Args:
            timeout_seconds: Longest wait; None for the manager's ``timeout_seconds``.

        Raises:
            CheckpointError: A save failed (see ``on_failure``), a checkpoint is damaged with
                ``on_failure="raise"``, or every save of this manager failed. Not raised if an exception
                leaves the ``with`` block.
        """
        self._events.refuse_to_wait("close()")
        self._close(self._options.timeout_seconds if timeout_seconds is None else timeout_seconds)
        self._saver.raise_failure(damage=True)
        self._saver.raise_unsaved()

    def _close(self, timeout_seconds: float, *, together: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._saver.closing = True
        _open.discard(self)
        self._coordinator.notices.close()
        timeout_seconds = min(timeout_seconds, max(0.0, self._coordinator.notices.seconds_left()))
        deadline = time.monotonic() + timeout_seconds
        self._session.close(timeout_seconds)
        self._saver.wait(max(0.0, deadline - time.monotonic()))
        if self._after_commit is not None:
            self._after_commit.close(max(_AFTER_COMMIT_SECONDS, deadline - time.monotonic()))
        if self._registrar is not None:
            self._registrar.close()
        self._coordinator.close(together=together)

    def _check_open(self) -> None:
        if self._closed:
            where = self._folders.root.url
            raise CheckpointError(
                f"this manager of {where} is closed; create a new manager (also in a forked child)"
            )
        expects_no_group = self._no_dist and not self._may_be_alone and dist.is_available()
        if expects_no_group and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                "this manager was created before init_process_group(), so each rank would save alone; create "
                "it afterwards, or pass no_dist=True to save from this process only"
            )

    def end_with_interpreter(self, *, failed: bool) -> None:
        """Close at interpreter exit; after an exception (``failed``) as a ``with`` block does."""
        most = _AFTER_ERROR_SECONDS if failed else math.inf
        self._close(min(self._options.timeout_seconds, most), together=False)

    def leave_to_parent(self) -> None:
        """Close in a forked child, without waits or locks."""
        self._closed = True
        self._saver.forget_saves()
        self._after_commit = None

    def __repr__(self) -> str:
        where = f"{self._folders.root.url!r}, mode={self._mode!r}"
        rank = f", rank={self.rank} of {self.world_size}" if self.world_size > 1 else ""
        running = self._saver.running()
        busy = f", saving step {', '.join(map(str, running))}" if running else ""
        failed = f", failures={self.failures}" if self.failures else ""
        return f"CheckpointManager({where}{rank}{busy}{failed}{', closed' if self._closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.end_with_interpreter(failed=True)


# -- managers that were not closed ---------------------------------------------------------------------------

_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()

# keep these, because destructors would wait for threads of the parent
_of_parent: list[CheckpointManager] = []


def _leave_all_to_parent() -> None:
    # A data loader's worker must not wait at exit for a save of the training process.
    _of_parent.extend(_open)
    for manager in _of_parent:
        manager.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _close_all() -> None:
    failed = getattr(sys, "last_value", None) is not None
    for manager in list(_open):
        manager.end_with_interpreter(failed=failed)


# Register with threading, because atexit callbacks run too late: threads can no longer start. Registered
# after the import of `dcp.background.session`, so this runs before sessions are drained: post-commit work
# still happens, within the manager's timeout.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
