"""Heads of requests that come slowly. Internal: sockets are given seconds instead of minutes.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from dcp.server.process.heads import TimedHeads
from dcp.server.process.serving import _options
from dcp.server.settings import Settings

_HEAD_SECONDS = 0.6
_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def _slow_app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    time.sleep(1.2 * _HEAD_SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def _connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        yield connection


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server with the options of `dcp serve`, where heads have less than a second."""
    monkeypatch.setattr(TimedHeads, "head_seconds", _HEAD_SECONDS)
    options = _options(Settings()) | {"lifespan": "off", "port": 0}
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_slow_app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield int(listener.getsockname()[1])
    server.should_exit = True
    thread.join(60)
    listener.close()


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_does_not_end_is_cut_off(port: int, head: bytes) -> None:
    """A connection that sends nothing, a part, or byte after byte does not stay open."""
    with _connection(port) as connection:
        connection.sendall(head)
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() < begun + 30:
                connection.sendall(b"X" if head else b"")
                connection.settimeout(0.05)
                try:
                    if connection.recv(100) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue


def test_requests_and_answers_take_their_time(port: int) -> None:
    """The limit is for heads alone: answers are waited for, and a kept connection may rest in between."""
    with _connection(port) as connection:
        for pause in (1.2 * _HEAD_SECONDS, 0.0):
            connection.sendall(_GET[:20])
            time.sleep(0.05)
            connection.sendall(_GET[20:])
            answer = b""
            while not answer.endswith(b"ok"):
                answer += connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(pause)
        connection.sendall(_GET[:20])
        assert connection.recv(100) == b"" or pytest.fail("the second head has no limit")
