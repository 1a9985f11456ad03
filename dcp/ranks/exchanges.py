"""Exchanges between the ranks of one operation that end: waits are bounded and watched.

When a rank dies or stays away, the others agree through the group's key-value store on who is missing, and
raise an error that names it.

The failures of some ranks become one exception that every rank raises. It is a `RankFailedError`: both a
`CheckpointError` and torch's `CheckpointException` (which is what stock raises there and only a
BaseException). Where all failures have one class of `dcp.errors`, it is of that class as well, so
``except CorruptCheckpointError`` works the same on one rank and on a thousand.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp.calls.plain_errors import without_our_frames
from dcp.ranks.channel import Channel
from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CollectiveTimeoutError,
    CorruptCheckpointError,
    OptionError,
    SaveAbortedError,
    UnsafeObjectError,
    UnsupportedFormatError,
    error_from_wire,
    error_to_wire,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    made = _classes.get(cause.__name__)
    if made is None:
        attributes = {"__module__": __name__, "__doc__": cause.__doc__, "_cause": cause}
        made = _classes[cause.__name__] = type(cause.__name__, (RankFailedError, cause), attributes)
    return made


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


def pack_failures(failures: dict[int, bytes]) -> bytes:
    """Pack failures by rank."""
    return bytes(msgpack.packb(failures))


def decode_failure(data: bytes) -> CheckpointError:
    """Return what another rank packed, with its traceback as a note."""
    wire = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    error = error_from_wire(wire)
    error.add_note(f"traceback of that rank:\n{wire['traceback']}")
    return error


_LONGEST_GRACE_SECONDS = 3.0
_SHORTEST_GRACE_SECONDS = 0.5
_LOOKS_PER_GRACE = 6.0


def grace_seconds(timeout_seconds: float) -> float:
    """Return how much of the time that a rank waits for the others is for their signs of life."""
    return max(_SHORTEST_GRACE_SECONDS, min(_LONGEST_GRACE_SECONDS, timeout_seconds / 4))


class Presence:
    """Signs that the ranks of one operation give each other by ``store``, for when collectives do not work.

    Who gives an operation up says so there; who waits looks there, and answers. Those who do not answer
    within a while are lost. ``keys`` are prefixes that the ranks share: that of the operation; and before it
    that of the group's first exchange, if that is not over yet, because some ranks may still be in it.
    RuntimeError where the store is gone.
    """

    def __init__(self, store: Any, rank: int, world_size: int, keys: Sequence[str]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._keys = tuple(keys)

    def give(self, sign: str) -> None:
        """Give a sign to the others."""
        for key in self._keys:
            self._store.set(f"{key}/{sign}", "1")

    def has(self, sign: str) -> bool:
        """Return whether a rank has given a sign."""
        return any(self._store.check([f"{key}/{sign}"]) for key in self._keys)

    def show(self) -> None:
        """Give a sign of life."""
        self.give(f"alive/{self._rank}")

    def absent(self, step: str) -> list[int]:
        """Return the ranks that have not said that they wait in ``step``, for the lowest of those that have;
        for the others none, so that not every rank asks for every other."""
        absent: list[int] = []
        for rank in range(self._world_size):
            if rank != self._rank and not self.has(f"late/{step}/{rank}"):
                absent.append(rank)
            elif rank < self._rank:
                return []
        return absent

    def missing(self, deadline: float) -> list[int]:
        """Return the ranks that have given no sign of life until ``deadline`` (`time.monotonic`)."""
        missing = list(range(self._world_size))
        while True:
            missing = [rank for rank in missing if not self.has(f"alive/{rank}")]
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.02)


logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others in one step: as long as torch's own default for collectives."""

STAMP_BYTES = 8
"""Every message that is gathered begins with so many, which are the same on all ranks in one step."""

_SLICE = timedelta(milliseconds=50)
"""Seconds between two looks at whether to wait any longer, signals of Python's among them."""

_LATE_SECONDS = 30.0
"""After so long in one step, or a quarter of the time there is for it, the log says who has not come."""

_MAX_LISTED = 16

_CALLED_OFF_SECONDS = 0.2
"""Between two looks at whether another rank has called the operation off."""

