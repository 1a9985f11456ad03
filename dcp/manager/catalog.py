"""Notify a catalog of commits and deletions, in the background. Does not import torch.

Training only adds a note to a queue. One thread writes notes to a spool on disk and another one sends them.
If the catalog is unavailable or the trainer is killed, the next manager of the run sends the remaining notes.
The catalog reads the checkpoint itself, so notes may be sent twice. A scan of the catalog finds checkpoints
of lost notes.
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
"""Attempts to send a note that the catalog cannot process yet, because a network file system shows an older
state.
"""
_SPOOL_SECONDS: Final = 5.0
_NOT_YET: Final = frozenset({404, 409, 410})
_TRY_AGAIN: Final = frozenset({401, 403, 408, 425, 429})

_MAX_NOTE_BYTES: Final = 64 << 10

_NAME: Final = re.compile(r"[0-9]{20}-[0-9a-f]{8}-[0-9]{6,}\.json")
_STALE_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class CatalogRegistration:
    """Registration of a manager's checkpoints with a service: ``CatalogRegistration(url, key=...)``.

    Attributes:
        url: URL of the service.
        key: Key with the scope "write"; the variable ``DCP_CATALOG_KEY`` by default. It is never printed.
        root: Name of a root of the service. By default, the service finds the root by the run's path or URL,
            which must be the same on both machines.
        folder: Folder of the run below ``root``.
        tags: Tags for every checkpoint.
        spool: Folder for unsent notes: by default ``.catalog-spool`` in a local run, and below
            ``~/.local/state/dcphub`` for URLs.
        spool_notes: Maximum number of notes in the spool; the oldest notes are dropped.
        request_seconds: Timeout of a request.
        close_seconds: Longest wait for unsent notes when the manager closes.
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
            raise OptionError(f"catalog: {self.url!r} is not a URL of a service, such as https://host:8470")
        if self.folder and self.root is None:
            raise OptionError("catalog: folder= (the run's folder below a root) requires root=")
        if self.spool_notes < 1 or self.request_seconds <= 0 or self.close_seconds < 0:
            raise OptionError("catalog: spool_notes, request_seconds and close_seconds must be positive")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise OptionError("catalog: the key has invalid characters")


@dataclass(eq=False, slots=True)
class _Registration:
    """Registration of a commit or deletion: ``body`` is sent when ``due``; ``name`` is its spool file ("" in
    memory).
    """

    body: Mapping[str, Any]
    name: str = ""
    refusals: int = 0
    due: float = 0.0

    @property
    def key(self) -> str:
        """The checkpoint of the note."""
        return f"{self.body.get('root') or self.body.get('root_url')}\0{self.body.get('key')}"


class Registrar:
    """Register the checkpoints of one run, on one rank. Methods neither raise nor wait, except `close`.

    Each note is a file of the spool, written durably and renamed. Several processes may share the spool; each
    loads the existing notes at its start. Notes that cannot be written stay in memory.
    """

    def __init__(
        self, options: CatalogRegistration, run_url: str, name_of: Callable[[int], str] = str
    ) -> None:
        self._options = options
        self._run_url = run_url
        self._name_of = name_of
        self._changed = threading.Condition()
        self._fresh: list[_Registration] = []
        """Notes not yet on disk."""
        self._busy = True
        """True while notes of earlier processes are loaded or notes are written."""
        self._due: dict[str, _Registration] = {}
        """Notes by checkpoint in order of arrival; a later note replaces an earlier one."""
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
        """Queue a note that the checkpoint ``name`` was committed or deleted."""
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
            self._fresh.append(_Registration(body))
            del self._fresh[: -options.spool_notes]  # limits memory if the disk hangs
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all notes are registered; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_spooled() and not self._due, timeout_seconds)

    def close(self) -> None:
        """Wait up to ``close_seconds`` for unsent notes. The remaining notes stay in the spool.

        The wait for notes to reach the disk may add a few seconds.
        """
        self.wait(self._options.close_seconds)
        with self._changed:
            self._changed.wait_for(self._is_spooled, _SPOOL_SECONDS)
            left = len(self._due) + len(self._fresh)
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if left and not closed:
            logger.warning(
                "%s: %d registrations have not reached the catalog %s; the next manager of this run sends "
                "them from %s",
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
            moot: list[_Registration] = []
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

    def _loaded(self) -> list[_Registration]:
        """Read notes of earlier processes, oldest first, and remove unreadable and excess notes."""
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
                    notes.append(_Registration(body, name))
        for name in {*found} - {note.name for note in notes}:
            self._forget(name)
        return notes

    def _keep(self, note: _Registration) -> None:
        """Write a note to disk if possible."""
        name = f"{time.time_ns():020d}-{self._own}-{next(self._numbers):06d}.json"
        data = json.dumps(note.body).encode()
        with self._warned():
            if len(data) <= _MAX_NOTE_BYTES:
                self._spool.make_root()
                self._spool.publish(name, data, durable=True, expected=None)
                note.name = name

    def _forget(self, name: str) -> None:
        """Remove the file of a finished note."""
        with self._warned():
            if name:
                self._spool.delete(name)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Suppress errors of the disk in this block, and log the first one."""
        try:
            yield
        except OSError as error:
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "%s: registrations for the catalog cannot be stored on disk (%s); unsent ones are lost "
                    "when the process ends",
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
        except Exception:  # training must not fail because of this thread, but its end is logged
            logger.exception(
                "%s: registration stopped after an error; scan the root in the catalog to register the "
                "remaining checkpoints",
                self._run_url,
            )

    def _next(self) -> _Registration | None:
        """Wait for the next due note; None to end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                due = min((max(note.due, self._down_seconds) for note in self._due.values()), default=None)
                if due is not None and due <= now:
                    return next(note for note in self._due.values() if note.due <= now)
                self._changed.wait(None if due is None else due - now)
            return None

    def _connect(self) -> httpx.Client:
        import httpx  # imported late: the import takes a tenth of a second

        key = self._options.key or os.environ.get(KEY_VARIABLE)
        headers = {"User-Agent": f"dcphub/{__version__} (registration)"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(
            base_url=self._options.url, headers=headers, timeout=self._options.request_seconds
        )

    def _is_dealt_with(self, client: httpx.Client, note: _Registration) -> bool:
        """Send a note; return False to send the note again later."""
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

    def _warn(self, note: _Registration, warnings: list[str]) -> None:
        """Log each warning of the catalog once a day, and again if its text changes or it returns."""
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
                "%s: the catalog %s %s; checkpoints will be registered later: %s",
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
    """Return the registration for ``catalog``. Raises OptionError for an invalid URL and ModuleNotFoundError
    without httpx.
    """
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
    """Return a member of a JSON answer; None if absent."""
    try:
        return json.loads(answer.content[:10_000])[name]
    except (ValueError, TypeError, LookupError):
        return None
