"""Comparison of loaded and saved tensors: find wrong elements, locate their origin, and report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.near_names import listed
from dcp.testing.live_state import (
    Identity,
    LiveTensor,
    bits_of,
    bits_per_value,
    coded_bits,
    gram_width,
    write_bits,
)

_MEANINGS: Final = {
    "lost": "not saved or not loaded: missing, zero, or unchanged by the load",
    "stale": "values of another time: of an earlier save, or of training after the save",
    "shuffled": "elements of the same tensor in another order",
    "doubled": "elements of the same tensor that also appear elsewhere",
    "mixed up": "values of another tensor or of another rank",
    "rounded": "values cast to a smaller dtype and back",
    "garbage": "values that no rank saved",
    "untied": "two names of one tensor became separate tensors",
    "never saved": "no rank saved a tensor of this name and shape",
    "failed": "the save or the load raised an error, died or hung",
}
_SHOWN: Final = 60
_MAX_NAMED: Final = 5


@dataclass(frozen=True)
class StateFinding:
    """Wrong elements: ``count`` of the ``total`` elements of ``name`` on ``rank``.

    Attributes:
        kind: One of `_MEANINGS`.
        places: Positions in the whole tensor, as slices of the first dimension or the first element.
        found: Description of the values found.
        from_name: Tensor that the elements belong to, if known.
        from_rank: Rank that the elements belong to, if they are one rank's own.
        from_places: Positions that the elements belong to.
    """

    kind: str
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
    """One save by ``saved_by`` ranks and one load by ``loaded_by``.

    ``tensors`` were compared on all ranks together. ``own`` are names of values that belong to one rank and
    need not survive another number of ranks. ``replicas`` are names of equal plain tensors on several ranks.
    """

    saved_by: int
    loaded_by: int
    tensors: int = 0
    own: tuple[str, ...] = ()
    findings: tuple[StateFinding, ...] = ()
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of `dcp.testing.parallelism.check`. ``str()`` gives a table, `to_json` plain data."""

    trials: tuple[Trial, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """True if every saved element was restored."""
        return not self.findings

    @property
    def findings(self) -> tuple[StateFinding, ...]:
        """Findings of all trials."""
        return tuple(finding for trial in self.trials for finding in trial.findings)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"ok": self.ok, "trials": [asdict(trial) for trial in self.trials]}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    for trial in report.trials:
        count = len(trial.findings)
        result = f"{count} finding{'s' * (count > 1)}" if trial.findings else "all restored"
        who = f"saved by {trial.saved_by} rank{'s' * (trial.saved_by != 1)}, loaded by {trial.loaded_by}"
        yield f"{who}: {trial.tensors} tensors, {result}"
        if trial.own and trial.saved_by != trial.loaded_by:
            yield f"  not compared, because each rank has its own: {', '.join(trial.own[:_MAX_NAMED])}"
        elif trial.saved_by == trial.loaded_by:
            yield from _taken(trial.own, "different on each rank", "replicas=")
            yield from _taken(trial.replicas, "replicated", "own=")
        yield from _table([_row(finding) for finding in trial.findings[:_SHOWN]])
        if len(trial.findings) > _SHOWN:
            yield f"  and {len(trial.findings) - _SHOWN} more"
    kinds = [kind for kind in _MEANINGS if any(finding.kind == kind for finding in report.findings)]
    if kinds:
        yield ""
    yield from (f"{kind}: {_MEANINGS[kind]}" for kind in kinds)


def _taken(names: Sequence[str], what: str, otherwise: str) -> Iterator[str]:
    if names:
        were = f"assumed to be {what}: {len(names)} plain tensor{'s' * (len(names) != 1)}"
        yield f"  {were} (list exceptions in {otherwise}): {listed(names, most=_MAX_NAMED, show=str)}"


def _row(finding: StateFinding) -> tuple[str, ...]:
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    count = f"{finding.count} of {finding.total}" if finding.total else ""
    return (finding.kind, finding.part, finding.name, rank, count, finding.places, finding.found)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield f"  {'  '.join(cells)}".rstrip()


Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

_MAX_SEARCHED: Final = 1 << 24
"""Largest number of elements searched for a wrong value."""

_SPARE_BITS: Final = 7
"""Extra bits beyond the position, to make equal values unlikely."""

_MAX_RUNS: Final = 8
_MOMENTS: Final = (
    ("lost", "before", "the values before the load"),
    ("stale", "earlier", "the values of an earlier save"),
    ("stale", "later", "the values of training after the save"),
)
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_SMALLER: Final = (torch.float32, torch.bfloat16, torch.float16)


