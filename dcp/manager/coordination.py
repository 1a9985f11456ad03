"""Decisions at each step of the loop, alike on all ranks: whether to save, and whether to stop.

They are agreed on without waiting for the stragglers of that step. A SIGTERM reaches one rank, clocks differ,
and background saves end earlier on one rank than on another: a rank that acted on what it alone sees would
leave the others in a collective. So each rank casts votes at each step in one small all-reduce, begun there
and read at the next: by then every rank has cast its own, and all of them read the same at the same step.
"""

from __future__ import annotations

import atexit
import math
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from dcp.manager.notices import Notices
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from dcp.storage.errors import CheckpointError, OptionError, PlanError

__all__ = ["Reason", "StepCoordinator"]

Reason = Literal["steps", "seconds", "first", "last", "call", "force", "stop"]
"""Why a step is saved: its interval, its place in the run, no interval at all (every call saves), or because
it was asked for."""

_LEAVE_SECONDS = 5.0
"""Time that `close` waits for the ranks that have not come to the last step yet."""

_LEAVE_POLL_SECONDS = 0.002

_NOBODY = -1

_NOW = "agree now"


Vote = Literal["stop", "time", "failed"]
"""A rank's wish: to stop (SIGTERM or `request_stop`), to save by the clock, to raise a save's failure."""

Votes = frozenset[Vote]
_VOTES: tuple[Vote, ...] = get_args(Vote)
_NONE: Votes = frozenset()


class _Turn(NamedTuple):
    """State of a rank, of which all see the maxima: its step; its rank where it is at a step, where it
    restores, or where it refuses what it was called with; whether it saves the step."""

    latest: int
    negative_earliest: int
    steps: int = _NOBODY
    restores: int = _NOBODY
    refuses: int = _NOBODY
    saves: int = 0


class Refusal(NamedTuple):
    """Answer to a rank that was called for no step: the votes ``agreed`` there, and the step that the other
    ranks save, None if they save none; ``is_known`` is false where they tell nothing of that now."""

    agreed: Votes = _NONE
    saved: int | None = None
    is_known: bool = True


