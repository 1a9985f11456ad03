"""Sessions: resources of asynchronous saves, namely a stager, a writer (thread or process), a gloo group and
a plan cache.

Sessions share no resources, so several managers in one process are independent.
"""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import signal
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageWriter

from dcp.background.writers import RefusedWriter, SaveFuture, ThreadWriter, own_client
from dcp.calls.arguments import stateful_to_plain, with_own_id, works_alone
from dcp.engines.run import make_save, refused_save
from dcp.planners.rank_state import RankState
from dcp.progress import harmless
from dcp.ranks.agreement import begin, raise_on_all_ranks
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.saving.save import Save, SaveOptions, SavingRank
from dcp.staging.guard import check_staged, sample_state
from dcp.staging.stager import DefaultStager, StagedState
from dcp.storage.errors import CheckpointError, OptionError, StagingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner

    from dcp.background.process_writer import ProcessWriter

logger = logging.getLogger(__name__)


class AsyncSession:
    """Asynchronous saves of one process group, in order.

    All ranks of the group make the session and its saves. ``kind`` selects a writer thread or process. At
    most ``in_flight`` saves run; `save` then waits for the oldest. The constructor is collective. ``start``
    starts the writer process at once. A forked child has no worker threads; the session is closed there.
    """

    ends_at_once = False

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        no_dist: bool = False,
        kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        stager: AsyncStager | None = None,
        in_flight: int = 1,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        start: bool = False,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        channel: Channel | None = None
        if not works_alone(process_group, no_dist=no_dist, operation="save"):
            shared = Ranks(
                process_group, use_dist=True, timeout_seconds=timeout_seconds, operation="async_save"
            )
            channel = own_channel(shared, manner=[kind.value])
        self.rank, self.world_size = (0, 1) if channel is None else (channel.rank, channel.world_size)
        self._in_flight = in_flight
        self._in_process = kind is AsyncCheckpointerType.PROCESS
        self._own_stager = DefaultStager(arenas=in_flight)
        self._stager = self._own_stager if stager is None else stager
        self._serial = 0
        self._closed = False
        self._unfinished: dict[Future[Any], SaveFuture] = {}  # oldest first
        self._worker: ThreadWriter | ProcessWriter
        if self._in_process:
            from dcp.background.process_writer import ProcessWriter

            self._worker = ProcessWriter(channel, timeout_seconds=timeout_seconds, start=start)
        else:  # no reference to self, which would keep it alive
            use_dist = channel is not None
            ranks_for = partial(Ranks, use_dist=use_dist, channel=channel, timeout_seconds=timeout_seconds)
            self._worker = ThreadWriter(ranks_for)
        # An unclosed session may be dropped with its group; its thread or process then ends.
        self._finalizer = weakref.finalize(self, self._worker.close, 0.0)
        self._finalizer.atexit = False
        _open_sessions.add(self)

    # -- saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        state_dict: dict[str, Any],
        *,
        storage_writer: StorageWriter,
        planner: SavePlanner | None = None,
        options: SaveOptions | None = None,
        overlap: bool = False,
        stager: AsyncStager | None = None,
    ) -> SaveFuture:
        """Stage ``state_dict`` and save the copy in the background.

        Returns when the state may change again. With ``overlap``, returns at once: the state must not change
        before ``staging_completion`` of the result is done (see `DefaultStager.lock`). Invalid arguments
        raise here. All later errors, including errors of staging, are raised by the future on all ranks.
        ``stager`` replaces the session's stager for this save. A ``progress`` callback may raise; the timeout
        is the session's.
        """
        if self._closed:
            raise CheckpointError("this session is closed, or was opened before a fork; open a new session")
        options = self._options_of(options if options is not None else SaveOptions())
        with self.raise_on_all_ranks():
            order = make_save(with_own_id(storage_writer), planner, options)
        self._wait_until_left(self._in_flight - 1)
        self._serial += 1
        order.serial = self._serial
        future = SaveFuture(getattr(order.writer, "checkpoint_id", None) or "")
        begun = time.perf_counter()
        try:
            payload = self._stage(order, state_dict, stager, overlap)
        except Exception as error:  # noqa: BLE001 - raised by the future, and on the other ranks too
            payload = StagedState.failed(error)
        except BaseException as interrupt:  # raised here as well, once the other ranks know
            refused = StagingError(f"staging was interrupted by {type(interrupt).__name__}")
            self._hand_over(order, StagedState.failed(refused), future)
            raise
        order.seconds["blocked"] = time.perf_counter() - begun
        self._hand_over(order, payload, future)
        return future

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raise an exception of this block on all ranks, as the failure of the save that the other ranks
        begin.
        """
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def refuse(self, error: Exception, options: SaveOptions | None = None) -> None:
        """Fail the save that the other ranks begin with ``options``: raise ``error`` on all ranks."""
        if self.world_size == 1 or self._closed:
            return
        self._wait_until_left(self._in_flight - 1)
        self._serial += 1
        order = refused_save(RefusedWriter(error), self._options_of(options or SaveOptions()), self._serial)
        self._hand_over(order, StagedState.failed(error), SaveFuture("an invalid checkpoint_id"))

    def _options_of(self, options: SaveOptions) -> SaveOptions:
        """Return ``options`` with callbacks that cannot fail the save."""
        progress = harmless(options.progress) if callable(options.progress) else options.progress
        return replace(options, progress=progress, timeout_seconds=self.timeout_seconds)

    def _hand_over(self, order: Save, payload: StagedState, future: SaveFuture) -> None:
        with _interrupts_later():
            self._unfinished[future] = future
            future.add_done_callback(self._ended)
            payload.done.add_done_callback(future.staging_ended)
            try:
                self._worker.submit(order, payload, future)
            except BaseException as error:
                payload.release()
                future.set_exception(error)  # another thread may wait for the end of a cancelled save
                raise

    def _stage(
        self, order: Save, state_dict: dict[str, Any], stager: AsyncStager | None, overlap: bool
    ) -> StagedState:
        if order.storage is not None:
            order.storage.stay_here()
        chosen = self._stager if stager is None else stager
        state = stateful_to_plain(state_dict)

        def part(state: dict[str, Any]) -> Any:
            own = order.held(state, SavingRank(self.rank, self.world_size, self.rank == 0))
            return own.encoded() if isinstance(own, RankState) else own

        if isinstance(chosen, DefaultStager) and type(chosen).stage is DefaultStager.stage:
            return chosen.stage_local(part(state), overlap=overlap, shared=self._in_process)
        if not self._in_process:
            self._wait_until_left(0)  # a custom stager's copy may have any location and lifetime
            return StagedState(_staged_by(chosen, state, part))
        # another process cannot read the copy of a custom stager
        staged = _staged_by(chosen, state, part).result(self.timeout_seconds)
        return self._own_stager.stage_local(staged, shared=True)

    def lock(self) -> AbstractContextManager[None]:
        """Return a context manager for ``optimizer.step()``: waits for an overlapping copy and delays the
        next one.
        """
        return self._stager.lock() if isinstance(self._stager, DefaultStager) else nullcontext()

    # -- waiting ---------------------------------------------------------------------------------------------

    def under_way(self) -> list[SaveFuture]:
        """List the running saves."""
        return [save for save in list(self._unfinished.values()) if not save.done()]

    def wait(self, timeout_seconds: float | None = None, *, left: int = 0) -> bool:
        """Wait for all saves but the latest ``left``; return False on timeout."""
        saves = self.under_way()
        return not wait(saves[: max(0, len(saves) - left)], timeout_seconds).not_done

    def _wait_until_left(self, count: int) -> None:
        if not self.wait(self.timeout_seconds, left=count):
            raise CheckpointError(
                f"{len(self._unfinished)} saves have not ended within {self.timeout_seconds:g} s, so the "
                "next save cannot begin: check their futures, or increase timeout_seconds"
            )

    def _ended(self, future: Future[Any]) -> None:
        save, error = self._unfinished.pop(future, None), future.exception()
        if save is not None and error is not None:
            committed = isinstance(error, CheckpointError) and error.committed
            what = "is committed, but a later step failed" if committed else "failed"
            logger.error("asynchronous save to %s %s: %s", save.checkpoint_id, what, error)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait for running saves, then release thread or process, group and memory. Idempotent.

        Saves that do not end within ``timeout_seconds`` (the session's timeout by default) are cancelled and
        reported.
        """
        if self._closed:
            return
        self._closed = True
        _open_sessions.discard(self)
        bound = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + bound
        if not self.wait(bound):
            late = self.under_way()
            logger.error("%d saves have not ended within %g s and are aborted", len(late), bound)
            for future in late:
                future.abort()
        self._finalizer.detach()
        self._worker.close(max(1.0, deadline - time.monotonic()))
        self._own_stager.close()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of the block, so that a save is handed over completely."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            former(*came[0])


