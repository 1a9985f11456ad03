"""What becomes of managers that nobody closed: at the end of the interpreter, and in forked children."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Protocol

import dcp.background.session  # noqa: F401 - which drains at exit, too, and must be registered before this

__all__ = ["Endable", "forget", "remember"]


class Endable(Protocol):
    """A manager, seen from here."""

    def end_with_interpreter(self, *, failed: bool) -> None:
        """Close; ``failed``: an exception has ended the program."""

    def leave_to_parent(self) -> None:
        """In a forked child: closed, nothing to wait for, and no lock that another thread may have held."""


_open: weakref.WeakSet[Endable] = weakref.WeakSet()

_of_parent: list[Endable] = []  # kept: destructors would wait for threads of the parent


def remember(manager: Endable) -> None:
    """See to the end of ``manager`` until it is forgotten."""
    _open.add(manager)


def forget(manager: Endable) -> None:
    """It is being closed."""
    _open.discard(manager)


def _leave_all_to_parent() -> None:
    # A data loader's worker must not wait, when it ends, for a save that the training process carries out.
    _of_parent.extend(_open)
    for manager in _of_parent:
        manager.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _close_all() -> None:
    failed = getattr(sys, "last_value", None) is not None
    for manager in list(_open):
        manager.end_with_interpreter(failed=failed)


# Before the interpreter forbids new threads, and before sessions drain by the same means (what was registered
# last comes first), so that what follows a commit still happens, and the bound is the manager's.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
