"""Clients of places, with their connections, threads and buffers, shared by the store objects of a process.

Every step of a run has a store object of its own; a session with the service costs far more than a request.
So what they share lives as long as any of them or a handle of theirs, and that of the last few places longer.
Credentials are part of a place: in a service that is given new ones every hour, the old ones' sessions end.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from weakref import WeakSet, WeakValueDictionary

from dcp.storage.errors import StorageError

ConditionalWrites = Literal["auto", "trust", "off"]
"""How a commit makes sure that nobody else commits at the same time. "auto": by the service's conditional
writes, tried out once unless they are known to work. "trust": as "auto", without trying. "off": look, then
write: what another writer does in between is lost. For services without conditional writes and one writer
to a place."""


def _default_concurrency() -> int:
    return max(8, min(16, 4 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """Options that can be set in ``storage_options`` beside the file system's own options.

    - ``conditional_writes``: see `ConditionalWrites`.
    - ``retry_seconds``: for how long a request that fails in passing (throttled, timed out, reset, an error
      of the server) is repeated. 0 tries once.
    - ``request_timeout_seconds``: how long one attempt may wait for the next bytes.
    - ``concurrency``: requests that are under way at a time, for a store object: 4 a core, from 8 to 16, as
      more than the cores can serve only wait for each other.
    - ``part_bytes``: size of the parts that a file is uploaded in; larger ones are taken for files that
      would need too many. Memory for uploads is ``concurrency * part_bytes``.
    """

    conditional_writes: ConditionalWrites = "auto"
    retry_seconds: float = 120.0
    request_timeout_seconds: float = 60.0
    concurrency: int = field(default_factory=_default_concurrency)
    part_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("retry_seconds", "request_timeout_seconds", "concurrency", "part_bytes"):
            value, whole = getattr(self, name), name in ("concurrency", "part_bytes")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number of seconds"
                raise StorageError(f"storage option {name} must be {kind}, not a {type(value).__name__}")
        if self.conditional_writes not in ("auto", "trust", "off"):
            raise StorageError(f"conditional_writes must be auto, trust or off: {self.conditional_writes!r}")
        if self.concurrency < 1 or self.part_bytes < 5 << 20 or self.part_bytes % 4096:
            raise StorageError(
                "concurrency must be at least 1, part_bytes a multiple of 4096 from 5 MiB on, as S3 wants: "
                f"{self.concurrency=}, {self.part_bytes=}"
            )
        if self.retry_seconds < 0 or self.request_timeout_seconds <= 0:
            raise StorageError(f"not a time to wait: {self.retry_seconds=}, {self.request_timeout_seconds=}")

    @classmethod
    def split(cls, storage_options: Mapping[str, Any] | None) -> tuple[ObjectOptions, dict[str, Any]]:
        """Return our options, and those for the file system."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = dict(storage_options or {})
        ours = {name: given.pop(name) for name in names & given.keys()}
        return cls(**ours), given


class Part:
    """Memory for a part of an upload."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)


_PARTS: Final[WeakSet[Part]] = WeakSet()


@dataclass
class Shared:
    """A client, and the threads that carry its requests.

    ``heeds_conditions``: whether the service heeds the condition of creating (True) and of replacing (False),
    where that was tried out.
    """

    client: Any
    options: ObjectOptions
    threads: ThreadPoolExecutor
    heeds_conditions: dict[bool, bool] = field(default_factory=dict)

    def part(self, size_bytes: int, *, is_first: bool) -> Part | None:
        """Return memory for a part of a file; None for another than the first one if those of all files take
        as much as `ObjectOptions` say. Nobody gives it back: one that is not used any more is gone."""
        with _guard:
            taken = sum(len(part.data) for part in _PARTS)
            limit = max(2 * size_bytes, self.options.concurrency * self.options.part_bytes)
            if not is_first and taken + size_bytes > limit:
                return None
            part = Part(size_bytes)
            _PARTS.add(part)
            return part


_KEPT_PLACES: Final = 4
"""What of so many places is kept though nobody uses it: the next step of a run will."""

_Key = tuple[int, str]
_ALIVE: Final[WeakValueDictionary[_Key, Shared]] = WeakValueDictionary()
_KEPT: Final[OrderedDict[_Key, Shared]] = OrderedDict()
_guard = threading.RLock()  # the collector may run what opens a store, wherever it is held


def _start_afresh() -> None:
    global _guard
    _guard = threading.RLock()  # a thread that the child does not have may hold the old one
    _PARTS.clear()  # of files of the parent


os.register_at_fork(after_in_child=_start_afresh)


def shared(
    place: str, options: ObjectOptions, given: Mapping[str, Any], make: Callable[[], tuple[Any, int]]
) -> Shared:
    """Return the one of this process for ``place`` and these options; a forked child has its own.

    ``make`` makes the client, and says how many requests are worth sending at a time.
    """
    key = os.getpid(), f"{place}\n{options}\n{sorted(given.items(), key=lambda item: item[0])!r}"
    with _guard:
        found = _ALIVE.get(key)
        if found is None:
            client, concurrency = make()
            threads = ThreadPoolExecutor(concurrency, thread_name_prefix="dcp-object")
            found = _ALIVE[key] = Shared(client, options, threads)
        _KEPT[key] = found
        _KEPT.move_to_end(key)
        while len(_KEPT) > _KEPT_PLACES:
            _KEPT.popitem(last=False)
        return found
