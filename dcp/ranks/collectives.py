"""What the ranks of a save or load say to each other.

Payloads are packed bytes in uint8 tensors: no pickled objects travel, on gloo or on any other backend.
Every exchange carries each rank's outcome, so one rank's exception becomes the same typed error on all of
them. Waits are bounded; when a rank dies or stays away, the others agree through the group's key-value
store on who is missing, and raise an error that names it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgpack
import torch.distributed as dist

from dcp.calls.plain_errors import warn_caller
from dcp.ranks.channel import Channel
from dcp.ranks.failures import decode_failure, failure_of, pack_failure, pack_failures
from dcp.ranks.presence import Presence, grace_seconds
from dcp.storage.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    PlanError,
    SaveAbortedError,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Channel", "Ranks", "works_alone"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others in one step: as long as torch's own default for collectives."""

_SLICE = timedelta(milliseconds=50)
"""Between two looks at whether to go on waiting, signals of Python's among them."""

_OF_GLOO = re.compile(r"^\[[^\]]*\] |\. This is typically caused.*$")

_OK, _FAILED, _LONGER = b"\x00", b"\x01", b"\x02"


class _LostRanksError(Exception):
    """Internal: a collective broke, as `what` says; `ranks` gave no sign of life."""

    def __init__(self, ranks: list[int], what: str) -> None:
        super().__init__(what)
        self.ranks = ranks
        self.what = what


