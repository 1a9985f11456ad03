"""The ledger of jobs compared with a model: any order of steps by workers that die, sleep, or are late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete, func, select

from dcp.server.core.jobs.ledger import claims, failures, reading, transitions
from dcp.server.core.jobs.ledger.rows import (
    Backoff,
    Claim,
    Held,
    JobSpec,
    StaleFenceError,
    TaskSpec,
)
from dcp.server.core.problems import ConflictError
from dcp.server.database.engine import Database
from dcp.server.database.tables import job_events, jobs, tasks
from dcp.server.records.jobs import Job, JobFailure
from tests.support.examples import examples

__all__ = ["run_any_order"]

LEASE_SECONDS = 10.0
BACKOFF = Backoff(1.0, 4.0)
OWNERS = ("first", "second", "third")


@dataclass
class Known:
    """The model's knowledge of a job since its submission or last retry."""

    task_count: int
    priority: int
    is_cancelled: bool = False
    done: dict[int, int] = field(default_factory=dict)  # task number -> fence of its completion
    successes: int = 0


@dataclass
class Taken:
    """A claim that a worker holds or has held."""

    claim: Claim
    owner: str
    until_seconds: float


class LedgerMachine(RuleBasedStateMachine):
    """Steps of several workers and users, in any order, on one database."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.now = 1000.0
        self.jobs: dict[int, Known] = {}
        self.keys: dict[str, int] = {}
        self.taken: list[Taken] = []
        self.past: list[Taken] = []  # claims that are over: every use of them must be refused
        with database.write() as connection:
            for table in (job_events, tasks, jobs):
                connection.execute(delete(table))

    # -- users --

    @initialize(task_counts=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def begin(self, task_counts: list[int]) -> None:
        """Plan some jobs first: most errors need a planned job."""
        for task_count in task_counts:
            self.submit(task_count, 0, 3, None)
        for _ in task_counts:
            self.claim("first")
            self.complete_claim(self.taken[-1].claim)
            self.past.append(self.taken.pop())

    @rule(
        task_count=st.integers(0, 3),
        priority=st.integers(-1, 1),
        attempts=st.integers(1, 3),
        key=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(self, task_count: int, priority: int, attempts: int, key: str | None) -> None:
        """Submit a job, or join the unfinished job with the same key."""
        spec = JobSpec(
            kind="made-up",
            params={"tasks": task_count},
            created_by="test",
            priority=priority,
            dedup_key=key,
            max_attempts=attempts,
        )
        job_id, is_new = self.write(transitions.submit_or_join, spec, self.now)
        holder = self.keys.get(key) if key is not None else None
        if holder is not None and not self.job(holder).is_final:
            assert (job_id, is_new) == (holder, False)
            return
        assert is_new and job_id not in self.jobs
        self.jobs[job_id] = Known(task_count, priority)
        if key is not None:
            self.keys[key] = job_id

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a job; refused only for jobs that have ended otherwise or are publishing."""
        if not self.jobs:
            return
        at_work = sorted({taken.claim.job.id for taken in self.taken})
        job = self.job(data.draw(st.sampled_from(at_work or sorted(self.jobs))))
        try:
            after = self.write(transitions.request_cancel, job.id, self.now, "test")
        except ConflictError:
            assert job.state in ("succeeded", "failed", "publishing")
            return
        assert after.state == "cancelled" or after.is_ending
        is_new = job.state == "queued" and job.started_at is None
        assert (after.state == "cancelled") == (is_new or job.state == "cancelled")
        self.jobs[job.id].is_cancelled = True

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """Retry a job: a failed or cancelled job restarts without its past, and a waiting job becomes due."""
        if not self.jobs:
            return
        job = self.job(data.draw(st.sampled_from(sorted(self.jobs))))
        holder = None if job.dedup_key is None else self.keys[job.dedup_key]
        is_taken = holder is not None and holder != job.id and not self.job(holder).is_final
        try:
            after = self.write(transitions.retry, job.id, self.now, "test")
        except ConflictError:
            assert (job.state not in ("failed", "cancelled") and job.waiting is None) or is_taken
            return
        if job.waiting is not None:
            assert (after.state, after.not_before) == (job.state, None)
            return
        assert job.state in ("failed", "cancelled") and not is_taken
        assert after.state == "queued" and after.error is None and after.cancel_requested_at is None
        if job.dedup_key is not None:
            self.keys[job.dedup_key] = job.id
        known = self.jobs[job.id]
        self.jobs[job.id] = Known(known.task_count, known.priority)

    # -- workers --

    @rule(owner=st.sampled_from(OWNERS))
    def sleep_through_a_lease(self, owner: str) -> None:
        """Let a worker's leases expire during a sleep; another worker takes the jobs."""
        self.claim(owner)
        self.pass_time(11.0)
        self.pass_time(5.0)
        self.claim("third")

    @rule(owner=st.sampled_from(OWNERS))
    def claim(self, owner: str) -> None:
        """Claim work: due, held by no other worker, and in the right phase of its job."""
        with self.database.read() as connection:
            is_work = claims.has_work(connection, self.now)
        made = self.write(claims.claim, owner, self.now, LEASE_SECONDS)
        assert (made is not None) == is_work
        if made is None:
            return
        for other in self.taken:
            same = (other.claim.held.job_id, other.claim.held.task_id) == (
                made.held.job_id,
                made.held.task_id,
            )
            assert not same, "two have it at a time"
        known = self.jobs[made.job.id]
        if made.phase == "discard":
            assert not [one for one in self.taken if one.claim.job.id == made.job.id]
        else:
            assert not known.is_cancelled
        if made.phase == "task":
            assert made.task is not None and made.task.number not in known.done
        if made.phase == "publish":
            with self.database.read() as connection:
                results = reading.task_results(connection, made.job.id)
            assert [result["number"] for result in results] == list(range(known.task_count))
            assert [result["fence"] for result in results] == [known.done[n] for n in range(known.task_count)]
        self.taken.append(Taken(made, owner, self.now + LEASE_SECONDS))

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Complete the held task once."""
        if not self.taken:
            return
        taken = data.draw(st.sampled_from(self.taken))
        self.complete_claim(taken.claim)
        self.taken.remove(taken)
        self.past.append(taken)

    @rule(data=st.data())
    def complete_expired(self, data: st.DataObject) -> None:
        """Complete an expired or completed claim, which is refused and changes nothing."""
        if not self.past:
            return
        # prefer claims whose work another worker has claimed since
        places = {(taken.claim.held.job_id, taken.claim.held.task_id) for taken in self.taken}
        again = [one for one in self.past if (one.claim.held.job_id, one.claim.held.task_id) in places]
        one = data.draw(st.sampled_from(again or self.past)).claim
        before = self.snapshot()
        for act in (
            lambda: self.complete_claim(one),
            lambda: self.write(failures.fail, one.held, JobFailure(type="X", detail="x"), self.now),
            lambda: self.write(transitions.release, one.held, self.now),
        ):
            with pytest.raises(StaleFenceError):
                act()
        assert self.write(claims.renew, "first", {one.held: 5}, self.now, LEASE_SECONDS) == {one.held}
        assert self.snapshot() == before

    @rule(data=st.data(), why=st.sampled_from(["passing", "lasting", "environment"]))
    def fail(self, data: st.DataObject, why: str) -> None:
        """Fail the held task, temporarily or permanently."""
        if not self.taken:
            return
        taken = data.draw(st.sampled_from(self.taken))
        is_retryable = why != "lasting"
        error = JobFailure(
            type="X", detail="it broke", is_retryable=is_retryable, is_environment=why == "environment"
        )
        self.write(failures.fail, taken.claim.held, error, self.now, BACKOFF)
        self.taken.remove(taken)
        self.past.append(taken)
        if not is_retryable and taken.claim.phase in ("plan", "task", "publish"):
            after = self.job(taken.claim.job.id)
            assert after.is_ending or after.state in ("failed", "cancelled")

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Return held work, like a worker that stops."""
        if not self.taken:
            return
        taken = data.draw(st.sampled_from(self.taken))
        self.write(transitions.release, taken.claim.held, self.now)
        self.taken.remove(taken)
        self.past.append(taken)

    @rule(owner=st.sampled_from(OWNERS), done_bytes=st.integers(0, 10))
    def renew(self, owner: str, done_bytes: int) -> None:
        """Renew all valid claims; claims of ending jobs must be reported as stopped."""
        own = [taken for taken in self.taken if taken.owner == owner]
        held: dict[Held, int | None] = {taken.claim.held: done_bytes for taken in own}
        assert self.write(claims.renew, owner, held, self.now, LEASE_SECONDS) == frozenset()
        for taken in own:
            taken.until_seconds = self.now + LEASE_SECONDS
        with self.database.read() as connection:
            stopped = claims.stopped(connection, held)
        for taken in own:
            job = self.job(taken.claim.job.id)
            assert (taken.claim.held in stopped) == (job.is_ending and taken.claim.phase != "discard")

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass: leases expire, and failed work becomes due."""
        self.now += seconds
        over = [taken for taken in self.taken if taken.until_seconds < self.now]
        assert self.write(failures.expire_leases, self.now, BACKOFF) == len(over)
        for taken in over:
            self.taken.remove(taken)
            self.past.append(taken)

    # -- invariants --

    @invariant()
    def is_sound(self) -> None:
        """Check that states agree with the model, and that each job succeeded once at most."""
        with self.database.read() as connection:
            rows = connection.execute(select(jobs)).all()
            leased = connection.execute(
                select(func.count()).where(tasks.c.lease_owner.is_not(None))
            ).scalar_one()
        assert {row.id for row in rows} == set(self.jobs)
        leased += sum(row.lease_owner is not None for row in rows)
        assert leased == len(self.taken)
        for row in rows:
            known = self.jobs[row.id]
            assert known.successes == (row.state == "succeeded")
            assert (row.finished_seconds is not None) == (row.state in ("succeeded", "failed", "cancelled"))
            if row.state == "cancelled":
                assert known.is_cancelled

    def teardown(self) -> None:
        """Check that workers can finish every job after any sequence of steps."""
        for _ in range(1000):
            for taken in self.taken:
                self.complete_claim(taken.claim)
            self.taken.clear()
            self.now += 5.0
            made = self.write(claims.claim, "last", self.now, LEASE_SECONDS)
            if made is None:
                break
            self.taken.append(Taken(made, "last", self.now + LEASE_SECONDS))
        for job_id in self.jobs:
            assert self.job(job_id).is_final
        with self.database.read() as connection:
            states = Counter(connection.execute(select(tasks.c.state)).scalars())
        assert not states["queued"] and not states["running"]

    # -- helpers --

    def write(self, act: Any, *arguments: Any) -> Any:
        """Run one transaction."""
        return self.database.transact(lambda connection: act(connection, *arguments))

    def job(self, job_id: int) -> Job:
        """Return a job in its current state."""
        with self.database.read() as connection:
            return reading.get_job(connection, job_id)

    def snapshot(self) -> list[Any]:
        """Return all rows."""
        with self.database.read() as connection:
            return [
                connection.execute(select(table).order_by(table.c.id)).all()
                for table in (jobs, tasks, job_events)
            ]

    def complete_claim(self, one: Claim) -> None:
        """Complete a claim like a worker."""
        known = self.jobs[one.job.id]
        if one.phase == "plan":
            specs = [TaskSpec(payload={"number": n}, weight_bytes=10) for n in range(one.job.params["tasks"])]
            self.write(transitions.complete_plan, one.held, {"made": True}, specs, self.now)
        elif one.phase == "task":
            assert one.task is not None
            result = {"number": one.task.number, "fence": one.fence}
            self.write(transitions.complete_task, one.held, result, self.now)
            assert one.task.number not in known.done
            known.done[one.task.number] = one.fence
        elif one.phase == "publish":
            job = self.write(transitions.complete_publish, one.held, {"by": one.fence}, self.now)
            assert job.state == "succeeded" and job.result == {"by": one.fence}
            known.successes += 1
        else:
            self.write(transitions.complete_discard, one.held, self.now)
            assert self.job(one.job.id).state in ("failed", "cancelled")


def run_any_order(database: Database, count: int, steps: int) -> None:
    """Try ``count`` runs of ``steps`` steps; few in quick runs."""
    make: Any = lambda: LedgerMachine(database)  # noqa: E731 - hypothesis calls it to create a machine
    run_state_machine_as_test(make, settings=examples(count, quick=3, steps=steps))
