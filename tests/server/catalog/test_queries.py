"""Lists: every filter, order and page is compared with the same done in plain Python, on both databases."""

from __future__ import annotations

import fnmatch
import operator
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, text, update

from dcp.server.catalog.checkpoints import CheckpointFacts, set_state, upsert_checkpoints
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.details import Checkpoint
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.labelling.aliases import set_alias
from dcp.server.catalog.labelling.labels import Change
from dcp.server.catalog.queries import listing, planning
from dcp.server.catalog.queries.listing import CheckpointFilter, MetricCondition, Sort, list_checkpoints
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints

pytestmark = pytest.mark.each_database  # their SQL differs

BIG = StructureFacts.of(
    [StructureTensor(f"layers.{i}.weight", "tensor", "bfloat16", (2,), 4) for i in range(3)]
)
SMALL = StructureFacts.of([StructureTensor("head.weight", "tensor", "float32", (2,), 8)])
FORMATS = ("dcp", "torch_dcp", "safetensors")
COMPARED: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
TENSORS = {"bfloat16": [f"layers.{i}.weight" for i in range(3)], "float32": ["head.weight"]}


def fill(connection: Connection) -> None:
    """300 checkpoints in two roots and seven runs, of which many are alike in what is sorted by."""
    chance = random.Random(7)
    sync_roots(connection, {"main": "./main", "other": "./other"})
    facts = []
    for number in range(300):
        run = f"team/run-{number % 7}" if number % 7 else ""
        has_step = number % 11 != 0
        name = f"step-{number // 3:03}" if has_step else f"Final_{number}"
        key = f"{run}/{name}" if run else name
        facts.append(
            CheckpointFacts(
                root=("main", "other")[number % 3 == 0],
                key=f"{key}.{number % 3}" if number % 5 == 0 else f"{key}-{number}",
                format=FORMATS[number % 3],
                observed_seconds=1.0,
                committed_seconds=float(chance.randrange(40)) + 0.5,
                step=chance.randrange(30) if has_step else None,
                save_id=str(number),
                bytes=chance.randrange(20) * 100,
                structure=(BIG, SMALL, None)[number % 3],
                is_pinned=number % 13 == 0,
                tags=frozenset(
                    tag for tag in ("a", "b", "rare") if chance.random() < {"rare": 0.02}.get(tag, 0.4)
                ),
                metrics={"loss": chance.randrange(10) / 2} if number % 4 else {},
            )
        )
    done = upsert_checkpoints(connection, facts, now=100.0)
    for number in range(0, 300, 17):
        set_state(connection, done[number].id, "vanished", actor="test")
    set_state(connection, done[1].id, "unreadable", actor="test")
    verified = [one.id for one in done[::9]]
    for outcome, numbers in (("good", verified), ("damaged", verified[:5])):
        connection.execute(
            update(checkpoints).where(checkpoints.c.id.in_(numbers)).values(verification=outcome)
        )
    for one in done[3:60:7]:
        run_id = connection.execute(
            text("SELECT run_id FROM checkpoints WHERE id = :id"), {"id": one.id}
        ).scalar_one()
        set_alias(connection, run_id, f"best-{one.id % 2}", one.id, Change(actor="test"))


