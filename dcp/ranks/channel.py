"""Exchange of bytes between the ranks of a process group: gather, all-gather, scatter, broadcast.

Payloads are uint8 tensors on the group's device, without pickle. The caller passes a function that waits for
the work, so that waits are bounded in one place.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp.storage import torch_compat

Wait = Callable[[Any], None]
"""Returns when a collective's work is complete, or raises."""

_FRAME_BYTES = 64 << 10
"""Size below which a broadcast is one collective, with its length in the same frame."""

_LENGTH_BYTES = 8

HEAD_BYTES = 248
"""Bytes of each message that are sent together with its length; longer messages need a second collective."""


@dataclass(eq=False, slots=True)
class _GroupState:
    """State shared by all operations of a process group.

    Attributes:
        serial: Number of the operation, equal on all ranks.
        life: Prefix for keys in the store, unused by earlier groups; None until agreed. torchrun keeps the
            store, with old keys, when it restarts workers.
        given_up: Lost ranks and reason, if this rank left an operation before its end. The ranks then have
            begun different numbers of collectives.
    """

    serial: itertools.count[int] = field(default_factory=itertools.count)
    life: str | None = None
    given_up: tuple[list[int], str] | None = None


_groups: weakref.WeakKeyDictionary[Any, _GroupState] = weakref.WeakKeyDictionary()

_works: list[_Begun] = []
"""The latest collective, and earlier ones whose tensors the group's threads still hold."""

_works_lock = threading.Lock()

_LET_GO_SECONDS = 2.0
"""Wait at interpreter exit for threads that release tensors of collectives."""


@dataclass(slots=True)
class _Begun:
    """A collective (None after its completion) and its tensors."""

    work: Any
    tensors: tuple[torch.Tensor, ...]

    def is_held(self) -> bool:
        """Return whether a work object still references the tensors."""
        if self.work is not None and self.work.is_completed():
            self.work = None
        return any(torch_compat.use_count(tensor) > 1 for tensor in self.tensors)


