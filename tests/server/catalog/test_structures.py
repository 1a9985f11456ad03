"""Structures are kept once; verifications and statistics are of what is there now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, event, func, select

from dcp.server.catalog.checkpoints import CheckpointFacts, get_checkpoint, upsert_checkpoint
from dcp.server.catalog.contents import structures
from dcp.server.catalog.contents.layers import in_order
from dcp.server.catalog.contents.structures import (
    StructureFacts,
    StructureTensor,
    prepare_structures,
)
from dcp.server.catalog.contents.tensors import tensors_page
from dcp.server.catalog.contents.verifications import (
    add_verification,
    get_statistics,
    list_verifications,
    set_statistics,
)
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.events import events_after
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.drafts import forget_drafts
from dcp.server.database.engine import Database
from dcp.server.database.tables import structure_tensors
from dcp.server.database.tables import structures as structure_table
from dcp.server.records.declaring import moment
from tests.support.structures import ensure_structure, get_structure

pytestmark = pytest.mark.each_database  # their SQL differs

MODEL = StructureFacts.of(
    [
        *(StructureTensor(f"model.layers.{i}.w", "tensor", "bfloat16", (2, 3), 12) for i in range(12)),
        *(StructureTensor(f"model.layers.{i}.b", "tensor", "float32", (3,), 12) for i in range(12)),
        StructureTensor("model", "object", None, None, 5),
        StructureTensor("head", "tensor", "float32", (), 4),
        StructureTensor("optim.lr", "object", None, None, 9),
    ]
)


def test_a_structure_is_written_once(database: Database) -> None:
    """Whoever comes with the same names, kinds, shapes and dtypes, in whatever order."""
    again = StructureFacts.of(reversed(MODEL.tensors))
    other = StructureFacts.of([*MODEL.tensors, StructureTensor("x", "tensor", "int8", (1,), 1)])
    with database.write() as connection:
        number = ensure_structure(connection, MODEL)
        assert ensure_structure(connection, again) == number
        assert ensure_structure(connection, other) != number
        found = get_structure(connection, number)
        rows = connection.execute(select(func.count()).select_from(structure_tensors)).scalar_one()
    assert (found.tensor_count, found.object_count, found.element_count) == (25, 2, 12 * 6 + 12 * 3 + 1)
    assert found.dtypes == {"bfloat16": 144, "float32": 148}
    assert rows == 27 + 28


def large(count: int) -> StructureFacts:
    """A structure of so many tensors."""
    return StructureFacts.of(
        StructureTensor(f"layers.{n}.w", "tensor", "float32", (n,), 4 * n) for n in range(count)
    )


@contextmanager
def most_rows_at_once(database: Database) -> Iterator[list[int]]:
    """The list has the most rows that one transaction has written, which others wait for."""
    most, now = [0], [0]

    @event.listens_for(database.writer, "before_cursor_execute")
    def _(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, is_many: bool) -> None:
        if statement.startswith("INSERT"):
            now[0] += len(parameters) if is_many else 1
            most[0] = max(most[0], now[0])

    @event.listens_for(database.writer, "commit")
    def _(_connection: Connection) -> None:
        now[0] = 0

    yield most


def test_a_large_structure_is_written_in_short_transactions(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever registers a checkpoint with very many tensors holds up nobody; what is written is the same."""
    monkeypatch.setattr(structures, "_DRAFT_TENSORS", 500)
    monkeypatch.setattr(structures, "_DRAFT_ROWS", 500)
    facts = large(3_210)
    with database.write() as connection:
        sync_roots(connection, {"main": "/main"})
    with most_rows_at_once(database) as most:
        prepare_structures(database, [facts, None, MODEL])
        prepare_structures(database, [facts])
        checkpoint = CheckpointFacts(
            root="main", key="r/1", format="dcp", observed_seconds=2.0, structure=facts
        )
        database.transact(lambda connection: upsert_checkpoint(connection, checkpoint))
    assert 400 < most[0] <= 510
    with database.write() as connection:
        number = ensure_structure(connection, facts)
        found = get_structure(connection, number)
        page = tensors_page(connection, number, limit=5_000)
        count = connection.execute(select(func.count()).select_from(structure_table)).scalar_one()
    assert count == 1
    assert (found.digest, found.tensor_count, found.dtypes["float32"]) == (
        facts.digest,
        3_210,
        sum(4 * n for n in range(3_210)),
    )
    assert [(entry.fqn, entry.shape) for entry in page.items] == [
        (tensor.fqn, tensor.shape) for tensor in sorted(facts.tensors, key=lambda one: in_order(one.fqn))
    ]


def test_drafts_of_structures_are_nobodys(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle, a writer leaves a draft that counts for nothing and is removed in time; and if
    another one was quicker, its own is removed at once."""
    monkeypatch.setattr(structures, "_DRAFT_TENSORS", 10)
    monkeypatch.setattr(structures, "_DRAFT_ROWS", 10)
    facts, real = large(35), structures._tensor_rows

    def killed(number: int, tensors: Any, first: int = 0) -> Any:
        if first == 20:
            raise KeyboardInterrupt
        return real(number, tensors, first)

    monkeypatch.setattr(structures, "_tensor_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_structures(database, [facts], clock=lambda: 1000.0)
    monkeypatch.setattr(structures, "_tensor_rows", real)

    def quicker(number: int, tensors: Any, first: int = 0) -> Any:
        if first == 20:
            monkeypatch.setattr(structures, "_tensor_rows", real)
            prepare_structures(database, [facts])
        return real(number, tensors, first)

    monkeypatch.setattr(structures, "_tensor_rows", quicker)
    prepare_structures(database, [facts])
    with database.read() as connection:
        rows = connection.execute(select(func.count()).select_from(structure_tensors)).scalar_one()
    assert rows == 20 + 35
    assert forget_drafts(database, 999.0) == 0
    assert forget_drafts(database, 1001.0) == 1
    with database.write() as connection:
        assert connection.execute(select(func.count()).select_from(structure_tensors)).scalar_one() == 35
        assert get_structure(connection, ensure_structure(connection, facts)).tensor_count == 35


@pytest.mark.parametrize(
    "change",
    [
        StructureTensor("a", "tensor", "float32", (6,), 24),
        StructureTensor("a", "tensor", "int32", (2, 3), 24),
        StructureTensor("b", "tensor", "float32", (2, 3), 24),
        StructureTensor("a", "object", None, None, 24),
    ],
)
def test_the_digest_tells_structures_apart(change: StructureTensor) -> None:
    """Another shape of as many elements, another dtype, name or kind is another structure."""
    same = StructureTensor("a", "tensor", "float32", (2, 3), 24)
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
        assert get_checkpoint(connection, number).verified_at == moment(9.0)
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
