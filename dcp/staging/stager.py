"""Stagers: copy a state into reused host memory so that training can continue."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager as TorchBlockingAsyncStager
from torch.distributed.checkpoint.staging import DefaultStager as TorchDefaultStager
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.tensor import DTensor

from dcp.planners.columns import SaveColumns
from dcp.planners.layout.local_tensor import claim_of, with_claim
from dcp.planners.per_rank import PerRank
from dcp.planners.rank_state import RankState
from dcp.staging.arena import ArenaKind, HostArena
from dcp.staging.copies import Copier, Copying, Layout
from dcp.staging.guard import Guard, changed_error
from dcp.storage import torch_compat
from dcp.storage.errors import OptionError, PlanError, StagingError
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_compat import AsyncCollectiveTensor, Shard, ShardedTensor

_TIMEOUT_SECONDS = 1800.0

_Make = Callable[[Sequence[torch.Tensor]], Any]
_Path = tuple[Any, ...]
_CPU = torch.device("cpu")
_VALUES = (int, float, complex, str, bytes, type(None), io.BytesIO)
_PLAIN_VALUES = (*_VALUES, torch.Size, torch.dtype, torch.device)


class StagingTimeoutError(StagingError, TimeoutError):
    """Staging timed out waiting for memory held by a save or for another copy."""

    def __str__(self) -> str:  # OSError would show errno and strerror
        return Exception.__str__(self)


@dataclass(eq=False)
class StagedState:
    """State of a rank, copied or being copied into an arena by dcp's stager.

    ``done`` completes with the copied part after the check, or with StagingError; ``seconds`` then has
    "staging". ``local`` is the part with contiguous CPU views of the arena; tied tensors share a view.
    ``layout`` has the places in the arena; its number identifies mapping, places, shapes and dtypes.
    """

    done: Future[Any] = field(default_factory=Future)
    local: Any = None
    arena: HostArena | None = None
    layout: Layout | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    give_back: Callable[[], None] = field(default=lambda: None, repr=False)

    @classmethod
    def failed(cls, error: BaseException) -> StagedState:
        """Return a stand-in for a failed staging, so that other ranks learn the reason."""
        staged = cls()
        staged.done.set_exception(error)
        return staged

    def release(self) -> None:
        """Return the arena after the copy has ended, or drop the copy of a custom stager. Idempotent,
        thread-safe.
        """
        if self.arena is None:
            self.done = Future()
        else:
            self.done.add_done_callback(lambda _: self.give_back())


class DefaultStager(TorchDefaultStager):
    """Copy state to host memory that is allocated by the first save and reused.

    Args:
        config: torch's `StagingOptions`. Options for accelerators are ignored without one; torch raises.
        guard: Check of copies: "sampled" (some bytes of every tensor), "full" (a CRC of all bytes) or "off".
        threads: Threads for copies of host memory; by default the available cores, at most eight.
        arenas: Maximum number of staged saves, each with its own memory.

    Either copies or threads that change the state run at a time. One thread stages; other threads may only
    release, lock and wait.
    """

    def __init__(
        self,
        config: StagingOptions | None = None,
        *,
        guard: Guard = "sampled",
        threads: int | None = None,
        arenas: int = 1,
    ) -> None:
        # skips torch's __init__, which starts threads and requires a GPU
        if arenas < 1:
            raise OptionError(f"a stager needs at least one arena, not {arenas}")
        self._config = config if config is not None else StagingOptions()
        self._copier = Copier(guard, threads)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="dcp-staging")
        self._results: deque[StagedState] = deque()  # of `stage`
        # torch's stager returns a future here, which callers expect
        works_in_torch = torch.accelerator.is_available() or not self._config.use_non_blocking_copy
        self._asynchronous = self._config.use_async_staging and works_in_torch
        self._type_check = False
        self._most = arenas
        self._changed = threading.Condition()
        self._free: list[HostArena] = []
        # turns are limited, not arenas: an unreleased arena is freed with its views
        self._taken: set[object] = set()
        self._closed = False
        self._copying = 0
        self._changers: list[int] = []

    def stage_local(
        self,
        local: RankState | dict[str, Any],
        *,
        overlap: bool = False,
        shared: bool = False,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> StagedState:
        """Copy the tensors of ``local`` into an arena; with ``shared``, into memory that another process can
        map.

        Returns after the copy, or with ``overlap`` at once; the state must then not change until ``done``,
        except inside `lock`. Waits for an arena up to ``timeout_seconds`` (StagingTimeoutError). Raises
        StagingMemoryError if memory is short. ``done`` raises an error for a copy that differs. If all arenas
        belong to results of `stage`, the oldest one is reused.
        """
        if len(self._results) == self._most:
            self._results.popleft().release()
        begun, turn = time.perf_counter(), object()
        arena: HostArena | None = None
        self._begin(turn, timeout_seconds)
        try:
            copied: Callable[..., Any]
            fqns: Callable[[Sequence[int]], list[str]]
            if isinstance(local, RankState):
                memory, copied, fqns = local.memory, partial(replace, local), partial(_fqns_in, local.columns)
            else:  # the tree copies tensors without strides
                tree = StateTree(local, type_check=self._type_check)
                memory, copied, fqns = tree.memory, tree.copied, tree.fqns
            arena = self._arena("shared" if shared else "private", memory)
            copying = Copying(self._copier, arena, memory)
            staged = StagedState(
                local=copied(memory=copying.layout.memory),
                arena=arena,
                layout=copying.layout,
                give_back=partial(self._give_back, turn, arena),
            )
            finish = partial(self._finish, copying, staged, fqns, begun)
            if overlap:
                self._background.submit(finish)
        except BaseException:
            self._end_copying()
            self._give_back(turn, arena)
            raise
        if not overlap:
            finish()
        return staged

    def _begin(self, turn: object, timeout_seconds: float) -> None:
        """Wait for an arena and for the end of changes to the state, and block changes until `_end_copying`.

        Raises StagingError in a thread that holds `lock`, which would deadlock.
        """
        with self._changed:
            if threading.get_ident() in self._changers:
                raise StagingError(
                    "a save was started inside of lock() by the same thread; start saves outside of lock()"
                )
            if not self._changed.wait_for(
                lambda: self._closed or len(self._taken) < self._most, timeout_seconds
            ):
                raise StagingTimeoutError(
                    f"{len(self._taken)} staged saves were not written within {timeout_seconds:g} s, and "
                    "use all host memory of this stager; wait for their futures, save less often, or "
                    "increase arenas=",
                    timeout_seconds=timeout_seconds,
                )
            if self._closed:
                raise StagingError("this stager is closed")
            if not self._changed.wait_for(lambda: not self._changers, timeout_seconds):
                raise StagingTimeoutError(
                    f"lock() was held for {timeout_seconds:g} s, so staging could not begin; hold the lock "
                    "around optimizer.step() only",
                    timeout_seconds=timeout_seconds,
                )
            self._copying += 1
            self._taken.add(turn)

    def _arena(self, kind: ArenaKind, memory: LocalMemory) -> HostArena:
        """Return the free arena that was released last, whose views may fit."""
        # page-locked for sources on a device
        pinned = (
            self._config.use_pinned_memory
            and torch.accelerator.is_available()
            and not all(tensor.is_cpu for tensor in memory.tensors)
        )
        with self._changed:
            arena = self._free.pop() if self._free else None
            if arena is None or (arena.kind, arena.page_locked) != (kind, pinned):
                if arena is not None:
                    arena.close()
                arena = HostArena(kind, page_locked=pinned)
            return arena

    def _give_back(self, turn: object, arena: HostArena | None) -> None:
        with self._changed:
            if turn in self._taken and arena is not None:
                if self._closed:
                    arena.close()
                else:
                    self._free.append(arena)
            self._taken.discard(turn)
            self._changed.notify_all()

    def _end_copying(self) -> None:
        with self._changed:
            self._copying -= 1
            self._changed.notify_all()

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
        self._end_copying()
        if error is None:
            staged.done.set_result(staged.local)
            return
        staged.done.set_exception(error)
        if not isinstance(error, Exception):
            staged.release()
            raise error  # an interrupt ends the training thread, which never uses the result

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copy ``state_dict`` to the CPU, by torch's protocol: equal structure, with DTensors and
        ShardedTensors.

        With an accelerator and ``use_async_staging``, returns a future; the state must not change before it
        is done, except inside `lock`. Raises StagingError if the copy differs. The result stays valid for
        ``arenas`` further calls. ``kwargs`` are unused.
        """
        # torch does not report the end of a copy's use, so arenas rotate
        staged = self.stage_local(state_dict, overlap=self._asynchronous)
        self._results.append(staged)
        if self._asynchronous:
            return staged.done
        copied: dict[str, Any] = staged.done.result()
        return copied

    def synchronize_staging(self) -> None:
        """Wait for the copies begun by `stage`."""
        if self._results and self._asynchronous:
            self._results[-1].done.result(_TIMEOUT_SECONDS)

    @contextmanager
    def lock(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> Iterator[None]:
        """Return a context manager to change the state (such as ``optimizer.step()``) with overlapping
        copies.

        Entering waits for earlier copies; later copies wait for the exit. Raises StagingTimeoutError after
        ``timeout_seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copying, timeout_seconds):
                raise StagingTimeoutError(
                    f"staging has not ended after {timeout_seconds:g} s, so the state must not change yet",
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
        """Finish running copies, then release threads and memory. Idempotent. Memory of running saves is kept
        until released.
        """
        self._background.shutdown()
        self._copier.close()
        with self._changed:
            self._closed = True
            while self._free:
                self._free.pop().close()
            self._changed.notify_all()
        while self._results:
            self._results.pop().release()


def _fqns_in(columns: SaveColumns, numbers: Sequence[int]) -> list[str]:
    """Return the names of the tensors in these sources."""
    wrong = np.flatnonzero(np.isin(columns.item_sources, numbers))
    return [columns.fqns[tensor] for tensor in columns.item_tensors[wrong].tolist()]


class BlockingAsyncStager(TorchBlockingAsyncStager):
    """Copy the state dict to the CPU before `stage` returns.

    Args:
        cache_staged_state_dict: Reuse the memory (page-locked with an accelerator) for the next copy, which
            overwrites this one.
        type_check: Refuse values other than tensors, numbers, strings, bytes, dicts, lists and tuples.

    A copy that differs from the state raises StagingError.
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
        """Release threads and reused memory. Idempotent. Returned copies stay valid."""
        self.state_dict_cache = None
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class StateTree:
    """The tensors of ``state_dict`` in ``memory``: plain, detached, strided; each object once.

    ``type_check`` refuses values of other classes than torch's stagers expect, with PlanError.
    """

    def __init__(self, state_dict: dict[str, Any], *, type_check: bool = False) -> None:
        self._sources: list[torch.Tensor] = []
        self._paths: list[_Path] = []
        self._state_dict = state_dict
        self._type_check = type_check
        # keeps the objects, so that ids stay unique
        self._tensors: dict[int, tuple[_Make, torch.Tensor]] = {}
        self._containers: dict[int, object] = {}
        self._mappings: list[Mapping[Any, Any]] = []  # dicts are rebuilt, and need not be copyable
        self._visit((), state_dict)
        self.memory = LocalMemory.of(self._sources)

    def copied(self, memory: LocalMemory) -> dict[str, Any]:
        """Return a deep copy of the state dict with ``memory`` for the sources, including new DTensors and
        ShardedTensors.
        """
        made: dict[int, Any] = {key: make(memory.tensors) for key, (make, _) in self._tensors.items()}
        for mapping in reversed(self._mappings):  # innermost first
            made[id(mapping)] = {key: copy.deepcopy(entry, made) for key, entry in mapping.items()}
        state_dict: dict[str, Any] = copy.deepcopy(self._state_dict, made)
        return state_dict

    def fqns(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of these sources."""
        return [".".join(map(str, self._paths[number])) for number in numbers]

    def _visit(self, path: _Path, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (self._tensor(path, value), value)
        elif isinstance(value, _PLAIN_VALUES) or id(value) in self._containers:
            return
        elif isinstance(value, (Mapping, list, tuple)):
            self._containers[id(value)] = value
            if isinstance(value, Mapping) and not isinstance(value, dict):
                self._mappings.append(value)
            for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
                self._visit((*path, key), entry)
        elif isinstance(value, PerRank):
            self._visit((*path, "value"), value.value)
        elif self._type_check:
            raise PlanError(
                f"{'.'.join(map(str, path))!r} is a {type(value).__name__}, but type_check=True allows "
                "only tensors, numbers, strings, bytes, dicts, lists and tuples"
            )

    def _tensor(self, path: _Path, value: torch.Tensor) -> _Make:
        if isinstance(value, DTensor):
            spec, local = torch_compat.spec_of(value), self._tensor(path, torch_compat.local_part(value))
            return lambda copies: torch_compat.dtensor_with(spec, local(copies))
        if isinstance(value, ShardedTensor):
            return self._sharded(path, value)
        if isinstance(value, AsyncCollectiveTensor):
            return self._tensor(path, value.wait())
        if hasattr(value, "__tensor_flatten__"):  # a subclass with inner tensors
            names, context = value.__tensor_flatten__()
            inner = {name: self._tensor((*path, name), getattr(value, name)) for name in names}
            cls: Any = type(value)
            size, stride = value.size(), value.stride()
            return lambda copies: cls.__tensor_unflatten__(
                {name: make(copies) for name, make in inner.items()}, context, size, stride
            )
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            with torch.no_grad():
                kept = value.detach() if value.is_meta else value.detach().to(_CPU, copy=True)
            return lambda copies: kept
        number, claim = len(self._sources), claim_of(value)
        self._sources.append(value.detach().resolve_conj().resolve_neg())
        self._paths.append(path)
        if claim is not None:
            return lambda copies: with_claim(copies[number].detach(), claim)
        return lambda copies: copies[number]

    def _sharded(self, path: _Path, value: ShardedTensor) -> _Make:
        metadata = copy.deepcopy(value.metadata())
        for entry in metadata.shards_metadata:
            if entry.placement is not None:
                entry.placement = torch_compat.on_cpu(entry.placement)
        metadata.tensor_properties.requires_grad = False
        by_offsets = {tuple(entry.shard_offsets): entry for entry in metadata.shards_metadata}
        shards = [
            (by_offsets[tuple(shard.metadata.shard_offsets)], self._tensor((*path, number), shard.tensor))
            for number, shard in enumerate(value.local_shards())
        ]
        group = torch_compat.group_of_sharded(value)

        def make(copies: Sequence[torch.Tensor]) -> ShardedTensor:
            local = [Shard(tensor(copies), entry) for entry, tensor in shards]
            own = copy.copy(metadata)
            own.tensor_properties = copy.copy(metadata.tensor_properties)
            own.tensor_properties.pin_memory = any(shard.tensor.is_pinned() for shard in local)
            return torch_compat.sharded_with(group, local, own)

        return make
