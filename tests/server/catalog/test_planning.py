"""What the databases do for the main questions: nothing is read through, nothing sorted that need not be."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import Connection, text

from dcp.server.catalog.checkpoints import CheckpointFacts, upsert_checkpoints
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.queries import planning
from dcp.server.catalog.queries.conditions import conditions_of
from dcp.server.catalog.queries.filters import CheckpointFilter, MetricCondition, Sort
from dcp.server.catalog.queries.listing import Search, list_checkpoints
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database

pytestmark = pytest.mark.each_database  # their SQL differs

COMMON = StructureFacts.of([StructureTensor("w", "tensor", "bfloat16", (1,), 2)])
RARE = StructureFacts.of([StructureTensor("odd", "tensor", "float8", (1,), 1)])
FEW = 20


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "FEW", FEW)


@pytest.fixture(scope="module")
def catalog(shared_database: Database) -> Database:
    """2,000 checkpoints in 20 runs; what is rare is had by ten or fewer of them."""

    def fill(connection: Connection) -> None:
        sync_roots(connection, {"main": "./main"})
        facts = [
            CheckpointFacts(
                root="main",
                key=f"run-{number % 20}/step-{number:05}",
                format="dcp" if number % 2 else "safetensors",
                observed_seconds=1.0,
                committed_seconds=float(number),
                step=number,
                save_id=str(number),
                bytes=number,
                structure=RARE if number % 400 == 0 else COMMON,
                is_pinned=number % 300 == 0,
                tags=frozenset({"common"} | ({"rare"} if number % 500 == 0 else set())),
                metrics={"loss": float(number)},
            )
            for number in range(2000)
        ]
        upsert_checkpoints(connection, facts)

    shared_database.transact(fill)
    if shared_database.dialect == "postgresql":
        with shared_database.write() as connection:
            connection.execute(text("ANALYZE"))
    return shared_database


def explained(connection: Connection, wanted: CheckpointFilter, sort: str, *, how: str = "EXPLAIN") -> str:
    """The plan of a page, as the database tells it."""
    query = Search(connection, wanted, Sort.parse(sort)).query().limit(11)
    statement = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
    if connection.dialect.name == "sqlite":
        how = "EXPLAIN QUERY PLAN"
    return "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"{how} {statement}"))


IN_ORDER = [
    (CheckpointFilter(), "-time", "ix_checkpoints_state_committed_seconds_id"),
    (CheckpointFilter(states=frozenset()), "-time", "ix_checkpoints_committed_seconds_id"),
    (CheckpointFilter(states=frozenset()), "time", "ix_checkpoints_committed_seconds_id"),
    (CheckpointFilter(), "-step", "ix_checkpoints_step_order_id"),
    (CheckpointFilter(), "bytes", "ix_checkpoints_bytes_id"),
    (CheckpointFilter(), "name", "ix_checkpoints_name_id"),
    (CheckpointFilter(run="run-3"), "-step", "ix_checkpoints_run_id_step_order_id"),
    (CheckpointFilter(run="run-3"), "-time", "ix_checkpoints_run_id_committed_seconds_id"),
    (CheckpointFilter(root="main"), "-time", "ix_checkpoints_root_id_committed_seconds_id"),
    (CheckpointFilter(formats=frozenset({"dcp"})), "-time", "ix_checkpoints_format_committed_seconds_id"),
    (CheckpointFilter(is_pinned=True), "-time", "ix_checkpoints_is_pinned_committed_seconds_id"),
    (
        CheckpointFilter(verifications=frozenset({"damaged"})),
        "-time",
        "ix_checkpoints_verification_committed_seconds_id",
    ),
    (CheckpointFilter(tags=frozenset({"common"})), "-step", "ix_checkpoints_step_order_id"),
    (CheckpointFilter(dtype="bfloat16"), "-bytes", "ix_checkpoints_bytes_id"),
    (CheckpointFilter(tensor="w"), "-bytes", "ix_checkpoints_bytes_id"),
    (CheckpointFilter(metrics=(MetricCondition("loss", ">", 5.0),)), "-step", "ix_checkpoints_step_order_id"),
    (CheckpointFilter(name_contains="step"), "-step", "ix_checkpoints_step_order_id"),
]


def test_pages_are_read_from_the_index_of_their_order(catalog: Database) -> None:
    """Where many rows are left: from the index that has the order, without sorting.

    SQLite takes just the index it is told. PostgreSQL would rather sort so few rows, but is able to.
    """
    with catalog.read() as connection:
        if catalog.dialect == "postgresql":
            for way in ("seqscan", "sort", "incremental_sort", "bitmapscan", "hashjoin", "mergejoin"):
                connection.execute(text(f"SET LOCAL enable_{way} = off"))
        for wanted, sort, index in IN_ORDER:
            found = explained(connection, wanted, sort)
            case = f"{wanted} {sort}\n{found}"
            if catalog.dialect == "sqlite":
                assert f"USING INDEX {index}" in found or f"USING COVERING INDEX {index}" in found, case
                assert "TEMP B-TREE" not in found, case
                assert "SCAN checkpoints\n" not in f"{found}\n", case
            else:
                assert re.search(r"Index (Only )?Scan (Backward )?using ix_checkpoints_", found), case
                assert "Sort" not in found, case


BY_FILTER = [
    (CheckpointFilter(tags=frozenset({"rare"})), "-time", "ix_checkpoint_tags_tag_checkpoint_id"),
    (CheckpointFilter(alias="best"), "-time", "ix_aliases_name_checkpoint_id"),
    (CheckpointFilter(dtype="float8"), "-bytes", "ix_structure_dtypes_dtype_structure_id"),
    (CheckpointFilter(tensor="odd"), "-time", "ix_structure_tensors_fqn_structure_id"),
    (
        CheckpointFilter(metrics=(MetricCondition("loss", "<", 9.0),)),
        "-time",
        "ix_checkpoint_metrics_name_value_checkpoint_id",
    ),
    (CheckpointFilter(name_contains="00017"), "-time", "ix_checkpoints_name_id"),
    (CheckpointFilter(min_step=5, max_step=9), "-bytes", "ix_checkpoints_step_order_id"),
    (CheckpointFilter(since_seconds=3.0, until_seconds=7.0), "-bytes", "ix_checkpoints_committed_seconds_id"),
    (CheckpointFilter(is_pinned=True), "-bytes", "ix_checkpoints_is_pinned_committed_seconds_id"),
    (CheckpointFilter(states=frozenset({"deleted"})), "-step", "ix_checkpoints_state_committed_seconds_id"),
]


def test_few_rows_are_taken_by_the_filter_that_leaves_them(catalog: Database) -> None:
    """Where few rows are left: by that filter's index, and the rows themselves by number."""
    with catalog.read() as connection:
        for wanted, sort, index in BY_FILTER:
            found = explained(connection, wanted, sort)
            case = f"{wanted} {sort}\n{found}"
            if catalog.dialect == "sqlite":
                assert re.search(rf"USING (COVERING )?INDEX {index}", found), case
                assert "SEARCH checkpoints USING INTEGER PRIMARY KEY" in found, case
            else:
                assert re.search(r"Index Scan using pk_checkpoints on checkpoints", found), case
            assert len(list_checkpoints(connection, wanted, Sort.parse(sort)).checkpoints) <= FEW


