"""Retention plans: checkpoints that a policy keeps, deletes, and reduces. Planning changes nothing.

The rules are those of `dcp.Retention` (`dcp.manager.retention`), applied per run and format: converted
weights of a run do not count as its newest training checkpoints. Checkpoints without a step, pinned
checkpoints, and aliased checkpoints are always kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, NamedTuple

from sqlalchemy import Connection, Row, Select, case, func, null, or_, select

from dcp.manager.retention import Part, Retention, plan
from dcp.server.catalog.inputs import format_in_catalog
from dcp.server.catalog.names import check_pattern, matches
from dcp.server.catalog.runs import get_run
from dcp.server.database.tables import aliases, checkpoints, metrics, roots, runs, structure_tensors
from dcp.server.records.declaring import Shown
from dcp.steps import OPTIMIZER, StepState
from dcp.storage.formats.registry import DCP, TORCH_DCP

_WITH_PARTS: Final = frozenset({format_in_catalog(one.name) for one in (DCP, TORCH_DCP)})
"""Formats with a replaceable commit."""
_COLUMNS: Final = (
    *("id", "key", "step", "format", "state", "committed_seconds", "bytes", "verification", "is_pinned"),
    "structure_id",
)

_Checkpoint = Row[Any]


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Checkpoint with the reasons to keep; deleted without reasons. ``drops``: parts to drop from a kept
    checkpoint, with ``dropped_bytes`` of tensors."""

    checkpoint_id: int
    key: str
    step: int | None
    bytes: int
    reasons: Annotated[tuple[str, ...], Shown("Reasons to keep the checkpoint; empty: it is deleted.")]
    drops: Annotated[tuple[str, ...], Shown("Parts to drop, for example optimizer.", may_be_absent=True)] = ()
    dropped_bytes: Annotated[int, Shown("Of their tensors.", may_be_absent=True)] = 0


@dataclass(frozen=True, slots=True)
class RetentionPreview:
    """Preview of a policy for one run; ``checkpoints``: up to 1,000, deletions first.

    ``unjudged``: a sentence per rule with a metric that no checkpoint has; such a rule keeps all checkpoints.
    """

    run_id: int
    run: Annotated[str, Shown("Key of the run.")]
    kept: Annotated[int, Shown("Number of kept checkpoints.")]
    deleted: Annotated[int, Shown("Number of checkpoints to delete.")]
    deleted_bytes: Annotated[int, Shown("Size of the checkpoints to delete.")]
    checkpoints: Annotated[tuple[RetentionDecision, ...], Shown("Up to 1,000; deletions first.")]
    unjudged: Annotated[
        tuple[str, ...], Shown("Rules by a metric that no checkpoint has; such rules keep all checkpoints.")
    ] = ()
    dropped: Annotated[int, Shown("Kept checkpoints that lose a part.", may_be_absent=True)] = 0
    dropped_bytes: Annotated[int, Shown("Of the tensors of these parts.", may_be_absent=True)] = 0


