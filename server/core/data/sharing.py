"""Values that are dear to make: each made once however many ask for it, and the last ones kept."""

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
"""Asked between the steps of making; raises `AbandonedError` where it is of no use any more."""


class AbandonedError(Exception):
    """Nobody waits for the value any more."""


class _Sized(Protocol):
    @property
    def held_bytes(self) -> int:
        """About how much memory it takes."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=_Sized)


@dataclass(slots=True)
class _Making(Generic[V]):
    future: Future[V] = field(default_factory=Future)
    waiting: int = 0


class SharedValues(Generic[K, V]):
    """Values by a key that names the content, so that what was replaced is never given; safe to use from any
    thread.

    Up to ``count`` of them are kept, of ``kept_bytes`` together. What is larger is shared while a request
    has it.
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
        """How many wait for one now, those who make one included."""
        return self._waiting

    def __contains__(self, key: K) -> bool:
        """Whether it is there, or being made."""
        with self._lock:
            return self._known(key) is not None or key in self._making

    def find(self, key: K) -> V | None:
        """The value, if it is there."""
        with self._lock:
            return self._known(key)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value; if there is none, what ``make`` returns in this thread. Raises what it raises."""
        making, is_new = self._join(key)
        try:
            if is_new:
                self._make(key, making, lambda _: make())
            return making.future.result()
        finally:
            self._leave(key, making)

    async def get_from(self, executor: Executor, key: K, make: Callable[[Wanted], V]) -> V:
        """The same, made by ``executor``. Cancelled, it is given up, unless others wait for the same."""
        making, is_new = self._join(key)
        try:
            if is_new:
                executor.submit(self._make, key, making, make)
            # Not the future itself, which others wait for too, and which would be cancelled with this one.
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
                del self._making[key]  # who comes now begins anew

    def _make(self, key: K, making: _Making[V], make: Callable[[Wanted], V]) -> None:
        def check() -> None:
            if not making.waiting:
                raise AbandonedError

        try:
            check()
            made = make(check)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
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
