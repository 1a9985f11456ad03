"""Agreement of all ranks, at each step, whether to save and whether to stop.

SIGTERM reaches one rank, clocks differ, and background saves end at different times. A rank that decided
alone would leave the others waiting in a collective. So each rank casts votes in a small all-reduce that
begins at one step and is read at the next, without waiting for slow ranks.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from dcp.storage.errors import CheckpointError, OptionError, PlanError

logger = logging.getLogger(__name__)

Grace = float | Mapping[signal.Signals | str | os.PathLike[str], float]
"""Seconds after SIGTERM, or a dict of seconds by signals and by files that appear."""

_LOOK_SECONDS = 0.25
_SHORTEST_SECONDS = 0.02
_LARGEST_RESERVE_SECONDS = 5.0


class Notices:
    """Notices to stop: SIGTERM if handled, and the signals and files of ``grace``. Raises OptionError for
    invalid values.

    A thread, started by `see_to_it`, polls files and watches deadlines with `time.monotonic`. All notices of
    a process share one handler for each signal. The handler calls the previous Python handler, and is removed
    with the last notice.
    """

    def __init__(self, grace: Grace | None, *, handle_sigterm: bool) -> None:
        self._grace = _grace_of(grace, handle_sigterm=handle_sigterm)
        self.moments: dict[int | str, float] = {}
        """The time at which each notice came first."""
        self._signals = [notice for notice in self._grace if isinstance(notice, int)]
        self._there = {path: _identity(path) for path in self._grace if isinstance(path, str)}
        self._closed = threading.Event()
        for path, identity in self._there.items():
            if identity is not None:
                logger.warning(
                    "%s exists already and counts as a notice only after it is removed and created again",
                    path,
                )

    def listen(self) -> None:
        """Notice signals from now on, until `close`; only the main thread can install their handlers."""
        for number in self._signals:
            installed = _installed.get(number)
            if installed is None or not installed.is_in_place():
                if threading.current_thread() is not threading.main_thread():
                    name = signal.Signals(number).name
                    logger.warning(
                        "%s is not handled: only the main thread can install a signal handler", name
                    )
                    continue
                if installed is not None and installed.pid != os.getpid():
                    _listeners.clear()  # after a fork, only the parent listens
                _installed[number] = _Handler(number)
            _listeners[number].add(self)

    def seconds_left(self) -> float:
        """Return the seconds until the earliest deadline; infinity without a deadline."""
        end = math.inf
        for notice, moment in tuple(self.moments.items()):
            grace = self._grace[notice]
            if grace is not None:
                # cancelled saves need time to remove their files
                end = min(end, moment + grace - min(_LARGEST_RESERVE_SECONDS, grace / 10))
        return end - time.monotonic()

    def see_to_it(self, call_off: Callable[[], None]) -> None:
        """Start polling files, and call ``call_off`` repeatedly after a deadline."""
        if any(grace is not None for grace in self._grace.values()):
            threading.Thread(target=self._look, args=(call_off,), name="dcp-notices", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Idempotent. The last listener restores the previous handlers."""
        self._closed.set()
        for number in self._signals:
            _listeners[number].discard(self)
            installed = _installed.get(number)
            if installed is not None and not _listeners[number] and installed.take_away():
                del _installed[number]

    def _look(self, call_off: Callable[[], None]) -> None:
        while not self._closed.wait(min(_LOOK_SECONDS, max(_SHORTEST_SECONDS, self.seconds_left()))):
            for path in self._there.keys() - self.moments.keys():
                identity = _identity(path)
                if identity not in (None, self._there[path]):
                    self.moments[path] = time.monotonic()
                    logger.warning("the file %s announces the end of the job", path)
                self._there[path] = identity
            if self.seconds_left() <= 0:
                call_off()


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return the identity of a file or folder; None if absent or unreadable."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_size, found.st_mtime_ns  # inode numbers change on some FUSE mounts


