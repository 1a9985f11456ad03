"""Policies over the catalog: what is kept and why, per run and format; and the job that carries them out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select, update

from dcp.manager.cleanup.retention import Retention
from dcp.server.automation import periodic
from dcp.server.automation.periodic import is_anything_due, submit_due
from dcp.server.catalog.errors import ChangedError, InvalidQueryError, MissingError, StateError
from dcp.server.catalog.labelling.aliases import set_alias
from dcp.server.catalog.labelling.labels import Change, set_pinned
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints, jobs
from dcp.server.jobs.kinds.shared.deletion import delete_softly
from dcp.server.retention.planning import RunPlan, plan_run, runs_of
from dcp.server.retention.policies import (
    NewPolicy,
    PolicyRow,
    create_policy,
    delete_policy,
    get_policy,
    list_policies,
    update_policy,
)
from tests.support.catalog_rows import T0, add_checkpoint
from tests.support.kind_runs import KindRuns

pytestmark = pytest.mark.each_database  # their SQL differs

_NOW = T0 + 1000.0


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """Two roots of which only the catalog tells."""
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "other")}
    return KindRuns(database, tmp_path / "work", roots)


def fill(runs: KindRuns, run: str = "run", steps: int = 6, **facts: Any) -> dict[int, int]:
    """Ids by step, 1 to ``steps``; the loss falls and rises again."""
    return {
        step: add_checkpoint(runs.database, f"{run}/step-{step}", metrics={"loss": abs(step - 3.0)}, **facts)
        for step in range(1, steps + 1)
    }


def planned(runs: KindRuns, keep: Retention, run: str = "run") -> RunPlan:
    """The plan for one run."""
    with runs.database.read() as connection:
        ((number, key),) = runs_of(connection, "main", run)
        return plan_run(connection, number, key, keep, _NOW)


def kept(plan: RunPlan) -> dict[str, tuple[str, ...]]:
    """Reasons by name of the checkpoint."""
    return {one.key.rpartition("/")[2]: one.reasons for one in plan.decisions if one.reasons}


def policy(runs: KindRuns, **changes: Any) -> PolicyRow:
    """A policy that keeps the last two of each run."""
    given: dict[str, Any] = {"name": "p", "root": "main", "run_glob": "*", "keep": {"last": 2}}
    given |= {"grace_seconds": 50.0, "interval_seconds": 600.0, "is_enabled": True}
    return runs.database.transact(
        lambda connection: create_policy(connection, NewPolicy(**(given | changes)), _NOW)
    )


def test_rules_and_reasons(runs: KindRuns) -> None:
    """The rules of `dcp.Retention` on the rows of the catalog, with all reasons."""
    fill(runs)
    keep = Retention.from_dict(
        {"last": 1, "every_steps": 4, "best": {"metric": "loss"}, "younger_than_seconds": 996.0}
    )
    assert kept(planned(runs, keep)) == {
        "step-3": ("best loss (min)",),
        "step-4": ("every 4 steps",),
        "step-5": ("younger than 996 s",),
        "step-6": ("newest", "last 1", "younger than 996 s"),
    }
    assert [one.step for one in planned(runs, keep).deleted] == [1, 2]


@pytest.mark.parametrize("steps", [90, pytest.param(1_100, marks=pytest.mark.exhaustive)])
def test_a_plan_reads_what_its_rules_ask_for(runs: KindRuns, steps: int) -> None:
    """Few statements, however many checkpoints there are, and no metric that no rule names."""
    fill(runs, steps=steps)
    statements: list[str] = []

    @event.listens_for(runs.database.reader, "before_cursor_execute")
    def _(_c: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        statements.append(statement)

    assert len(planned(runs, Retention(last=3)).deleted) == steps - 3
    assert not any("checkpoint_metrics" in statement for statement in statements)
    assert len([statement for statement in statements if statement.startswith("SELECT")]) <= 3
    statements.clear()
    keep = Retention.from_dict({"best": {"metric": "loss", "count": 2}})
    assert kept(planned(runs, keep)).keys() == {"step-3", "step-4", f"step-{steps}"}
    assert len([statement for statement in statements if statement.startswith("SELECT")]) <= 4


def test_what_is_kept_in_any_case(runs: KindRuns) -> None:
    """Pinned ones, those that an alias names, and those without a step; a damaged one is not the newest."""
    numbers = fill(runs)
    add_checkpoint(runs.database, "run/final")
    run = runs.row("main", "run/step-1").run_id
    with runs.database.write() as connection:
        set_pinned(connection, numbers[1], True, Change(actor="test"))
        set_alias(connection, run, "best", numbers[2], Change(actor="test"))
        connection.execute(
            update(checkpoints).where(checkpoints.c.id == numbers[6]).values(verification="damaged")
        )
    assert kept(planned(runs, Retention(last=1))) == {
        "final": ("no step",),
        "step-1": ("pinned",),
        "step-2": ("alias best",),
        "step-5": ("newest", "last 1"),
        "step-6": ("damaged, without enough good ones after it",),
    }


def test_a_rule_that_cannot_be_judged_deletes_nothing(runs: KindRuns) -> None:
    """By a metric that no checkpoint of a run has; the plan and the job say so."""
    fill(runs)
    plan = planned(runs, Retention.from_dict({"last": 1, "best": {"metric": "los"}}))
    assert plan.deleted == []
    assert len(plan.unjudged) == 1 and "did you mean 'loss'" in plan.unjudged[0]
    made = policy(runs, keep={"last": 1, "best": [{"metric": "accuracy"}]})
    job = runs.do("retention", policy_id=made.id)
    assert job.result is not None and (job.result["kept"], job.result["deleted"]) == (6, 0)
    assert len(job.result["unjudged"]) == 1 and job.result["unjudged"][0].startswith("run: ")


def test_what_has_no_time_is_not_old(runs: KindRuns) -> None:
    """A storage that says 0 for the time of a file: it counts from when it was found."""
    for step in (1, 2, 3):
        add_checkpoint(runs.database, f"run/step-{step}", committed_seconds=0.0, observed_seconds=_NOW - 5.0)
    plan = planned(runs, Retention(younger_than_seconds=100.0))
    assert plan.deleted == []


def test_formats_are_counted_apart(runs: KindRuns) -> None:
    """Weights that were converted into the same folder do not push training checkpoints out."""
    fill(runs)
    for step in (1, 2, 7):
        add_checkpoint(runs.database, f"run/w-{step}", format="safetensors")
    assert sorted(kept(planned(runs, Retention(last=1)))) == ["step-6", "w-7"]


def test_two_of_one_step(runs: KindRuns) -> None:
    """They are kept together, or go together, unless something else keeps one."""
    numbers = fill(runs, steps=3)
    twins = {step: add_checkpoint(runs.database, f"run/copy-{step}") for step in (1, 3)}
    with runs.database.write() as connection:
        set_pinned(connection, numbers[1], True, Change(actor="test"))
    found = kept(planned(runs, Retention(last=1)))
    assert set(found) == {"step-1", "copy-1", "step-3", "copy-3"}
    assert found["copy-1"] == ("another of this step is kept",)
    assert len(twins) == 2


def test_the_job_deletes_with_grace_and_a_dry_run_does_not(runs: KindRuns) -> None:
    """All runs of the glob, one root; it can be restored until the policy's grace is over."""
    for run in ("a/x", "a/y", "b"):
        fill(runs, run)
    fill(runs, "a/x", root="other")
    made = policy(runs, run_glob="a/*")
    dry = runs.do("retention", policy_id=made.id, dry_run=True)
    assert dry.state == "succeeded" and dry.result is not None, dry.error
    assert {name: dry.result[name] for name in ("runs", "kept", "deleted")} == {
        "runs": 2,
        "kept": 4,
        "deleted": 8,
    }
    assert runs.row("main", "a/x/step-1").state == "committed"
    real = runs.do("retention", policy_id=made.id)
    assert real.result is not None and {**real.result, "dry_run": True} == dry.result
    states = {
        (row.root_id, row.key): row.state for row in runs.all(select(checkpoints)) if row.state == "deleted"
    }
    assert sorted(key for _, key in states) == sorted(real.result["keys"])
    row = runs.row("main", "a/x/step-1")
    assert row.purge_after_seconds == pytest.approx(row.deleted_seconds + 50.0)
    again = runs.do("retention", policy_id=made.id)
    assert again.result is not None and again.result["deleted"] == 0


