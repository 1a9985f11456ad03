"""Short tracebacks of public functions: the call and the message.

The exception keeps its class and attributes. The cause stays as ``__context__``, and by rank in ``failures``
of `dcp.ranks.failures.RankFailedError`. With ``DCP_DEBUG`` in the environment, tracebacks stay complete.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Final, ParamSpec, TypeVar

from dcp.storage.errors import CheckpointError, RemoteError
from dcp.storage.near_names import did_you_mean

DEBUG_VARIABLE: Final = "DCP_DEBUG"

_whole: ContextVar[bool] = ContextVar("whole_tracebacks", default=False)

_UNKNOWN: Final = re.compile(r"got an unexpected keyword argument '(\w+)'$")
"""End of Python's message for an unknown argument; Python 3.13 adds a suggestion of its own."""

_PLACES: Final = frozenset({"dir", "directory", "file", "filename", "folder", "id", "location", "path"})
"""Common wrong names for ``checkpoint_id``."""

P = ParamSpec("P")
R = TypeVar("R")


def plain_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` to raise dcp's errors with a short traceback, and to suggest names for unknown
    arguments.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CheckpointError as error:
            if _debugging():
                raise
            shorten(error)
            raise error from error.__cause__
        except TypeError as error:
            known, unknown = inspect.signature(function).parameters, _UNKNOWN.search(str(error))
            if unknown is not None and unknown[1] in kwargs and unknown[1] not in known:
                is_place = unknown[1] in _PLACES and "checkpoint_id" in known
                meant = "checkpoint_id" if is_place else unknown[1]
                error.args = (f"{error}{did_you_mean(meant, known)}",)
            raise

    return call


def shorten(error: BaseException) -> None:
    """Remove dcp's frames from an ``error`` and turn its cause into its context.

    An error of user code, such as a ``state_dict()``, stays the cause, with its frames.
    """
    if not isinstance(error, CheckpointError) or _debugging():
        return
    error.__traceback__ = None
    cause, error.__cause__ = error.__cause__, None
    if cause is None:
        return
    error.__context__ = cause
    if hasattr(error, "failures"):
        foreign = _foreign_cause(cause)
        if foreign is not None:
            foreign.__traceback__ = without_our_frames(foreign.__traceback__)
            error.__cause__ = foreign


def _foreign_cause(cause: BaseException) -> BaseException | None:
    """Return the first foreign cause of a rank's failure, unless an error of dcp explains it."""
    if isinstance(cause, RemoteError) or not isinstance(cause, CheckpointError):
        return cause
    last: BaseException = cause
    seen: set[int] = set()  # libraries can create cycles of causes
    while last.__cause__ is not None and id(last) not in seen:
        seen.add(id(last))
        last = last.__cause__
    frames = _frames(last.__traceback__)
    known = {"dcp", "torch", *sys.stdlib_module_names}
    return None if last is cause or all(_package(frame.tb_frame) in known for frame in frames) else last


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` from its first frame outside of dcp; unchanged without one."""
    return next((frame for frame in _frames(trace) if _package(frame.tb_frame) != "dcp"), trace)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def warn_caller(text: str) -> None:
    """Issue a UserWarning at the line that called dcp."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package(frame) == "dcp":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Keep complete tracebacks within this block, as with ``DCP_DEBUG``."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def _debugging() -> bool:
    return _whole.get() or bool(os.environ.get(DEBUG_VARIABLE))
