"""POSIX store: files below a folder on local disks, NFS, Lustre and similar file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from dcp.storage.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp.storage.stores.base import (
    ANY,
    LOCK_NAME,
    TEMPORARY_PREFIX,
    Capabilities,
    Expected,
    FileInfo,
    Store,
    StoreType,
    Version,
    check_name,
    is_name,
    locked,
    place_text,
)
from dcp.storage.stores.posix.files import (
    NO_LOCKS,
    RESERVED_FROM_BYTES,
    WITHOUT_LOCKS,
    Observe,
    PosixReadHandle,
    PosixWriteHandle,
    broken_link,
    is_below,
    is_link_refused,
    is_named,
    path_of_descriptor,
    step,
    storage_error,
    sync_folder,
    warn_once,
)

_MAKE_ATTEMPTS: Final = 20
_PUBLISH_LOCK_SECONDS: Final = 60.0
"""Timeout of the publish lock, which is held for a read and a rename; longer waits mean a hanging file
system.
"""

_LOCK_BUSY: Final = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EINTR, errno.ENOENT, errno.ESTALE})
"""Errnos of a busy lock: held by another writer, or removed since opening (ENOENT, or ESTALE on NFS)."""


class PosixStore(Store):
    """Store in a folder of a POSIX file system.

    The folder may be a symbolic link; files in the folder may not, by default.

    - ``follow_links``: read through symbolic links, as in caches of model hubs. Off by default: a hostile
      checkpoint could link to any file of the user.
    - ``links_within``: read through symbolic links to files below this folder only. The check uses the open
      file and cannot be bypassed by exchanging links. Linux only.
    - ``direct_io``: False writes durable files through the page cache.
    - ``hard_links``: False commits with a rename under the lock, as on file systems without hard links; this
      excludes only writers of this package.
    - ``observe``: called as ``observe(step, name)`` before every system call that changes storage.

    Without file locks, a warning says that replacements by several processes are not excluded; hard links
    still give a new name to one writer only.
    """

    capabilities = Capabilities(is_local=True, lists_folders=True)

    def __init__(
        self,
        path: str | os.PathLike[str],
        observe: Callable[[str, str], None] | None = None,
        *,
        follow_links: bool = False,
        links_within: str | os.PathLike[str] | None = None,
        direct_io: bool = True,
        hard_links: bool = True,
    ) -> None:
        text = place_text(path)
        try:
            self._root = Path(text).absolute()
        except OSError as error:  # the current folder was removed
            raise StorageError(
                f"{text!r} is relative to the current folder, which was removed: give an absolute path, "
                "or change to another folder",
                path=text,
                op="open",
                errno=error.errno,
            ) from error
        self._observe: Observe = observe
        self._follow_links = follow_links
        self._links_within = None if links_within is None else os.path.realpath(links_within)
        self._direct_io = direct_io
        self._hard_links = hard_links
        self._lock_owners: set[tuple[int, int]] = set()
        self.url = str(self._root)

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes get their own store without the locks held here.
        return vars(self) | {"_lock_owners": set()}

    def make_root(self) -> None:
        """Create the folder; each new folder is made durable in its parent."""
        refused: StorageError | None = None
        for _ in range(_MAKE_ATTEMPTS):  # removing the previous checkpoint also removes the folder
            try:
                self._make(self._root)
            except StorageError as error:
                if error.errno not in (errno.ENOENT, errno.EEXIST):
                    raise
                refused = error
            if self.exists():
                with suppress(OSError):  # a new time keeps cleanup from removing the empty folder
                    os.utime(self._root)
                return
            if os.path.lexists(self._root):
                break
        is_absent = refused is not None and not os.path.lexists(self._root)
        other = f"{self.url} cannot be created ({refused})" if is_absent else f"{self.url} is not a folder"
        fault = broken_link(self._root) or other
        raise StorageError(f"{fault}, so no checkpoint can be stored there", path=self.url, op="mkdir")

    def _make(self, folder: Path) -> None:
        with step(None, "stat", folder):
            if folder.exists():
                return
        self._make(folder.parent)
        with step(self._observe, "mkdir", folder):
            # Other ranks create the same folder at the same time.
            folder.mkdir(exist_ok=True)
        with step(self._observe, "fsync_folder", folder.parent):
            sync_folder(folder.parent)

    def exists(self) -> bool:
        """Return True for a folder or a link to a folder."""
        with step(None, "stat", self._root):
            return self._root.is_dir()

    def _entries(self) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(self._root) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def folders(self) -> Sequence[str]:
        """Return folders, including links to folders, without invalid names."""
        with step(None, "list", self._root):
            return sorted(
                entry.name for entry in self._entries() if _is_folder(entry) and is_name(entry.name)
            )

    def list(self) -> list[FileInfo]:
        """List regular files, without folders, links (unless followed), FIFOs and devices."""
        found: list[FileInfo] = []
        with step(None, "list", self._root):
            for entry in self._entries():
                follow = self._follow_links or (entry.is_symlink() and self._leads_within(entry))
                if entry.name == LOCK_NAME or not entry.is_file(follow_symlinks=follow):
                    continue
                with suppress(FileNotFoundError):  # deleted during the listing
                    status = entry.stat(follow_symlinks=follow)
                    found.append(FileInfo(entry.name, status.st_size, status.st_mtime))
        return sorted(found, key=attrgetter("name"))

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of a regular file; None for links (unless followed) and other types."""
        path = self._root / check_name(name)
        try:
            status = path.stat(follow_symlinks=self._follow_links)
            if stat.S_ISLNK(status.st_mode) and self._leads_within(path):
                status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, "stat", path) from error
        return FileInfo(name, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> PosixReadHandle:
        """Open a file; `CheckpointFormatError` for a link (unless followed), FIFO, device or folder."""
        path = self._root / check_name(name)
        # Without O_NONBLOCK opening a FIFO would wait for a writer for ever; regular files ignore it.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            follow = self._follow_links
            if self._links_within is not None and not follow:
                follow = path.is_symlink() and self._leads_within(path)
            descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.absent(name) from error
        except OSError as error:
            if error.errno == errno.ELOOP:
                if fault := broken_link(self._root):
                    raise CheckpointNotFoundError(fault, path=self.url) from error
                raise CheckpointFormatError(
                    f"{path} is a symbolic link, which is not followed, because it could point at any file. "
                    "If you trust the folder, open it with PosixStore(..., follow_links=True)",
                    path=str(path),
                ) from error
            raise storage_error(error, "open", path) from error
        if self._links_within is not None and not self._follow_links:
            # Check the place of the open file, because a link or parent folder may have been replaced.
            place = path_of_descriptor(descriptor)
            if not is_below(place, self._links_within) and (place or follow):
                with suppress(OSError):  # reported below
                    os.close(descriptor)
                raise CheckpointFormatError(
                    f"{path} is outside of {self._links_within} by a symbolic link", path=str(path)
                )
        return PosixReadHandle(path, descriptor)

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> PosixWriteHandle:
        """Create a file with O_EXCL, which does not follow planted links."""
        path = self._root / check_name(name)
        if replace:
            self.delete(name)
        with step(self._observe, "create", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
        handle = PosixWriteHandle(path, descriptor, self._observe, durable=durable, direct=self._direct_io)
        if durable and expected_bytes is not None and expected_bytes >= RESERVED_FROM_BYTES:
            try:
                handle.reserve(expected_bytes)
            except StorageError:
                handle.abort()
                raise
        return handle

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Write a temporary file, then link (create-only) or rename under the lock, then sync the folder."""
        target = self._root / check_name(name)
        temporary = self._root / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with self.create(temporary.name, durable=durable) as handle:
                handle.write(data)
            if expected is not None or not self._hard_links or not self._link(temporary, target):
                with self.lock(timeout_seconds=_PUBLISH_LOCK_SECONDS):
                    if expected is not ANY and self.version(name) != expected:
                        raise self.conflict(name)
                    with step(self._observe, "rename", target):
                        temporary.rename(target)
        except BaseException:
            # Ctrl-C may come in any step; after a completed rename the temporary name is gone.
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            try:
                self.sync()
            except StorageError as error:
                error.published = True
                raise
        return Version(data)

    def delete(self, name: str) -> None:
        """Delete a file; open handles stay valid."""
        path = self._root / check_name(name)
        with step(self._observe, "unlink", path):
            path.unlink(missing_ok=True)

    @contextmanager
    def lock(self, *, timeout_seconds: float) -> Iterator[None]:
        """Hold flock on a file in the folder, removed on release."""
        thread = (os.getpid(), threading.get_ident())  # a forked child does not hold the parent's locks
        if thread in self._lock_owners:
            yield
            return
        path = self._root / LOCK_NAME
        descriptor = self._acquire(path, time.monotonic() + timeout_seconds)
        if descriptor is None:
            raise StorageError(
                f"{self.url} is still locked by another writer after {timeout_seconds:g} seconds; wait "
                "for that process to end, or stop it",
                path=str(path),
                op="lock",
                timeout_seconds=timeout_seconds,
            )
        if isinstance(descriptor, OSError):
            warn_once(self._root, descriptor, WITHOUT_LOCKS)
            with locked(self.url, timeout_seconds):  # excludes only threads of this process
                yield
            return
        self._lock_owners.add(thread)
        try:
            yield
        finally:
            self._lock_owners.discard(thread)
            # Errors here must not fail the locked operation, such as a commit. A remaining file does
            # no harm: flock ends with the descriptor.
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):  # closing is not enough: a forked child may hold a copy of the descriptor
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            with suppress(OSError):
                os.close(descriptor)

    def sync(self) -> None:
        """Call fsync of the folder."""
        with step(self._observe, "fsync_folder", self._root):
            sync_folder(self._root)

    def make_durable(self) -> None:
        """Sync each file, then the folder. Caches of other hosts are not covered."""
        for info in self.list():
            path = self._root / info.name
            with step(self._observe, "fsync", path):
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        self.sync()

    def remove_root(self) -> None:
        """Remove the folder if empty, ignoring a stale lock file."""
        with step(None, "list", self._root):
            names = {entry.name for entry in self._entries()}
        # Keep the folder for a holder of the lock, and for a writer of a new file.
        with suppress(StorageError):
            if names == {LOCK_NAME}:
                with self.lock(timeout_seconds=0):
                    pass  # releasing removes the file
            if names <= {LOCK_NAME}:
                with step(self._observe, "rmdir", self._root):
                    self._root.rmdir()

    def _leads_within(self, path: Path | os.DirEntry[str]) -> bool:
        if self._links_within is None:
            return False
        place = os.path.realpath(path)  # still a link if links are circular
        return is_below(place, self._links_within) and not Path(place).is_symlink()

    def _link(self, temporary: Path, target: Path) -> bool:
        """Link the file to its name exclusively, without a lock; return False if links are unsupported."""
        try:
            with step(self._observe, "link", target):
                target.hardlink_to(temporary)
        except StorageError as error:
            if is_link_refused(error, temporary):
                warn_once(
                    self._root,
                    error,
                    "a file system without hard links: a new checkpoint is published by a rename under the "
                    "lock, which other tools ignore. Use one writer per place",
                )
                return False
            # NFS may repeat a request with a lost answer: the existing name is then ours.
            if error.errno != errno.EEXIST:
                raise
            if not _same_file(temporary, target):
                raise self.conflict(target.name) from error
        with suppress(StorageError), step(self._observe, "unlink", temporary):  # already published
            temporary.unlink()
        return True

    def _acquire(self, path: Path, give_up: float) -> int | OSError | None:
        """Return the locked file, None if busy until ``give_up``, or the error of a file system without
        locks.
        """
        pause_seconds = 0.001
        while True:
            is_new = not os.path.lexists(path)
            with step(self._observe, "lock", path):
                # Opened each time: a lock belongs to an open file, so threads exclude each other too.
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(path, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder may have removed the file; a lock on a removed file is useless.
                if is_named(path, descriptor):
                    return descriptor
            except OSError as error:
                if error.errno not in _LOCK_BUSY:
                    with suppress(OSError):  # keep the original error
                        os.close(descriptor)
                    has_no_locks = error.errno in NO_LOCKS
                    if is_new or has_no_locks:  # otherwise another writer may hold the file
                        with suppress(OSError):
                            path.unlink()
                    if has_no_locks:
                        return error
                    raise storage_error(error, "lock", path) from error
            with step(None, "lock", path):
                os.close(descriptor)
            left_seconds = give_up - time.monotonic()
            if left_seconds <= 0:
                return None
            time.sleep(min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, 0.1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a link to one; dangling and circular links return False."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _same_file(first: Path, second: Path) -> bool:
    with step(None, "stat", second):
        try:
            return os.path.samestat(first.lstat(), second.lstat())
        except FileNotFoundError:
            return False


def _open(place: str, options: Mapping[str, Any] | None) -> Store:
    if "://" not in place:
        return PosixStore(place)
    parts = urlsplit(place)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StorageError(
            f"{place!r} is not a local path: write file:///absolute/path", path=place, op="open"
        )
    return PosixStore(unquote(parts.path))


STORE_TYPE: Final = StoreType(schemes=("file",), open=_open)
