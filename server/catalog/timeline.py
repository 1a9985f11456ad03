"""Timelines: checkpoints and metrics of a run over its steps, in bins.

Rows are read once in order; memory is bounded by the bins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select

from dcp.server.catalog.errors import StateError
from dcp.server.catalog.inputs import NONFINITE
from dcp.server.catalog.runs import get_run
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import aliases, checkpoints, lineage, metrics
from dcp.server.records.declaring import Shown, moment
from dcp.steps import partial_of
from dcp.storage.near_names import listed


@dataclass(frozen=True, slots=True)
class BinValues:
    """Aggregates of the values in a bin; ``last`` belongs to the highest step."""

    name: Annotated[str, Shown("bytes, save_seconds, or the name of a metric.")]
    count: Annotated[int, Shown("Checkpoints with this value.")]
    min: float
    max: float
    mean: float
    last: Annotated[float, Shown("Value of the highest step.")]


@dataclass(frozen=True, slots=True)
class TimelineBin:
    """Neighbouring checkpoints of a run by step, ``count`` in all states.

    ``checkpoint_id`` is the last committed checkpoint, or else the last. Values cover committed checkpoints.
    ``save_seconds`` is the slowest rank of each phase, for saves with timings.
    """

    checkpoint_id: Annotated[int, Shown("The last committed checkpoint, or else the last.")]
    first_step: int
    last_step: int
    first_at: Annotated[datetime, Shown("Commit time of the oldest checkpoint.")]
    last_at: Annotated[datetime, Shown("Commit time of the newest checkpoint.")]
    count: Annotated[int, Shown("Checkpoints in all states.")]
    states: Annotated[Mapping[str, int], Shown("Checkpoints by state.")]
    verifications: Annotated[Mapping[str, int], Shown("Committed checkpoints by verification.")]
    pinned: Annotated[int, Shown("Number of pinned checkpoints.")]
    aliases: Annotated[tuple[str, ...], Shown("Aliases of the checkpoints.")]
    bytes: Annotated[BinValues | None, Shown("Sizes of committed checkpoints.")]
    save_seconds: Annotated[
        BinValues | None, Shown("Seconds of saves with timings: the slowest rank of each phase.")
    ]
    metrics: Annotated[tuple[BinValues, ...], Shown("Values of committed checkpoints, by metric.")]


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """The checkpoints of a run with a step, in bins; ``metric_names`` are the metrics of the newest."""

    run_id: int
    count: Annotated[int, Shown("Checkpoints with a step, within the requested steps.")]
    metric_names: Annotated[tuple[str, ...], Shown("The metrics of the newest checkpoint with metrics.")]
    bins: tuple[TimelineBin, ...]


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """``count`` neighbouring checkpoints of a run; ``checkpoint_id`` is one of them."""

    checkpoint_id: Annotated[int, Shown("The id of one of these checkpoints.")]
    first_step: int
    last_step: int
    last_at: Annotated[datetime, Shown("Commit time of the newest checkpoint.")]
    count: Annotated[int, Shown("Number of neighbouring checkpoints.")]
    min: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps of a run; ``count`` checkpoints have a finite value."""

    run_id: int
    metric: str
    count: Annotated[int, Shown("Checkpoints with a step and this metric.")]
    points: tuple[SeriesPoint, ...]
    nonfinite_count: Annotated[
        int, Shown("Checkpoints with a step and a NaN or infinite value.", may_be_absent=True)
    ] = 0
    first_nonfinite_step: Annotated[int | None, Shown("The first of these.", may_be_absent=True)] = None
    last_nonfinite_step: Annotated[int | None, Shown("The last of these.", may_be_absent=True)] = None


_ROWS_AT_ONCE: Final = 2_000
_MAX_LISTED: Final = 10
_BY_RUN: Final = "INDEXED BY ix_checkpoints_run_id_step_order_id"
"""Index hint for SQLite, which would otherwise begin with the metrics of all runs."""
_SAVING: Final = ("blocked", "plan", "write")
"""Consecutive phases of a save; other phases are parts of them."""