class SavedTensor(NamedTuple):
    """A saved tensor; ``rank`` is set if it belongs to one rank."""

    name: str
    fqn: str
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int | None


@dataclass(frozen=True)
class SavedState:
    """Saved tensors of all ranks. ``own``: parameters and buffers that belong to one rank; ``replicas``:
    equal plain tensors on several ranks."""

    world: int
    tensors: Mapping[tuple[str, str, int | None], SavedTensor]
    own: frozenset[str]
    replicas: frozenset[str] = frozenset()

    def of(self, live: LiveTensor, rank: int) -> SavedTensor | None:
        """Find the saved tensor of ``live``; None if no rank saved one."""
        return self.tensors.get((live.part, live.name, rank if self.is_own(live) else None))

    def is_own(self, live: LiveTensor) -> bool:
        """Test for a tensor of one rank."""
        return live.is_alone and live.fqn in self.own


def judge(live: LiveTensor, rank: int, saved: SavedState) -> Iterator[StateFinding]:
    """Find wrong elements of ``live`` on ``rank``; nothing if all are as saved.

    Reasons are tried in order; each explains some of the remaining elements.
    """
    wanted, dtype, count = saved.of(live, rank), live.local.dtype, live.local.numel()
    facts: dict[str, Any] = {"rank": rank, "part": live.part, "name": live.name, "total": count}
    if wanted is None or (wanted.shape, wanted.dtype) != (live.shape, dtype):
        had = "" if wanted is None else f"it was {list(wanted.shape)} {_name(wanted.dtype)}"
        yield StateFinding("never saved", count=count, found=had, **facts)
        return
    bits = bits_of(live.local)
    expected = coded_bits(Identity(wanted.name, wanted.rank, "saved"), live.index, dtype)
    left = _by_element(bits != expected, dtype)
    right = ~left

    def finding(kind: str, mask: Mask, found: str, **more: Any) -> StateFinding:
        left[mask] = False
        places = _places(live.index[mask], live.shape)
        return StateFinding(kind, count=int(mask.sum()), places=places, found=found, **facts, **more)

    for kind, guess, found in _guesses(live, wanted, expected) if left.any() else ():
        same = left & ~_by_element(bits != guess, dtype)
        by_chance = 2.0 ** -bits_per_value(dtype) * left.sum()
        if same.sum() > 8 * by_chance + 1 or (same.any() and bool((same == left).all())):
            yield finding(kind, same, found)
    for source, moved in _elsewhere(live, bits, wanted, saved) if left.any() else ():
        mask = left & (moved >= 0)
        if mask.any():
            kind, found, more = _moved(source, wanted, moved[mask], live.index[right])
            yield finding(kind, mask, found, **more)
        if not left.any():
            return
    if left.any():
        values = live.local.detach().cpu().reshape(-1)
        few = [values[place].item() for place in np.flatnonzero(left)[:3].tolist()]
        shown = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in few]
        yield finding("garbage", left.copy(), ", ".join(shown))


def _guesses(live: LiveTensor, wanted: SavedTensor, expected: Any) -> Iterator[tuple[str, Any, str]]:
    """List known values of elements: kind of finding, bits, description."""
    dtype = live.local.dtype
    yield "lost", np.zeros_like(expected), "zeros"
    for kind, moment, found in _MOMENTS:
        yield kind, coded_bits(Identity(wanted.name, wanted.rank, moment), live.index, dtype), found
    for smaller in _SMALLER:
        if dtype.is_floating_point and smaller.itemsize < dtype.itemsize:
            values = torch.empty(live.local.numel(), dtype=dtype)
            write_bits(values, expected)
            yield "rounded", bits_of(values.to(smaller).to(dtype)), f"rounded to {_name(smaller)}"


def _elsewhere(
    live: LiveTensor, bits: Any, wanted: SavedTensor, saved: SavedState
) -> Iterator[tuple[SavedTensor, Places]]:
    """List tensors with the positions of the elements found here, or -1."""
    row = live.local.shape[-1] if live.local.ndim else 1
    for width in dict.fromkeys((min(gram_width(live.local.dtype), row), 1)):
        for candidate in _candidates(wanted, saved):
            yield candidate, _found_in(candidate, bits, live.local.dtype, row, width)


