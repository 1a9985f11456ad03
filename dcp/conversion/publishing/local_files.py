"""The files of a local target: made with their sizes in a folder beside it, completed, and renamed."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dcp.conversion.contents.hf_folder import HF_NAMES
from dcp.conversion.copying.batches import ResultChecks
from dcp.conversion.copying.tasks import announce
from dcp.conversion.layouts.layout import TargetLayout
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import CheckpointConflictError, PlanError, StorageError
from dcp.storage.formats.registry import formats
from dcp.storage.stores.base import LOCK_NAME, TEMPORARY_PREFIX
from dcp.storage.stores.posix.files import NO_EXCHANGE, is_link_refused, step
from dcp.storage.stores.posix.store import PosixStore

__all__ = [
    "drop_half_written",
    "exchange",
    "fill_holes",
    "has_only_others",
    "have_sizes",
    "keep_others",
    "move_late",
    "only_copies",
    "refusal_to_put_back",
    "rename",
    "reserve",
    "settle",
    "stays",
]

_NOTES: Final = ("notes.msgpack", LOCK_NAME)
"""Beside the commit objects of a checkpoint."""

_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100

_NEW: Final = "replacement"
"""In a work folder: what is about to take the place of the target, or has been exchanged with it."""

_ASIDE: Final = "aside"
"""In a work folder: a folder in which the target is, under its name, while there are two steps."""

_OUTDATED: Final = "outdated"
"""The same once something else is in its place."""


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


def drop_half_written(folder: Path) -> None:
    """Remove small files at which an earlier run was killed: the target would have them, too."""
    with step(None, "list", folder):
        found = list(folder.rglob(f"{TEMPORARY_PREFIX}*"))
    for path in found:
        if path.is_file():
            path.unlink()


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
    """Return whether all files are there that `reserve` makes."""
    files = zip(layout.file_names, layout.file_sizes, strict=True)
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files)


def fill_holes(folder: Path, layout: TargetLayout, checks: ResultChecks) -> None:
    """Write checksums into the files, and make each of these durable."""
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
                        crcs[copy] = checks.whole(copy).to_bytes(4, "little")
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
        if not is_link_refused(error, source):
            raise
        if os.path.lexists(target):  # without hard links, this and the rename are two steps
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        source.rename(target)


def keep_others(folder: Path, target: Path, layout: TargetLayout) -> None:
    """Put into ``folder``, durably, what a new checkpoint in place of ``target`` does not replace, files
    that ``layout.replaced`` names among that.

    Raises PlanError for what would have to be moved.
    """
    for entry in _others(target, folder, layout):
        if entry.is_dir() or entry.is_symlink():
            raise PlanError(
                f"{entry} is in the folder to be replaced, and would have to be moved; convert to another "
                "target and put the folders together yourself",
                path=str(entry),
            )
        _keep(entry, folder / entry.name)
    PosixStore(folder).sync()  # what is kept is there before its only other name goes


def move_late(old: Path, target: Path, layout: TargetLayout) -> None:
    """Move into ``target`` what has come into the folder that it replaces since `keep_others` looked."""
    for entry in _others(old, target, layout):
        if not os.path.lexists(target / entry.name):
            entry.rename(target / entry.name)


def _others(old: Path, new: Path, layout: TargetLayout) -> Iterator[Path]:
    """Yield the entries of a folder that ``new`` does not replace."""
    entries = {entry.name: entry for entry in old.iterdir()}
    replaced = layout.replaced("", entries)
    for name, entry in entries.items():
        if not (name in replaced or _is_replaced(name) or _is_replaced_folder(entry, new / name, layout)):
            yield entry


def stays(name: str) -> bool:
    """Return whether a file of a folder stays there, whatever is converted to the folder."""
    return not _is_replaced(name) and name not in HF_NAMES


def has_only_others(target: Path) -> bool:
    """Return whether nothing in a folder is of a checkpoint."""
    return not any(_is_replaced(entry.name) for entry in target.iterdir())


def _is_replaced_folder(entry: Path, made: Path, layout: TargetLayout) -> bool:
    """Return whether no file of a folder stays: there is a new one, or ``layout.replaced`` names it."""
    if entry.is_symlink() or not entry.is_dir():
        return False
    names = {one.name for one in entry.iterdir()}
    new = {one.name for one in made.iterdir()} if made.is_dir() else set()
    return names <= layout.replaced(entry.name, names) | new


def _is_replaced(name: str) -> bool:
    """Return whether a new checkpoint in the folder takes the place of a file; others, such as config.json,
    stay."""
    if name.endswith(DATA_SUFFIX) and name.startswith("__"):
        return True
    if name in (MANIFEST_NAME, METADATA_NAME, *_NOTES):
        return True
    folders = (one for one in formats() if one.target is not None and one.target.as_file != "always")
    return any(one.is_in_folder(name) for one in folders)


def _keep(entry: Path, kept: Path) -> None:
    """Give a file a second name; where there are no hard links, make a durable copy."""
    kept.unlink(missing_ok=True)  # of a run that was killed here
    try:
        os.link(entry, kept)
    except OSError:
        kept.unlink(missing_ok=True)  # it may have been made all the same: then both are one file
        with entry.open("rb") as file, kept.open("xb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            shutil.copystat(entry, kept)
            os.fsync(copy.fileno())


def exchange(folder: Path, target: Path) -> Path:
    """Put ``folder`` in the place of ``target``, and return where that is now: one step where the file system
    can, else two, which `settle` undoes or finishes if they are interrupted."""
    new = folder.with_name(_NEW)  # a name that no ledger goes by
    folder.rename(new)
    announce("exchange", target)
    if _is_exchanged(new, target):
        old = new
    else:
        old = new.with_name(_ASIDE) / target.name
        old.parent.mkdir()
        for durable in (old.parent, new.parent, target.parent):  # the way to where it is moved
            PosixStore(durable).sync()
        try:
            announce("move aside", target)
            target.rename(old)
            announce("move into place", target)
            new.rename(target)
        except BaseException as error:
            settle(new.parent)
            if new.exists() or not isinstance(error, OSError):
                raise
            old = new.with_name(_OUTDATED) / target.name  # it was done all the same
    announce("exchanged", target)
    return old


def _is_exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders; False where the kernel or the file system has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number not in NO_EXCHANGE:  # after any other failure they may have been exchanged
        raise OSError(number, os.strerror(number), str(other))
    return False


def only_copies(work: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (where it is now, the target) of what `exchange` has moved aside in a work folder, and
    replaced by nothing yet."""
    aside = work / _ASIDE
    for old in sorted(aside.iterdir()) if aside.is_dir() else ():
        target = work.parent / old.name
        if not _is_taken(target) or (work / _NEW).exists():
            yield old, target


