"""`CheckpointManager`: the checkpoints of one training run, from the first save to a resume."""

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
from dcp.manager.retention import Retention
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
"""Time for a save under way when training has ended with an exception: other ranks may be dead."""

_AFTER_COMMIT_SECONDS = 5.0
"""Least time for verification and deletions at the end, when saves took all of it."""


OnFailure = Literal["warn", "raise"]
_CHOICES = {"mode": Mode, "when_busy": WhenBusy, "on_failure": OnFailure, "verify_saved": Check}


def _call_off(session: weakref.ref[LoopSession | AsyncSession]) -> None:
    there = session()
    for future in there.under_way() if there is not None else ():
        if not future.abort_event.is_set():
            future.abort()


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of one training run::

        with dcp.CheckpointManager("ckpt", every_steps=100, keep=dcp.Retention(last=3)) as manager:
            restored = manager.restore(state)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                loss = train_step()
                manager.save(step, state, metrics={"loss": loss}, last=step == steps)
                if manager.stop_requested:
                    break

    All ranks make the manager alike (it opens gloo groups of its own, whatever backend training uses), call
    `save` or `should_save` for the same steps, and `restore` and `close` together. Each checkpoint is a
    folder below ``root``, named by ``name``. Managers share nothing: a process may have several.

    Args:
        root: The folder of the run, or its URL.
        process_group: The ranks that save together; None is all of them.
        no_dist: Save from this process alone.
        mode: Where saves are written. "thread" and "process" copy the state, and write the copy in a thread
            of this process or in one of its own, which commits what it was given even if this process is
            killed; "sync" writes before `save` returns.
        every_steps: `save` saves at multiples of it, also after a resume; without it and ``every_seconds``
            whenever it is called.
        every_seconds: `save` saves when so much time has passed since the last one; of both intervals what
            comes first.
        save_first: Save also the first step of a run that was not restored.
        keep: Which checkpoints stay; None keeps all. Only committed ones that were not found damaged count;
            pinned ones stay. The highest step is the newest: after going back, `delete` those after it.
        when_busy: What a save by interval does while the one before is not finished: "wait", "skip" (until
            the next interval) or "raise"; the same on all ranks. Last, forced and stopping saves wait.
        on_failure: A save that failed in spite of ``retries`` is logged, emitted as an event and counted in
            `failures`, and training continues ("warn"), unless the saves to come would fail as well: a state
            that cannot be saved (PlanError), ranks that do not come (CollectiveTimeoutError). `save` raises
            such an error, or with "raise" any, at the next call, on all ranks at the same step, and so do
            `wait` and `close`.
        retries: How often a save is tried again after an error of the storage.
        retry_pause_seconds: The pause before that, doubled each time; and before a restore asks a storage
            again that fails.
        verify_saved: After each commit, in the background, "sizes" sees to it that all files are there with
            the committed sizes, "full" reads all of their bytes again; "off" does neither. What is found is
            noted beside the checkpoint.
        handle_sigterm: SIGTERM on any rank makes the next `save` save and wait for the commit, and then sets
            `stop_requested`, on all ranks at the same step. A Python handler that was there is called too.
        grace_seconds: How long there is after a SIGTERM until the machine is gone; or a dict with that of
            several signals, and of files that appear: ``{signal.SIGUSR1: 120, "/run/preempted": 25}``. By
            then each save is committed or called off, with a part of the time kept to remove what it has
            written.
        weights: Names of entries that are saved first, alone, where that time may be too short for all of the
            state: ``"app.model"`` of what ``app.state_dict()`` has; () for none.
        name: Of a step's folder: a format with one field ``{step}``, or a function of the step; it must write
            the step in decimal digits.
        writer: Makes the writer of a checkpoint id, for its options: ``partial(FileSystemWriter,
            torch_compatible=False)``.
        planner: That of `dcp.async_save`.
        stager: That of `dcp.async_save`.
        run: A name that is stored with each checkpoint.
        on_event: Called with each `Event`, which also becomes a log record and a `torch.monitor` event.
        progress: A bar (True), or a function that gets `dcp.progress.Progress`.
        timeout_seconds: Bounds every wait for other ranks.
        agree_every_steps: Exchange with the other ranks whether to stop, or to save by the clock, only at
            each so many-th step.
        storage_options: For a ``root`` such as ``s3://bucket/run``, as for `dcp.save`. A ``writer`` that has
            options of its own keeps them.
        catalog: The service (``dcp serve``) that is notified of commits and deletions, in the background: its
            URL, or a `CatalogRegistration`. That it is away never slows or fails training.
        map: Each step is saved through it, as `dcp.save` does, and restored through its inverse: a run's
            steps are under another model definition's names. What the inverse does not lead back to is
            refused by the save.

    Raises:
        OptionError: An option is none of its choices, or cannot be meant.
        ModuleNotFoundError: ``catalog`` needs httpx, which is not there.
        CheckpointError: There are several ranks and no process group.
        CollectiveTimeoutError: Ranks did not answer in time.
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
        """Entries that are saved first before a deadline; () where there is none to come."""
        ranks = Ranks(
            process_group,
            use_dist=not self._no_dist,
            timeout_seconds=timeout_seconds,
            operation="CheckpointManager",
        )
        # what would leave ranks in different steps
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
            for option, choices in _CHOICES.items():
                if (given := {**alike, "verify_saved": verify_saved}[option]) not in get_args(choices):
                    known = ", ".join(repr(choice) for choice in get_args(choices))
                    raise OptionError(f"{option} must be one of {known}, not {given!r}")
            if not callable(self._make_writer):
                raise OptionError(
                    f"writer must be a function of a path that makes a storage, such as "
                    f"partial(dcp.FileSystemWriter, sync_files=False), not {writer!r}"
                )
            if stager is not None and not callable(getattr(stager, "stage", None)):
                raise OptionError(
                    f"stager must have a method stage(), as dcp.staging.DefaultStager, not {stager!r}"
                )
            if keep is not None and not isinstance(keep, Retention):
                raise OptionError(f"keep must be a Retention, such as Retention(last=3), not {keep!r}")
            weight_map = None if map is None else WeightMap.of(map)  # a file is read once
            notices = Notices(grace_seconds, handle_sigterm=handle_sigterm)
            self._opener = OpenWith(storage_options)
            self._folders = StepFolders(root, name, open_store=self._opener)
            place = self._folders.root.local_path
            if place is not None:
                with storage_step(None, "stat", place):
                    is_file = place.is_file()
                if is_file:
                    raise StorageError(f"{place} is not a folder, so no checkpoint can be stored in it")
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
        """Tell whether `save` would save this step; the same on all ranks, who all have to ask.

        For loops that prepare something for a save. It may still be skipped with ``when_busy="skip"``.

        Args:
            step: As for `save`.
            last: As for `save`.

        Returns:
            True if it would.

        Raises:
            OptionError: ``step`` is no whole number from 0.
            CheckpointError: The manager is closed; or what an earlier save raised (see ``on_failure``).
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
        """Save ``state_dict`` as the checkpoint of ``step`` if it is time for that; call it at every step.

        A step is saved by the interval, as the ``last``, because of a SIGTERM (then this waits for the
        commit), or with ``force``; all ranks alike. When this returns, the state may change; with ``overlap``
        it may only inside of `lock`.

        Args:
            step: Of the training; it names the checkpoint.
            state_dict: What `dcp.save` takes: `Stateful` objects (a model and optimizer in one, a data
                loader), tensors, plain values; `PerRank` around what differs by rank.
            metrics: Numbers by name, also tensors and arrays of no dimension; NaN is allowed. They are stored
                with the checkpoint and are what `Best` goes by. Those of rank 0 count; others that differ are
                a warning, once for each name.
            force: Save this step whatever the interval, also a step that is saved already.
            last: This is the last step of the run.
            overlap: Copy the state during the next forward and backward.
            user_metadata: More plain data to store; as for ``metrics``, rank 0's.

        Returns:
            The save's future, whose ``result()`` waits for the commit, or None if nothing is saved.

        Raises:
            CheckpointError: The manager is closed, or busy with ``when_busy="raise"``; or what an earlier
                save raised (see ``on_failure``).
            PlanError: ``state_dict`` is no dict.
            OptionError: A metric is no number, or ``user_metadata`` no plain data.
            OptionError: ``step`` is no whole number from 0, or a flag neither True nor False.
        """
        self._check_open()
        self._events.refuse_to_wait("save()")
        saver = self._saver
        step = saver.exchange(step, last=last, force=force)
        reason = self._coordinator.reason(step, last=last, force=force)
        if reason is None:
            check_state(state_dict, self._saved_first)  # not only once it is saved
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
        """Number of saves that have failed for good, and of checkpoints found damaged after them."""
        return self._saver.failures

    @plain_errors
    def request_stop(self) -> None:
        """Stop as at a SIGTERM: the next step's `save` saves, on all ranks, and sets `stop_requested`.

        One rank's call is enough. With several ranks it needs ``handle_sigterm``, or another reason for the
        ranks to exchange something at each step.

        Raises:
            CheckpointError: The manager is closed, or the ranks exchange nothing.
        """
        self._check_open()
        self._coordinator.request_stop()

    @property
    def stop_requested(self) -> bool:
        """True once the ranks have agreed to stop: `save` saves that step, and the loop ends after it."""
        return self._coordinator.stopping

    @plain_errors
    def cancel(self) -> bool:
        """Call off the save under way, and wait until it has ended; one rank's call, from any thread, is
        enough. It is no failure, and the next step that is due is saved.

        Returns:
            True if nothing of it is committed or left behind, on all ranks; False if it had committed by
            then, or none was under way.

        Raises:
            CheckpointError: In a callback that the save waits for.
        """
        self._events.refuse_to_wait("cancel()")
        ended = [future.cancel() for future in self._session.under_way()]
        self._saver.wait(self._options.timeout_seconds)
        return any(ended)

    def lock(self) -> AbstractContextManager[None]:
        """Hold ``optimizer.step()`` inside, where saves overlap with training: waits for a copy of the state
        that is being taken, and holds off the next one."""
        return self._session.lock()

    # -- restoring -------------------------------------------------------------------------------------------

    @plain_errors
    def restore(
        self, state_dict: dict[str, Any], step: int | None = None, **options: Unpack[LoadKeywords]
    ) -> Restored | None:
        """Load the newest good checkpoint into ``state_dict``, or that of ``step`` and no other; all ranks
        together. The next saves count from it.

        A damaged checkpoint is noted, an event says so, and an older one is taken; an older one than that of
        weights alone, too, unless ``only`` or ``step`` asks for what it has. Errors of the storage are
        retried and then raised, as all others are, rather than set training back.

        Args:
            state_dict: What was given to `save`.
            step: The step to restore, and no other.
            **options: Those of `dcp.load`: ``only`` and ``exclude`` for a part of the state, ``rename`` for
                other names, ``map`` where the steps are of another model definition (None: of this one),
                ``per_rank="keep"`` to resume on another number of ranks, ``dtype``, ``verify`` and so on.

        Returns:
            What was restored; None if nothing is committed: the run starts afresh.

        Raises:
            CorruptCheckpointError: There are steps, and none of them is whole.
            CheckpointNotFoundError: Nothing is committed at ``step``.
            CheckpointError: Others of `dcp.load`.
            OptionError: ``step`` is no whole number from 0.
        """
        self._check_open()
        self._events.refuse_to_wait("restore()")
        check_group(no_dist=self._no_dist)
        self._saver.settle(self._options.timeout_seconds)
        try:
            self._coordinator.meet()
        except PlanError as error:
            # other ranks save, and would wait in the background, elsewhere than this rank would
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
            # the saves that follow say so, as conversions say of their source
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
        """Return the path or URL by which `dcp.load` loads the checkpoint of ``step``, be there one or not.

        Args:
            step: Of the training.

        Returns:
            A path or URL.

        Raises:
            OptionError: ``step`` is no whole number from 0.
        """
        return self._folders.checkpoint_id(step)

    @plain_errors
    def all_steps(self) -> list[int]:
        """List the committed steps, ascending, as this process sees them on the storage; not those that are
        to be deleted.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return sorted(self._folders.committed().keys() - self._going())

    @plain_errors
    def latest(self) -> int | None:
        """Return the newest of `all_steps`; `restore` may find it damaged and take an older one.

        Returns:
            The step; None if nothing is committed.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return next(self._newest_first(), None)

    def _newest_first(self) -> Iterator[int]:
        return self._folders.newest_first(self._going())

    def _going(self) -> set[int]:
        return set() if self._after_commit is None else self._after_commit.deleting()

    @plain_errors
    def delete(self, step: int) -> None:
        """Delete the checkpoint of ``step`` in the background; gone from `all_steps` at once, or an error.

        Rank 0 acts, and other ranks need not call it.

        Args:
            step: Of `all_steps`.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointError: It is pinned, or being saved or verified, or the manager is closed.
            OptionError: ``step`` is no whole number from 0.
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
        """Keep ``step``, whatever `Retention` says. Rank 0 acts.

        Args:
            step: Of `all_steps`.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointError: The manager is closed.
        """
        self._set_pin(step, True)

    @plain_errors
    def unpin(self, step: int) -> None:
        """Leave ``step`` to `Retention` again, which looks at it after the next save. Rank 0 acts.

        Args:
            step: Of `all_steps`.

        Raises:
            CheckpointNotFoundError: There is none.
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
        """List the pinned ones of `all_steps`.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return sorted(set(self._folders.pinned()) - self._going())

    # -- the end ---------------------------------------------------------------------------------------------

    @plain_errors
    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for all saves, and on rank 0 for all verifications and deletions.

        Args:
            timeout_seconds: How long at most; None: no bound but their own.

        Returns:
            Whether all have ended.

        Raises:
            CheckpointError: What a save raised (see ``on_failure``), and with ``on_failure="raise"`` what was
                found damaged.
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
        """Wait for the saves under way and what follows them, then give everything back; idempotent.

        A save that has not ended by then is called off. All ranks close together. Leaving a ``with`` block
        closes, and so does the end of the interpreter; after an exception a save under way gets a minute,
        because other ranks may be dead.

        Args:
            timeout_seconds: How long at most; None is the manager's own.

        Raises:
            CheckpointError: What a save raised (see ``on_failure``), and with ``on_failure="raise"`` what was
                found damaged; or saves failed and none of this manager was ever committed. Not where a
                ``with`` block is left by an exception.
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
            where = f"{self._folders.root.url} is closed"
            raise CheckpointError(f"this manager of {where}; make another one (in a forked child too)")
        expects_no_group = self._no_dist and not self._may_be_alone and dist.is_available()
        if expects_no_group and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                "this manager was made before init_process_group(), so that each rank would save alone; make "
                "it after that, or with no_dist=True if it is meant"
            )

    def end_with_interpreter(self, *, failed: bool) -> None:
        """Close; where an exception has ended the program, ``failed``, as a with block does after one."""
        most = _AFTER_ERROR_SECONDS if failed else math.inf
        self._close(min(self._options.timeout_seconds, most), together=False)

    def leave_to_parent(self) -> None:
        """Close in a forked child, without a wait, or a lock that another thread may have held."""
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

_of_parent: list[CheckpointManager] = []  # kept: destructors would wait for threads of the parent


def _leave_all_to_parent() -> None:
    # A data loader's worker must not wait, when it ends, for a save that the training process carries out.
    _of_parent.extend(_open)
    for manager in _of_parent:
        manager.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _close_all() -> None:
    failed = getattr(sys, "last_value", None) is not None
    for manager in list(_open):
        manager.end_with_interpreter(failed=failed)


# Before the interpreter forbids new threads, and before sessions drain by the same means (what was registered
# last comes first: `dcp.background.session` is imported above), so that what follows a commit still happens,
# and the bound is the manager's.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
