"""Processes to be killed: forked from a process with torch imported, so that each costs milliseconds.

A test runs a function `in_lab`: in a new process without threads, which may therefore fork. There `Child`
runs a function in a fork, and `run_groups` runs several gloo groups concurrently, because the survivors of a
killed rank wait seconds for its heartbeat.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.support.forking import forkserver_context
from tests.support.ranks import RankRaised, wait_for_all_ranks

T = TypeVar("T")

Act = Callable[[Path, Callable[[str, str], None]], Any]
"""An operation in a folder that calls an observer with (operation, name) before each step on storage."""

_PR_SET_PDEATHSIG = 1
"""A fork ends with the process of `in_lab`: a failed test leaves no processes behind."""


@dataclass(frozen=True)
class Ending:
    """The end of a process: a value, an exception, a kill (``signal`` not 0), or a hang.

    ``seconds``: duration of its function, if the function returned.
    """

    value: Any = None
    raised: RankRaised | None = None
    signal: int = 0
    hung: bool = False
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        """True if SIGKILL ended the process."""
        return self.signal == signal.SIGKILL


def raised_by(error: BaseException, seconds: float = 0.0) -> RankRaised:
    """Return an exception as picklable data."""
    facts = {k: v for k, v in getattr(error, "facts", {}).items() if isinstance(v, (int, str, bool, list))}
    facts["failed_ranks"] = list(getattr(error, "ranks", []))
    names = tuple(cls.__name__ for cls in type(error).__mro__)
    return RankRaised(type(error).__name__, str(error), names, facts, traceback.format_exc(), seconds)


class Child:
    """A fork of this process (which must have no threads) that runs ``function(*args)``."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._result = os.memfd_create("result")
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            torch.set_num_threads(1)  # torch recreates its thread pool, and fails if two threads do so
            try:
                begun = time.monotonic()
                outcome = _outcome(function, args)
                with open(self._result, "wb", closefd=False) as file:
                    pickle.dump((outcome, time.monotonic() - begun), file)
            finally:
                os._exit(0)
        self._watch = os.pidfd_open(self.pid)

    def wait(self, timeout_seconds: float = 240.0) -> Ending:
        """Wait for the end; kill a late process and report a hang."""
        ready, _, _ = select.select([self._watch], [], [], max(0.0, timeout_seconds))
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._watch)
        data = os.pread(self._result, os.fstat(self._result).st_size, 0)
        os.close(self._result)
        if not ready:
            return Ending(hung=True)
        if status != 0 or not data:
            return Ending(signal=-status)
        value, seconds = pickle.loads(data)
        if isinstance(value, RankRaised):
            return Ending(raised=value, seconds=seconds)
        return Ending(value=value, seconds=seconds)


def kill_at_each_step(before: Path, root: Path, act: Act, look: Callable[[Path, str, bool], T]) -> list[T]:
    """Kill ``act`` before its first step, its second, and so on until it completes; each run has a copy of
    ``before`` below ``root``.

    ``look(folder, operation, killed)`` returns a row for the remaining files; the operation of the last,
    complete run is ``"none"``. The steps are those of a run without a kill.
    """
    _copy(before, root / "recorded")
    recorded = Child(_steps_of, act, root / "recorded").wait()
    assert recorded.raised is None, recorded.raised.traceback_text
    looks = []
    for number, operation in enumerate([*recorded.value, "none"], start=1):
        folder = root / str(number)
        _copy(before, folder)
        ending = Child(act, folder, _kill_at(number)).wait()
        assert ending.raised is None, f"{operation}, step {number}:\n{ending.raised.traceback_text}"
        looks.append(look(folder, operation, ending.killed))
    return looks


def _steps_of(act: Act, folder: Path) -> list[str]:
    steps: list[str] = []
    act(folder, lambda operation, name: steps.append(operation))
    return steps


def _kill_at(step: int) -> Callable[[str, str], None]:
    counter = itertools.count(1)

    def observe(operation: str, name: str) -> None:
        if next(counter) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


_CHANGES = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")


def observe_calls(folder: Path, observe: Callable[[str, str], None]) -> None:
    """Call ``observe(call, name)`` before each system call of this process that creates, opens for writing,
    renames, or removes a path below ``folder``, until the process ends."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in _CHANGES) and not isinstance(args[0], int):
            path = Path(os.fsdecode(args[0])).absolute()
            if path.is_relative_to(folder):
                observe(event, path.name)

    sys.addaudithook(hook)


def _copy(before: Path, folder: Path) -> None:
    if before.exists():
        shutil.copytree(before, folder)


def wait_for_end(pid: int, timeout_seconds: float = 240.0) -> None:
    """Wait until a process has ended, reaped or not."""
    deadline = time.monotonic() + timeout_seconds
    while _is_alive(pid):
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} did not end within {timeout_seconds:g} s")
        time.sleep(0.005)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))  # the last thread closes the open files
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X") or threads > 1


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    gc.freeze()  # without it the first collection copies every page shared with the parent
    begun = time.monotonic()
    try:
        return function(*args)
    except BaseException as error:  # noqa: BLE001 - reported to the test
        return raised_by(error, time.monotonic() - begun)


def _laboratory(connection: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with connection:
        connection.send(_outcome(function, args))


def in_lab(function: Callable[..., Any], *args: Any, timeout_seconds: float = 600.0) -> Any:
    """Run ``function(*args)`` (a module-level function) in a new process without threads; return the
    result."""
    context = forkserver_context()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_laboratory, args=(sending, function, args))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout_seconds):
            raise AssertionError(f"{function.__name__} did not end within {timeout_seconds} s")
        value = receiving.recv()
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
        process.join(5)
    if isinstance(value, RankRaised):
        raise AssertionError(f"{function.__name__} raised:\n{value.traceback_text}")
    return value


@dataclass(frozen=True)
class Group:
    """A process group to run: ``function(rank, world_size, *args)`` on each of its ranks."""

    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_groups(
    groups: Sequence[Group], *, at_once: int = 8, timeout_seconds: float = 240.0
) -> list[list[Ending]]:
    """Return the endings by group and rank; at most ``at_once`` groups run concurrently."""
    endings: list[list[Ending]] = []
    for first in range(0, len(groups), at_once):
        with tempfile.TemporaryDirectory(prefix="dcp-groups-") as folder:
            running = []
            for number, group in enumerate(groups[first : first + at_once]):
                path = f"{folder}/{number}"
                running.append([Child(_member, rank, path, group) for rank in range(group.world_size)])
            deadline = time.monotonic() + timeout_seconds
            endings += [[child.wait(deadline - time.monotonic()) for child in ranks] for ranks in running]
    return endings


_rendezvous: list[Any] = []


def _member(rank: int, path: str, group: Group) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(group.world_size))
    store = dist.FileStore(path, group.world_size)
    store.set(f"pid/{rank}", str(os.getpid()))
    _rendezvous.append(store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=group.world_size, timeout=timedelta(seconds=240)
    )
    wait_for_all_ranks(store, rank, group.world_size)
    return group.function(rank, group.world_size, *group.args)


def kill_rank(rank: int) -> None:
    """Send SIGKILL to a rank of this process's group; returns after its end, with its connections closed."""
    pid = int(_rendezvous[0].get(f"pid/{rank}"))
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
