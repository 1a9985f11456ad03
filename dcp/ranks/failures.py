"""Failures of ranks as one exception that every rank raises, and signs of life between ranks.

The failures of some ranks become one exception that every rank raises. It is a `RankFailedError`: both a
`CheckpointError` and torch's `CheckpointException` (which is what stock raises there and only a
BaseException). Where all failures have one class of `dcp.errors`, it is of that class as well, so
``except CorruptCheckpointError`` works the same on one rank and on a thousand.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from torch.distributed.checkpoint.api import CheckpointException

from dcp.calls.plain_errors import without_our_frames
from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CorruptCheckpointError,
    SaveAbortedError,
    UnsafeObjectError,
    UnsupportedFormatError,
    error_from_wire,
    error_to_wire,
)

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others in one step: as long as torch's own default for collectives."""

_MAX_LINES = 4
"""Of several ranks' messages in one error."""


class RankFailedError(CheckpointError, CheckpointException):
    """Ranks failed in a step of a save or load.

    ``failures`` maps each failed rank to (exception, traceback summary) as torch's does; ``ranks`` are its
    keys; ``step`` names the step. The first failure is the ``__cause__``, or the ``__context__`` where
    `dcp.calls.plain_errors` has kept it out of the traceback.
    """

    _cause: type[BaseException] = CheckpointError
    """What all ranks failed of, if it is one class."""

    def __init__(self, message: str = "", failures: Any = None, **facts: Any) -> None:
        CheckpointError.__init__(self, message, **facts)
        if isinstance(self, OSError):  # which has a place of its own for it
            self.errno = facts.get("errno")
        self._failures = failures or {}

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that failed."""
        return sorted(self._failures)

    def __str__(self) -> str:
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._cause, str(self), self._failures, self.facts), self._notes)


def _rebuild(
    cause: type[BaseException], message: str, failures: Any, facts: dict[str, Any]
) -> RankFailedError:
    return _failure_class(cause)(message, failures, **facts)


_classes: dict[str, type[RankFailedError]] = {}


def _failure_class(cause: type[BaseException]) -> type[RankFailedError]:
    if issubclass(cause, RankFailedError):
        return cause
    if cause is CheckpointError or not issubclass(cause, CheckpointError):
        return RankFailedError
    if cause.__name__ not in _classes:
        attributes = {"__module__": __name__, "__doc__": cause.__doc__, "_cause": cause}
        _classes[cause.__name__] = type(cause.__name__, (RankFailedError, cause), attributes)
    return _classes[cause.__name__]


def failure_of(
    step: str, failures: Mapping[int, CheckpointError], rank: int, own_error: BaseException | None
) -> BaseException:
    """Make the one error to raise for ``failures`` (rank -> error); ``own_error`` is this rank's, if any.

    KeyboardInterrupt, SystemExit and their like stay what they are on the rank where they happened.
    """
    if own_error is not None and not isinstance(own_error, Exception):
        return own_error
    failures = {_caller_off(error, failed): error for failed, error in failures.items()}
    described: dict[int, BaseException] = dict(failures)
    if own_error is not None and rank in described:
        described[rank] = own_error
    first_rank = min(described)
    first = described[first_rank]
    causes = {type(error) for error in failures.values()}
    cls = _failure_class(causes.pop()) if len(causes) == 1 else RankFailedError
    message = _message(step, {failed: str(failures[failed]) for failed in sorted(described)})
    summaries = {
        failed: (error, traceback.extract_tb(error.__traceback__)) for failed, error in described.items()
    }
    facts = dict(failures[first_rank].facts) | {"step": step}
    error = cls(message, summaries, **facts)
    error.__cause__ = first
    return error


def _caller_off(error: CheckpointError, rank: int) -> int:
    """Return the rank that called a save off, where ``rank`` learned of it; else ``rank``."""
    caller = error.rank if isinstance(error, SaveAbortedError) else None
    return rank if caller is None else caller


def _message(step: str, texts: Mapping[int, str]) -> str:
    """Return what the ranks say, each message once and short enough to be read; where, comes last."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        lines = [*ranks_of]
    else:
        each = max(1, _MAX_LINES // len(ranks_of))
        lines = [
            f"{_ranks_text(ranks)}: " + "\n".join(text.splitlines()[:each])
            for text, ranks in list(ranks_of.items())[:_MAX_LINES]
        ]
        if len(ranks_of) > _MAX_LINES:
            lines.append(f"and {len(ranks_of) - _MAX_LINES} more messages, by rank in `failures`")
    said = "\n".join(lines)
    between = "\n" if "\n" in said else " "
    return f"{said}{between}(failed on {_ranks_text(list(texts))} in step {step!r})"


def causes_of(error: BaseException) -> list[BaseException]:
    """Return what the failed ranks raised, the same in kind on every rank; ``error`` itself if it is of no
    step."""
    failures = error.failures if isinstance(error, RankFailedError) else {}
    return [failure for failure, _ in failures.values()] or [error]


def is_damage(cause: BaseException) -> bool:
    """Return whether ``cause`` says that stored bytes are not what was committed, rather than what we
    refuse."""
    if isinstance(cause, UnsafeObjectError | UnsupportedFormatError):
        return False
    return isinstance(cause, CorruptCheckpointError | CheckpointFormatError)


def _ranks_text(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{more}"


def pack_failure(error: BaseException) -> bytes:
    """Return what `decode_failure` makes an exception of on another rank."""
    trace = without_our_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    wire = error_to_wire(error, text[-8000:])
    try:
        return _packed(wire)
    except (TypeError, ValueError, OverflowError):  # facts that are not plain data must not hide the failure
        wire["facts"] = {key: repr(value) for key, value in wire["facts"].items()}
        return _packed(wire)


def _packed(wire: dict[str, Any]) -> bytes:
    # File names that are not UTF-8 have surrogates in their messages.
    return bytes(msgpack.packb(wire, unicode_errors="surrogatepass"))


def decode_failure(data: bytes) -> CheckpointError:
    """Return what another rank packed, with its traceback as a note."""
    wire = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    error = error_from_wire(wire)
    error.add_note(f"traceback of that rank:\n{wire['traceback']}")
    return error


_LONGEST_GRACE_SECONDS = 3.0
_SHORTEST_GRACE_SECONDS = 0.5


def grace_seconds(timeout_seconds: float) -> float:
    """Return how much of the time that a rank waits for the others is for their signs of life."""
    return max(_SHORTEST_GRACE_SECONDS, min(_LONGEST_GRACE_SECONDS, timeout_seconds / 4))


@dataclass(frozen=True)
class Presence:
    """Signs that the ranks of one operation give each other by ``store``, for when collectives do not work.

    Who gives an operation up says so there; who waits looks there, and answers. Those who do not answer
    within a while are lost. ``keys`` are prefixes that the ranks share: that of the operation; and before it
    that of the group's first exchange, if that is not over yet, because some ranks may still be in it.
    RuntimeError where the store is gone.
    """

    store: Any
    rank: int
    world_size: int
    keys: Sequence[str]

    def give(self, sign: str) -> None:
        """Give a sign to the others."""
        for key in self.keys:
            self.store.set(f"{key}/{sign}", "1")

    def has(self, sign: str) -> bool:
        """Return whether a rank has given a sign."""
        return any(self.store.check([f"{key}/{sign}"]) for key in self.keys)

    def show(self) -> None:
        """Give a sign of life."""
        self.give(f"alive/{self.rank}")

    def absent(self, step: str) -> list[int]:
        """Return the ranks that have not said that they wait in ``step``, for the lowest of those that have;
        for the others none, so that not every rank asks for every other."""
        absent: list[int] = []
        for rank in range(self.world_size):
            if rank != self.rank and not self.has(f"late/{step}/{rank}"):
                absent.append(rank)
            elif rank < self.rank:
                return []
        return absent

    def missing(self, deadline: float) -> list[int]:
        """Return the ranks that have given no sign of life until ``deadline`` (`time.monotonic`)."""
        missing = list(range(self.world_size))
        while True:
            missing = [rank for rank in missing if not self.has(f"alive/{rank}")]
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.02)