@pytest.mark.parametrize("sort", ["-metric:loss", "metric:loss"])
def test_by_metric_goes_through_the_metrics_in_order(catalog: Database, sort: str) -> None:
    """The index by value gives the order; each checkpoint is looked up by its number."""
    with catalog.read() as connection:
        if catalog.dialect == "postgresql":
            connection.execute(text("SET LOCAL enable_sort = off"))
            connection.execute(text("SET LOCAL enable_hashjoin = off"))
        found = explained(connection, CheckpointFilter(), sort)
    assert "ix_checkpoint_metrics_name_value_checkpoint_id" in found
    assert "TEMP B-TREE" not in found
    assert "Sort" not in found


def test_a_page_costs_the_same_wherever_it_is(catalog: Database) -> None:
    """All pages to the last are right; SQLite counts its steps: the last takes as many as the first."""
    costs: dict[str, list[int]] = {}
    with catalog.read() as connection:
        for sort in ("-time", "-step", "bytes", "name", "-metric:loss"):
            cursor = None
            for number in range(36):
                raw = connection.connection.driver_connection
                assert raw is not None
                ticks: list[None] = []
                if catalog.dialect == "sqlite":
                    raw.set_progress_handler(lambda ticks=ticks: ticks.append(None), 10)
                page = list_checkpoints(connection, CheckpointFilter(), Sort.parse(sort), cursor, 50)
                if catalog.dialect == "sqlite":
                    raw.set_progress_handler(None, 0)
                costs.setdefault(sort, []).append(10 * len(ticks))
                assert [one.version for one in page.checkpoints] == [1] * 50, number
                cursor = page.next_cursor
    for sort, of_sort in costs.items():
        assert max(of_sort[:18]) <= 2 * min(of_sort[:18]), sort
        assert max(of_sort) < 20_000, sort


def test_counting_stops_at_few(catalog: Database) -> None:
    """Whether a filter leaves few rows is found out without counting the many that it may leave."""
    with catalog.read() as connection:
        wanted = CheckpointFilter(tags=frozenset({"common"}), metrics=(MetricCondition("loss", ">", -1.0),))
        conditions = conditions_of(connection, wanted, None)
        assert planning.plan(connection, conditions, Sort()).driver is None
        assert max(planning.counts_of(connection, conditions)) == FEW + 1
