"""Decisions at each step of the loop, alike on all ranks: whether to save, and whether to stop.

They are agreed on without waiting for the stragglers of that step. A SIGTERM reaches one rank, clocks differ,
and background saves end earlier on one rank than on another: a rank that acted on what it alone sees would
leave the others in a collective. So each rank casts votes at each step in one small all-reduce, begun there
and read at the next: by then every rank has cast its own, and all of them read the same at the same step.
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
"""Seconds that are left after a SIGTERM; or after each of several signals, and files that appear."""

_LOOK_SECONDS = 0.25
_SHORTEST_SECONDS = 0.02
_LARGEST_RESERVE_SECONDS = 5.0


class Notices:
    """Notices that the run is to stop, by SIGTERM if that is to be handled, and by what has a ``grace``.

    Raises OptionError for what is no notice, or no time.

    Files are looked for by a thread, and a deadline is seen to by it, once `see_to_it` has begun it. Time is
    that of `time.monotonic`, so that no clock that is set has a part in it. All notices of a process share
    one handler a signal, which is installed with the first and taken away with the last, and calls the Python
    handler that was there before.
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
                logger.warning("%s is there already: it is no notice until it appears anew", path)

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
                    _listeners.clear()  # a fork: those who listened are in the parent
                _installed[number] = _Handler(number)
            _listeners[number].add(self)

    def seconds_left(self) -> float:
        """Return the time until saves have to be called off, at the earliest by all that has come; infinite
        if nothing has that has a deadline."""
        end = math.inf
        for notice, moment in tuple(self.moments.items()):
            grace = self._grace[notice]
            if grace is not None:
                # saves that are called off have to remove their files in the time that is kept
                end = min(end, moment + grace - min(_LARGEST_RESERVE_SECONDS, grace / 10))
        return end - time.monotonic()

    def see_to_it(self, call_off: Callable[[], None]) -> None:
        """Look for files from now on, and call ``call_off`` again and again once a deadline has come, if one
        may come."""
        if any(grace is not None for grace in self._grace.values()):
            threading.Thread(target=self._look, args=(call_off,), name="dcp-notices", daemon=True).start()

    def close(self) -> None:
        """Notice nothing any more; idempotent. The last to leave puts former handlers back."""
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
                    logger.warning("the notice %s has appeared", path)
                self._there[path] = identity
            if self.seconds_left() <= 0:
                call_off()


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return the identity of the file or folder that is there; None if none is, or it cannot be read."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_size, found.st_mtime_ns  # inode numbers change on some FUSE mounts


def _grace_of(grace: Grace | None, *, handle_sigterm: bool) -> dict[int | str, float | None]:
    """Return the seconds of grace of each signal and file; of a signal None means that it is not known."""
    given: Mapping[Any, float]
    given = grace if isinstance(grace, Mapping) else {} if grace is None else {signal.SIGTERM: grace}
    found: dict[int | str, float | None] = {signal.SIGTERM: None} if handle_sigterm else {}
    for notice, seconds in given.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise OptionError(f"grace_seconds must be a number above 0, not {seconds!r}")
        if isinstance(notice, int):
            if notice not in [*signal.Signals] or notice in (signal.SIGKILL, signal.SIGSTOP):
                raise OptionError(f"grace_seconds: {notice!r} is no signal that can be noticed")
            if notice == signal.SIGTERM and not handle_sigterm:
                raise OptionError("grace_seconds of SIGTERM means nothing with handle_sigterm=False")
            found[notice] = seconds
        elif isinstance(notice, str | os.PathLike) and isinstance(path := os.fspath(notice), str):
            if path in signal.Signals.__members__:
                raise OptionError(f"grace_seconds: {path!r} is text; a signal is signal.{path}")
            if not path or "\0" in path or Path(path).is_dir():
                raise OptionError(
                    f"grace_seconds: {path!r} is no path of a file; name the file that will appear"
                )
            found[os.path.abspath(path)] = seconds  # noqa: PTH100 - no links are resolved
        else:
            raise OptionError(f"grace_seconds: {notice!r} is neither a signal nor the path of a file")
    return found