class RankAgreement:
    """The agreement of all ranks of ``channel``, which nothing else may use.

    Votes cast at one step are agreed at the next, and not cast again by a rank that has just seen them
    granted. ``every_steps``: exchange only at each so many-th call. Waits are bounded by ``timeout_seconds``;
    ranks that are dead or late raise CollectiveTimeoutError, which names them, on all others.
    """

    def __init__(self, channel: Channel, *, timeout_seconds: float, every_steps: int = 1) -> None:
        if every_steps < 1:
            raise OptionError(f"agree_every_steps must be at least 1, not {every_steps}")
        self._channel = channel
        self._ranks = Ranks(
            use_dist=True,
            channel=channel,
            timeout_seconds=timeout_seconds,
            operation="CheckpointManager.save",
        )
        self._every_steps = every_steps
        self._calls = 0
        self._work: Any = None
        self._cast = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._kept = _NONE
        self._step = 0
        self._closed = False
        self._forgets_failure = False
        atexit.register(channel.keep_for_ever)

    def forget_failure(self, step: int) -> None:
        """Take back the vote for a failure that was raised at ``step`` itself, on all ranks."""
        self._forgets_failure = step == self._step

    def read(self) -> Votes:
        """Return what was agreed at the step before. Raises CheckpointError where ranks were at different
        steps."""
        agreed, self._kept = self._read() | self._kept, _NONE
        if self._forgets_failure:
            agreed, self._forgets_failure = agreed - {"failed"}, False
        return agreed

    def cast(self, step: int, votes: Votes, *, saves: bool) -> None:
        """Cast ``votes`` at ``step``, to be read at a later one; ``saves``: this rank saves the step."""
        if self._calls % self._every_steps == 0:
            self._step = step
            self._begin(votes, _Turn(step, -step, self._ranks.rank, saves=int(saves)))
        self._calls += 1

    def meet(self) -> None:
        """Return when all ranks have come to restore. Raises PlanError where some save instead, with ``step``
        and whether it is being saved (``saving``) among its facts."""
        self._kept = self._read() | self._kept
        self._begin(_NONE, _Turn(_NOBODY, -_NOBODY, restores=self._ranks.rank))
        self._read()

    def refuse(self) -> Refusal:
        """Take part in the step that the others are at, where this rank was called for none. If they do not
        save it, they raise CheckpointError at their next one, which names this rank."""
        agreed = self._kept = self._read() | self._kept
        self._calls += 1
        if (self._calls - 1) % self._every_steps:
            return Refusal(agreed, is_known=False)
        self._begin(_NONE, _Turn(_NOBODY, -_NOBODY, refuses=self._ranks.rank))
        votes, turn = self._completed()
        self._kept = agreed | votes
        return Refusal(agreed, turn.latest if turn.saves else None)

    def _begin(self, votes: Votes, turn: _Turn) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._cast = torch.tensor(
            [*(vote in votes for vote in _VOTES), *turn], dtype=torch.int64, device="cpu"
        )
        self._work = self._channel.begun(self._channel.group.allreduce([self._cast], options), self._cast)

    def _read(self) -> Votes:
        if self._work is None:
            return _NONE
        votes, turn = self._completed()
        if turn.refuses != _NOBODY:
            if turn.saves:  # which fails, and tells why
                return votes
            raise CheckpointError(
                f"rank {turn.refuses} refused what the manager was called with there: its exception says why",
                rank=turn.refuses,
            )
        if turn.restores != _NOBODY and turn.steps != _NOBODY:
            raise PlanError(
                f"the ranks are not about the same: rank {turn.steps}: save() or should_save() of step "
                f"{turn.latest}; rank {turn.restores}: restore(). All ranks must call the same",
                ranks=[turn.restores],
                step=turn.latest,
                saving=bool(turn.saves),
            )
        if turn.latest != -turn.negative_earliest:
            raise CheckpointError(
                f"the ranks do not call the manager for the same steps: rank {self._ranks.rank} did so for "
                f"{self._step}, others for {-turn.negative_earliest} to {turn.latest}; every rank must call "
                "save() or should_save() for every step",
                step=self._step,
                rank=self._ranks.rank,
            )
        return votes

    def _completed(self) -> tuple[Votes, _Turn]:
        self._ranks.complete("agree", self._work)
        self._work = None
        values = self._cast.tolist()
        votes = frozenset(vote for vote, is_cast in zip(_VOTES, values, strict=False) if is_cast)
        return votes, _Turn(*values[len(_VOTES) :])

    def any_rank(self, value: bool) -> bool:
        """Tell whether ``value`` is true on any rank, now: waits for all of them."""
        return b"\x01" in self._ranks.all_gather(_NOW, lambda: b"\x01" if value else b"\x00")

    def fail(self, error: Exception) -> None:
        """Raise ``error`` on the others, in place of `any_rank`."""

        def raised() -> bytes:
            raise error

        with suppress(CheckpointError, type(error)):
            self._ranks.all_gather(_NOW, raised)

    def least(self, values: Sequence[float]) -> list[float]:
        """Return the least of each of the ``values`` on any rank, now: waits for all of them."""
        form = f"<{len(values)}d"
        parts = self._ranks.all_gather("agree on times", lambda: struct.pack(form, *values))
        return [*map(min, zip(*(struct.unpack(form, part) for part in parts), strict=True))]

    def close(self, *, wait: bool) -> None:
        """Leave; with ``wait`` after the last exchange has ended, if it does soon. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._channel.keep_for_ever)
        deadline = time.monotonic() + (_LEAVE_SECONDS if wait else 0.0)
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(_LEAVE_POLL_SECONDS)
        if self._work is not None and not self._work.is_completed():
            self._channel.keep_for_ever()


class StepCoordinator:
    """Brings together, once a step, which steps are due, the notices and the other ranks' wishes.

    With ``every_steps`` a step is due when it is a multiple of it, or when a multiple was passed since the
    last save (a loop need not ask at each step). With ``every_seconds`` a step is due when the ranks agreed
    that so much time has passed since the last save. Both: whichever comes first. Neither: every step that is
    asked for. ``save_first``: the first step of a run that was not restored, too.

    ``notices`` and ``channel`` (None for one rank) belong to this object. With ``exchanges`` the ranks
    exchange their wishes at each step, or at each ``agree_every_steps``-th; without it the clock and signals
    of one rank mean nothing.
    """

    def __init__(
        self,
        notices: Notices,
        channel: Channel | None,
        *,
        every_steps: int | None,
        every_seconds: float | None,
        save_first: bool,
        exchanges: bool,
        agree_every_steps: int,
        timeout_seconds: float,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise OptionError(f"every_steps must be at least 1, not {every_steps}")
        if every_seconds is not None and not every_seconds > 0:
            raise OptionError(f"every_seconds must be more than 0, not {every_seconds}")
        self.notices = notices
        self.stopping = False
        self._every_steps = every_steps
        # by one rank's clock for all
        self._every_seconds = every_seconds if channel is None or channel.rank == 0 else None
        self._saves_each = every_steps is None and every_seconds is None
        self._may_save_first = save_first
        self._exchanges = exchanges or channel is None
        self._agreement = None  # one rank agrees with itself at once
        if channel is not None:
            self._agreement = RankAgreement(
                channel, timeout_seconds=timeout_seconds, every_steps=agree_every_steps
            )
        self._since_seconds = time.monotonic()
        self._step: int | None = None
        self._first: int | None = None
        self._saved: int | None = None
        self._skipped: int | None = None
        self._repeated: int | None = None
        self._time_is_up = False
        self._stop_wanted = False
        self._stop_saved = False
        # One that is dropped unclosed must not keep SIGTERM from ending the process.
        self._finalizer = weakref.finalize(self, _let_go, notices, self._agreement)
        self._finalizer.atexit = False
        notices.listen()

    def begin(self, step: int, *, failed: bool, last: bool, force: bool) -> Votes:
        """Begin ``step``, and tell the others if something ``failed`` here; returns what was agreed.

        All ranks call it for the same steps; for one that has begun it does nothing. ``last`` and ``force``
        as for `CheckpointManager.save`.
        """
        if step == self._step:
            return _NONE
        votes: list[Vote] = []
        if (self.notices.moments or self._stop_wanted) and not self.stopping:
            votes.append("stop")
        waited = time.monotonic() - self._since_seconds
        if self._every_seconds is not None and waited >= self._every_seconds:
            votes.append("time")
        if failed:
            votes.append("failed")
        wanted = agreed = frozenset(votes)
        if self._agreement is not None:
            agreed = self._agreement.read() if self._exchanges else _NONE
        self._first = step if self._first is None else self._first
        self._step, self._time_is_up = step, "time" in agreed
        self.stopping = self.stopping or "stop" in agreed
        if self._agreement is not None and self._exchanges:
            saves = "failed" not in agreed and (force or self.reason(step, last=last) is not None)
            self._agreement.cast(step, wanted - agreed, saves=saves)
        return agreed

    def meet(self) -> None:
        """Come together to restore: see `RankAgreement.meet`."""
        if self._agreement is not None and self._exchanges:
            self._agreement.meet()

    def forget_failure(self, step: int) -> None:
        """See `RankAgreement.forget_failure`."""
        if self._agreement is not None:
            self._agreement.forget_failure(step)

    def refuse(self, error: Exception, *, saves: bool) -> bool:
        """Refuse the step that this rank was called with, by ``error``; tell whether the others begin a save,
        which then counts here, too. ``saves``: whether they do whatever the step is. See
        `RankAgreement.refuse`."""
        if self._agreement is None:
            return False
        agreed, saved, is_known = self._agreement.refuse() if self._exchanges else Refusal(is_known=False)
        self.stopping = self.stopping or "stop" in agreed
        if self.stopping and not self._stop_saved and "failed" not in agreed:
            self._agreement.fail(error)  # at the first of their `seconds_left`; the next step is the stop's
            return False
        if saved is not None:
            self._first = saved if self._first is None else self._first
            self._step = saved
            self.saved(saved, "call")
        return saved is not None or (not is_known and (saves or self._saves_each))

    def reason(self, step: int, *, last: bool = False) -> Reason | None:
        """Return why ``step``, which was begun, has to be saved; None if it has not, or was already."""
        if step == self._saved:
            return "last" if last and step == self._skipped else None
        if self.stopping and not self._stop_saved:
            return "stop"
        if last:
            return "last"
        if self._may_save_first and step == self._first:
            return "first"
        if self._saves_each:
            return "call"
        if self._every_steps is not None and self._passed_multiple(step, self._every_steps):
            return "steps"
        return "seconds" if self._time_is_up and step == self._step else None

    def _passed_multiple(self, step: int, every: int) -> bool:
        base = self._saved if self._saved is not None else self._first
        if base is None or base == self._first == step or step < base:  # steps may begin anew
            return step > 0 and step % every == 0
        return step // every > base // every

    def is_repeated(self, step: int) -> bool:
        """Tell whether ``step`` was saved or restored, and not left out on purpose; true once a step."""
        if step != self._saved or step == self._skipped or step == self._repeated:
            return False
        self._repeated = step
        return True

    def saved(self, step: int, reason: Reason | None) -> None:
        """Note that ``step`` is being saved: the intervals count from here."""
        self._saved, self._skipped = step, None
        self._since_seconds, self._time_is_up = time.monotonic(), False
        self._stop_saved = self._stop_saved or reason == "stop"

    def skipped(self, step: int) -> None:
        """Note that ``step`` was left out on purpose, as if it had been saved; as the last one it still may
        be."""
        self.saved(step, None)
        self._skipped = step

    def restored(self, step: int) -> None:
        """Continue from ``step``."""
        self.saved(step, None)
        self._may_save_first = False

    def any_rank(self, value: bool) -> bool:
        """Tell whether ``value`` is true on any rank, now: waits for all of them."""
        return value if self._agreement is None else self._agreement.any_rank(value)

    def seconds_left(self, wanted_seconds: float) -> tuple[float, float]:
        """Return the time until a deadline, infinite without one, and the most that a rank wants: the same
        on all ranks, for whom it waits."""
        if self._agreement is None:
            return self.notices.seconds_left(), wanted_seconds
        if not self._exchanges:
            return math.inf, wanted_seconds
        self._agreement.any_rank(False)  # who comes late must not find that the others counted from earlier
        left, wanted = self._agreement.least([self.notices.seconds_left(), -wanted_seconds])
        return left, -wanted

    def request_stop(self) -> None:
        """Stop as if SIGTERM had come."""
        if not self._exchanges:
            raise CheckpointError(
                "request_stop() needs the ranks to agree at each step: make the manager with "
                "handle_sigterm=True"
            )
        self._stop_wanted = True

    def close(self, *, together: bool) -> None:
        """Leave the other ranks; ``together``: they leave too. Idempotent."""
        self._finalizer.detach()
        _let_go(self.notices, self._agreement, wait=together)


def _let_go(notices: Notices, agreement: RankAgreement | None, *, wait: bool = False) -> None:
    notices.close()
    if agreement is not None:
        agreement.close(wait=wait)
