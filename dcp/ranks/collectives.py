"""Steps that the ranks of a save or load take together, with bounded waits.

Payloads are uint8 tensors on any backend. Every exchange carries each rank's outcome, so one rank's exception
becomes the same typed error on all ranks. If a rank dies or is late, the other ranks agree through the
key-value store on the missing ranks and raise an error that names them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack
import torch.distributed as dist

from dcp.ranks.channel import Channel
from dcp.ranks.failures import (
    DEFAULT_TIMEOUT_SECONDS,
    Presence,
    decode_failure,
    failure_of,
    grace_seconds,
    pack_failure,
)
from dcp.storage.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    OptionError,
    SaveAbortedError,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Codec(NamedTuple):
    """Encodes values for exchanges between ranks, and decodes them."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


BYTES = Codec(lambda value: value, lambda data: data)
"""Codec of bytes."""

_OK, _FAILED = b"\x00", b"\x01"

_STAMP_BYTES = 8
"""Length of the stamp at the beginning of every gathered message, equal on all ranks in one step."""

_DIGEST_BYTES = 16

_SLICE = timedelta(milliseconds=50)
"""Seconds between checks during a wait, Python signals included."""

_LATE_SECONDS = 30.0
"""Time in a step (at most a quarter of the timeout) after which the log names late ranks."""

_MAX_LISTED = 16

_CALLED_OFF_SECONDS = 0.2
"""Seconds between checks for a cancellation by another rank."""

_LOOKS_PER_GRACE = 6.0

_OF_GLOO = re.compile(r"^\[[^\]]*\] |\. This is typically caused.*$")


class _LostRanksError(Exception):
    """Internal error of a broken collective: silent ranks and reason."""


