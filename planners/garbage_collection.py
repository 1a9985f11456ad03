"""No garbage collection while a plan is made: that makes many objects that all live, and looks for none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Put off the interpreter's cyclic collection until the end of the block, unless it was off before.

    It is that of all threads, so the block is to take tenths of a second at most.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