def works_alone(process_group: ProcessGroup | None, *, no_dist: bool, operation: str) -> bool:
    """Whether an ``operation`` is this process's alone: asked for, or without torch.distributed.

    Raises CheckpointError where each rank would save alone to one id: for a process group that was destroyed,
    and for a save by one of several processes (``WORLD_SIZE``) without a group. A load by such a one warns; a
    read gives each of them the same.
    """
    if no_dist:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    if process_group is not None:
        raise CheckpointError(
            "a process group was given, but torch.distributed is not initialised any more: save before "
            "destroy_process_group(), or pass no_dist=True to work on one rank"
        )
    count = os.environ.get("WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 1 and operation != "read":
        _tell_of_no_group(int(count), operation)
    return True


def _tell_of_no_group(processes: int, operation: str) -> None:
    facts = f"this is one of {processes} processes (WORLD_SIZE), and torch.distributed is not initialised"
    if operation == "load":
        text = f"{facts}: it loads alone, as rank 0; call init_process_group() first, or say no_dist=True"
        warn_caller(text)
        return
    raise CheckpointError(
        f"{facts}: each would {operation} alone, to one place, and replace what the others have written. "
        "Call init_process_group() first; or pass no_dist=True where this process alone is meant to",
    )


class Ranks:
    """The ranks that take part in one save or load, and the steps they take together.

    ``group`` None with ``use_dist`` means the default group, ``channel`` takes the place of a group; without
    ``use_dist`` there is one rank and every step is local. ``coordinator`` is a rank of the group. A step
    that other ranks do not come to ends after ``timeout_seconds``, the look for who they are included. Once
    ``abort`` is set, the next part of a step on this rank fails, and so the step on all. Steps raise on all
    ranks alike (see `dcp.ranks.failures`): the failing rank's own exception there, its description elsewhere.
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
        self.use_dist = use_dist
        self.coordinator = coordinator if use_dist else 0
        self.timeout_seconds = timeout_seconds
        self.operation = operation
        self.group: ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        self._abort = abort
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
        self._blocks = channel.device.type == "cpu"  # on an accelerator wait() concerns its stream
        self._store = channel.store
        meeting: list[str] = []
        if channel.life is None:
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._serial = channel.next_serial()
            self._key = f"dcp/meet-{restarts}/{self._serial}"
            self._group_key = f"{self._key}/given-up"
            meeting = [self._key]
            self._presence = Presence(self._store, self.rank, self.world_size, meeting)
            word = uuid.uuid4().hex.encode() if self.rank == 0 else None
            channel.life = self._guard("meet", lambda: channel.broadcast(word, 0, self._wait)).decode()
        self._serial = channel.next_serial()
        self._group_key = f"dcp/{channel.life}/given-up"
        self._key = f"dcp/{channel.life}/{self._serial}"
        self._presence = Presence(self._store, self.rank, self.world_size, [*meeting, self._key])

    @property
    def store(self) -> Any:
        """The group's key-value store; only with ``use_dist``."""
        return self._store

    @property
    def key(self) -> str:
        """A prefix for keys in `store` that is this operation's alone, the same on all ranks."""
        return self._key

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and commits for all."""
        return self.rank == self.coordinator

    # -- steps -----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Run ``local`` everywhere, ``reduce`` on the coordinator, and give each rank its part of the
        result."""
        gathered, own_error = self._gather_outcomes(step, local)
        replies: list[bytes] | None = None
        coordinator_error: BaseException | None = None
        if gathered is not None:
            outcome, coordinator_error = self._reduce(gathered, lambda parts: self._counted(reduce(parts)))
            replies = (
                [_OK + part for part in outcome]
                if isinstance(outcome, list)
                else [_FAILED + outcome] * self.world_size
            )
        reply = self._guard(step, lambda: self._scatter(replies))
        return self._unwrap(step, reply, own_error or coordinator_error)

    def reduce_broadcast(
        self,
        step: str,
        local: Callable[[], bytes],
        reduce: Callable[[list[bytes]], bytes],
        *,
        short: bool = False,
    ) -> bytes:
        """Run ``local`` everywhere, ``reduce`` on the coordinator, and give its result to every rank.

        ``short``, on all ranks or none, is for messages that are mostly short (`channel.SHORT_BYTES`): their
        lengths are not told in an exchange of their own then.
        """
        message, own_error = self._attempt(local)
        received, error = _LONGER, None
        if short:
            received, error = self._reduced(step, lambda: self._gather_short(message), reduce)
        if received == _LONGER:
            received, error = self._reduced(step, lambda: self._gather(message), reduce)
        return self._unwrap(step, received, own_error or error)

    def _reduced(
        self,
        step: str,
        gather: Callable[[], Sequence[bytes | None] | None],
        reduce: Callable[[list[bytes]], bytes],
    ) -> tuple[bytes, BaseException | None]:
        """The coordinator's answer to all, and its own exception; `_LONGER` where a message is missing."""
        gathered = self._guard(step, gather)
        reply: bytes | None = None
        error: BaseException | None = None
        if gathered is not None:
            messages = [message for message in gathered if message is not None]
            reply = _LONGER
            if len(messages) == len(gathered):
                outcome, error = self._reduce(messages, lambda parts: [reduce(parts)])
                reply = _OK + outcome[0] if isinstance(outcome, list) else _FAILED + outcome
        return self._guard(step, lambda: self._broadcast(reply)), error

    def all_gather(self, step: str, local: Callable[[], bytes]) -> list[bytes]:
        """Run ``local`` everywhere; every rank gets every rank's result."""
        message, own_error = self._attempt(local)
        try:
            messages = self._guard(step, lambda: self._all_gather(message))
        except CheckpointError as error:
            if own_error is not None:  # which may be why the others are not there
                error.add_note(f"before, rank {self.rank} failed itself: {own_error}")
            raise
        return self._parts(step, messages, own_error)

    def compare(self, step: str, local: Callable[[], bytes]) -> list[bytes]:
        """`all_gather` of what is mostly the same on all ranks: nothing else travels then than a digest."""
        message, own_error = self._attempt(local)
        messages = [message] * self.world_size
        channel = self._channel
        if channel is not None and not self._guard(step, lambda: channel.is_same(message, self._wait)):
            messages = self._guard(step, lambda: self._all_gather(message))
        return self._parts(step, messages, own_error)

    def _parts(self, step: str, messages: list[bytes], own_error: BaseException | None) -> list[bytes]:
        failures = {rank: part[1:] for rank, part in enumerate(messages) if part[:1] == _FAILED}
        if failures:
            raise failure_of(step, {r: decode_failure(w) for r, w in failures.items()}, self.rank, own_error)
        return [part[1:] for part in messages]

    def broadcast(self, step: str, local: Callable[[], bytes]) -> bytes:
        """Run ``local`` on the coordinator; every rank gets its result."""
        message: bytes | None = None
        error: BaseException | None = None
        if self.is_coordinator:
            message, error = self._attempt(local)
            if error is not None:
                message = _FAILED + pack_failures({self.rank: message[1:]})
        received = self._guard(step, lambda: self._broadcast(message))
        return self._unwrap(step, received, error)

    def barrier(self, step: str) -> None:
        """Return when every rank has come this far."""
        self.all_gather(step, lambda: b"")

    def complete(self, step: str, work: Any) -> None:
        """Wait for a collective that was begun on the channel's group; bounded, as all steps are."""
        self._guard(step, lambda: self._wait(work))

    def form(self, step: str, make: Callable[[float], T]) -> T:
        """What ``make`` makes together with the other ranks by torch's means, within the seconds it is given;
        what torch raises there becomes an error that names the ranks which are gone."""

        def attempt() -> T:
            bound = self.timeout_seconds - grace_seconds(self.timeout_seconds)
            try:
                return make(max(bound, self.timeout_seconds / 2))
            except RuntimeError as error:
                raise self._lost_error(f"torch: {_reason(error)}") from error

        return self._guard(step, attempt)

    # -- outcomes --------------------------------------------------------------------------------------------

    def _gather_outcomes(
        self, step: str, local: Callable[[], bytes]
    ) -> tuple[list[bytes] | None, BaseException | None]:
        message, own_error = self._attempt(local)
        return self._guard(step, lambda: self._gather(message)), own_error

    def _reduce(
        self, gathered: list[bytes], reduce: Callable[[list[bytes]], list[bytes]]
    ) -> tuple[list[bytes] | bytes, BaseException | None]:
        """The coordinator's results, or the packed failures of the ranks (its own exception beside)."""
        failed = {rank: part[1:] for rank, part in enumerate(gathered) if part[:1] == _FAILED}
        if failed:
            return pack_failures(failed), None
        try:
            self._check_abort()
            return reduce([part[1:] for part in gathered]), None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return pack_failures({self.rank: pack_failure(error)}), error

    def _counted(self, replies: Sequence[bytes]) -> list[bytes]:
        if len(replies) != self.world_size:
            raise PlanError(f"the global plan has {len(replies)} parts for {self.world_size} ranks")
        return list(replies)

    def _unwrap(self, step: str, reply: bytes, own_error: BaseException | None) -> bytes:
        if reply[:1] == _OK:
            return reply[1:]
        failures = {
            int(rank): decode_failure(wire)
            for rank, wire in msgpack.unpackb(reply[1:], strict_map_key=False).items()
        }
        raise failure_of(step, failures, self.rank, own_error)

    def _attempt(self, local: Callable[[], bytes]) -> tuple[bytes, BaseException | None]:
        try:
            self._check_abort()
            return _OK + local(), None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return _FAILED + pack_failure(error), error

    def _check_abort(self) -> None:
        if self._abort is not None and self._abort.is_set():
            raise SaveAbortedError(f"the {self.operation} was called off on rank {self.rank}", rank=self.rank)

    # -- exchanges -------------------------------------------------------------------------------------------

    def _gather(self, data: bytes) -> list[bytes] | None:
        if self._channel is None:
            return [data]
        return self._channel.gather(data, self.coordinator, self._wait)

    def _gather_short(self, data: bytes) -> Sequence[bytes | None] | None:
        if self._channel is None:
            return [data]
        return self._channel.gather_short(data, self.coordinator, self._wait)

    def _all_gather(self, data: bytes) -> list[bytes]:
        return [data] if self._channel is None else self._channel.all_gather(data, self._wait)

    def _scatter(self, data: list[bytes] | None) -> bytes:
        if self._channel is None:
            return data[0] if data is not None else b""
        return self._channel.scatter(data, self.coordinator, self._wait)

    def _broadcast(self, data: bytes | None) -> bytes:
        if self._channel is None:
            return data or b""
        return self._channel.broadcast(data, self.coordinator, self._wait)

    # -- bounded waits ---------------------------------------------------------------------------------------

    def _guard(self, step: str, exchange: Callable[[], T]) -> T:
        """Run one exchange; turn a broken or late one into an error that names the missing ranks."""
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
        earlier = None if self._channel is None else self._channel.given_up
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
            self._presence.give_up()
            self._store.set(self._group_key, f"{self._serial} {self.operation}")

    def _wait(self, work: Any) -> None:
        self._poll(work)
        try:
            work.wait(timedelta(seconds=max(self.timeout_seconds, 1.0)))
        except RuntimeError as error:
            raise self._lost_error(f"connection lost: {_reason(error)}") from error

    def _poll(self, work: Any) -> None:
        begun = time.monotonic()
        bound = max(self.timeout_seconds - grace_seconds(self.timeout_seconds), self.timeout_seconds / 2)
        pause, look_seconds = 0.0, Presence.pause_seconds(self.timeout_seconds)
        next_look = begun + look_seconds
        while not work.is_completed():
            now = time.monotonic()
            if now - begun > bound:
                self._lost(f"no answer within {self.timeout_seconds:g} s", begun + self.timeout_seconds)
            if now >= next_look:
                next_look = now + look_seconds
                self._look_for_aborts()
            if self._blocks:
                # Asking again and again would keep the core from the rank that is waited for.
                with contextlib.suppress(RuntimeError):  # not yet; or it failed, and is complete then
                    work.wait(_SLICE)
                continue
            time.sleep(pause)
            pause = 0.0 if now - begun < 0.002 else min(0.01, pause + 0.0002)

    def _lost(self, reason: str, deadline: float | None = None) -> NoReturn:
        raise self._lost_error(reason, deadline)

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
            if self._presence.is_given_up():
                self._lost(reason)
            told = self._store.get(self._group_key) if self._store.check([self._group_key]) else b""
        except RuntimeError:
            self._lost(reason)
        serial, _, operation = told.decode().partition(" ")
        if operation and int(serial) < self._serial and self._channel is not None:
            # given up by ranks that this one had no need of any more
            self._note_given_up([], "other ranks left it before its end", operation)
            self._check_in_step()


def _reason(error: RuntimeError) -> str:
    """The first line of what torch says, without its place in the source and its advice."""
    text = str(error).partition("\n")[0]
    return _OF_GLOO.sub("", text) or type(error).__name__