def _grace_of(grace: Grace | None, *, handle_sigterm: bool) -> dict[int | str, float | None]:
    """Return the grace in seconds for each signal and file; None for a signal without a known grace."""
    given: Mapping[Any, float]
    given = grace if isinstance(grace, Mapping) else {} if grace is None else {signal.SIGTERM: grace}
    found: dict[int | str, float | None] = {signal.SIGTERM: None} if handle_sigterm else {}
    for notice, seconds in given.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise OptionError(f"grace_seconds must be a number above 0, not {seconds!r}")
        if isinstance(notice, int):
            if notice not in [*signal.Signals] or notice in (signal.SIGKILL, signal.SIGSTOP):
                raise OptionError(f"grace_seconds: {notice!r} is not a signal that can be handled")
            if notice == signal.SIGTERM and not handle_sigterm:
                raise OptionError("grace_seconds of SIGTERM requires handle_sigterm=True")
            found[notice] = seconds
        elif isinstance(notice, str | os.PathLike) and isinstance(path := os.fspath(notice), str):
            if path in signal.Signals.__members__:
                raise OptionError(f"grace_seconds: {path!r} is a string; pass signal.{path} for the signal")
            if not path or "\0" in path or Path(path).is_dir():
                raise OptionError(
                    f"grace_seconds: {path!r} is not a file path; pass the file that announces the job's end"
                )
            found[os.path.abspath(path)] = seconds  # noqa: PTH100 - no links are resolved
        else:
            raise OptionError(f"grace_seconds: {notice!r} is neither a signal nor the path of a file")
    return found


# -- signals -------------------------------------------------------------------------------------------------


