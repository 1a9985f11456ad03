"""The synchronous and the asynchronous client behind the same calls, so that a test runs on both."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dcp.server.client import AsyncClient, Client

__all__ = ["KINDS", "client_of"]

KINDS = ("sync", pytest.param("async", marks=pytest.mark.exhaustive))
"""The synchronous client is generated from the asynchronous one; `make test` runs most tests on the first."""


class _Awaited:
    """Await the answers and pages of an asynchronous client; turn asynchronous iterators into iterators."""

    def __init__(self, portal: BlockingPortal, inner: Any) -> None:
        self._portal = portal
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._call, found) if callable(found) else found

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._inner.__aiter__())

    def _call(self, method: Any, *args: Any, **options: Any) -> Any:
        answer = method(*args, **options)
        if inspect.isawaitable(answer):
            return self._portal.call(partial(_wait, answer))
        if hasattr(answer, "__anext__"):
            return self._iterate(answer)
        return _Awaited(self._portal, answer)

    def _iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._portal.call(items.__anext__)
            except StopAsyncIteration:
                return


async def _wait(answer: Any) -> Any:
    return await answer


@contextmanager
def client_of(kind: str, url: str, **options: Any) -> Iterator[Client]:
    """Open a client of the kind "sync" or "async"."""
    if kind == "sync":
        with Client(url, **options) as client:
            yield client
        return
    with start_blocking_portal() as portal:
        inner = AsyncClient(url, **options)
        try:
            yield cast(Client, _Awaited(portal, inner))
        finally:
            portal.call(inner.close)
