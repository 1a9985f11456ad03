"""Jobs that inspect checkpoints: verify, digest, stats, diff, scan and drift, and the findings they store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcp
from tests.support.catalog_roots import age
from tests.support.databases import MakeDatabase
from tests.support.job_site import JobSite, RefusedError, flip_bit, running_jobs


def state(step: int) -> dict[str, object]:
    """Return tensors, one without finite values, and an object."""
    return {
        "model": {"weight": torch.arange(600.0).reshape(20, 30) * step, "bias": torch.ones(7) / 3},
        "odd": torch.full((3,), float("inf")),
        "step": step,
    }


@pytest.fixture
def site(make_database: MakeDatabase, tmp_path: Path) -> Iterator[JobSite]:
    """Start a catalog with two steps of a run in the first of two roots."""
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=tmp_path / f"main/run/step-{step}", no_dist=True)
    (tmp_path / "other").mkdir()
    with running_jobs(make_database(), tmp_path) as made:
        made.scan("main")
        yield made


def test_verify_stores_its_verdict(site: JobSite, tmp_path: Path) -> None:
    """The verdict is stored with the checkpoint; findings show no path."""
    flip_bit(tmp_path / "main/run/step-2")
    good, bad = site.id("main", "run/step-1"), site.id("main", "run/step-2")
    result = site.result("verify", checkpoint_id=good)
    assert (result["outcome"], result["findings"], result["tensors"]) == ("good", [], 3)
    assert result["checked_bytes"] > 0
    before = site.found("main", "run/step-2").etag
    result = site.result("verify", checkpoint_id=bad)
    assert result["outcome"] == "damaged" and str(tmp_path) not in json.dumps(result)
    assert site.found("main", "run/step-1").verification == "good"
    found = site.found("main", "run/step-2")
    assert found.verification == "damaged" and found.etag != before
    assert "differ from the committed bytes" in found.problem and str(tmp_path) not in found.problem
    assert [one["outcome"] for one in site.audited("checkpoint.verify")] == ["damaged", "good"]


def test_digests_find_equal_checkpoints(site: JobSite, tmp_path: Path) -> None:
    """Digests, also from verify, find checkpoints of any format with equal tensors until one changes."""
    step = tmp_path / "main/run/step-1"
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "main/run/step-3", digests=True))
    dcp.convert(step, tmp_path / "main/export.safetensors", to="safetensors")
    site.scan("main")
    one = site.id("main", "run/step-1")

    def also() -> set[str]:
        return {node["key"] for node in site.api.get(f"/checkpoints/{one}/lineage")["also_in"]}

    assert also() == set()
    for name, kind in (("run/step-1", "verify"), ("run/step-2", "digest"), ("export.safetensors", "digest")):
        site.result(kind, checkpoint_id=site.id("main", name))
    result = site.result("digest", checkpoint_id=site.id("main", "run/step-3"))
    assert (result["tensors"], result["bytes_read"]) == (3, 0)  # the manifest has the digests
    assert len(site.audited("checkpoint.digest")) == 3
    site.scan("main")
    assert also() == {"export.safetensors", "run/step-3"}
    dcp.save(state(9), checkpoint_id=step, no_dist=True)
    site.scan("main")
    assert also() == set()


def test_verdicts_on_replaced_content_are_dropped(site: JobSite, tmp_path: Path) -> None:
    """A verdict is dropped if a scan found other content since the data was read."""
    site.submit("verify", checkpoint_id=site.id("main", "run/step-1"))
    site.step("plan")
    site.step("task")
    made = site.next("publish")
    answer = site.worker.carry_out(made)
    dcp.save(state(9), checkpoint_id=tmp_path / "main/run/step-1", no_dist=True)
    site.scan("main")
    site.worker.complete(made, answer)
    assert site.found("main", "run/step-1").verification == "unverified"


@pytest.mark.parametrize("kind", ["diff", "drift"])
def test_a_comparison_restarts_if_a_checkpoint_is_replaced(site: JobSite, tmp_path: Path, kind: str) -> None:
    """The comparison fails in passing, and the next attempt compares the new content."""
    one, two = (site.found("main", f"run/step-{step}") for step in (1, 2))
    params = {"a": one.id, "b": two.id} if kind == "diff" else {"run_id": one.run_id, "points": 2}
    number = site.submit(kind, **params)
    site.step("plan")
    made, seen = site.next("task"), list[int]()

    def replace(done_bytes: int) -> None:
        if not seen:
            dcp.save(state(1), checkpoint_id=tmp_path / "main/run/step-2", no_dist=True)
        seen.append(done_bytes)

    answer = site.worker.carry_out(made, replace)
    assert seen and isinstance(answer, Exception), answer
    site.worker.complete(made, answer)
    site.worker.drain()
    job = site.job(number)
    assert job.state == "succeeded", job.error
    assert job.result["is_empty"] if kind == "diff" else job.result["steps"][0]["problem"] is None


def test_findings_survive_the_next_scan(site: JobSite, tmp_path: Path) -> None:
    """Verdict and statistics of a newly registered checkpoint survive a scan, and end with a new save."""
    key, path = "run/one-9.safetensors", tmp_path / "main/run/one-9.safetensors"
    for seconds in (None, 1_700_000_000.0):
        path.unlink(missing_ok=True)
        dcp.convert(tmp_path / "main/run/step-1", path, to="safetensors", drop_objects=True)
        if seconds is None:
            number = site.api.register("main", key)
            for kind in ("verify", "stats"):
                site.result(kind, checkpoint_id=number)
        else:
            age(path, seconds)  # so that only the modification time differs
        site.scan("main")
        stale = site.api.get(f"/checkpoints/{number}/statistics")["is_stale"]
        known = (site.found("main", key).verification, stale)
        assert known == (("good", False) if seconds is None else ("unverified", True))


def test_only_statistics_of_all_tensors_are_stored(site: JobSite) -> None:
    """Statistics are stored if computed for all tensors; infinities are null, because JSON has none."""
    number = site.id("main", "run/step-1")
    part = site.result("stats", checkpoint_id=number, only=["model.bias"])
    assert [one["fqn"] for one in part["tensors"]] == ["model.bias"]
    assert site.http.get(f"/api/v1/checkpoints/{number}/statistics").status_code == 404
    result = site.result("stats", checkpoint_id=number)
    found = {one["fqn"]: one["statistics"] for one in result["tensors"]}
    assert (found["model.weight"]["max"], found["model.weight"]["count"]) == (599.0, 600)
    assert found["model.weight"]["histogram"]["counts"]
    assert (found["odd"]["infs"], found["odd"]["max"]) == (3, None)
    assert site.api.get(f"/checkpoints/{number}/statistics")["total"] == result["total"]


def test_verifications_are_listed(site: JobSite, tmp_path: Path) -> None:
    """Verifications are listed, latest first, marked as current or not; a second request joins the job."""
    number, folder = site.id("main", "run/step-1"), tmp_path / "main/run/step-1"
    url = f"/api/v1/checkpoints/{number}/verifications"
    assert site.http.get(url).json() == {"items": []}
    first, second = site.http.post(url), site.http.post(url)
    assert (first.status_code, first.headers["location"]) == (202, second.headers["location"])
    assert site.http.get(first.headers["location"]).json()["kind"] == "verify"
    site.worker.drain()
    dcp.save(state(9), checkpoint_id=folder, no_dist=True)
    site.scan("main")
    flip_bit(folder)
    site.result("verify", checkpoint_id=number)
    items = site.http.get(url).json()["items"]
    assert [(one["outcome"], one["is_current"]) for one in items] == [("damaged", True), ("good", False)]
    assert "differ from the committed bytes" in items[0]["findings"][0]["message"]
    assert len(site.http.get(url, params={"limit": 1}).json()["items"]) == 1
    assert site.app.client("read").post(url).status_code == 403
    assert site.app.client("write", roots=["other"]).post(url).status_code == 404


def test_the_clean_up_removes_old_jobs(site: JobSite) -> None:
    """The clean-up keeps jobs that the catalog refers to, the newest job, and jobs that have not ended."""
    one = site.id("main", "run/step-1")
    referred, plain = site.submit("verify", checkpoint_id=one), site.submit("diff", a=one, b=one)
    site.worker.drain()
    waiting, newest = site.submit("stats", checkpoint_id=one), site.submit("scan", root="main")
    site.cancel(newest)
    site.app.work(site.app.service.clock() + 29 * 86_400, "clean-up")
    assert {job["id"] for job in site.jobs()} == {referred, plain, waiting, newest}
    site.app.work(site.app.service.clock() + 31 * 86_400, "clean-up")
    assert {job["id"] for job in site.jobs()} == {referred, waiting, newest}
    assert site.http.get(f"/api/v1/jobs/{plain}").status_code == 404


def test_drift_is_limited_to_run_and_root(site: JobSite, tmp_path: Path) -> None:
    """Drift of other runs is not returned, nor any drift to a key without the root; drift needs two steps."""
    for step in (1, 2):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / f"main/still/step-{step}", no_dist=True)
    site.scan("main")
    run, still = (site.found("main", f"{name}/step-1").run_id for name in ("run", "still"))
    site.result("drift", run_id=min(run, still), points=2)
    assert site.http.get(f"/api/v1/runs/{max(run, still)}/drift").status_code == 404
    stranger = site.app.client("read", roots=["other"])
    assert stranger.get(f"/api/v1/runs/{min(run, still)}/drift").status_code == 404
    with pytest.raises(RefusedError) as refused:
        site.submit("drift", run_id=run, min_step=2)
    assert refused.value.status == 409
