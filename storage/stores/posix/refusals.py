"""Refusals: errnos by which a mount says that it lacks an operation, separated from operations that failed.

A refused operation is replaced by the next safest one, and a warning says once what is missing. Every errno
that is not named here is a failure and is raised, among them EIO, ENOSPC, EDQUOT, ESTALE and ETIMEDOUT: what
the operation was to do may or may not have happened. Each operation has a table of its own, since EACCES is
what SMB says of a lock that another client holds, and other mounts of a folder that cannot be synced.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final

__all__ = [
    "NO_DIRECT_IO",
    "NO_EXCHANGE",
    "NO_LOCKS",
    "NO_OPERATION",
    "WITHOUT_LOCKS",
    "is_link_refused",
    "sync_folder",
    "warn_once",
]

logger = logging.getLogger(__name__)

NO_OPERATION: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What any operation says that a file system does not have."""

NO_FOLDER_SYNC: Final = NO_OPERATION | {errno.EACCES, errno.EBADF, errno.EISDIR, errno.EPERM}
"""Of fsync of a folder, and of opening one for that: SMB, object mounts, folders that may not be read."""

NO_LINKS: Final = NO_OPERATION | {errno.EACCES, errno.EMLINK, errno.EPERM, errno.EXDEV}
"""Of link, where the new name is in the folder of the old: FAT, SMB, AFS, object mounts."""

NO_LOCKS: Final = NO_OPERATION | {errno.EBADF, errno.ENOLCK, errno.EPERM}
"""Of flock: Lustre mounted without ``flock``, NFS without lockd, object mounts."""

NO_EXCHANGE: Final = NO_OPERATION | {errno.EACCES, errno.EPERM}
"""Of renameat2 with RENAME_EXCHANGE, of two folders: NFS, FUSE, SMB."""

NO_DIRECT_IO: Final = NO_OPERATION
"""Of a write to a file that was opened for O_DIRECT, or was switched to it."""

WITHOUT_LOCKS: Final = (
    "a file system without locks, so that two jobs which replace one checkpoint, or convert to one target, "
    "at the same time are not kept apart: let one job write to a place, or mount it with locks (Lustre: "
    "-o flock)"
)

_warned: set[tuple[int, str]] = set()


def is_link_refused(error: OSError, source: Path) -> bool:
    """Return whether ``error`` of a hard link to ``source`` means that the mount has none.

    The kernel says ENOENT where a mount reports no link count (``st_nlink`` 0) of a file that is there.
    """
    return error.errno in NO_LINKS or (error.errno == errno.ENOENT and os.path.lexists(source))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as far as the file system can. Raises OSError where that fails."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
        warn_once(
            folder,
            error,
            "a file system that cannot sync folders: a power cut of the storage may take the last changes of "
            "names, so that a checkpoint is missing or the one before it is back",
        )


def warn_once(folder: Path, error: OSError, what: str) -> None:
    """Say that ``folder`` is on ``what``, once a process for each mount and text."""
    try:
        device = folder.stat().st_dev
    except OSError:
        device = 0
    if (device, what) not in _warned:
        _warned.add((device, what))
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        logger.warning("%s is on %s (%s)", folder, what, name)
