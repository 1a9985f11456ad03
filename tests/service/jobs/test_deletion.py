"""Deletion, restoring, purging and pruning: only files that the catalog knows are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcp
from tests.support.catalog_roots import age
from tests.support.databases import MakeDatabase
from tests.support.job_site import JobSite, RefusedError, running_jobs
from tests.support.with_optimizer import present_parts, save_apart, save_mixed, save_stock, stock_sees

_STATE = {"weight": torch.arange(600.0), "bias": torch.ones(70), "step": 5}
_KEYS = ("run/step-5", "run/stock-6", "run/model-7.pt", "run/one-8.safetensors", "run/shards-9")


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create checkpoints, with one of each format."""
    run = tmp_path_factory.mktemp("run")
    for step in (4, 5):
        dcp.save(_STATE, checkpoint_id=run / f"step-{step}", no_dist=True)
    torch.distributed.checkpoint.save(_STATE, checkpoint_id=run / "stock-6", no_dist=True)
    torch.save(_STATE, run / "model-7.pt")
    dcp.convert(run / "step-5", run / "one-8.safetensors", to="safetensors", drop_objects=True)
    dcp.convert(run / "step-5", run / "shards-9", to="safetensors", shard_bytes=100, drop_objects=True)
    return run


@pytest.fixture
def site(make_database: MakeDatabase, tmp_path: Path, formats: Path) -> Iterator[JobSite]:
    """Start a catalog with these checkpoints as a run."""
    shutil.copytree(formats, tmp_path / "main/run")
    with running_jobs(make_database(), tmp_path) as made:
        made.scan("main")
        yield made


def delete(site: JobSite, key: str, grace_seconds: float = 0.0) -> int:
    """Delete a checkpoint in the catalog, and return its id."""
    number = site.id("main", key)
    query = {"grace_seconds": grace_seconds}
    answer = site.http.delete(f"/api/v1/checkpoints/{number}", params=query)
    assert answer.is_success, answer.text
    return number


