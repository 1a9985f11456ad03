"""A mount where a system call is missing or fails: in this process, for paths below a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["bad_mount"]

_CALLS: Final = {
    os: (
        *("close", "fdatasync", "fstat", "fsync", "ftruncate", "link", "mkdir", "open", "preadv", "pwrite"),
        *("rename", "rmdir", "scandir", "stat", "unlink", "writev"),
    ),
    fcntl: ("flock",),
}


@contextmanager
def bad_mount(folder: Path, errno_of: Callable[[str, Path], int]) -> Iterator[None]:
    """Fail each system call below ``folder`` with the errno of ``errno_of(call, path)``; 0 is success.

    As in the kernel, close always closes the file, even if it reports an error.
    """

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = _path_of(args[0])
            number = errno_of(name, path) if path.is_relative_to(folder) else 0
            if name == "close":
                real(*args)
            if number:
                raise OSError(number, os.strerror(number))  # a descriptor has no path in these errors
            return None if name == "close" else real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, names in _CALLS.items():
            for name in names:
                patch.setattr(module, name, failing(name, getattr(module, name)))
        yield


def _path_of(target: Any) -> Path:
    if not isinstance(target, int):
        return Path(os.fsdecode(target)).absolute()
    try:
        return Path(os.readlink(f"/proc/self/fd/{target}"))  # noqa: PTH115 - called by the patched functions
    except OSError:
        return Path()
