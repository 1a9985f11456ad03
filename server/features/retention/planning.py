"""What a policy makes of the checkpoints in the catalog; nothing is changed here.

The rules are those of `dcp.Retention` (`dcp.manager.retention`), applied to each run, and in it to
each format by itself: a run's converted weights do not count as the newest of its training checkpoints. Kept
in any case are checkpoints without a step, pinned ones, and those that an alias names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, select

from dcp.manager.retention import Part, Retention, plan
from dcp.server.catalog.formats import format_in_catalog
from dcp.server.catalog.names import matches
from dcp.server.database.tables import aliases, checkpoints, metrics, roots, runs
from dcp.server.features.retention.parts import bytes_of_parts, dropped_patterns
from dcp.server.records.administration import RetentionDecision
from dcp.steps import StepState
from dcp.storage.formats.registry import DCP, TORCH_DCP

__all__ = ["RunPlan", "plan_run", "runs_of"]

_WITH_PARTS: Final = frozenset({format_in_catalog(one.name) for one in (DCP, TORCH_DCP)})
"""Formats with a commit that can be replaced."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All committed and unreadable checkpoints of a run, with what is decided.

    ``unjudged``: a sentence on each rule by a metric that nothing has, where it alone keeps checkpoints.
    """

    run_id: int
    run: str
    decisions: tuple[RetentionDecision, ...]
    unjudged: tuple[str, ...] = ()

    @property
    def deleted(self) -> list[RetentionDecision]:
        """The checkpoints that go."""
        return [one for one in self.decisions if not one.reasons]

    @property
    def dropped(self) -> list[RetentionDecision]:
        """The checkpoints that stay, and lose a part."""
        return [one for one in self.decisions if one.drops]


class _CheckpointRow(NamedTuple):
    id: int
    key: str
    step: int | None
    format: str
    state: str
    committed_seconds: float
    bytes: int
    verification: str
    is_pinned: bool
    structure_id: int | None
    dropped: frozenset[str] = frozenset()


def runs_of(
    connection: Connection, root: str, run_glob: str, *, after: int | None = None, limit: int | None = None
) -> list[tuple[int, str]]:
    """(id, key) of the runs of a root whose keys match, in the order of keys, behind the run ``after``."""
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
    """What is kept of one run, and what goes."""
    rows = _rows(connection, run_id, with_dropped=bool(keep.dropping))
    found: dict[int, tuple[str, ...]] = {}
    drops: dict[int, tuple[Part, ...]] = {}
    unjudged: dict[str, None] = {}
    named = _names(connection, run_id)
    measured = _metrics(connection, run_id, keep)
    by_format: defaultdict[str, list[_CheckpointRow]] = defaultdict(list)
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
    connection: Connection, rows: Iterable[_CheckpointRow], drops: Mapping[int, Sequence[Part]]
) -> dict[int, tuple[tuple[str, ...], int]]:
    """By checkpoint the names of the parts that it has and that are to be dropped, and their bytes."""
    wanted = {row.id: row.structure_id for row in rows if row.id in drops and row.structure_id is not None}
    parts = {part.name: part for own in drops.values() for part in own}
    sizes = bytes_of_parts(connection, wanted.values(), list(parts.values())) if wanted else {}
    found = {}
    for number, structure in wanted.items():
        own = {part.name: sizes[part.name][structure] for part in drops[number]}
        names = tuple(name for name, size in own.items() if size.tensors)
        if names:
            found[number] = names, sum(own[name].bytes for name in names)
    return found


def _plan_group(
    rows: Sequence[_CheckpointRow],
    keep: Retention,
    now: float,
    named: dict[int, list[str]],
    measured: dict[int, dict[str, float]],
) -> tuple[dict[int, tuple[str, ...]], Iterable[str], dict[int, tuple[Part, ...]]]:
    """Reasons by checkpoint, what could not be judged, and parts that are to be dropped, by checkpoint.

    Of several with one step the newest good one counts; the others share its fate, if nothing else.
    """
    by_step: defaultdict[int, list[_CheckpointRow]] = defaultdict(list)
    for row in rows:
        by_step[row.step or 0].append(row)
    states = []
    for step, same in by_step.items():
        best = max(same, key=lambda row: (_is_good(row), row.committed_seconds, row.id))
        states.append(
            StepState(
                step,
                best.committed_seconds,
                measured.get(best.id, {}),
                "good" if _is_good(best) else "damaged",
                any(row.is_pinned or row.id in named for row in same),
                best.dropped,
            )
        )
    planned = plan(keep, states, now)
    kept = planned.keep
    found = {}
    for step, same in by_step.items():
        for row in same:
            reasons = [reason for reason in kept.get(step, ()) if reason != "pinned"]
            if row.is_pinned:
                reasons.append("pinned")
            reasons += [f"alias {name}" for name in named.get(row.id, ())]
            if not reasons and step in kept:
                reasons = ["another of this step is kept"]
            found[row.id] = tuple(reasons)
    can_lose = [row for row in rows if row.state == "committed" and row.format in _WITH_PARTS]
    drops = {row.id: planned.drop[row.step or 0] for row in can_lose if (row.step or 0) in planned.drop}
    return found, planned.unjudged.values(), drops


def _is_good(row: _CheckpointRow) -> bool:
    return row.state == "committed" and row.verification != "damaged"


def _rows(connection: Connection, run_id: int, *, with_dropped: bool) -> list[_CheckpointRow]:
    names = [name for name in _CheckpointRow._fields if name != "dropped"]
    names += ["provenance"] if with_dropped else []
    query = (
        select(*(checkpoints.c[name] for name in names))
        .where(checkpoints.c.run_id == run_id, checkpoints.c.state.in_(("committed", "unreadable")))
        .order_by(checkpoints.c.step, checkpoints.c.id)
    )
    found = []
    for row in connection.execute(query).mappings():
        own = dict(row)
        dropped = dropped_patterns(own.pop("provenance", None))
        found.append(_CheckpointRow(**own, dropped=dropped))
    return found


def _names(connection: Connection, run_id: int) -> dict[int, list[str]]:
    """Aliases by checkpoint; all of a run's are of its own checkpoints."""
    found: dict[int, list[str]] = {}
    query = select(aliases.c.checkpoint_id, aliases.c.name).where(aliases.c.run_id == run_id)
    for number, name in connection.execute(query.order_by(aliases.c.name)):
        found.setdefault(number, []).append(name)
    return found


def _metrics(connection: Connection, run_id: int, keep: Retention) -> dict[int, dict[str, float]]:
    """Those that the rules ask for; all where one of them is nowhere, for what is said of it."""
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