def _moved(
    source: SavedTensor, wanted: SavedTensor, come_from: Places, right: Places
) -> tuple[str, str, dict[str, Any]]:
    """Describe elements of ``source`` at ``come_from``; ``right`` positions are unchanged."""
    kind, whose = "mixed up", source.name
    if (source.name, source.part, source.rank) == (wanted.name, wanted.part, wanted.rank):
        is_twice = np.isin(come_from, right).any() or len(np.unique(come_from)) < len(come_from)
        kind, whose = "doubled" if is_twice else "shuffled", "itself"
    elif source.rank is not None:
        whose = f"rank {source.rank}'s" + (f" {source.name}" if source.name != wanted.name else "")
    places = _places(come_from, source.shape)
    more = {"from_name": source.name, "from_rank": source.rank, "from_places": places}
    return kind, f"has {places} of {whose}", more


# -- places that elements come from --------------------------------------------------------------------------


def _candidates(wanted: SavedTensor, saved: SavedState) -> Iterator[SavedTensor]:
    """List tensors of the dtype: the same tensor first, then its copies on other ranks, then all others."""
    same = [one for one in saved.tensors.values() if one.dtype == wanted.dtype]
    searched = 0
    for one in sorted(same, key=lambda one: (one != wanted, one.name != wanted.name)):
        searched += math.prod(one.shape)
        if searched > _MAX_SEARCHED:
            return
        yield one


def _found_in(source: SavedTensor, bits: Any, dtype: torch.dtype, row: int, width: int) -> Places:
    """Find the position in ``source`` of each element with equal neighbours, or -1."""
    found = np.full(len(bits) // (2 if dtype.is_complex else 1), -1, np.int64)
    count = math.prod(source.shape)
    if count < width or width * bits_per_value(dtype) < _SPARE_BITS + math.log2(count):
        return found  # too few bits to be unique
    there = coded_bits(Identity(source.name, source.rank, "saved"), np.arange(count, dtype=np.int64), dtype)
    grams, here = _grams(_joined(there, dtype), width), _grams(_joined(bits, dtype), width)
    order = np.argsort(grams, kind="stable")
    rank = np.minimum(np.searchsorted(grams[order], here), len(grams) - 1)
    is_known = grams[order][rank] == here
    # neighbours within a row of this rank
    is_known &= np.arange(len(here)) % max(row, 1) <= max(row, 1) - width
    begins = np.flatnonzero(is_known)
    for step in range(width):
        found[begins + step] = order[rank[begins]] + step
    return found


def _joined(bits: Any, dtype: torch.dtype) -> npt.NDArray[np.uint64]:
    """Combine the bits of each element to one number."""
    wide: npt.NDArray[np.uint64] = bits.astype(np.uint64)
    return wide[0::2] * _MULTIPLIER + wide[1::2] if dtype.is_complex else wide


def _grams(values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint64]:
    """Hash the ``width`` values from each position."""
    count = len(values) - width + 1
    hashed = np.zeros(count, np.uint64)
    for step in range(width):
        hashed = hashed * _MULTIPLIER + values[step : step + count] + np.uint64(1)
    return hashed


def _by_element(differs: Mask, dtype: torch.dtype) -> Mask:
    return np.asarray(differs.reshape(-1, 2).any(1)) if dtype.is_complex else differs


# -- places in words -------------------------------------------------------------------------------------


def _places(index: Places, shape: Sequence[int]) -> str:
    """Describe positions: slices of the first dimension for whole rows, else the count and the first
    position."""
    total = math.prod(shape)
    if len(index) == total:
        return "all"
    row = total // shape[0] if shape and shape[0] else 1
    rows, counts = np.unique(index // row, return_counts=True)
    if (counts >= row).all():
        return f"[{', '.join(_runs(index[::row] // row if row > 1 else index))}]"
    first = np.unravel_index(int(index[0]), tuple(shape)) if shape else ()
    columns = np.unique(index % row)
    if row > 1 and len(shape) == 2 and (counts == len(columns)).all():
        return f"[{', '.join(_runs(rows))}; {', '.join(_runs(columns))}]"
    return f"{len(index)} from [{', '.join(str(int(part)) for part in first)}] on"


def _runs(numbers: Places) -> list[str]:
    """Join consecutive numbers to slices, in their order."""
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    begins, ends = np.r_[0, breaks + 1], np.r_[breaks, len(numbers) - 1]
    slices = [f"{numbers[begin]}:{numbers[end] + 1}" for begin, end in zip(begins, ends, strict=True)]
    return slices if len(slices) <= _MAX_RUNS else [*slices[: _MAX_RUNS - 1], "..."]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
