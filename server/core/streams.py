"""Server-sent events for features: one database poll for all followers of a process.

A `Feed` is a thread that polls while there are followers. It skips followers that have not taken the last
news, so a slow client costs one page of memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import anyio
import structlog
from sqlalchemy import Connection
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcp.server.core.ask import Ask
from dcp.server.core.http.context import Service
from dcp.server.core.problems import BrokenBodyError, TooManyRequestsError, UnavailableError
from dcp.server.core.security.principal import Principal
from dcp.server.database.engine import DatabaseUnavailableError

POLL_SECONDS: Final = 0.5
HEARTBEAT_SECONDS: Final = 15.0
_GRACE_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 30.0
_MAX_STREAM_SECONDS: Final = 3600.0
_MAX_STREAMS: Final = 256
_MAX_STREAMS_EACH: Final = 32
_AT_ONCE: Final = 100
"""Maximum followers of one poll."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class News:
    """New events and other changes.

    ``is_last``: no more will follow, because the object ended and all events are included, or, with
    ``state`` None, because it was removed, the key ended or the database is unreachable.
    """

    state: str | None
    events: Sequence[Any] = ()
    progress: Mapping[int, Any] = field(default_factory=dict)
    is_last: bool = False


OVER: Final = News(None, is_last=True)


@dataclass(eq=False, kw_only=True)
class Following:
    """A follower with the rights of ``caller``, from the event ``after_id`` on."""

    caller: Principal
    after_id: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _news: News | None = None
    _told: Mapping[int, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def waits(self) -> bool:
        """True once the last news was taken."""
        return self._news is None

    async def take(self, seconds: float) -> News | None:
        """Return the news; None without news within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        except TimeoutError:
            return None
        self._has_news.clear()
        news, self._news = self._news, None
        return news

    def tell(self, news: News) -> None:
        """Hand over news, if any; called by the polling thread."""
        is_new = news.events or news.is_last or news.progress not in ({}, self._told)
        if not is_new or not self.waits:
            return
        self._told = news.progress or self._told
        if news.events:
            self.after_id = max(self.after_id, news.events[-1].id)
        self._news = news
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop of the follower has ended
                self._loop.call_soon_threadsafe(self._has_news.set)


F = TypeVar("F", bound=Following)


class Feed(ABC, Generic[F]):
    """Polls for all `Following` objects of a process; made by `Service.own`."""

    def __init__(self, service: Service) -> None:
        self._database = service.database
        self._callers = service.callers
        self._following: set[F] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_running = False

    @contextmanager
    def follow(self, one: F) -> Iterator[F]:
        """Poll for ``one`` within a block; it receives `OVER` when the rights of its caller end."""
        one.begin()
        with self._lock:
            self._following.add(one)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="dcp-feed", daemon=True).start()
        self._wake.set()  # wake before the next poll
        try:
            yield one
        finally:
            with self._lock:
                self._following.discard(one)

    def _run(self) -> None:
        while True:
            with self._lock:
                followers = list(self._following)
                if not followers:
                    self._is_running = False
                    return
            self._wake.clear()
            has_more = False
            try:
                for begin in range(0, len(followers), _AT_ONCE):
                    has_more |= self._look_for(followers[begin : begin + _AT_ONCE])
            except Exception as error:  # noqa: BLE001 - followers must not wait for ever
                if not isinstance(error, DatabaseUnavailableError):
                    _log.exception("the database cannot be polled for events")
                for one in followers:  # clients reconnect, and are refused meanwhile
                    one.tell(OVER)
            if not has_more:
                self._wake.wait(POLL_SECONDS)

    def _look_for(self, some: Sequence[F]) -> bool:
        waiting = [one for one in some if one.waits]
        with self._database.read() as connection:
            callers = [one.caller for one in waiting]
            still = {id(one) for one in self._callers.still_admitted(connection, callers)}
            for one in waiting:
                if id(one.caller) not in still:  # the key or account has ended, or its rights have changed
                    one.tell(OVER)
            return self._look(connection, [one for one in waiting if id(one.caller) in still])

    @abstractmethod
    def _look(self, connection: Connection, some: Sequence[F]) -> bool:
        """Poll for ``some`` and notify them; return True if there is more than a page."""


def _open_streams(service: Service) -> Counter[str]:
    """Return a counter of the open streams by caller."""
    return Counter()


def stream_of(
    ask: Ask,
    feed: type[Feed[F]],
    follower: F,
    show: Callable[[News], Iterable[ServerSentEvent]],
    *first: ServerSentEvent,
    comment: str,
) -> Response:
    """Answer with a stream of ``first`` and the news of ``follower``, converted by ``show``.

    Refused if this process or the caller has too many streams.
    """
    stop = anyio.Event()

    async def events() -> AsyncIterator[ServerSentEvent]:
        until = time.monotonic() + _MAX_STREAM_SECONDS
        yield ServerSentEvent(comment=comment, retry=int(POLL_SECONDS * 1000))
        for event in first:
            yield event
        with ask.service.own(feed).follow(follower) as following:
            while time.monotonic() < until and not stop.is_set():
                news = await following.take(POLL_SECONDS)
                for event in () if news is None else show(news):
                    yield event
                if news is not None and news.is_last:
                    return

    return _Stream(
        ask.service.own(_open_streams),
        ask.caller.owner if ask.caller.is_admitted else f"address {ask.address}",
        events(),
        shutdown_event=stop,  # end the stream cleanly at shutdown; clients reconnect
        shutdown_grace_period=_GRACE_SECONDS,
        ping=HEARTBEAT_SECONDS,
        send_timeout=_SEND_SECONDS,
        headers={"Cache-Control": "no-store"},
        sep="\n",
    )


class _Stream(EventSourceResponse):
    """A stream counted in ``streams`` of its caller."""

    def __init__(self, streams: Counter[str], who: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._streams = streams
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI). Raises UnavailableError and TooManyRequestsError; BrokenBodyError after
        the start."""
        streams, who = self._streams, self._who
        if streams.total() >= _MAX_STREAMS:
            raise UnavailableError("too many event streams are open; read without a stream")
        if streams[who] >= _MAX_STREAMS_EACH:
            raise TooManyRequestsError(
                f"this account has {_MAX_STREAMS_EACH} open event streams, the maximum; close one, or read "
                "without a stream",
                headers={"Retry-After": "10"},
            )
        streams[who] += 1
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.info("answer broken off", path=scope["path"], error="the client does not read events")
            raise BrokenBodyError("the client does not read events") from None
        finally:
            streams[who] -= 1
            if not streams[who]:
                del streams[who]


def described_stream(description: str, of_data: str) -> dict[int | str, dict[str, Any]]:
    """Return ``responses=`` for the events of a route; ``of_data`` describes the JSON."""
    fields = {"id": "string", "event": "string", "data": "string", "retry": "integer"}
    schema = {
        "type": "object",
        "description": f"One event; `data` is JSON, {of_data}.",
        "properties": {name: {"type": kind} for name, kind in fields.items()},
    }
    return {200: {"description": description, "content": {"text/event-stream": {"schema": schema}}}}
