"""Answers with bodies over a real socket. Internal: sources that break in the middle of an answer.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Generator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from dcp.server.data.sending.bodies import Body, empty_part
from dcp.server.data.sending.responses import (
    BodyResponse,
    ByteRange,
    Streams,
    choose_range,
    disposition,
    is_unchanged,
)
from dcp.server.http.handlers import install_handlers
from dcp.server.http.middleware.requests import RequestMiddleware
from dcp.server.problems import PreconditionFailedError, RangeError
from dcp.server.process.logs import configure_logs
from dcp.server.settings import Settings
from dcp.storage.errors import CorruptCheckpointError
from tests.support.asgi_server import served

PART = 1 << 20


class Counted(Body):
    """Bytes that say where they are; fails at ``fails_at``. Knows what was read, if it was closed."""

    def __init__(self, size_bytes: int, fails_at: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.fails_at = fails_at
        self.read_bytes = 0
        self.closed = threading.Event()

    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """In parts of `PART` bytes."""
        try:
            for at in range(begin, end, PART):
                if self.fails_at is not None and at >= self.fails_at:
                    raise CorruptCheckpointError("damaged")
                part = empty_part(min(PART, end - at))
                part[:] = bytes([at // PART % 251]) * len(part)
                self.read_bytes += len(part)
                yield part
        finally:
            self.closed.set()


def app_of(body: Body, streams: Streams, stall_seconds: float = 60) -> FastAPI:
    """One route that answers with ``body``."""
    app = FastAPI()
    install_handlers(app)

    @app.api_route("/", methods=["GET", "HEAD"])
    def get(request: Request) -> Response:
        chosen = choose_range(request.headers, body.size_bytes, '"tag"')
        return BodyResponse(body, chosen, streams, headers={"ETag": '"tag"'}, stall_seconds=stall_seconds)

    return app


def client_of(port: int) -> httpx.Client:
    """One of the server."""
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)


def test_whole_and_ranges() -> None:
    """Sizes are known before, and a range is that of the whole."""
    body = Counted(5 * PART + 17)
    with (
        served(app_of(body, Streams(4))) as port,
        client_of(port) as client,
    ):
        whole = client.get("/")
        assert whole.status_code == 200
        assert int(whole.headers["content-length"]) == body.size_bytes == len(whole.content)
        part = client.get("/", headers={"Range": f"bytes={PART}-{3 * PART - 1}"})
        assert part.status_code == 206
        assert part.content == whole.content[PART : 3 * PART]
        assert part.headers["content-range"] == f"bytes {PART}-{3 * PART - 1}/{body.size_bytes}"
        assert client.get("/", headers={"Range": "bytes=99999999-"}).status_code == 416
        head = client.head("/")
        assert (head.content, int(head.headers["content-length"])) == (b"", body.size_bytes)


def test_a_source_that_breaks_cuts_the_connection() -> None:
    """The client gets an error, never a whole answer; what fails at once is a problem document."""
    body = Counted(9 * PART, fails_at=5 * PART)
    with (
        served(app_of(body, Streams(4))) as port,
        client_of(port) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/")
        body.fails_at = 0
        answer = client.get("/")
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_client_that_leaves_stops_the_reading() -> None:
    """Of a body without end only what was under way is read, and its place is free again."""
    body, streams = Counted(1 << 40), Streams(1)
    with served(app_of(body, streams)) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(PART)
        assert body.closed.wait(60)
        _wait_for(lambda: streams.running == 0)
        assert body.read_bytes < 1 << 30


def test_a_client_that_takes_nothing_is_cut_off(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stalled client does not hold a place for ever, and memory does not grow while it stalls; the log says
    so in a line, without tracebacks."""
    body, streams = Counted(1 << 40), Streams(1)
    with (
        served(RequestMiddleware(app_of(body, streams, stall_seconds=0.5))) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        configure_logs(Settings())
        logging.getLogger("uvicorn.error").setLevel("ERROR")
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert body.closed.wait(60)
        _wait_for(lambda: streams.running == 0)
        assert body.read_bytes < 64 << 20
    log = capsys.readouterr().err
    assert "the client is too slow" in log
    assert "Traceback" not in log and "Exception" not in log


def test_a_client_that_takes_too_little_is_cut_off() -> None:
    """One that takes something all the time, but less than the minimum rate, does not hold a place."""
    body, streams = Counted(1 << 40), Streams(1, 1 << 30)
    with served(app_of(body, streams, stall_seconds=1.5)) as port, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 30
        while not body.closed.is_set() and time.monotonic() < deadline:
            client.recv(1 << 18)
            time.sleep(0.01)
        assert body.closed.is_set()
        _wait_for(lambda: streams.running == 0)


def test_no_more_downloads_than_allowed() -> None:
    """One more is told to come again, and gets its turn when another has ended; what is small always does."""
    body, streams = Counted(1 << 40), Streams(1)
    with served(app_of(body, streams)) as port, client_of(port) as client:
        with socket.create_connection(("127.0.0.1", port)) as first:
            first.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            first.recv(1)
            answer = client.get("/")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "10"
            small = client.get("/", headers={"Range": "bytes=5-1000"})
            assert (small.status_code, len(small.content)) == (206, 996)
        _wait_for(lambda: streams.running == 0)
        body.size_bytes = 10
        assert len(client.get("/").content) == 10


def _wait_for(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=-5", (95, 100)),
        ("bytes=-500", (0, 100)),
        ("bytes=5-500", (5, 100)),
        ("bytes = 5 - 7", (5, 8)),
    ],
)
def test_ranges(text: str, expected: tuple[int, int]) -> None:
    """The forms of one range."""
    assert choose_range({"range": text}, 100, '"t"') == ByteRange(*expected, 100, is_part=True)


