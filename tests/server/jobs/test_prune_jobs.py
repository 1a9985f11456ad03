"""Parts of checkpoints are dropped by jobs, and by policies: what is held is left, what was freed is said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from dcp.inspection.verification import verify
from dcp.manager.cleanup.retention import Retention
from dcp.server.catalog.errors import StateError
from dcp.server.catalog.labelling.aliases import set_alias
from dcp.server.catalog.labelling.labels import Change, set_pinned
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, jobs, retention_policies
from dcp.server.problems import ForbiddenError
from dcp.server.retention.planning import plan_run, runs_of
from dcp.server.retention.policies import NewPolicy, create_policy
from dcp.server.retention.totals import retention_totals
from dcp.steps.notes import Notes, update_notes
from dcp.storage.stores import PosixStore
from tests.support.kind_runs import KindRuns
from tests.support.with_optimizer import parts_there, save_apart, save_mixed, save_stock, stock_sees

STEPS = {1: save_apart, 2: save_mixed, 3: save_stock, 4: save_apart}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps that were saved in each way."""
    folder = tmp_path / "main/run"
    for step, save in STEPS.items():
        save(folder / f"step-{step}", step)
    return folder


@pytest.fixture
def runs(database: Database, tmp_path: Path, run: Path) -> KindRuns:
    """The catalog of them."""
    made = KindRuns(database, tmp_path / "work", {"main": {"url": str(tmp_path / "main")}})
    made.scan("main")
    return made


def there(run: Path) -> list[str]:
    """What of each step is there, which stock torch must see as well."""
    found = [parts_there(run / f"step-{step}", step) for step in STEPS]
    assert [stock_sees(run / f"step-{step}", step) for step in STEPS] == found
    return found


def number_of(runs: KindRuns, step: int) -> int:
    """Of the checkpoint of a step."""
    return runs.id("main", f"run/step-{step}")


def apply(runs: KindRuns, keep: dict[str, Any], **options: Any) -> Any:
    """What a policy's job says, with all that it has begun carried out."""
    new = NewPolicy(
        name="lean",
        root="main",
        run_glob="*",
        keep=keep,
        grace_seconds=0.0,
        interval_seconds=600.0,
        is_enabled=True,
    )
    made = runs.database.transact(lambda connection: create_policy(connection, new, time.time()))
    job = runs.do("retention", policy_id=made.id, **options)
    assert job.state == "succeeded", job.error
    return job.result


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (2, 3))])
def test_a_job_drops_the_optimizer(runs: KindRuns, run: Path, step: int) -> None:
    """The rest loads, verifies, and is the same checkpoint of the catalog, of its new size and structure."""
    before = runs.row("main", f"run/step-{step}")
    job = runs.do("prune", checkpoint_id=before.id)
    assert job.state == "succeeded" and job.result is not None, job.error
    assert (job.result["outcome"], job.result["parts"][0]["name"]) == ("dropped", "optimizer")
    sizes = sum(path.stat().st_size for path in (run / f"step-{step}").glob("*.distcp"))
    assert there(run)[step - 1] == "weights"
    assert verify(run / f"step-{step}").findings == []
    after = runs.row("main", f"run/step-{step}")
    assert (after.id, after.state, after.step) == (before.id, "committed", step)
    assert after.bytes == sizes
    assert before.bytes - after.bytes == job.result["freed_bytes"] > 0
    assert after.committed_seconds == pytest.approx(before.committed_seconds, abs=1)
    assert after.provenance["dropped"][0]["name"] == "optimizer"
    assert after.structure_id != before.structure_id
    (noted,) = runs.all(select(audit).where(audit.c.action == "checkpoint.prune"))
    assert noted.detail["freed_bytes"] == job.result["freed_bytes"]
    again = runs.do("prune", checkpoint_id=before.id)
    assert again.result is not None and again.result["outcome"] == "absent"


def test_what_is_held_is_refused(runs: KindRuns, run: Path) -> None:
    """Pinned, named by an alias, read by another job, pinned in its folder, read-only; each stays whole."""
    pinned, named, used, noted = (number_of(runs, step) for step in STEPS)
    row = runs.row("main", "run/step-1")
    with runs.database.write() as connection:
        set_pinned(connection, pinned, True, Change(actor="test"))
        set_alias(connection, row.run_id, "best", named, Change(actor="test"))
    runs.submit("verify", checkpoint_id=used)
    for number, why in ((pinned, "is pinned"), (named, "'best' of its run"), (used, "a job is about")):
        with pytest.raises(StateError, match=why):
            runs.submit("prune", checkpoint_id=number)
    update_notes(PosixStore(run / "step-4"), lambda _: Notes(pinned=True))
    job = runs.do("prune", checkpoint_id=noted)
    assert job.result is not None and job.result["outcome"] == "pinned"
    assert there(run) == ["whole"] * 4
    url = runs.settings.roots["main"].url
    reading = KindRuns(runs.database, runs.folder, {"main": {"url": url, "readonly": True}})
    with pytest.raises(ForbiddenError, match="read-only"):
        reading.submit("prune", checkpoint_id=noted)


