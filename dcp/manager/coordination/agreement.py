"""What all ranks must decide alike, agreed on at each step without waiting for the stragglers of that step.

A SIGTERM reaches one rank, clocks differ, and background saves end earlier on one rank than on another: a
rank that acted on what it alone sees would leave the others in a collective. So each rank casts votes at each
step in one small all-reduce, begun there and read at the next: by then every rank has cast its own, and all
of them read the same at the same step.
"""

from __future__ import annotations

import atexit
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from dcp.storage.errors import CheckpointError, OptionError, PlanError

__all__ = ["Agreement", "RankAgreement", "Refusal", "Votes"]

_LEAVE_SECONDS = 5.0
"""How long `close` waits for the ranks that have not come to the last step yet."""

_LEAVE_POLL_SECONDS = 0.002

_NOBODY = -1

_NOW = "agree now"


@dataclass(frozen=True, slots=True)
class Votes:
    """What a rank wants, or what was agreed: what any rank wanted.

    ``stop``: SIGTERM or `request_stop`. ``time``: a save by the clock. ``failed``: a save's failure is to be
    raised.
    """

    stop: bool = False
    time: bool = False
    failed: bool = False

    def without(self, others: Votes) -> Votes:
        """Those that ``others`` has not."""
        return Votes(*(own and not other for own, other in zip(astuple(self), astuple(others), strict=True)))

    def with_(self, others: Votes) -> Votes:
        """Those too that ``others`` has."""
        return Votes(*(own or other for own, other in zip(astuple(self), astuple(others), strict=True)))


class _Turn(NamedTuple):
    """What else a rank tells, of which all see the maxima: its step; its rank where it is at a step, where it
    restores, or where it refuses what it was called with; whether it saves the step."""

    latest: int
    negative_earliest: int
    steps: int = _NOBODY
    restores: int = _NOBODY
    refuses: int = _NOBODY
    saves: int = 0


class Refusal(NamedTuple):
    """What a rank learns that was called for no step: the votes ``agreed`` there, and the step that the other
    ranks save, None if they save none; ``is_known`` is false where they tell nothing of that now."""

    agreed: Votes = Votes()
    saved: int | None = None
    is_known: bool = True


class Agreement:
    """The agreement of one rank with itself: whatever it wants is agreed at once."""

    def exchange(self, step: int, votes: Votes, saves: Callable[[Votes], bool] = lambda _: False) -> Votes:
        """What is agreed at ``step``, and this rank's ``votes`` for a later one; all ranks call it alike.

        ``saves`` says, of what is agreed, whether this rank is going to save the step.
        """
        saves(votes)
        return votes

    def meet(self) -> None:
        """Return when all ranks have come to restore. Raises PlanError where some save instead, with ``step``
        and whether it is being saved (``saving``) among its facts."""

    def refuse(self) -> Refusal:
        """Take part in the step that the others are at, where this rank was called for none. If they do not
        save it, they raise CheckpointError at their next one, which names this rank."""
        return Refusal()

    def any_rank(self, value: bool) -> bool:
        """Whether ``value`` is true on any rank, now: waits for all of them."""
        return value

    def fail(self, error: Exception) -> None:
        """In place of `any_rank`, which raises ``error`` on the others then."""

    def least(self, values: Sequence[float]) -> list[float]:
        """The least of each of the ``values`` on any rank, now: waits for all of them."""
        return list(values)

    def close(self, *, wait: bool) -> None:
        """Leave; with ``wait`` after the last exchange has ended, if it does soon. Idempotent."""


class RankAgreement(Agreement):
    """The agreement of all ranks of ``channel``, which nobody else may use.

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
        self._kept = Votes()
        self._step = 0
        self._closed = False
        atexit.register(channel.keep_for_ever)

    def exchange(self, step: int, votes: Votes, saves: Callable[[Votes], bool] = lambda _: False) -> Votes:
        """See `Agreement`. Raises CheckpointError where ranks are at different steps."""
        agreed = self._read().with_(self._kept)
        self._kept = Votes()
        is_due = saves(agreed)
        if self._calls % self._every_steps == 0:
            self._step = step
            self._begin(votes.without(agreed), _Turn(step, -step, self._ranks.rank, saves=int(is_due)))
        self._calls += 1
        return agreed

    def meet(self) -> None:
        """See `Agreement`."""
        self._kept = self._read().with_(self._kept)
        self._begin(Votes(), _Turn(_NOBODY, -_NOBODY, restores=self._ranks.rank))
        self._read()

    def refuse(self) -> Refusal:
        """See `Agreement`."""
        agreed = self._kept = self._read().with_(self._kept)
        self._calls += 1
        if (self._calls - 1) % self._every_steps:
            return Refusal(agreed, is_known=False)
        self._begin(Votes(), _Turn(_NOBODY, -_NOBODY, refuses=self._ranks.rank))
        votes, turn = self._completed()
        self._kept = agreed.with_(votes)
        return Refusal(agreed, turn.latest if turn.saves else None)

    def _begin(self, votes: Votes, turn: _Turn) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._cast = torch.tensor([*map(int, astuple(votes)), *turn], dtype=torch.int64, device="cpu")
        self._work = self._channel.begun(self._channel.group.allreduce([self._cast], options), self._cast)

    def _read(self) -> Votes:
        if self._work is None:
            return Votes()
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
        end = len(values) - len(_Turn._fields)
        return Votes(*map(bool, values[:end])), _Turn(*values[end:])

    def any_rank(self, value: bool) -> bool:
        """See `Agreement`."""
        return b"\x01" in self._ranks.all_gather(_NOW, lambda: b"\x01" if value else b"\x00")

    def fail(self, error: Exception) -> None:
        """See `Agreement`."""

        def raised() -> bytes:
            raise error

        with suppress(CheckpointError, type(error)):
            self._ranks.all_gather(_NOW, raised)

    def least(self, values: Sequence[float]) -> list[float]:
        """See `Agreement`."""
        form = f"<{len(values)}d"
        parts = self._ranks.all_gather("agree on times", lambda: struct.pack(form, *values))
        return [*map(min, zip(*(struct.unpack(form, part) for part in parts), strict=True))]

    def close(self, *, wait: bool) -> None:
        """See `Agreement`."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._channel.keep_for_ever)
        deadline = time.monotonic() + (_LEAVE_SECONDS if wait else 0.0)
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(_LEAVE_POLL_SECONDS)
        if self._work is not None and not self._work.is_completed():
            self._channel.keep_for_ever()