@pytest.mark.parametrize(
    "text", ["bytes=1-2,4-5", "rows=1-2", "bytes=", "bytes=-", "bytes=7-5", "x", "bytes=--5"]
)
def test_what_is_no_range_is_the_whole(text: str) -> None:
    """As RFC 9110 has it; and so is a range of what was there before."""
    assert choose_range({"range": text}, 100, '"t"') == ByteRange(0, 100, 100)
    assert choose_range({"range": "bytes=5-", "if-range": '"old"'}, 100, '"t"') == ByteRange(0, 100, 100)
    assert choose_range({"range": "bytes=5-", "if-range": '"t"'}, 100, '"t"').begin == 5


@pytest.mark.parametrize(("text", "size"), [("bytes=100-", 100), ("bytes=-0", 100), ("bytes=0-0", 0)])
def test_ranges_outside(text: str, size: int) -> None:
    """Refused, with the size."""
    with pytest.raises(RangeError) as caught:
        choose_range({"range": text}, size, '"t"')
    assert caught.value.headers["Content-Range"] == f"bytes */{size}"


def test_conditions() -> None:
    """If-None-Match compares weakly, If-Match strongly."""
    assert is_unchanged({"if-none-match": '"a", W/"t"'}, '"t"')
    assert is_unchanged({"if-none-match": "*"}, '"t"')
    assert not is_unchanged({"if-none-match": '"a"', "if-match": '"t"'}, '"t"')
    with pytest.raises(PreconditionFailedError):
        is_unchanged({"if-match": 'W/"t"'}, '"t"')


def test_names_of_files() -> None:
    """No name can end the header or hide an extension."""
    assert disposition("step-1.pt") == "attachment; filename=\"step-1.pt\"; filename*=UTF-8''step-1.pt"
    for name in ('a"; filename="x.exe', "ü\r\nX: y", "", "../../etc/passwd"):
        value = disposition(name)
        assert "\r" not in value
        assert "\n" not in value
        assert value.count('"') == 2
        assert "/" not in value.partition("filename*")[0]
        value.encode("latin-1")
