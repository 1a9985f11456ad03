"""Tasks on a Dask cluster: each Dask worker has them done by a killable subprocess of its own machine.

What Dask does not have is done with two of its means. Who gives the orders keeps a `distributed.Variable`
with a count that goes on and the names of what is to be killed: a task whose count stands still, or whose
name is there, ends its subprocess. Progress comes back as events of a topic. So nothing goes on for long when
the worker that ordered it dies, and cancelling takes effect as quickly as on one machine.

Planning, publishing, and kinds that need the database stay on the machine of the worker.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import distributed
import structlog

from dcp.server.jobs.executors import OnDone, OnProgress, ProcessExecutor, Running
from dcp.server.jobs.states import JobError
from dcp.server.jobs.subprocess_main import Setup, load_kinds
from dcp.server.jobs.subprocess_messages import Order
from dcp.server.jobs.subprocesses import Nursery, Outcome

__all__ = ["DaskExecutor", "carry_out_there"]

_BEAT_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.5
_CONNECT_SECONDS: Final = 10
_CLOSE_SECONDS: Final = 5.0
_Variable: Final[Any] = distributed.Variable  # which has no types
_log = structlog.get_logger(__name__)


class _Remote:
    """One order on the cluster; ``on_done`` is called once, whatever happens first."""

    def __init__(self, executor: DaskExecutor, name: str, on_progress: OnProgress, on_done: OnDone) -> None:
        self.executor = executor
        self.name = name
        self.on_progress = on_progress
        self.future: Any = None
        self.has_begun = False
        self.is_killed = False
        self._on_done = on_done
        self._lock = threading.Lock()
        self.is_over = False

    def kill(self) -> None:
        """As `Running.kill`."""
        self.executor.kill(self)

    def end(self, outcome: Outcome) -> None:
        """It has ended so, unless it has ended already."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        self._on_done(outcome)


class DaskExecutor:
    """Tasks on the cluster whose scheduler is at ``address`` (HOST:PORT); the rest in subprocesses here."""

    def __init__(self, setup: Setup, address: str) -> None:
        self._here = ProcessExecutor(setup)
        self._address = address
        self._lease_seconds = setup.settings.lease_seconds
        self._setup = pickle.dumps(Setup(setup.without_database, setup.kinds))
        self._stays = {name for name, kind in load_kinds(setup.kinds).items() if kind.needs_database}
        self._channel = f"dcp-{uuid.uuid4().hex}"
        self._lock = threading.RLock()
        self._client: Any = None
        self._remotes: dict[str, _Remote] = {}
        self._count = 0
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> Running:
        """As `Executor.start`."""
        if order.phase != "task" or order.kind in self._stays:
            return self._here.start(order, on_progress, on_done)
        remote = _Remote(self, f"{self._channel}-{order.attempt_name}", on_progress, on_done)
        try:
            with self._lock:
                client = self._connected()
                self._remotes[remote.name] = remote
            remote.future = client.submit(
                carry_out_there,
                self._setup,
                order.document(),
                remote.name,
                self._channel,
                self._lease_seconds,
                key=remote.name,
                pure=False,
            )
            remote.future.add_done_callback(lambda future: self._done(remote, future))
        except Exception as error:  # noqa: BLE001 - a cluster that is away fails the attempt, whatever Dask calls it
            self._end(remote, Outcome(error=_away(error)))
        return remote

    def kill(self, remote: _Remote) -> None:
        """End one order."""
        remote.is_killed = True
        try:
            self._beat()
            if not remote.has_begun and remote.future is not None:
                remote.future.cancel()  # it waits for its turn; if it has just begun, it finds its name
        except Exception as error:  # noqa: BLE001 - without the cluster it ends for want of a beat
            self._end(remote, Outcome(error=_away(error)))

    def close(self) -> None:
        """As `Executor.close`."""
        with self._lock:
            remotes = list(self._remotes.values())
        for remote in remotes:
            self.kill(remote)
        until = time.monotonic() + _CLOSE_SECONDS
        while self._remotes and time.monotonic() < until:
            time.sleep(0.02)
        for remote in remotes:
            self._end(remote, Outcome())
        self._closing.set()
        if self._beats is not None:
            self._beats.join()
        if self._client is not None:
            self._client.close()
        self._here.close()

    # -- the connection --

    def _connected(self) -> Any:
        if self._client is None or self._client.status != "running":
            if self._client is not None:
                self._client.close(timeout=1)
            connect: Any = distributed.Client
            self._client = connect(
                f"tcp://{self._address}", set_as_default=False, timeout=_CONNECT_SECONDS, name="dcp-worker"
            )
            self._client.subscribe_topic(self._channel, self._hear)
            self._beat()
            if self._beats is None:
                self._beats = threading.Thread(target=self._keep_beating, name="dcp-dask", daemon=True)
                self._beats.start()
        return self._client

    def _beat(self) -> None:
        with self._lock:
            self._count += 1
            killed = sorted(name for name, remote in self._remotes.items() if remote.is_killed)
            variable = _Variable(self._channel, client=self._client)
            variable.set({"count": self._count, "killed": killed}, timeout=_CONNECT_SECONDS)

    def _keep_beating(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS):
            try:
                if self._client.status == "running":
                    self._beat()
                    continue
                error: Exception | None = None
            except Exception as failure:  # noqa: BLE001 - the scheduler is away, whatever Dask calls it
                error = failure
            _log.warning("Dask is away", address=self._address, error=repr(error))
            if self._client.status != "running":
                for remote in list(self._remotes.values()):
                    self._end(remote, Outcome(error=_away(error)))

    # -- what comes back --

    def _hear(self, event: tuple[float, Any]) -> None:
        _, message = event
        remote = self._remotes.get(message.get("name", "")) if isinstance(message, dict) else None
        if remote is not None:
            remote.has_begun = True
            if message.get("done_bytes") is not None:
                remote.on_progress(int(message["done_bytes"]))

    def _done(self, remote: _Remote, future: Any) -> None:
        if remote.is_killed and future.status != "finished":
            self._end(remote, Outcome())
        elif future.status == "finished":
            self._end(remote, _outcome(future.result()))
        else:
            self._end(
                remote, Outcome(error=_away(None if future.status == "cancelled" else future.exception()))
            )

    def _end(self, remote: _Remote, outcome: Outcome) -> None:
        with self._lock:
            self._remotes.pop(remote.name, None)
        remote.end(outcome)


