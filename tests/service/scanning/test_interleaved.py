"""Scans and registrations during other changes: replaced roots, concurrent scans, concurrent writers."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Engine, event

import dcp
from tests.support.catalog import API, Catalog
from tests.support.catalog_roots import write_manifest
from tests.support.lost_roots import PLACES, put_back
from tests.support.statements import most_rows_inserted, statements_to


@pytest.mark.parametrize("replace", PLACES)
def test_a_root_that_is_replaced_during_a_scan(catalog: Catalog, replace: Callable[[Path], None]) -> None:
    """A root replaced during a scan loses nothing and gains nothing of the other folder."""
    keys = {f"run-{number % 50:02}/step-{number}" for number in range(60)}
    for key in keys:
        catalog.save(key)
    catalog.scan()
    new = {f"run-x{number % 50:02}/new-{number}" for number in range(60)}
    for key in new:
        catalog.save(key)
    replaced: list[str] = []

    def on_statement(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO checkpoints") and not replaced:
            replaced.append(statement)  # the first new checkpoints are being written
            replace(catalog.place(""))

    event.listen(Engine, "before_cursor_execute", on_statement)
    order = {"kind": "scan", "params": {"root": "main"}}
    assert catalog.http.post(f"{API}/jobs", json=order).status_code == 202
    try:
        for _ in ("plan", "task"):  # a further attempt would begin in the other folder
            made = catalog.worker.claim()
            assert made is not None
            catalog.worker.complete(made, catalog.worker.carry_out(made))
    finally:
        event.remove(Engine, "before_cursor_execute", on_statement)
    assert replaced
    found = catalog.states()
    assert keys <= found.keys() <= keys | new and {*found.values()} == {"committed"}
    put_back(catalog.place(""))
    report = catalog.scan()
    assert (report["vanished"], report["lost"]) == (0, 0)
    assert catalog.states() == dict.fromkeys(sorted(keys | new), "committed")


def test_an_interrupted_scan_is_completed(catalog: Catalog) -> None:
    """An interrupted scan leaves complete checkpoints and no vanished ones; the next attempt completes."""
    keys = {f"run-{number % 50:02}/step-{number}" for number in range(296)}  # more than a transaction writes
    for key in keys:
        catalog.save(key)
    turns: list[str] = []

    def break_off(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO checkpoints"):
            turns.append(statement)
            if len(turns) == 2:
                raise ConnectionError("the worker is stopped")

    event.listen(Engine, "before_cursor_execute", break_off)
    try:
        catalog.scan()
    finally:
        event.remove(Engine, "before_cursor_execute", break_off)
    assert len(turns) > 2 and catalog.states() == dict.fromkeys(sorted(keys), "committed")
    assert catalog.scan()["opened"] == 0


def test_concurrent_scans_of_a_root(catalog: Catalog) -> None:
    """Concurrent scans of a root write and count each checkpoint once."""
    for step in range(60):
        catalog.save(f"run/step-{step}", save_id=f"{step}")
    orders = [{"kind": "scan", "params": {"root": "main", "below": below}} for below in ("", "run")]
    for order in orders:
        assert catalog.http.post(f"{API}/jobs", json=order).status_code == 202
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: catalog.work(), range(4)))
    jobs = catalog.get("/jobs", state="succeeded")["items"]
    assert len(jobs) == 2 and sum(job["result"]["committed"] for job in jobs) == 60
    assert len(catalog.states()) == 60


def test_a_deletion_beside_a_new_save(catalog: Catalog) -> None:
    """A checkpoint saved and registered again during a reported deletion stays in the catalog."""
    folder, key = catalog.place("run/step-1"), "run/step-1"
    deleted = {"root": "main", "key": key, "deleted": True}
    catalog.add(key)
    with ThreadPoolExecutor(2) as pool:
        for number in range(8):
            shutil.rmtree(folder)
            gone = pool.submit(catalog.status, "POST", "/checkpoints", json=deleted)
            write_manifest(folder, save_id=f"{number:08x}")
            new = pool.submit(catalog.register, key)
            assert gone.result() in (200, 201) and new.result() == 1
            row = catalog.get("/checkpoints/1")
            assert (row["state"], row["save_id"]) == ("committed", f"{number:08x}")


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)  # a file that other processes write too
@pytest.mark.parametrize("count", [8_000, pytest.param(300_000, marks=pytest.mark.exhaustive)])
def test_large_registrations_do_not_block_writers(catalog: Catalog, count: int) -> None:
    """Another process writes during a large registration, which commits after a limited number of rows."""
    state = {f"layers.{n}.weight": torch.zeros(2) for n in range(count)}
    dcp.save(state, checkpoint_id=catalog.place("step-1"), no_dist=True)
    ended, turns = threading.Event(), [0.0]

    def take_turns() -> None:
        other = sqlite3.connect(catalog.folder / "catalog-0.sqlite", isolation_level=None, timeout=30)
        while not ended.is_set():
            other.execute("BEGIN IMMEDIATE")
            other.execute("COMMIT")
            turns.append(time.monotonic())
            time.sleep(0.005)
        other.close()

    thread = threading.Thread(target=take_turns)
    with statements_to(catalog.app.service.database.writer) as recorded:
        thread.start()
        catalog.register("step-1")
        ended.set()
    thread.join()
    assert most_rows_inserted(recorded) <= 2_000
    assert len(turns) > 3 and max(b - a for a, b in pairwise(turns[1:])) < 10
