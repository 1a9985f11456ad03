"""Clients of places, with their connections, threads and buffers, shared by the store objects of a process.

Every step of a run has a store object of its own; a session with the service costs far more than a request.
So what they share lives as long as any of them or a handle of theirs, and that of the last few places longer.
Credentials are part of a place: in a service that is given new ones every hour, the old ones' sessions end.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from dcp.storage.errors import StorageError
from dcp.storage.stores.buffers import BufferPool
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.threads import result_of

__all__ = ["Shared", "all_of", "locked", "shared"]

T = TypeVar("T")


@dataclass
class Shared:
    """A client, and the threads that carry its requests."""

    client: Any
    options: ObjectOptions
    threads: ThreadPoolExecutor

    def pool(self, size_bytes: int) -> BufferPool:
        """Return buffers for parts of ``size_bytes``; together they take as much memory as those of
        `part_bytes`.

        All places share them, and those of the size that was asked for last are kept.
        """
        global _pool
        count = max(2, self.options.concurrency * self.options.part_bytes // size_bytes)
        with _guard:
            if (_pool.count, _pool.size_bytes) != (count, size_bytes):
                _pool = BufferPool(count, size_bytes)
            return _pool


_KEPT_PLACES: Final = 4
"""What of so many places is kept though nobody uses it: the next step of a run will."""

_Key = tuple[int, str]
_ALIVE: Final[WeakValueDictionary[_Key, Shared]] = WeakValueDictionary()
_KEPT: Final[OrderedDict[_Key, Shared]] = OrderedDict()
_LOCKS: Final[WeakValueDictionary[_Key, threading.RLock]] = WeakValueDictionary()
_pool = BufferPool(1)
_guard = threading.RLock()  # the collector may run what opens a store, wherever it is held


def _start_afresh() -> None:
    global _guard
    _guard = threading.RLock()  # a thread that the child does not have may hold the old one


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


@contextmanager
def locked(url: str, timeout_seconds: float) -> Iterator[None]:
    """Hold the lock of a place between the threads of this process, which exists as long as a thread has it.
    Raises `StorageError` if another thread holds it for ``timeout_seconds``."""
    with _guard:
        lock = _LOCKS.setdefault((os.getpid(), url), threading.RLock())
    if not lock.acquire(timeout=max(0.0, timeout_seconds)):
        raise StorageError(
            f"{url} is locked by another thread, and was still after {timeout_seconds:g} seconds",
            path=url,
            op="lock",
            timeout_seconds=timeout_seconds,
        )
    try:
        yield
    finally:
        lock.release()


def all_of(
    threads: ThreadPoolExecutor, tasks: Sequence[Callable[[], T]], interrupt: Callable[[], None]
) -> list[T]:
    """Return the results of ``tasks``, run at once; the first failure once none of them runs any more.

    ``interrupt`` makes them end where the waiting itself is interrupted.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    futures: list[Future[T]] = [threads.submit(copy_context().run, task) for task in tasks]
    try:
        return [result_of(future) for future in futures]
    except BaseException as error:
        if not isinstance(error, Exception):
            interrupt()
        raise
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
