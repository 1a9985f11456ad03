"""Structures are kept once; verifications and statistics are of what is there now."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from dcp.server.catalog.checkpoints import CheckpointFacts, get_checkpoint, upsert_checkpoint
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.events import events_after
from dcp.server.catalog.roots import sync_roots
from dcp.server.catalog.structures import StructureFacts, TensorFacts, ensure_structure, get_structure
from dcp.server.catalog.verifications import (
    add_verification,
    get_statistics,
    list_verifications,
    set_statistics,
)
from dcp.server.database.engine import Database
from dcp.server.database.tables import structure_tensors

MODEL = StructureFacts.of(
    [
        *(TensorFacts(f"model.layers.{i}.w", "tensor", "bfloat16", (2, 3), 12) for i in range(12)),
        *(TensorFacts(f"model.layers.{i}.b", "tensor", "float32", (3,), 12) for i in range(12)),
        TensorFacts("model", "object", None, None, 5),
        TensorFacts("head", "tensor", "float32", (), 4),
        TensorFacts("optim.lr", "object", None, None, 9),
    ]
)


def test_a_structure_is_written_once(database: Database) -> None:
    """Whoever comes with the same names, kinds, shapes and dtypes, in whatever order."""
    again = StructureFacts.of(reversed(MODEL.tensors))
    other = StructureFacts.of([*MODEL.tensors, TensorFacts("x", "tensor", "int8", (1,), 1)])
    with database.write() as connection:
        number = ensure_structure(connection, MODEL)
        assert ensure_structure(connection, again) == number
        assert ensure_structure(connection, other) != number
        found = get_structure(connection, number)
        rows = connection.execute(select(func.count()).select_from(structure_tensors)).scalar_one()
        with pytest.raises(MissingError):
            get_structure(connection, 99)
    assert (found.tensor_count, found.object_count, found.element_count) == (25, 2, 12 * 6 + 12 * 3 + 1)
    assert found.dtypes == {"bfloat16": 144, "float32": 148}
    assert rows == 27 + 28


@pytest.mark.parametrize(
    "change",
    [
        TensorFacts("a", "tensor", "float32", (6,), 24),
        TensorFacts("a", "tensor", "int32", (2, 3), 24),
        TensorFacts("b", "tensor", "float32", (2, 3), 24),
        TensorFacts("a", "object", None, None, 24),
    ],
)
def test_the_digest_tells_structures_apart(change: TensorFacts) -> None:
    """Another shape of as many elements, another dtype, name or kind is another structure."""
    same = TensorFacts("a", "tensor", "float32", (2, 3), 24)
    assert StructureFacts.of([same]).digest != StructureFacts.of([change]).digest


def test_a_verification_is_of_what_is_there_now(database: Database) -> None:
    """Good and damaged are told and shown; one of content that was replaced meanwhile is only kept."""
    with database.write() as connection:
        sync_roots(connection, {"main": "./main"})
        facts = CheckpointFacts(
            root="main", key="r/1", format="dcp", observed_seconds=1.0, save_id="a", fingerprint="f"
        )
        number = upsert_checkpoint(connection, facts).id

        def verified(fingerprint: str, outcome: str, findings: list[str]) -> bool:
            return add_verification(
                connection,
                number,
                fingerprint=fingerprint,
                mode="checksums",
                outcome=outcome,  # type: ignore[arg-type]
                findings=findings,
                checked_bytes=10,
                seconds=0.5,
                now=9.0,
            )

        assert not verified("old", "damaged", ["file x"])
        assert get_checkpoint(connection, number).verification == "unverified"
        assert verified("f", "good", [])
        assert get_checkpoint(connection, number).verified_seconds == 9.0
        assert verified("f", "damaged", ["file y: CRC", "file z"])
        found = get_checkpoint(connection, number)
        assert (found.verification, found.problem, found.version) == ("damaged", "file y: CRC", 3)
        assert not upsert_checkpoint(connection, facts).is_changed
        assert [one.outcome for one in list_verifications(connection, number)] == [
            "damaged",
            "good",
            "damaged",
        ]
        kinds = [event.kind for event in events_after(connection, 1)]
        assert kinds == ["checkpoint.verified", "checkpoint.damaged"]
        with pytest.raises(MissingError):
            list_verifications(connection, number, frozenset())

        assert get_statistics(connection, number) is None
        set_statistics(connection, number, fingerprint="f", result={"w": {"max": 1.0}})
        set_statistics(connection, number, fingerprint="f", result={"w": {"max": 2.0}})
        kept = get_statistics(connection, number)
        assert kept is not None
        assert (kept.result, kept.is_stale) == ({"w": {"max": 2.0}}, False)
        new = CheckpointFacts(
            root="main", key="r/1", format="dcp", observed_seconds=2.0, save_id="b", fingerprint="g"
        )
        upsert_checkpoint(connection, new)
        kept = get_statistics(connection, number)
        assert kept is not None
        assert kept.is_stale
        found = get_checkpoint(connection, number)
        assert (found.verification, found.problem) == ("unverified", None)