def run_timeline(
    connection: Connection,
    run_id: int,
    visible: frozenset[str] | None = None,
    *,
    names: Sequence[str] = (),
    points: int = 300,
    min_step: int | None = None,
    max_step: int | None = None,
) -> RunTimeline:
    """Return checkpoints from ``min_step`` to ``max_step`` in up to ``points`` bins of similar counts.

    ``names`` selects metrics. Raises `MissingError` for an invisible run.
    """
    get_run(connection, run_id, visible)
    within = [checkpoints.c.run_id == run_id, checkpoints.c.step_order >= max(0, min_step or 0)]
    if max_step is not None:
        within.append(checkpoints.c.step_order <= max_step)
    count = connection.execute(select(func.count()).select_from(checkpoints).where(*within)).scalar_one()
    bins = [_Bin() for _ in range(min(points, count))]
    flags = _aliases(connection, run_id)
    for place, (row, measured) in enumerate(_rows(connection, _select(within), names)):
        found = bins[min(place, count - 1) * len(bins) // count]  # more rows may exist than counted
        found.add(row, measured, flags.get(row.id, ()))
    return RunTimeline(
        run_id, count, metric_names(connection, run_id), tuple(one.result() for one in bins if one.count)
    )


def steps_of_run(
    connection: Connection,
    run_id: int,
    *,
    min_step: int | None = None,
    max_step: int | None = None,
    format: str | None = None,
) -> list[int]:
    """Return the newest committed checkpoint of each step in the range, by step.

    All have one format: the given one, or else the format of the last step.
    """
    column = checkpoints.c
    query = select(column.id, column.step, column.format).where(
        column.run_id == run_id, column.state == "committed", column.step_order >= max(0, min_step or 0)
    )
    if max_step is not None:
        query = query.where(column.step_order <= max_step)
    rows = connection.execute(query.order_by(column.step_order, column.committed_seconds, column.id)).all()
    wanted = rows[-1].format if rows and format is None else format
    return list({row.step: row.id for row in rows if row.format == wanted}.values())


def newest_steps(connection: Connection, run_id: int, last: int) -> list[int]:
    """Return the checkpoints of the ``last`` steps of a run, newest first, without results of jobs.

    Raises StateError for fewer steps, and names damaged, partial and ambiguous ones.
    """
    column = checkpoints.c
    made = select(lineage.c.child_id).where(lineage.c.child_id == column.id)
    query = (
        select(column.id, column.step, column.state, column.verification, column.user_metadata)
        .where(column.run_id == run_id, column.step_order >= 0, ~made.exists())
        .where(column.state.in_(("committed", "unreadable")))
        .order_by(column.step_order.desc(), column.id.desc())
        .limit(2 * last)
    )
    found: dict[int, list[Any]] = {}
    for row in connection.execute(query):
        found.setdefault(row.step, []).append(row)
    newest = list(found.items())[:last]
    problems = [f"step {step} {problem}" for step, rows in newest if (problem := _problem(rows))]
    if problems:
        said = listed(problems, most=_MAX_LISTED, show=str)
        raise StateError(
            f"run {run_id}: {said}; pass intact checkpoints as sources instead", state="damaged steps"
        )
    if len(newest) < last:
        said = f"{last} committed steps are required, but only {len(newest)} exist"
        raise StateError(f"run {run_id}: {said}", state="too few steps")
    return [rows[0].id for _, rows in newest]


def _problem(rows: Sequence[Any]) -> str:
    """Return the reason why a step is unusable; "" if it is usable."""
    if len(rows) > 1:
        return f"exists {len(rows)} times, as checkpoints {', '.join(str(row.id) for row in rows)}"
    row = rows[0]
    if row.state != "committed":
        return "is damaged"
    if row.verification == "damaged":
        return "was found damaged by a verification"
    partial = partial_of(row.user_metadata if isinstance(row.user_metadata, dict) else {})
    return f"has only {', '.join(partial)}" if partial else ""


def save_seconds_of(phases: Any) -> float | None:
    """Return the seconds of a save from the slowest rank of each phase; None without timings."""
    known = phases if isinstance(phases, Mapping) else {}
    found = [known[name] for name in _SAVING if isinstance(known.get(name), int | float)]
    return sum(found) if found and math.isfinite(sum(found)) else None


def _select(within: Sequence[Any]) -> Select[Any]:
    columns = checkpoints.c
    return (
        select(
            columns.id,
            columns.step,
            columns.committed_seconds,
            columns.state,
            columns.verification,
            columns.is_pinned,
            columns.bytes,
            columns.provenance["slowest_rank_seconds"].label("phases"),
        )
        .where(*within)
        .order_by(columns.step_order, columns.id)
    )


def _rows(
    connection: Connection, query: Select[Any], names: Sequence[str]
) -> Iterator[tuple[Row[Any], Mapping[str, float]]]:
    """Return rows in order, with the metrics of each."""
    streamed = connection.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE})
    for rows in streamed.partitions():
        measured: dict[int, dict[str, float]] = {row.id: {} for row in rows}
        if names:
            wanted = select(metrics.c.checkpoint_id, metrics.c.name, metrics.c.value)
            wanted = wanted.where(metrics.c.checkpoint_id.in_(list(measured)), metrics.c.name.in_(names))
            for number, name, value in connection.execute(wanted).all():
                measured[number][name] = value
        yield from ((row, measured[row.id]) for row in rows)


def _aliases(connection: Connection, run_id: int) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    query = select(aliases.c.checkpoint_id, aliases.c.name).where(aliases.c.run_id == run_id)
    for number, name in connection.execute(query.order_by(aliases.c.name)):
        found[number] = (*found.get(number, ()), name)
    return found


def metric_names(connection: Connection, run_id: int) -> tuple[str, ...]:
    """Return the metrics of the newest checkpoint with metrics, including NaN; reading all checkpoints would
    be slow."""
    newest = connection.execute(
        select(checkpoints.c.id, checkpoints.c.user_metadata["metrics"])
        .where(
            checkpoints.c.run_id == run_id,
            checkpoints.c.state == "committed",
            select(metrics.c.name).where(metrics.c.checkpoint_id == checkpoints.c.id).exists(),
        )
        .order_by(checkpoints.c.step_order.desc(), checkpoints.c.id.desc())
        .limit(1)
    ).one_or_none()
    if newest is None:
        return ()
    query = select(metrics.c.name).where(metrics.c.checkpoint_id == newest.id)
    noted = newest[1] if isinstance(newest[1], dict) else {}
    odd = {name for name, value in noted.items() if value in NONFINITE}
    return tuple(sorted(odd | set(connection.execute(query).scalars())))