def contents(path: Path) -> dict[Path, bytes]:
    """Return the bytes of a file, or of all files below a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {file: file.read_bytes() for file in files if file.is_file()}


_SOME = [_KEYS[0], _KEYS[4], *(pytest.param(key, marks=pytest.mark.exhaustive) for key in _KEYS[1:4])]


@pytest.mark.parametrize("key", _SOME)
def test_deletions_keep_the_bytes_until_the_purge(key: str, site: JobSite, tmp_path: Path) -> None:
    """A deletion keeps the bytes until the purge, and the purge deletes these alone."""
    path, run = tmp_path / "main" / key, tmp_path / "main/run"
    others = {file: data for file, data in contents(run).items() if not file.is_relative_to(path)}
    number = delete(site, key)
    site.scan("main")
    assert site.found("main", key).state == "deleted" and path.exists(), "a scan does not bring it back"
    site.api.post(f"/checkpoints/{number}/restore")
    assert site.found("main", key).state == "committed"
    delete(site, key)
    result = site.result("purge", checkpoint_id=number)
    assert result["outcome"] == "deleted" and result["bytes"] > 0
    assert not path.exists() and contents(run) == others
    site.scan("main")
    assert site.found("main", key).state == "purged"
    assert len(site.audited("checkpoint.purge", number)) == 1


@pytest.mark.parametrize("key", _SOME)
def test_a_purge_keeps_a_new_save(key: str, site: JobSite, tmp_path: Path) -> None:
    """A purge does not delete another checkpoint saved under the same key."""
    path = tmp_path / "main" / key
    number = delete(site, key)
    values = {"weight": torch.zeros(700), "step": 6}
    if key == "run/step-5":
        dcp.save(values, checkpoint_id=path, no_dist=True)
    elif key == "run/stock-6":
        torch.distributed.checkpoint.save(values, checkpoint_id=path, no_dist=True)
    elif path.is_file():
        torch.save(values, path)
    else:
        (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    before = contents(path)
    assert site.result("purge", checkpoint_id=number)["outcome"] == "replaced"
    assert contents(path) == before
    assert site.found("main", key).state == "vanished"


@pytest.mark.parametrize("key", ["run/model-7.pt", "run/shards-9"])
def test_a_purge_keeps_files_newer_than_its_plan(key: str, site: JobSite, tmp_path: Path) -> None:
    """A purge does not delete files written after its plan, although names and sizes are equal."""
    number = delete(site, key)
    job = site.submit("purge", checkpoint_id=number)
    site.step("plan")
    before = contents(tmp_path / "main" / key)
    for file, data in before.items():
        file.write_bytes(data)
        age(file)
    site.worker.drain()
    assert site.job(job).result["outcome"] == "replaced"
    assert contents(tmp_path / "main" / key) == before
    assert site.found("main", key).state == "vanished"


def test_pins_and_aliases_prevent_deletion(site: JobSite) -> None:
    """Pinned checkpoints and targets of aliases are deleted neither by a request nor by a job."""
    four, five, other = (site.found("main", key) for key in ("run/step-4", "run/step-5", "run/model-7.pt"))
    site.http.put(f"/api/v1/checkpoints/{four.id}/pin").raise_for_status()
    alias = f"/api/v1/runs/{five.run_id}/aliases/best"
    site.http.put(alias, json={"checkpoint_id": five.id}).raise_for_status()
    for one, why in ((four, "pinned"), (five, "best")):
        answer = site.http.delete(f"/api/v1/checkpoints/{one.id}")
        assert answer.status_code == 409 and why in answer.text
    site.result("delete", checkpoint_ids=[four.id, five.id, other.id], grace_seconds=100)
    keys = ("run/step-4", "run/step-5", "run/model-7.pt")
    assert [site.found("main", key).state for key in keys] == ["committed", "committed", "deleted"]


def test_a_pin_of_the_trainer_is_respected(site: JobSite, tmp_path: Path) -> None:
    """A pin stored by the trainer prevents prune and purge; the purge restores the catalog's entry."""
    with dcp.CheckpointManager(tmp_path / "main/trained", mode="sync", no_dist=True) as manager:
        manager.save(1, {**_STATE, "optimizer": {"state": {"0": {"m": torch.ones(9)}}}}, force=True)
        manager.pin(1)
    site.scan("main")
    key = "trained/step-00000001"
    number = site.id("main", key)
    if site.found("main", key).is_pinned:
        site.http.delete(f"/api/v1/checkpoints/{number}/pin").raise_for_status()
    before = contents(tmp_path / "main" / key)
    assert site.result("prune", checkpoint_id=number)["outcome"] == "pinned"
    assert contents(tmp_path / "main" / key) == before
    delete(site, key)
    assert site.result("purge", checkpoint_id=number)["outcome"] == "pinned"
    found = site.found("main", key)
    assert found.state == "committed" and "pinned" in found.problem
    assert (tmp_path / "main" / key / "manifest.msgpack").exists()


def test_restoring_cancels_a_queued_purge(site: JobSite) -> None:
    """A purge waits for the grace period; restoring cancels a queued purge, and fails during a purge."""
    number = delete(site, "run/step-5", grace_seconds=1000)
    with pytest.raises(RefusedError, match="grace"):
        site.submit("purge", checkpoint_id=number)
    waiting = site.submit("purge", checkpoint_id=number, now=True)
    site.api.post(f"/checkpoints/{number}/restore")
    assert site.job(waiting).state == "cancelled"
    site.worker.drain()
    assert site.found("main", "run/step-5").state == "committed"
    delete(site, "run/step-5")
    site.submit("purge", checkpoint_id=number)
    made = site.next("plan")
    answer = site.http.post(f"/api/v1/checkpoints/{number}/restore")
    assert answer.status_code == 409 and "being purged" in answer.text
    site.worker.complete(made, site.worker.carry_out(made))
    site.worker.drain()
    assert site.found("main", "run/step-5").state == "purged"
    assert site.http.post(f"/api/v1/checkpoints/{number}/restore").status_code == 409


# -- pruning -------------------------------------------------------------------------------------------------