def test_a_policy_that_changes_under_the_job_stops_it(runs: KindRuns) -> None:
    """What was planned by other rules is not carried out."""
    fill(runs)
    made = policy(runs)
    job_id = runs.submit("retention", policy_id=made.id)
    claim = runs.claim()
    assert claim is not None
    runs.complete(claim, runs.carry_out(claim))
    with runs.database.write() as connection:
        update_policy(connection, made.id, {"keep": {"last": 5}}, _NOW)
    runs.drain()
    job = runs.job(job_id)
    assert job.state == "failed" and job.error is not None and "changed" in job.error["detail"]
    assert runs.row("main", "run/step-1").state == "committed"


def test_policies_are_due_by_the_clock(runs: KindRuns) -> None:
    """At once, and then once in each interval, however many workers look."""
    fill(runs)
    made = policy(runs, grace_seconds=1e9)
    policy(runs, name="off", is_enabled=False)
    now = time.time()

    def due(at: float) -> bool:
        with runs.database.read() as connection:
            return is_anything_due(connection, at, runs.settings)

    assert due(now)
    assert [submit_due(runs.database, runs.settings, now) for _ in range(2)] == [1, 0]
    assert not due(now)
    runs.drain()
    assert runs.row("main", "run/step-1").state == "deleted"
    assert due(now + 601)
    assert submit_due(runs.database, runs.settings, now + 601) == 1
    with runs.database.write() as connection:
        delete_policy(connection, made.id)
    runs.drain()
    assert not due(now + 10_000)


