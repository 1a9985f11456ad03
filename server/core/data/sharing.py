"""Values that are expensive to make: each made once for all requests, and the last ones kept."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

__all__ = ["AbandonedError", "SharedValues", "Wanted"]

Wanted = Callable[[], None]
"""Called between the steps of making a value; raises `AbandonedError` once no request waits for it."""


class AbandonedError(Exception):
    """No request waits for the value any more."""


class _Sized(Protocol):
    @property
    def held_bytes(self) -> int:
        """The approximate memory of the value."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=_Sized)


@dataclass(slots=True)
class _Making(Generic[V]):
    future: Future[V] = field(default_factory=Future)
    waiting: int = 0


class SharedValues(Generic[K, V]):
    """Values by a key that names the content, so that no replaced content is returned. Thread-safe.

    Up to ``count`` of them are kept, of ``kept_bytes`` together. Larger ones are shared while a request has
    them.
    """

    def __init__(self, *, count: int, kept_bytes: int) -> None:
        self._count = count
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._in_use: WeakValueDictionary[K, V] = WeakValueDictionary()
        self._making: dict[K, _Making[V]] = {}
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a value now, including those that make one."""
        return self._waiting

    def __contains__(self, key: K) -> bool:
        """Check whether a value is kept, or being made."""
        with self._lock:
            return self._known(key) is not None or key in self._making

    def find(self, key: K) -> V | None:
        """The value, if it is kept."""
        with self._lock:
            return self._known(key)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value; without one that which ``make`` returns in this thread, and raises what it raises."""
        making, is_new = self._join(key)
        try:
            if is_new:
                self._make(key, making, lambda _: make())
            return making.future.result()
        finally:
            self._leave(key, making)

    async def get_from(self, executor: Executor, key: K, make: Callable[[Wanted], V]) -> V:
        """As `get`, made by ``executor``. Cancelled with the last request that waits for the value."""
        making, is_new = self._join(key)
        try:
            if is_new:
                executor.submit(self._make, key, making, make)
            # shielded: other requests wait for the same future
            return await asyncio.shield(asyncio.wrap_future(making.future))
        finally:
            self._leave(key, making)

    def _known(self, key: K) -> V | None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        return self._in_use.get(key)

    def _join(self, key: K) -> tuple[_Making[V], bool]:
        with self._lock:
            self._waiting += 1
            known = self._known(key)
            making = self._making.get(key)
            is_new = known is None and making is None
            if making is None:
                making = _Making()
            if known is not None:
                making.future.set_result(known)
            else:
                self._making[key] = making
            making.waiting += 1
            return making, is_new

    def _leave(self, key: K, making: _Making[V]) -> None:
        with self._lock:
            self._waiting -= 1
            making.waiting -= 1
            if not making.waiting and self._making.get(key) is making:
                del self._making[key]  # a later request begins anew

    def _make(self, key: K, making: _Making[V], make: Callable[[Wanted], V]) -> None:
        def check() -> None:
            if not making.waiting:
                raise AbandonedError

        try:
            check()
            made = make(check)
        except BaseException as error:  # noqa: BLE001 - passed on to all that wait
            making.future.set_exception(error)
            made = None
        with self._lock:
            if self._making.get(key) is making:
                del self._making[key]
            if made is not None:
                self._keep(key, made)
        if made is not None:
            making.future.set_result(made)

    def _keep(self, key: K, made: V) -> None:
        self._in_use[key] = made
        if made.held_bytes > self._kept_bytes:
            return
        self._kept[key] = made
        held_bytes = sum(one.held_bytes for one in self._kept.values())
        while len(self._kept) > self._count or held_bytes > self._kept_bytes:
            held_bytes -= self._kept.popitem(last=False)[1].held_bytes
