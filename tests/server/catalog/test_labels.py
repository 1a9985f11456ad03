"""Tags, aliases, pins and metrics: each change is a version, audited, told, and refused where it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection

from dcp.server.catalog.audit import audit_page
from dcp.server.catalog.checkpoints import CheckpointFacts, get_checkpoint, set_state, upsert_checkpoint
from dcp.server.catalog.errors import (
    CatalogError,
    ChangedError,
    InvalidQueryError,
    MissingError,
    ProtectedError,
    StateError,
)
from dcp.server.catalog.events import events_after
from dcp.server.catalog.labelling.aliases import delete_alias, get_alias, list_aliases, set_alias
from dcp.server.catalog.labelling.labels import Change, add_tags, remove_tags, set_metrics, set_pinned
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.records.declaring import moment

ME = Change(actor="key:me", now=50.0, request_id="r1", address="127.0.0.1")


@pytest.fixture
def catalog(database: Database) -> Database:
    """A database with the checkpoints 1 and 2 of run 1, and 3 of run 2, in the root "main"."""
    with database.write() as connection:
        sync_roots(connection, {"main": "./main"})
        for key in ("a/step-1", "a/step-2", "b/step-1"):
            facts = CheckpointFacts(root="main", key=key, format="dcp", observed_seconds=1.0, save_id=key)
            upsert_checkpoint(connection, facts, now=1.0)
    return database


def test_tags_come_and_go(catalog: Database) -> None:
    """New tags are a version and an event; those that it has, and has not, change nothing."""
    with catalog.write() as connection:
        assert add_tags(connection, 1, ["b", "a"], ME).tags == ("a", "b")
        assert add_tags(connection, 1, ["a"], ME).version == 2
        assert add_tags(connection, 1, ["a", "c"], ME).tags == ("a", "b", "c")
        assert remove_tags(connection, 1, ["a", "z"], ME).tags == ("b", "c")
        assert remove_tags(connection, 1, ["z"], ME).version == 4
        told = [event for event in events_after(connection, 0) if event.kind == "checkpoint.tagged"]
        entries = audit_page(connection, target="checkpoint:1").entries
    assert [event.data["tags"] for event in told] == [["a", "b"], ["c"]]
    assert [(entry.action, entry.detail["tags"]) for entry in reversed(entries)] == [
        ("checkpoint.tag", ["a", "b"]),
        ("checkpoint.tag", ["c"]),
        ("checkpoint.untag", ["a"]),
    ]
    assert (entries[0].actor, entries[0].request_id, entries[0].address) == ("key:me", "r1", "127.0.0.1")
    assert entries[0].at_seconds == 50.0


def test_tags_of_a_registration_are_a_change_too(catalog: Database) -> None:
    """Known facts with a new tag or another metric: a new version; with the same again: none."""
    facts = CheckpointFacts(
        root="main",
        key="a/step-1",
        format="dcp",
        observed_seconds=2.0,
        save_id="a/step-1",
        tags=frozenset({"t"}),
        metrics={"loss": 2.0},
    )
    with catalog.write() as connection:
        assert upsert_checkpoint(connection, facts, now=2.0).is_changed
        assert not upsert_checkpoint(connection, facts, now=3.0).is_changed
        found = get_checkpoint(connection, 1)
    assert (found.version, found.tags, found.metrics) == (2, ("t",), {"loss": 2.0})
    assert found.updated_at == moment(2.0)


def test_pins_and_metrics(catalog: Database) -> None:
    """Set, the same again, and taken away; each change is one version."""
    with catalog.write() as connection:
        assert set_pinned(connection, 1, True, ME).is_pinned
        assert set_pinned(connection, 1, True, ME).version == 2
        assert not set_pinned(connection, 1, False, ME).is_pinned
        assert set_metrics(connection, 1, {"loss": 1.0, "acc": 0.5}, ME).metrics == {"acc": 0.5, "loss": 1.0}
        assert set_metrics(connection, 1, {"loss": 1.0, "none": None}, ME).version == 4
        found = set_metrics(connection, 1, {"loss": None, "acc": 0.75}, ME)
    assert (found.metrics, found.version, found.updated_at) == ({"acc": 0.75}, 5, moment(50.0))


@pytest.mark.parametrize(
    "act",
    [
        lambda connection, change: add_tags(connection, 1, ["x"], change),
        lambda connection, change: remove_tags(connection, 1, ["x"], change),
        lambda connection, change: set_pinned(connection, 1, True, change),
        lambda connection, change: set_metrics(connection, 1, {"x": 1.0}, change),
    ],
    ids=["add_tags", "remove_tags", "set_pinned", "set_metrics"],
)
def test_every_change_may_depend_on_what_was_seen(
    catalog: Database, act: Callable[[Connection, Change], Any]
) -> None:
    """Another version, a hidden root, a deleted checkpoint: refused, and nothing is written."""
    with catalog.write() as connection:
        with pytest.raises(ChangedError):
            act(connection, Change(actor="a", expected_version=9))
        with pytest.raises(MissingError):
            act(connection, Change(actor="a", visible=frozenset()))
        act(connection, Change(actor="a", expected_version=1))
        set_state(connection, 1, "vanished", actor="a")
        set_pinned(connection, 1, False, ME)
        set_state(connection, 1, "deleted", actor="a")
        version = get_checkpoint(connection, 1).version
        with pytest.raises(StateError, match="deleted"):
            act(connection, ME)
        assert get_checkpoint(connection, 1).version == version


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "ä", "a\n", "x" * 129, "\x00"])
def test_names_that_no_label_may_have(catalog: Database, name: str) -> None:
    """Tags, metrics and aliases are words that fit into a URL."""
    with catalog.write() as connection:
        for act in (
            lambda: add_tags(connection, 1, [name], ME),
            lambda: set_metrics(connection, 1, {name: 1.0}, ME),
            lambda: set_alias(connection, 1, name, 1, ME),
        ):
            with pytest.raises(InvalidQueryError):
                act()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_metrics_are_finite_numbers(catalog: Database, value: float) -> None:
    """SQLite would store NaN as nothing, and JSON has no word for either."""
    with catalog.write() as connection, pytest.raises(InvalidQueryError, match="finite"):
        set_metrics(connection, 1, {"loss": value}, ME)


def test_there_is_a_bound_on_labels(catalog: Database) -> None:
    """So that no list shows rows of any size."""
    with catalog.write() as connection:
        add_tags(connection, 1, [f"t{i}" for i in range(256)], ME)
        with pytest.raises(InvalidQueryError, match="256"):
            add_tags(connection, 1, ["more"], ME)
        with pytest.raises(InvalidQueryError, match="256"):
            set_metrics(connection, 1, {f"m{i}": 1.0 for i in range(257)}, ME)


def test_an_alias_moves_within_its_run(catalog: Database) -> None:
    """Both checkpoints change with it: the one that had it, and the one that has it."""
    with catalog.write() as connection:
        first = set_alias(connection, 1, "best", 1, ME)
        assert (first.checkpoint_id, first.version, first.updated_by) == (1, 1, "key:me")
        assert set_alias(connection, 1, "best", 1, ME) == first
        moved = set_alias(connection, 1, "best", 2, Change(actor="b", expected_version=1))
        assert (moved.checkpoint_id, moved.version) == (2, 2)
        assert [get_checkpoint(connection, number).version for number in (1, 2)] == [3, 2]
        assert get_checkpoint(connection, 1).aliases == ()
        assert get_checkpoint(connection, 2).aliases == ("best",)
        assert [alias.name for alias in list_aliases(connection, 1)] == ["best"]
        assert moved.etag != first.etag
        details = [entry.detail for entry in audit_page(connection, target="run:1").entries]
        delete_alias(connection, 1, "best", ME)
        assert list_aliases(connection, 1) == []
        assert get_checkpoint(connection, 2).version == 3
        with pytest.raises(MissingError):
            delete_alias(connection, 1, "best", ME)
    assert [(detail["from"], detail["to"]) for detail in details] == [(1, 2), (None, 1)]


@pytest.mark.parametrize(
    ("number", "change", "error"),
    [
        (3, ME, MissingError),  # of another run
        (99, ME, MissingError),
        (1, Change(actor="a", visible=frozenset()), MissingError),
        (1, Change(actor="a", expected_version=0), ChangedError),  # it is there
        (1, Change(actor="a", expected_version=2), ChangedError),
    ],
)
def test_an_alias_that_cannot_be_set_so(
    catalog: Database, number: int, change: Change, error: type[CatalogError]
) -> None:
    """Refused, and it stays where it is."""
    with catalog.write() as connection:
        set_alias(connection, 1, "best", 2, ME)
        with pytest.raises(error):
            set_alias(connection, 1, "best", number, change)
        assert get_alias(connection, 1, "best").checkpoint_id == 2


def test_protected_aliases_need_an_admin(catalog: Database) -> None:
    """Without one it is neither protected, moved, freed nor removed."""
    with catalog.write() as connection:
        with pytest.raises(ProtectedError):
            set_alias(connection, 1, "production", 1, ME, is_protected=True)
        alias = set_alias(connection, 1, "production", 1, ME, is_admin=True, is_protected=True)
        assert alias.is_protected
        for act in (
            lambda: set_alias(connection, 1, "production", 2, ME),
            lambda: set_alias(connection, 1, "production", 1, ME, is_protected=False),
            lambda: delete_alias(connection, 1, "production", ME),
        ):
            with pytest.raises(ProtectedError, match="admin"):
                act()
        assert set_alias(connection, 1, "production", 2, ME, is_admin=True).is_protected
        with pytest.raises(MissingError):
            delete_alias(connection, 1, "production", Change(actor="a", visible=frozenset()), is_admin=True)
        delete_alias(connection, 1, "production", ME, is_admin=True)


def test_two_that_move_an_alias_at_once_know_of_each_other(catalog: Database) -> None:
    """Both saw version 1: the second to come is refused."""
    with catalog.write() as connection:
        set_alias(connection, 1, "best", 1, ME)
    seen = Change(actor="a", expected_version=1)
    catalog.transact(lambda connection: set_alias(connection, 1, "best", 2, seen))
    with pytest.raises(ChangedError) as error:
        catalog.transact(lambda connection: set_alias(connection, 1, "best", 1, seen))
    assert error.value.version == 2
