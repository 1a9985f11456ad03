"""Kinds of jobs that look at checkpoints: verify, stats, diff, scan; what they find, and where it is kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

import dcp
from dcp.conversion.run import convert
from dcp.demo.s3_server import S3Server
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.labelling.lineage import lineage_of
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, events, jobs, statistics, verifications
from dcp.server.security.principal import Principal
from tests.support.kind_runs import KindRuns


def state(step: int = 1) -> dict[str, object]:
    """A few tensors, one without a finite value, and a plain value."""
    return {
        "model": {"weight": torch.arange(600.0).reshape(20, 30) * step, "bias": torch.ones(7) / 3},
        "odd": torch.full((3,), float("inf")),
        "step": step,
    }


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """Two local roots; the first has two steps of a run."""
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=tmp_path / f"main/run/step-{step}", no_dist=True)
    (tmp_path / "other").mkdir()
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "other")}
    made = KindRuns(database, tmp_path / "work", roots)
    made.scan("main")
    return made


def kinds_of_events(runs: KindRuns) -> list[str]:
    """All kinds, in order."""
    return [row.kind for row in runs.all(select(events.c.kind).order_by(events.c.id))]


def flip(folder: Path) -> None:
    """One bit in the middle of the data."""
    path = next(folder.glob("*.distcp"))
    stamp = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_verify_says_good_and_damaged(runs: KindRuns, tmp_path: Path) -> None:
    """The verdict is kept with the checkpoint, the findings name no place, and events tell of it."""
    flip(tmp_path / "main/run/step-2")
    good, bad = runs.id("main", "run/step-1"), runs.id("main", "run/step-2")
    result = runs.do("verify", checkpoint_id=good).result
    assert result is not None and result["outcome"] == "good" and result["findings"] == []
    assert result["checked_bytes"] > 0 and result["tensors"] == 3
    before = runs.row("main", "run/step-2").version
    job = runs.do("verify", checkpoint_id=bad)
    assert job.state == "succeeded" and job.result is not None
    assert job.result["outcome"] == "damaged"
    assert str(tmp_path) not in json.dumps(job.result)
    assert runs.row("main", "run/step-1").verification == "good"
    row = runs.row("main", "run/step-2")
    assert (row.verification, row.version) == ("damaged", before + 1)
    assert "differ from what was committed" in row.problem and str(tmp_path) not in row.problem
    assert kinds_of_events(runs)[-2:] == ["checkpoint.verified", "checkpoint.damaged"]
    kept = runs.all(select(verifications).order_by(verifications.c.id))
    assert [(one.checkpoint_id, one.outcome) for one in kept] == [(good, "good"), (bad, "damaged")]
    assert len(runs.all(select(audit).where(audit.c.action == "checkpoint.verify"))) == 2


def test_verify_tells_which_have_the_same_tensors(runs: KindRuns, tmp_path: Path) -> None:
    """Of formats that keep no digests, too, since all is read: it stays when the root is scanned again, and
    goes with another content."""
    step = tmp_path / "main/run/step-1"
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "main/run/step-3", digests=True))
    dcp.convert(step, tmp_path / "main/export.safetensors", to="safetensors")
    runs.scan("main")
    names = ("run/step-1", "run/step-2", "export.safetensors")
    for name in names:
        assert runs.row("main", name).content_digest is None
        result = runs.do("verify", checkpoint_id=runs.id("main", name)).result
        assert result is not None and result["outcome"] == "good"
    runs.scan("main")
    found = [runs.row("main", name).content_digest for name in (*names, "run/step-3")]
    assert found[0] == found[2] == found[3] != found[1] and found[1] is not None
    with runs.database.read() as connection:
        also = lineage_of(connection, runs.id("main", "run/step-1")).also_in
    assert {node.key for node in also} == {"export.safetensors", "run/step-3"}
    dcp.save(state(9), checkpoint_id=step, no_dist=True)
    runs.scan("main")
    assert runs.row("main", "run/step-1").content_digest is None


def test_a_stray_file_is_told_and_is_no_damage(runs: KindRuns, tmp_path: Path) -> None:
    """Something else beside a checkpoint does not make it a bad one."""
    (tmp_path / "main/run/step-1/README").write_text("mine")
    result = runs.do("verify", checkpoint_id=runs.id("main", "run/step-1")).result
    assert result is not None and result["outcome"] == "good"
    assert [found["kind"] for found in result["findings"]] == ["stray-file"]


def test_a_verdict_on_replaced_content_changes_nothing(runs: KindRuns, tmp_path: Path) -> None:
    """What was saved anew, and found, since the plan is not what was verified."""
    runs.submit("verify", checkpoint_id=runs.id("main", "run/step-1"))
    for phase in ("plan", "task", "publish"):
        made = runs.claim()
        assert made is not None and made.phase == phase
        answer = runs.carry_out(made)
        if phase == "publish":
            dcp.save(state(9), checkpoint_id=tmp_path / "main/run/step-1", no_dist=True)
            runs.scan("main")
        runs.complete(made, answer)
    assert runs.row("main", "run/step-1").verification == "unverified"
    assert "checkpoint.verified" not in kinds_of_events(runs)


def test_what_vanished_fails_with_a_reason(runs: KindRuns, tmp_path: Path) -> None:
    """No verdict is made of bytes that are not there; the text names no place."""
    job_id = runs.submit("verify", checkpoint_id=runs.id("main", "run/step-1"))
    for path in (tmp_path / "main/run/step-1").iterdir():
        path.unlink()
    runs.drain()
    job = runs.job(job_id)
    assert job.state == "failed" and job.error is not None
    assert job.error["type"] == "GoneError" and str(tmp_path) not in job.error["detail"]
    assert runs.row("main", "run/step-1").verification == "unverified"


def test_statistics_are_kept_unless_of_a_part(runs: KindRuns) -> None:
    """Of all tensors they are kept with the checkpoint; infinities are null, since JSON has none."""
    number = runs.id("main", "run/step-1")
    part = runs.do("stats", checkpoint_id=number, only=["model.bias"]).result
    assert part is not None and [one["fqn"] for one in part["tensors"]] == ["model.bias"]
    assert runs.all(select(statistics)) == []
    result = runs.do("stats", checkpoint_id=number).result
    assert result is not None
    found = {one["fqn"]: one["statistics"] for one in result["tensors"]}
    assert found["model.weight"]["max"] == 599.0 and found["model.weight"]["count"] == 600
    assert found["model.weight"]["histogram"]["counts"]
    assert found["odd"]["infs"] == 3 and found["odd"]["max"] is None
    (kept,) = runs.all(select(statistics))
    assert kept.checkpoint_id == number and kept.result["total"] == result["total"]


def test_diff_over_roots_and_formats(runs: KindRuns, tmp_path: Path) -> None:
    """A safetensors file of one root against a checkpoint of another: equal ones, and what changed."""
    convert(
        tmp_path / "main/run/step-1", tmp_path / "other/w.safetensors", to="safetensors", executor="inline"
    )
    runs.scan("other")
    old, one, two = (runs.id("other", "w.safetensors"), *(runs.id("main", f"run/step-{n}") for n in (1, 2)))
    same = runs.do("diff", a=old, b=one).result
    assert same is not None and same["tensors"] == [] and same["equal_tensors"] == 3
    assert [(found["fqn"], found["kind"]) for found in same["objects"]] == [("step", "added")]
    result = runs.do("diff", a=old, b=two).result
    assert result is not None and not result["is_empty"]
    changed = {found["fqn"]: found for found in result["tensors"]}
    assert list(changed) == ["model.weight"]
    assert changed["model.weight"]["values"]["max_abs"] == 599.0
    assert result["bytes_read"] > 0


def test_scan_finds_what_is_new_and_what_is_gone(runs: KindRuns, tmp_path: Path) -> None:
    """As a job, of a root or of a folder; one of a place at a time."""
    dcp.save(state(3), checkpoint_id=tmp_path / "main/next/step-3", no_dist=True)
    first = runs.submit("scan", root="main")
    assert runs.submit("scan", root="main") == first
    runs.drain()
    result = runs.job(first).result
    assert result is not None and (result["found"], result["new"], result["vanished"]) == (3, 1, 0)
    for path in (tmp_path / "main/run/step-2").iterdir():
        path.unlink()
    (tmp_path / "main/run/step-2").rmdir()
    job = runs.do("scan", root="main", below="run")
    assert job.result is not None and job.result["vanished"] == 1
    assert runs.row("main", "run/step-2").state == "vanished"
    assert runs.row("main", "next/step-3").state == "committed"


@pytest.mark.parametrize("kind", ["verify", "stats", "diff", "convert", "delete", "scan"])
def test_a_key_for_other_roots_sees_nothing(kind: str, runs: KindRuns) -> None:
    """For it there is no such checkpoint, and no job is made."""
    stranger = Principal("stranger", frozenset({"read", "write", "convert", "delete"}), frozenset({"other"}))
    number = runs.id("main", "run/step-1")
    given: dict[str, dict[str, Any]] = {
        "verify": {"checkpoint_id": number},
        "stats": {"checkpoint_id": number},
        "diff": {"a": number, "b": number},
        "convert": {"checkpoint_id": number, "to": "torch", "target_root": "other", "target_key": "a.pt"},
        "delete": {"checkpoint_ids": [number]},
        "scan": {"root": "main"},
    }
    with pytest.raises(Exception, match="there is no") as raised:
        runs.submit(kind, stranger, **given[kind])
    assert isinstance(raised.value, MissingError) or getattr(raised.value, "status", 0) == 404
    assert runs.all(select(jobs)) == []


def test_kinds_on_s3(database: Database, s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """Verify, stats and diff read objects as they read files."""
    options = s3_server.storage_options
    for step in (1, 2):
        dcp.save(
            state(step), checkpoint_id=f"{s3_root}/run/step-{step}", storage_options=options, no_dist=True
        )
    runs = KindRuns(database, tmp_path / "work", {"s3": {"url": s3_root, "storage_options": options}})
    runs.do("scan", root="s3")
    one, two = runs.id("s3", "run/step-1"), runs.id("s3", "run/step-2")
    verified = runs.do("verify", checkpoint_id=one).result
    assert verified is not None and verified["outcome"] == "good" and verified["checked_bytes"] > 0
    described = runs.do("stats", checkpoint_id=one).result
    assert described is not None and described["total"]["count"] == 610
    compared = runs.do("diff", a=one, b=two).result
    assert compared is not None and [one["fqn"] for one in compared["tensors"]] == ["model.weight"]
    told = json.dumps([verified, described, compared])
    assert s3_root not in told and options["secret"] not in told
