"""The only storage that the service touches: roots by name, and keys that cannot lead out of them.

A checkpoint is a root and a relative key. `check_key` refuses whatever could mean another place to a path, a
URL or a decoder of one; below a local root, links that lead out of it are refused as well. Names of files
inside of a checkpoint are checked by the formats (`dcp.storage.stores.base.check_name`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from dcp.server.core.problems import (
    ConflictError,
    GoneError,
    NotFoundError,
    ProblemError,
    UnavailableError,
    UnprocessableError,
)
from dcp.server.core.settings import RootSettings
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    StorageFullError,
)
from dcp.storage.formats.registry import file_suffixes
from dcp.storage.stores import OpenStore, PosixStore, type_of_place
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, Store, check_name
from dcp.storage.stores.opening import OpenWith
from dcp.storage.stores.posix.files import storage_error

if TYPE_CHECKING:
    from dcp.storage.formats.opening import Source, SourcePlace

MAX_KEY_CHARACTERS: Final = 1024

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_MAX_DECODINGS: Final = 8
_SHORT_PATIENCE: Final = MappingProxyType({"retry_seconds": 3.0, "request_timeout_seconds": 5.0})
_NO_SUCH_PLACE: Final = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
_UNPRINTABLE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
_SECRET: Final = re.compile(
    r"(?i)(secret|token|password|signature|credential|access.?key)"
    r"(?![\w./]{0,300}['\"]?[)?:]{0,3}(?:[\s,;]|$))[^\s,;]*"
)
"""But for names with nothing behind them: those of tensors and files, as ``embed_tokens.weight``."""


def check_key(key: str) -> str:
    """``key`` itself if it is a clean relative one: plain names, joined by single slashes.

    Raises UnprocessableError for anything else: empty parts, ``.`` and ``..``, absolute paths, backslashes,
    control characters, ``::`` and URLs, percent-encoded forms of these however often encoded, and keys of
    more than 1,024 characters.
    """
    fault = fault_of_key(key)
    if fault is not None:
        raise _refused(key, fault)
    return key


def fault_of_key(key: str) -> str | None:
    """Return why ``key`` is none, as `check_key` says it; None if it is one."""
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        return f"a key has 1 to {MAX_KEY_CHARACTERS} characters"
    text = key
    for _ in range(_MAX_DECODINGS):
        fault = _fault_of_text(text)
        if fault is not None:
            return fault
        decoded = unquote(text, errors="surrogateescape")
        if decoded == text:
            return None
        text = decoded
    return "it is percent-encoded again and again"


def _fault_of_text(text: str) -> str | None:
    if any(unicodedata.category(char) in _UNPRINTABLE for char in text):
        return "it has control characters, or is no Unicode text"
    if "::" in text or "://" in text:
        return "URLs and chains of them are no keys"
    for part in text.split("/"):
        try:
            check_name(part)
        except CheckpointFormatError:
            return "each part between its slashes must be a plain name of up to 255 bytes"
        if part.endswith(":") or part.startswith("~"):
            return "no part may end in ':' or begin with '~'"
    return None


def _refused(key: str, why: str) -> UnprocessableError:
    return UnprocessableError(f"the key {key[:200]!r} is not allowed: {why}", field="key")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder below a root: its ``files`` by name, the names of ``folders`` in it, where that is known
    without more requests, and ``modified_ns`` of the folder itself (0 where there is no such thing)."""

    key: str
    files: Mapping[str, FileInfo]
    folders: tuple[str, ...] = ()
    modified_ns: int = 0


