"""The files of a local target: made with their sizes in a folder beside it, completed, and renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Final

from dcp.conversion.copying.checks import TargetChecksums
from dcp.conversion.copying.sinks import announce
from dcp.conversion.layouts.layout import TargetLayout
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import PlanError
from dcp.storage.formats.registry import formats
from dcp.storage.stores.names import LOCK_NAME
from dcp.storage.stores.posix.files import step
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["exchange", "fill_holes", "have_sizes", "keep_others", "rename", "reserve"]

_NOTES: Final = ("notes.msgpack", LOCK_NAME)
"""Beside the commit objects of a checkpoint."""

_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


def reserve(folder: Path, layout: TargetLayout) -> None:
    """Make every file with its size, so that tasks write to any place of it; with blocks where the file
    system can: a full disk shows now, not after hours."""
    for name, size in zip(layout.file_names, layout.file_sizes, strict=True):
        path = folder / name
        with step(announce, "create", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            try:
                if size:
                    _allocate(path, size)
                    os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)


def _allocate(path: Path, size: int) -> None:
    # With O_DIRECT: where blocks cannot be allocated, glibc writes a byte to each instead, and that refuses.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
    finally:
        os.close(descriptor)


def have_sizes(folder: Path, layout: TargetLayout) -> bool:
    """Whether all files are there that `reserve` makes."""
    files = zip(layout.file_names, layout.file_sizes, strict=True)
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files)


def fill_holes(folder: Path, layout: TargetLayout, checksums: TargetChecksums) -> None:
    """Checksums into the files; then each is durable."""
    holes = defaultdict(list)
    crcs: dict[int, bytes] = {}
    for hole in layout.holes:
        holes[hole.file].append((hole.offset, hole.copy))
    for file, name in enumerate(layout.file_names):
        with step(announce, "holes", folder / name):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                for offset, copy in sorted(holes[file]):
                    if copy not in crcs:
                        crcs[copy] = checksums.whole(copy).to_bytes(4, "little")
                    os.pwrite(descriptor, crcs[copy], offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def rename(source: Path, target: Path, *, overwrite: bool) -> None:
    """Give a file its name; FileExistsError if there is something, unless ``overwrite``."""
    if overwrite:
        source.rename(target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if os.path.lexists(target):  # without hard links, this and the rename are two steps
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        source.rename(target)


def keep_others(folder: Path, target: Path, layout: TargetLayout) -> None:
    """Into ``folder``, durably, what a new checkpoint in place of ``target`` does not replace, files that
    ``layout.replaced`` names among that.

    Raises PlanError for what would have to be moved.
    """
    entries = {entry.name: entry for entry in target.iterdir()}
    replaced = layout.replaced("", entries)
    for name, entry in entries.items():
        if name in replaced or _is_replaced(name) or _is_replaced_folder(entry, folder / name, layout):
            continue
        if entry.is_dir() or entry.is_symlink():
            raise PlanError(
                f"{entry} is in the folder to be replaced, and would have to be moved; convert to another "
                "target and put the folders together yourself",
                path=str(entry),
            )
        _keep(entry, folder / name)
    PosixStore(folder).sync()  # what is kept is there before its only other name goes


def _is_replaced_folder(entry: Path, made: Path, layout: TargetLayout) -> bool:
    """Whether no file of a folder stays: there is a new one, or ``layout.replaced`` names it."""
    if entry.is_symlink() or not entry.is_dir():
        return False
    names = {one.name for one in entry.iterdir()}
    new = {one.name for one in made.iterdir()} if made.is_dir() else set()
    return names <= layout.replaced(entry.name, names) | new


def _is_replaced(name: str) -> bool:
    """Whether a new checkpoint in the folder takes the place of a file; others, such as config.json, stay."""
    if name.endswith(DATA_SUFFIX) and name.startswith("__"):
        return True
    if name in (MANIFEST_NAME, METADATA_NAME, *_NOTES):
        return True
    folders = (one for one in formats() if one.target is not None and one.target.as_file != "always")
    return any(one.is_in_folder(name) for one in folders)


def _keep(entry: Path, kept: Path) -> None:
    """The same file under another name; where there are no hard links, a copy that is durable."""
    kept.unlink(missing_ok=True)  # of a run that was killed here
    try:
        os.link(entry, kept)
    except OSError:
        shutil.copy2(entry, kept)
        with kept.open("rb") as file:
            os.fsync(file.fileno())


def exchange(folder: Path, target: Path) -> None:
    """Put ``folder`` in the place of ``target``, and remove that: one step where the kernel can, else two."""
    new = folder.with_name("replacement")  # a name that no ledger goes by
    folder.rename(new)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
    is_exchanged = False
    with contextlib.suppress(AttributeError):
        is_exchanged = libc.renameat2(*arguments) == 0
    if not is_exchanged:
        aside = new.with_name("replaced")
        target.rename(aside)
        new.rename(target)
        aside.rename(new)
    announce("exchanged", target)
    PosixStore(target.parent).sync()  # before the old files go
    shutil.rmtree(new, ignore_errors=True)
