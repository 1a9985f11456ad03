"""Registration of a checkpoint with very many tensors, with others that write meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import dcp
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.jobs import ledger
from dcp.server.roots import Roots
from dcp.server.scanning.registering import Registration, register
from dcp.server.settings import RootSettings
from tests.support.written import written_by

LEASE_SECONDS = 10.0


@pytest.mark.parametrize("count", [5_000, pytest.param(300_000, marks=pytest.mark.exhaustive)])
def test_leases_are_renewed_while_it_is_written(tmp_path: Path, count: int) -> None:
    """Another process that writes to the same SQLite file gets its turn all the time, between transactions of
    some rows each, and all is done long before a request is given up."""
    folder, url = tmp_path / "main", f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    dcp.save({f"layers.{n}.weight": torch.zeros(2) for n in range(count)}, checkpoint_id=folder / "step-1")
    database, other = Database(url), Database(url)  # each with a connection of its own that writes
    upgrade(database)
    spec = ledger.JobSpec(kind="stats", params={}, created_by="test")

    def claim() -> ledger.Claim:
        other.transact(lambda connection: ledger.submit(connection, spec, time.time()))
        made = other.transact(lambda c: ledger.claim(c, "worker", time.time(), LEASE_SECONDS))
        assert made is not None
        return made

    held, ended = {claim().held: None}, threading.Event()
    turns: list[int] = []  # how many transactions of the registration were before each
    lost: list[ledger.Held] = []

    def renew() -> None:
        while not ended.is_set():
            lost.extend(other.transact(lambda c: ledger.renew(c, "worker", held, time.time(), LEASE_SECONDS)))
            turns.append(found.transactions)
            time.sleep(0.01)

    database.transact(lambda connection: sync_roots(connection, {"main": str(folder)}))
    renewing = threading.Thread(target=renew)
    begun = time.process_time()
    with written_by(database) as found:
        renewing.start()
        try:
            roots = Roots({"main": RootSettings(url=str(folder))})
            registered = register(database, roots, Registration(key="step-1", root="main"), actor="test")
        finally:
            ended.set()
            renewing.join()
            for one in (database, other):
                one.close()
    assert registered.is_new
    assert turns and not lost
    assert 1_000 < found.most_inserted <= 2_000
    if count > 100_000:
        assert len({*turns}) > 10
        assert time.process_time() - begun < 50
