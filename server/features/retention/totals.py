"""What a policy, or leaving some tensors out, would free in all; nothing is changed here."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, case, func, or_, select

from dcp.manager.retention import Retention
from dcp.server.catalog.runs import get_run
from dcp.server.database.tables import aliases, checkpoints
from dcp.server.features.retention.parts import part_bytes
from dcp.server.features.retention.planning import plan_run, runs_of
from dcp.server.records.administration import RetentionTotals, TensorBytes
from dcp.steps import OPTIMIZER

__all__ = ["retention_totals", "tensor_bytes"]


def retention_totals(
    connection: Connection, root: str, run_glob: str, keep: Retention, now: float
) -> RetentionTotals:
    """Add up the plans of all runs whose keys match."""
    runs = kept = kept_bytes = deleted = deleted_bytes = unjudged = dropped = dropped_bytes = 0
    for run_id, run in runs_of(connection, root, run_glob):
        plan = plan_run(connection, run_id, run, keep, now)
        freed = sum(one.bytes for one in plan.deleted)
        runs += 1
        deleted += len(plan.deleted)
        deleted_bytes += freed
        kept += len(plan.decisions) - len(plan.deleted)
        kept_bytes += sum(one.bytes for one in plan.decisions) - freed
        unjudged += bool(plan.unjudged)
        dropped += len(plan.dropped)
        dropped_bytes += sum(one.dropped_bytes for one in plan.dropped)
    return RetentionTotals(
        runs,
        kept,
        kept_bytes - dropped_bytes,
        deleted,
        deleted_bytes,
        unjudged,
        is_cut=False,
        dropped=dropped,
        dropped_bytes=dropped_bytes,
    )


def tensor_bytes(
    connection: Connection,
    run_id: int,
    visible: frozenset[str] | None = None,
    *,
    only: Sequence[str] = OPTIMIZER,
    below_step: int | None = None,
) -> TensorBytes:
    """The bytes of tensors whose names match one of ``only``, in the committed checkpoints of a run with a
    step below ``below_step``, or in all. `MissingError` for a run that may not be seen."""
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
    sums = part_bytes(connection, [number for number, count in free.items() if count], only)
    return TensorBytes(
        run_id,
        checkpoints=sum(row.number for row in rows),
        held=sum(int(row.held) for row in rows),
        tensors=sum(free[number] * found.tensors for number, found in sums.items()),
        bytes=sum(free[number] * found.bytes for number, found in sums.items()),
        total_bytes=sum(free[number] * found.total_bytes for number, found in sums.items()),
    )