class StorageRoot:
    """Storage below one place. Nothing is touched before the first operation; safe from any thread.

    ``is_answering``: a request waits, so that storage which does not answer is soon an error. Jobs have
    the patience of a trainer. What the operator has set counts in any case.
    """

    def __init__(self, name: str, settings: RootSettings, *, is_answering: bool = False) -> None:
        self.name = name
        self.settings = settings
        self.readonly = settings.readonly
        self.path = _local_path(settings.url)
        """Where it is on this machine; None for any other storage."""
        is_remote = self.path is None and type_of_place(settings.url).takes_options
        patience = _SHORT_PATIENCE if is_remote and is_answering else {}
        self.open_store = OpenWith({**patience, **settings.storage_options})
        self.url = settings.url.rstrip("/") if self.path is None else str(self.path)

    def __repr__(self) -> str:
        return f"Root({self.name!r})"

    @property
    def is_local(self) -> bool:
        """True if it is a folder of this machine, or of a file system that it has mounted."""
        return self.path is not None

    def check_there(self) -> None:
        """Raises UnavailableError where the folder of a local root is not there.

        Its disk may be away, or its name mistyped: then nothing is known about what is in it, which is not
        the same as that nothing is. A root is never made here either, since that would hide both.
        """
        if self.path is not None and not self.path.is_dir():
            raise UnavailableError(f"the folder of root {self.name} is not there")

    def identity(self) -> tuple[int, int] | None:
        """Tells the folder of a local root from one that has taken its place, by a rename, a link or a mount.

        Raises as `check_there`, and OSError.
        """
        if self.path is None:
            return None
        self.check_there()
        status = self.path.stat()
        return status.st_dev, status.st_ino

    def is_empty(self) -> bool:
        """Return whether a local root has nothing in it, as a mount point whose disk is away. Raises
        OSError."""
        if self.path is None:
            return False
        with os.scandir(self.path) as entries:
            return next(entries, None) is None

    def check_key(self, key: str) -> str:
        """As `dcp.server.core.roots.check_key`."""
        return check_key(key)

    def url_of(self, key: str) -> str:
        """Return the path or URL of ``key``, "" is the root; for jobs, and never for an answer.

        Links are resolved, so that what is returned is in the root; it stays so unless another process
        exchanges folders of it for links at that very time, who must be able to write there. Raises
        UnprocessableError for a key that is not clean, or that leads out of the root, and as `check_there`.
        """
        if key:
            check_key(key)
        self.check_there()
        if self.path is None:
            return f"{self.url}/{key}" if key else self.url
        # That the root itself is behind links is the operator's choice; nothing below may lead out of it.
        base = Path(os.path.realpath(self.path))
        place = Path(os.path.realpath(base / key)) if key else base
        if not place.is_relative_to(base):
            raise UnprocessableError(
                f"the key {key[:200]!r} of root {self.name} leads out of it by a symbolic link", field="key"
            )
        return str(place)

    def store(self, key: str) -> Store:
        """Return the folder ``key`` as a store, "" is the root itself; nothing is touched."""
        url = self.url_of(key)
        if self.path is None or self.settings.storage_options:
            return self.open_store(url)
        return self._local_store(url)

    def folder_opener(self, key: str) -> OpenStore:
        """Opens the folders directly below `store` of ``key`` by their URLs, as that itself would be. Raises
        CheckpointFormatError for one whose name no key has."""

        def opened(url: str | os.PathLike[str]) -> Store:
            below = f"{key}/{os.fspath(url).rstrip('/').rpartition('/')[2]}"
            fault = fault_of_key(below)
            if fault is not None:
                raise CheckpointFormatError(f"{below!r} cannot be opened: {fault}")
            return self.store(below)

        return opened

    def _local_store(self, folder: str) -> PosixStore:
        return PosixStore(folder, links_within=os.path.realpath(self.path or ""))

    def place(self, key: str) -> SourcePlace:
        """Return the folder or the single file ``key``; that it is a checkpoint is not known yet.

        Raises UnprocessableError for a key that is not clean, and errors of the store, which `problem`
        translates.
        """
        from dcp.storage.formats.opening import SourcePlace  # only here: numpy takes its time

        url = self.url_of(check_key(key))
        if self.path is not None:
            if not _is_file(url):
                return SourcePlace(self._local_store(url))
            above, _, name = key.rpartition("/")  # a link keeps its own name, which says what it is
            return SourcePlace(self._local_store(self.url_of(above)), name)
        folder, _, name = url.rpartition("/")
        if name.lower().endswith(file_suffixes()):
            store = self.open_store(folder)
            if store.stat(name) is not None:
                return SourcePlace(store, name)
        return SourcePlace(self.open_store(url))

    def source(self, key: str) -> Source:
        """Return the checkpoint ``key``, of any format, with its index.

        Raises a ProblemError: not found, not readable, or storage that does not answer.
        """
        from dcp.storage.formats.opening import Source, index_at

        try:
            place = self.place(key)
            return Source(place.store, index_at(place), f"{self.name}:{key}", place.file)
        except (CheckpointError, OSError) as error:
            raise self.problem(error) from error

    def problem(self, error: BaseException, *, is_known: bool = False) -> ProblemError:
        """`storage_problem`, with the root's name for its place."""
        return storage_problem(error, root=self, is_known=is_known)

    def hide(self, text: str) -> str:
        """``text`` with the root's name in place of where it is."""
        places = [self.url] if self.path is None else [os.path.realpath(self.path), str(self.path)]
        for place in sorted(set(places), key=len, reverse=True):
            text = re.sub(re.escape(place) + r"(?:/|(?![\w.\-]))", f"{self.name}:", text)
        return text

    def walk(self, below: str = "") -> Iterator[Folder]:
        """Every folder below ``below`` that has files, and locally each other one too; none through links.

        What vanishes meanwhile is left out. Raises errors of the store.
        """
        start = self.url_of(below)
        if self.path is not None:
            yield from _walk_local(start, below)
            return
        store = self.open_store(start)
        yield from _walk_tree(store, below)