@dataclass(frozen=True, slots=True)
class RetentionTotals:
    """A preview of a policy for all runs together."""

    runs: Annotated[int, Shown("Number of matching runs.")]
    kept: Annotated[int, Shown("Number of kept checkpoints.")]
    kept_bytes: Annotated[int, Shown("Size of the kept checkpoints.")]
    deleted: Annotated[int, Shown("Number of checkpoints to delete.")]
    deleted_bytes: Annotated[int, Shown("Freed once the grace is over.")]
    unjudged_runs: Annotated[int, Shown("Runs with a rule by an unknown metric.")]
    is_cut: Annotated[bool, Shown("Always false: all runs are counted.")]
    dropped: Annotated[int, Shown("Kept checkpoints that lose a part.", may_be_absent=True)] = 0
    dropped_bytes: Annotated[int, Shown("Of the tensors of these parts.", may_be_absent=True)] = 0


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of tensors in older checkpoints of a run, which a drop would free.

    Of the committed ``checkpoints``, ``held`` are pinned or aliased, and are not counted in bytes.
    """

    run_id: int
    checkpoints: Annotated[int, Shown("Number of committed checkpoints.")]
    held: Annotated[int, Shown("Of them, pinned or named by an alias; their bytes are not counted.")]
    tensors: Annotated[int, Shown("Matching tensors in all checkpoints.")]
    bytes: Annotated[int, Shown("Of these tensors.")]
    total_bytes: Annotated[int, Shown("Of all tensors of these checkpoints.")]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Decisions on all committed and unreadable checkpoints of a run.

    ``unjudged``: a sentence per rule with an unknown metric, if the rule alone keeps checkpoints.
    """

    run_id: int
    run: str
    decisions: tuple[RetentionDecision, ...]
    unjudged: tuple[str, ...] = ()

    @property
    def deleted(self) -> list[RetentionDecision]:
        """The checkpoints to delete."""
        return [one for one in self.decisions if not one.reasons]

    @property
    def dropped(self) -> list[RetentionDecision]:
        """The checkpoints to keep, but for some parts."""
        return [one for one in self.decisions if one.drops]

    @property
    def preview(self) -> RetentionPreview:
        """Plan for people: deletions first, then checkpoints that lose parts."""
        whole = [one for one in self.decisions if one.reasons and not one.drops]
        return RetentionPreview(
            self.run_id,
            self.run,
            kept=len(self.decisions) - len(self.deleted),
            deleted=len(self.deleted),
            deleted_bytes=sum(one.bytes for one in self.deleted),
            checkpoints=tuple([*self.deleted, *self.dropped, *whole][:1000]),
            unjudged=self.unjudged,
            dropped=len(self.dropped),
            dropped_bytes=sum(one.dropped_bytes for one in self.dropped),
        )


def runs_of(
    connection: Connection, root: str, run_glob: str, *, after: int | None = None, limit: int | None = None
) -> list[tuple[int, str]]:
    """List (id, key) of runs of a root with matching keys, by key, after the run ``after``."""
    query = (
        select(runs.c.id, runs.c.key)
        .join(roots, roots.c.id == runs.c.root_id)
        .where(roots.c.name == root, matches(connection, runs.c.key, run_glob))
        .order_by(runs.c.key)
        .limit(limit)
    )
    if after is not None:
        key = select(runs.c.key).where(runs.c.id == after).scalar_subquery()
        query = query.where(runs.c.key > key)
    return [(row.id, row.key) for row in connection.execute(query)]


def plan_run(connection: Connection, run_id: int, run: str, keep: Retention, now: float) -> RunPlan:
    """Decide which checkpoints of a run are kept."""
    rows = _rows(connection, run_id, with_dropped=bool(keep.dropping))
    found: dict[int, tuple[str, ...]] = {}
    drops: dict[int, tuple[Part, ...]] = {}
    unjudged: dict[str, None] = {}
    named = _names(connection, run_id)
    measured = _metrics(connection, run_id, keep)
    by_format: defaultdict[str, list[_Checkpoint]] = defaultdict(list)
    for row in rows:
        if row.step is None:
            found[row.id] = ("no step",)
        else:
            by_format[row.format].append(row)
    for group in by_format.values():
        reasons, sentences, dropped = _plan_group(group, keep, now, named, measured)
        found |= reasons
        drops |= dropped
        unjudged |= dict.fromkeys(sentences)
    taken = _taken(connection, rows, drops)
    decisions = tuple(
        RetentionDecision(row.id, row.key, row.step, row.bytes, found[row.id], *taken.get(row.id, ()))
        for row in rows
    )
    return RunPlan(run_id, run, decisions, tuple(unjudged))


def _taken(
    connection: Connection, rows: Iterable[_Checkpoint], drops: Mapping[int, Sequence[Part]]
) -> dict[int, tuple[tuple[str, ...], int]]:
    """Return the names and bytes of existing parts to drop, by checkpoint."""
    wanted = {row.id: row.structure_id for row in rows if row.id in drops and row.structure_id is not None}
    parts = {part.name: part for own in drops.values() for part in own}
    sizes = _bytes_of_parts(connection, wanted.values(), list(parts.values())) if wanted else {}
    found = {}
    for number, structure in wanted.items():
        own = {part.name: sizes[part.name][structure] for part in drops[number]}
        names = tuple(name for name, size in own.items() if size.tensors)
        if names:
            found[number] = names, sum(own[name].bytes for name in names)
    return found