class _Handler:
    """Signal handler that installs itself above the current handler.

    It takes no locks and only sets attributes, because it can interrupt the main thread anywhere. If another
    handler is installed above, the next instance goes above that one, to avoid cycles.
    """

    def __init__(self, number: int) -> None:
        self.pid = os.getpid()
        self._number = number
        # set before the handler, because the signal may come at once
        self._previous = signal.getsignal(number)
        signal.signal(number, self._on_signal)

    def is_in_place(self) -> bool:
        return self.pid == os.getpid() and signal.getsignal(self._number) == self._on_signal

    def take_away(self) -> bool:
        """Restore the previous handler; return False if another handler is on top or the previous one is not
        from Python.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not self.is_in_place() or self._previous is None:
            return False
        signal.signal(self._number, self._previous)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data loader's worker) inherits this handler, but must end by SIGTERM as without
        # it. Other signals are notices that schedulers may send to all processes; a child ignores them.
        listeners = tuple(_listeners[number])
        heard = self.pid == os.getpid() and bool(listeners)
        if heard:
            now = time.monotonic()
            for listener in listeners:
                listener.moments.setdefault(number, now)
        if callable(self._previous):
            self._previous(number, frame)
        elif not heard and number == signal.SIGTERM and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_listeners: defaultdict[int, set[Notices]] = defaultdict(set)
_installed: dict[int, _Handler] = {}


Reason = Literal["steps", "seconds", "first", "last", "call", "force", "stop"]
"""Reason to save a step: its interval, first or last step, no interval, or force."""

_LEAVE_SECONDS = 5.0
"""Time that `close` waits for ranks at the last step."""

_LEAVE_POLL_SECONDS = 0.002

_NOBODY = -1


Vote = Literal["stop", "time", "failed"]
"""A rank's wish: to stop (SIGTERM or `request_stop`), to save by the clock, to raise a save's failure."""

Votes = frozenset[Vote]
_VOTES: tuple[Vote, ...] = get_args(Vote)
_NONE: Votes = frozenset()

_SILENT: dict[str, int] = {
    **dict.fromkeys(_VOTES, 0),
    "latest": _NOBODY,
    "negative_earliest": -_NOBODY,
    "steps": _NOBODY,
    "restores": _NOBODY,
    "refuses": _NOBODY,
    "saves": 0,
}
"""State of a rank, reduced by maximum: votes; step; rank if at a step, restoring or refusing; whether it
saves.
"""


@dataclass(eq=False, kw_only=True)
class StepCoordinator:
    """Combine schedule, notices and votes of other ranks, once a step.

    With ``every_steps``, a step is due at a multiple, or if a multiple was passed since the last save. With
    ``every_seconds``, a step is due after the ranks agree that the time has passed. With both, the first
    applies; with neither, every step is due. ``save_first`` adds the first step of a new run.

    The object owns ``notices`` and ``channel`` (None for one rank). With ``exchanges``, ranks exchange votes
    at each ``agree_every_steps``-th step. Without, votes of one rank have no effect. Lost or late ranks raise
    CollectiveTimeoutError on the other ranks after ``timeout_seconds``.
    """

    notices: Notices
    channel: Channel | None
    every_steps: int | None
    every_seconds: float | None
    save_first: bool
    exchanges: bool
    agree_every_steps: int
    timeout_seconds: float
    stopping: bool = False

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise OptionError(f"every_steps must be at least 1, not {self.every_steps}")
        if self.channel is not None and self.agree_every_steps < 1:
            raise OptionError(f"agree_every_steps must be at least 1, not {self.agree_every_steps}")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise OptionError(f"every_seconds must be more than 0, not {self.every_seconds}")
        self._saves_each = self.every_steps is None and self.every_seconds is None
        self.exchanges = self.exchanges or self.channel is None
        self._ranks = Ranks(
            use_dist=self.channel is not None,
            channel=self.channel,
            timeout_seconds=self.timeout_seconds,
            operation="CheckpointManager.save",
        )
        if self._ranks.rank != 0:
            self.every_seconds = None  # rank 0's clock decides
        self._since_seconds = time.monotonic()
        self._step: int | None = None
        self._first: int | None = None
        self._saved: int | None = None
        self._skipped: int | None = None
        self._repeated: int | None = None
        self._time_is_up = False
        self._stop_wanted = False
        self._stop_saved = False
        self._calls = 0
        self._works: list[Any] = []
        """The last exchange, until its end."""
        self._cast = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._cast_step = 0
        self._kept = _NONE
        self._forgets_failure = False
        # An object dropped without close must not block SIGTERM.
        self._finalizer = weakref.finalize(self, _let_go, self.notices, self.channel, self._works)
        self._finalizer.atexit = False
        if self.channel is not None:
            atexit.register(self.channel.keep_for_ever)
        self.notices.listen()

    def begin(self, step: int, *, failed: bool, last: bool, force: bool) -> Votes:
        """Begin ``step`` and vote; return the agreed votes. ``failed`` votes for a failure on this rank.

        All ranks call it for the same steps; a repeated call has no effect. Raises CheckpointError if ranks
        are at different steps.
        """
        if step == self._step:
            return _NONE
        votes: list[Vote] = []
        if (self.notices.moments or self._stop_wanted) and not self.stopping:
            votes.append("stop")
        waited = time.monotonic() - self._since_seconds
        if self.every_seconds is not None and waited >= self.every_seconds:
            votes.append("time")
        if failed:
            votes.append("failed")
        wanted = agreed = frozenset(votes)  # a single rank needs no exchange
        if self.channel is not None:
            agreed, self._kept = self._read() if self.exchanges else _NONE, _NONE
            if self._forgets_failure:
                agreed, self._forgets_failure = agreed - {"failed"}, False
        self._first = step if self._first is None else self._first
        self._step, self._time_is_up = step, "time" in agreed
        self.stopping = self.stopping or "stop" in agreed
        if self.channel is not None and self.exchanges:
            if self._calls % self.agree_every_steps == 0:
                saves = "failed" not in agreed and self.reason(step, last=last, force=force) is not None
                cast: dict[str, int] = dict.fromkeys(wanted - agreed, 1)
                self._cast_step = step
                turn = {"latest": step, "negative_earliest": -step, "steps": self._ranks.rank}
                self._exchange(self.channel, {**cast, **turn, "saves": int(saves)})
            self._calls += 1
        return agreed

    def meet(self) -> None:
        """Wait for all ranks before a restore. Raises PlanError if other ranks save."""
        if self.channel is not None and self.exchanges:
            self._kept = self._read()
            self._exchange(self.channel, {"restores": self._ranks.rank})
            self._read()

    def forget_failure(self, step: int) -> None:
        """Withdraw the vote for a failure that was raised at ``step``, on all ranks."""
        self._forgets_failure = step == self._cast_step

    def refuse(self, error: Exception, *, saves: bool) -> bool:
        """Refuse the step of this rank by ``error``; return whether the other ranks begin a save.

        This rank takes part in the current step of the others. If they do not save, their next step raises
        CheckpointError with this rank. With ``saves``, the others save at any step.
        """
        if self.channel is None:
            return False
        agreed, saved, is_known = _NONE, None, False
        if self.exchanges:
            agreed = self._kept = self._read()
            is_known = self._calls % self.agree_every_steps == 0
            self._calls += 1
            if is_known:
                self._exchange(self.channel, {"refuses": self._ranks.rank})
                votes, turn = self._completed()
                self._kept = agreed | votes
                saved = turn["latest"] if turn["saves"] else None
        self.stopping = self.stopping or "stop" in agreed
        if self.stopping and not self._stop_saved and "failed" not in agreed:
            with suppress(CheckpointError, type(error)):  # the step at which the other ranks stop
                self._least([0.0], error)  # in the first exchange of their `seconds_left`
            return False
        if saved is not None:
            self._first = saved if self._first is None else self._first
            self._step = saved
            self.saved(saved, "call")
        return saved is not None or (not is_known and (saves or self._saves_each))

    # -- exchanges -------------------------------------------------------------------------------------------

    def _exchange(self, channel: Channel, state: dict[str, int]) -> None:
        """Begin the exchange of this rank's ``state``, which is waited for later."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._cast = torch.tensor([*(_SILENT | state).values()], dtype=torch.int64, device="cpu")
        self._works[:] = [channel.begun(channel.group.allreduce([self._cast], options), self._cast)]

    def _completed(self) -> tuple[Votes, dict[str, int]]:
        self._ranks.complete("agree", self._works[0])
        self._works.clear()
        turn = dict(zip(_SILENT, self._cast.tolist(), strict=True))
        return frozenset(vote for vote in _VOTES if turn[vote]), turn

    def _read(self) -> Votes:
        """Return the votes agreed in the last exchange, and the pending ones."""
        if not self._works:
            return self._kept
        votes, turn = self._completed()
        agreed = votes | self._kept
        if turn["refuses"] != _NOBODY:
            if turn["saves"]:  # the exchange fails and raises the reason
                return agreed
            raise CheckpointError(
                f"rank {turn['refuses']} rejected the arguments of its call: see the exception of that rank",
                rank=turn["refuses"],
            )
        if turn["restores"] != _NOBODY and turn["steps"] != _NOBODY:
            raise PlanError(
                f"ranks called different operations: rank {turn['steps']}: save() or should_save() of step "
                f"{turn['latest']}; rank {turn['restores']}: restore(). All ranks must call the same",
                ranks=[turn["restores"]],
                step=turn["latest"],
                saving=bool(turn["saves"]),
            )
        if turn["latest"] != -turn["negative_earliest"]:
            raise CheckpointError(
                f"the ranks do not call the manager for the same steps: rank {self._ranks.rank} did so for "
                f"{self._cast_step}, others for {-turn['negative_earliest']} to {turn['latest']}; every rank "
                "must call save() or should_save() for every step",
                step=self._cast_step,
                rank=self._ranks.rank,
            )
        return agreed

    def _least(self, values: Sequence[float], refusal: Exception | None = None) -> list[float]:
        """Return the minimum of each value over all ranks. A ``refusal`` is raised on the other ranks."""

        def packed() -> bytes:
            if refusal is not None:
                raise refusal
            return struct.pack(f"<{len(values)}d", *values)

        parts = self._ranks.all_gather("agree now", packed)
        return [*map(min, zip(*(struct.unpack(f"<{len(values)}d", part) for part in parts), strict=True))]

    def any_rank(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank."""
        return self._least([not value]) == [0.0]

    def seconds_left(self, wanted_seconds: float) -> tuple[float, float]:
        """Return the seconds until a deadline (infinity without) and the maximum of ``wanted_seconds``, over
        all ranks.
        """
        if not self.exchanges:
            return math.inf, wanted_seconds
        self.any_rank(False)  # all ranks count from the same time
        left, wanted = self._least([self.notices.seconds_left(), -wanted_seconds])
        return left, -wanted

    # -- steps -----------------------------------------------------------------------------------------------

    def reason(self, step: int, *, last: bool = False, force: bool = False) -> Reason | None:
        """Return the reason to save ``step``; None if it is not due or already saved."""
        is_new = step != self._saved
        if is_new and self.stopping and not self._stop_saved:  # read even if the save is forced
            return "stop"
        if last and (is_new or step == self._skipped):
            return "last"
        if force or not is_new:
            return "force" if force else None
        if self.save_first and step == self._first:
            return "first"
        if self._saves_each:
            return "call"
        if (every := self.every_steps) is not None:
            base = self._saved if self._saved is not None else self._first
            begins = base is None or base == self._first == step or step < base  # steps may restart
            if step > 0 and step % every == 0 if begins else step // every > (base or 0) // every:
                return "steps"
        return "seconds" if self._time_is_up and step == self._step else None

    def warn_if_repeated(self, step: int) -> None:
        """Log once a step that the step was already saved or restored."""
        if step == self._saved and step not in (self._skipped, self._repeated):
            self._repeated = step
            logger.warning(
                "save() was called again for step %d, which is already saved or restored: the call is "
                "ignored. Pass force=True to save the step again",
                step,
            )

    def saved(self, step: int, reason: Reason | None) -> None:
        """Record the save of ``step``; intervals count from here."""
        self._saved, self._skipped = step, None
        self._since_seconds, self._time_is_up = time.monotonic(), False
        self._stop_saved = self._stop_saved or reason == "stop"

    def skipped(self, step: int) -> None:
        """Record that ``step`` was skipped. It can still be saved as the last step."""
        self.saved(step, None)
        self._skipped = step

    def restored(self, step: int) -> None:
        """Continue from ``step``."""
        self.saved(step, None)
        self.save_first = False

    def request_stop(self) -> None:
        """Stop as if SIGTERM had come."""
        if not self.exchanges:
            raise CheckpointError(
                "request_stop() needs the ranks to agree at each step: create the manager with "
                "handle_sigterm=True"
            )
        self._stop_wanted = True

    def close(self, *, together: bool) -> None:
        """Leave the other ranks; ``together``: they leave too. Idempotent."""
        if self._finalizer.detach():
            _let_go(self.notices, self.channel, self._works, _LEAVE_SECONDS if together else 0.0)


def _let_go(
    notices: Notices, channel: Channel | None, works: Sequence[Any], wait_seconds: float = 0.0
) -> None:
    """Release group and channel, after a short wait for ``works``."""
    notices.close()
    if channel is None:
        return
    atexit.unregister(channel.keep_for_ever)
    deadline = time.monotonic() + wait_seconds
    while works and not works[0].is_completed() and time.monotonic() < deadline:
        time.sleep(_LEAVE_POLL_SECONDS)
    if works and not works[0].is_completed():
        channel.keep_for_ever()
