"""Failures: both clients with a broken network, a busy service, or a server that is not the service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dcp.server.client import (
    AnswerError,
    Client,
    ConflictError,
    DownloadError,
    JobCancelledError,
    JobFailedError,
    ProblemError,
    TransportError,
    UnavailableError,
    WaitTimeoutError,
)
from tests.support.both_clients import KINDS, client_of
from tests.support.power_cuts import Recording
from tests.support.scripted_service import Answer, Request, ScriptedService, scripted_service

Connect = Callable[..., Client]

BYTES = bytes(range(256)) * 1000
TAGGED = {"ETag": '"v1"', "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Return a function that makes a client for a URL."""
    with ExitStack() as stack:

        def make(service: ScriptedService | str, **options: Any) -> Client:
            url = service if isinstance(service, str) else service.url
            return stack.enter_context(client_of(request.param, url, **{"retries": 1} | options))

        yield make


def problem(status: int, **more: Any) -> Answer:
    """Return a problem document."""
    body = {"type": "/problems/x", "title": "Title", "status": status, "detail": "why", **more}
    return Answer(status, body, {"Content-Type": "application/problem+json", "Retry-After": "0"})


def job(state: str, **more: Any) -> dict[str, Any]:
    """Return a job as the service sends it."""
    given = {"id": 7, "kind": "verify", "state": state, "params": {}, "created_by": "key:a", "priority": 0}
    ledger = {"created_at": "2026-01-01T00:00:00.000Z", "is_ending": False, "attempt": 0, "max_attempts": 3}
    return given | ledger | more


@pytest.mark.parametrize("first", [problem(503), Answer(202, job("queued"), cut=3)])
def test_temporary_errors_are_retried(connect: Connect, first: Answer) -> None:
    """A busy service or a lost response is retried; each attempt of a POST has the same Idempotency-Key."""
    answers = iter([first, problem(409, state="working"), Answer(202, job("queued"))])
    with scripted_service(lambda request: next(answers)) as service:
        assert connect(service, retries=2).submit("verify", {"checkpoint_id": 1}).state == "queued"
        keys = [request.headers["Idempotency-Key"] for request in service.requests]
    assert len(keys) == 3 and len(set(keys)) == 1
    assert service.bodies() == [{"kind": "verify", "params": {"checkpoint_id": 1}, "priority": 0}] * 3


def test_the_last_retry_raises(connect: Connect) -> None:
    """The client raises after its last retry, with the detail of the service."""
    with scripted_service(lambda request: problem(503)) as service:
        with pytest.raises(UnavailableError, match="why") as caught:
            connect(service).roots()
        assert len(service.requests) == 2
    assert caught.value.retry_after_seconds == 0


def test_final_errors_are_not_retried(connect: Connect) -> None:
    """A final error, or a long Retry-After, raises at once."""
    with scripted_service(lambda request: problem(409, state="running")) as service:
        with pytest.raises(ConflictError) as caught:
            connect(service).cancel(7)
        assert caught.value.extra["state"] == "running"
        service.answer = lambda request: Answer(429, {"detail": "slow"}, {"Retry-After": "3600"})
        with pytest.raises(ProblemError, match="429"):
            connect(service).job(7)
        assert len(service.requests) == 2


def test_changes_with_if_match_are_not_repeated(connect: Connect) -> None:
    """A change with If-Match is not repeated after a lost response: the second attempt would get 412."""
    with scripted_service(lambda request: Answer(200, {"id": 1}, cut=3)) as service:
        client = connect(service)
        with pytest.raises(TransportError):
            client.pin(1, etag='"c1-1"')
        assert len(service.requests) == 1
        with pytest.raises(TransportError):
            client.checkpoint(1)
        assert len(service.requests) == 3


def test_responses_of_a_proxy_raise(connect: Connect) -> None:
    """A response that is not from the service, such as a proxy's HTML page, raises an error."""
    with scripted_service(lambda request: Answer(200, b"<html>", {"Content-Type": "text/html"})) as service:
        client = connect(service)
        for ask in (client.roots, lambda: client.checkpoint(1), lambda: client.checkpoints().first()):
            with pytest.raises(AnswerError):
                ask()
        with pytest.raises(AnswerError, match="not an array"):
            client.tensor(1, "w")
        service.answer = lambda request: Answer(404, b"<html>", {"Content-Type": "text/html"})
        with pytest.raises(ProblemError, match="404 Not Found"):
            client.roots()


@pytest.mark.parametrize("url", ["localhost:8470", "ftp://host", "", "http://"])
def test_an_invalid_url_raises(url: str) -> None:
    """An invalid URL raises at once."""
    with pytest.raises(ValueError, match="not the URL"):
        Client(url)


def test_the_key_is_not_shown() -> None:
    """Neither the repr of a client nor the error about an invalid key shows the key."""
    assert "dcp_secret" not in repr(Client("http://host", key="dcp_secret"))
    with pytest.raises(ValueError, match="key") as caught:
        Client("http://host", key="s\u00fcss")
    assert "s\u00fcss" not in str(caught.value)