def refusal_to_put_back(work: Path) -> str | None:
    """Return the reason why what was moved aside in a work folder can neither be put back nor go; None if
    there is none."""
    for old, target in only_copies(work):
        if _is_taken(target):
            return (
                f"{target} has come into being while a conversion was replacing what was there before, which "
                f"is in {old} now: move that to where you want it, or delete it"
            )
    return None


def settle(work: Path) -> None:
    """Put back what an interrupted `exchange` has moved aside in the work folder of a conversion, if the new
    folder is not in its place. What it replaced may go after that.

    Raises CheckpointConflictError if something else is in its place, StorageError if it cannot be put back.
    """
    new, aside = work / _NEW, work / _ASIDE
    if not new.exists() and not aside.exists():
        return
    if refusal := refusal_to_put_back(work):
        raise CheckpointConflictError(refusal, path=str(work))
    for old, target in only_copies(work):
        announce("put back", target)
        try:
            old.rename(target)
        except OSError as error:
            raise StorageError(
                f"{target} could not be put back ({error.strerror}): its files are in {old}. The next "
                "conversion to it puts them back once the storage works again, and so does dcp gc",
                path=str(target),
                op="rename",
                errno=error.errno,
            ) from error
    PosixStore(work.parent).sync()  # a name must outlast a power cut before what it replaced goes
    with step(announce, "settled", work):
        if aside.exists():  # else what is left of it could be taken for what is to be put back
            aside.rename(work / _OUTDATED)


def _is_taken(target: Path) -> bool:
    """Return whether anything but an empty folder is there, in whose place another can be put."""
    if target.is_dir() and not target.is_symlink():
        return any(target.iterdir())
    return os.path.lexists(target)
