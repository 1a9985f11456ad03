"""The stager: state into host memory that is allocated once, so that training can go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager as TorchDefaultStager
from torch.distributed.checkpoint.staging import StagingOptions

from dcp.planners.rank_state import RankState
from dcp.staging.copier import DictStaging, Memory, Slot, Staging, StateCopier
from dcp.staging.gate import Gate
from dcp.staging.guarding.guard import changed_error
from dcp.staging.guarding.samples import Guard
from dcp.staging.layout import SourceStructure
from dcp.staging.memory.arena import HostArena
from dcp.staging.pool import SlotPool
from dcp.staging.tree import StateTree
from dcp.storage.errors import StagingError
from dcp.storage.formats.index import Int64

__all__ = ["DefaultStager", "StagedState"]

_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, eq=False)
class StagedState:
    """A rank's state, copied or being copied into an arena.

    ``local`` is the state with views of the arena for its sources: on the CPU, contiguous, of the sources'
    shapes and dtypes, the same view for ties. ``offsets`` are their places in the arena in bytes, multiples
    of 64, by source. ``layout`` is equal for two states that have the same arena mapping, places, shapes and
    dtypes; no other staging of this process has its number. ``done`` ends when the copies are complete and
    were found to be true, with StagingError otherwise; ``seconds`` has "staging" from then on.
    """

    local: RankState
    offsets: Int64
    arena: HostArena
    layout: int
    done: Future[None] = field(default_factory=Future)
    seconds: dict[str, float] = field(default_factory=dict)
    _give_back: Callable[[], None] = field(default=lambda: None, repr=False)

    def release(self) -> None:
        """The arena may be used for another save, once nothing is copied into it any more; idempotent, from
        any thread."""
        self.done.add_done_callback(lambda _: self._give_back())


class DefaultStager(TorchDefaultStager):
    """Copies state to host memory that is allocated at the first save and used again by all others.

    ``config`` is torch's. What needs an accelerator (pinned memory, non-blocking copies, `stage` behind the
    caller's back) is ignored where there is none, where torch's stager raises. ``guard`` says how the copies
    are compared with the state: ``sampled`` (some bytes of every tensor), ``full`` (a CRC of all) or ``off``.
    ``threads`` copy host memory; by default as many as this process has cores for, eight at most.

    At most ``arenas`` saves are staged at once, each with memory of its own. ``process`` says that their
    memory is to be shared with a process that writes.

    One thread stages; the others may only release, lock and wait.
    """

    def __init__(
        self,
        config: StagingOptions | None = None,
        *,
        guard: Guard = "sampled",
        threads: int | None = None,
        arenas: int = 1,
        process: bool = False,
    ) -> None:
        # not torch's __init__, which takes threads and streams of its own, and refuses a machine without GPU
        self._config = config if config is not None else StagingOptions()
        self._process = process
        self._copier = StateCopier(guard, threads)
        self._gate = Gate()
        self._pool = SlotPool(arenas)
        self._arenas = arenas
        self._turns: deque[Slot] = deque()
        self._staged: Future[dict[str, Any]] | None = None
        # where torch's stager works without an accelerator, callers expect the future that it gives them
        works_in_torch = torch.accelerator.is_available() or not self._config.use_non_blocking_copy
        self._asynchronous = self._config.use_async_staging and works_in_torch
        self._background: ThreadPoolExecutor | None = None
        self._closed = False

    def stage_local(
        self,
        local: RankState,
        *,
        overlap: bool = False,
        shared: bool = False,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> StagedState:
        """Copy the sources of ``local`` into an arena; ``shared``: one that another process can map.

        Returns when the copies are complete, or with ``overlap`` at once, and then the state must not change
        until ``done`` of the result is, or inside of `lock`. Waits for an arena that a former save still has,
        at most ``timeout_seconds`` (StagingTimeoutError). A copy that is not what the state was is the error
        of ``done``; StagingMemoryError is raised when the host has not the memory.
        """
        begun = time.perf_counter()
        memory = Memory.for_sources(
            local.sources, shared=shared or self._process, pinned=self._config.use_pinned_memory
        )
        slot = self._pool.take(memory, timeout_seconds)
        give_back = self._pool.giving_back(slot)
        try:
            self._gate.begin_copying(timeout_seconds)
        except BaseException:
            give_back()
            raise
        try:
            structure_of = partial(SourceStructure.of_columns, local.columns)
            staging = self._copier.begin(slot, local.sources, structure_of)
            layout = staging.layout
            staged = StagedState(
                replace(local, memory=layout.memory),
                layout.offsets,
                slot.arena,
                layout.number,
                _give_back=give_back,
            )
            if overlap:
                self._behind().submit(self._finish, staging, staged, local, begun)
        except BaseException:
            self._gate.end_copying()
            give_back()
            raise
        if not overlap:
            self._finish(staging, staged, local, begun)
        return staged

    def _finish(self, staging: Staging, staged: StagedState, local: RankState, begun: float) -> None:
        error: BaseException | None = None
        try:
            wrong = staging.run()
            if wrong:
                error = changed_error(_fqns(local, wrong))
        except BaseException as failure:  # noqa: BLE001 - the future's, whatever it is
            error = failure
        staged.seconds["staging"] = time.perf_counter() - begun
        self._gate.end_copying()
        if error is None:
            staged.done.set_result(None)
        else:
            staged.done.set_exception(error)
            if not isinstance(error, Exception):
                staged.release()
                raise error  # an interrupt is the training thread's, which never sees the result

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any] | Future[dict[str, Any]]:
        """A copy of ``state_dict`` on the CPU, by torch's protocol: the same structure, with DTensors and
        ShardedTensors in their places, other values copied.

        With an accelerator and ``use_async_staging`` a future of it, and then the state must not change
        before that is done, or inside of `lock`. Raises StagingError (the future does) where the copy is not
        what the state was. The result is valid until ``arenas`` further calls, which use its memory again.
        ``kwargs`` are for torch's signature; nothing reads them.
        """
        if self._staged is not None:
            wait([self._staged], _TIMEOUT_SECONDS)  # it may still copy to the memory that is next
        self._gate.begin_copying(_TIMEOUT_SECONDS)
        try:
            tree = StateTree(state_dict)
            staging = self._copier.stage(self._next_slot(tree), tree)
            if self._asynchronous:
                self._staged = self._behind().submit(self._finish_dict, staging)
                return self._staged
        except BaseException:
            self._gate.end_copying()
            raise
        return self._finish_dict(staging)

    def synchronize_staging(self) -> None:
        """Wait for what `stage` has begun."""
        if self._staged is not None:
            self._staged.result(_TIMEOUT_SECONDS)

    def _finish_dict(self, staging: DictStaging) -> dict[str, Any]:
        try:
            return staging.run()
        finally:
            self._gate.end_copying()

    def _next_slot(self, tree: StateTree) -> Slot:
        """Where `stage` copies to; nobody says when a copy is not needed any more, so they take turns."""
        if self._closed:
            raise StagingError("this stager is closed")
        memory = Memory.for_sources(tree.sources, shared=False, pinned=self._config.use_pinned_memory)
        slot = self._turns.popleft() if len(self._turns) == self._arenas else None
        self._turns.append(Slot.of(slot, memory))
        return self._turns[-1]

    def lock(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> AbstractContextManager[None]:
        """To be held while the state changes (around ``optimizer.step()``) where stagings overlap.

        Entering waits for the staging under way, one that `stage_local` has begun before; a further one
        waits until the block is left. StagingTimeoutError after ``timeout_seconds``.
        """
        return self._gate.changing(timeout_seconds)

    def close(self) -> None:
        """Finish the copies under way, then let go of threads and memory; idempotent. Memory of saves that
        have not ended is kept until they release it."""
        self._closed = True
        if self._background is not None:
            self._background.shutdown()
            self._background = None
        self._copier.close()
        self._pool.close()
        while self._turns:
            self._turns.pop().close()

    def _behind(self) -> ThreadPoolExecutor:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="dcp-staging")
        return self._background


def _fqns(local: RankState, sources: list[int]) -> list[str]:
    """Names of the tensors that lie in these sources."""
    columns = local.columns
    wrong = set(sources)
    pairs = zip(columns.item_sources.tolist(), columns.item_tensors.tolist(), strict=True)
    return list(dict.fromkeys(columns.fqns[tensor] for source, tensor in pairs if source in wrong))
