"""The list of runs: filtered by metadata and metrics, sorted by a metric; as JSON and as a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlencode

from fastapi import Query as InQuery
from fastapi import Request
from pydantic import Field
from sqlalchemy import Column, ColumnElement, Connection, Select, and_, exists, func, select

from dcp.server.catalog.cursors import query_mark, read_page
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.filters import RootName, check_root, notes_of
from dcp.server.catalog.inputs import MAX_ID, Name, Paged, Text
from dcp.server.catalog.runs import RunFilter, get_run, list_roots, select_runs
from dcp.server.core.ask import Ask
from dcp.server.core.logs import redact
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import roots, runs
from dcp.server.features.checkpoints import loss_of
from dcp.server.features.run_metrics import feature, run_metadata, run_metrics
from dcp.server.features.run_metrics.folding import number_of
from dcp.server.records.checkpoints import Run
from dcp.server.records.declaring import Shown
from dcp.server.records.lists import NotedPage, Page

MAX_RUNS: Final = 10
"""Runs of a comparison: more lines cannot be distinguished."""
_NAMES: Final = 200

Of = Literal["last", "min", "max"]
RunOrder = Literal[
    "latest", "-latest", "key", "-key", "bytes", "-bytes", "checkpoints", "-checkpoints", "metric", "-metric"
]
_Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
_Member = Annotated[Text, Field(min_length=1, max_length=1024)]
_RunId = Annotated[int, Field(ge=1, le=MAX_ID)]

_CONDITION: Final = re.compile(r"([^=<>!]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.*)")
_ORDERS: Final[Mapping[str, tuple[Column[Any], type]]] = {
    "latest": (runs.c.latest_order, float),
    "key": (runs.c.key, str),
    "bytes": (runs.c.bytes, int),
    "checkpoints": (runs.c.checkpoint_count, int),
}


@dataclass(frozen=True, slots=True)
class MetricPlace:
    """Value of a metric, and its checkpoint."""

    value: float
    step: int | None
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class RunMetric:
    """Metric over the committed checkpoints of a run. ``last``: value of the highest step."""

    name: str
    count: Annotated[int, Shown("Checkpoints with a finite value.")]
    last: Annotated[MetricPlace, Shown("Value of the highest step.")]
    min: Annotated[MetricPlace, Shown("Lowest value.")]
    max: Annotated[MetricPlace, Shown("Highest value.")]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Run with the requested metric, if present, and requested members of metadata."""

    run: Run
    metric: Annotated[RunMetric | None, Shown("The requested metric; null: the run has no such metric.")]
    metadata: Annotated[
        Mapping[str, str], Shown("Members in `show`, of the newest checkpoint; nested names joined by dots.")
    ]


