"""Byte strings between the ranks of one process group: gather, all-gather, scatter, broadcast.

Payloads are uint8 tensors on the group's device: nothing is pickled. Waiting is the caller's: each exchange
is given a function that waits for the work, so that waits can be bounded and watched in one place.
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
"""A broadcast of less is one collective: its length travels in the same frame."""

_LENGTH_BYTES = 8

HEAD_BYTES = 248
"""As much of every rank's message travels with its length; the rest takes another collective."""


@dataclass(eq=False, slots=True)
class _GroupState:
    """Facts that all operations of a process group share.

    ``serial`` numbers them, equal on all ranks because all run the same program. ``life`` is a word for keys
    in the store that no group before this one has used, None until it is agreed on: torchrun keeps its store
    when it starts workers again, with all that those before have put there. ``given_up`` says (ranks that
    were lost, what happened) when this rank first left an operation before its end: the ranks have not begun
    equally many collectives since, and so would take each other's messages for those of another step.
    """

    serial: itertools.count[int] = field(default_factory=itertools.count)
    life: str | None = None
    given_up: tuple[list[int], str] | None = None


_groups: weakref.WeakKeyDictionary[Any, _GroupState] = weakref.WeakKeyDictionary()

_works: list[_Begun] = []
"""The latest collective, and those before it whose tensors are not let go by the group's own threads."""

_works_lock = threading.Lock()

_LET_GO_SECONDS = 2.0
"""How long the end of the interpreter waits for threads that drop the tensors of complete collectives."""


@dataclass(slots=True)
class _Begun:
    """A collective, None once it was seen to be complete, and its tensors."""

    work: Any
    tensors: tuple[torch.Tensor, ...]

    def is_held(self) -> bool:
        """Return whether others than Python have references to the tensors: the work has, until it is
        dropped."""
        if self.work is not None and self.work.is_completed():
            self.work = None
        return any(torch_compat.use_count(tensor) > 1 for tensor in self.tensors)


@dataclass(eq=False)
class Channel:
    """A process group and its key-value store, and what a rank can send over it.

    ``group`` is a torch ProcessGroup or a backend such as ProcessGroupGloo by itself; ranks are those of the
    group. ``store`` is the group's, for what must work when collectives do not.
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
        """Return the channel of a process group that this process belongs to: on the CPU where it has a CPU
        backend, else on the accelerator that the group's backend works on."""
        devices = torch_compat.devices_of(group)
        device = next((each for each in devices if each.type == "cpu"), None)
        if device is None:
            device = torch.device(devices[0].type, torch.accelerator.current_device_index())
        return cls(group, group.get_group_store(), group.rank(), group.size(), device)

    @classmethod
    def own_gloo(cls, store: Any, rank: int, world_size: int, *, timeout_seconds: float) -> Channel:
        """Make a gloo group of its own over ``store``, which no other collective can get into.

        Collective: returns when all ranks have come, or raises a RuntimeError of torch's after
        ``timeout_seconds``. It is not among `torch.distributed`'s groups, so
        ``destroy_process_group()`` leaves it alone, and threads may use it beside the training's groups.
        """
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        # who waits has a bound of its own, and names who is missing
        torch_compat.set_default_timeout(group, 2 * timeout)
        return cls(group, store, rank, world_size, torch.device("cpu"))

    def keep_for_ever(self) -> None:
        """Keep the group of gloo from ever being destroyed: its destructor waits for a collective that is
        under way until that times out, which is half an hour by default, and for others that may be waiting
        for this process."""
        if self.device.type == "cpu":
            _keep_for_ever(torch_compat.backend_of(self.group, self.device))

    @staticmethod
    def begun(work: Any, *tensors: torch.Tensor) -> Any:
        """Return ``work``, noted as a collective that may be under way when the interpreter ends."""
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
        """Do as `all_gather`; None, on all ranks, where one has more than HEAD_BYTES."""
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
        """Return, by rank, (the length of its message, its first bytes), on every rank.

        By way of one of them: a ring, as gloo's all-reduce and all-gather are, has a step for every rank, and
        each waits for a core where the ranks share some.
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
    """Return what all messages are filled up to. That of ``root`` does not travel: the coordinator's, which
    has what all ranks share, may be a thousand times as long as any other, and would have to be taken once a
    rank."""
    return max((size for rank, size in enumerate(sizes) if rank != root), default=0) or 1


def _joined(head: tuple[int, bytes], rest: torch.Tensor | None) -> bytes:
    """Return the message, whose bytes after those of the ``head`` are the first of ``rest``."""
    size, data = head
    return data if rest is None or size <= HEAD_BYTES else data + _to_bytes(rest, size - HEAD_BYTES)


def _to_bytes(tensor: torch.Tensor, size: int | None = None) -> bytes:
    return tensor[:size].cpu().numpy().tobytes()


def _keep_groups_for_ever() -> None:
    """Keep all process groups from being destroyed in a forked child.

    The destructor of a gloo group waits for threads that the child does not have, so that a child which ends
    by `sys.exit` would never end.
    """
    for group in {*_groups, *torch_compat.all_process_groups()}:
        _keep_for_ever(group)


def _keep_for_ever(owned: Any) -> None:
    """Take a reference that is never given back, and so outlives the interpreter's clearing up."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def _let_works_go() -> None:
    """Let go of works at the end of the interpreter. A thread of gloo's that drops a collective's tensors
    asks for the interpreter's lock; once there is none it is ended by that, and aborts the process. So works
    that Python still has are never dropped, and threads that drop another's tensors now are waited for."""
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
