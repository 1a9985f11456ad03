"""Streamed answers: events of jobs, and downloads to files.

Downloads resume after interruptions and get their final name once complete. The partial file ``.NAME.part``
has a note of its content beside it. The service announces the size, and the entity tag identifies the
content. If the service finds damage during reading, it closes the connection: bytes are missing, but never
wrong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dcp.server.client.errors import AnswerError, DownloadError

_LONGEST_PAUSE_SECONDS: Final = 10.0
_MAX_EVENT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job. Events "progress" and "end" have no ``id``; "end" is the last event of a job, and
    "ready" the first event of a stream of all jobs."""

    kind: str
    data: Mapping[str, Any]
    id: int | None = None
    at: datetime | None = None
    job_id: int | None = None


@dataclass(slots=True)
class EventStream:
    """A stream over several connections. Each connection continues after the event ``last_id``; the last
    event sets ``ended``."""

    last_id: int | None = None
    ended: bool = False
    pause_seconds: float = 0.5
    failures: int = 0
    _event: str = ""
    _id: str | None = None
    _data: list[str] = field(default_factory=list)
    _size: int = 0
    _rest: bytes = b""

    def headers(self) -> dict[str, str]:
        """Return the headers of the next connection, which starts with a new event."""
        self._forget()
        self._rest = b""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        return headers if self.last_id is None else headers | {"Last-Event-ID": str(self.last_id)}

    def feed(self, data: bytes) -> list[JobEvent]:
        """Parse bytes, and return the completed events. Raises AnswerError.

        Only line feeds end lines, unlike in `str.splitlines`.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise AnswerError("an event of the service is too long")
        events = (self._line(line.removesuffix(b"\r").decode(errors="replace")) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: str) -> JobEvent | None:
        if not line:
            return self._complete()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        self._size += len(line)
        if self._size > _MAX_EVENT_BYTES:
            raise AnswerError("an event of the service is too long")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id":
            self._id = value
        elif name == "retry" and value.isdecimal():
            self.pause_seconds = min(int(value) / 1000, _LONGEST_PAUSE_SECONDS)
        return None

    def failed(self) -> float:
        """Count a failed connection, and return the seconds to wait before the next."""
        self.failures += 1
        return min(_LONGEST_PAUSE_SECONDS, self.pause_seconds * 2.0 ** min(self.failures, 10))

    def _complete(self) -> JobEvent | None:
        kind, text, number = self._event or "message", "\n".join(self._data), self._id
        self._forget()
        if not text:
            return None
        try:
            document = json.loads(text)
        except ValueError as error:
            raise AnswerError("an event of the service is not JSON") from error
        self.failures = 0
        self.ended = self.ended or kind == "end"
        data = document if isinstance(document, Mapping) else {"value": document}
        job_id = data.get("job_id")
        job = job_id if type(job_id) is int else None
        if number is None or not number.isdecimal():
            return JobEvent(kind, data, job_id=job)
        self.last_id = int(number)
        inner, at = data.get("data"), data.get("at")
        return JobEvent(
            kind,
            inner if isinstance(inner, Mapping) else data,
            self.last_id,
            datetime.fromisoformat(at) if isinstance(at, str) else None,
            job,
        )

    def _forget(self) -> None:
        self._event, self._id, self._data, self._size = "", None, [], 0


OnBytes = Callable[[int, int], None]
"""Callback with the received and the total number of bytes."""

_CONTENT_RANGE: Final = re.compile(r"bytes (?:([0-9]+)-([0-9]+)|\*)/([0-9]+)")
_MAX_NOTE_BYTES: Final = 64 << 10
_BUFFER_BYTES: Final = 1 << 20
_NO_FOLDER_SYNC: Final = frozenset(
    {errno.EACCES, errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
)
"""Same as in `dcp.storage.stores.posix.files`, which the client does not import."""


class Download:
    """A download to the file ``target``; a context manager.

    ``what`` names the content: partial files of other content are not resumed. Raises FileExistsError for an
    existing ``target`` that may not be replaced.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        what: str,
        *,
        resume: bool = True,
        overwrite: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> None:
        self.target = Path(target)
        if self.target.exists() and not overwrite:
            raise FileExistsError(f"{self.target} exists; pass overwrite=True to replace it")
        self._part = self.target.with_name(f".{self.target.name}.part")
        self._note = self.target.with_name(f".{self.target.name}.part.json")
        self._what = what
        self._on_bytes = on_bytes
        self._etag: str | None = None
        self._total: int | None = None
        self._file = self._part.open("r+b" if resume and self._is_part() else "wb", _BUFFER_BYTES)
        self._have = self._file.seek(0, os.SEEK_END)
        self._progressed = False

    @property
    def is_whole(self) -> bool:
        """True once complete."""
        return self._total is not None and self._have == self._total

    def headers(self) -> dict[str, str]:
        """Return the headers of the next request."""
        self._progressed = False
        headers = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}
        if self._have and self._etag:
            headers |= {"Range": f"bytes={self._have}-", "If-Range": self._etag}
        return headers

    def begin(self, status_code: int, headers: Mapping[str, str]) -> bool:
        """Start an answer, and return True if its body is needed; otherwise request again unless `is_whole`.

        Raises AnswerError for an answer without size.
        """
        if headers.get("content-encoding", "identity") != "identity":
            raise AnswerError(
                "a proxy compresses the responses of the service, although the request forbids this"
            )
        etag, size = headers.get("etag"), headers.get("content-length", "")
        match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        begins, total = (match[1], int(match[3])) if match is not None else (None, None)
        if status_code == 416 and total == self._have == self._total:
            return False  # already complete
        goes_on = begins is not None and int(begins) == self._have and etag == self._etag
        if status_code == 206 and goes_on and total == self._total:
            return True
        if status_code in (206, 416):
            self._begin_anew(None, None)
            return False
        if not size.isdecimal():
            raise AnswerError("the service does not send the size of the file")
        self._begin_anew(etag, int(size))
        return True

    def write(self, data: bytes) -> None:
        """Write the next bytes."""
        self._file.write(data)
        self._have += len(data)
        self._progressed = self._progressed or bool(data)
        if self._total is not None and self._have > self._total:
            raise AnswerError(f"the service sent more than the announced {self._total} bytes")
        if self._on_bytes is not None:
            self._on_bytes(self._have, self._total or self._have)

    def broke_off(self) -> bool:
        """End an incomplete answer, and return True if it brought any bytes."""
        self._file.flush()
        return self._progressed

    def incomplete(self, why: str) -> DownloadError:
        """Return the error for an abandoned download."""
        return DownloadError(
            f"{self.target}: incomplete after {self._have} of {self._total} bytes: {why}. Repeat the call to "
            "resume. If it ends at the same byte again, the checkpoint is damaged: verify it"
        )

    def finish(self) -> Path:
        """Rename the complete file durably."""
        if not self.is_whole:
            raise self.incomplete("no more")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.target)
        _sync_folder(self.target.parent)
        self._note.unlink(missing_ok=True)
        return self.target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._have == 0:  # no bytes to resume from
            for path in (self._part, self._note):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _begin_anew(self, etag: str | None, total: int | None) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._have, self._etag, self._total = 0, etag, total
        # A weak tag does not guarantee equal bytes.
        if etag is None or etag.startswith("W/"):
            self._etag = None
            self._note.unlink(missing_ok=True)
            return
        note = {"what": self._what, "etag": etag, "bytes": total, "boot": _boot()}
        self._note.write_text(json.dumps(note))

    def _is_part(self) -> bool:
        """Return True if a partial file of this content exists."""
        try:
            with self._note.open("rb") as file:
                note = json.loads(file.read(_MAX_NOTE_BYTES))
            size = self._part.stat().st_size
        except (OSError, ValueError):
            return False
        if not isinstance(note, dict) or note.get("what") != self._what or note.get("boot") != _boot():
            return False
        etag, total = note.get("etag"), note.get("bytes")
        if not isinstance(etag, str) or type(total) is not int or size > total:
            return False
        self._etag, self._total = etag, total
        return True


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; some network file systems do not support this."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _boot() -> str:
    """Return the id of this boot: a power loss may leave a partial file with holes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