def _away(error: BaseException | None) -> JobError:
    detail = "the Dask cluster lost it" if error is None else f"the Dask cluster: {type(error).__name__}"
    return JobError(type="DaskError", detail=detail)


def _outcome(document: Mapping[str, Any]) -> Outcome:
    error = document["error"]
    return Outcome(result=document["result"], error=None if error is None else JobError(**error))


# -- on the cluster ------------------------------------------------------------------------------------------

_nurseries: dict[bytes, Nursery] = {}
_nurseries_lock = threading.Lock()


def _nursery(setup: bytes) -> Nursery:
    """One for each setup, for as long as this process lives."""
    with _nurseries_lock:
        if setup not in _nurseries:
            _nurseries[setup] = Nursery(pickle.loads(setup))
        return _nurseries[setup]


def carry_out_there(
    setup: bytes, document: Mapping[str, Any], name: str, channel: str, lease_seconds: float
) -> dict[str, Any]:
    """Run on a Dask worker: one order in a subprocess of its own; the outcome as plain data."""
    worker: Any = distributed.get_worker()
    ended = threading.Event()
    outcomes: list[Outcome] = []

    def on_progress(done_bytes: int) -> None:
        worker.log_event(channel, {"name": name, "done_bytes": done_bytes})

    def on_done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        ended.set()

    is_wanted = _Wanted(_Variable(channel), name, lease_seconds)
    if not is_wanted():
        return {"result": None, "error": None}
    worker.log_event(channel, {"name": name, "done_bytes": None})
    nursery = _nursery(setup)
    child = nursery.start(Order.from_document(document), on_progress, on_done)
    while not ended.wait(_LOOK_SECONDS):
        if not is_wanted():
            nursery.kill(child)
    error = outcomes[0].error
    return {"result": outcomes[0].result, "error": None if error is None else error.document()}


class _Wanted:
    """Whether what gave the order is alive and still wants it."""

    def __init__(self, variable: Any, name: str, lease_seconds: float) -> None:
        self._get: Callable[..., Any] = variable.get
        self._name = name
        self._lease_seconds = lease_seconds
        self._count = -1
        self._heard_seconds = time.monotonic()

    def __call__(self) -> bool:
        try:
            state = self._get(timeout=_CONNECT_SECONDS)
        except Exception:  # noqa: BLE001 - no answer is no beat, whatever Dask calls it
            state = {"count": self._count, "killed": ()}
        now = time.monotonic()
        if state["count"] != self._count:
            self._count = state["count"]
            self._heard_seconds = now
        return self._name not in state["killed"] and now - self._heard_seconds < self._lease_seconds
