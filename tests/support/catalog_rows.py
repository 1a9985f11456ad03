"""Checkpoints in the catalog without files in storage, for tests that query only the catalog."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from dcp.server.catalog.changes import upsert_checkpoint
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.runs import sync_roots
from dcp.server.catalog.structures import StructureFacts, Tensor
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints
from tests.support.app import App

__all__ = ["T0", "add_checkpoint", "multiply"]

T0 = 1_700_000_000.0

_STRUCTURE = StructureFacts(
    digest="5" * 64,
    tensors=(
        Tensor(fqn="model.bias", kind="tensor", dtype="float32", shape=(4,), bytes=16),
        Tensor(fqn="model.weight", kind="tensor", dtype="bfloat16", shape=(4, 4), bytes=32),
        Tensor(fqn="step", kind="object", dtype=None, shape=None, bytes=5),
    ),
)


def add_checkpoint(database: Database, key: str, *, root: str = "main", **facts: Any) -> int:
    """Insert a committed checkpoint with these facts and return its id; the step is the number in its key."""
    digits = key.rpartition("-")[2]
    step = int(digits) if digits.isdecimal() else None
    given = {
        "format": "dcp",
        "observed_seconds": T0,
        "committed_seconds": T0 + (step or 0),
        "step": step,
        "save_id": f"save-{key}",
        "fingerprint": f"print-{key}"[:64],
        "bytes": 53,
        "file_count": 3,
        "world_size": 2,
        "structure": _STRUCTURE,
        "user_metadata": {"note": "é"},
        "provenance": {"torch": "2.13"},
        **facts,
    }

    def act(connection: Any) -> int:
        sync_roots(connection, {"main": "/main", "other": "/other"}, now=T0)
        return upsert_checkpoint(connection, CheckpointFacts(root=root, key=key, **given), now=T0).id

    return database.transact(act)


def multiply(app: App, key: str, count: int) -> None:
    """Insert ``count`` copies of a checkpoint with later steps; the size in bytes of each is its number."""
    names = [column.name for column in checkpoints.c if column.name not in ("id", "step_order")]
    more = {"key": "key || '-' || s.n", "name": "name || '-' || s.n", "step": "100 + s.n", "bytes": "s.n"}
    chosen = ", ".join(more.get(name, name) for name in names)
    numbers = "WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :count)"
    statement = f"INSERT INTO checkpoints ({', '.join(names)}) {numbers} SELECT {chosen} FROM checkpoints, s"
    with app.service.database.write() as connection:
        connection.execute(text(f"{statement} WHERE key = :key"), {"key": key, "count": count})
