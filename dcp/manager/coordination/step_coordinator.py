"""What is decided at each step of the loop, alike on all ranks: whether to save, and whether to stop."""

from __future__ import annotations

import math
import time
import weakref

from dcp.manager.coordination.agreement import Agreement, RankAgreement, Refusal, Votes
from dcp.manager.coordination.notices import Notices
from dcp.manager.coordination.schedule import Reason, Schedule
from dcp.ranks.channel import Channel
from dcp.storage.errors import CheckpointError

__all__ = ["StepCoordinator"]


class StepCoordinator:
    """The schedule, the notices and the other ranks' wishes, brought together once a step.

    ``notices`` and ``channel`` (None for one rank) belong to this object. With ``exchange`` the ranks
    exchange their wishes at each step, or at each ``every_steps``-th; without it the clock and signals of one
    rank mean nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        notices: Notices,
        channel: Channel | None,
        *,
        exchange: bool,
        every_steps: int,
        timeout_seconds: float,
    ) -> None:
        self._schedule = schedule
        self._leads_clock = channel is None or channel.rank == 0
        self._exchanges = exchange or channel is None
        self._agreement: Agreement = (
            Agreement()
            if channel is None
            else RankAgreement(channel, timeout_seconds=timeout_seconds, every_steps=every_steps)
        )
        self.notices = notices
        self._step: int | None = None
        self._stop_wanted = False
        self._stop_saved = False
        self.stopping = False
        # One that is dropped unclosed must not keep SIGTERM from ending the process.
        self._finalizer = weakref.finalize(self, _let_go, notices, self._agreement)
        self._finalizer.atexit = False

    def begin(self, step: int, *, failed: bool, last: bool, force: bool) -> Votes:
        """Begin ``step``, and tell the others if something ``failed`` here; returns what was agreed.

        All ranks call it for the same steps; for one that has begun it does nothing. ``last`` and ``force``
        as for `CheckpointManager.save`.
        """
        if step == self._step:
            return Votes()
        wanted = Votes(
            stop=(self.notices.received or self._stop_wanted) and not self.stopping,
            time=self._leads_clock and self._schedule.time_is_up(time.monotonic()),
            failed=failed,
        )

        def saves(agreed: Votes) -> bool:
            self._step = step
            self._schedule.begin(step, time_is_up=agreed.time)
            self.stopping = self.stopping or agreed.stop
            return not agreed.failed and (force or self.reason(step, last=last) is not None)

        if self._exchanges:
            return self._agreement.exchange(step, wanted, saves)
        saves(Votes())
        return Votes()

    def meet(self) -> None:
        """Come together to restore: see `Agreement.meet`."""
        if self._exchanges:
            self._agreement.meet()

    def refuse(self, error: Exception, *, saves: bool) -> bool:
        """This rank refuses the step that it was called with, by ``error``; whether the others begin a save,
        which then counts here, too. ``saves``: whether they do whatever the step is. See `Agreement.refuse`.
        """
        agreed, saved, is_known = self._agreement.refuse() if self._exchanges else Refusal(is_known=False)
        self.stopping = self.stopping or agreed.stop
        if self.stopping and not self._stop_saved and not agreed.failed:
            self._agreement.fail(error)  # at the first of their `seconds_left`; the next step is the stop's
            return False
        if saved is not None:
            self._step = saved
            self._schedule.begin(saved, time_is_up=False)
            self.saved(saved, "call")
        return saved is not None or (not is_known and (saves or self._schedule.saves_each))

    def reason(self, step: int, *, last: bool) -> Reason | None:
        """Why ``step``, which was begun, has to be saved; None if it has not."""
        return self._schedule.reason(step, last=last, stop=self.stopping and not self._stop_saved)

    def is_repeated(self, step: int) -> bool:
        """Whether ``step`` was saved or restored already, and not left out on purpose; true once a step."""
        return self._schedule.is_repeated(step)

    def saved(self, step: int, reason: Reason) -> None:
        """``step`` is being saved: see `Schedule.saved`."""
        self._schedule.saved(step, time.monotonic())
        self._stop_saved = self._stop_saved or reason == "stop"

    def skipped(self, step: int) -> None:
        """``step`` is left out: see `Schedule.skipped`."""
        self._schedule.skipped(step, time.monotonic())

    def restored(self, step: int) -> None:
        """The run goes on from ``step``."""
        self._schedule.restored(step, time.monotonic())

    def any_rank(self, value: bool) -> bool:
        """Whether ``value`` is true on any rank, now: waits for all of them."""
        return self._agreement.any_rank(value)

    def seconds_left(self, wanted_seconds: float) -> tuple[float, float]:
        """How long there is until a deadline, infinite without one, and the most that a rank wants: the same
        on all ranks, for whom it waits."""
        if not self._exchanges:
            return math.inf, wanted_seconds
        self._agreement.any_rank(False)  # who comes late must not find that the others counted from earlier
        left, wanted = self._agreement.least([self.notices.seconds_left(), -wanted_seconds])
        return left, -wanted

    def request_stop(self) -> None:
        """As if SIGTERM had come."""
        if not self._exchanges:
            raise CheckpointError(
                "request_stop() needs the ranks to agree at each step: make the manager with "
                "handle_sigterm=True"
            )
        self._stop_wanted = True

    def stop_listening(self) -> None:
        """No notice is taken any more; idempotent."""
        self.notices.close()

    def close(self, *, together: bool) -> None:
        """Leave the other ranks; ``together``: they leave too. Idempotent."""
        self._finalizer.detach()
        self.notices.close()
        self._agreement.close(wait=together)


def _let_go(notices: Notices, agreement: Agreement) -> None:
    notices.close()
    agreement.close(wait=False)