def _plan_group(
    rows: Sequence[_Checkpoint],
    keep: Retention,
    now: float,
    named: dict[int, list[str]],
    measured: dict[int, dict[str, float]],
) -> tuple[dict[int, tuple[str, ...]], Iterable[str], dict[int, tuple[Part, ...]]]:
    """Return reasons by checkpoint, sentences on inapplicable rules, and parts to drop."""
    by_step: defaultdict[int, list[_Checkpoint]] = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    planned = plan(keep, [_state(same, named, measured) for same in by_step.values()], now)
    found = {row.id: _reasons(row, planned.keep.get(row.step), named.get(row.id, ())) for row in rows}
    can_lose = [row for row in rows if row.state == "committed" and row.format in _WITH_PARTS]
    drops = {row.id: planned.drop[row.step] for row in can_lose if row.step in planned.drop}
    return found, planned.unjudged.values(), drops


def _state(
    same: Sequence[_Checkpoint], named: dict[int, list[str]], measured: dict[int, dict[str, float]]
) -> StepState:
    """Return the state of a step. The newest good checkpoint of the step counts; the others share its
    fate."""
    best = max(same, key=lambda row: (_is_good(row), row.committed_seconds, row.id))
    return StepState(
        best.step,
        best.committed_seconds,
        measured.get(best.id, {}),
        "good" if _is_good(best) else "damaged",
        any(row.is_pinned or row.id in named for row in same),
        _dropped_patterns(best.provenance),
    )


def _reasons(row: _Checkpoint, of_step: Sequence[str] | None, names: Sequence[str]) -> tuple[str, ...]:
    reasons = [reason for reason in of_step or () if reason != "pinned"]
    reasons += ["pinned"] if row.is_pinned else []
    reasons += [f"alias {name}" for name in names]
    if not reasons and of_step is not None:
        return ("another checkpoint of this step is kept",)
    return tuple(reasons)


def _is_good(row: _Checkpoint) -> bool:
    return bool(row.state == "committed" and row.verification != "damaged")


def _rows(connection: Connection, run_id: int, *, with_dropped: bool) -> Sequence[_Checkpoint]:
    """Read the checkpoints of a run; large provenance only if needed."""
    provenance = checkpoints.c.provenance if with_dropped else null()
    query: Select[Any] = (
        select(*(checkpoints.c[name] for name in _COLUMNS), provenance.label("provenance"))
        .where(checkpoints.c.run_id == run_id, checkpoints.c.state.in_(("committed", "unreadable")))
        .order_by(checkpoints.c.step, checkpoints.c.id)
    )
    return connection.execute(query).all()


def _names(connection: Connection, run_id: int) -> dict[int, list[str]]:
    """Return the aliases of a run by checkpoint."""
    found: dict[int, list[str]] = {}
    query = select(aliases.c.checkpoint_id, aliases.c.name).where(aliases.c.run_id == run_id)
    for number, name in connection.execute(query.order_by(aliases.c.name)):
        found.setdefault(number, []).append(name)
    return found


def _metrics(connection: Connection, run_id: int, keep: Retention) -> dict[int, dict[str, float]]:
    """Return the metrics of the rules by checkpoint; all metrics if a rule's metric is missing, for the
    sentence about the rule."""
    wanted = {rule.metric for rule in keep.bests}
    if not wanted:
        return {}
    query = (
        select(metrics.c.checkpoint_id, metrics.c.name, metrics.c.value)
        .join(checkpoints, checkpoints.c.id == metrics.c.checkpoint_id)
        .where(checkpoints.c.run_id == run_id)
    )
    found = _by_checkpoint(connection.execute(query.where(metrics.c.name.in_(sorted(wanted)))))
    if wanted <= {name for own in found.values() for name in own}:
        return found
    return _by_checkpoint(connection.execute(query))


