"""Several processes of one API count together, in files of one folder; whichever answers adds them up.

This is the multi-process mode of prometheus_client: a folder named by an environment variable which has to be
set before the processes start. With one process nothing of it is needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["FOLDER_VARIABLE", "living_processes", "resident_bytes", "shared_folder"]

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for the counts of all processes that are started inside; removed at the end.

    A folder that the environment names already is taken as it is, and stays.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="dcp-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[FOLDER_VARIABLE]


def living_processes(folder: Path | None) -> set[int]:
    """The processes that count in ``folder`` and run, this one among them."""
    found = {os.getpid()}
    if folder is not None:
        numbers = {path.stem.rpartition("_")[2] for path in folder.glob("*_*.db")}
        found |= {int(number) for number in numbers if number.isdigit() and _is_alive(int(number))}
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not swapped out; 0 where it, or ``/proc``, is not there."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