_OF_GLOO = re.compile(r"^\[[^\]]*\] |\. This is typically caused.*$")


class _LostRanksError(Exception):
    """Internal: a collective broke, as `what` says; `ranks` gave no sign of life."""

    def __init__(self, ranks: list[int], what: str) -> None:
        super().__init__(what)
        self.ranks = ranks
        self.what = what


class Exchanges:
    """One rank among those of a group, in one operation.

    ``group`` None with ``use_dist`` means the default group, ``channel`` takes the place of a group; without
    ``use_dist`` there is one rank. ``coordinator`` is a rank of the group. What other ranks do not come to
    ends after ``timeout_seconds``, the look for who they are included. ``abort`` calls the operation off.

    With ``use_dist``, ``store`` is the group's key-value store, and ``key`` a prefix for keys in it that is
    this operation's alone, the same on all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        use_dist: bool,
        coordinator: int = 0,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        operation: str = "save",
        channel: Channel | None = None,
        abort: threading.Event | None = None,
    ) -> None:
        is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
        if not is_number or not timeout_seconds > 0:
            raise OptionError(f"timeout_seconds must be a number above 0, not {timeout_seconds!r}")
        self.coordinator = coordinator if use_dist else 0
        self.timeout_seconds = timeout_seconds
        self.operation = operation
        self.group: ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        self.is_coordinator = True
        """Whether this rank plans and commits for all."""
        self.abort = abort
        self._abort_is_passed_on = False
        self._steps = 0
        self._step = ""
        self._channel: Channel | None = None
        if not use_dist:
            return
        if channel is not None:
            self._use(channel)
            return
        self.group = group if group is not None else dist.group.WORLD
        if self.group is None:
            raise CheckpointError(
                "torch.distributed is not initialised; pass no_dist=True to work on one rank"
            )
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise CheckpointError(
                f"this process is not a member of the process group given to {operation}; "
                "only the group's members may call it"
            )
        self._use(Channel.of_group(self.group))

    def _use(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.world_size = channel.rank, channel.world_size
        self.is_coordinator = self.rank == self.coordinator
        self._blocks = channel.device.type == "cpu"  # on an accelerator wait() concerns its stream
        self.store = channel.store
        meeting: list[str] = []
        if channel.state.life is None:
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._serial = next(channel.state.serial)
            self.key = f"dcp/meet-{restarts}/{self._serial}"
            self._group_key = f"{self.key}/given-up"
            meeting = [self.key]
            self._presence = Presence(self.store, self.rank, self.world_size, meeting)
            word = uuid.uuid4().hex.encode() if self.rank == 0 else None
            channel.state.life = self._guard("meet", lambda: channel.broadcast(word, 0, self._wait)).decode()
        self._serial = next(channel.state.serial)
        self._group_key = f"dcp/{channel.state.life}/given-up"
        self.key = f"dcp/{channel.state.life}/{self._serial}"
        self._presence = Presence(self.store, self.rank, self.world_size, [*meeting, self.key])

    def complete(self, step: str, work: Any) -> None:
        """Wait for a collective that was begun on the channel's group; bounded, as all steps are."""
        self._guard(step, lambda: self._wait(work))

    def form(self, step: str, make: Callable[[float], T]) -> T:
        """Return what ``make`` makes together with the other ranks by torch's means, within the seconds it is
        given; what torch raises there becomes an error that names the ranks which are gone."""

        def attempt() -> T:
            bound = self.timeout_seconds - grace_seconds(self.timeout_seconds)
            try:
                return make(max(bound, self.timeout_seconds / 2))
            except RuntimeError as error:
                raise self._lost_error(f"torch: {_reason(error)}") from error

        return self._guard(step, attempt)

    # -- calling off -----------------------------------------------------------------------------------------

    def check_called_off(self, *, look: bool = False) -> None:
        """Raise SaveAbortedError once ``abort`` is set here; with ``look``, also where another rank says that
        its own is."""
        if self.abort is None:
            return
        rank: int | None = None
        if self.abort.is_set():
            self._tell_called_off()
            rank = self.rank
        elif look:
            rank = self._called_off_by()
        if rank is not None:
            raise SaveAbortedError(f"the {self.operation} was called off on rank {rank}", rank=rank)

    def watching(self, on_bytes: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Make an ``on_bytes`` that also ends the work, by SaveAbortedError, soon after a rank has called it
        off."""
        if self.abort is None:
            return on_bytes
        next_look = time.monotonic() + _CALLED_OFF_SECONDS

        def count(size_bytes: int) -> None:
            nonlocal next_look
            now = time.monotonic()
            is_due = now >= next_look
            if is_due:
                next_look = now + _CALLED_OFF_SECONDS
            self.check_called_off(look=is_due)
            if on_bytes is not None:
                on_bytes(size_bytes)

        return count

    def _tell_called_off(self) -> None:
        """Tell the ranks that are still at work, who would else learn of it at the end of their part."""
        if self._channel is not None and not self._abort_is_passed_on:
            self._abort_is_passed_on = True
            with contextlib.suppress(RuntimeError):  # the store is gone: the next exchange says so
                self.store.set(f"{self.key}/called-off", str(self.rank))

    def _called_off_by(self) -> int | None:
        if self._channel is None:
            return None
        key = f"{self.key}/called-off"
        with contextlib.suppress(RuntimeError):  # as above
            if self.store.check([key]):
                return int(self.store.get(key))
        return None

    # -- exchanges -------------------------------------------------------------------------------------------

    def _of_one_step(self, own: bytes, messages: list[bytes]) -> list[bytes]:
        """Return ``messages``, unless one is of another step than ``own``: of an operation that others have
        given up."""
        if any(message[:STAMP_BYTES] != own[:STAMP_BYTES] for message in messages):
            self._look_for_aborts()
            raise self._lost_error("they sent messages of different steps")
        return messages

    @property
    def _connected(self) -> Channel:
        if self._channel is None:
            raise CheckpointError("one rank alone exchanges nothing")
        return self._channel

    # -- bounded waits ---------------------------------------------------------------------------------------

    def _guard(self, step: str, exchange: Callable[[], T]) -> T:
        """Run one exchange; turn a broken or late one into an error that names the missing ranks."""
        self._steps += 1
        self._step = step
        try:
            self._check_in_step()
            return exchange()
        except _LostRanksError as lost:
            self._note_given_up(lost.ranks, lost.what)
            error = CollectiveTimeoutError(
                f"{self.operation} failed in step {step!r}: {lost.what}. All ranks have to call "
                f"{self.operation}; if one has died, restart the job from the last committed checkpoint",
                step=step,
                ranks=lost.ranks,
                reporting_rank=self.rank,
            )
            failures = dict.fromkeys(lost.ranks or range(self.world_size), error)
        except BaseException as error:
            # An interrupt, or no memory for the others' messages: of this rank alone.
            self._note_given_up([], f"rank {self.rank} left step {step!r} by {type(error).__name__}")
            with contextlib.suppress(RuntimeError):
                self._tell_given_up()
            raise
        raise failure_of(step, failures, self.rank, None)

    def _check_in_step(self) -> None:
        """Fail at once where an operation before this one was left before its end, on any rank."""
        earlier = None if self._channel is None else self._channel.state.given_up
        if earlier is not None:
            with contextlib.suppress(RuntimeError):  # who comes to this step later need not miss this rank
                self._presence.show()
            raise _LostRanksError(*earlier)

    def _note_given_up(self, ranks: list[int], what: str, operation: str | None = None) -> None:
        if self._channel is not None:
            earlier = f"since an earlier {operation or self.operation} failed: {what}"
            self._channel.give_up(ranks, f"the ranks of the process group are not in one step {earlier}")

    def _tell_given_up(self) -> None:
        """Tell the others, who would else learn of it by their timeout."""
        if self._channel is not None:
            self._presence.give("abort")
            self.store.set(self._group_key, f"{self._serial} {self.operation}")

    def _wait(self, work: Any) -> None:
        self._poll(work)
        try:
            work.wait(timedelta(seconds=max(self.timeout_seconds, 1.0)))
        except RuntimeError as error:
            raise self._lost_error(f"connection lost: {_reason(error)}") from error

    def _poll(self, work: Any) -> None:
        begun = time.monotonic()
        bound = max(self.timeout_seconds - grace_seconds(self.timeout_seconds), self.timeout_seconds / 2)
        pause, look_seconds = 0.0, self._look_seconds()
        next_look = begun + look_seconds
        late = begun + min(_LATE_SECONDS, self.timeout_seconds / 4)
        tell: float | None = None
        while not work.is_completed():
            if self.abort is not None and self.abort.is_set():
                self._tell_called_off()
            now = time.monotonic()
            if now - begun > bound:
                late_by = f"no answer within {self.timeout_seconds:g} s"
                raise self._lost_error(late_by, begun + self.timeout_seconds)
            if now >= next_look:
                next_look = now + look_seconds
                self._look_for_aborts()
                tell = self._look_who_is_late(now, late, tell)
            if self._blocks:
                # Asking again and again would keep the core from the rank that is waited for.
                with contextlib.suppress(RuntimeError):  # not yet; or it failed, and is complete then
                    work.wait(_SLICE)
                continue
            time.sleep(pause)
            pause = 0.0 if now - begun < 0.002 else min(0.01, pause + 0.0002)

    def _look_who_is_late(self, now: float, late: float, tell: float | None) -> float | None:
        """Ask, from ``late`` on, the other ranks whether they wait here too, and at ``tell`` log who
        does not. Returns when to tell; infinity once it is done."""
        step = str(self._steps)
        try:
            if tell is None:
                if now >= late:
                    self._presence.give(f"late/{step}")
                elif not self._presence.has(f"late/{step}"):
                    return None
                self._presence.give(f"late/{step}/{self.rank}")
                return now + 4 * self._look_seconds()
            if now < tell:
                return tell
            missing = self._presence.absent(step)
        except RuntimeError:  # the store is gone: the wait ends by that, or needs no store
            return math.inf
        if missing:
            logger.warning(
                "%s: rank %s of %d has not come to step %r; the others have waited for %.0f s, and do so for "
                "%g s in all. All ranks have to call it, not only rank 0",
                self.operation,
                ", ".join(map(str, missing[:_MAX_LISTED])),
                self.world_size,
                self._step,
                now - late + min(_LATE_SECONDS, self.timeout_seconds / 4),
                self.timeout_seconds,
            )
        return math.inf

    def _look_seconds(self) -> float:
        """Return how often a waiting rank looks for signs: often enough to answer in time."""
        return grace_seconds(self.timeout_seconds) / _LOOKS_PER_GRACE

    def _lost_error(self, reason: str, deadline: float | None = None) -> _LostRanksError:
        """Post a sign of life, wait for the others' and return who stayed silent."""
        now = time.monotonic()
        deadline = max(deadline or 0.0, now + grace_seconds(self.timeout_seconds))
        try:
            self._tell_given_up()
            self._presence.show()
            missing = self._presence.missing(deadline)
        except RuntimeError as error:  # the store's own host is gone, and with it the others' answers
            missing, reason = [0], f"{reason}; the rendezvous store is gone too ({error})"[:500]
        who = f"rank {', '.join(map(str, missing))} of {self.world_size} died or did not answer"
        if not missing:
            who = f"all {self.world_size} ranks are alive, but not in one step: an earlier one was given up"
        return _LostRanksError(missing, f"{who} ({reason})")

    def _look_for_aborts(self) -> None:
        reason = "another rank gave up, or reported a broken connection"
        try:
            if self._presence.has("abort"):
                raise self._lost_error(reason)
            told = self.store.get(self._group_key) if self.store.check([self._group_key]) else b""
        except RuntimeError:
            raise self._lost_error(reason) from None
        serial, _, operation = told.decode().partition(" ")
        if operation and int(serial) < self._serial and self._channel is not None:
            # given up by ranks that this one had no need of any more
            self._note_given_up([], "other ranks left it before its end", operation)
            self._check_in_step()


def _reason(error: RuntimeError) -> str:
    """Return the first line of what torch says, without its place in the source and its advice."""
    text = str(error).partition("\n")[0]
    return _OF_GLOO.sub("", text) or type(error).__name__
