"""Runs as lists, and lineage as a graph, of what may be seen."""

from __future__ import annotations

from typing import Any

import pytest

from dcp.server.catalog.checkpoints import CheckpointFacts, upsert_checkpoint, upsert_checkpoints
from dcp.server.catalog.errors import InvalidQueryError, MissingError
from dcp.server.catalog.labelling.lineage import MAX_NODES, add_lineage, lineage_of
from dcp.server.catalog.labelling.series import metric_series
from dcp.server.catalog.roots import list_roots, root_row, set_scanned, sync_roots
from dcp.server.catalog.runs import RunFilter, RunSort, get_run, list_runs
from dcp.server.database.engine import Database
from dcp.server.records.declaring import moment

pytestmark = pytest.mark.each_database  # their SQL differs


def add(database: Database, root: str, key: str, **facts: Any) -> int:
    """One more checkpoint; its id."""
    with database.write() as connection:
        made = CheckpointFacts(
            root=root,
            key=key,
            format="dcp",
            observed_seconds=1.0,
            committed_seconds=float(facts.get("at", 1)),
            step=facts.get("step"),
            save_id=facts.get("save_id"),
            resumed_from=facts.get("resumed_from"),
            content_digest=facts.get("content_digest"),
            provenance=facts.get("provenance"),
            bytes=facts.get("bytes", 0),
            state="committed" if facts.get("whole", 1) else "incomplete",
        )
        return upsert_checkpoint(connection, made).id


@pytest.fixture
def catalog(database: Database) -> Database:
    """A database with the roots "main" and "other"."""
    with database.write() as connection:
        sync_roots(connection, {"main": "./main", "other": "./other"})
    return database


def test_runs_are_listed_in_every_order(catalog: Database) -> None:
    """By their latest, key, bytes and number, page by page; one without a committed one is the oldest."""
    add(catalog, "main", "a/1", at=5, bytes=10, step=3)
    add(catalog, "main", "a/2", at=4, bytes=10, step=9)
    add(catalog, "main", "B/1", at=9, bytes=50)
    add(catalog, "other", "c/1", at=7, bytes=1)
    add(catalog, "other", "d/1", whole=0)
    expected: dict[RunSort, list[str]] = {
        "-latest": ["B", "c", "a", "d"],
        "latest": ["d", "a", "c", "B"],
        "key": ["B", "a", "c", "d"],
        "-bytes": ["B", "a", "c", "d"],
        "-checkpoints": ["a", "c", "B", "d"],
    }
    with catalog.read() as connection:
        for sort, keys in expected.items():
            found: list[str] = []
            cursor = None
            for _ in range(4):
                page = list_runs(connection, RunFilter(), sort, cursor, 1)
                found += [run.key for run in page.runs]
                cursor = page.next_cursor
            assert (found, cursor) == (keys, None), sort
        of_a = list_runs(connection, RunFilter(root="main", contains="a")).runs
        assert [(run.latest_step, run.latest_at, run.bytes) for run in of_a] == [(9, moment(5.0), 20)]
        assert [run.key for run in list_runs(connection, RunFilter(glob="[a-c]")).runs] == ["c", "a"]
        seen = list_runs(connection, RunFilter(), visible=frozenset({"other"})).runs
        assert [run.key for run in seen] == ["c", "d"]
        with pytest.raises(MissingError):
            get_run(connection, of_a[0].id, frozenset({"other"}))
        with pytest.raises(InvalidQueryError, match="cursor"):
            list_runs(connection, RunFilter(), "key", list_runs(connection, RunFilter(), limit=1).next_cursor)


def test_lineage_shows_ancestors_and_descendants(catalog: Database) -> None:
    """Base -> fine -> {safetensors, bf16}, and another branch of the base that is no relative of these."""
    through = {"map": "back"}
    # known before what it is of
    fine = add(catalog, "main", "run/b", save_id="fine", resumed_from="base", provenance=through)
    base, st, bf16 = (add(catalog, "main", f"run/{n}", save_id={"a": "base"}.get(n)) for n in "acd")
    add(catalog, "main", "run/e", save_id="other", resumed_from="base")
    with catalog.write() as connection:
        add_lineage(connection, st, fine)
        add_lineage(connection, bf16, fine, map="there\0")
        add_lineage(connection, st, fine)  # again, by a retry
        found = lineage_of(connection, fine)
        assert [(node.id, node.distance) for node in found.nodes] == [
            (fine, 0),
            (base, -1),
            (st, 1),
            (bf16, 1),
        ]
        edges = [(edge.child_id, edge.parent_id, edge.kind, edge.map) for edge in found.edges]
        assert sorted(edges) == [
            (fine, base, "resumed_from", "back"),
            (st, fine, "converted_from", None),
            (bf16, fine, "converted_from", "there\\x00"),
        ]
        assert not found.is_cut
        with pytest.raises(InvalidQueryError):
            add_lineage(connection, base, base)