@dataclass(frozen=True, slots=True)
class MetadataCondition:
    """Condition on a member of the newest checkpoint's metadata."""

    name: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a condition such as "optimizer.lr<0.01" or "model=7b". Raises InvalidQueryError."""
        found = _CONDITION.fullmatch(text.strip())
        if found is None:
            raise InvalidQueryError(
                "metadata", "expected name, comparison and value, such as optimizer.lr=0.001"
            )
        comparison = found[2].replace("==", "=")
        if comparison not in ("=", "!=") and number_of(found[3]) is None:
            raise InvalidQueryError(
                "metadata", f"expected a number after {comparison}, such as optimizer.lr<0.01"
            )
        return cls(found[1], comparison, found[3].strip())

    def test(self) -> ColumnElement[bool]:
        """Return the SQL test for `runs`. Numbers compare by value in any notation."""
        own, number = run_metadata.c, number_of(self.value)
        same = own.value == self.value
        if number is not None:
            same = same | (own.number == number)
        tests: dict[str, ColumnElement[bool]] = {"=": same, "!=": ~same}
        if number is not None:
            tests |= {"<": own.number < number, "<=": own.number <= number}
            tests |= {">": own.number > number, ">=": own.number >= number}
        return _has(run_metadata, and_(own.name == self.name, tests[self.comparison]))


def _has(table: Any, test: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists().where(table.c.run_id == runs.c.id, test).correlate(runs)


class RunListFilter(Paged):
    """Filter of runs by root, key, metadata, and metrics; all given members must match."""

    root: Annotated[RootName | None, Field(description="Name of a root.")] = None
    contains: Annotated[_Pattern | None, Field(description="Part of the key.")] = None
    glob: Annotated[_Pattern | None, Field(description="Glob for the key; * matches any characters.")] = None
    metadata: Annotated[
        tuple[_Member, ...],
        Field(
            max_length=8,
            description="Comparisons with metadata of the newest checkpoint, such as optimizer.lr<0.01.",
            examples=[["model=7b"]],
        ),
    ] = ()
    has_metric: Annotated[
        tuple[Name, ...], Field(max_length=8, description="Metrics; the run has all of them.")
    ] = ()
    metric: Annotated[Name | None, Field(description="Metric to show and to sort by.")] = None
    of: Annotated[
        Of, Field(description="The value of the metric to sort by; last is of the highest step.")
    ] = "last"
    sort: Annotated[
        RunOrder,
        Field(description="With a minus the greatest first. By metric, runs without it are left out."),
    ] = "-latest"

    @property
    def conditions(self) -> tuple[MetadataCondition, ...]:
        """The comparisons with metadata."""
        return tuple(map(MetadataCondition.parse, self.metadata))

    def apply(self, connection: Connection, query: Select[Any]) -> Select[Any]:
        """Restrict ``query``, which has `runs` and `roots`, to the filtered runs."""
        query = RunFilter(root=self.root, contains=self.contains, glob=self.glob).apply(connection, query)
        tests = [condition.test() for condition in self.conditions]
        tests += [_has(run_metrics, run_metrics.c.name == name) for name in sorted({*self.has_metric})]
        return query.where(*tests)


class RunListQuery(RunListFilter):
    """The same, with the members of metadata to show."""

    show: Annotated[tuple[_Member, ...], Field(max_length=8, description="Members of metadata.")] = ()


@feature.get("/runs/summaries", tag="runs", errors=())
def list_run_summaries(query: Annotated[RunListQuery, InQuery()], ask: Ask) -> NotedPage[RunSummary]:
    """List runs with the last value, minimum, and maximum of a metric, sorted by any of these. A worker
    updates the values within two seconds of a change."""
    with ask.reading() as connection:
        check_root(connection, query.root, ask.visible)
        page = _page(connection, query, ask.visible)
        notes = notes_of(connection, query.root, ask.visible)
        found = _summaries(connection, page.items, query.metric, query.show)
    return NotedPage(found, page.next_cursor, tuple(redact(notes)))


def _page(connection: Connection, wanted: RunListQuery, visible: frozenset[str] | None) -> Page[Run]:
    is_descending, by = wanted.sort.startswith("-"), wanted.sort.removeprefix("-")
    query = wanted.apply(connection, select_runs(visible))
    number: ColumnElement[Any] = runs.c.id
    if by != "metric":
        column, value_type = _ORDERS[by]
    elif wanted.metric is None:
        raise InvalidQueryError("sort", "sort=metric requires metric, such as sort=metric&metric=loss")
    else:
        own = run_metrics.c
        column, value_type, number = own[wanted.of], float, own.run_id
        query = query.join(run_metrics, own.run_id == runs.c.id).where(own.name == wanted.metric)
        # without statistics SQLite would start with the roots, and sort all rows
        query = query.with_hint(run_metrics, f"INDEXED BY ix_run_metrics_name_{wanted.of}_run_id", "sqlite")
    seen = visible if visible is None else sorted(visible)
    asked = wanted.model_dump(exclude={"cursor", "limit", "show"})
    mark = query_mark("run summaries", sorted(asked.items()), seen)
    return read_page(
        connection,
        query,
        partial(record_of_row, Run),
        mark,
        (column, value_type),
        (number, int),
        cursor=wanted.cursor,
        limit=wanted.limit,
        descending=is_descending,
    )


def _summaries(
    connection: Connection, found: Sequence[Run], metric: str | None, show: Iterable[str]
) -> tuple[RunSummary, ...]:
    numbers = [run.id for run in found]
    measured: dict[int, RunMetric] = {}
    if metric is not None and numbers:
        own = run_metrics.c
        query = select(run_metrics).where(own.name == metric, own.run_id.in_(numbers))
        measured = {row["run_id"]: metric_of_row(row) for row in connection.execute(query).mappings()}
    members: dict[int, dict[str, str]] = {number: {} for number in numbers}
    if show := sorted({*show}):
        noted = run_metadata.c
        some = select(noted.run_id, noted.name, noted.value)
        some = some.where(noted.run_id.in_(numbers), noted.name.in_(show))
        for number, name, value in connection.execute(some.order_by(noted.name)):
            members[number][name] = value
    return tuple(RunSummary(run, measured.get(run.id), members[run.id]) for run in found)


def metric_of_row(row: Mapping[Any, Any]) -> RunMetric:
    """Return the record of a row of `tables.run_metrics`."""
    last, least, most = (MetricPlace(row[of], row[f"{of}_step"], row[f"{of}_id"]) for of in get_args(Of))
    return RunMetric(row["name"], row["count"], last, least, most)


# -- the page ------------------------------------------------------------------------------------------------


class RunListView(RunListQuery):
    """Query of the page, including selected runs."""

    run: Annotated[tuple[_RunId, ...], Field(max_length=MAX_RUNS)] = ()
    done: Annotated[str, Field(max_length=32)] | None = None


@feature.page("/runs", "runs.html")
def runs_page(view: Annotated[RunListView, InQuery()], ask: Ask) -> dict[str, Any]:
    """List runs, to be ticked and compared."""
    with ask.reading() as connection:
        names = _names(connection, run_metrics, ask.visible)
        members = _names(connection, run_metadata, ask.visible)
        ticked = [get_run(connection, number, ask.visible) for number in dict.fromkeys(view.run)]
    view = view if view.metric else view.model_copy(update={"metric": loss_of(names)})
    if view.metric is None and "metric" in view.sort:  # before the first summary
        view = view.model_copy(update={"sort": "-latest"})
    found = list_run_summaries(RunListQuery(**view.model_dump(exclude={"run", "done"})), ask)
    asked = [pair for pair in ask.request.query_params.multi_items() if pair[0] not in ("run", "done")]
    shown = {one.run.id for one in found.items}
    return {
        "twin": f"/api/v1/runs/summaries?{urlencode(asked)}",
        "view": view,
        "rows": found.items,
        "next_cursor": found.next_cursor,
        "notes": found.notes,
        "metric_names": names,
        "member_names": members,
        "ticked": ticked,
        "elsewhere": [run for run in ticked if run.id not in shown],
        "roots": [row.name for row in ask.find(list_roots, ask.visible)],
        "most": MAX_RUNS,
        "without": partial(without, ask.request),
        "is_filtered": bool(view.root or view.contains or view.glob or view.metadata or view.has_metric),
    }


def without(request: Request, name: str, value: object) -> str:
    """Return the address of this page without a value of a parameter."""
    asked = request.query_params.multi_items()
    kept = [pair for pair in asked if pair != (name, str(value)) and pair[0] not in ("cursor", "done")]
    return request.url.path + (f"?{urlencode(kept)}" if kept else "")


def _names(connection: Connection, table: Any, visible: frozenset[str] | None) -> list[str]:
    """Return names of metrics or members of metadata, with one step through the index per name."""
    found: list[str] = []
    last = ""
    for _ in range(_NAMES):
        name = connection.execute(select(func.min(table.c.name)).where(table.c.name > last)).scalar()
        if name is None:
            break
        last = name
        if visible is None or _is_seen(connection, table, name, visible):
            found.append(name)
    return found


def _is_seen(connection: Connection, table: Any, name: str, visible: frozenset[str]) -> bool:
    query = (
        select(table.c.run_id)
        .join(runs, runs.c.id == table.c.run_id)
        .join(roots, roots.c.id == runs.c.root_id)
        .where(table.c.name == name, roots.c.name.in_(sorted(visible)))
    )
    return connection.execute(query.limit(1)).first() is not None
