"""What is found out about a checkpoint that its trainer has registered just now outlives the next scan."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import select

import dcp
from dcp.server.catalog.contents.verifications import get_statistics, list_verifications
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.labelling.labels import Change
from dcp.server.database.engine import Database
from dcp.server.database.tables import events
from dcp.server.jobs.kinds.shared.deletion import delete_softly
from dcp.server.scanning.registering import Registration, register
from dcp.server.scanning.scanner import Scanner
from tests.support.catalog_roots import age
from tests.support.kind_runs import KindRuns

STATE = {"a": torch.arange(100.0)}


def _save_ours(path: Path) -> None:
    dcp.save(STATE, checkpoint_id=path, no_dist=True)


def _save_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(STATE, path)


@pytest.mark.parametrize(("key", "save"), [("run/step-1", _save_ours), ("run/one-1.safetensors", _save_file)])
def test_verified_before_the_next_scan(database: Database, tmp_path: Path, key: str, save: object) -> None:
    """Its verdict and its statistics are those of the checkpoint, before and after; it is told of once; and
    all of that is over when it is saved anew."""
    path = tmp_path / "main" / key
    save(path)  # type: ignore[operator]
    runs = KindRuns(database, tmp_path / "work", {"main": {"url": str(tmp_path / "main")}})
    number = register(database, runs.roots, Registration(root="main", key=key), actor="test").id
    assert number is not None
    for kind in ("verify", "stats"):
        assert runs.do(kind, checkpoint_id=number).state == "succeeded"

    def known() -> tuple[str, list[bool], bool]:
        with database.read() as connection:
            row = get_checkpoint(connection, number)
            current = [one.is_of(row) for one in list_verifications(connection, number)]
            statistics = get_statistics(connection, number)
        assert statistics is not None
        return row.verification, current, statistics.is_stale

    def scan(seconds: float) -> None:
        Scanner(database, runs.roots, clock=lambda: time.time() + seconds).scan("main")

    def told() -> list[object]:
        return runs.all(select(events.c.id).where(events.c.kind == "checkpoint.committed"))

    assert known() == ("good", [True], False)
    scan(10)  # when it is not young any more
    assert known() == ("good", [True], False)
    assert len(told()) == 1
    save(path)  # type: ignore[operator]
    age(path, time.time() + 20)  # so that it shows by times alone
    scan(40)
    assert known() == ("unverified", [False], True)
    assert len(told()) == 2


def test_deleted_while_it_was_young(database: Database, tmp_path: Path) -> None:
    """A scan that finds its bytes, which wait for the purge, does not bring it back."""
    _save_file(tmp_path / "main" / "run" / "one-1.safetensors")
    runs = KindRuns(database, tmp_path / "work", {"main": {"url": str(tmp_path / "main")}})
    runs.scan("main")
    number = runs.id("main", "run/one-1.safetensors")
    database.transact(
        lambda connection: delete_softly(connection, number, 60.0, Change(actor="test", now=time.time()))
    )
    Scanner(database, runs.roots, clock=lambda: time.time() + 10).scan("main")
    assert runs.row("main", "run/one-1.safetensors").state == "deleted"
