"""Storage access of the service: named roots, and keys confined to them.

A checkpoint is a root and a relative key. `check_key` refuses keys that paths, URLs or decoders could
interpret as another place; below local roots, links that leave the root are refused too. The formats check
file names inside of checkpoints (`dcp.storage.stores.base.check_name`).
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
"""Names of secret options; names with a continuation, such as ``embed_tokens.weight``, are tensors or files.
"""


def check_key(key: str) -> str:
    """Return ``key`` if it is a clean relative key: plain names joined by single slashes.

    Raises UnprocessableError for empty parts, ``.``, ``..``, absolute paths, backslashes, control
    characters, ``::``, URLs, percent-encoded forms of these at any depth, and keys above 1,024 characters.
    """
    fault = fault_of_key(key)
    if fault is not None:
        raise _refused(key, fault)
    return key


def fault_of_key(key: str) -> str | None:
    """Return the reason why ``key`` is invalid for `check_key`; None if it is valid."""
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        return f"must have 1 to {MAX_KEY_CHARACTERS} characters"
    text = key
    for _ in range(_MAX_DECODINGS):
        fault = _fault_of_text(text)
        if fault is not None:
            return fault
        decoded = unquote(text, errors="surrogateescape")
        if decoded == text:
            return None
        text = decoded
    return "percent-encoded repeatedly"


def _fault_of_text(text: str) -> str | None:
    if any(unicodedata.category(char) in _UNPRINTABLE for char in text):
        return "contains control characters or invalid Unicode"
    if "::" in text or "://" in text:
        return "a key is a path in the root, not a URL"
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
    """A folder below a root: ``files`` by name, names of ``folders`` if known, and ``modified_ns`` (0 if
    unsupported)."""

    key: str
    files: Mapping[str, FileInfo]
    folders: tuple[str, ...] = ()
    modified_ns: int = 0


class StorageRoot:
    """Storage below one place. Thread-safe; the first operation opens the storage.

    ``is_answering``: a request waits, so unresponsive storage fails soon. Jobs have the longer timeouts of a
    trainer. Explicit settings of the operator take precedence.
    """

    def __init__(self, name: str, settings: RootSettings, *, is_answering: bool = False) -> None:
        self.name = name
        self.settings = settings
        self.readonly = settings.readonly
        self.path = _local_path(settings.url)
        """Path on this machine; None for other storage."""
        is_remote = self.path is None and type_of_place(settings.url).takes_options
        patience = _SHORT_PATIENCE if is_remote and is_answering else {}
        self.open_store = OpenWith({**patience, **settings.storage_options})
        self.url = settings.url.rstrip("/") if self.path is None else str(self.path)

    def __repr__(self) -> str:
        return f"Root({self.name!r})"

    @property
    def is_local(self) -> bool:
        """True for a folder of this machine or of a mounted file system."""
        return self.path is not None

    def check_there(self) -> None:
        """Raise UnavailableError if the folder of a local root is missing.

        The disk may be unmounted or the name mistyped, so the contents are unknown rather than empty. A
        missing root is never created, since that would hide both cases.
        """
        if self.path is not None and not self.path.is_dir():
            raise UnavailableError(f"the folder of root {self.name} does not exist; is the disk mounted?")

    def identity(self) -> tuple[int, int] | None:
        """Return an identity of the folder of a local root, which changes with a rename, link or mount.

        Raises like `check_there`, and OSError.
        """
        if self.path is None:
            return None
        self.check_there()
        status = self.path.stat()
        return status.st_dev, status.st_ino

    def is_empty(self) -> bool:
        """Return True for an empty local root, such as an unmounted mount point. Raises OSError."""
        if self.path is None:
            return False
        with os.scandir(self.path) as entries:
            return next(entries, None) is None

    def check_key(self, key: str) -> str:
        """Check a key like `dcp.server.core.roots.check_key`."""
        return check_key(key)

    def url_of(self, key: str) -> str:
        """Return the path or URL of ``key``, "" for the root; for jobs, never for answers.

        Links are resolved, so the result is inside the root unless another writer replaces folders by links
        concurrently. Raises UnprocessableError for an invalid key or a key outside of the root, and like
        `check_there`.
        """
        if key:
            check_key(key)
        self.check_there()
        if self.path is None:
            return f"{self.url}/{key}" if key else self.url
        # The root itself may be a link, chosen by the operator; nothing below may leave it.
        base = Path(os.path.realpath(self.path))
        place = Path(os.path.realpath(base / key)) if key else base
        if not place.is_relative_to(base):
            raise UnprocessableError(
                f"the key {key[:200]!r} leads out of root {self.name} by a symbolic link", field="key"
            )
        return str(place)

    def store(self, key: str) -> Store:
        """Return the folder ``key`` as a store, "" for the root; no I/O."""
        url = self.url_of(key)
        if self.path is None or self.settings.storage_options:
            return self.open_store(url)
        return self._local_store(url)

    def folder_opener(self, key: str) -> OpenStore:
        """Open the folders directly below `store` of ``key`` by URL. Raises CheckpointFormatError for an
        invalid name."""

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
        """Return the folder or single file ``key``, not yet checked to be a checkpoint.

        Raises UnprocessableError for an invalid key, and errors of the store, which `problem` translates.
        """
        from dcp.storage.formats.opening import SourcePlace  # imported late: numpy is slow to import

        url = self.url_of(check_key(key))
        if self.path is not None:
            if not _is_file(url):
                return SourcePlace(self._local_store(url))
            # keep the name of a link, because its suffix tells the format
            above, _, name = key.rpartition("/")
            return SourcePlace(self._local_store(self.url_of(above)), name)
        folder, _, name = url.rpartition("/")
        if name.lower().endswith(file_suffixes()):
            store = self.open_store(folder)
            if store.stat(name) is not None:
                return SourcePlace(store, name)
        return SourcePlace(self.open_store(url))

    def source(self, key: str) -> Source:
        """Return the checkpoint ``key`` of any format with its index.

        Raises a ProblemError: not found, unreadable, or unresponsive storage.
        """
        from dcp.storage.formats.opening import Source, index_at

        try:
            place = self.place(key)
            return Source(place.store, index_at(place), f"{self.name}:{key}", place.file)
        except (CheckpointError, OSError) as error:
            raise self.problem(error) from error

    def problem(self, error: BaseException, *, is_known: bool = False) -> ProblemError:
        """Translate an error with `storage_problem`, naming the root instead of its place."""
        return storage_problem(error, root=self, is_known=is_known)

    def hide(self, text: str) -> str:
        """Return ``text`` with the name of the root instead of its place."""
        places = [self.url] if self.path is None else [os.path.realpath(self.path), str(self.path)]
        for place in sorted(set(places), key=len, reverse=True):
            text = re.sub(re.escape(place) + r"(?:/|(?![\w.\-]))", f"{self.name}:", text)
        return text

    def walk(self, below: str = "") -> Iterator[Folder]:
        """Yield every folder below ``below`` with files, and locally all folders, without following links.

        Folders that vanish meanwhile are omitted. Raises errors of the store.
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
        """Return the sorted names."""
        return sorted(self._roots)

    def get(self, name: str) -> StorageRoot:
        """Return the root. Raises NotFoundError for an unknown name."""
        try:
            return self._roots[name]
        except KeyError:
            raise NotFoundError(f"root {name[:64]!r} not found") from None

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

    ``is_known``: the catalog has the checkpoint, so missing files mean gone. Unresponsive storage gives
    UnavailableError; its message stays in the log, since it may name places and accounts.
    """
    if isinstance(error, ProblemError):
        return error
    where = "" if root is None else f" of root {root.name}"
    if isinstance(error, CheckpointNotFoundError):
        if is_known:
            return GoneError(f"the files of the checkpoint are no longer in the storage{where}")
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
"""Arguments in library errors, with their names in requests."""


def _shown(error: CheckpointError, root: StorageRoot | None) -> str:
    text = error.finding.partition("\n")[0]
    if error.argument in _OF_REQUESTS:
        text += f", or {error.alternative} with {_OF_REQUESTS[error.argument]}"
    text = text if root is None else root.hide(text)
    return _SECRET.sub("***", text)[:2000]


# -- places --------------------------------------------------------------------------------------------------


def _local_path(url: str) -> Path | None:
    """Return the absolute path of ``url``, or None for another scheme. Raises ValueError for an invalid
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
        # read before the listing, so that later changes are detected
        modified_ns = Path(path).stat().st_mtime_ns
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
    """Yield folders from a listing in name order: a folder is complete when a later folder begins."""
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
