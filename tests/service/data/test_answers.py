"""Response bodies, ranges, file names and shared plans. Internal: clients that stop at a chosen moment."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from dcp.server.core.data.responses import (
    Body,
    BodyResponse,
    ByteRange,
    PlannedResponse,
    choose_range,
    disposition,
)
from dcp.server.core.data.sharing import Share, Streams
from dcp.server.core.http.handlers import install_handlers
from dcp.server.core.http.middleware import RequestMiddleware
from dcp.server.core.logs import configure_logs
from dcp.server.core.problems import RangeError
from dcp.server.core.settings import Settings
from dcp.server.features.downloads import PlannedDownload, Plans
from tests.support.service import wait_until
from tests.support.sockets import listening

PART = 1 << 20


class Counted(Body):
    """A very large body that counts the bytes read, and records its closing."""

    def __init__(self) -> None:
        self.size_bytes = 1 << 40
        self.read_bytes = 0
        self.closed = threading.Event()

    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Yield parts of `PART` bytes."""
        try:
            for at in range(begin, end, PART):
                part = memoryview(bytearray(min(PART, end - at)))
                self.read_bytes += len(part)
                yield part
        finally:
            self.closed.set()


class Site:
    """An application with one route that sends ``body``, behind a plan if ``plan`` is given."""

    def __init__(
        self,
        body: Counted,
        streams: Streams,
        stall_seconds: float = 60,
        plan: Callable[[], None] | None = None,
    ) -> None:
        self.body = body
        self.streams = streams
        app = FastAPI()
        install_handlers(app)
        plans = Plans()

        @app.api_route("/", methods=["GET", "HEAD"])
        def get(request: Request) -> Response:
            chosen = choose_range(request.headers, body.size_bytes, '"tag"')
            sent = BodyResponse(body, chosen, streams, headers={"ETag": '"tag"'}, stall_seconds=stall_seconds)
            if plan is None:
                return sent
            key = request.url.query

            async def planned() -> BodyResponse:
                await plans.get(key, lambda check: (plan(), cast(PlannedDownload, Held(1)))[1])
                return sent

            return PlannedResponse(planned, streams, Share(), lambda: key not in plans)

        self.app = app

    def serve(self, stack: ExitStack) -> httpx.Client:
        """Serve the application on a socket."""
        url = stack.enter_context(listening(RequestMiddleware(self.app)))
        self.port = int(url.rpartition(":")[2])
        return stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=False))

    def ask(self, stack: ExitStack, receive_buffer: int | None = None) -> socket.socket:
        """Send a request and return its socket, without reading."""
        client = stack.enter_context(socket.socket())
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return client

    def wait_until_free(self) -> None:
        """Wait until no stream is running."""
        wait_until(lambda: self.streams.running == 0, "its place is free", 60)


@dataclass(eq=False)
class Held:
    """A value that holds so many bytes."""

    held_bytes: int


def test_clients_that_read_nothing_are_disconnected(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client that reads nothing is disconnected with little memory used and one line in the log."""
    site = Site(Counted(), Streams(1), stall_seconds=0.5)
    with ExitStack() as stack:
        site.serve(stack)
        configure_logs(Settings())
        logging.getLogger("uvicorn.error").setLevel("ERROR")
        site.ask(stack)
        assert site.body.closed.wait(60)
        site.wait_until_free()
        assert site.body.read_bytes < 64 << 20
    log = capsys.readouterr().err
    assert "the client is too slow" in log
    assert "Traceback" not in log and "Exception" not in log


def test_slow_clients_are_disconnected() -> None:
    """A client that reads steadily, but below the minimum rate, is disconnected and its slot freed."""
    site = Site(Counted(), Streams(1, 1 << 30), stall_seconds=1.5)
    with ExitStack() as stack:
        site.serve(stack)
        client = site.ask(stack, 1 << 18)
        deadline = time.monotonic() + 30
        while not site.body.closed.is_set() and time.monotonic() < deadline:
            client.recv(1 << 18)
            time.sleep(0.01)
        assert site.body.closed.is_set()
        site.wait_until_free()


RANGES: dict[str, Any] = {
    "bytes=0-9": (0, 10),
    "bytes=90-": (90, 100),
    "bytes=-5": (95, 100),
    "bytes=-500": (0, 100),
    "bytes=5-500": (5, 100),
    "bytes = 5 - 7": (5, 8),
    "bytes=100-": RangeError,
    "bytes=-0": RangeError,
    **dict.fromkeys(("bytes=1-2,4-5", "rows=1-2", "bytes=", "bytes=-", "bytes=7-5", "x", "bytes=--5")),
}


@pytest.mark.parametrize("text", RANGES)
def test_ranges_follow_rfc_9110(text: str) -> None:
    """A single range works as in RFC 9110; an invalid range or a stale If-Range gets the whole body."""
    whole, expected = ByteRange(0, 100, 100), RANGES[text]
    if expected is RangeError:
        with pytest.raises(RangeError) as caught:
            choose_range({"range": text}, 100, '"t"')
        assert caught.value.headers["Content-Range"] == "bytes */100"
        return
    wanted = whole if expected is None else ByteRange(expected[0], expected[1], 100, is_part=True)
    assert choose_range({"range": text, "if-range": '"t"'}, 100, '"t"') == wanted
    assert choose_range({"range": text, "if-range": '"old"'}, 100, '"t"') == whole


def test_file_names_in_headers() -> None:
    """No file name breaks out of the header or hides its extension."""
    assert disposition("step-1.pt") == "attachment; filename=\"step-1.pt\"; filename*=UTF-8''step-1.pt"
    for name in ('a"; filename="x.exe', "ü\r\nX: y", "", "../../etc/passwd"):
        value = disposition(name)
        assert "\r" not in value and "\n" not in value and value.count('"') == 2
        assert "/" not in value.partition("filename*")[0]
        value.encode("latin-1")


# -- shared plans --------------------------------------------------------------------------------------------


def test_requests_without_a_free_slot_plan_nothing() -> None:
    """A request without a free slot plans nothing; a second request for the same plan waits for it."""
    begun, release, made = threading.Event(), threading.Event(), []

    def plan() -> None:
        made.append(1)
        begun.set()
        release.wait(30)

    site, answers = Site(Counted(), Streams(1), plan=plan), []
    with ExitStack() as stack:
        client, small = site.serve(stack), {"Range": "bytes=0-99"}
        asking = [
            threading.Thread(target=lambda: answers.append(client.get("/?a", headers=small))) for _ in "ab"
        ]
        asking[0].start()
        assert begun.wait(30)
        asking[1].start()
        other = client.get("/?b", headers=small)
        assert other.status_code == 503 and "retry-after" in other.headers
        release.set()
        for thread in asking:
            thread.join(60)
    assert [answer.status_code for answer in answers] == [206, 206] and made == [1]