def test_purges_are_due_when_grace_is_over(runs: KindRuns) -> None:
    """Not before; and one that failed is left alone for a while."""
    fill(runs, steps=3)
    policy(runs, keep={"last": 1})
    now = time.time()
    submit_due(runs.database, runs.settings, now)
    runs.drain()
    assert submit_due(runs.database, runs.settings, now + 10) == 0
    assert submit_due(runs.database, runs.settings, now + 100) == 2
    purges = runs.all(select(jobs).where(jobs.c.kind == "purge"))
    assert {row.created_by for row in purges} == {"system"}
    assert submit_due(runs.database, runs.settings, now + 100) == 0


def test_roots_that_are_only_read_hold_up_no_others(
    runs: KindRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many purges wait there for ever, and policies: those of other roots are due as they were."""
    monkeypatch.setattr(periodic, "_MAX_PURGES", 2)
    waiting = [add_checkpoint(runs.database, f"run/step-{step}") for step in (1, 2, 3)]
    due = add_checkpoint(runs.database, "run/step-1", root="other")
    policy(runs)
    for number in (*waiting, due):
        with runs.database.write() as connection:
            delete_softly(connection, number, 0.0, Change(actor="test", now=_NOW))
    given = {
        "main": {"url": str(tmp_path / "main"), "readonly": True},
        "other": {"url": str(tmp_path / "other")},
    }
    frozen = KindRuns(runs.database, tmp_path / "work", given)
    now = time.time()
    assert submit_due(frozen.database, frozen.settings, now) == 1
    assert [row.checkpoint_id for row in runs.all(select(jobs))] == [due]
    with runs.database.read() as connection:
        assert not is_anything_due(connection, now, frozen.settings)
        assert is_anything_due(connection, now, runs.settings)


def test_policies_as_rows(runs: KindRuns) -> None:
    """Names are unique, versions are compared, roots that may not be seen are not there."""
    made = policy(runs)
    with pytest.raises(StateError, match="already"):
        policy(runs)
    with pytest.raises(InvalidQueryError):
        policy(runs, name="q", run_glob="")
    with pytest.raises(MissingError):
        policy(runs, name="q", root="nowhere")
    with runs.database.write() as connection:
        changed = update_policy(connection, made.id, {"is_enabled": False}, _NOW, expected_version=1)
        assert (changed.version, changed.is_enabled) == (2, False)
        with pytest.raises(ChangedError):
            update_policy(connection, made.id, {"is_enabled": True}, _NOW, expected_version=1)
    with runs.database.read() as connection:
        assert list_policies(connection, frozenset({"other"})) == []
        with pytest.raises(MissingError):
            get_policy(connection, made.id, frozenset({"other"}))
        assert [one.id for one in list_policies(connection, frozenset({"main"}))] == [made.id]
