"""Pause garbage collection during planning, which creates many live objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection in this block, unless already off.

    The pause affects all threads; keep the block below a few tenths of a second.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