def _by_checkpoint(rows: Iterable[Any]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for number, name, value in rows:
        found.setdefault(number, {})[name] = value
    return found


# -- bytes of parts ------------------------------------------------------------------------------------------


class _PartBytes(NamedTuple):
    """Counts of a structure: matching tensors, their bytes, and the bytes of all tensors."""

    tensors: int
    bytes: int
    total_bytes: int


def _part_bytes(
    connection: Connection, structures: Iterable[int], only: Sequence[str]
) -> dict[int, _PartBytes]:
    """Sum the bytes of tensors that match a glob in ``only``, by structure."""
    table = structure_tensors.c
    globs = [matches(connection, table.fqn, check_pattern("only", glob)) for glob in only]
    is_one = case((or_(*globs), 1), else_=0)
    found = {}
    for number in structures:
        query = select(func.sum(is_one), func.sum(is_one * table.bytes), func.sum(table.bytes))
        row = connection.execute(query.where(table.structure_id == number, table.kind == "tensor")).one()
        found[number] = _PartBytes(int(row[0] or 0), int(row[1] or 0), int(row[2] or 0))
    return found


def _bytes_of_parts(
    connection: Connection, structures: Iterable[int], parts: Sequence[Part]
) -> dict[str, dict[int, _PartBytes]]:
    """Sum bytes by part and structure; a pattern also matches names below a matching name."""
    numbers = sorted(set(structures))
    return {
        part.name: _part_bytes(
            connection, numbers, [glob for one in part.patterns for glob in (one, f"{one}.*")]
        )
        for part in parts
    }


def _dropped_patterns(provenance: Any) -> frozenset[str]:
    """Return patterns of parts dropped from a checkpoint, by its provenance."""
    parts = provenance.get("dropped") if isinstance(provenance, Mapping) else None
    notes = parts if isinstance(parts, list) else []
    lists = (note.get("patterns") for note in notes if isinstance(note, Mapping))
    return frozenset(str(glob) for globs in lists if isinstance(globs, list) for glob in globs)


# -- totals --------------------------------------------------------------------------------------------------


def retention_totals(
    connection: Connection, root: str, run_glob: str, keep: Retention, now: float
) -> RetentionTotals:
    """Sum the plans of all runs with matching keys."""
    totals = Counter({field.name: 0 for field in fields(RetentionTotals) if field.name != "is_cut"})
    for run_id, run in runs_of(connection, root, run_glob):
        plan = plan_run(connection, run_id, run, keep, now)
        shown = plan.preview
        totals.update(
            runs=1,
            kept=shown.kept,
            kept_bytes=sum(one.bytes for one in plan.decisions) - shown.deleted_bytes - shown.dropped_bytes,
            deleted=shown.deleted,
            deleted_bytes=shown.deleted_bytes,
            unjudged_runs=bool(shown.unjudged),
            dropped=shown.dropped,
            dropped_bytes=shown.dropped_bytes,
        )
    return RetentionTotals(**totals, is_cut=False)


def tensor_bytes(
    connection: Connection,
    run_id: int,
    visible: frozenset[str] | None = None,
    *,
    only: Sequence[str] = OPTIMIZER,
    below_step: int | None = None,
) -> TensorBytes:
    """Sum the bytes of tensors that match ``only`` in committed checkpoints of a run, optionally with a step
    below ``below_step``. Raises MissingError for an invisible run."""
    get_run(connection, run_id, visible)
    column = checkpoints.c
    own = [column.run_id == run_id, column.state == "committed"]
    if below_step is not None:
        own += [column.step_order >= 0, column.step_order < below_step]
    named = select(aliases.c.name).where(aliases.c.checkpoint_id == column.id).exists()
    is_held = case((or_(column.is_pinned, named), 1), else_=0)
    query = select(column.structure_id, func.count().label("number"), func.sum(is_held).label("held"))
    rows = connection.execute(query.where(*own).group_by(column.structure_id)).all()
    free = {row.structure_id: row.number - int(row.held) for row in rows if row.structure_id is not None}
    sums = _part_bytes(connection, [number for number, count in free.items() if count], only)
    return TensorBytes(
        run_id,
        checkpoints=sum(row.number for row in rows),
        held=sum(int(row.held) for row in rows),
        tensors=sum(free[number] * found.tensors for number, found in sums.items()),
        bytes=sum(free[number] * found.bytes for number, found in sums.items()),
        total_bytes=sum(free[number] * found.total_bytes for number, found in sums.items()),
    )