def test_a_job_of_what_was_saved_anew_does_nothing(runs: KindRuns, run: Path) -> None:
    """What the catalog knows is meant, and no other."""
    save_apart(run / "step-1", 1)
    job = runs.do("prune", checkpoint_id=number_of(runs, 1))
    assert job.state == "failed"
    assert there(run)[0] == "whole"


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_policy_by_part(runs: KindRuns, run: Path, is_real: bool) -> None:
    """The newest keep their optimizer; each other one loses it by a job of its own, also of stock torch's."""
    result = apply(runs, {"optimizer": {"last": 1}}, dry_run=not is_real)
    assert (result["kept"], result["deleted"], result["dropped"]) == (4, 0, 2)
    assert result["dropped_bytes"] > 2 * 4 * 3000 * 4
    if not is_real:
        assert there(run) == ["whole"] * 4
        return
    # Formats are counted apart: stock's is the newest of its own.
    assert there(run) == ["weights", "weights", "whole", "whole"]
    made = runs.all(select(jobs).where(jobs.c.kind == "prune"))
    assert sorted(job.checkpoint_id for job in made) == [number_of(runs, 1), number_of(runs, 2)]
    assert {job.created_by for job in made} == {"retention:lean"}


def test_a_plan_says_what_each_loses(runs: KindRuns) -> None:
    """Those that have the part, and by how much; not what goes, is held, or has lost it already."""
    runs.do("prune", checkpoint_id=number_of(runs, 1))
    keep = Retention.from_dict({"optimizer": {"last": 1}, "parts": {"app.model.optim_head": {"last": 1}}})
    with runs.database.read() as connection:
        ((number, key),) = runs_of(connection, "main", "run")
        plan = plan_run(connection, number, key, keep, time.time())
        totals = retention_totals(connection, "main", "*", keep, time.time())
    lost = {one.step: (one.drops, one.dropped_bytes) for one in plan.dropped}
    size = 4 * 3000 * 4 + 2 * 4
    assert lost == {1: (("app.model.optim_head",), 28), 2: (("optimizer", "app.model.optim_head"), size + 28)}
    assert (totals.dropped, totals.dropped_bytes) == (2, size + 2 * 28)


def test_a_policy_waits_for_who_reads(runs: KindRuns, run: Path) -> None:
    """A checkpoint that another job is about keeps everything until the next round."""
    late = runs.submit("verify", checkpoint_id=number_of(runs, 1))
    with runs.database.write() as connection:
        connection.execute(update(jobs).where(jobs.c.id == late).values(not_before_seconds=1e10))
    result = apply(runs, {"optimizer": {"last": 1}})
    assert result["dropped"] == 1
    assert there(run)[:2] == ["whole", "weights"]


def test_what_cannot_be_dropped_is_not_tried_each_round(runs: KindRuns, run: Path) -> None:
    """A damaged file cannot be written anew, and a pin in the folder keeps all: one job each, however often
    the policy is applied; another one once the policy, or the checkpoint, was changed."""
    update_notes(PosixStore(run / "step-1"), lambda _: Notes(pinned=True))
    (file,) = (run / "step-2").glob("*.distcp")
    data = bytearray(file.read_bytes())
    file.write_bytes(bytes(byte ^ 1 for byte in data))
    assert apply(runs, {"optimizer": {"last": 1}})["dropped"] == 2

    def made() -> list[int]:
        return sorted(job.checkpoint_id for job in runs.all(select(jobs).where(jobs.c.kind == "prune")))

    def again() -> int:
        result = runs.do("retention", policy_id=policy.id).result
        assert result is not None
        return int(result["dropped"])

    one, two = number_of(runs, 1), number_of(runs, 2)
    (policy,) = runs.all(select(retention_policies))
    assert again() == 0
    assert made() == [one, two]
    save_mixed(run / "step-2", 2)
    runs.scan("main")
    assert again() == 1
    assert there(run)[:2] == ["whole", "weights"]
    with runs.database.write() as connection:
        connection.execute(update(retention_policies).values(updated_seconds=time.time()))
    assert again() == 1
    assert made() == [one, one, two, two]
