"""Tasks on a Dask cluster, each in a killable subprocess of its Dask worker.

A `distributed.Variable` holds a growing count and the names of tasks to kill: a task ends its subprocess if
the count stops or its name appears. Progress returns as events of a topic. Tasks therefore end soon after
the death of the ordering worker, and cancellation takes effect within two seconds.

Planning, publishing, and kinds that need the database run on the machine of the worker.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import distributed
import structlog

from dcp.server.core.jobs.executors.executor import OnDone, OnProgress, Order, ProcessOutcome, Running
from dcp.server.core.jobs.executors.subprocess_main import Setup, load_kinds
from dcp.server.core.jobs.executors.subprocesses import WarmProcessPool
from dcp.server.records.jobs import JobFailure

_BEAT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 2.0
_REMEMBER_SECONDS: Final = 300.0
_ANSWER_SECONDS: Final = 10
_CLOSE_SECONDS: Final = 5.0
_Variable: Final[Any] = distributed.Variable  # distributed has no type annotations
_log = structlog.get_logger(__name__)


class _Remote:
    """One order on the cluster."""

    def __init__(
        self, name: str, order: Order, wake: threading.Event, on_progress: OnProgress, on_done: OnDone
    ) -> None:
        self.name = name
        self.order = order
        self.on_progress = on_progress
        self.on_done = on_done
        self.future: Any = None
        self.has_begun = False
        self.is_killed = False
        self.is_told = False
        """True once the cluster knows that it is killed."""
        self._wake = wake

    def kill(self) -> None:
        """Kill the order; see `Running.kill`."""
        self.is_killed = True
        self._wake.set()


class DaskExecutor:
    """Runs tasks on the cluster with the scheduler ``address`` (HOST:PORT), other phases in local
    subprocesses.

    One thread talks to the cluster, so an unresponsive cluster blocks nothing else.
    """

    def __init__(self, setup: Setup, address: str) -> None:
        self._here = WarmProcessPool(setup)
        self._address = address
        self._lease_seconds = setup.settings.lease_seconds
        kinds = load_kinds(setup.kinds)
        self._stays = {name for name, kind in kinds.items() if kind.needs_database}
        travels = [kind for name, kind in kinds.items() if name not in self._stays]
        self._setup = pickle.dumps(Setup(setup.settings_for(*travels), setup.kinds))
        self._channel = f"dcp-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._client: Any = None
        self._remotes: dict[str, _Remote] = {}
        self._given_up: dict[str, float] = {}
        self._count = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> Running:
        """Start an order; see `Executor.start`."""
        if order.phase != "task" or order.kind in self._stays:
            return self._here.start(order, on_progress, on_done)
        if self._thread is None:
            self._here.warm()  # exists before the task, for its clean-up
        name = f"{self._channel}-{order.attempt_name}"
        remote = _Remote(name, order, self._wake, on_progress, on_done)
        with self._lock:
            self._remotes[name] = remote
            if self._thread is None:
                self._thread = threading.Thread(target=self._talk, name="dcp-dask", daemon=True)
                self._thread.start()
        self._wake.set()
        return remote

    def close(self) -> None:
        """Close the executor; see `Executor.close`."""
        for remote in list(self._remotes.values()):
            remote.kill()
        until = time.monotonic() + _CLOSE_SECONDS
        while self._remotes and time.monotonic() < until:
            time.sleep(0.02)
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._here.close()

    # -- the thread that talks to the cluster --

    def _talk(self) -> None:
        answered_seconds = time.monotonic()
        while not self._is_closing:
            try:
                self._connect()
                self._beat()
                self._submit()
                answered_seconds = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the cluster is away, whatever Dask calls it
                _log.warning("Dask cluster unreachable", address=self._address, error=repr(error))
                is_busy = time.monotonic() - answered_seconds < self._lease_seconds / 2
                self._lose(error, only_killed=is_busy)
            is_urgent = any(remote.is_killed for remote in list(self._remotes.values()))
            self._wake.wait(_LOOK_SECONDS / 2 if is_urgent else _BEAT_SECONDS)
            self._wake.clear()
        self._lose(None)
        self._disconnect()

    def _connect(self) -> None:
        if self._client is not None and self._client.status == "running":
            return
        if self._client is not None:
            self._disconnect()
            self._lose(None)  # orders of the previous connection
        if not self._remotes:
            return
        connect: Any = distributed.Client
        self._client = connect(
            f"tcp://{self._address}", set_as_default=False, timeout=_ANSWER_SECONDS, name="dcp-worker"
        )
        self._client.subscribe_topic(self._channel, self._hear)
        self._beat()  # must exist before the first task checks it

    def _disconnect(self) -> None:
        if self._client is not None:
            with suppress(Exception):  # abandoned in both cases
                self._client.close(timeout=1)
            self._client = None

    def _submit(self) -> None:
        for remote in list(self._remotes.values()):
            if remote.is_killed and not remote.has_begun:
                self._withdraw(remote)
            elif remote.future is None:
                remote.future = self._client.submit(
                    carry_out_there,
                    self._setup,
                    asdict(remote.order),
                    remote.name,
                    self._channel,
                    self._lease_seconds,
                    key=remote.name,
                    pure=False,
                )
                remote.future.add_done_callback(partial(self._done, remote))

    def _withdraw(self, remote: _Remote) -> None:
        """Cancel a task that is waiting or has begun silently. A later start finds its name among the killed
        ones."""
        if remote.future is None:
            self._end(remote, ProcessOutcome())
        elif remote.is_told:
            remote.has_begun = self._has_begun(remote)
            if not remote.has_begun:
                remote.future.cancel()
                self._end(remote, ProcessOutcome())

    def _has_begun(self, remote: _Remote) -> bool:
        ask = self._client.scheduler.call_stack
        try:
            return bool(self._client.sync(ask, keys=[remote.name], callback_timeout=_ASK_SECONDS))
        except KeyError:  # the scheduler does not know the task
            return False
        except TimeoutError:  # its worker does not respond
            return True

    def _beat(self) -> None:
        if self._client is None:
            return
        self._count += 1
        now = time.monotonic()
        with self._lock:
            self._given_up = {name: at for name, at in self._given_up.items() if now - at < _REMEMBER_SECONDS}
            killed = [remote for remote in self._remotes.values() if remote.is_killed]
            names = [*sorted(remote.name for remote in killed), *self._given_up]
        variable = _Variable(self._channel, client=self._client)
        variable.set({"count": self._count, "killed": names}, timeout=_ANSWER_SECONDS)
        for remote in killed:
            remote.is_told = True

    def _lose(self, error: BaseException | None, *, only_killed: bool = False) -> None:
        lost = replace(_away(error), is_environment=error is not None)
        for remote in list(self._remotes.values()):
            if remote.is_killed:
                self._end(remote, ProcessOutcome())
            elif not only_killed:
                self._end(remote, ProcessOutcome(error=lost))

    # -- what comes back --

    def _hear(self, event: tuple[float, Any]) -> None:
        _, message = event
        remote = self._remotes.get(message.get("name", "")) if isinstance(message, dict) else None
        if remote is not None:
            remote.has_begun = True
            if message.get("done_bytes") is not None:
                remote.on_progress(int(message["done_bytes"]))

    def _done(self, remote: _Remote, future: Any) -> None:
        """Handle the end of a task in Dask's single callback thread: it must neither block nor raise."""
        try:
            outcome = _outcome(future.result(timeout=_ANSWER_SECONDS))
        except (Exception, CancelledError) as error:  # noqa: BLE001 - whatever was raised there, or by Dask
            failure = None if future.status == "cancelled" else error
            self._end(remote, ProcessOutcome() if remote.is_killed else ProcessOutcome(error=_away(failure)))
        else:
            self._end(remote, outcome, is_finished=True)

    def _end(self, remote: _Remote, outcome: ProcessOutcome, *, is_finished: bool = False) -> None:
        with self._lock:
            if self._remotes.pop(remote.name, None) is None:
                return
            # a running task will notice the end of the count
            if remote.future is not None and not is_finished:
                self._given_up[remote.name] = time.monotonic()
        remote.on_done(outcome)


