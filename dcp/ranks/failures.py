"""Failures of ranks: one exception on every rank for all failures, and signs of life.

The exception is a `RankFailedError`: a `CheckpointError` and torch's `CheckpointException` (a BaseException).
If all failures have the same class of `dcp.errors`, the exception also has this class, so ``except
CorruptCheckpointError`` works on any number of ranks.
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
"""Longest wait for other ranks in one step: torch's default for collectives."""

_MAX_LINES = 4
"""Maximum number of ranks' messages in one error."""


class RankFailedError(CheckpointError, CheckpointException):
    """Ranks failed in a step of a save or load; ``step`` names the step.

    If all failures have one class of `dcp.errors`, the exception has it too: see there for the remedy.
    ``failures`` has the exception and traceback summary of each failed rank, as in torch; ``ranks`` lists the
    failed ranks. The first failure is the ``__cause__``, or the ``__context__`` if `dcp.calls.plain_errors`
    shortened the traceback.
    """

    _cause: type[BaseException] = CheckpointError
    """Common class of the failures; None if different."""

    def __init__(self, message: str = "", failures: Any = None, **facts: Any) -> None:
        CheckpointError.__init__(self, message, **facts)
        if isinstance(self, OSError):  # OSError has its own attribute
            self.errno = facts.get("errno")
        self._failures = failures or {}

    @property
    def ranks(self) -> list[int]:
        """The failed ranks."""
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
    """Return the error to raise for ``failures`` by rank; ``own_error`` is this rank's exception.

    KeyboardInterrupt and SystemExit are returned unchanged on their rank.
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
    """Return the rank that cancelled a save, if ``rank`` learned of it; otherwise ``rank``."""
    caller = error.rank if isinstance(error, SaveAbortedError) else None
    return rank if caller is None else caller


def _message(step: str, texts: Mapping[int, str]) -> str:
    """Return the distinct messages of the ranks, shortened, with the ranks at the end."""
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
    """Return the exceptions of the failed ranks; ``[error]`` for an error outside of a step."""
    failures = error.failures if isinstance(error, RankFailedError) else {}
    return [failure for failure, _ in failures.values()] or [error]


def is_damage(cause: BaseException) -> bool:
    """Return whether ``cause`` reports stored bytes that differ from the committed ones."""
    if isinstance(cause, UnsafeObjectError | UnsupportedFormatError):
        return False
    return isinstance(cause, CorruptCheckpointError | CheckpointFormatError)


def _ranks_text(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{more}"


def pack_failure(error: BaseException) -> bytes:
    """Encode an exception for `decode_failure`."""
    trace = without_our_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    wire = error_to_wire(error, text[-8000:])
    try:
        return _packed(wire)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # unencodable attributes must not hide the failure
        wire["facts"] = {key: repr(value) for key, value in wire["facts"].items()}
        return _packed(wire)


def _packed(wire: dict[str, Any]) -> bytes:
    # File names that are not UTF-8 have surrogates in their messages.
    return bytes(msgpack.packb(wire, unicode_errors="surrogatepass"))


def decode_failure(data: bytes) -> CheckpointError:
    """Decode another rank's exception, with its traceback as a note."""
    wire = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    error = error_from_wire(wire)
    error.add_note(f"traceback of that rank:\n{wire['traceback']}")
    return error


_LONGEST_GRACE_SECONDS = 3.0
_SHORTEST_GRACE_SECONDS = 0.5


def grace_seconds(timeout_seconds: float) -> float:
    """Return the part of a timeout reserved for signs of life."""
    return max(_SHORTEST_GRACE_SECONDS, min(_LONGEST_GRACE_SECONDS, timeout_seconds / 4))


@dataclass(frozen=True)
class Presence:
    """Signs of life between the ranks of one operation, through ``store``.

    A rank that gives up an operation posts a sign; waiting ranks look for signs and answer. Silent ranks
    count as lost. ``keys`` are the shared prefixes of the operation and, until the group's first exchange is
    over, of that exchange. Raises RuntimeError if the store is gone.
    """

    store: Any
    rank: int
    world_size: int
    keys: Sequence[str]

    def give(self, sign: str) -> None:
        """Post a sign."""
        for key in self.keys:
            self.store.set(f"{key}/{sign}", "1")

    def has(self, sign: str) -> bool:
        """Return whether a rank has posted a sign."""
        return any(self.store.check([f"{key}/{sign}"]) for key in self.keys)

    def show(self) -> None:
        """Give a sign of life."""
        self.give(f"alive/{self.rank}")

    def absent(self, step: str) -> list[int]:
        """Return the ranks that do not wait in ``step``, on the lowest waiting rank; an empty list on other
        ranks.
        """
        absent: list[int] = []
        for rank in range(self.world_size):
            if rank != self.rank and not self.has(f"late/{step}/{rank}"):
                absent.append(rank)
            elif rank < self.rank:
                return []
        return absent

    def missing(self, deadline: float) -> list[int]:
        """Return the ranks without a sign of life until ``deadline`` (`time.monotonic`)."""
        missing = list(range(self.world_size))
        while True:
            missing = [rank for rank in missing if not self.has(f"alive/{rank}")]
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.02)
