"""Findings of a trial: parts of a state that a load did not bring back, by tensor, rank and position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from dcp.storage.near_names import listed

__all__ = ["Report", "StateFinding", "StateFindingKind", "Trial"]

StateFindingKind = Literal[
    "lost",
    "stale",
    "shuffled",
    "doubled",
    "mixed up",
    "rounded",
    "garbage",
    "untied",
    "never saved",
    "failed",
]

_MEANINGS: Final[dict[StateFindingKind, str]] = {
    "lost": "not in the checkpoint, or not read: as it was before the load, zero, or not there",
    "stale": "of another moment: an earlier save, or the training that continued behind the save",
    "shuffled": "other elements of the same tensor, each once",
    "doubled": "elements of the same tensor that are elsewhere as well",
    "mixed up": "of another tensor, or of another rank's",
    "rounded": "through a smaller dtype and back",
    "garbage": "values that no rank has saved",
    "untied": "two names of one tensor are two tensors now",
    "never saved": "no rank had a tensor of that name and shape",
    "failed": "the save or the load raised, died or hung",
}
_SHOWN: Final = 60
_MAX_NAMED: Final = 5


@dataclass(frozen=True)
class StateFinding:
    """``count`` of the ``total`` elements that ``rank`` has of ``name`` are not what was saved.

    ``places`` are theirs, as slices of the whole tensor's first dimension or the first element; ``found``
    describes their values. If these elements belong elsewhere, ``from_name``, ``from_rank`` (of values
    that are a rank's own) and ``from_places`` say where.
    """

    kind: StateFindingKind
    rank: int | None
    part: str = ""
    name: str = ""
    count: int = 0
    total: int = 0
    places: str = ""
    found: str = ""
    from_name: str = ""
    from_rank: int | None = None
    from_places: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.name, self.places, self.found)))


@dataclass(frozen=True)
class Trial:
    """One save by ``saved_by`` ranks and one load by ``loaded_by``. ``tensors`` were compared on all ranks
    together; ``own`` are names of values that each rank has for itself; another number of ranks need not
    find them. ``replicas`` are names of plain tensors that ranks had alike, and are taken for one."""

    saved_by: int
    loaded_by: int
    tensors: int = 0
    own: tuple[str, ...] = ()
    findings: tuple[StateFinding, ...] = ()
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of `dcp.testing.parallelism.check`. ``str`` of it is a table, `to_json` plain data."""

    trials: tuple[Trial, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """True if all that was saved came back, and nothing else."""
        return not self.findings

    @property
    def findings(self) -> tuple[StateFinding, ...]:
        """The findings of all trials."""
        return tuple(finding for trial in self.trials for finding in trial.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": self.ok, "trials": [asdict(trial) for trial in self.trials]}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    for trial in report.trials:
        count = len(trial.findings)
        result = f"{count} finding{'s' * (count > 1)}" if trial.findings else "all of it came back"
        who = f"saved by {_ranks(trial.saved_by)}, loaded by {trial.loaded_by}"
        yield f"{who}: {trial.tensors} tensors, {result}"
        if trial.own and trial.saved_by != trial.loaded_by:
            yield f"  not compared, as they are each rank's own: {', '.join(trial.own[:_MAX_NAMED])}"
        elif trial.saved_by == trial.loaded_by:
            yield from _taken(trial.own, "each rank's own", "replicas=")
            yield from _taken(trial.replicas, "replicas", "own=")
        yield from _table([_row(finding) for finding in trial.findings[:_SHOWN]])
        if len(trial.findings) > _SHOWN:
            yield f"  and {len(trial.findings) - _SHOWN} more"
    kinds = [kind for kind in _MEANINGS if any(finding.kind == kind for finding in report.findings)]
    if kinds:
        yield ""
    yield from (f"{kind}: {_MEANINGS[kind]}" for kind in kinds)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _taken(names: Sequence[str], what: str, otherwise: str) -> Iterator[str]:
    if names:
        were = f"{len(names)} plain tensor{'s were' if len(names) != 1 else ' was'} taken for {what}"
        yield f"  {were} ({otherwise} names those that are not): {listed(names, most=_MAX_NAMED, show=str)}"


def _row(finding: StateFinding) -> tuple[str, ...]:
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    count = f"{finding.count} of {finding.total}" if finding.total else ""
    return (finding.kind, finding.part, finding.name, rank, count, finding.places, finding.found)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield f"  {'  '.join(cells)}".rstrip()