# -- downloads -----------------------------------------------------------------------------------------------


def ranged(request: Request, data: bytes, etag: str, cut: int | None = None) -> Answer:
    """Answer as a server with range requests does, with at most ``cut`` bytes."""
    headers = TAGGED | {"ETag": etag}
    begin = request.headers.get("Range", "").removeprefix("bytes=").removesuffix("-")
    if not begin or request.headers.get("If-Range") != etag:
        return Answer(200, data, headers, cut=cut)
    at = int(begin)
    if at >= len(data):
        return Answer(416, b"{}", {"Content-Range": f"bytes */{len(data)}"})
    span = f"bytes {at}-{len(data) - 1}/{len(data)}"
    return Answer(206, data[at:], headers | {"Content-Range": span}, cut=cut)


def test_interrupted_downloads_resume(connect: Connect, tmp_path: Path) -> None:
    """An interrupted download resumes behind the last byte, as long as each attempt gets more bytes."""
    with scripted_service(lambda request: ranged(request, BYTES, '"v1"', cut=60_000)) as service:
        path = connect(service, retries=1).download(1, tmp_path / "file")
        assert path.read_bytes() == BYTES
        ranges = [request.headers.get("Range") for request in service.requests]
    assert ranges == [None, "bytes=60000-", "bytes=120000-", "bytes=180000-", "bytes=240000-"]


def test_downloads_that_stop_twice_at_a_byte_raise(connect: Connect, tmp_path: Path) -> None:
    """A download that stops twice at the same byte raises; the partial file stays for a later resume."""

    def answer(request: Request) -> Answer:
        found = ranged(request, BYTES, '"v1"')
        return Answer(found.status, found.body, found.headers, cut=0 if "Range" in request.headers else 999)

    with scripted_service(answer) as service:
        with pytest.raises(DownloadError, match="999 of 256000 bytes"):
            connect(service).download(1, tmp_path / "file")
        assert not (tmp_path / "file").exists()
        service.answer = lambda request: ranged(request, BYTES, '"v1"')
        connect(service).download(1, tmp_path / "file")
        assert service.requests[-1].headers["Range"] == "bytes=999-"
    assert (tmp_path / "file").read_bytes() == BYTES


CHANGED = BYTES[::-1]
SPAN = {"Content-Range": f"bytes 5000-{len(BYTES) - 1}/{len(BYTES)}"}
WRONG = ("bytes 5-9/10", "bytes 5000-255999/999999")


def shorter(request: Request) -> Answer:
    """Answer a range request with fewer bytes than Content-Range says, in a complete response."""
    found = ranged(request, BYTES, '"v1"')
    return Answer(206, found.body[:60_000], found.headers) if found.status == 206 else found


def stale(request: Request) -> Answer:
    """Answer as a stale cache does: the range belongs to another content than the partial file."""
    whole = ranged(request, CHANGED, '"v2"')
    return Answer(206, CHANGED[5000:], whole.headers | SPAN) if "Range" in request.headers else whole


