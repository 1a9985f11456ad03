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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.stores.names import TEMPORARY_PREFIX
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
_REFUSALS: Final = 8
"""So often a note is sent that the catalog can make nothing of yet, because a network file system shows it an
older state; a minute or two in all."""
_SPOOL_SECONDS: Final = 5.0
_NOT_YET: Final = frozenset({404, 409, 410})
_TRY_AGAIN: Final = frozenset({401, 403, 408, 425, 429})

MAX_NOTE_BYTES: Final = 64 << 10

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


class Registrar:
    """Registers the checkpoints of one run; made on one rank. Nothing that it does raises or waits, but for
    `close`, which is bounded."""

    def __init__(
        self, options: CatalogRegistration, run_url: str, name_of: Callable[[int], str] = str
    ) -> None:
        self._options = options
        self._run_url = run_url
        self._name_of = name_of
        self._changed = threading.Condition()
        self._fresh: list[Note] = []
        """Not on disk yet."""
        self._busy = False
        self._loaded = False
        self._due: dict[str, Note] = {}
        """By checkpoint, in the order in which they came: a later note makes an earlier one moot."""
        self._closed = False
        self._down_seconds = 0.0
        self._failed_in_a_row = 0
        self._spool = Spool(_spool_folder(options, run_url), options.spool_notes)
        for work, name in ((self._write, "dcp-catalog-spool"), (self._send, "dcp-catalog-send")):
            threading.Thread(target=work, name=name, daemon=True).start()

    # -- from training ---------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Listen to the manager's events."""
        if event.step is None:
            return
        if event.kind == "saved":
            save_id = event.data.get("save_id")
            self._put(event.step, {"save_id": save_id} if save_id else {})
        elif event.kind == "dropped":
            self._put(event.step, {})
        elif event.kind == "deleted" and event.data.get("what") != "abandoned":
            self._put(event.step, {"deleted": True})

    def tell(self, name: str, step: int | None, *, deleted: bool) -> None:
        """Note that the checkpoint ``name`` of the run was committed or deleted."""
        self._put(step, {"deleted": True} if deleted else {}, name)

    def _put(self, step: int | None, more: Mapping[str, Any], name: str | None = None) -> None:
        key = name if name is not None else self._name_of(step or 0)
        options = self._options
        body: dict[str, Any] = {"key": key, "step": step, **more}
        if options.root is None:
            body["root_url"] = self._run_url
        else:
            body["root"] = options.root
            body["key"] = "/".join(filter(None, (options.folder.strip("/"), body["key"])))
        if options.tags and not more.get("deleted"):
            body["tags"] = list(options.tags)
        with self._changed:
            self._fresh.append(Note(body))
            del self._fresh[: -options.spool_notes]  # a disk that hangs must not cost memory without end
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is registered; tell whether it is, within ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout_seconds)

    def close(self) -> bool:
        """Wait as `wait` does, for ``close_seconds`` at the most; what is left by then stays in the spool.

        A few seconds are taken in any case until the notes are on disk, if it takes that.
        """
        done = self.wait(self._options.close_seconds)
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
                self._spool.folder,
            )
        return done

    def _is_spooled(self) -> bool:
        return self._loaded and not self._fresh and not self._busy

    def _is_done(self) -> bool:
        return self._is_spooled() and not self._due

    # -- the thread that writes ------------------------------------------------------------------------------

    def _write(self) -> None:
        self._take_over(self._spool.load())
        while True:
            with self._changed:
                self._loaded = True
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._fresh or self._closed)
                if not self._fresh:
                    return
                notes, self._fresh = self._fresh, []
                self._busy = True
            self._spool.add(notes)
            self._take_over(notes)

    def _take_over(self, notes: list[Note]) -> None:
        moot: list[Note] = []
        with self._changed:
            for note in notes:
                moot += filter(None, [self._due.pop(note.key, None)])
                self._due[note.key] = note
            while len(self._due) > self._options.spool_notes:
                moot.append(self._due.pop(next(iter(self._due))))
            self._changed.notify_all()
        for note in moot:
            self._spool.remove(note)

    # -- the thread that sends -------------------------------------------------------------------------------

    def _send(self) -> None:
        client: httpx.Client | None = None
        try:
            while (note := self._next()) is not None:
                if client is None:
                    client = self._connect()
                outcome = self._post(client, note)
                if outcome is None:
                    self._later(note)
                elif outcome:
                    self._settled(note)
        except Exception:  # a thread's end must not be silent, and must not end training
            logger.exception("%s: registering has ended; a scan of the catalog finds the rest", self._run_url)
        finally:
            if client is not None:
                client.close()

    def _next(self) -> Note | None:
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
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.Client(
            base_url=self._options.url, headers=headers, timeout=self._options.request_seconds
        )

    def _post(self, client: httpx.Client, note: Note) -> bool | None:
        """Send a note: True if it is dealt with, None if it should be sent again; False if the service is
        away."""
        import httpx

        try:
            answer = client.post(_PATH, json=note.body)
        except httpx.HTTPError as error:
            self._away(f"{type(error).__name__}: {error}")
            return False
        if answer.is_success:
            if self._failed_in_a_row:
                logger.info("%s: the catalog %s answers again", self._run_url, self._options.url)
            self._failed_in_a_row = 0
            return True
        said = f"{answer.status_code} {_detail(answer)}"
        if answer.status_code >= 500 or answer.status_code in _TRY_AGAIN or answer.is_redirect:
            self._away(said, _retry_after(answer))
            return False
        self._failed_in_a_row = 0
        if answer.status_code in _NOT_YET and note.refusals < _REFUSALS:
            return None
        logger.warning("%s: %s was not registered: %s", self._run_url, note.key, said)
        return True

    def _away(self, what: str, at_least_seconds: float = 0.0) -> None:
        if not self._failed_in_a_row:
            logger.warning(
                "%s: the catalog %s cannot be reached now, and is notified of checkpoints later: %s",
                self._run_url,
                self._options.url,
                what,
            )
        self._failed_in_a_row += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self._failed_in_a_row - 1, 10))
        with self._changed:
            self._down_seconds = time.monotonic() + max(pause * random.uniform(0.75, 1.25), at_least_seconds)

    def _later(self, note: Note) -> None:
        with self._changed:
            note.refusals += 1
            note.due = time.monotonic() + min(_LONGEST_PAUSE_SECONDS / 2, 0.5 * 2.0**note.refusals)

    def _settled(self, note: Note) -> None:
        self._spool.remove(note)
        with self._changed:
            if self._due.get(note.key) is note:
                del self._due[note.key]
            self._changed.notify_all()


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
    try:
        document = json.loads(answer.content[:10_000])
    except ValueError:
        return answer.reason_phrase
    detail = document.get("detail") if isinstance(document, dict) else None
    return str(detail)[:500] if detail is not None else answer.reason_phrase


