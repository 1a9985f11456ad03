"""The kinds of jobs of the service, on a disk that is full, as any user may have one.

The system really refuses what is above the limit on the size of files (`outages.limited_files`). It calls
that EFBIG, the fault of one file: in a process that imports this it is ENOSPC, as on a full disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from dcp.server.jobs.kinds import KINDS

__all__ = ["KINDS"]


def _named_as_by_a_disk(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None

    return called


for _name in ("posix_fallocate", "ftruncate", "pwrite"):
    setattr(os, _name, _named_as_by_a_disk(getattr(os, _name)))
