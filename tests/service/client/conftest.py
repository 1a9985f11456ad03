"""Fixtures that connect the sync and async client to the application, over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from dcp.server.client import Client
from tests.support.app import App
from tests.support.both_clients import KINDS, client_of
from tests.support.sockets import listening

MakeClient = Callable[..., Client]


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest, app: App) -> Iterator[MakeClient]:
    """Return a function that makes a client with a given key, or with a new key of given scopes."""
    with ExitStack() as stack:
        url = stack.enter_context(listening(app.app))

        def make(*scopes: str, key: str | None = None) -> Client:
            key = key or app.key(*scopes)  # type: ignore[arg-type]
            return stack.enter_context(client_of(request.param, url, key=key))

        yield make
