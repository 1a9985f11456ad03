"""Errors of public functions, with short tracebacks.

A traceback is the call and the message, without the frames in between.

The error is the one that was raised, with its class and its facts. What caused it is still there as its
``__context__``, and by rank in the ``failures`` of a `dcp.ranks.failures.RankFailedError`. Where the
environment has ``DCP_DEBUG``, nothing is left out.
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
"""The end of a message to which Python 3.13 adds the same itself."""

_PLACES: Final = frozenset({"dir", "directory", "file", "filename", "folder", "id", "location", "path"})
"""What a place is called elsewhere, and ``checkpoint_id`` here."""

P = ParamSpec("P")
R = TypeVar("R")


def plain_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that errors of this package show their message and the line that called it,
    and Python's of an unknown argument the one that may be meant."""

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
    """Remove the frames that an ``error`` of this package came through, and make its cause its context.

    An error of the user's own code, such as a ``state_dict()``, stays the cause, from that frame on: the
    message alone does not say where that is.
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
    """Find the first cause of a rank's failure, if neither it nor an error that explains it is of this
    package."""
    if isinstance(cause, RemoteError) or not isinstance(cause, CheckpointError):
        return cause
    last: BaseException = cause
    seen: set[int] = set()  # libraries make rings of causes, by raising again what they have kept
    while last.__cause__ is not None and id(last) not in seen:
        seen.add(id(last))
        last = last.__cause__
    frames = _frames(last.__traceback__)
    known = {"dcp", "torch", *sys.stdlib_module_names}
    return None if last is cause or all(_package(frame.tb_frame) in known for frame in frames) else last


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Cut ``trace`` to begin with the first frame that is not of this package; whole, if all are."""
    return next((frame for frame in _frames(trace) if _package(frame.tb_frame) != "dcp"), trace)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def warn_caller(text: str) -> None:
    """Give a UserWarning at the line that called this package."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package(frame) == "dcp":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Leave nothing out within this block, as with ``DCP_DEBUG``."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def _debugging() -> bool:
    return _whole.get() or bool(os.environ.get(DEBUG_VARIABLE))
