"""What retention. Internal: sums over thousands of rows, written straight.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import pytest
from sqlalchemy import text

from dcp.manager.cleanup.retention import Retention
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.labelling.labels import Change, set_pinned
from dcp.server.catalog.queries.facets import checkpoint_facets
from dcp.server.catalog.queries.filters import CheckpointFilter
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints
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


def test_totals_of_a_policy(catalog: Database) -> None:
    """Counts and bytes of all runs."""
    with catalog.read() as connection:
        found = retention_totals(connection, "main", "*", Retention(last=2), 0.0)
        assert (found.runs, found.kept, found.deleted, found.deleted_bytes) == (2, 5, 5, 1500)
        assert (found.kept_bytes, found.is_cut) == (1500, False)
        assert retention_totals(connection, "other", "*", Retention(last=2), 0.0).runs == 0


@pytest.mark.exhaustive  # many rows
def test_a_large_catalog_is_counted_to_the_end(catalog: Database) -> None:
    """What will be deleted is never understated: neither totals nor facets stop after some rows."""
    names = [column.name for column in checkpoints.c if column.name not in ("id", "step_order")]
    more = {"key": "key || '/' || s.n", "step": "100 + s.n"}
    chosen = ", ".join(more.get(name, name) for name in names)
    with catalog.write() as connection:
        connection.execute(
            text(
                f"INSERT INTO checkpoints ({', '.join(names)}) WITH RECURSIVE s(n) AS"
                " (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 26000)"
                f" SELECT {chosen} FROM checkpoints, s WHERE step = 2"
            )
        )
    with catalog.read() as connection:
        found = retention_totals(connection, "main", "*", Retention(last=2), 0.0)
        assert (found.runs, found.kept, found.deleted, found.is_cut) == (2, 5, 52_005, False)
        facets = checkpoint_facets(connection, CheckpointFilter())
        assert (facets.count, facets.is_cut) == (52_010, False)
        assert sum(one.count for one in facets.facets[5].values) == 52_010


def test_bytes_of_optimizers(catalog: Database) -> None:
    """Of older steps those that nothing holds; of a run that may be seen."""
    with catalog.read() as connection:
        found = tensor_bytes(connection, 2, below_step=4)
        assert (found.checkpoints, found.held, found.tensors) == (3, 1, 2)
        assert (found.bytes, found.total_bytes) == (400, 600)
        assert tensor_bytes(connection, 1, only=["*"]).bytes == 5 * 300
        with pytest.raises(MissingError):
            tensor_bytes(connection, 1, frozenset({"other"}))