class Ranks:
    """Ranks of one operation, and the steps that they take together.

    ``group`` None with ``use_dist`` is the default group; ``channel`` replaces a group; without ``use_dist``
    there is one rank. ``coordinator`` is a rank of the group. Waits end after ``timeout_seconds``. ``store``
    is the group's key-value store, and ``key`` the prefix of this operation's keys, equal on all ranks.

    Steps raise on all ranks (see `dcp.ranks.failures`): the rank's own exception, or a description of another
    rank's. After ``abort`` is set, the next step fails on all ranks. With one rank, a step calls its
    functions without packing. With ``is_within``, it also raises their errors unchanged, inside a step of all
    ranks.
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
        is_within: bool = False,
    ) -> None:
        is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
        if not is_number or not timeout_seconds > 0:
            raise OptionError(f"timeout_seconds must be a number above 0, not {timeout_seconds!r}")
        self.coordinator = coordinator if use_dist else 0
        self.timeout_seconds, self.operation, self.abort = timeout_seconds, operation, abort
        self.rank, self.world_size = 0, 1
        self.is_coordinator = True
        """True on the rank that plans and commits."""
        self._is_within = is_within
        self._abort_is_passed_on = False
        self._steps, self._step = 0, ""
        self._channel: Channel | None = None
        if not use_dist:
            return
        if channel is None:
            group = group if group is not None else dist.group.WORLD
            if group is None:
                raise CheckpointError(
                    "torch.distributed is not initialised; pass no_dist=True to work on one rank"
                )
            if dist.get_rank(group) < 0:
                raise CheckpointError(
                    f"this process is not a member of the process group given to {operation}: call "
                    f"{operation} on members of the group only"
                )
            channel = Channel.of_group(group)
        self._use(channel)

    def _use(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.world_size = channel.rank, channel.world_size
        self.is_coordinator = self.rank == self.coordinator
        self._blocks = channel.device.type == "cpu"  # for an accelerator, wait() blocks only its stream
        self.store = channel.store
        grace = grace_seconds(self.timeout_seconds)
        self._bound_seconds = max(self.timeout_seconds - grace, self.timeout_seconds / 2)
        self._look_seconds = grace / _LOOKS_PER_GRACE
        """Pause between checks for signs, short enough to answer in time."""
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

    # -- steps -----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        step: str,
        local: Callable[[], Any],
        reduce: Callable[[list[Any]], Sequence[Any]],
        *,
        sent: Codec = BYTES,
        reply: Codec = BYTES,
    ) -> Callable[[], Any]:
        """Run ``local`` on all ranks and ``reduce`` on the coordinator, and return a function for this rank's
        part.

        Call the function in the next step, so that a failure to unpack reaches all ranks.
        """
        channel = self._channel
        if channel is None:
            return partial(next, iter(self._alone(step, local, reduce)))
        message, own_error = self._attempt(step, local, sent)
        answers, error = self._reduce(
            channel, step, message, lambda parts: [*map(reply.encode, reduce(parts))], sent
        )
        if isinstance(answers, bytes):
            answers = [answers] * self.world_size
        received = self._guard(step, lambda: channel.scatter(answers, self.coordinator, self._wait))
        return partial(reply.decode, self._unwrap(step, received, own_error or error))

    def reduce_broadcast(
        self,
        step: str,
        local: Callable[[], Any],
        reduce: Callable[[list[Any]], Any],
        *,
        sent: Codec = BYTES,
    ) -> Any:
        """Run ``local`` on all ranks and ``reduce`` on the coordinator, and return its result (bytes) on
        every rank.
        """
        channel = self._channel
        if channel is None:
            return self._alone(step, local, reduce)
        return self._reduce_broadcast(channel, step, *self._attempt(step, local, sent), reduce, sent)

    def reduce_alike(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """Reduce with a deterministic ``reduce``, equal on every rank.

        If all messages are short (`channel.HEAD_BYTES`), each rank runs ``reduce`` after one exchange.
        """
        channel = self._channel
        if channel is None:
            alone: bytes = self._alone(step, local, reduce)
            return alone
        message, own_error = self._attempt(step, local)
        messages = self._collect(step, message, lambda: channel.all_gather_short(message, self._wait))
        if messages is None:
            return self._reduce_broadcast(channel, step, message, own_error, reduce)
        parts = self._parts(step, messages, own_error)

        def run() -> tuple[bytes, CheckpointError | None]:
            try:
                return reduce(parts), None
            except CheckpointError as error:
                return b"", error

        result, error = self._guard(step, run)
        if error is not None:
            raise failure_of(step, {self.coordinator: error}, self.rank, error)
        return result

    def all_gather(self, step: str, local: Callable[[], bytes], *, alike: bool = False) -> list[bytes]:
        """Run ``local`` on all ranks and return all results on every rank.

        With ``alike``, digests are exchanged first; the caller then compares the operations.
        """
        channel = self._channel
        if channel is None:
            return [self._alone(step, local)]
        message, own_error = self._attempt(step, local, operation="any" if alike else "")
        messages: list[bytes] | None = None
        try:
            if alike:
                digest = blake2b(message, digest_size=_DIGEST_BYTES).digest()
                digests = self._guard(step, lambda: channel.all_gather(digest, self._wait))
                messages = [message] * self.world_size if len(set(digests)) == 1 else None
            if messages is None:
                messages = self._collect(step, message, lambda: channel.all_gather(message, self._wait))
        except CheckpointError as error:
            if own_error is not None:  # may explain why ranks are missing
                error.add_note(f"rank {self.rank} itself had failed before: {own_error}")
            raise
        return self._parts(step, messages, own_error)

    def broadcast(self, step: str, local: Callable[[], bytes]) -> bytes:
        """Run ``local`` on the coordinator and return its result on every rank."""
        channel = self._channel
        if channel is None:
            alone: bytes = self._alone(step, local)
            return alone
        message: bytes | None = None
        error: BaseException | None = None
        if self.is_coordinator:
            own, error = self._attempt(step, local)
            message = own[_STAMP_BYTES:] if error is None else _answer({self.rank: _content(own)})
        received = self._guard(step, lambda: channel.broadcast(message, self.coordinator, self._wait))
        return self._unwrap(step, received, error)

    # -- outcomes --------------------------------------------------------------------------------------------

    def _alone(
        self, step: str, local: Callable[[], Any], reduce: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """Take the step of a single rank, with the errors of several ranks."""
        try:
            self.check_called_off()
            result = local()
            if reduce is None:
                return result
            self.check_called_off()
            return reduce([result])
        except BaseException as error:
            if self._is_within:
                raise
            failure = failure_of(step, {0: decode_failure(pack_failure(error))}, 0, error)
        raise failure

    def _attempt(
        self, step: str, local: Callable[[], Any], sent: Codec = BYTES, operation: str = ""
    ) -> tuple[bytes, BaseException | None]:
        """Make this rank's message: a stamp, the outcome, and the packed result or failure."""
        name = f"{operation or self.operation}/{step}"
        stamp = blake2b(name.encode(), digest_size=_STAMP_BYTES).digest()
        try:
            self.check_called_off()
            return b"".join((stamp, _OK, sent.encode(local()))), None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return stamp + _FAILED + pack_failure(error), error

    def _collect(
        self, step: str, message: bytes, exchange: Callable[[], list[bytes] | None]
    ) -> list[bytes] | None:
        """Return the result of ``exchange``; raise if a message belongs to another step, which other ranks
        have abandoned.
        """

        def run() -> list[bytes] | None:
            messages = exchange()
            if any(other[:_STAMP_BYTES] != message[:_STAMP_BYTES] for other in messages or ()):
                self._look_for_aborts()
                raise self._lost_error("they sent messages of different steps")
            return messages

        return self._guard(step, run)

    def _reduce(
        self,
        channel: Channel,
        step: str,
        message: bytes,
        reduce: Callable[[list[Any]], list[bytes]],
        sent: Codec,
    ) -> tuple[list[bytes] | bytes | None, BaseException | None]:
        """Return the coordinator's answers, or packed failures of ranks with its own exception; None on other
        ranks.
        """
        gathered = self._collect(step, message, lambda: channel.gather(message, self.coordinator, self._wait))
        if gathered is None:
            return None, None
        if failed := _failures(gathered):
            return _answer(failed), None
        try:
            self.check_called_off(look=True)
            return [_OK + part for part in reduce([sent.decode(_content(one)) for one in gathered])], None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return _answer({self.rank: pack_failure(error)}), error

    def _reduce_broadcast(
        self,
        channel: Channel,
        step: str,
        message: bytes,
        own_error: BaseException | None,
        reduce: Callable[[list[Any]], bytes],
        sent: Codec = BYTES,
    ) -> bytes:
        answers, error = self._reduce(channel, step, message, lambda parts: [reduce(parts)], sent)
        answer = answers[0] if isinstance(answers, list) else answers
        received = self._guard(step, lambda: channel.broadcast(answer, self.coordinator, self._wait))
        return self._unwrap(step, received, own_error or error)

    def _parts(self, step: str, messages: list[bytes] | None, own_error: BaseException | None) -> list[bytes]:
        if failures := _failures(messages or ()):
            raise failure_of(step, {r: decode_failure(w) for r, w in failures.items()}, self.rank, own_error)
        return [*map(_content, messages or ())]

    def _unwrap(self, step: str, reply: bytes, own_error: BaseException | None) -> bytes:
        if reply[:1] == _OK:
            return reply[1:]
        failures = msgpack.unpackb(reply[1:], strict_map_key=False).items()
        raise failure_of(step, {int(r): decode_failure(w) for r, w in failures}, self.rank, own_error)

    # -- calling off -----------------------------------------------------------------------------------------

    def check_called_off(self, *, look: bool = False) -> None:
        """Raise SaveAbortedError if ``abort`` is set here, or with ``look`` on another rank."""
        if self.abort is None:
            return
        rank: int | None = None
        if self.abort.is_set():
            self._tell_called_off()
            rank = self.rank
        elif look and self._channel is not None:
            key = f"{self.key}/called-off"
            with contextlib.suppress(RuntimeError):  # the store has failed: the next exchange reports this
                rank = int(self.store.get(key)) if self.store.check([key]) else None
        if rank is not None:
            raise SaveAbortedError(f"the {self.operation} was aborted on rank {rank}", rank=rank)

    def watching(self, on_bytes: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Wrap ``on_bytes`` to raise SaveAbortedError soon after a rank has cancelled."""
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
        """Notify ranks at work of the cancellation."""
        if self._channel is not None and not self._abort_is_passed_on:
            self._abort_is_passed_on = True
            with contextlib.suppress(RuntimeError):  # the store has failed: the next exchange reports this
                self.store.set(f"{self.key}/called-off", str(self.rank))

    # -- bounded waits ---------------------------------------------------------------------------------------

    def complete(self, step: str, work: Any) -> None:
        """Wait for a collective on the channel's group, bounded like other steps."""
        self._guard(step, lambda: self._wait(work))

    def form(self, step: str, make: Callable[[float], T]) -> T:
        """Return the result of ``make``, a collective call of torch, within the given seconds.

        Errors of torch become an error that names the missing ranks.
        """

        def attempt() -> T:
            try:
                return make(self._bound_seconds)
            except RuntimeError as error:
                raise self._lost_error(f"torch: {_reason(error)}") from error

        return self._guard(step, attempt)

    def _guard(self, step: str, exchange: Callable[[], T]) -> T:
        """Run one exchange; convert failures and timeouts to an error that names the missing ranks."""
        self._steps += 1
        self._step = step
        try:
            self._check_in_step()
            return exchange()
        except _LostRanksError as lost:
            missing, what = lost.args
            self._note_given_up(missing, what)
            error = CollectiveTimeoutError(
                f"{self.operation} failed in step {step!r}: {what}. All ranks must call {self.operation}. If "
                "a rank has died, restart the job from the last committed checkpoint: this process group "
                "is no longer usable",
                step=step,
                ranks=missing,
                reporting_rank=self.rank,
            )
            failures = dict.fromkeys(missing or range(self.world_size), error)
        except BaseException as error:
            # An interrupt or lack of memory on this rank only.
            self._note_given_up([], f"rank {self.rank} left step {step!r} by {type(error).__name__}")
            with contextlib.suppress(RuntimeError):
                self._tell_given_up()
            raise
        raise failure_of(step, failures, self.rank, None)

    def _check_in_step(self) -> None:
        """Raise at once if any rank left an earlier operation before its end."""
        earlier = None if self._channel is None else self._channel.state.given_up
        if earlier is not None:
            with contextlib.suppress(RuntimeError):  # later ranks then see this rank's sign of life
                self._presence.show()
            raise _LostRanksError(*earlier)

    def _note_given_up(self, ranks: list[int], what: str, operation: str | None = None) -> None:
        channel = self._channel
        if channel is not None and channel.world_size > 1 and channel.state.given_up is None:
            failed = f"after a failed {operation or self.operation}: {what}"
            channel.state.given_up = ranks, f"the ranks of the process group are in different steps {failed}"
            channel.keep_for_ever()

    def _tell_given_up(self) -> None:
        """Notify the other ranks before their timeout."""
        if self._channel is not None:
            self._presence.give("abort")
            self.store.set(self._group_key, f"{self._serial} {self.operation}")

    def _wait(self, work: Any) -> None:
        begun = time.monotonic()
        pause, next_look = 0.0, begun + self._look_seconds
        late = begun + min(_LATE_SECONDS, self.timeout_seconds / 4)
        tell: float | None = None
        while not work.is_completed():
            if self.abort is not None and self.abort.is_set():
                self._tell_called_off()
            now = time.monotonic()
            if now - begun > self._bound_seconds:
                late_by = f"no answer within {self.timeout_seconds:g} s"
                raise self._lost_error(late_by, begun + self.timeout_seconds)
            if now >= next_look:
                next_look = now + self._look_seconds
                self._look_for_aborts()
                tell = self._look_who_is_late(now, late, tell)
            if self._blocks:
                # Polling would take CPU time from the late rank.
                with contextlib.suppress(RuntimeError):  # not complete yet, or failed
                    work.wait(_SLICE)
                continue
            time.sleep(pause)
            pause = 0.0 if now - begun < 0.002 else min(0.01, pause + 0.0002)
        try:
            work.wait(timedelta(seconds=max(self.timeout_seconds, 1.0)))
        except RuntimeError as error:
            raise self._lost_error(f"connection lost: {_reason(error)}") from error

    def _look_who_is_late(self, now: float, late: float, tell: float | None) -> float | None:
        """Ask the other ranks from ``late`` on whether they wait in this step; log late ranks at ``tell``.

        Returns the next time to log; infinity after the log.
        """
        step = str(self._steps)
        try:
            if tell is None:
                if now >= late:
                    self._presence.give(f"late/{step}")
                elif not self._presence.has(f"late/{step}"):
                    return None
                self._presence.give(f"late/{step}/{self.rank}")
                return now + 4 * self._look_seconds
            if now < tell:
                return tell
            missing = self._presence.absent(step)
        except RuntimeError:  # the store has failed: the wait ends anyway
            return math.inf
        if missing:
            logger.warning(
                "%s: rank %s of %d has not reached step %r; the other ranks have waited for %.0f s of the "
                "timeout of %g s. All ranks must call the operation, not only rank 0",
                self.operation,
                ", ".join(map(str, missing[:_MAX_LISTED])),
                self.world_size,
                self._step,
                now - late + min(_LATE_SECONDS, self.timeout_seconds / 4),
                self.timeout_seconds,
            )
        return math.inf

    def _lost_error(self, reason: str, deadline: float | None = None) -> _LostRanksError:
        """Post a sign of life, wait for those of other ranks, and return an error with the silent ranks."""
        now = time.monotonic()
        deadline = max(deadline or 0.0, now + grace_seconds(self.timeout_seconds))
        try:
            self._tell_given_up()
            self._presence.show()
            missing = self._presence.missing(deadline)
        except RuntimeError as error:  # the host of the store has died
            missing, reason = [0], f"{reason}; the rendezvous store failed as well ({error})"[:500]
        who = f"rank {', '.join(map(str, missing))} of {self.world_size} died or did not answer"
        if not missing:
            who = f"all {self.world_size} ranks are alive, but in different steps after a failed step"
        return _LostRanksError(missing, f"{who} ({reason})")

    def _look_for_aborts(self) -> None:
        reason = "another rank gave up, or reported a broken connection"
        try:
            if self._presence.has("abort"):
                raise self._lost_error(reason)
            noted = self.store.get(self._group_key) if self.store.check([self._group_key]) else b""
        except RuntimeError:
            raise self._lost_error(reason) from None
        serial, _, operation = noted.decode().partition(" ")
        if operation and int(serial) < self._serial and self._channel is not None:
            # abandoned by ranks that no longer need this rank
            self._note_given_up([], "other ranks left it before its end", operation)
            self._check_in_step()


def _reason(error: RuntimeError) -> str:
    """Return the first line of a torch error, without source position and advice."""
    text = str(error).partition("\n")[0]
    return _OF_GLOO.sub("", text) or type(error).__name__


def _failures(messages: Sequence[bytes]) -> dict[int, bytes]:
    """Return the packed failures by rank."""
    at = slice(_STAMP_BYTES, _STAMP_BYTES + 1)
    return {rank: _content(message) for rank, message in enumerate(messages) if message[at] == _FAILED}


def _content(message: bytes) -> bytes:
    """Return a message without stamp and outcome."""
    return message[_STAMP_BYTES + 1 :]


def _answer(failures: Mapping[int, bytes]) -> bytes:
    """Pack failures by rank as one answer for all ranks."""
    return _FAILED + bytes(msgpack.packb(failures))


def retried(
    attempt: Callable[[int], T],
    what: str,
    *,
    retries: int,
    pause_seconds: float,
    is_passing: Callable[[CheckpointError], bool],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Call ``attempt`` with its number, from 1, until it succeeds; ``what`` names it in the log.

    Passing errors are retried ``retries`` times after a ``wait`` of ``pause_seconds``, doubled each time.
    Raises the last error.
    """
    number = 1
    while True:
        try:
            return attempt(number)
        except CheckpointError as error:
            if number > retries or not is_passing(error):
                raise
            logger.warning("%s failed; trying again in %g s: %s", what, pause_seconds, error)
        wait(pause_seconds)
        number, pause_seconds = number + 1, pause_seconds * 2
