"""What is found is written: new, unchanged, changed, replaced, vanished, deleted; and who hears of it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select

from dcp.server.catalog.audit import audit_page
from dcp.server.catalog.checkpoints import (
    CheckpointFacts,
    get_checkpoint,
    mark_vanished,
    set_state,
    upsert_checkpoint,
    upsert_checkpoints,
)
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.errors import ChangedError, InvalidQueryError, MissingError, StateError
from dcp.server.catalog.events import events_after
from dcp.server.catalog.roots import sync_roots
from dcp.server.catalog.runs import get_run
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints, structures
from dcp.server.records.declaring import moment

pytestmark = pytest.mark.each_database  # their SQL differs

MODEL = StructureFacts.of(
    [StructureTensor("w", "tensor", "bfloat16", (4, 8), 64), StructureTensor("step", "object", None, None, 9)]
)


def facts(key: str = "llama/step-10", **changes: Any) -> CheckpointFacts:
    """A committed checkpoint of the root "main"."""
    given: dict[str, Any] = {
        "root": "main",
        "key": key,
        "format": "dcp",
        "observed_seconds": 100.0,
        "committed_seconds": 90.0,
        "step": 10,
        "save_id": "a",
        "fingerprint": "f1",
        "bytes": 73,
        "file_count": 2,
        "world_size": 4,
        "structure": MODEL,
    }
    return CheckpointFacts(**given | changes)


@pytest.fixture
def catalog(database: Database) -> Database:
    """A database with the roots "main" and "other"."""
    with database.write() as connection:
        sync_roots(connection, {"main": "./main", "other": "./other"}, now=1.0)
    return database


def kinds(database: Database) -> list[str]:
    """The kinds of all events."""
    with database.read() as connection:
        return [event.kind for event in events_after(connection, 0)]


def test_a_new_checkpoint_has_all_that_was_found_out(catalog: Database) -> None:
    """Row, run, structure, labels and one event in one transaction."""
    with catalog.write() as connection:
        done = upsert_checkpoint(
            connection, facts(tags=frozenset({"nightly"}), metrics={"loss": 1.5}, is_pinned=True), now=101.0
        )
    assert (done.is_new, done.is_changed, done.became_committed) == (True, True, True)
    with catalog.read() as connection:
        found = get_checkpoint(connection, done.id)
        run = get_run(connection, found.run_id)
        (event,) = events_after(connection, 0)
    assert (found.root, found.run, found.key, found.name) == ("main", "llama", "llama/step-10", "step-10")
    assert (found.step, found.state, found.format, found.bytes) == (10, "committed", "dcp", 73)
    assert (found.committed_at, found.discovered_at) == (moment(90.0), moment(101.0))
    assert (found.tags, found.metrics, found.is_pinned) == (("nightly",), {"loss": 1.5}, True)
    assert (found.dtypes, found.tensor_count, found.object_count) == ({"bfloat16": 64}, 1, 1)
    assert found.structure_digest == MODEL.digest
    assert found.etag == f'"c{done.id}-1"'
    assert (run.checkpoint_count, run.latest_step, run.latest_at, run.bytes) == (1, 10, moment(90.0), 73)
    assert (event.kind, event.root, event.checkpoint_id) == ("checkpoint.committed", "main", done.id)
    assert event.data["key"] == "llama/step-10"


def test_what_has_not_changed_is_not_written(catalog: Database) -> None:
    """The same facts again: no new version, no event, no entry."""
    for _ in range(2):
        with catalog.write() as connection:
            done = upsert_checkpoint(connection, facts(), actor="key:ci")
    assert (done.is_new, done.is_changed, done.became_committed) == (False, False, False)
    with catalog.read() as connection:
        assert get_checkpoint(connection, done.id).version == 1
        assert [entry.action for entry in audit_page(connection).entries] == ["checkpoint.register"]
    assert kinds(catalog) == ["checkpoint.committed"]


def test_a_save_that_is_finished_later_is_committed_then(catalog: Database) -> None:
    """Incomplete first: in no sum, no event; committed: counted, and told."""
    with catalog.write() as connection:
        first = upsert_checkpoint(
            connection, facts(state="incomplete", save_id=None, fingerprint=None, committed_seconds=None)
        )
        assert get_checkpoint(connection, first.id).committed_at == moment(100.0)
        assert get_run(connection, get_checkpoint(connection, first.id).run_id).checkpoint_count == 0
    assert kinds(catalog) == []
    with catalog.write() as connection:
        second = upsert_checkpoint(connection, facts())
        assert (second.id, second.became_committed) == (first.id, True)
        assert get_checkpoint(connection, first.id).version == 2
        assert get_run(connection, get_checkpoint(connection, first.id).run_id).checkpoint_count == 1
    assert kinds(catalog) == ["checkpoint.committed"]


def test_another_save_to_the_same_key_is_other_content(catalog: Database) -> None:
    """Metrics of the old content are gone, tags and pins stay; it is told as committed again."""
    with catalog.write() as connection:
        first = upsert_checkpoint(
            connection, facts(metrics={"loss": 2.0}, tags=frozenset({"a"}), is_pinned=True)
        )
        second = upsert_checkpoint(
            connection, facts(save_id="b", fingerprint="f2", bytes=100, observed_seconds=200.0)
        )
        found = get_checkpoint(connection, first.id)
        run = get_run(connection, found.run_id)
    assert (second.id, second.is_new, second.became_committed) == (first.id, False, True)
    assert (found.metrics, found.tags, found.is_pinned, found.bytes) == ({}, ("a",), True, 100)
    assert (run.checkpoint_count, run.bytes) == (1, 100)
    assert kinds(catalog) == ["checkpoint.committed"] * 2


def test_a_new_note_is_not_a_new_save(catalog: Database) -> None:
    """Another fingerprint under the same save id changes the row and is no commit."""
    with catalog.write() as connection:
        upsert_checkpoint(connection, facts())
        done = upsert_checkpoint(connection, facts(fingerprint="f2", is_pinned=True))
        assert get_checkpoint(connection, done.id).is_pinned
    assert (done.is_changed, done.became_committed) == (True, False)


def test_many_at_once_make_their_runs_and_share_a_structure(catalog: Database) -> None:
    """A batch larger than a chunk, old and new mixed: answers in order, sums right, one structure."""
    with catalog.write() as connection:
        known = upsert_checkpoint(connection, facts("r0/s0", step=0))
        batch = [facts(f"r{i % 3}/s{i}", step=i, save_id=f"{i}") for i in range(1300)]
        batch[0] = facts("r0/s0", step=0)
        done = upsert_checkpoints(connection, batch)
        count = connection.execute(select(func.count()).select_from(structures)).scalar_one()
        keys = {row.id: row.key for row in connection.execute(select(checkpoints.c.id, checkpoints.c.key))}
        run = get_run(connection, get_checkpoint(connection, done[4].id).run_id)
    assert [keys[one.id] for one in done] == [one.key for one in batch]
    assert (done[0].id, done[0].is_changed) == (known.id, False)
    assert all(one.is_new for one in done[1:])
    assert count == 1
    assert (run.key, run.checkpoint_count, run.latest_step, run.bytes) == ("r1", 433, 1297, 433 * 73)
    assert len(kinds(catalog)) == 100  # one page of them


def test_what_is_not_there_any_more_vanishes_and_may_come_back(catalog: Database) -> None:
    """Vanished: out of the sums; there again: back, and no second commit."""
    with catalog.write() as connection:
        one = upsert_checkpoint(connection, facts(), now=100.0)
        other = upsert_checkpoint(connection, facts("llama/step-5", step=5), now=100.0)
        assert mark_vanished(connection, "main", ["llama/step-10", "no/such"], observed_seconds=200.0) == 1
        found = get_checkpoint(connection, one.id)
        run = get_run(connection, found.run_id)
        assert (found.state, found.version) == ("vanished", 2)
        assert (run.checkpoint_count, run.latest_step, run.bytes) == (1, 5, 73)
        back = upsert_checkpoint(connection, facts(observed_seconds=300.0), now=300.0)
        assert (back.is_changed, back.became_committed) == (True, False)
        assert get_run(connection, found.run_id).checkpoint_count == 2
        assert mark_vanished(connection, "main", ["llama/step-10"], observed_seconds=299.0) == 0
    assert other.id != one.id


def test_what_is_deleted_by_order_stays_deleted_until_it_is_saved_anew(catalog: Database) -> None:
    """A scan that still finds the bytes changes nothing; a later save to the key brings it back."""
    with catalog.write() as connection:
        number = upsert_checkpoint(connection, facts(), now=100.0).id
        set_state(connection, number, "deleted", actor="key:ops", now=150.0, purge_after_seconds=999.0)
        assert not upsert_checkpoint(connection, facts(observed_seconds=200.0)).is_changed
        late = facts(save_id="b", fingerprint="f2", observed_seconds=120.0)
        assert not upsert_checkpoint(connection, late).is_changed
        found = get_checkpoint(connection, number)
        assert (found.state, found.deleted_at, found.purge_after) == ("deleted", moment(150.0), moment(999.0))
        assert get_run(connection, found.run_id).checkpoint_count == 0
        again = upsert_checkpoint(connection, facts(save_id="b", fingerprint="f2", observed_seconds=200.0))
        assert again.became_committed
        found = get_checkpoint(connection, number)
        assert (found.state, found.deleted_at, found.purge_after) == ("committed", None, None)
        assert get_run(connection, found.run_id).checkpoint_count == 1


def test_what_was_observed_earlier_changes_nothing(catalog: Database) -> None:
    """A scan that listed before the commit and writes after it: no state, no labels, no second event."""
    with catalog.write() as connection:
        number = upsert_checkpoint(connection, facts(observed_seconds=10.0), now=11.0).id
        late = facts(state="incomplete", save_id=None, observed_seconds=9.0, tags=frozenset({"late"}))
        assert not upsert_checkpoint(connection, late, now=12.0).is_changed
        found = get_checkpoint(connection, number)
        assert (found.state, found.tags, found.version) == ("committed", (), 1)
        assert mark_vanished(connection, "main", ["llama/step-10"], observed_seconds=9.5) == 0
        assert mark_vanished(connection, "main", ["llama/step-10"], observed_seconds=20.0) == 1
        assert not upsert_checkpoint(connection, facts(observed_seconds=15.0)).is_changed
        assert upsert_checkpoint(connection, facts(observed_seconds=21.0)).is_changed
    assert kinds(catalog) == ["checkpoint.committed"]


def test_the_same_content_is_committed_once(catalog: Database) -> None:
    """Unreadable or incomplete for a while and then the same again: no news; other content then: news."""
    with catalog.write() as connection:

        def seen(at: float, **changes: Any) -> bool:
            given = {"save_id": None, "observed_seconds": at, **changes}
            return upsert_checkpoint(connection, facts(**given)).became_committed

        assert seen(1.0, fingerprint="f1")
        assert not seen(2.0, fingerprint="f1", state="incomplete")
        assert not seen(3.0, fingerprint="f1")
        assert not seen(4.0, fingerprint="f2", state="unreadable")  # somebody is writing over it
        assert seen(5.0, fingerprint="f2")
        assert not seen(6.0, fingerprint="f2", save_id="a")  # the id has been read as well
        assert not seen(7.0, fingerprint="f2", save_id="a")
        assert not seen(8.0, fingerprint="f3", save_id="a")  # a note in the same manifest
        assert seen(9.0, fingerprint="f4", save_id="b")


def test_files_that_were_touched_keep_what_people_said(catalog: Database) -> None:
    """Without save ids other commit objects may be the same content: pins, tags and metrics stay."""
    with catalog.write() as connection:
        one = facts(save_id=None, is_pinned=True, metrics={"loss": 1.0}, tags=frozenset({"a"}))
        number = upsert_checkpoint(connection, one).id
        upsert_checkpoint(connection, facts(save_id=None, fingerprint="f2", observed_seconds=200.0))
        found = get_checkpoint(connection, number)
    assert (found.is_pinned, found.tags, found.metrics) == (True, ("a",), {"loss": 1.0})


def test_states_follow_each_other_only_as_they_can(catalog: Database) -> None:
    """Delete, restore, delete, purge; then nothing. Each is audited, and deleting is told."""
    with catalog.write() as connection:
        number = upsert_checkpoint(connection, facts()).id
        set_state(connection, number, "deleted", actor="key:ops")
        assert set_state(connection, number, "committed", actor="key:ops").deleted_at is None
        set_state(connection, number, "deleted", actor="key:ops", expected_version=3)
        assert set_state(connection, number, "purged", actor="system").deleted_at is not None
        assert set_state(connection, number, "purged", actor="system").version == 5
        with pytest.raises(StateError, match="is purged"):
            set_state(connection, number, "committed", actor="key:ops")
        entries = audit_page(connection, action="checkpoint.state").entries
    assert [(entry.actor, entry.detail["to"]) for entry in entries] == [
        ("system", "purged"),
        ("key:ops", "deleted"),
        ("key:ops", "committed"),
        ("key:ops", "deleted"),
    ]
    assert kinds(catalog) == ["checkpoint.committed", "checkpoint.deleted", "checkpoint.deleted"]


def test_what_is_pinned_changed_or_not_seen_is_not_deleted(catalog: Database) -> None:
    """A pin, another version, and a root that may not be seen each refuse."""
    with catalog.write() as connection:
        number = upsert_checkpoint(connection, facts(is_pinned=True)).id
        with pytest.raises(StateError, match="pinned"):
            set_state(connection, number, "deleted", actor="a")
        with pytest.raises(ChangedError) as changed:
            set_state(connection, number, "vanished", actor="a", expected_version=7)
        assert (changed.value.expected, changed.value.version) == (7, 1)
        with pytest.raises(MissingError):
            set_state(connection, number, "vanished", actor="a", visible=frozenset({"other"}))
        with pytest.raises(MissingError):
            get_checkpoint(connection, number, frozenset({"other"}))
        assert get_checkpoint(connection, number, frozenset({"main"})).version == 1


def test_hostile_names_and_values_are_stored_all_the_same(catalog: Database) -> None:
    """NUL, lone surrogates, NaN, huge numbers and endless names neither fail nor stop the batch."""
    structure = StructureFacts.of(
        [
            StructureTensor("a\x00b", "tensor", "float32", (2**62, 2**62), 2**80),
            StructureTensor("\ud800", "tensor", "float32\x00", (1,), 4),
            StructureTensor("long." * 5000, "object", None, None, 1),
        ]
    )
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    metadata = {"x\x00": float("nan"), "y": [b"\xff", 2**70, float("inf")], "z": deep, "s": "\udc80"}
    with catalog.write() as connection:
        hostile = facts(structure=structure, user_metadata=metadata, provenance={"a": "\x00"})
        number = upsert_checkpoint(connection, hostile).id
        found = get_checkpoint(connection, number)
        assert not upsert_checkpoint(connection, hostile).is_changed
    assert found.user_metadata["x\\x00"] == "nan"
    assert found.user_metadata["y"] == ["b'\\xff'", str(2**70), "inf"]
    assert found.element_count == 2**63 - 1


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [(1e12, 253_402_300_799.0), (-5.0, 100.0), (0.0, 100.0), (float("nan"), 100.0), (float("inf"), 100.0)],
)
def test_times_that_no_calendar_has_are_brought_into_one(
    catalog: Database, seconds: float, kept: float
) -> None:
    """A file may say any time; a list that shows it must still be shown. None is the time of the look."""
    with catalog.write() as connection:
        done = upsert_checkpoint(connection, facts(committed_seconds=seconds))
        assert get_checkpoint(connection, done.id).committed_at == moment(kept)
        assert not upsert_checkpoint(connection, facts(committed_seconds=seconds)).is_changed


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "a\x00b", "a" * 1025])
def test_a_key_that_is_not_clean_is_refused(key: str) -> None:
    """Facts cannot be made of a key that could lead elsewhere."""
    with pytest.raises(InvalidQueryError):
        facts(key)


def test_an_unknown_root_is_missing(catalog: Database) -> None:
    """Nothing is written for a root that the configuration never had."""
    with catalog.write() as connection, pytest.raises(MissingError, match="root nowhere"):
        upsert_checkpoint(connection, facts(root="nowhere"))
