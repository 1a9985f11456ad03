"""Bodies that break, plans that are shared. Internal: sources and receivers that fail at a chosen moment."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from dcp.server.data.downloads import PlannedDownload, Plans
from dcp.server.data.drawings.phases import save_phases
from dcp.server.data.sending.bodies import Body, FileBody, empty_part
from dcp.server.data.sending.responses import (
    BodyResponse,
    ByteRange,
    PlannedResponse,
    Streams,
    choose_range,
    disposition,
    is_unchanged,
)
from dcp.server.data.sharing import AbandonedError, SharedValues, Wanted
from dcp.server.http.handlers import install_handlers
from dcp.server.http.middleware.requests import RequestMiddleware
from dcp.server.problems import PreconditionFailedError, RangeError
from dcp.server.process.logs import configure_logs
from dcp.server.settings import Settings
from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.stores import PosixStore
from tests.support.asgi_server import served
from tests.support.service import wait_until

PART = 1 << 20


class Counted(Body):
    """Bytes that say where they are; fails at ``fails_at``. Knows what was read, and if it was closed."""

    def __init__(self, size_bytes: int = 1 << 40, fails_at: int | None = None) -> None:
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


class Site:
    """One route that answers with ``body``; behind a plan, if one is given."""

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

            return PlannedResponse(planned, streams, lambda: key not in plans)

        self.app = app

    def serve(self, stack: ExitStack) -> httpx.Client:
        """On a socket."""
        self.port = stack.enter_context(served(RequestMiddleware(self.app)))
        return stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60))

    def ask(self, stack: ExitStack, receive_buffer: int | None = None) -> socket.socket:
        """A client that has asked, and has read nothing."""
        client = stack.enter_context(socket.socket())
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return client

    def wait_until_free(self) -> None:
        """Until no place is taken."""
        wait_until(lambda: self.streams.running == 0, "its place is free", 60)


@dataclass(eq=False)
class Held:
    """A value of so many bytes."""

    held_bytes: int


def test_a_source_that_breaks_cuts_the_connection() -> None:
    """Gives the client an error, never a whole answer; what fails at once is a problem document."""
    site = Site(Counted(9 * PART, fails_at=5 * PART), Streams(4))
    with ExitStack() as stack:
        client = site.serve(stack)
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/")
        site.body.fails_at = 0
        answer = client.get("/")
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    """Breaks off, instead of ending early."""
    (tmp_path / "f").write_bytes(bytes(200_000))
    body = FileBody(PosixStore(tmp_path), "f", 200_000)
    assert b"".join(body.parts(5, 150_000)) == bytes(149_995)
    (tmp_path / "f").write_bytes(bytes(100_000))
    with pytest.raises(CorruptCheckpointError):
        list(body.parts(0, 200_000))


def test_one_more_than_allowed_waits_and_who_leaves_makes_room() -> None:
    """Tells one more to come again, unless it asks for little; reads no more for who has left."""
    site = Site(Counted(), Streams(1))
    with ExitStack() as stack:
        client = site.serve(stack)
        with site.ask(stack) as first:
            first.recv(1)
            answer = client.get("/")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            small = client.get("/", headers={"Range": "bytes=5-1000"})
            assert (small.status_code, len(small.content)) == (206, 996)
        assert site.body.closed.wait(60)
        site.wait_until_free()
        assert site.body.read_bytes < 1 << 30
        site.body.size_bytes = 10
        assert len(client.get("/").content) == 10


def test_a_client_that_takes_nothing_is_cut_off(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ends it after a while, in little memory; the log says so in a line, without tracebacks."""
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


def test_a_client_that_takes_too_little_is_cut_off() -> None:
    """Holds no place for one that takes something all the time, but less than the minimum rate."""
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            ("bytes=0-9", (0, 10)),
            ("bytes=90-", (90, 100)),
            ("bytes=-5", (95, 100)),
            ("bytes=-500", (0, 100)),
        ),
        *(("bytes=5-500", (5, 100)), ("bytes = 5 - 7", (5, 8))),
        *(
            (text, None)
            for text in ("bytes=1-2,4-5", "rows=1-2", "bytes=", "bytes=-", "bytes=7-5", "x", "bytes=--5")
        ),
        *(("bytes=100-", RangeError), ("bytes=-0", RangeError)),
    ],
)
def test_ranges(text: str, expected: Any) -> None:
    """Takes one range as RFC 9110 has it; what is none, or of other content, is answered by the whole."""
    whole = ByteRange(0, 100, 100)
    if expected is RangeError:
        with pytest.raises(RangeError) as caught:
            choose_range({"range": text}, 100, '"t"')
        assert caught.value.headers["Content-Range"] == "bytes */100"
        return
    wanted = whole if expected is None else ByteRange(expected[0], expected[1], 100, is_part=True)
    assert choose_range({"range": text, "if-range": '"t"'}, 100, '"t"') == wanted
    assert choose_range({"range": text, "if-range": '"old"'}, 100, '"t"') == whole


def test_conditions() -> None:
    """Compares If-None-Match weakly and If-Match strongly."""
    assert is_unchanged({"if-none-match": '"a", W/"t"'}, '"t"')
    assert is_unchanged({"if-none-match": "*"}, '"t"')
    assert not is_unchanged({"if-none-match": '"a"', "if-match": '"t"'}, '"t"')
    with pytest.raises(PreconditionFailedError):
        is_unchanged({"if-match": 'W/"t"'}, '"t"')


