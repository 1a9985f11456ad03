"""Contract of all kinds of jobs: lost phases, S3, missing and damaged data, hidden and read-only roots."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.service.jobs.conftest import check_target
from tests.support.databases import MakeDatabase
from tests.support.job_site import JobSite, RefusedError, flip_bit, running_jobs
from tests.support.s3 import S3Server, raw_s3
from tests.support.with_optimizer import save_apart

READERS = ("verify", "stats", "diff", "drift")
WRITERS = ("safetensors", "dcp", "torch", "merge")
ALL = (*READERS, *WRITERS, "delete", "purge", "prune", "scan")


def job_params(site: JobSite, case: str) -> tuple[str, dict[str, Any]]:
    """Return kind and parameters of a job for ``run/step-5``."""
    one = site.found("main", "run/step-5")
    to = {"target_root": "export", "target_key": f"made/{case}"}
    if case in ("safetensors", "dcp", "torch"):
        key = {"safetensors": "x.safetensors", "dcp": "x", "torch": "x.pt"}[case]
        return "convert", {"checkpoint_id": one.id, "to": case, "target_root": "export", "target_key": key}
    return case, {
        "diff": {"a": one.id, "b": one.id},
        "drift": {"run_id": one.run_id},
        "merge": {"sources": [one.id], "only": ["weight"], "to": "dcp", **to},
        "delete": {"checkpoint_ids": [one.id], "grace_seconds": 0},
        "scan": {"root": "main"},
    }.get(case, {"checkpoint_id": one.id})


def submit(site: JobSite, case: str) -> int:
    """Submit a job, after the steps that its kind requires."""
    if case == "purge":
        number = site.id("main", "run/step-5")
        site.http.delete(f"/api/v1/checkpoints/{number}", params={"grace_seconds": 0}).raise_for_status()
    kind, params = job_params(site, case)
    return site.submit(kind, **params)


def lose_every_phase(site: JobSite, number: int) -> set[str]:
    """Run the job and lose the first attempt of each phase after its work; return the lost phases."""
    lost: set[str] = set()
    while (made := site.worker.claim()) is not None:
        answer = site.worker.carry_out(made)
        assert not isinstance(answer, Exception), answer
        if made.job.id == number and made.phase not in lost:
            lost.add(made.phase)
            site.lose(made)
        else:
            site.worker.complete(made, answer)
    return lost


@pytest.mark.parametrize(
    "case",
    [
        *("verify", "safetensors", "merge", "purge", "prune", "scan"),
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in ("stats", "diff", "dcp")),
    ],
)
def test_jobs_take_effect_once_despite_lost_phases(
    case: str, local: JobSite, tmp_path: Path, state: dict[str, Any]
) -> None:
    """A job has its effect once, although workers die after the work of each phase and before its record."""
    if case == "prune":
        shutil.rmtree(tmp_path / "main/run/step-5")
        save_apart(tmp_path / "main/run/step-5", 5)
        local.scan("main")
    number = submit(local, case)
    lost = lose_every_phase(local, number)
    assert lost == {"plan", "task", "publish"}
    job = local.job(number)
    assert job.state == "succeeded", job.error
    if case in ("safetensors", "dcp"):
        check_target(local, {"safetensors": "x.safetensors", "dcp": "x"}[case], job.result)
    elif case == "purge":
        assert local.found("main", "run/step-5").state == "purged"
        assert not (tmp_path / "main/run/step-5").exists()
    elif case in ("verify", "prune"):
        assert len(local.audited(f"checkpoint.{case}")) == 1


def test_job_kinds_on_s3(on_s3: JobSite, s3_server: S3Server, s3_root: str, state: dict[str, Any]) -> None:
    """Jobs read and write S3, leave no temporary object, and show neither bucket nor secret."""
    options, texts, read = s3_server.storage_options, [], {}
    with raw_s3(s3_server) as raw:
        for case in ("verify", "stats", "diff", *WRITERS):
            number = submit(on_s3, case)
            lost = lose_every_phase(on_s3, number) if case in ("safetensors", "dcp") else set()
            on_s3.worker.drain()
            job = on_s3.job(number)
            assert job.state == "succeeded", job.error
            texts.append(json.dumps([job.result, job.params]))
            if case in ("safetensors", "dcp", "torch"):
                key = job.params["target_key"]
                check_target(on_s3, key, job.result)
                assert lost in (set(), {"plan", "task", "publish"})
                assert not [name for name in raw.list(f"{s3_root}/export") if ".tmp-" in name]
                read[case] = dcp.read(f"{s3_root}/export/{key}", storage_options=options)["weight"]
                made = on_s3.id("export", key)
                on_s3.http.delete(f"/api/v1/checkpoints/{made}", params={"grace_seconds": 0})
                assert on_s3.result("purge", checkpoint_id=made)["outcome"] == "deleted"
                on_s3.http.delete(f"/api/v1/checkpoints/{made}")
        raw.write(f"{s3_root}/main/run/notes.txt", b"mine")
        on_s3.worker.drain()
        submit(on_s3, "purge")
        on_s3.worker.drain()
        assert list(raw.list(f"{s3_root}/main")) == ["run/notes.txt"]
    assert all(torch.equal(value, state["weight"]) for value in read.values()) and len(read) == 3
    assert not [text for text in texts if s3_root in text or options["secret"] in text]


@pytest.mark.parametrize(
    ("case", "is_damaged"), [("verify", False), ("merge", False), *((case, True) for case in WRITERS[:2])]
)
def test_missing_or_damaged_data_fails_with_a_reason(
    case: str, is_damaged: bool, local: JobSite, tmp_path: Path
) -> None:
    """A job on missing or damaged data fails for good, writes no target and shows no path."""
    number, folder = submit(local, case), tmp_path / "main/run/step-5"
    if is_damaged:
        flip_bit(folder)
    else:
        for path in folder.iterdir():
            path.unlink()
    local.worker.drain()
    job = local.job(number)
    assert (job.state, job.error["is_retryable"]) == ("failed", False)
    assert str(tmp_path) not in job.error["detail"] and (not is_damaged or "damaged" in job.error["detail"])
    assert [path for path in (tmp_path / "export").rglob("*") if path.is_file()] == []
    assert local.found("main", "run/step-5").verification == "unverified"


def test_jobs_on_hidden_roots_get_404(local: JobSite) -> None:
    """A job on a checkpoint, root or run that the key may not see is refused with 404."""
    stranger = local.app.client("read", "write", "convert", "delete", roots=["export"])
    for case in ALL:
        kind, params = job_params(local, case)
        with pytest.raises(RefusedError, match="not found") as refused:
            local.submit(kind, stranger, **params)
        assert refused.value.status == 404, case
    assert local.jobs() == []


def test_read_only_roots_refuse_changes(make_database: MakeDatabase, tmp_path: Path) -> None:
    """A read-only root refuses deletion, pruning, targets and policies."""
    save_apart(tmp_path / "main/run/step-5", 5)
    roots = {"main": {"url": str(tmp_path / "main"), "readonly": True}}
    with running_jobs(make_database(), tmp_path, roots) as site:
        site.scan("main")
        for case in ("delete", "prune", "safetensors", "merge"):
            kind, params = job_params(site, case)
            given = params | ({"target_root": "main"} if "target_root" in params else {})
            with pytest.raises(RefusedError, match="read-only"):
                site.submit(kind, **given)
        number = site.id("main", "run/step-5")
        assert site.http.delete(f"/api/v1/checkpoints/{number}").status_code == 403
        policy = {"name": "p", "root": "main", "run_glob": "*", "keep": {"last": 1}}
        assert site.http.post("/api/v1/retention/policies", json=policy).status_code == 403