def _away(error: BaseException | None) -> JobFailure:
    detail = "the Dask cluster lost the task" if error is None else f"Dask: {type(error).__name__}"
    return JobFailure(type="DaskError", detail=detail)


def _outcome(document: Mapping[str, Any]) -> ProcessOutcome:
    error = document["error"]
    return ProcessOutcome(result=document["result"], error=None if error is None else JobFailure(**error))


# -- on the cluster ------------------------------------------------------------------------------------------

_nurseries: dict[bytes, WarmProcessPool] = {}
_nurseries_lock = threading.Lock()


def _pool(setup: bytes) -> WarmProcessPool:
    """Return the pool of a setup, kept for the lifetime of this process."""
    with _nurseries_lock:
        if setup not in _nurseries:
            _nurseries[setup] = WarmProcessPool(pickle.loads(setup))
        return _nurseries[setup]


def carry_out_there(
    setup: bytes, document: Mapping[str, Any], name: str, channel: str, lease_seconds: float
) -> dict[str, Any]:
    """Run one order in a subprocess on a Dask worker, and return its outcome as plain data."""
    worker: Any = distributed.get_worker()
    ended = threading.Event()
    outcomes: list[ProcessOutcome] = []

    def on_progress(done_bytes: int) -> None:
        worker.log_event(channel, {"name": name, "done_bytes": done_bytes})

    def on_done(outcome: ProcessOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    is_wanted = _StillWanted(_Variable(channel), name, lease_seconds)
    if not is_wanted():
        return asdict(ProcessOutcome())
    worker.log_event(channel, {"name": name, "done_bytes": None})
    pool = _pool(setup)
    child = pool.start(Order(**document), on_progress, on_done)
    while not ended.wait(_LOOK_SECONDS):
        if not is_wanted():
            pool.kill(child)
    return asdict(outcomes[0])


class _StillWanted:
    """Check that the ordering worker is alive and still wants the task."""

    def __init__(self, variable: Any, name: str, lease_seconds: float) -> None:
        self._get: Callable[..., Any] = variable.get
        self._name = name
        self._lease_seconds = lease_seconds
        self._count = -1
        self._heard_seconds = time.monotonic()

    def __call__(self) -> bool:
        try:
            state = self._get(timeout=_ANSWER_SECONDS)
        except Exception:  # noqa: BLE001 - no answer is no beat, whatever Dask calls it
            state = {"count": self._count, "killed": ()}
        now = time.monotonic()
        if state["count"] != self._count:
            self._count = state["count"]
            self._heard_seconds = now
        return self._name not in state["killed"] and now - self._heard_seconds < self._lease_seconds