STEPS = {1: save_apart, 2: save_mixed, 3: save_stock, 4: save_apart}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save a run with optimizer state, in each layout."""
    for step, save in STEPS.items():
        save(tmp_path / f"main/run/step-{step}", step)
    return tmp_path / "main/run"


@pytest.fixture
def lean(make_database: MakeDatabase, tmp_path: Path, run: Path) -> Iterator[JobSite]:
    """Start a catalog of this run."""
    with running_jobs(make_database(), tmp_path) as made:
        made.scan("main")
        yield made


def parts_left(run: Path) -> list[str]:
    """Return the remaining parts of each step, and check that stock torch sees the same parts."""
    found = [present_parts(run / f"step-{step}", step) for step in STEPS]
    assert [stock_sees(run / f"step-{step}", step) for step in STEPS] == found
    return found


def numbers(site: JobSite) -> list[int]:
    """Return the ids by step."""
    return [site.id("main", f"run/step-{step}") for step in STEPS]


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (2, 3))])
def test_a_job_drops_the_optimizer(lean: JobSite, run: Path, step: int) -> None:
    """A pruned checkpoint loads and verifies, and keeps its id in the catalog with a new size."""
    before = lean.found("main", f"run/step-{step}")
    result = lean.result("prune", checkpoint_id=before.id)
    assert (result["outcome"], result["parts"][0]["name"]) == ("dropped", "optimizer")
    assert parts_left(run)[step - 1] == "weights"
    assert lean.result("verify", checkpoint_id=before.id)["outcome"] == "good"
    after = lean.found("main", f"run/step-{step}")
    assert (after.id, after.state, after.step) == (before.id, "committed", step)
    assert after.bytes == sum(path.stat().st_size for path in (run / f"step-{step}").glob("*.distcp"))
    assert before.bytes - after.bytes == result["freed_bytes"] > 0
    assert after.provenance["dropped"][0]["name"] == "optimizer"
    assert [one["freed_bytes"] for one in lean.audited("checkpoint.prune")] == [result["freed_bytes"]]
    assert lean.result("prune", checkpoint_id=before.id)["outcome"] == "absent"


def test_held_checkpoints_are_not_pruned(lean: JobSite, run: Path) -> None:
    """A pinned, aliased, used or newly saved checkpoint is not pruned."""
    pinned, named, used, _ = numbers(lean)
    run_id = lean.found("main", "run/step-1").run_id
    lean.http.put(f"/api/v1/checkpoints/{pinned}/pin").raise_for_status()
    lean.http.put(f"/api/v1/runs/{run_id}/aliases/best", json={"checkpoint_id": named}).raise_for_status()
    lean.submit("verify", checkpoint_id=used)
    for number, why in ((pinned, "is pinned"), (named, "has the alias 'best'"), (used, "a job is using")):
        with pytest.raises(RefusedError, match=why):
            lean.submit("prune", checkpoint_id=number)
    save_apart(run / "step-4", 4)  # not the checkpoint that the catalog knows
    assert lean.do("prune", checkpoint_id=numbers(lean)[3]).state == "failed"
    assert parts_left(run) == ["whole"] * 4


@pytest.mark.parametrize("hold", ["pin", "alias"])
def test_a_late_pin_or_alias_stops_a_prune(lean: JobSite, run: Path, hold: str) -> None:
    """A pin or an alias set after the plan of a prune stops its task."""
    before = lean.found("main", "run/step-1")
    job = lean.submit("prune", checkpoint_id=before.id)
    made = lean.next("plan")
    lean.worker.complete(made, lean.worker.carry_out(made))
    if hold == "pin":
        lean.http.put(f"/api/v1/checkpoints/{before.id}/pin").raise_for_status()
    else:
        path = f"/api/v1/runs/{before.run_id}/aliases/best"
        lean.http.put(path, json={"checkpoint_id": before.id}).raise_for_status()
    lean.worker.drain()
    found = lean.job(job)
    assert found.state == "failed" and "cannot be dropped" in str(found.error)
    assert parts_left(run) == ["whole"] * 4


def test_policies_prune_the_optimizer(lean: JobSite, run: Path) -> None:
    """A policy for the optimizer prunes all but the newest of each format by jobs; a dry run prunes none."""
    keep = {"optimizer": {"last": 1}}
    given = {"name": "lean", "root": "main", "run_glob": "*", "keep": keep, "grace_seconds": 0}
    number = int(lean.api.post("/retention/policies", given)["id"])
    for is_real in (False, True):
        result = lean.result("retention", policy_id=number, dry_run=not is_real)
        assert (result["kept"], result["deleted"], result["dropped"]) == (4, 0, 2)
        assert result["dropped_bytes"] > 2 * 4 * 3000 * 4
        # formats count separately: the stock checkpoint is the newest of its format
        assert parts_left(run) == (["weights", "weights", "whole", "whole"] if is_real else ["whole"] * 4)
        made = lean.jobs(kind="prune")
        assert sorted(job["checkpoint_id"] for job in made) == (numbers(lean)[:2] if is_real else [])
    assert {job["created_by"] for job in made} == {"retention:lean"}
