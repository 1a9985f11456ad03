"""Stagers: state into host memory that is allocated once, so that training can continue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager as TorchBlockingAsyncStager
from torch.distributed.checkpoint.staging import DefaultStager as TorchDefaultStager
from torch.distributed.checkpoint.staging import StagingOptions

from dcp.planners.rank_state import RankState
from dcp.staging.arena import ArenaKind, HostArena
from dcp.staging.copies import Copier, Copying, Layout, Slot
from dcp.staging.guard import Guard, changed_error
from dcp.staging.tree import StateTree
from dcp.storage.errors import OptionError, StagingError
from dcp.storage.tensors import LocalMemory

_TIMEOUT_SECONDS = 1800.0


class StagingTimeoutError(StagingError, TimeoutError):
    """Staging waited longer than allowed, for a save that holds the memory or for other copies."""

    def __str__(self) -> str:  # OSError would show errno and strerror
        return Exception.__str__(self)


@dataclass(eq=False)
class StagedState:
    """A rank's part of a state, copied or being copied, into an arena by dcp's stager.

    ``done`` ends when the copies are complete and were found to be true, and gives the part, with
    StagingError otherwise; ``seconds`` has "staging" from then on. ``local`` is the part with views of the
    arena for its tensors: on the CPU, contiguous, of the same shapes and dtypes, the same view for ties.
    ``layout`` has their places in the arena; no other staging of this process has its number, but those with
    the same arena mapping, places, shapes and dtypes.
    """

    done: Future[Any] = field(default_factory=Future)
    local: Any = None
    arena: HostArena | None = None
    layout: Layout | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    give_back: Callable[[], None] = field(default=lambda: None, repr=False)

    @classmethod
    def failed(cls, error: BaseException) -> StagedState:
        """Make a part that stands for a state that could not be staged, so that the other ranks learn why."""
        staged = cls()
        staged.done.set_exception(error)
        return staged

    def release(self) -> None:
        """Give the arena back for another save, once nothing is copied into it any more; or drop the copy of
        another stager. Idempotent, from any thread."""
        if self.arena is None:
            self.done = Future()
        else:
            self.done.add_done_callback(lambda _: self.give_back())


class DefaultStager(TorchDefaultStager):
    """Copies state to host memory that is allocated at the first save and used again by all others.

    ``config`` is torch's. What needs an accelerator (pinned memory, non-blocking copies, `stage` behind the
    caller's back) is ignored where there is none, where torch's stager raises. ``guard`` says how the copies
    are compared with the state: ``sampled`` (some bytes of every tensor), ``full`` (a CRC of all) or ``off``.
    ``threads`` copy host memory; by default as many as this process has cores for, eight at most.

    At most ``arenas`` saves are staged at once, each with memory of its own.

    One thread stages; the others may only release, lock and wait.
    """

    def __init__(
        self,
        config: StagingOptions | None = None,
        *,
        guard: Guard = "sampled",
        threads: int | None = None,
        arenas: int = 1,
    ) -> None:
        # not torch's __init__, which takes threads and streams of its own, and refuses a machine without GPU
        self._config = config if config is not None else StagingOptions()
        self._copier = Copier(guard, threads)
        self._arenas = _Arenas(arenas)
        self._turns: deque[StagedState] = deque()
        # where torch's stager works without an accelerator, callers expect the future that it gives them
        works_in_torch = torch.accelerator.is_available() or not self._config.use_non_blocking_copy
        self._asynchronous = self._config.use_async_staging and works_in_torch
        self._background: ThreadPoolExecutor | None = None
        self._type_check = False

    def stage_local(
        self,
        local: RankState | dict[str, Any],
        *,
        overlap: bool = False,
        shared: bool = False,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> StagedState:
        """Copy the tensors of ``local`` into an arena; ``shared``: one that another process can map.

        Returns when the copies are complete, or with ``overlap`` at once, and then the state must not change
        until ``done`` of the result is, or inside of `lock`. Waits for an arena that a former save still has,
        at most ``timeout_seconds`` (StagingTimeoutError). A copy that is not what the state was is the error
        of ``done``; StagingMemoryError is raised when the host has not the memory. The oldest result of
        `stage` gives up its memory for this, where all arenas are such results'.
        """
        if len(self._turns) == self._arenas.limit:
            self._turns.popleft().release()
        if isinstance(local, RankState):
            return self._copied(_Columns(local), overlap, shared, timeout_seconds)
        with self._arenas.copying(timeout_seconds):  # the tree copies what is not strided
            tree = StateTree(local, type_check=self._type_check)
            return self._copied(tree, overlap, shared, timeout_seconds)

    def _copied(
        self, state: _Columns | StateTree, overlap: bool, shared: bool, timeout_seconds: float
    ) -> StagedState:
        begun = time.perf_counter()
        # page-locked for sources on a device
        pinned = (
            self._config.use_pinned_memory
            and torch.accelerator.is_available()
            and not all(tensor.is_cpu for tensor in state.memory.tensors)
        )
        slot, give_back = self._arenas.take("shared" if shared else "private", pinned, timeout_seconds)
        try:
            copying = self._copier.begin(slot, state.memory)
            local = state.copied(copying.layout.memory)
            staged = StagedState(local=local, arena=slot.arena, layout=copying.layout, give_back=give_back)
            finish = partial(self._finish, copying, staged, state.fqns, begun)
            if overlap:
                if self._background is None:
                    self._background = ThreadPoolExecutor(1, thread_name_prefix="dcp-staging")
                self._background.submit(finish)
        except BaseException:
            self._arenas.end_copying()
            give_back()
            raise
        if not overlap:
            finish()
        return staged

    def _finish(
        self, copying: Copying, staged: StagedState, names: Callable[[Sequence[int]], list[str]], begun: float
    ) -> None:
        error: BaseException | None = None
        try:
            wrong = copying.run()
            if wrong:
                error = changed_error(names(wrong))
        except BaseException as failure:  # noqa: BLE001 - the future's, whatever it is
            error = failure
        staged.seconds["staging"] = time.perf_counter() - begun
        self._arenas.end_copying()
        if error is None:
            staged.done.set_result(staged.local)
            return
        staged.done.set_exception(error)
        if not isinstance(error, Exception):
            staged.release()
            raise error  # an interrupt is the training thread's, which never sees the result

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copy ``state_dict`` to the CPU, by torch's protocol: the same structure, with DTensors and
        ShardedTensors in their places, other values copied.

        With an accelerator and ``use_async_staging`` a future of it, and then the state must not change
        before that is done, or inside of `lock`. Raises StagingError (the future does) where the copy is not
        what the state was. The result is valid until ``arenas`` further calls, which use its memory again.
        ``kwargs`` are for torch's signature; nothing reads them.
        """
        # torch does not say when a copy is not needed any more, so they take turns
        staged = self.stage_local(state_dict, overlap=self._asynchronous)
        self._turns.append(staged)
        if self._asynchronous:
            return staged.done
        copied: dict[str, Any] = staged.done.result()
        return copied

    def synchronize_staging(self) -> None:
        """Wait for what `stage` has begun."""
        if self._turns and self._asynchronous:
            self._turns[-1].done.result(_TIMEOUT_SECONDS)

    def lock(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> AbstractContextManager[None]:
        """Hold this while the state changes (around ``optimizer.step()``) where stagings overlap.

        Entering waits for the staging under way, one that `stage_local` has begun before; a further one
        waits until the block is left. StagingTimeoutError after ``timeout_seconds``.
        """
        return self._arenas.changing(timeout_seconds)

    def close(self) -> None:
        """Finish the copies under way, then let go of threads and memory; idempotent. Memory of saves that
        have not ended is kept until they release it."""
        if self._background is not None:
            self._background.shutdown()
            self._background = None
        self._copier.close()
        self._arenas.close()
        while self._turns:
            self._turns.pop().release()


class BlockingAsyncStager(TorchBlockingAsyncStager):
    """Copies the state dict to the CPU before `stage` returns.

    ``cache_staged_state_dict`` keeps the memory (with an accelerator page-locked) for the next copy, which
    then overwrites this one. Otherwise each copy has memory of its own, which goes with its tensors.
    ``type_check`` refuses values other than tensors, numbers, strings, bytes, dicts, lists, tuples.

    A copy that is not what the state was when it was asked for is a StagingError.
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        super().__init__(cache_staged_state_dict, type_check)
        self._kept: DefaultStager | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy ``state_dict`` to the CPU."""
        kept = self.cache_staged_state_dict
        stager = self._kept or DefaultStager(StagingOptions(kept, False, False, False))
        stager._type_check = self.type_check
        staged = stager.stage_local(state_dict)
        staged.release()
        if kept:
            self._kept = stager
        else:
            stager.close()
        copied: dict[str, Any] = staged.done.result()
        if kept:
            self.state_dict_cache = copied
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has waited."""

    def close(self) -> None:
        """Let go of threads and kept memory; idempotent. Copies that were given out stay valid."""
        self.state_dict_cache = None
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class _Arenas:
    """The few arenas of a stager, each for one save at a time, and the gate between copies of the state and
    its changes: any number of copies, or any number of changers, at a time.

    Arenas are taken by one thread and given back by any.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise OptionError(f"a stager needs at least one arena, not {limit}")
        self.limit = limit
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._taken = 0
        self._closed = False
        self._copying = 0
        self._changers: list[int] = []

    def take(
        self, kind: ArenaKind, page_locked: bool, timeout_seconds: float
    ) -> tuple[Slot, Callable[[], None]]:
        """Take an arena of that kind that is free, the one given back last, since its views may fit; and
        begin to copy. The function gives it back, once, however often it is called.

        Raises StagingTimeoutError when all are in use for so long.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._taken < self.limit, timeout_seconds):
                raise StagingTimeoutError(
                    f"{self._taken} staged saves were not written within {timeout_seconds:g} s, and hold all "
                    "host memory that this stager may use; wait for their futures, save less often, or "
                    "give it more arenas",
                    timeout_seconds=timeout_seconds,
                )
            if self._closed:
                raise StagingError("this stager is closed")
            self.begin_copying(timeout_seconds)
            slot = self._free.pop() if self._free else None
            if slot is None or (slot.arena.kind, slot.arena.page_locked) != (kind, page_locked):
                if slot is not None:
                    slot.close()
                try:
                    slot = Slot(HostArena(kind, page_locked=page_locked))
                except BaseException:
                    self.end_copying()
                    raise
            self._taken += 1
            held = [slot]

        def give_back() -> None:
            with self._changed:
                if not held:
                    return
                held.clear()
                self._taken -= 1
                if self._closed:
                    slot.close()
                else:
                    self._free.append(slot)
                self._changed.notify_all()

        return slot, give_back

    def begin_copying(self, timeout_seconds: float) -> None:
        """Wait until nothing changes the state, and keep changers out until `end_copying`.

        Raises StagingError in a thread that is a changer itself: it would wait for ever.
        """
        with self._changed:
            if threading.get_ident() in self._changers:
                raise StagingError(
                    "a save was begun inside of lock() by the thread that holds it; begin it outside"
                )
            if not self._changed.wait_for(lambda: not self._changers, timeout_seconds):
                raise StagingTimeoutError(
                    f"lock() was held for {timeout_seconds:g} s, so that staging could not begin; hold it "
                    "around optimizer.step() only",
                    timeout_seconds=timeout_seconds,
                )
            self._copying += 1

    def end_copying(self) -> None:
        """Note that the copies are there, or were given up; from any thread."""
        with self._changed:
            self._copying -= 1
            self._changed.notify_all()

    @contextmanager
    def copying(self, timeout_seconds: float) -> Iterator[None]:
        """Enclose `begin_copying` and `end_copying`."""
        self.begin_copying(timeout_seconds)
        try:
            yield
        finally:
            self.end_copying()

    @contextmanager
    def changing(self, timeout_seconds: float) -> Iterator[None]:
        """Wait for stagings under way; the next ones wait until the block is left."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copying, timeout_seconds):
                raise StagingTimeoutError(
                    f"a staging is not complete after {timeout_seconds:g} s, so the state must not change",
                    timeout_seconds=timeout_seconds,
                )
            self._changers.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._changers.remove(threading.get_ident())
                self._changed.notify_all()

    def close(self) -> None:
        """Let go of the arenas; those in use follow when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            for slot in self._free:
                slot.close()
            self._free.clear()
            self._changed.notify_all()


class _Columns:
    """A rank's state on columns, with the interface of `StateTree`."""

    def __init__(self, local: RankState) -> None:
        self._local, self.memory = local, local.memory

    def copied(self, memory: LocalMemory) -> RankState:
        """Return the state with ``memory`` in the places of the sources."""
        return replace(self._local, memory=memory)

    def fqns(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of the tensors that lie in these sources."""
        columns = self._local.columns
        wrong = np.flatnonzero(np.isin(columns.item_sources, numbers))
        return [columns.fqns[tensor] for tensor in columns.item_tensors[wrong].tolist()]