def wrong_range(headers: dict[str, str]) -> Callable[[Request], Answer]:
    """Answer a range request with a wrong or missing Content-Range."""

    def answer(request: Request) -> Answer:
        if "Range" in request.headers:
            return Answer(206, b"wrong", TAGGED | headers)
        return ranged(request, BYTES, '"v1"')

    return answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(lambda request: ranged(request, CHANGED, '"v2"'), CHANGED, id="replaced"),
        pytest.param(stale, CHANGED, id="stale"),
        pytest.param(shorter, BYTES, id="shorter"),
        *(pytest.param(wrong_range({"Content-Range": one}), BYTES, id=one[:9]) for one in WRONG),
    ],
)
def test_resumed_downloads_never_mix_two_contents(
    connect: Connect, tmp_path: Path, answer: Callable[[Request], Answer], expected: bytes
) -> None:
    """A resumed download never mixes two contents and fetches all bytes, whatever a cache sends."""
    with scripted_service(lambda request: ranged(request, BYTES, '"v1"', cut=5000)) as service:
        with pytest.raises(DownloadError):
            connect(service, retries=0).download(1, tmp_path / "file")
        service.answer = answer
        connect(service).download(1, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == expected


def test_redirects_do_not_get_the_key(connect: Connect, tmp_path: Path) -> None:
    """A redirect to S3 is followed without the service's key."""
    with scripted_service(lambda request: ranged(request, BYTES, '"s3"')) as storage:
        place = {"Location": f"{storage.url}/bucket/file?X-Amz-Signature=1"}
        with scripted_service(lambda request: Answer(307, b"", place)) as service:
            client = connect(service, key="dcp_secret")
            client.download_file(1, "a b.distcp", tmp_path / "file")
            assert service.requests[0].path.endswith("/checkpoints/1/files/a%20b.distcp")
            assert service.requests[0].headers["Authorization"] == "Bearer dcp_secret"
        assert "Authorization" not in storage.requests[0].headers
        assert storage.requests[0].path == "/bucket/file?X-Amz-Signature=1"
    assert (tmp_path / "file").read_bytes() == BYTES


@pytest.mark.parametrize("before", [None, b"old" * 1000])
def test_a_power_cut_leaves_the_old_or_the_new_file(before: bytes | None, tmp_path: Path) -> None:
    """After a power cut the target has the old or the new content; once the download returned, the new."""
    folder = tmp_path / "work"
    folder.mkdir()
    target = folder / "model.pt"
    if before is not None:
        target.write_bytes(before)
    with (
        scripted_service(lambda request: Answer(200, BYTES, TAGGED)) as service,
        Client(service.url) as client,
        Recording(folder) as recording,
    ):
        client.download(1, target, overwrite=True)
    for name, make in recording.images():
        make(folder)
        assert (target.read_bytes() if target.exists() else None) in (before, BYTES), name
    images = list(recording.images(at_end=True))
    assert images
    for name, make in images:
        make(folder)
        assert target.read_bytes() == BYTES, name


def test_empty_pages_do_not_end_a_list(connect: Connect) -> None:
    """Empty pages do not end a list: a search may stop before a page is full."""
    pages: dict[str | None, tuple[list[Any], str | None]]
    pages = {None: ([], "a"), "a": ([], "b"), "b": ([job("queued")], "c"), "c": ([], None)}

    def answer(request: Request) -> Answer:
        items, cursor = pages[parse_qs(urlsplit(request.path).query).get("cursor", [None])[0]]
        return Answer(200, {"items": items, "next_cursor": cursor})

    with scripted_service(answer) as service:
        found = connect(service).jobs()
        assert [len(page) for page in found.pages()] == [0, 0, 1, 0]
        assert [one.id for one in found] == [one.id for one in found.all()] == [7]
        first = found.first()
        assert first is not None and first.id == 7


# -- jobs ----------------------------------------------------------------------------------------------------


def test_waiting_for_jobs(connect: Connect) -> None:
    """Waiting returns a succeeded job; a failure, a cancellation and a timeout raise errors."""
    states = iter(["queued", "running", "succeeded"])
    with scripted_service(lambda request: Answer(200, job(next(states), result={"ok": 1}))) as service:
        client = connect(service)
        seen: list[str] = []
        done = client.wait(7, on_progress=lambda found: seen.append(found.state))
        assert done.result == {"ok": 1}
        assert seen == ["queued", "running", "succeeded"]
        why = {"type": "CorruptCheckpointError", "detail": "block 7", "is_retryable": False}
        service.answer = lambda request: Answer(200, job("failed", error=why))
        with pytest.raises(JobFailedError, match="block 7") as failed:
            client.wait(done)
        assert failed.value.job.error is not None and failed.value.job.error.type == why["type"]
        service.answer = lambda request: Answer(200, job("cancelled"))
        with pytest.raises(JobCancelledError):
            client.wait(7)
        service.answer = lambda request: Answer(200, job("running"))
        with pytest.raises(WaitTimeoutError, match="running"):
            client.wait(7, timeout_seconds=0.2)


def event(number: int | None, kind: str, data: Any) -> str:
    """Format a server-sent event as the service does."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"


def shown(number: int, kind: str) -> str:
    """Format an event of the ledger."""
    data = {"id": number, "job_id": 7, "kind": kind, "at": "2026-01-01T00:00:00.000Z", "data": {"n": number}}
    return event(number, kind, data)


STREAM = {"Content-Type": "text/event-stream"}


def test_watching_events(connect: Connect) -> None:
    """Events arrive in order; after a broken connection the stream resumes behind the last event."""
    end = shown(4, "state") + event(None, "progress", {"done_tasks": 1}) + event(None, "end", {})
    parts = [
        Answer(200, f": hello\nretry: 10\n\n{shown(1, 'submitted')}{shown(2, 'state')}".encode(), STREAM),
        problem(503),
        Answer(200, (shown(3, "state") + shown(4, "state")).encode(), STREAM, cut=len(shown(3, "state")) + 9),
        Answer(200, end.encode(), STREAM),
    ]
    answers = iter(parts)
    with scripted_service(lambda request: next(answers)) as service:
        events = list(connect(service, retries=2).watch(7))
        last = [request.headers.get("Last-Event-ID") for request in service.requests]
    kinds = ["submitted", "state", "state", "state", "progress", "end"]
    assert [found.kind for found in events] == kinds
    assert [found.id for found in events] == [1, 2, 3, 4, None, None]
    assert events[1].data == {"n": 2} and events[1].at is not None
    assert events[4].data == {"done_tasks": 1}
    assert last == [None, "2", "2", "3"]


def test_compressed_downloads_raise(connect: Connect, tmp_path: Path) -> None:
    """A compressed response raises and leaves no file: its size may be right, but its bytes are wrong."""
    packed = Answer(200, BYTES, TAGGED | {"Content-Encoding": "gzip"})
    with scripted_service(lambda request: packed) as service, pytest.raises(AnswerError, match="compresses"):
        connect(service).download(1, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