@dataclass(eq=False)
class Channel:
    """Process group with its key-value store.

    ``group`` is a torch ProcessGroup or a single backend such as ProcessGroupGloo. Ranks are those of the
    group. ``store`` works when collectives do not.
    """

    group: Any
    store: Any
    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self) -> None:
        self.state = _groups.setdefault(self.group, _GroupState())

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Channel:
        """Return the channel of a process group: on the CPU if it has a CPU backend, otherwise on its
        accelerator.
        """
        devices = torch_compat.devices_of(group)
        device = next((each for each in devices if each.type == "cpu"), None)
        if device is None:
            device = torch.device(devices[0].type, torch.accelerator.current_device_index())
        return cls(group, group.get_group_store(), group.rank(), group.size(), device)

    @classmethod
    def own_gloo(cls, store: Any, rank: int, world_size: int, *, timeout_seconds: float) -> Channel:
        """Make a separate gloo group over ``store``. Collective.

        Raises a RuntimeError of torch after ``timeout_seconds``. The group is not registered in
        `torch.distributed`, so ``destroy_process_group()`` does not affect it, and threads may use it beside
        the training's groups.
        """
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        # the caller's wait has its own bound and names missing ranks
        torch_compat.set_default_timeout(group, 2 * timeout)
        return cls(group, store, rank, world_size, torch.device("cpu"))

    def keep_for_ever(self) -> None:
        """Keep the gloo group alive: its destructor waits for a running collective until its timeout (half an
        hour).
        """
        if self.device.type == "cpu":
            _keep_for_ever(torch_compat.backend_of(self.group, self.device))

    @staticmethod
    def begun(work: Any, *tensors: torch.Tensor) -> Any:
        """Return ``work``, recorded as a collective that may be running at interpreter exit."""
        global _works
        with _works_lock:
            _works = [*(other for other in _works if other.is_held()), _Begun(work, tensors)]
        return work

    # -- exchanges -------------------------------------------------------------------------------------------

    def gather(self, data: bytes, root: int, wait: Wait) -> list[bytes] | None:
        """Collect every rank's ``data`` on ``root``; None elsewhere."""
        heads = self._all_heads(data, wait)
        rest = _largest_but(root, [size for size, _ in heads]) - HEAD_BYTES
        parts: list[torch.Tensor] | list[None] | None = [None] * self.world_size
        if rest > 0:
            sent = b"" if self.rank == root else data[HEAD_BYTES:]
            parts = self._gather_tensor(self._padded(sent, rest), root, wait)
        if self.rank != root or parts is None:
            return None
        messages = list(map(_joined, heads, parts))
        messages[root] = data
        return messages

    def _gather_tensor(self, own: torch.Tensor, root: int, wait: Wait) -> list[torch.Tensor] | None:
        parts = [torch.empty_like(own) for _ in range(self.world_size)] if self.rank == root else None
        options = dist.GatherOptions()
        options.rootRank = root
        work = self.group.gather([] if parts is None else [parts], [own], options)
        wait(self.begun(work, own, *(parts or ())))
        return parts

    def all_gather(self, data: bytes, wait: Wait) -> list[bytes]:
        """Collect every rank's ``data`` on every rank."""
        heads = self._all_heads(data, wait)
        rest = max(size for size, _ in heads) - HEAD_BYTES
        if rest <= 0:
            return [head for _, head in heads]
        own = self._padded(data[HEAD_BYTES:], rest)
        parts = [torch.empty_like(own) for _ in heads]
        wait(self.begun(self.group.allgather([parts], [own]), own, *parts))
        return list(map(_joined, heads, parts))

    def all_gather_short(self, data: bytes, wait: Wait) -> list[bytes] | None:
        """Gather as `all_gather`; return None on all ranks if a message exceeds HEAD_BYTES."""
        heads = self._all_heads(data, wait)
        return None if any(size > HEAD_BYTES for size, _ in heads) else [head for _, head in heads]

    def scatter(self, data: list[bytes] | None, root: int, wait: Wait) -> bytes:
        """Send ``data[rank]`` of ``root`` to each rank."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        if data is not None:
            sizes = torch.tensor([len(part) for part in data], dtype=torch.int64, device=self.device)
        self._broadcast_tensor(sizes, root, wait)
        lengths = [int(size) for size in sizes.tolist()]
        size = _largest_but(root, lengths)
        own = torch.empty(size, dtype=torch.uint8, device=self.device)
        parts = []
        if data is not None:
            sent = [b"" if rank == root else part for rank, part in enumerate(data)]
            parts = [[self._padded(part, size) for part in sent]]
        options = dist.ScatterOptions()
        options.rootRank = root
        wait(self.begun(self.group.scatter([own], parts, options), own, *itertools.chain(*parts)))
        return data[root] if data is not None else _to_bytes(own, lengths[self.rank])

    def broadcast(self, data: bytes | None, root: int, wait: Wait) -> bytes:
        """Send ``data`` of ``root`` to every rank."""
        inline = _FRAME_BYTES - _LENGTH_BYTES
        head = b"" if data is None else len(data).to_bytes(_LENGTH_BYTES, "little") + data[:inline]
        frame = self._padded(head, _FRAME_BYTES)
        self._broadcast_tensor(frame, root, wait)
        received = _to_bytes(frame, _FRAME_BYTES)
        length = int.from_bytes(received[:_LENGTH_BYTES], "little")
        if length > inline:
            rest = self._padded(b"" if data is None else data[inline:], length - inline)
            self._broadcast_tensor(rest, root, wait)
            return data if data is not None else received[_LENGTH_BYTES:] + _to_bytes(rest, length - inline)
        return received[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def _broadcast_tensor(self, tensor: torch.Tensor, root: int, wait: Wait) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        wait(self.begun(self.group.broadcast([tensor], options), tensor))

    def _all_heads(self, data: bytes, wait: Wait) -> list[tuple[int, bytes]]:
        """Return the length and the first bytes of each rank's message, on every rank.

        Messages go through one rank, because the ring of gloo's all-gather takes a step for each rank.
        """
        own = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:HEAD_BYTES]
        row = self._padded(own, _LENGTH_BYTES + HEAD_BYTES)
        rows = self._gather_tensor(row, 0, wait)
        table = row.new_empty(self.world_size, len(row)) if rows is None else torch.stack(rows)
        self._broadcast_tensor(table, 0, wait)
        heads = []
        for head in map(_to_bytes, table.cpu()):
            size = int.from_bytes(head[:_LENGTH_BYTES], "little")
            heads.append((size, head[_LENGTH_BYTES : _LENGTH_BYTES + size]))
        return heads

    def _padded(self, data: bytes, size: int) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if data:
            tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return tensor.to(self.device)


def _largest_but(root: int, sizes: list[int]) -> int:
    """Return the padded size of messages, without that of ``root``, which may be much longer."""
    return max((size for rank, size in enumerate(sizes) if rank != root), default=0) or 1


def _joined(head: tuple[int, bytes], rest: torch.Tensor | None) -> bytes:
    """Join the bytes of ``head`` and the first bytes of ``rest``."""
    size, data = head
    return data if rest is None or size <= HEAD_BYTES else data + _to_bytes(rest, size - HEAD_BYTES)


def _to_bytes(tensor: torch.Tensor, size: int | None = None) -> bytes:
    return tensor[:size].cpu().numpy().tobytes()


def _keep_groups_for_ever() -> None:
    """Keep all process groups alive in a forked child.

    The destructor of a gloo group waits for threads that do not exist in the child.
    """
    for group in {*_groups, *torch_compat.all_process_groups()}:
        _keep_for_ever(group)


def _keep_for_ever(owned: Any) -> None:
    """Add a reference that outlives interpreter shutdown."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def _let_works_go() -> None:
    """Release works at interpreter exit.

    A gloo thread that drops tensors needs the interpreter lock, and aborts the process if the interpreter has
    ended. Works held by Python are kept forever, and threads dropping tensors now are waited for.
    """
    dropped = [other for other in _works if other.work is None]
    for other in _works:
        if other.work is not None:
            _keep_for_ever(other.work)
    deadline = time.monotonic() + _LET_GO_SECONDS
    while any(other.is_held() for other in dropped) and time.monotonic() < deadline:
        time.sleep(0.001)


if dist.is_available():
    os.register_at_fork(after_in_child=_keep_groups_for_ever)
    atexit.register(_let_works_go)