def _retry_after(answer: httpx.Response) -> float:
    text = answer.headers.get("Retry-After", "")
    return min(float(text), 10 * _LONGEST_PAUSE_SECONDS) if text.isdecimal() else 0.0


# -- notes on a disk -----------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Note:
    """A note with the content ``body``, in the file ``name``, "" if it is in memory only. What was refused
    comes again when it is ``due`` (of the monotonic clock)."""

    body: Mapping[str, Any]
    name: str = ""
    refusals: int = 0
    due: float = 0.0

    @property
    def key(self) -> str:
        """The checkpoint of the note."""
        return f"{self.body.get('root') or self.body.get('root_url')}\0{self.body.get('key')}"


class Spool:
    """Notes in ``folder``, ``limit`` at most: each is one file, written aside, made durable and renamed.

    Several processes may share a folder; each loads what is there when it starts. Nothing raises: what cannot
    be written stays in memory, and is logged once.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self._store = PosixStore(folder)
        self._limit = limit
        self._own = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._is_warned = False

    def load(self) -> list[Note]:
        """Read the notes that are there, the oldest first; unreadable ones are removed, and too many of
        them."""
        found: list[Note] = []
        try:
            listed = self._store.list()
        except OSError as error:
            self._tell(error)
            return []
        for info in listed:
            is_stale = time.time() - info.modified_seconds > _STALE_SECONDS
            if _NAME.fullmatch(info.name):
                found.append(Note({}, info.name))
            elif is_stale and info.name.startswith(TEMPORARY_PREFIX):  # of a killed writer
                self.remove(Note({}, info.name))
        for note in found[: -self._limit]:
            self.remove(note)
        return [note for note in found[-self._limit :] if self._read(note)]

    def add(self, notes: Sequence[Note]) -> None:
        """Put ``notes`` on disk, as far as that works."""
        for note in notes:
            name = f"{time.time_ns():020d}-{self._own}-{next(self._numbers):06d}.json"
            data = json.dumps(note.body).encode()
            if len(data) > MAX_NOTE_BYTES:
                continue
            try:
                self._store.make_root()
                self._store.publish(name, data, durable=True, expected=None)
                note.name = name
            except OSError as error:
                self._tell(error)

    def remove(self, note: Note) -> None:
        """Remove a note that has arrived, or never will."""
        try:
            if note.name:
                self._store.delete(note.name)
        except OSError as error:
            self._tell(error)

    def _read(self, note: Note) -> bool:
        try:
            body = json.loads(self._store.read(note.name, limit_bytes=MAX_NOTE_BYTES))
        except (OSError, ValueError, CheckpointError):
            body = None
        if isinstance(body, dict) and isinstance(body.get("key"), str):
            note.body = body
            return True
        self.remove(note)
        return False

    def _tell(self, error: OSError) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s: notes to the catalog cannot be kept on disk (%s); they are in memory only",
                self.folder,
                error,
            )
