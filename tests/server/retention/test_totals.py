"""What retention, or leaving tensors out, would free in all."""

from __future__ import annotations

import pytest

from dcp.manager.cleanup.retention import Retention
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.labelling.labels import Change, set_pinned
from dcp.server.database.engine import Database
from dcp.server.retention import totals
from dcp.server.retention.totals import retention_totals, tensor_bytes
from tests.support.catalog_rows import add_checkpoint

STATE = StructureFacts.of(
    [
        StructureTensor("app.model.w", "tensor", "bfloat16", (50,), 100),
        StructureTensor("app.optimizer.state.w.exp_avg", "tensor", "float32", (50,), 200),
    ]
)


@pytest.fixture
def catalog(database: Database) -> Database:
    """Two runs of five steps, of which one step is pinned."""
    for run in ("a", "b"):
        ids = [add_checkpoint(database, f"{run}/step-{n}", bytes=300, structure=STATE) for n in range(1, 6)]
    with database.write() as connection:
        set_pinned(connection, ids[0], True, Change(actor="test", now=1.0))
    return database


def test_totals_of_a_policy(catalog: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and bytes of all runs; of very many checkpoints the first runs, and a word of it."""
    with catalog.read() as connection:
        found = retention_totals(connection, "main", "*", Retention(last=2), 0.0)
        assert (found.runs, found.kept, found.deleted, found.deleted_bytes) == (2, 5, 5, 1500)
        assert (found.kept_bytes, found.is_cut) == (1500, False)
        assert retention_totals(connection, "other", "*", Retention(last=2), 0.0).runs == 0
        monkeypatch.setattr(totals, "_MAX_PLANNED", 3)
        assert retention_totals(connection, "main", "*", Retention(last=2), 0.0).is_cut


def test_bytes_of_optimizers(catalog: Database) -> None:
    """Of older steps those that nothing holds; of a run that may be seen."""
    with catalog.read() as connection:
        found = tensor_bytes(connection, 2, below_step=4)
        assert (found.checkpoints, found.held, found.tensors) == (3, 1, 2)
        assert (found.bytes, found.total_bytes) == (400, 600)
        assert tensor_bytes(connection, 1, only=["*"]).bytes == 5 * 300
        with pytest.raises(MissingError):
            tensor_bytes(connection, 1, frozenset({"other"}))
