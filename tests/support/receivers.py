"""Receivers of webhooks on loopback: real HTTP servers, optionally with TLS, with scripted answers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

__all__ = ["CERTIFICATES", "Received", "Receiver", "drip", "raw_server"]

CERTIFICATES: Final = Path(__file__).parent / "certificates"
"""``authority.pem`` signed ``server.pem`` (with its key) for hooks.example.com; valid until 2126."""


@dataclass(frozen=True)
class Received:
    """A received request; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    """``with Receiver() as receiver``: records requests to ``receiver.url`` and sends ``answers`` first.

    An answer is a status, or a status and headers; after the last answer, 204.
    """

    answers: list[int | tuple[int, dict[str, str]]] = field(default_factory=list)
    tls: bool = False
    requests: list[Received] = field(default_factory=list)

    def __enter__(self) -> Receiver:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", "0")))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.requests.append(Received(self.command, self.path, headers, body))
                answer = receiver.answers.pop(0) if receiver.answers else 204
                status, extra = answer if isinstance(answer, tuple) else (answer, {})
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *arguments: object) -> None:
                pass  # handshakes that fail on purpose

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATES / "server.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """The URL with an address, without TLS."""
        return f"http://127.0.0.1:{self.port}/hook"


@contextlib.contextmanager
def raw_server(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port of a server that passes each connection to ``act``."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.05)
    stopping = threading.Event()

    def serve() -> None:
        with listening:
            while not stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(20)
                        act(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        stopping.set()
        thread.join(30)
        assert not thread.is_alive()


def drip(connection: socket.socket, data: bytes, pause_seconds: float) -> None:
    """Send ``data`` repeatedly in small pieces, until the other end closes the connection."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        connection.sendall(data)
        time.sleep(pause_seconds)