def own_channel(
    shared: Ranks, *, manner: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> Channel | None:
    """Make a gloo group of the ``shared`` ranks over their store; None for one rank. Collective.

    Saves run beside the training's collectives, and two threads must not share a group.
    """
    begin(shared, lambda: "", manner=manner, options=options)
    if shared.world_size == 1:
        return None
    # torchrun keeps its store, with addresses of dead workers, when it restarts workers.
    token = shared.broadcast("meet", lambda: uuid.uuid4().hex.encode()).decode()
    # a separate connection, because training may block its connection, as new_group does
    store = dist.PrefixStore(f"{shared.key}/{token}", own_client(shared.store))
    rank, world_size = shared.rank, shared.world_size
    return shared.form(
        "form a group", lambda seconds: Channel.own_gloo(store, rank, world_size, timeout_seconds=seconds)
    )


def _staged_by(
    stager: AsyncStager, state: dict[str, Any], then: Callable[[dict[str, Any]], Any]
) -> Future[Any]:
    """Apply ``then`` to the copy of a custom stager, after the copy is complete and checked."""
    samples = sample_state(state)
    done: Future[Any] = Future()

    def finish(staged: Future[dict[str, Any]]) -> None:
        try:
            check_staged(state, staged.result(), samples)
            done.set_result(then(staged.result()))
        except BaseException as error:  # noqa: BLE001 - raised where the save wants the copy
            done.set_exception(error)

    staged = stager.stage(state)
    if isinstance(staged, Future):
        staged.add_done_callback(finish)
        return done
    if stager.should_synchronize_after_execute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a warning for direct callers of torch
            stager.synchronize_staging()
    copied: Future[dict[str, Any]] = Future()
    copied.set_result(staged)
    finish(copied)
    return done


# -- sessions of plain async_save calls ----------------------------------------------------------------------

_open_sessions: weakref.WeakSet[AsyncSession] = weakref.WeakSet()

_of_groups: weakref.WeakKeyDictionary[Any, dict[AsyncCheckpointerType, AsyncSession]] = (
    weakref.WeakKeyDictionary()
)
_alone: dict[AsyncCheckpointerType, AsyncSession] = {}

_IN_FLIGHT = 2
"""Maximum number of concurrent `async_save` calls; each has its own host buffers."""


def default_session(
    process_group: ProcessGroup | None, *, no_dist: bool, kind: AsyncCheckpointerType
) -> AsyncSession:
    """Return the session of `dcp.async_save` for a process group: buffers and writer are kept for the next
    call."""
    if works_alone(process_group, no_dist=no_dist, operation="save"):
        sessions, group = _alone, None
    else:
        group = process_group if process_group is not None else dist.group.WORLD
        # the group of a non-member is not hashable, and refused below
        sessions = _of_groups.setdefault(group, {}) if isinstance(group, dist.ProcessGroup) else {}
    kind = _known_kind(kind, group, sessions)
    session = sessions.get(kind)
    if session is None:
        session = AsyncSession(group, no_dist=group is None, kind=kind, in_flight=_IN_FLIGHT)
        sessions[kind] = session
    return session


def _known_kind(
    kind: object, group: ProcessGroup | None, sessions: Mapping[AsyncCheckpointerType, AsyncSession]
) -> AsyncCheckpointerType:
    """Return ``kind``. Raises OptionError for another value, on all ranks.

    The other ranks raise in the first step of a new session, or in the save of the only existing one.
    """
    try:
        return AsyncCheckpointerType(kind)
    except ValueError as error:
        choices = ", ".join(repr(known.value) for known in AsyncCheckpointerType)
        refused = OptionError(f"async_checkpointer_type must be one of {choices}, not {kind!r}")
        if len(sessions) == 1:
            next(iter(sessions.values())).refuse(refused)
        if sessions or group is None:
            raise refused from error
        with raise_on_all_ranks(Ranks(group, use_dist=True, operation="async_save")):
            raise refused from error


def _drain_all() -> None:
    for session in list(_open_sessions):
        session.close()
    # Abandon threads of a hanging storage; concurrent.futures would wait forever.
    threads: dict[threading.Thread, object] = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in list(threads):
        if thread.daemon and thread.name.startswith("dcp"):
            del threads[thread]


_of_parent: list[AsyncSession] = []
"""Objects kept in a forked child, whose destructors would wait for missing threads."""


def _leave_all_to_parent() -> None:
    # A data loader's worker must neither wait for the parent's save nor use its writer.
    _of_parent.extend(_open_sessions)
    for session in _of_parent:
        session._closed, session._unfinished = True, {}
        session._finalizer.detach()
    _open_sessions.clear()
    _of_groups.clear()
    _alone.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)

# Register with threading: atexit callbacks run after the interpreter forbids new threads, which a running
# save may still start. concurrent.futures ends its threads in the same way, afterwards.
threading._register_atexit(_drain_all)  # type: ignore[attr-defined]