@dataclass(slots=True)
class _Values:
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    last: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        self.last = value

    def result(self, name: str) -> BinValues:
        mean = min(max(self.total / self.count, self.least), self.most)
        return BinValues(name, self.count, self.least, self.most, mean, self.last)


@dataclass(slots=True)
class _Bin:
    count: int = 0
    rows: list[Row[Any]] = field(default_factory=list)  # first and latest row
    committed_id: int | None = None
    times: _Values = field(default_factory=_Values)
    states: Counter[str] = field(default_factory=Counter)
    verifications: Counter[str] = field(default_factory=Counter)
    pinned: int = 0
    aliases: list[str] = field(default_factory=list)
    values: dict[str, _Values] = field(default_factory=dict)
    metrics: dict[str, _Values] = field(default_factory=dict)

    def add(self, row: Row[Any], measured: Mapping[str, float], names: Sequence[str]) -> None:
        self.count += 1
        self.rows[1:] = [row]
        self.times.add(row.committed_seconds)
        self.states[row.state] += 1
        self.pinned += row.is_pinned
        self.aliases += names
        if row.state != "committed":
            return
        self.committed_id = row.id
        self.verifications[row.verification] += 1
        self.values.setdefault("bytes", _Values()).add(row.bytes)
        seconds = save_seconds_of(row.phases)
        if seconds is not None:
            self.values.setdefault("save_seconds", _Values()).add(seconds)
        for name, value in measured.items():
            self.metrics.setdefault(name, _Values()).add(value)

    def result(self) -> TimelineBin:
        first, last = self.rows[0], self.rows[-1]
        values = {name: found.result(name) for name, found in self.values.items()}
        return TimelineBin(
            checkpoint_id=last.id if self.committed_id is None else self.committed_id,
            first_step=first.step,
            last_step=last.step,
            first_at=moment(self.times.least),
            last_at=moment(self.times.most),
            count=self.count,
            states=dict(sorted(self.states.items())),
            verifications=dict(sorted(self.verifications.items())),
            pinned=self.pinned,
            aliases=tuple(self.aliases),
            bytes=values.get("bytes"),
            save_seconds=values.get("save_seconds"),
            metrics=tuple(self.metrics[name].result(name) for name in sorted(self.metrics)),
        )


# -- one metric ----------------------------------------------------------------------------------------------


def metric_series(
    connection: Connection, run_id: int, metric: str, visible: frozenset[str] | None = None, *, points: int
) -> Series:
    """Return ``metric`` of committed checkpoints by step, in up to ``points`` points of similar counts.

    Raises `MissingError` for an invisible run.
    """
    get_run(connection, run_id, visible)
    rows = connection.execute(_binned(run_id, metric, points))
    found = tuple(record_of_row(SeriesPoint, row) for row in rows)
    noted = checkpoints.c.user_metadata[("metrics", metric)].as_string()
    of_steps = select(func.count(), func.min(checkpoints.c.step), func.max(checkpoints.c.step))
    query = of_steps.where(*_with_step(run_id), noted.in_(NONFINITE))
    query = query.with_hint(checkpoints, _BY_RUN, "sqlite")
    nonfinite, first, last = connection.execute(query).one()
    return Series(run_id, metric, sum(point.count for point in found), found, nonfinite, first, last)


def _binned(run_id: int, metric: str, points: int) -> Select[Any]:
    """Group rows into `SeriesPoint` values."""
    order = (checkpoints.c.step_order, checkpoints.c.id)
    bin_number = func.ntile(points).over(order_by=order).label("bin")
    rows = (
        select(
            checkpoints.c.id, checkpoints.c.step, checkpoints.c.committed_seconds, metrics.c.value, bin_number
        )
        .join(metrics, metrics.c.checkpoint_id == checkpoints.c.id)
        .where(*_with_step(run_id), metrics.c.name == metric)
        .with_hint(checkpoints, _BY_RUN, "sqlite")
        .subquery()
    )
    return (
        select(
            func.max(rows.c.id).label("checkpoint_id"),
            func.min(rows.c.step).label("first_step"),
            func.max(rows.c.step).label("last_step"),
            func.max(rows.c.committed_seconds).label("last_seconds"),
            func.count().label("count"),
            func.min(rows.c.value).label("min"),
            func.max(rows.c.value).label("max"),
            func.avg(rows.c.value).label("mean"),
        )
        .group_by(rows.c.bin)
        .order_by(rows.c.bin)
    )


def _with_step(run_id: int) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions of committed checkpoints of the run with a step."""
    is_committed = checkpoints.c.state == "committed"
    return checkpoints.c.run_id == run_id, is_committed, checkpoints.c.step.is_not(None)
