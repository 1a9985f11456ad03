"""Telling a catalog what was committed and deleted, in the background, whatever becomes of the catalog.

Training does nothing but put a note on a queue. One thread writes the notes to a spool on disk, another sends
them and removes what has arrived; so the catalog may be down, the trainer may be killed, and the next manager
of the same run sends what is left. The catalog reads the checkpoint itself: a note says only where it is, and
may be sent twice. What is lost all the same, a scan of the catalog finds. Torch-free.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.stores.base import TEMPORARY_PREFIX
from dcp.storage.stores.posix.store import PosixStore
from dcp.version import __version__

if TYPE_CHECKING:
    import httpx

    from dcp.manager.events import Event

logger = logging.getLogger(__name__)

KEY_VARIABLE: Final = "DCP_CATALOG_KEY"

_PATH: Final = "/api/v1/checkpoints"
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_WARN_AGAIN_SECONDS: Final = 86_400.0
_SIZE: Final = re.compile(r"[0-9.,]+ ?[kMGTPE]?B\b")
_REFUSALS: Final = 8
"""So often a note is sent that the catalog can make nothing of yet, because a network file system shows it an
older state; a minute or two in all."""
_SPOOL_SECONDS: Final = 5.0
_NOT_YET: Final = frozenset({404, 409, 410})
_TRY_AGAIN: Final = frozenset({401, 403, 408, 425, 429})

_MAX_NOTE_BYTES: Final = 64 << 10

_NAME: Final = re.compile(r"[0-9]{20}-[0-9a-f]{8}-[0-9]{6,}\.json")
_STALE_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class CatalogRegistration:
    """Registration of a manager's checkpoints with a service: ``CatalogRegistration(url, key=...)``.

    - ``url`` is that of the service. ``key`` needs the scope "write"; by default it is the environment's
      ``DCP_CATALOG_KEY``. It is never shown.
    - ``root`` and ``folder``: the name of a root of the service, and the run's folder below it. Without them
      the service finds the root by the run's path or URL, which works where it sees the storage under the
      same one.
    - ``tags`` are put on every checkpoint.
    - ``spool``: a folder for notes that have not been sent yet. By default it is in the hidden folder
      ``.catalog-spool`` of a local run, so that any host can continue with it, and below
      ``~/.local/state/dcphub`` for others. It takes ``spool_notes`` at most; then the oldest ones go.
    - ``request_seconds`` bounds the waits of a request, ``close_seconds`` what closing the manager waits for
      notes that have not been sent.
    """

    url: str
    _: KW_ONLY
    key: str | None = field(default=None, repr=False)
    root: str | None = None
    folder: str = ""
    tags: tuple[str, ...] = ()
    spool: str | os.PathLike[str] | None = None
    spool_notes: int = 10_000
    request_seconds: float = 10.0
    close_seconds: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"catalog: {self.url!r} is no URL of a service, such as https://host:8470")
        if self.folder and self.root is None:
            raise OptionError("catalog: folder is the run's folder below a root: name the root, too")
        if self.spool_notes < 1 or self.request_seconds <= 0 or self.close_seconds < 0:
            raise OptionError("catalog: spool_notes, request_seconds and close_seconds must be positive")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise OptionError("catalog: the key has characters that no key has")


@dataclass(eq=False, slots=True)
class _Note:
    """A note with the content ``body``, in the file ``name`` of the spool, "" if it is in memory only. What
    was refused comes again when it is ``due`` (of the monotonic clock)."""

    body: Mapping[str, Any]
    name: str = ""
    refusals: int = 0
    due: float = 0.0

    @property
    def key(self) -> str:
        """The checkpoint of the note."""
        return f"{self.body.get('root') or self.body.get('root_url')}\0{self.body.get('key')}"


class Registrar:
    """Registers the checkpoints of one run; made on one rank. Nothing that it does raises or waits, but for
    `close`, which is bounded.

    Each note is one file of the spool, written aside, made durable and renamed. Several processes may share
    the folder; each loads what is there when it starts. What cannot be written stays in memory, and is logged
    once.
    """

    def __init__(
        self, options: CatalogRegistration, run_url: str, name_of: Callable[[int], str] = str
    ) -> None:
        self._options = options
        self._run_url = run_url
        self._name_of = name_of
        self._changed = threading.Condition()
        self._fresh: list[_Note] = []
        """Not on disk yet."""
        self._busy = True
        """Until what an earlier process left is loaded, and while notes are written."""
        self._due: dict[str, _Note] = {}
        """By checkpoint, in the order in which they came: a later note makes an earlier one moot."""
        self._closed = False
        self._down_seconds = 0.0
        self._failed_in_a_row = 0
        self._spool = PosixStore(_spool_folder(options, run_url))
        self._own = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._is_warned = False
        self._said: dict[str, float] = {}
        """Warnings of the catalog, with the time from which they are logged again."""
        for work, name in ((self._write, "dcp-catalog-spool"), (self._send, "dcp-catalog-send")):
            threading.Thread(target=work, name=name, daemon=True).start()

    # -- from training ---------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Listen to the manager's events."""
        if event.step is None:
            return
        if event.kind in ("saved", "dropped"):
            self.tell(self._name_of(event.step), event.step, save_id=event.data.get("save_id"))
        elif event.kind == "deleted" and event.data.get("what") != "abandoned":
            self.tell(self._name_of(event.step), event.step, deleted=True)

    def tell(self, name: str, step: int | None, *, deleted: bool = False, save_id: Any = None) -> None:
        """Note that the checkpoint ``name`` of the run was committed or deleted."""
        options = self._options
        body: dict[str, Any] = {"key": name, "step": step}
        if options.root is None:
            body["root_url"] = self._run_url
        else:
            body["root"] = options.root
            body["key"] = "/".join(filter(None, (options.folder.strip("/"), name)))
        if deleted:
            body["deleted"] = True
        elif options.tags:
            body["tags"] = list(options.tags)
        if save_id:
            body["save_id"] = save_id
        with self._changed:
            self._fresh.append(_Note(body))
            del self._fresh[: -options.spool_notes]  # a disk that hangs must not cost memory without end
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is registered; tell whether it is, within ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_spooled() and not self._due, timeout_seconds)

    def close(self) -> None:
        """Wait as `wait` does, for ``close_seconds`` at the most; what is left by then stays in the spool.

        A few seconds are taken in any case until the notes are on disk, if it takes that.
        """
        self.wait(self._options.close_seconds)
        with self._changed:
            self._changed.wait_for(self._is_spooled, _SPOOL_SECONDS)
            left = len(self._due) + len(self._fresh)
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if left and not closed:
            logger.warning(
                "%s: %d notes have not reached the catalog %s; they stay in %s, and the next manager of this "
                "run sends them",
                self._run_url,
                left,
                self._options.url,
                self._spool.url,
            )

    def _is_spooled(self) -> bool:
        return not self._fresh and not self._busy

    # -- the thread that writes ------------------------------------------------------------------------------

    def _write(self) -> None:
        notes = self._loaded()
        while True:
            moot: list[_Note] = []
            with self._changed:
                for note in notes:
                    moot += filter(None, [self._due.pop(note.key, None)])
                    self._due[note.key] = note
                while len(self._due) > self._options.spool_notes:
                    moot.append(self._due.pop(next(iter(self._due))))
                self._changed.notify_all()
            for note in moot:
                self._forget(note.name)
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._fresh or self._closed)
                if not self._fresh:
                    return
                notes, self._fresh, self._busy = self._fresh, [], True
            for note in notes:
                self._keep(note)

    def _loaded(self) -> list[_Note]:
        """Read the notes of earlier processes, the oldest first; unreadable ones are removed, and too many of
        them."""
        found: list[str] = []
        with self._warned():
            for info in self._spool.list():
                is_stale = time.time() - info.modified_seconds > _STALE_SECONDS
                if _NAME.fullmatch(info.name):
                    found.append(info.name)
                elif is_stale and info.name.startswith(TEMPORARY_PREFIX):  # of a killed writer
                    self._forget(info.name)
        notes = []
        for name in found[-self._options.spool_notes :]:
            with suppress(OSError, ValueError, TypeError, LookupError, CheckpointError):
                body = json.loads(self._spool.read(name, limit_bytes=_MAX_NOTE_BYTES))
                if isinstance(body["key"], str):
                    notes.append(_Note(body, name))
        for name in {*found} - {note.name for note in notes}:
            self._forget(name)
        return notes

    def _keep(self, note: _Note) -> None:
        """Put a note on disk, if that works."""
        name = f"{time.time_ns():020d}-{self._own}-{next(self._numbers):06d}.json"
        data = json.dumps(note.body).encode()
        with self._warned():
            if len(data) <= _MAX_NOTE_BYTES:
                self._spool.make_root()
                self._spool.publish(name, data, durable=True, expected=None)
                note.name = name

    def _forget(self, name: str) -> None:
        """Remove a note that has arrived, or never will."""
        with self._warned():
            if name:
                self._spool.delete(name)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """End this block where the disk fails, and log that once."""
        try:
            yield
        except OSError as error:
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "%s: notes to the catalog cannot be kept on disk (%s); they are in memory only",
                    self._spool.url,
                    error,
                )

    # -- the thread that sends -------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            note = self._next()
            with nullcontext() if note is None else self._connect() as client:
                while note is not None and client is not None:
                    if self._is_dealt_with(client, note):
                        self._forget(note.name)
                        with self._changed:
                            if self._due.get(note.key) is note:
                                del self._due[note.key]
                            self._changed.notify_all()
                    note = self._next()
        except Exception:  # a thread's end must not be silent, and must not end training
            logger.exception("%s: registering has ended; a scan of the catalog finds the rest", self._run_url)

    def _next(self) -> _Note | None:
        """Wait for the next note that is due, once the service may be asked again; None to end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                due = min((max(note.due, self._down_seconds) for note in self._due.values()), default=None)
                if due is not None and due <= now:
                    return next(note for note in self._due.values() if note.due <= now)
                self._changed.wait(None if due is None else due - now)
            return None

    def _connect(self) -> httpx.Client:
        import httpx  # only here: it takes a tenth of a second, and that of no step

        key = self._options.key or os.environ.get(KEY_VARIABLE)
        headers = {"User-Agent": f"dcphub/{__version__} (registration)"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(
            base_url=self._options.url, headers=headers, timeout=self._options.request_seconds
        )

    def _is_dealt_with(self, client: httpx.Client, note: _Note) -> bool:
        """Send a note; False if it is to be sent again, because the service is away, or refuses it yet."""
        import httpx

        try:
            answer = client.post(_PATH, json=note.body)
        except httpx.HTTPError as error:
            return self._away(f"{type(error).__name__}: {error}")
        status = answer.status_code
        if not answer.is_success:
            said = f"{status} {_detail(answer)}"
            if status >= 500 or status in _TRY_AGAIN or answer.is_redirect:
                after = answer.headers.get("Retry-After", "")
                seconds = float(after) if after.isdecimal() else 0.0
                return self._away(said, seconds, refuses_key=status in (401, 403))
            self._failed_in_a_row = 0
            if status in _NOT_YET and note.refusals < _REFUSALS and _member(answer, "limit") is None:
                note.refusals += 1
                note.due = time.monotonic() + min(_LONGEST_PAUSE_SECONDS / 2, 0.5 * 2.0**note.refusals)
                return False
            logger.warning("%s: %s was not registered: %s", self._run_url, note.body.get("key"), said)
        else:
            if self._failed_in_a_row:
                logger.info("%s: the catalog %s answers again", self._run_url, self._options.url)
            self._warn(note, [str(said)[:500] for said in _member(answer, "warnings") or ()])
        self._failed_in_a_row = 0
        return True

    def _warn(self, note: _Note, warnings: list[str]) -> None:
        """Log each warning of the catalog once a day, and anew when it says more than other numbers or had
        ended meanwhile."""
        now, before = time.monotonic(), self._said
        self._said = {}
        for said in warnings:
            state = _SIZE.sub("", said)
            self._said[state] = before.get(state, now)
            if now >= self._said[state]:
                logger.warning("%s: %s was registered: %s", self._run_url, note.body.get("key"), said)
                self._said[state] = now + _WARN_AGAIN_SECONDS

    def _away(self, what: str, at_least_seconds: float = 0.0, *, refuses_key: bool = False) -> bool:
        if not self._failed_in_a_row:
            logger.warning(
                "%s: the catalog %s %s now, and is notified of checkpoints later: %s",
                self._run_url,
                self._options.url,
                "refuses the key" if refuses_key else "cannot be reached",
                what,
            )
        self._failed_in_a_row += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self._failed_in_a_row - 1, 10))
        at_least_seconds = min(at_least_seconds, 10 * _LONGEST_PAUSE_SECONDS)
        with self._changed:
            self._down_seconds = time.monotonic() + max(pause * random.uniform(0.75, 1.25), at_least_seconds)
        return False


def registration_of(catalog: str | CatalogRegistration | None) -> CatalogRegistration | None:
    """Return the registration that ``catalog`` asks for. Raises OptionError for what is no URL, and
    ModuleNotFoundError without httpx."""
    if catalog is None:
        return None
    if find_spec("httpx") is None:
        raise ModuleNotFoundError("registering checkpoints needs httpx: pip install 'dcphub[catalog]'")
    return CatalogRegistration(catalog) if isinstance(catalog, str) else catalog


def _spool_folder(options: CatalogRegistration, run_url: str) -> Path:
    if options.spool is not None:
        return Path(options.spool).expanduser()
    name = hashlib.sha256(f"{options.url}\0{run_url}".encode()).hexdigest()[:16]
    if "://" not in run_url:
        return Path(run_url) / ".catalog-spool" / name
    state = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    base = Path(state) if state.startswith("/") else Path(tempfile.gettempdir())
    return base / "dcphub" / "catalog-spool" / name


def _detail(answer: httpx.Response) -> str:
    detail = _member(answer, "detail")
    return answer.reason_phrase if detail is None else str(detail)[:500]


def _member(answer: httpx.Response, name: str) -> Any:
    """Return a member of the JSON that answers; None without it."""
    try:
        return json.loads(answer.content[:10_000])[name]
    except (ValueError, TypeError, LookupError):
        return None
