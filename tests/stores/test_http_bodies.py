"""Bodies of HTTP responses.

They are received into the caller's buffers over kept connections; wrong or short responses are errors.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dcp.errors import StorageError
from dcp.storage.stores import ReadHandle, open_store
from tests.support.receivers import CERTIFICATES

_HANG_SECONDS = 60.0
_LOOPBACK = CERTIFICATES / "loopback.pem"
_BODY = bytes(range(256)) * 1000

Reply = Callable[[socket.socket, int], None]


@dataclass
class _Server:
    """A server on loopback; ``reply`` gets the connection and the number of the request, from 0 on."""

    reply: Reply
    tls: bool = False
    host: str = "127.0.0.1"
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    let_go: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> _Server:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, 0), family=family)
        scheme = "https" if self.tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{scheme}://{host}:{self._listener.getsockname()[1]}"
        self._kept: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.let_go.set()
        for each in (self._listener, *self._kept):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_HANG_SECONDS)
            assert not thread.is_alive()

    def _accept(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_LOOPBACK)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection, context), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError), connection:
            if self.tls:
                connection = context.wrap_socket(connection, server_side=True)
            self._kept.append(connection)
            connection.settimeout(_HANG_SECONDS)
            while head := self._head(connection):
                self.heads.append(head)
                self.reply(connection, len(self.heads) - 1)

    def _head(self, connection: socket.socket) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            got = connection.recv(1)
            if not got:
                return b""
            head += got
        return head


def _whole(body: bytes = _BODY, content_range: str = "", length: int | None = None) -> bytes:
    content_range = content_range or f"bytes 0-{len(_BODY) - 1}/{len(_BODY)}"
    head = f"Content-Length: {len(body) if length is None else length}\r\nContent-Range: {content_range}\r\n"
    return f'HTTP/1.1 206 Partial Content\r\n{head}ETag: "x"\r\n\r\n'.encode() + body


def _opened(server: _Server, size: int = len(_BODY), **options: object) -> ReadHandle:
    common = {"endpoint_url": server.url, "key": "k", "secret": "s", "retry_seconds": 0}
    return open_store("s3://bucket/run", common | options).open_read("key", expected_bytes=size)


def test_bodies_fill_buffers_over_one_connection() -> None:
    """Several buffers are filled in order, and the connection is reused."""
    with _Server(lambda connection, _: connection.sendall(_whole())) as server:
        handle = _opened(server)
        for _ in range(3):
            data, step = bytearray(len(_BODY)), -(-len(_BODY) // 3)
            handle.preadv([memoryview(data)[at : at + step] for at in range(0, len(data), step)], 0)
            assert data == _BODY
        assert server.connections == 1
        first, *lines = server.heads[0].decode().split("\r\n")
        assert first == "GET /bucket/run/key HTTP/1.1"
        assert f"Range: bytes=0-{len(_BODY) - 1}" in lines


@pytest.mark.parametrize("size", [0, 1, len(_BODY) - 1])
def test_a_body_that_ends_too_early_is_an_error(size: int) -> None:
    """A connection that breaks at any byte of the body fails the attempt."""

    def reply(connection: socket.socket, _: int) -> None:
        connection.sendall(_whole(_BODY[:size], length=len(_BODY)))
        connection.shutdown(socket.SHUT_RDWR)

    with _Server(reply) as server, pytest.raises(StorageError, match="IncompleteRead"):
        _opened(server).pread(len(_BODY), 0)


def test_a_very_slow_body_fails() -> None:
    """A very slow body fails the attempt."""

    def reply(connection: socket.socket, _: int) -> None:
        connection.sendall(_whole(b"", "bytes 0-999/1000", 1000))
        while not server.let_go.wait(0.05):
            connection.sendall(b"x")

    with (
        _Server(reply) as server,
        pytest.raises(StorageError, match="transfer was too slow"),
    ):
        _opened(server, 1000, request_timeout_seconds=0.2).pread(1000, 0)


def test_an_ipv6_address_is_accepted() -> None:
    """An IPv6 address in brackets is accepted."""
    with _Server(lambda connection, _: connection.sendall(_whole()), host="::1") as server:
        assert _opened(server).pread(len(_BODY), 0) == _BODY


@pytest.mark.filterwarnings("ignore:Unverified HTTPS")
def test_tls_is_verified_unless_switched_off() -> None:
    """TLS certificates are verified with the given authority, unless verify=False."""
    with _Server(lambda connection, _: connection.sendall(_whole()), tls=True) as server:
        for verify, good in ((str(_LOOPBACK), True), (True, False), (False, True)):
            handle = _opened(server, client_kwargs={"verify": verify})
            with contextlib.nullcontext() if good else pytest.raises(StorageError, match="CERTIFICATE"):
                assert handle.pread(len(_BODY), 0) == _BODY


@pytest.mark.parametrize("content_range", ["bytes 0-9/100", "bytes 50-59/100"])
def test_a_response_with_another_range_is_an_error(content_range: str) -> None:
    """A response with another range, as by a faulty cache, is an error, which no hash would detect."""
    answer = _whole(b"0123456789", content_range)
    refused = pytest.raises(StorageError, match="begins at byte 0, expected 50")
    with (
        _Server(lambda connection, _: connection.sendall(answer)) as server,
        contextlib.nullcontext() if content_range.startswith("bytes 50") else refused,
    ):
        assert _opened(server, 100).pread(10, 50) == b"0123456789"
