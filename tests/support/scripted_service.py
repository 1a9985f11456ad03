"""An HTTP server with scripted answers: slow ones, errors, or none. For clients of the service."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Answer", "Request", "ScriptedService", "scripted_service"]


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """An answer. ``hang``: never answer; ``cut``: send only this number of bytes of the body."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    cut: int | None = None


class ScriptedService:
    """A server that calls ``answer`` with each request, in the thread of its connection."""

    def __init__(self, answer: Callable[[Request], Answer] = lambda request: Answer(201)) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.arrived = threading.Condition()
        self.ended = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                service._handle(self)

            do_GET = do_HEAD = do_DELETE = do_PUT = do_PATCH = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def bodies(self) -> list[Any]:
        """Return the received bodies in order."""
        return [request.body for request in self.requests]

    def wait_for(self, count: int, seconds: float = 60.0) -> None:
        """Wait for ``count`` requests; AssertionError after ``seconds``, long enough for a busy machine."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) >= count, seconds), self.requests

    def close(self) -> None:
        """Stop the server; its port refuses connections afterwards."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        data = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        request = Request(
            handler.command, handler.path, dict(handler.headers), json.loads(data) if data else None
        )
        with self.arrived:
            self.requests.append(request)
            self.arrived.notify_all()
        answer = self.answer(request)
        if answer.hang:
            self.ended.wait(60)
            handler.close_connection = True
            return
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        handler.send_response(answer.status)
        for name, value in ({"Content-Type": "application/json"} | answer.headers).items():
            handler.send_header(name, value)
        if "Transfer-Encoding" not in answer.headers and "Content-Length" not in answer.headers:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(b"" if request.method == "HEAD" else body[: answer.cut])
        if answer.cut is not None:
            handler.close_connection = True


@contextmanager
def scripted_service(answer: Callable[[Request], Answer] | None = None) -> Iterator[ScriptedService]:
    """Run a server during the block."""
    service = ScriptedService() if answer is None else ScriptedService(answer)
    try:
        yield service
    finally:
        service.close()