def test_names_of_files() -> None:
    """Lets no name end the header or hide an extension."""
    assert disposition("step-1.pt") == "attachment; filename=\"step-1.pt\"; filename*=UTF-8''step-1.pt"
    for name in ('a"; filename="x.exe', "ü\r\nX: y", "", "../../etc/passwd"):
        value = disposition(name)
        assert "\r" not in value and "\n" not in value and value.count('"') == 2
        assert "/" not in value.partition("filename*")[0]
        value.encode("latin-1")


# -- what several ask for ------------------------------------------------------------------------------------


def test_a_place_comes_before_planning() -> None:
    """Plans nothing with all places taken; who asks for a plan that is being made waits for it."""
    begun, go_on, made = threading.Event(), threading.Event(), []

    def plan() -> None:
        made.append(1)
        begun.set()
        go_on.wait(30)

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
        go_on.set()
        for thread in asking:
            thread.join(60)
    assert [answer.status_code for answer in answers] == [206, 206] and made == [1]


def test_what_nobody_waits_for_is_given_up() -> None:
    """Stops a plan at its next step once its last client has gone; who comes then begins anew."""
    plans, going, stopped = Plans(), threading.Event(), threading.Event()

    def endless(check: Wanted) -> PlannedDownload:
        going.set()
        try:
            while True:
                check()
                time.sleep(0.01)
        except AbandonedError:
            stopped.set()
            raise

    async def ask() -> None:
        first, second = (asyncio.ensure_future(plans.get("a", endless)) for _ in range(2))
        await asyncio.to_thread(going.wait, 30)
        first.cancel()
        await asyncio.sleep(0.1)
        assert not stopped.is_set()
        second.cancel()
        assert await asyncio.to_thread(stopped.wait, 30)
        again = cast(PlannedDownload, Held(1))
        assert await plans.get("a", lambda check: again) is again

    asyncio.run(ask())


def test_the_last_ones_are_kept() -> None:
    """Keeps so many, of so many bytes; what is too large is shared while somebody has it."""
    values = SharedValues[str, Held](count=3, kept_bytes=100)
    for name in "abc":
        values.get(name, lambda: Held(10))
    values.get("a", lambda: pytest.fail("it is there"))
    values.get("d", lambda: Held(10))
    gc.collect()
    assert [name in values for name in "abcd"] == [True, False, True, True]
    values.get("e", lambda: Held(85))
    gc.collect()
    assert [name in values for name in "abcde"] == [False, False, False, True, True]
    large = values.get("large", lambda: Held(101))
    assert values.get("large", lambda: Held(101)) is large
    del large
    gc.collect()
    assert [name in values for name in ("d", "large")] == [True, False]


def test_all_who_wait_have_the_same_value_or_failure() -> None:
    """Makes it once; a failure is of all who wait, and of nobody later."""
    values, go_on, made = SharedValues[str, Held](count=3, kept_bytes=100), threading.Event(), []

    def make(fails: bool) -> Held:
        made.append(fails)
        go_on.wait(30)
        if fails:
            raise OSError("not now")
        return Held(1)

    with ThreadPoolExecutor(3) as pool:
        for fails in (True, False):
            go_on.clear()
            asked = [pool.submit(values.get, "a", lambda fails=fails: make(fails)) for _ in range(3)]  # type: ignore[misc]
            wait_until(lambda: values.waiting == 3, "all wait")
            go_on.set()
            if fails:
                assert {str(one.exception()) for one in asked} == {"not now"}
            else:
                assert len({id(one.result()) for one in asked}) == 1
    assert made == [True, False] and values.waiting == 0


# -- phases of a save ----------------------------------------------------------------------------------------


def test_phases_by_rank() -> None:
    """Counts parts of phases once, names the slowest, tells apart what training waited for; in rows."""
    ranks: list[Any] = [
        {"blocked": 1.0, "staging": 0.9, "plan": 0.5, "local_plan": 0.2, "write": 2.0 + (rank == 5)}
        for rank in range(8)
    ]
    ranks[2] = "nonsense"
    found = save_phases({"rank_seconds": ranks, "assemble_seconds": 0.25}, rows=4)
    assert (found.rank_count, found.blocking_seconds, found.background_seconds) == (8, 1.0, 3.5)
    phases = {phase.name: phase for phase in found.phases}
    assert (phases["staging"].within, phases["staging"].is_blocking) == ("blocked", True)
    write = phases["write"]
    assert (write.slowest_rank, write.ranks, write.median_seconds) == (5, 7, 2.0)
    assert [(row.first_rank, row.last_rank) for row in found.rows] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert (found.rows[2].slowest_rank, found.rows[2].total_seconds) == (5, 4.5)
    some = save_phases({"rank_seconds": ranks}, rows=2, wanted=range(3, 7))
    assert [(row.first_rank, row.last_rank) for row in some.rows] == [(3, 4), (5, 6)]
    assert (some.rank_count, some.phases) == (8, found.phases)
    nothing = save_phases({}, wanted=range(10, 1 << 31))
    assert (nothing.rank_count, nothing.phases, nothing.rows) == (0, (), ())