@pytest.fixture(params=[planning.FEW, 25, 0], ids=["by filters", "mixed", "in order"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How few rows are few, and how many are looked at for a page: the same rows must come by either way."""
    monkeypatch.setattr(planning, "FEW", request.param)
    if request.param == 0:
        monkeypatch.setattr(listing, "WINDOWS", (90, 120))


@pytest.fixture(scope="module")
def catalog(shared_database: Database) -> Database:
    """A database that is filled."""
    shared_database.transact(fill)
    return shared_database


def everything(connection: Connection) -> list[Checkpoint]:
    """All checkpoints, in no order that is tested."""
    return list_checkpoints(connection, CheckpointFilter(states=frozenset()), limit=1000).checkpoints


def holds(one: Checkpoint, wanted: CheckpointFilter) -> bool:
    """What `CheckpointFilter` says, in Python."""
    names = TENSORS[next(iter(one.dtypes))] if one.dtypes else []
    tests = [
        wanted.root in (None, one.root),
        wanted.run_id in (None, one.run_id),
        wanted.run in (None, one.run),
        wanted.run_contains is None or wanted.run_contains in one.run,
        wanted.run_glob is None or fnmatch.fnmatchcase(one.run, wanted.run_glob),
        wanted.min_step is None or (one.step is not None and one.step >= wanted.min_step),
        wanted.max_step is None or (one.step is not None and one.step <= wanted.max_step),
        wanted.since_seconds is None or one.committed_at.timestamp() >= wanted.since_seconds,
        wanted.until_seconds is None or one.committed_at.timestamp() < wanted.until_seconds,
        not wanted.formats or one.format in wanted.formats,
        not wanted.states or one.state in wanted.states,
        not wanted.verifications or one.verification in wanted.verifications,
        wanted.tags <= set(one.tags),
        wanted.alias is None or wanted.alias in one.aliases,
        all(
            metric.name in one.metrics and COMPARED[metric.comparison](one.metrics[metric.name], metric.value)
            for metric in wanted.metrics
        ),
        wanted.dtype is None or wanted.dtype in (one.dtypes or {}),
        wanted.tensor is None or any(fnmatch.fnmatchcase(name, wanted.tensor) for name in names),
        wanted.name_contains is None or wanted.name_contains in one.name,
        wanted.name_glob is None or fnmatch.fnmatchcase(one.name, wanted.name_glob),
        wanted.is_pinned in (None, one.is_pinned),
    ]
    return all(tests)


def expected(all_of: list[Checkpoint], wanted: CheckpointFilter, sort: Sort) -> list[int]:
    """The ids that a list gives, in order."""
    places: dict[str, Callable[[Checkpoint], Any]] = {
        "time": lambda one: one.committed_at.timestamp(),
        "step": lambda one: -1 if one.step is None else one.step,
        "bytes": lambda one: one.bytes,
        "name": lambda one: one.name,
        "metric": lambda one: one.metrics[sort.metric or ""],
    }
    chosen = [one for one in all_of if holds(one, wanted)]
    if sort.by == "metric":
        chosen = [one for one in chosen if sort.metric in one.metrics]
    chosen.sort(key=lambda one: (places[sort.by](one), one.id), reverse=sort.descending)
    return [one.id for one in chosen]


def pages(
    connection: Connection,
    wanted: CheckpointFilter,
    sort: Sort,
    limit: int,
    visible: frozenset[str] | None = None,
) -> list[int]:
    """The ids of all pages, one after the other."""
    found: list[int] = []
    cursor = None
    for _ in range(200):
        page = list_checkpoints(connection, wanted, sort, cursor, limit, visible)
        found += [one.id for one in page.checkpoints]
        cursor = page.next_cursor
        if cursor is None:
            return found
        assert len(page.checkpoints) == limit or sum(listing.WINDOWS) < 300
    raise AssertionError("the pages do not end")


FILTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "all states": {"states": frozenset()},
    "root": {"root": "other"},
    "unknown root": {"root": "nowhere"},
    "run": {"run": "team/run-3"},
    "root run": {"run": ""},
    "run of root": {"run": "team/run-3", "root": "main"},
    "run_contains": {"run_contains": "run-"},
    "run_glob": {"run_glob": "team/*-[2-4]"},
    "min_step": {"min_step": 0},
    "max_step": {"max_step": 9},
    "steps": {"min_step": 10, "max_step": 12},
    "since": {"since_seconds": 20.5},
    "times": {"since_seconds": 10.0, "until_seconds": 12.5},
    "format": {"formats": frozenset({"safetensors"})},
    "formats": {"formats": frozenset({"dcp", "torch_dcp"})},
    "vanished": {"states": frozenset({"vanished"})},
    "states": {"states": frozenset({"vanished", "committed"})},
    "purged": {"states": frozenset({"purged"})},
    "damaged": {"verifications": frozenset({"damaged"})},
    "verified": {"verifications": frozenset({"damaged", "good"})},
    "tag": {"tags": frozenset({"a"})},
    "tags": {"tags": frozenset({"a", "b"})},
    "rare tag": {"tags": frozenset({"rare"})},
    "unknown tag": {"tags": frozenset({"none"})},
    "alias": {"alias": "best-1"},
    "metric": {"metrics": (MetricCondition("loss", "<", 1.5),)},
    "metrics": {"metrics": (MetricCondition("loss", ">=", 1.0), MetricCondition("loss", "!=", 2.0))},
    "metric is": {"metrics": (MetricCondition("loss", "=", 2.5),)},
    "metric range": {"metrics": (MetricCondition("loss", ">", 3.0), MetricCondition("loss", "<=", 3.5))},
    "dtype": {"dtype": "bfloat16"},
    "unknown dtype": {"dtype": "int3"},
    "tensor": {"tensor": "head.weight"},
    "tensor glob": {"tensor": "*.[1-9].weight"},
    "name_contains": {"name_contains": "ep-01"},
    "name_contains of a glob": {"name_contains": "*"},
    "name_glob": {"name_glob": "[!s]*"},
    "name_glob ?": {"name_glob": "step-0?[0-4]*"},
    "case": {"name_contains": "STEP"},
    "pinned": {"is_pinned": True},
    "not pinned": {"is_pinned": False},
    "much": {
        "tags": frozenset({"a"}),
        "dtype": "bfloat16",
        "min_step": 3,
        "is_pinned": False,
        "root": "other",
    },
}
SORTS = ("-time", "time", "-step", "step", "-bytes", "bytes", "-name", "name", "-metric:loss", "metric:loss")


def test_every_filter_in_every_order_page_by_page(catalog: Database, ways: None) -> None:
    """All pages together are what Python finds: each filter in each order, whichever way it is found."""
    with catalog.read() as connection:
        all_of = everything(connection)
        assert len(all_of) == 300
        for number, (name, given_filter) in enumerate(FILTERS.items(), start=planning.FEW):
            wanted = CheckpointFilter(**given_filter)
            sort = Sort.parse(SORTS[(3 * number) % len(SORTS)])
            assert pages(connection, wanted, sort, limit=101) == expected(all_of, wanted, sort), (name, sort)


def test_filters_leave_something_and_not_everything(catalog: Database) -> None:
    """The test above is about something: each filter but those of unknown things leaves some, not all."""
    empty = {name for name in FILTERS if name.startswith("unknown")} | {
        "purged",
        "case",
        "name_contains of a glob",
    }
    with catalog.read() as connection:
        all_of = everything(connection)
        for name, given_filter in FILTERS.items():
            count = len(expected(all_of, CheckpointFilter(**given_filter), Sort()))
            assert (count == 0) == (name in empty), name
            assert count < 300 or name == "all states"


def test_every_order_with_small_pages(catalog: Database, ways: None) -> None:
    """Many rows are equal in what is sorted by, and pages end within them: none is lost, none comes twice."""
    with catalog.read() as connection:
        all_of = everything(connection)
        wanted = CheckpointFilter(root="main", tags=frozenset({"a"}))
        for sort in map(Sort.parse, SORTS):
            assert pages(connection, wanted, sort, limit=13) == expected(all_of, wanted, sort), sort


def test_a_search_that_finds_next_to_nothing_goes_on_with_the_next_page(
    catalog: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters that each leave many and together nothing: empty pages after so many rows, until the end."""
    monkeypatch.setattr(planning, "FEW", 0)
    monkeypatch.setattr(listing, "WINDOWS", (20, 50))
    wanted = CheckpointFilter(dtype="bfloat16", tensor="head.weight", states=frozenset())
    with catalog.read() as connection:
        cursors = []
        cursor = None
        while True:
            page = list_checkpoints(connection, wanted, Sort(), cursor, limit=10)
            assert page.checkpoints == []
            cursor = page.next_cursor
            if cursor is None:
                break
            cursors.append(cursor)
    assert len(cursors) == len(set(cursors)) == 300 // 70


def test_what_may_not_be_seen_is_in_no_list(catalog: Database, ways: None) -> None:
    """A key for one root sees that root only, whatever it asks for; one for none sees nothing."""
    with catalog.read() as connection:
        everything_of_main = [one for one in everything(connection) if one.root == "main"]
        sort = Sort()
        main = frozenset({"main"})
        for name in ("nothing", "tag", "name_contains", "tensor", "pinned", "root"):
            wanted = CheckpointFilter(**FILTERS[name])
            assert pages(connection, wanted, sort, 50, main) == expected(everything_of_main, wanted, sort), (
                name
            )
            assert pages(connection, wanted, sort, 50, frozenset()) == []
        hidden = CheckpointFilter(run_id=next(o.run_id for o in everything(connection) if o.root == "other"))
        assert pages(connection, hidden, sort, 50) != []
        assert pages(connection, hidden, sort, 50, main) == []


def test_rows_are_shown_with_their_labels(catalog: Database) -> None:
    """A list shows tags, aliases and metrics of each row; those of others do not get in."""
    with catalog.read() as connection:
        page = list_checkpoints(connection, CheckpointFilter(alias="best-1"), limit=3)
        assert page.checkpoints
        for one in page.checkpoints:
            assert "best-1" in one.aliases
            query = text("SELECT tag FROM checkpoint_tags WHERE checkpoint_id = :id ORDER BY tag")
            assert one.tags == tuple(connection.execute(query, {"id": one.id}).scalars())
            assert set(one.metrics) <= {"loss"}


def test_a_cursor_goes_on_with_its_own_query_only(catalog: Database) -> None:
    """Another filter, order or set of roots, and words that are no cursors, are refused."""
    wanted, sort = CheckpointFilter(tags=frozenset({"a"})), Sort.parse("step")
    with catalog.read() as connection:
        cursor = list_checkpoints(connection, wanted, sort, limit=5).next_cursor
        assert cursor is not None
        others: list[Callable[[], object]] = [
            lambda: list_checkpoints(connection, CheckpointFilter(), sort, cursor),
            lambda: list_checkpoints(connection, replace(wanted, min_step=1), sort, cursor),
            lambda: list_checkpoints(connection, wanted, Sort.parse("-step"), cursor),
            lambda: list_checkpoints(connection, wanted, sort, cursor, visible=frozenset({"main"})),
            lambda: list_checkpoints(connection, wanted, sort, cursor[:-3]),
            lambda: list_checkpoints(connection, wanted, sort, "AAAA"),
            lambda: list_checkpoints(connection, wanted, sort, ""),
            lambda: list_checkpoints(connection, wanted, sort, "\ud800"),
        ]
        for other in others:
            with pytest.raises(InvalidQueryError, match="cursor"):
                other()
        assert list_checkpoints(connection, wanted, sort, cursor, limit=500).checkpoints


@pytest.mark.parametrize("text_", ["loss<2.5", "loss <= 2.5", "loss==1", "eval/loss!=-1e-3", "a-b>=0", "l=1"])
def test_comparisons_are_parsed(text_: str) -> None:
    """Name, comparison, number; with or without blanks."""
    condition = MetricCondition.parse(text_)
    assert condition.name == text_.split()[0].rstrip("<>=!0123456789.-e") or condition.name in text_
    assert condition.comparison in COMPARED


@pytest.mark.parametrize(
    "text_", ["", "loss", "loss<", "<3", "loss<nan", "loss<inf", "loss~3", "lo ss<3", "a<b<3"]
)
def test_other_comparisons_are_refused(text_: str) -> None:
    """What is no comparison with a finite number is said to be none."""
    with pytest.raises(InvalidQueryError, match="metric"):
        MetricCondition.parse(text_)


@pytest.mark.parametrize(
    "given_filter",
    [
        {"states": frozenset({"lost"})},
        {"formats": frozenset({"zip"})},
        {"min_step": -1},
        {"max_step": 2**63},
        {"since_seconds": float("nan")},
        {"name_glob": "*a*b*c*d*e*f*g*h*i*"},
        {"name_glob": "[z-a]"},
        {"name_contains": ""},
        {"tensor": "x" * 300},
        {"run": "a\x00"},
        {"tags": frozenset({"a b"})},
        {"tags": frozenset(map(str, range(9)))},
        {"alias": "\x00"},
    ],
)
def test_filters_that_cannot_be_meant_are_refused(given_filter: dict[str, Any]) -> None:
    """Before any database is asked."""
    with pytest.raises(InvalidQueryError):
        CheckpointFilter(**given_filter)


@pytest.mark.parametrize("sort", ["", "size", "-", "metric", "metric:", "time:x", "-metric:a b"])
def test_orders_that_are_none_are_refused(sort: str) -> None:
    """Only what is documented."""
    with pytest.raises(InvalidQueryError, match="sort"):
        Sort.parse(sort)
