"""Worker: claims work, executes it, and reports outcomes to the ledger.

One thread accesses the ledger. Phases and tasks run elsewhere (`dcp.server.core.jobs.executors`), and their
ends arrive in a queue. Running work survives an unreachable database: results are kept until it returns, or
until the lease ends.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import structlog
from sqlalchemy import Connection

from dcp.server.core.allowances import Allowances, check_room, subjects_of
from dcp.server.core.jobs.executors.executor import Executor, Order, ProcessOutcome, Running
from dcp.server.core.jobs.executors.subprocess_main import Setup, error_of, load_kinds
from dcp.server.core.jobs.executors.subprocesses import WarmProcessPool
from dcp.server.core.jobs.kind import Kind
from dcp.server.core.jobs.ledger.claims import ClaimLimits, claim, has_work, renew, stopped
from dcp.server.core.jobs.ledger.failures import DEFAULT_BACKOFF, expire_leases, fail, has_expired
from dcp.server.core.jobs.ledger.reading import (
    NOTE_SECONDS,
    note_offer,
    other_roots,
    payload_of,
    plan_of,
    task_documents,
    task_results,
    withdraw_offer,
)
from dcp.server.core.jobs.ledger.rows import Backoff, Claim, Held, Json, StaleFenceError, TaskSpec, is_large
from dcp.server.core.jobs.ledger.transitions import (
    add_tasks,
    complete_discard,
    complete_plan,
    complete_publish,
    complete_task,
    release,
)
from dcp.server.core.jobs.schedules import PeriodicWork, Scheduler
from dcp.server.core.problems import ForbiddenError
from dcp.server.core.security.accounts import NO_ROLES, RoleSettings
from dcp.server.core.security.callers import Callers
from dcp.server.core.security.principal import account_of
from dcp.server.core.settings import Settings
from dcp.server.database import migrations
from dcp.server.database.documents import prepare_document
from dcp.server.database.engine import Database, DatabaseUnavailableError, Encoded, encode_json
from dcp.server.records.jobs import Job, JobFailure

DEFAULT_KINDS: Final = "dcp.server.features:kinds"
_KILL_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.5
_MOST_PAUSE_SECONDS: Final = 0.1
# tasks of a plan in one transaction, which takes hundredths of a second
_TRANSACTION_CHARACTERS: Final = 1 << 17
_PROGRESS_SECONDS: Final = 1.0
_SWEEP_SECONDS: Final = 2.0
_TABLES_SECONDS: Final = 2.0
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    """Claimed work until the ledger knows the outcome."""

    claim: Claim
    renewed_seconds: float  # monotonic clock
    running: Running | None = None
    done_bytes: int | None = None
    is_told: bool = True  # True if the ledger knows `done_bytes`
    outcome: ProcessOutcome | None = None
    results: Sequence[Json] = ()  # results of the tasks, for publishing
    document: int | None = None  # document of a large result
    plan_data: str = ""  # JSON
    added: int = 0  # tasks of the plan already written


class Worker:
    """Runs jobs of the ledger until stopped; any number of workers may share a database.

    ``schedules`` is periodic work besides jobs. A given ``executor`` is shared and not closed; the default
    is the executor of the settings. ``allowances`` hold back jobs of accounts, keys and roots at their
    limits. ``roles`` are the rights of submitters by settings.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        schedules: Sequence[PeriodicWork],
        kinds: str = DEFAULT_KINDS,
        backoff: Backoff = DEFAULT_BACKOFF,
        clock: Callable[[], float] = time.time,
        executor: Executor | None = None,
        allowances: Allowances | None = None,
        roles: RoleSettings = NO_ROLES,
    ) -> None:
        self.owner = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._settings = settings
        self._kinds = load_kinds(kinds)
        self._limits = ClaimLimits(
            by_kind=dict(settings.kind_concurrency),
            only=frozenset(self._kinds),
            allowances=allowances,
            writers=frozenset(name for name, kind in self._kinds.items() if kind.scope == "convert"),
        )
        self._own_kinds = frozenset(name for name, kind in self._kinds.items() if kind.has_own_slot)
        self._backoff = backoff
        self._clock = clock
        self._database = Database(
            settings.database_url.get_secret_value(), pool_size=settings.database_pool_size
        )
        self._callers = Callers(self._database, clock, roles)
        self._executor = open_executor(settings, kinds) if executor is None else executor
        self._owns_executor = executor is None
        self._scheduler = Scheduler(
            settings,
            self._database,
            schedules,
            self.owner,
            clock,
        )
        self._entries: dict[Held, _Entry] = {}
        self._ended: queue.SimpleQueue[tuple[Held, ProcessOutcome]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._problem: str | None = None
        self._failing: dict[tuple[str, str | None], JobFailure] = {}  # already logged, by kind and root
        self._next_note = 0.0
        self._next_sweep = 0.0
        self._next_renewal = 0.0
        self._next_progress = 0.0

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set, from the time when the database has all tables.

        Running work may finish for a while, and is then released.
        """
        _log.info("worker started", owner=self.owner, executor=self._settings.executor)
        threading.Thread(target=self._wake_at, args=(stop,), name="dcp-worker-stop", daemon=True).start()
        try:
            while not stop.is_set() and not self._has_tables():
                self._wake.wait(_TABLES_SECONDS)
            if stop.is_set():
                return
            while not stop.is_set():
                self._step(
                    self._note_offer, self._expire, self._scheduler.tick, self._look, self._settle, self._fill
                )
                self._wait()
            self._drain()
            self._step(self._withdraw_offer)
        finally:
            self._scheduler.close()
            if self._owns_executor:
                self._executor.close()
            self._database.close()
            _log.info("worker stopped", owner=self.owner)

    def _step(self, *parts: Callable[[], None]) -> None:
        problem = None
        for part in parts:
            try:
                part()
            except DatabaseUnavailableError as error:
                problem = str(error)
            except Exception:  # noqa: BLE001 - whatever it is, the worker continues and its leases are kept
                _log.exception("worker failed in a step", part=part.__name__)
        self._note_problem(problem)

    def _has_tables(self) -> bool:
        """Return True if the database has the tables of this version, which an operator may create later."""
        problem = None
        try:
            if migrations.is_pending(self._database):
                problem = "the database lacks the tables of this version: back it up and run dcp db upgrade"
        except (DatabaseUnavailableError, migrations.UnknownRevisionError) as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker waits, as in its steps
            problem = f"the tables cannot be checked: {type(error).__name__}: {error}"
        self._note_problem(problem)
        return problem is None

    def _note_problem(self, problem: str | None) -> None:
        """Log a change of the database's state once, not with every step."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("database unavailable" if problem else "database available", error=problem)

    def _wake_at(self, stop: threading.Event) -> None:
        # Polled, because a signal handler that interrupts `clear` would deadlock on its lock.
        stop.wait()
        self._wake.set()

    def _wait(self) -> None:
        # Check running work more often: cancellation takes effect within two seconds.
        seconds = self._settings.poll_seconds
        self._wake.wait(min(seconds, _LOOK_SECONDS) if self._entries else seconds)
        self._wake.clear()

    def _drain(self) -> None:
        """Let running work finish for half of the available time, then stop and release it."""
        self._finish(self._settings.shutdown_seconds / 2)
        for entry in self._entries.values():
            self._kill(entry, "the worker stops")
        self._finish(_KILL_SECONDS)

    def _finish(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._entries and time.monotonic() < until:
            self._step(self._look, self._settle)
            if self._entries:
                self._wake.wait(min(0.1, self._settings.poll_seconds))
                self._wake.clear()

    # -- claims --

    def _fill(self) -> None:
        """Claim and start work up to the capacity."""
        while (limits := self._room()) is not None:
            now = self._clock()
            with self._database.read() as connection:
                if not has_work(connection, now, limits):
                    return
            begun = time.monotonic()  # before the lease begins, so that this worker's deadline comes first
            made = self._database.transact(partial(self._claim, limits=limits))
            if made is None:
                return
            self._entries[made.held] = _Entry(made, begun)
            try:
                self._start(made)
            except DatabaseUnavailableError:
                self._ended.put((made.held, ProcessOutcome()))
                raise
            except Exception as error:  # noqa: BLE001 - reported to the ledger
                _log.warning("job cannot be started", job=made.job.id, phase=made.phase, error=str(error))
                self._ended.put((made.held, ProcessOutcome(error=error_of(error))))

    def _room(self) -> ClaimLimits | None:
        """Return the limits for new work; None without capacity."""
        in_own_slot = any(entry.claim.job.kind in self._own_kinds for entry in self._entries.values())
        if len(self._entries) - in_own_slot < self._settings.concurrency:
            return self._limits
        if in_own_slot or not self._own_kinds:
            return None
        return replace(self._limits, only=self._own_kinds)

    def _claim(self, connection: Connection, limits: ClaimLimits) -> Claim | None:
        return claim(connection, self.owner, self._clock(), self._settings.lease_seconds, limits)

    def _start(self, made: Claim) -> None:
        held = made.held
        plan = None
        if made.phase in ("publish", "discard"):
            with self._database.read() as connection:
                plan = plan_of(connection, made.job.id)
        is_clean = plan is None and not self._kinds[made.job.kind].leaves_plans
        if made.phase == "discard" and is_clean:
            self._ended.put((held, ProcessOutcome(result={})))
            return
        order = self._order(made, plan or {})
        entry = self._entries[held]
        entry.results = order.results

        def on_progress(done_bytes: int) -> None:
            entry.done_bytes, entry.is_told = done_bytes, False

        def on_done(outcome: ProcessOutcome) -> None:
            self._ended.put((held, outcome))
            self._wake.set()

        entry.running = self._executor.start(order, on_progress, on_done)

    def _order(self, made: Claim, plan: Json) -> Order:
        job, task = made.job, made.task
        number = "job" if task is None else str(task.number)
        found: dict[str, Any] = {}
        with self._database.read() as connection:
            if task is not None:
                found["payload"] = payload_of(connection, task)
            elif made.phase == "publish":
                found["results"] = task_results(connection, job.id)
            elif made.phase == "plan":
                kind = self._kinds[job.kind]
                self._check_submitter(connection, job, kind)
                found["prepared"] = kind.prepare(connection, kind.params.model_validate(job.params))
        return Order(
            kind=job.kind,
            phase=made.phase,
            job_id=job.id,
            attempt_name=f"{job.id}-{int(job.created_at.timestamp() * 1e6):x}-{number}-{made.fence}",
            task_number=None if task is None else task.number,
            params=job.params if made.phase in ("plan", "discard") else {},
            plan_data=plan,  # a task has its own payload
            **found,
            memory_bytes=self._settings.task_memory_bytes,
            seconds=self._settings.task_seconds,
        )

    def _check_submitter(self, connection: Connection, job: Job, kind: Kind[Any]) -> None:
        """Check the rights and limits of the submitter again.

        Raises ForbiddenError for lost rights, and ConflictError above a byte limit.
        """
        account_id = account_of(job.owner)
        if job.key_id is None and account_id is None:  # submitted by the service itself
            return
        (caller,) = self._callers.of_numbers(connection, [(job.key_id, account_id)])
        if caller is None:
            raise ForbiddenError(f"{job.created_by}, who submitted the job, is now revoked or disabled")
        if not caller.may(kind.scope, job.root):
            where = "" if job.root is None else f" in root {job.root}"
            raise ForbiddenError(
                f"{job.created_by}, who submitted the job, no longer has the scope {kind.scope!r}{where}"
            )
        for root in other_roots(connection, job.id):
            if not (caller.may("read", root) or caller.may(kind.scope, root)):
                raise ForbiddenError(
                    f"{job.created_by}, who submitted the job, may no longer read root {root}"
                )
        if kind.scope == "convert" and self._limits.allowances is not None:  # the job writes checkpoints
            subjects = subjects_of(caller.owner, job.key_id, job.root)
            check_room(connection, self._limits.allowances, subjects)

    # -- running work --

    def _note_offer(self) -> None:
        """Record this worker and its kinds from time to time."""
        if (begun := time.monotonic()) >= self._next_note:
            now = self._clock()
            self._database.transact(lambda connection: note_offer(connection, self.owner, self._kinds, now))
            self._next_note = begun + NOTE_SECONDS

    def _withdraw_offer(self) -> None:
        self._database.transact(lambda connection: withdraw_offer(connection, self.owner))

    def _expire(self) -> None:
        """Expire the leases of silent workers."""
        if (begun := time.monotonic()) < self._next_sweep:
            return
        self._next_sweep = begun + min(_SWEEP_SECONDS, self._settings.lease_seconds / 3)
        now = self._clock()
        with self._database.read() as connection:
            if not has_expired(connection, now):
                return
        count = self._database.transact(lambda connection: expire_leases(connection, now, self._backoff))
        if count:
            _log.warning("leases of silent workers expired", count=count)

    def _look(self) -> None:
        """Stop cancelled and lost work, and renew the rest."""
        alive = {held: entry for held, entry in self._entries.items() if entry.outcome is None}
        over = time.monotonic() - self._settings.lease_seconds
        for entry in alive.values():
            if (
                entry.renewed_seconds < over
            ):  # after an outage of the database, other workers may have the work
                self._kill(entry, "the lease is over")
        if not self._entries:
            return
        with self._database.read() as connection:
            for held in stopped(connection, alive):
                self._kill(alive[held], "cancelled, or claimed by another worker")
        self._renew()

    def _renew(self) -> None:
        begun = time.monotonic()
        if begun >= self._next_renewal:
            wanted = {held: entry.done_bytes for held, entry in self._entries.items()}
        elif begun >= self._next_progress:
            wanted = {held: entry.done_bytes for held, entry in self._entries.items() if not entry.is_told}
        else:
            return
        if not wanted:
            return
        lost = self._database.transact(
            lambda connection: renew(
                connection, self.owner, wanted, self._clock(), self._settings.lease_seconds
            )
        )
        for held, done_bytes in wanted.items():
            entry = self._entries[held]
            if held in lost:
                self._kill(entry, "claimed by another worker")
            else:
                entry.renewed_seconds = begun
                entry.is_told = entry.done_bytes == done_bytes
        self._next_progress = begun + _PROGRESS_SECONDS
        if len(wanted) == len(self._entries):
            self._next_renewal = begun + self._settings.lease_seconds / 3

    def _kill(self, entry: _Entry, why: str) -> None:
        if entry.running is not None and entry.outcome is None:
            _log.info("stopped", job=entry.claim.job.id, phase=entry.claim.phase, why=why)
            entry.running.kill()

    # -- ended work --

    def _settle(self) -> None:
        """Report outcomes to the ledger, and keep unreported ones for later."""
        while True:
            try:
                held, outcome = self._ended.get_nowait()
            except queue.Empty:
                break
            self._entries[held].outcome = outcome
        for held, entry in list(self._entries.items()):
            if entry.outcome is None:
                continue
            try:
                self._tell(entry, entry.outcome)
            except StaleFenceError as error:
                _log.info("result came after the end of the lease", job=held.job_id, error=str(error))
            except DatabaseUnavailableError:
                raise
            except Exception:  # noqa: BLE001 - it is left to its lease, and must not hold up the others
                _log.exception("result cannot be reported", job=held.job_id)
            del self._entries[held]

    def _tell(self, entry: _Entry, outcome: ProcessOutcome) -> None:
        made, error = entry.claim, outcome.error
        if outcome.result is not None:
            result = outcome.result
            try:
                self._prepare(entry, result)
                self._database.transact(lambda connection: self._complete(connection, entry, result))
                return
            except (StaleFenceError, DatabaseUnavailableError):
                raise
            except Exception as failure:  # noqa: BLE001 - what cannot be recorded has failed
                _log.exception("failure cannot be recorded", job=made.job.id, phase=made.phase)
                error = error_of(failure)
        if error is None:
            self._database.transact(lambda connection: release(connection, made.held, self._clock()))
        else:
            self._fail(made, error)

    def _prepare(self, entry: _Entry, result: Json) -> None:
        """Write large data before the short transaction that refers to it."""
        if entry.claim.phase == "plan":
            entry.plan_data = encode_json(result["plan_data"])
            self._add_tasks(entry, result["tasks"])
        is_result = entry.claim.phase in ("task", "publish")
        if entry.document is not None or not is_result or not is_large(result):
            return
        if result in entry.results:
            with self._database.read() as connection:
                known = task_documents(connection, entry.claim.job.id)
            entry.document = known[entry.results.index(result)]
        if entry.document is None:
            entry.document = prepare_document(self._database, result, now=self._clock(), pause=self._pause)

    def _add_tasks(self, entry: _Entry, specs: Sequence[Json]) -> None:
        """Write the tasks of a plan except those of the last transaction."""
        *batches, _ = _together(specs[entry.added :])
        for batch in batches:
            begun = time.monotonic()
            some = [TaskSpec(**spec) for spec in batch]
            self._database.transact(partial(add_tasks, held=entry.claim.held, specs=some, first=entry.added))
            entry.added += len(some)
            self._pause(min(_MOST_PAUSE_SECONDS, time.monotonic() - begun))

    def _pause(self, seconds: float) -> None:
        """Renew leases and handle cancellations between parts of large data."""
        time.sleep(seconds)
        self._look()

    def _fail(self, made: Claim, error: JobFailure) -> None:
        self._tell_failed(made, error)
        if not self._kinds[made.job.kind].waits:
            error = replace(error, is_environment=False)
        self._database.transact(
            lambda connection: fail(connection, made.held, error, self._clock(), self._backoff)
        )

    def _tell_failed(self, made: Claim, error: JobFailure) -> None:
        job = made.job
        log = _log.warning
        if not self._kinds[job.kind].waits:  # requested repeatedly, and may fail as often
            is_told = self._failing.get((job.kind, job.root)) == error
            self._failing[job.kind, job.root] = error
            log = _log.debug if is_told else log
        log(
            "failed",
            job=job.id,
            kind=job.kind,
            root=job.root,
            phase=made.phase,
            type=error.type,
            error=error.detail,
            retryable=error.is_retryable,
        )

    def _complete(self, connection: Connection, entry: _Entry, result: Json) -> None:
        made, now = entry.claim, self._clock()
        if made.phase == "plan":
            specs = [TaskSpec(**spec) for spec in result["tasks"][entry.added :]]
            complete_plan(connection, made.held, Encoded(entry.plan_data), specs, now, entry.added)
        elif made.phase == "task":
            complete_task(connection, made.held, result, now, entry.document)
        elif made.phase == "publish":
            job = complete_publish(connection, made.held, result, now, entry.document)
            kind: Kind[Any] = self._kinds[job.kind]
            kind.record(connection, job, result)
            self._failing.pop((job.kind, job.root), None)
        else:
            complete_discard(connection, made.held, now)


def open_executor(settings: Settings, kinds: str) -> Executor:
    """Return the executor of the settings: ``processes``, or ``dask://HOST:PORT``. Raises ValueError."""
    setup = Setup(settings, kinds)
    if settings.executor == "processes":
        return WarmProcessPool(setup)
    if settings.executor.startswith("dask://"):
        from dcp.server.core.jobs.executors.dask import DaskExecutor

        return DaskExecutor(setup, settings.executor.removeprefix("dask://"))
    raise ValueError(f"executor must be 'processes' or 'dask://HOST:PORT', not {settings.executor!r}")


def _together(specs: Sequence[Json]) -> list[Sequence[Json]]:
    """Group tasks into short transactions; the last group may be empty."""
    batches, begin, size = [], 0, 0
    for end, spec in enumerate(specs, 1):
        size += len(json.dumps(spec))
        if size >= _TRANSACTION_CHARACTERS:
            batches.append(specs[begin:end])
            begin, size = end, 0
    return [*batches, specs[begin:]]
