"""Plans of downloads: each made once however many ask for it, a few at a time, kept while they are asked for.

A plan of 100,000 tensors is half a second of a processor and tens of MiB; ranges of one download share
it. Nobody waits for what nobody wants any more: a plan whose last client has gone is given up.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from dcp.server.data.downloads import Planned

__all__ = ["AbandonedError", "Plans", "Wanted"]

_AT_ONCE: Final = 2
_KEPT_BYTES: Final = 96 << 20
_KEPT: Final = 64

Wanted = Callable[[], None]
"""Asked between the steps of planning; raises `AbandonedError` where it is of no use any more."""


class AbandonedError(Exception):
    """Nobody waits for the plan any more."""


@dataclass(slots=True)
class _Making:
    future: Future[Planned] = field(default_factory=Future)
    waiting: int = 0


class Plans:
    """By entity tag, so that what was replaced is never given; safe to use from any thread and event loop."""

    def __init__(self, *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, Planned] = OrderedDict()
        self._making: dict[str, _Making] = {}
        self._lock = threading.Lock()
        self._pools = {
            is_small: ThreadPoolExecutor(threads, thread_name_prefix="dcp-plan")
            for is_small, threads in ((False, _AT_ONCE), (True, 2 * _AT_ONCE))
        }

    def __contains__(self, etag: str) -> bool:
        """Whether it is there, or being made."""
        with self._lock:
            return etag in self._kept or etag in self._making

    async def get(self, etag: str, make: Callable[[Wanted], Planned], *, is_small: bool = False) -> Planned:
        """The plan called ``etag``; what ``make`` returns if there is none. Raises what it raises.

        ``make`` runs in a thread; small ones do not wait for others. Cancelled, it is given up, unless others
        wait for the same.
        """
        with self._lock:
            known = self._kept.get(etag)
            if known is not None:
                self._kept.move_to_end(etag)
                return known
            making = self._making.get(etag)
            is_new = making is None
            if making is None:
                making = self._making[etag] = _Making()
            making.waiting += 1
            if is_new:
                self._pools[is_small].submit(self._make, etag, making, make)
        try:
            # Not the future itself, which others wait for too, and which would be cancelled with this one.
            return await asyncio.shield(asyncio.wrap_future(making.future))
        finally:
            with self._lock:
                making.waiting -= 1
                if not making.waiting and self._making.get(etag) is making:
                    del self._making[etag]  # who comes now begins anew

    def _make(self, etag: str, making: _Making, make: Callable[[Wanted], Planned]) -> None:
        def check() -> None:
            if not making.waiting:
                raise AbandonedError

        try:
            check()
            planned = make(check)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            making.future.set_exception(error)
            return
        with self._lock:
            self._keep(etag, planned)
        making.future.set_result(planned)

    def _keep(self, etag: str, planned: Planned) -> None:
        if planned.held_bytes > self._kept_bytes:
            return
        self._kept[etag] = planned
        held_bytes = sum(one.held_bytes for one in self._kept.values())
        while len(self._kept) > _KEPT or held_bytes > self._kept_bytes:
            held_bytes -= self._kept.popitem(last=False)[1].held_bytes