class Roots:
    """The configured roots by name; ``is_answering`` as for `StorageRoot`."""

    def __init__(self, settings: Mapping[str, RootSettings], *, is_answering: bool = False) -> None:
        self._roots = {
            name: StorageRoot(name, own, is_answering=is_answering) for name, own in settings.items()
        }

    def names(self) -> list[str]:
        """Sorted."""
        return sorted(self._roots)

    def get(self, name: str) -> StorageRoot:
        """Return the root; NotFoundError if there is none of that name."""
        try:
            return self._roots[name]
        except KeyError:
            raise NotFoundError(f"there is no root {name[:64]!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._roots

    def __iter__(self) -> Iterator[StorageRoot]:
        return iter(self._roots.values())

    def __len__(self) -> int:
        return len(self._roots)


# -- errors --------------------------------------------------------------------------------------------------


def storage_problem(
    error: BaseException, *, root: StorageRoot | None = None, is_known: bool = False
) -> ProblemError:
    """Return the answer to a request that failed in storage.

    ``is_known``: the catalog has the checkpoint, so that what is not there is gone. Storage that does not
    answer is UnavailableError, and its message stays in the log: it may name places and accounts.
    """
    if isinstance(error, ProblemError):
        return error
    where = "" if root is None else f" of root {root.name}"
    if isinstance(error, CheckpointNotFoundError):
        if is_known:
            return GoneError(f"the checkpoint's files are not in the storage{where} any more")
        return NotFoundError(f"there is no checkpoint in the storage{where} under that key")
    if isinstance(error, StorageFullError):
        return UnavailableError(f"the storage{where} is full", retry_seconds=60)
    if isinstance(error, OSError) and error.errno in _NO_SUCH_PLACE:
        return NotFoundError(f"there is no checkpoint in the storage{where} under that key")
    if isinstance(error, OSError):
        reason = type(error).__name__ if error.errno is None else os.strerror(error.errno)
        return UnavailableError(f"the storage{where} cannot be used: {reason}")
    if isinstance(error, CheckpointConflictError):
        return ConflictError(_shown(error, root))
    if isinstance(error, CorruptCheckpointError):
        return UnprocessableError(_shown(error, root), reason="damaged")
    if isinstance(error, PlanError):
        return UnprocessableError(_shown(error, root), reason="request")
    if isinstance(error, CheckpointFormatError):
        return UnprocessableError(_shown(error, root), reason="format")
    return ProblemError(f"the storage{where} could not be used: {type(error).__name__}")


_OF_REQUESTS: Final = {"drop_objects=True": "drop_objects=true"}
"""Arguments that requests have as well, in their words."""


def _shown(error: CheckpointError, root: StorageRoot | None) -> str:
    text = error.finding.partition("\n")[0]
    if error.argument in _OF_REQUESTS:
        text += f", or {error.alternative} with {_OF_REQUESTS[error.argument]}"
    text = text if root is None else root.hide(text)
    return _SECRET.sub("***", text)[:2000]


# -- places --------------------------------------------------------------------------------------------------


def _local_path(url: str) -> Path | None:
    """Return the absolute path that ``url`` is, None for any other scheme. ValueError for what cannot be a
    root."""
    if "::" in url:
        raise ValueError(f"root {url!r}: chained file systems are not supported")
    scheme = _URL.match(url)
    if scheme is None:
        return Path(url).expanduser().absolute()
    if scheme[1].lower() != "file":
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(f"root {url!r}: write file:///absolute/path")
    return Path(unquote(parts.path)).absolute()


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _walk_local(path: str, key: str) -> Iterator[Folder]:
    files: dict[str, FileInfo] = {}
    folders: list[str] = []
    try:
        modified_ns = Path(path).stat().st_mtime_ns  # before the listing: what changes in between shows again
        with os.scandir(path) as entries:
            for entry in entries:
                if not _is_plain(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    files[entry.name] = FileInfo(entry.name, status.st_size, status.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise storage_error(error, "list", Path(path)) from error
    folders.sort()
    yield Folder(key, files, tuple(folders), modified_ns)
    for name in folders:
        yield from _walk_local(f"{path}/{name}", f"{key}/{name}" if key else name)


def _walk_tree(store: Store, key: str) -> Iterator[Folder]:
    """From a listing in the order of names: a folder is complete when one beside or above it begins."""
    open_folders: list[tuple[str, dict[str, FileInfo]]] = []
    for below, info in store.tree():
        folder = "/".join(filter(None, (key, below)))
        while open_folders and not _is_within(folder, open_folders[-1][0]):
            yield Folder(*open_folders.pop())
        if not open_folders or open_folders[-1][0] != folder:
            open_folders.append((folder, {}))
        if _is_plain(info.name):
            open_folders[-1][1][info.name] = info
    while open_folders:
        yield Folder(*open_folders.pop())


def _is_within(folder: str, other: str) -> bool:
    return folder == other or not other or folder.startswith(f"{other}/")


def _is_plain(name: str) -> bool:
    if name.startswith(TEMPORARY_PREFIX):
        return False
    try:
        check_key(name)
    except UnprocessableError:
        return False
    return True