# -- signals -------------------------------------------------------------------------------------------------


class _Handler:
    """Installs itself, over the handler that is there.

    It runs between two instructions of the main thread, which may hold any lock: so it takes none, and sets
    plain attributes. If another handler has come on top, the next one is another instance above that,
    so that handlers which call each other do not run in a circle.
    """

    def __init__(self, number: int) -> None:
        self.pid = os.getpid()
        self._number = number
        self._previous = signal.getsignal(number)  # before: the signal may come at once
        signal.signal(number, self._on_signal)

    def is_in_place(self) -> bool:
        return self.pid == os.getpid() and signal.getsignal(self._number) == self._on_signal

    def take_away(self) -> bool:
        """Put the previous handler back, unless another has come on top, which may call this one, or that was
        not installed from Python, so that Python cannot put it back."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not self.is_in_place() or self._previous is None:
            return False
        signal.signal(self._number, self._previous)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data loader's worker) has this handler too, but must end by SIGTERM as if it had
        # not. Other signals are notices that schedulers may send to all processes, and no reason to end.
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
"""Why a step is saved: its interval, its place in the run, no interval at all (every call saves), or because
it was asked for."""

_LEAVE_SECONDS = 5.0
"""Time that `close` waits for the ranks that have not come to the last step yet."""

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
"""State of a rank, of which all see the maxima: its votes; its step; its rank where it is at a step, where it
restores, or where it refuses what it was called with; whether it saves the step."""


@dataclass(eq=False, kw_only=True)
class StepCoordinator:
    """Brings together, once a step, which steps are due, the notices and the other ranks' wishes.

    With ``every_steps`` a step is due when it is a multiple of it, or when a multiple was passed since the
    last save (a loop need not ask at each step). With ``every_seconds`` a step is due when the ranks agreed
    that so much time has passed since the last save. Both: whichever comes first. Neither: every step that is
    asked for. ``save_first``: the first step of a run that was not restored, too.

    ``notices`` and ``channel`` (None for one rank) belong to this object. With ``exchanges`` the ranks
    exchange their wishes at each step, or at each ``agree_every_steps``-th; without it the clock and signals
    of one rank mean nothing. Votes cast at one step are agreed at the next, and not cast again by a rank that
    has just seen them granted. Waits are bounded by ``timeout_seconds``; ranks that are dead or late raise
    CollectiveTimeoutError, which names them, on all others.
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
            self.every_seconds = None  # by one rank's clock for all
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
        """The exchange that was begun last, until it has ended."""
        self._cast = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._cast_step = 0
        self._kept = _NONE
        self._forgets_failure = False
        # One that is dropped unclosed must not keep SIGTERM from ending the process.
        self._finalizer = weakref.finalize(self, _let_go, self.notices, self.channel, self._works)
        self._finalizer.atexit = False
        if self.channel is not None:
            atexit.register(self.channel.keep_for_ever)
        self.notices.listen()

    def begin(self, step: int, *, failed: bool, last: bool, force: bool) -> Votes:
        """Begin ``step``, and tell the others if something ``failed`` here; returns what was agreed.

        All ranks call it for the same steps; for one that has begun it does nothing. ``last`` and ``force``
        as for `CheckpointManager.save`. Raises CheckpointError where ranks were at different steps.
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
        wanted = agreed = frozenset(votes)  # one rank agrees with itself at once
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
        """Return when all ranks have come to restore. Raises PlanError where some save instead, with ``step``
        and whether it is being saved (``saving``) among its facts."""
        if self.channel is not None and self.exchanges:
            self._kept = self._read()
            self._exchange(self.channel, {"restores": self._ranks.rank})
            self._read()

    def forget_failure(self, step: int) -> None:
        """Take back the vote for a failure that was raised at ``step`` itself, on all ranks."""
        self._forgets_failure = step == self._cast_step

    def refuse(self, error: Exception, *, saves: bool) -> bool:
        """Refuse the step that this rank was called with, by ``error``; tell whether the others begin a save,
        which then counts here, too. ``saves``: whether they do whatever the step is.

        This rank takes part in the step that the others are at. If they save none, they raise CheckpointError
        at their next one, which names this rank.
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
            with suppress(CheckpointError, type(error)):  # the next step is the stop's
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
        """Return what the last exchange has agreed, and what was kept of those before."""
        if not self._works:
            return self._kept
        votes, turn = self._completed()
        agreed = votes | self._kept
        if turn["refuses"] != _NOBODY:
            if turn["saves"]:  # which fails, and tells why
                return agreed
            raise CheckpointError(
                f"rank {turn['refuses']} refused what the manager was called with there: its exception says "
                "why",
                rank=turn["refuses"],
            )
        if turn["restores"] != _NOBODY and turn["steps"] != _NOBODY:
            raise PlanError(
                f"the ranks are not about the same: rank {turn['steps']}: save() or should_save() of step "
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
        """Return the least of each of the ``values`` on any rank, now: waits for all of them. A ``refusal``
        is raised on the others in its place."""

        def packed() -> bytes:
            if refusal is not None:
                raise refusal
            return struct.pack(f"<{len(values)}d", *values)

        parts = self._ranks.all_gather("agree now", packed)
        return [*map(min, zip(*(struct.unpack(f"<{len(values)}d", part) for part in parts), strict=True))]

    def any_rank(self, value: bool) -> bool:
        """Tell whether ``value`` is true on any rank, now: waits for all of them."""
        return self._least([not value]) == [0.0]

    def seconds_left(self, wanted_seconds: float) -> tuple[float, float]:
        """Return the time until a deadline, infinite without one, and the most that a rank wants: the same
        on all ranks, for whom it waits."""
        if not self.exchanges:
            return math.inf, wanted_seconds
        self.any_rank(False)  # who comes late must not find that the others counted from earlier
        left, wanted = self._least([self.notices.seconds_left(), -wanted_seconds])
        return left, -wanted

    # -- steps -----------------------------------------------------------------------------------------------

    def reason(self, step: int, *, last: bool = False, force: bool = False) -> Reason | None:
        """Return why ``step``, which was begun, has to be saved; None if it has not, or was already."""
        is_new = step != self._saved
        if is_new and self.stopping and not self._stop_saved:  # waited for, forced or not
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
            begins = base is None or base == self._first == step or step < base  # steps may begin anew
            if step > 0 and step % every == 0 if begins else step // every > (base or 0) // every:
                return "steps"
        return "seconds" if self._time_is_up and step == self._step else None

    def warn_if_repeated(self, step: int) -> None:
        """Log, once a step, that it was saved or restored, and not left out on purpose."""
        if step == self._saved and step not in (self._skipped, self._repeated):
            self._repeated = step
            logger.warning(
                "save() was called again for step %d, which is saved or was restored already: nothing is "
                "done. Pass force=True to save it anew",
                step,
            )

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
        self.save_first = False

    def request_stop(self) -> None:
        """Stop as if SIGTERM had come."""
        if not self.exchanges:
            raise CheckpointError(
                "request_stop() needs the ranks to agree at each step: make the manager with "
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
    """Give back both; wait for the last of ``works`` to end, if it does so soon."""
    notices.close()
    if channel is None:
        return
    atexit.unregister(channel.keep_for_ever)
    deadline = time.monotonic() + wait_seconds
    while works and not works[0].is_completed() and time.monotonic() < deadline:
        time.sleep(_LEAVE_POLL_SECONDS)
    if works and not works[0].is_completed():
        channel.keep_for_ever()