def test_lineage_says_what_has_the_same_tensors(catalog: Database) -> None:
    """Committed ones of equal digests in the roots that may be seen, the newest first, by an index."""
    places = enumerate(("main", "main", "other"))
    one, two, far = (add(catalog, root, f"run/{n}", content_digest="d" * 32) for n, root in places)
    other = add(catalog, "main", "run/other", content_digest="e" * 32)
    add(catalog, "main", "run/begun", content_digest="d" * 32, whole=0)
    none, _ = (add(catalog, "main", f"run/none-{n}") for n in range(2))
    with catalog.read() as connection:
        assert [node.id for node in lineage_of(connection, one).also_in] == [far, two]
        assert [node.id for node in lineage_of(connection, one, frozenset({"main"})).also_in] == [two]
        assert lineage_of(connection, other).also_in == lineage_of(connection, none).also_in == ()


def test_lineage_bears_rings_and_hides_what_may_not_be_seen(catalog: Database) -> None:
    """Files may say anything: a ring ends. What is in a hidden root is not there, and nothing behind it."""
    mine, theirs, behind = (
        add(catalog, "main", "r/a", save_id="mine", resumed_from="behind"),
        add(catalog, "other", "r/b", save_id="its own", resumed_from="its own"),
        add(catalog, "main", "r/c", save_id="behind"),
    )
    with catalog.write() as connection:
        add_lineage(connection, theirs, mine)
        add_lineage(connection, behind, theirs)
        assert {node.id for node in lineage_of(connection, mine).nodes} == {mine, theirs, behind}
        found = lineage_of(connection, mine, frozenset({"main"}))
        assert [node.id for node in found.nodes] == [mine, behind]
        assert [(edge.child_id, edge.parent_id) for edge in found.edges] == [(mine, behind)]
        with pytest.raises(MissingError):
            lineage_of(connection, mine, frozenset({"other"}))


def test_a_huge_family_is_cut(catalog: Database) -> None:
    """More relatives than anybody looks at: some of them, and a word that there are more."""
    base = add(catalog, "main", "r/base", save_id="base")
    with catalog.write() as connection:
        facts = [
            CheckpointFacts(
                root="main", key=f"r/{number}", format="dcp", observed_seconds=1.0, resumed_from="base"
            )
            for number in range(MAX_NODES + 5)
        ]
        upsert_checkpoints(connection, facts)
        found = lineage_of(connection, base)
    assert (len(found.nodes), found.is_cut) == (MAX_NODES, True)


def test_roots_follow_the_configuration(catalog: Database) -> None:
    """One that is not configured any more keeps its row; one with another URL is scanned anew."""
    with catalog.write() as connection:
        set_scanned(connection, "main", state={"seen": 1}, error="away", now=5.0)
        assert root_row(connection, "main").scan_error == "away"
        sync_roots(connection, {"main": "./moved", "new": "s3://b/p"})
        main = root_row(connection, "main")
        assert (main.url, main.scan_state, main.scanned_seconds) == ("./moved", None, 5.0)
        known = {row.name: row.is_configured for row in list_roots(connection)}
        assert known == {"main": True, "new": True, "other": False}
        assert [row.name for row in list_roots(connection, frozenset({"new"}))] == ["new"]
        sync_roots(connection, {"other": "./other"})
        assert root_row(connection, "other").is_configured
        with pytest.raises(MissingError):
            root_row(connection, "nowhere")


def test_a_metric_over_the_steps_of_a_run(catalog: Database) -> None:
    """Each checkpoint is a point where there are few; else the least, greatest and mean of neighbours."""
    facts = [
        CheckpointFacts(
            root="main",
            key=f"r/{step}",
            format="dcp",
            observed_seconds=1.0,
            committed_seconds=float(step),
            step=step,
            metrics={"loss": 100.0 - step, "other": 1.0},
        )
        for step in range(10)
    ]
    with catalog.write() as connection:
        upsert_checkpoints(connection, facts)
    add(catalog, "main", "r/without", step=77)
    add(catalog, "main", "r/unfinished", step=78, whole=0)
    with catalog.read() as connection:
        run_id = list_runs(connection, RunFilter()).runs[0].id
        every = metric_series(connection, run_id, "loss", points=100)
        assert [(one.first_step, one.last_step, one.count, one.mean) for one in every.points] == [
            (step, step, 1, 100.0 - step) for step in range(10)
        ]
        few = metric_series(connection, run_id, "loss", points=3)
        assert few.count == 10
        assert [(one.first_step, one.last_step, one.count) for one in few.points] == [
            (0, 3, 4),
            (4, 6, 3),
            (7, 9, 3),
        ]
        first = few.points[0]
        assert (first.min, first.max, first.mean) == (97.0, 100.0, 98.5)
        assert metric_series(connection, run_id, "nothing", points=3).points == ()
        with pytest.raises(MissingError):
            metric_series(connection, run_id, "loss", frozenset({"other"}), points=3)
