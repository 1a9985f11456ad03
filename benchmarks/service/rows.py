"""A realistic catalog of any size, and the queries for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, insert, select, text, update

from dcp.server.catalog.changes import upsert_checkpoints
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.runs import sync_roots
from dcp.server.catalog.structures import StructureFacts, Tensor
from dcp.server.database.engine import Database
from dcp.server.database.tables import aliases, checkpoints

__all__ = ["QUESTIONS", "Shape", "batches", "fill", "label"]

BATCH: Final = 1000
_DAY: Final = 86_400.0
_START: Final = 1_700_000_000.0
_FAMILIES: Final = 40
_LAYERS: Final = 32
_PARTS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down", "norm")


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of checkpoints and of runs."""

    checkpoints: int
    runs: int


def structure(family: int) -> StructureFacts:
    """Return a model of 260 tensors; every eighth is in float32."""
    dtype, width = ("float32", 4) if family % 8 == 0 else ("bfloat16", 2)
    dtype = "float8_e4m3fn" if family == 1 else dtype
    side = 256 + 64 * family
    layers = (f"model.layers.{layer}.{part}.weight" for layer in range(_LAYERS) for part in _PARTS)
    names = [*layers, "model.embed.weight", "head.weight", f"family_{family}.scale"]
    return StructureFacts.of(
        Tensor(name, "tensor", dtype, (side, side), side * side * width) for name in names
    )


def batches(shape: Shape, *, first: int = 0, seed: int = 1) -> Iterator[list[CheckpointFacts]]:
    """Yield the records of all checkpoints as a scan finds them: run after run, step after step."""
    chance = random.Random(seed)
    structures = [structure(family) for family in range(_FAMILIES)]
    batch: list[CheckpointFacts] = []
    for number in range(first, first + shape.checkpoints):
        batch.append(_facts(number, shape, structures, chance))
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _facts(
    number: int, shape: Shape, structures: list[StructureFacts], chance: random.Random
) -> CheckpointFacts:
    per_run = max(1, shape.checkpoints // shape.runs)
    run, position = divmod(number, per_run)
    step = (position + 1) * (1000 if run % 3 else 250)
    day = 600.0 * run / shape.runs + 20.0 * position / per_run
    tags = {"nightly"} if position % 10 == 0 else set()
    if number % 2500 == 7:
        tags.add("release")
    return CheckpointFacts(
        root="archive" if run % 20 == 0 else "main",
        key=f"team-{run % 25}/experiment-{run}/{'checkpoint' if run % 4 == 0 else 'step'}-{step:08}",
        format=("safetensors", "dcp", "dcp", "torch_dcp")[run % 4],
        observed_seconds=_START + day * _DAY,
        committed_seconds=_START + day * _DAY + chance.random(),
        step=step,
        save_id=f"save-{number}",
        fingerprint=f"{number:032x}",
        bytes=chance.randrange(10**9, 10**11),
        file_count=8,
        world_size=8,
        structure=structures[run % len(structures)],
        user_metadata={"epoch": position, "seed": run},
        provenance={"torch": "2.13", "host": f"node-{run % 64}", "phases": {"stage": 0.1, "write": 2.0}},
        tags=frozenset(tags),
        metrics={"loss": 8.0 / (1 + position) + chance.random(), "lr": 1e-4} if position % 2 else {},
        is_pinned=number % 500 == 3,
    )


def fill(database: Database, shape: Shape) -> None:
    """Write all records in transactions of the size that a scan uses."""
    roots = {"main": "./main", "archive": "./archive"}
    database.transact(lambda connection: sync_roots(connection, roots))
    for batch in batches(shape):
        database.transact(lambda connection, batch=batch: upsert_checkpoints(connection, batch))  # type: ignore[misc]
    database.transact(label)
    if database.dialect == "postgresql":  # as autovacuum does within a minute
        with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))


def label(connection: Connection) -> None:
    """Write aliases of each run, verification results, and vanished checkpoints."""
    newest = select(checkpoints.c.run_id, text("max(id) AS id")).group_by(checkpoints.c.run_id)
    rows: list[dict[str, Any]] = [
        {"run_id": run, "name": "best", "checkpoint_id": number, "updated_seconds": _START}
        for run, number in connection.execute(newest)
    ]
    connection.execute(insert(aliases), rows)
    for outcome, every, offset in (("good", 50, 0), ("damaged", 5000, 10)):
        chosen = checkpoints.c.id % every == offset
        connection.execute(update(checkpoints).where(chosen).values(verification=outcome))
    connection.execute(
        update(checkpoints).where(checkpoints.c.id % 100 == 1).values(state="vanished", problem="gone")
    )


QUESTIONS: Final[dict[str, dict[str, Any]]] = {
    "newest": {},
    "oldest": {"sort": "time"},
    "most bytes": {"sort": "-bytes"},
    "by name": {"sort": "name"},
    "by step": {"sort": "-step"},
    "one root": {"root": "archive"},
    "one root by bytes": {"root": "archive", "sort": "-bytes"},
    "one run": {"run": "team-7/experiment-7", "sort": "-step"},
    "a run's steps": {"run": "team-7/experiment-7", "min_step": 2000, "max_step": 90000, "sort": "step"},
    "runs by glob": {"run_glob": "team-3/*"},
    "runs by part": {"run_contains": "experiment-1"},
    "format": {"format": "torch_dcp"},
    "format by step": {"format": "torch_dcp", "sort": "step"},
    "a tag of many": {"tag": "nightly"},
    "a tag of many by bytes": {"tag": "nightly", "sort": "bytes"},
    "a tag of few": {"tag": "release"},
    "no such tag": {"tag": "nothing"},
    "alias": {"alias": "best"},
    "metric of few": {"metric": "loss<0.02"},
    "metric of many": {"metric": "loss<1.0"},
    "by metric": {"sort": "metric:loss"},
    "by metric, one root": {"sort": "metric:loss", "root": "archive"},
    "dtype of most": {"dtype": "bfloat16"},
    "dtype of few": {"dtype": "float8_e4m3fn"},
    "tensor of all": {"tensor": "head.weight"},
    "tensor of few": {"tensor": "family_3.scale"},
    "tensor glob": {"tensor": "family_1*.scale"},
    "vanished": {"state": "vanished"},
    "damaged": {"verification": "damaged"},
    "verified": {"verification": "good", "sort": "-step"},
    "pinned": {"pinned": "true"},
    "part of name": {"name_contains": "00031"},
    "glob of name": {"name_glob": "checkpoint-*500"},
    "a week": {"since": "2024-06-01T00:00:00Z", "until": "2024-06-08T00:00:00Z", "sort": "-bytes"},
    "much at once": {
        "tag": "nightly",
        "dtype": "bfloat16",
        "format": "dcp",
        "min_step": 5000,
        "root": "main",
    },
}
"""Parameters of ``GET /api/v1/checkpoints``, by name of the query."""
