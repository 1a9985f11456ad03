"""Deleting with grace, restoring, purging: what is removed is what the catalog knows, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select, update

import dcp
from dcp.conversion.run import convert
from dcp.demo.s3_server import S3Server
from dcp.server.catalog.errors import StateError
from dcp.server.catalog.labelling.aliases import set_alias
from dcp.server.catalog.labelling.labels import Change, set_pinned
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, checkpoints, events, jobs
from dcp.server.jobs.kinds.shared.deletion import delete_softly, restore
from dcp.server.problems import ForbiddenError
from dcp.steps.notes import update_notes
from dcp.storage.stores.posix.store import PosixStore
from tests.support.kind_runs import KindRuns
from tests.support.s3 import raw_s3

_STATE = {"weight": torch.arange(600.0), "bias": torch.ones(70), "step": 5}


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """A run with a checkpoint of each format."""
    run = tmp_path / "main/run"
    for step in (4, 5):
        dcp.save(_STATE, checkpoint_id=run / f"step-{step}", no_dist=True)
    torch.distributed.checkpoint.save(_STATE, checkpoint_id=run / "stock-6", no_dist=True)
    torch.save(_STATE, run / "model-7.pt")
    convert(run / "step-5", run / "one-8.safetensors", to="safetensors", executor="inline")
    convert(run / "step-5", run / "shards-9", to="safetensors", shard_bytes=100, executor="inline")
    made = KindRuns(database, tmp_path / "work", {"main": {"url": str(tmp_path / "main")}})
    made.scan("main")
    return made


_KEYS = ("run/step-5", "run/stock-6", "run/model-7.pt", "run/one-8.safetensors", "run/shards-9")


def delete(runs: KindRuns, key: str, grace_seconds: float = 0.0) -> int:
    """Mark it."""
    number = runs.id("main", key)
    runs.database.transact(
        lambda connection: delete_softly(
            connection, number, grace_seconds, Change(actor="test", now=time.time())
        )
    )
    return number


def bring_back(runs: KindRuns, number: int) -> None:
    """Restore it."""
    runs.database.transact(
        lambda connection: restore(connection, number, Change(actor="test", now=time.time()))
    )


@pytest.mark.parametrize("key", _KEYS)
def test_deleted_restored_and_purged(key: str, runs: KindRuns, tmp_path: Path) -> None:
    """Its bytes stay until the purge, which takes all of it and nothing of the others."""
    path = tmp_path / "main" / key
    others = sorted(other for other in (tmp_path / "main/run").iterdir() if other != path)
    number = delete(runs, key)
    assert runs.row("main", key).state == "deleted" and path.exists()
    runs.scan("main")
    assert runs.row("main", key).state == "deleted"  # a scan does not bring it back
    bring_back(runs, number)
    assert runs.row("main", key).state == "committed"
    delete(runs, key)
    job = runs.do("purge", checkpoint_id=number)
    assert job.state == "succeeded" and job.result is not None, job.error
    assert job.result["outcome"] == "deleted" and job.result["bytes"] > 0
    assert runs.row("main", key).state == "purged" and not path.exists()
    assert sorted((tmp_path / "main/run").iterdir()) == others
    runs.scan("main")
    assert runs.row("main", key).state == "purged"
    told = runs.all(select(audit.c.action).where(audit.c.target == f"checkpoint:{number}"))
    assert {"checkpoint.state", "checkpoint.purge"} <= {one.action for one in told}
    kinds = [one.kind for one in runs.all(select(events).where(events.c.checkpoint_id == number))]
    assert kinds.count("checkpoint.deleted") == 2


def test_purge_on_s3(database: Database, s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """Objects of a checkpoint and of a single file; what lies beside them stays."""
    options = s3_server.storage_options
    dcp.save(_STATE, checkpoint_id=f"{s3_root}/run/step-5", storage_options=options, no_dist=True)
    convert(
        f"{s3_root}/run/step-5",
        f"{s3_root}/run/one-8.safetensors",
        to="safetensors",
        storage_options=options,
        target_options=options,
        executor="inline",
    )
    runs = KindRuns(database, tmp_path / "work", {"main": {"url": s3_root, "storage_options": options}})
    runs.scan("main")
    with raw_s3(s3_server) as raw:
        raw.write(f"{s3_root}/run/notes.txt", b"mine")
        for key in ("run/step-5", "run/one-8.safetensors"):
            number = delete(runs, key)
            assert runs.do("purge", checkpoint_id=number).state == "succeeded"
            assert runs.row("main", key).state == "purged"
        assert list(raw.list(s3_root)) == ["run/notes.txt"]


@pytest.mark.parametrize("key", _KEYS)
def test_what_was_saved_anew_stays(key: str, runs: KindRuns, tmp_path: Path) -> None:
    """Something else under the key than what was deleted is not purged."""
    path = tmp_path / "main" / key
    number = delete(runs, key)
    time.sleep(0.05)
    state = {"weight": torch.zeros(700), "step": 6}
    if key == "run/step-5":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    elif key == "run/stock-6":
        torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)
    elif path.is_file():
        torch.save(state, path)
    else:
        (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    # As if a scan had looked before it could change unseen; or not, and then times tell.
    fingerprint = None if key in ("run/stock-6", "run/model-7.pt", "run/shards-9") else "known before"
    with runs.database.write() as connection:
        connection.execute(
            update(checkpoints).where(checkpoints.c.id == number).values(fingerprint=fingerprint)
        )
    left = sorted(file.name for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    job = runs.do("purge", checkpoint_id=number)
    assert job.state == "succeeded" and job.result is not None and job.result["outcome"] == "replaced"
    assert left == (sorted(file.name for file in path.iterdir()) if path.is_dir() else path.stat().st_size)
    assert runs.row("main", key).state == "vanished"


def test_a_pin_of_the_trainer_is_respected(runs: KindRuns, tmp_path: Path) -> None:
    """Pinned in its folder, the bytes stay, and the checkpoint is there again."""
    from dataclasses import replace

    update_notes(PosixStore(tmp_path / "main/run/step-5"), lambda notes: replace(notes, pinned=True))
    number = delete(runs, "run/step-5")
    result = runs.do("purge", checkpoint_id=number).result
    assert result is not None and result["outcome"] == "pinned"
    row = runs.row("main", "run/step-5")
    assert row.state == "committed" and "pinned" in row.problem
    assert (tmp_path / "main/run/step-5/manifest.msgpack").exists()


def test_pins_and_aliases_keep_a_checkpoint(runs: KindRuns) -> None:
    """Neither a request nor a job deletes what is pinned, or what an alias names."""
    four, five = runs.id("main", "run/step-4"), runs.id("main", "run/step-5")
    run = runs.row("main", "run/step-4").run_id
    with runs.database.write() as connection:
        set_pinned(connection, four, True, Change(actor="test"))
        set_alias(connection, run, "best", five, Change(actor="test"))
    for number, why in ((four, "pinned"), (five, "best")):
        with pytest.raises(StateError, match=why), runs.database.write() as connection:
            delete_softly(connection, number, 0.0, Change(actor="test", now=1.0))
    other = runs.id("main", "run/model-7.pt")
    job = runs.do("delete", checkpoint_ids=[four, five, other], grace_seconds=100)
    assert job.state == "succeeded"
    rows = {key: runs.row("main", key) for key in ("run/step-4", "run/step-5", "run/model-7.pt")}
    assert [row.state for row in rows.values()] == ["committed", "committed", "deleted"]
    gone = rows["run/model-7.pt"]
    assert gone.purge_after_seconds - gone.deleted_seconds == pytest.approx(100)


def test_grace_and_restoring_beside_a_purge(runs: KindRuns) -> None:
    """Not before the grace is over; one that waits is cancelled by restoring, one that has begun is not."""
    number = delete(runs, "run/step-5", grace_seconds=1000)
    with pytest.raises(StateError, match="grace"):
        runs.submit("purge", checkpoint_id=number)
    waiting = runs.submit("purge", checkpoint_id=number, now=True)
    bring_back(runs, number)
    assert runs.job(waiting).state == "cancelled"
    runs.drain()
    assert runs.row("main", "run/step-5").state == "committed"
    delete(runs, "run/step-5")
    begun = runs.submit("purge", checkpoint_id=number)
    made = runs.claim()
    assert made is not None and made.job.id == begun
    with pytest.raises(StateError, match="being purged"):
        bring_back(runs, number)
    runs.complete(made, runs.carry_out(made))
    runs.drain()
    assert runs.row("main", "run/step-5").state == "purged"
    with pytest.raises(StateError):
        bring_back(runs, number)


@pytest.mark.parametrize("key", ["run/step-5", "run/shards-9", "run/model-7.pt"])
def test_a_purge_that_is_lost_is_finished(key: str, runs: KindRuns, tmp_path: Path) -> None:
    """Killed in the middle or behind its work, the next attempt finds what is left."""
    number = delete(runs, key)
    job_id = runs.submit("purge", checkpoint_id=number)
    made = runs.claim()
    assert made is not None
    runs.complete(made, runs.carry_out(made))
    path = tmp_path / "main" / key
    name = "manifest.msgpack" if key == "run/step-5" else "model.safetensors.index.json"
    if key == "run/shards-9":
        (path / name).unlink()  # as far as it came
    made = runs.claim()
    assert made is not None and made.phase == "task"
    assert not isinstance(runs.carry_out(made), Exception)
    runs.complete(made, ConnectionError("the worker is gone"))
    runs.drain()
    assert runs.job(job_id).state == "succeeded" and not path.exists()
    assert runs.row("main", key).state == "purged"


@pytest.mark.parametrize("key", ["run/model-7.pt", "run/one-8.safetensors", "run/shards-9"])
def test_an_export_of_the_same_size_stays(key: str, runs: KindRuns, tmp_path: Path) -> None:
    """Written between the plan of a purge and its work, or its next attempt: other bytes, all else alike."""
    number = delete(runs, key)
    job_id = runs.submit("purge", checkpoint_id=number)
    made = runs.claim()
    assert made is not None and made.phase == "plan"
    runs.complete(made, runs.carry_out(made))
    path = tmp_path / "main" / key
    files = {file: file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])}
    time.sleep(0.05)
    for file, data in files.items():
        file.write_bytes(data)
    runs.drain()
    job = runs.job(job_id)
    assert job.state == "succeeded" and job.result is not None and job.result["outcome"] == "replaced"
    assert {file: file.read_bytes() for file in files} == files
    assert runs.row("main", key).state == "vanished"  # until a scan finds the new one


def test_a_root_that_is_only_read(runs: KindRuns) -> None:
    """Nothing of it is deleted, nor purged."""
    number = delete(runs, "run/step-5")
    other = runs.id("main", "run/step-4")
    url = runs.settings.roots["main"].url
    frozen = KindRuns(runs.database, runs.folder, {"main": {"url": url, "readonly": True}})
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("purge", {"checkpoint_id": number}),
        ("delete", {"checkpoint_ids": [other]}),
    ]
    for kind, params in wanted:
        with pytest.raises(ForbiddenError, match="read-only"):
            frozen.submit(kind, **params)
    assert runs.all(select(jobs)) == []
