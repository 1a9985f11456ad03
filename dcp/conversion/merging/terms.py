"""What each tensor of a merge is a sum of, and what does not go together, before a byte moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, starmap
from typing import Any, Final

from dcp.conversion.contents.casting import CASTABLE
from dcp.conversion.contents.entries import Entries, TargetDtype, TensorEntry, mapped_entries
from dcp.conversion.layouts.terms import TensorTerm
from dcp.conversion.merging.adapters import LowRank, low_ranks
from dcp.conversion.merging.arithmetic import Arithmetic
from dcp.planners.load.selection import Patterns, Rename, Selection, check_patterns
from dcp.planners.weight_maps.mapped_index import MappedIndex, map_sources
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening.sources import Source
from dcp.storage.near_names import listed, near_names

__all__ = ["MergedTensors", "merge_entries"]

_MAX_LISTED: Final = 50
_MAX_FACTOR_BYTES: Final = 64 << 20
"""Of a product one factor is in memory whole."""
_METRICS: Final = "metrics"
"""Of the user metadata: measured of one checkpoint, and not of what is made of several."""
_WHOLE_NUMBERS: Final = frozenset(
    dtypes.BY_NAME[name].code
    for name in ("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64")
)


@dataclass(frozen=True, eq=False)
class MergedTensors:
    """The ``terms`` of tensors, by row of the first source and of all of them joined, which are added in the
    type of code ``accumulate``. ``unmerged`` are those taken from the first as they are, by new name;
    ``origin`` is for the provenance. With weight maps terms are of the tensors ``mapped``, which are made of
    those of all sources joined, and have their rows."""

    terms: Mapping[int, Sequence[TensorTerm]]
    accumulate: int
    unmerged: tuple[str, ...]
    origin: Mapping[str, Any]
    mapped: Sequence[MappedTensor] = ()

    @property
    def identity(self) -> str:
        """Equal for merges that compute the same of the same sources."""
        pieces = [(tensor.shape, tensor.pieces) for tensor in self.mapped]
        facts = self.accumulate, sorted(self.terms.items()), pieces
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def merge_entries(
    members: Sequence[Source],
    joined: CheckpointIndex,
    arithmetic: Arithmetic,
    weight_maps: Sequence[WeightMap | None] = (),
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: TargetDtype = None,
) -> tuple[Entries, MappedIndex | None, MergedTensors]:
    """What is to be written, the first source under its map, and of what all is made. ``members`` are the
    sources and, behind them, adapters; ``joined`` is the index of all. ``weight_maps`` is one for all
    sources, or one for each, and goes without adapters. ``only``, ``exclude`` and ``rename`` are about the
    names of each.

    PlanError that says of all tensors which do not go together, why; MissingKeyError for patterns that match
    nothing in any source.
    """
    count = len(arithmetic.weights)
    sources, adapters = members[:count], members[count:]
    maps = weight_maps if len(weight_maps) == count else [*weight_maps, None][:1] * count
    found = _chosen(sources, maps, only, exclude, rename, dtype)
    chosen, mapped = [entries for entries, _ in found], found[0][1]
    made = _made(found) if any(maps) else []
    added = [low_ranks(adapter.index, adapter.store) for adapter in adapters]
    merging = _Merging(chosen, added, joined, arithmetic, is_mapped=bool(made))
    terms = merging.terms()
    merging.raise_problems([source.name for source in members])
    first = _untied(chosen, terms)
    user = {name: value for name, value in first.index.user.items() if name != _METRICS}
    first = replace(first, index=replace(first.index, user=user, digests=()))  # of sums nobody has any
    unmerged = tuple(sorted(entry.fqn for entry in first.tensors if entry.fqn in merging.unmerged))
    merged = MergedTensors(terms, arithmetic.code, unmerged, _origin(members, arithmetic), made)
    return first, mapped, merged


def _made(found: Sequence[tuple[Entries, MappedIndex | None]]) -> list[MappedTensor]:
    """The tensors of all sources under their maps, of pieces of all sources joined."""
    made = []
    for number, (entries, mapped) in enumerate(found):
        own = mapped.tensors if mapped else starmap(MappedTensor.same, map_sources(entries.index))
        for tensor in own:
            sides = ((one, one.source._replace(name=f"{number}/{one.source.name}")) for one in tensor.pieces)
            made.append(replace(tensor, pieces=[one._replace(source=side) for one, side in sides]))
    return made


def _chosen(
    sources: Sequence[Source],
    maps: Sequence[WeightMap | None],
    only: Patterns | None,
    exclude: Patterns | None,
    rename: Rename | None,
    dtype: TargetDtype,
) -> list[tuple[Entries, MappedIndex | None]]:
    """What is selected of each, under its map; a pattern must match in one of them, and not in all."""
    names = [[*source.index.fqns, *source.index.objects.fqns] for source in sources]
    selection = Selection.of(only, exclude)
    if selection is not None:
        check_patterns(selection, [name for own in names for name in own])
    found: list[tuple[Entries, MappedIndex | None]] = []
    for number, (source, own, weights) in enumerate(zip(sources, names, maps, strict=True)):
        patterns = [_matching(given, own) for given in (only, exclude)]
        if only is not None and not patterns[0]:
            found.append((Entries(source.index, [], []), None))
            continue
        chosen = {"only": patterns[0], "exclude": patterns[1] or None, "rename": rename}
        cast = dtype if not number else None
        found.append(mapped_entries(source.index, source.store, weights, **chosen, dtype=cast))
    return found


def _matching(patterns: Patterns | None, names: Sequence[str]) -> list[str] | None:
    """Those that match any of ``names``."""
    if patterns is None:
        return None
    given = [patterns] if isinstance(patterns, str) else patterns
    selections = ((one, Selection.of([one], None)) for one in given)
    return [one for one, selects in selections if selects is None or any(map(selects.selects, names))]


class _Merging:
    """Compares the sources tensor by tensor; ``problems`` are by name."""

    def __init__(
        self,
        chosen: Sequence[Entries],
        added: Sequence[Sequence[LowRank]],
        joined: CheckpointIndex,
        arithmetic: Arithmetic,
        *,
        is_mapped: bool,
    ) -> None:
        self._chosen = chosen
        # where the tensors that a map made of each source begin, of those of all sources
        counts = (one.index.tensor_count for one in chosen)
        self._begins = list(accumulate(counts, initial=0)) if is_mapped else []
        self._added = added
        self._joined = joined
        self._arithmetic = arithmetic
        self._entries = [{entry.fqn: entry for entry in one.tensors} for one in chosen]
        self._problems: dict[str, str] = {}
        self._is_sum = len(chosen) > 1 or arithmetic.weights != (1.0,)
        self.unmerged: set[str] = set()

    def terms(self) -> dict[int, tuple[TensorTerm, ...]]:
        """By row of the first source; what is wrong is noted."""
        names = dict.fromkeys(name for own in self._entries for name in own)
        terms = {name: found for name in names if (found := self._of_sources(name))}
        for number, adapter in enumerate(self._added):
            for low_rank in adapter:
                self._add(number, low_rank, terms)
        first = self._entries[0]
        return {first[name].tensor: tuple(own) for name, own in terms.items() if name in first}

    def raise_problems(self, names: Sequence[str]) -> None:
        """PlanError with all that was noted; ``names`` are of the sources."""
        if not self._problems:
            return
        told = [f"{name!r} {problem}" for name, problem in self._problems.items()]
        where = "; ".join(f"{number}: {name}" for number, name in enumerate(names, 1))
        raise PlanError(
            f"{len(told)} tensors cannot be merged: {listed(told, most=_MAX_LISTED, show=str)}. The sources "
            f"are {where}. Leave such tensors out (exclude), or rename them",
            fqns=list(self._problems),
            problems=told,
        )

    def _of_sources(self, name: str) -> list[TensorTerm]:
        own = [entries.get(name) for entries in self._entries]
        missing = [str(number) for number, entry in enumerate(own, 1) if entry is None]
        found = [entry for entry in own if entry is not None]
        if missing:
            self._problems[name] = f"is not in {', '.join(missing)}"
            return []
        indexes = [one.index for one in self._chosen]
        rows = list(zip(indexes, found, strict=True))
        shapes = [index.shape(entry.tensor) for index, entry in rows]
        types = [index.dtype(entry.tensor) for index, entry in rows]
        if len(set(shapes)) > 1:
            self._problems[name] = f"has the shapes {', '.join(map(str, shapes))}"
            return []
        if any(one.code not in CASTABLE for one in types):
            return self._as_it_is(name, [one.name for one in types], types[0].code)
        return [
            TensorTerm(weight, (self._row(number, name),))
            for number, weight in enumerate(self._arithmetic.weights)
        ]

    def _as_it_is(self, name: str, types: Sequence[str], code: int) -> list[TensorTerm]:
        """Of the first source."""
        if len(set(types)) > 1:
            self._problems[name] = f"is {', '.join(types)}"
        elif self._is_sum and code not in _WHOLE_NUMBERS:
            self._problems[name] = f"is {types[0]}, which is not added"
        self.unmerged.add(name)
        return [TensorTerm(1.0, (self._row(0, name),))]

    def _row(self, number: int, name: str) -> int:
        if self._begins:
            return self._begins[number] + self._entries[number][name].tensor
        old = self._chosen[number].source_names[name]
        return self._joined.position[f"{number}/{old}"]

    def _add(self, number: int, low_rank: LowRank, terms: Mapping[str, list[TensorTerm]]) -> None:
        """What an adapter adds to a tensor."""
        name, shape = low_rank.target, low_rank.shape
        if name in self._problems:
            return
        if name not in terms or name in self.unmerged:
            close = near_names(name, terms, most=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            self._problems[name] = f"is what an adapter is for, and no floating-point tensor{meant}"
            return
        first = self._chosen[0].index
        there = first.shape(self._entries[0][name].tensor)
        is_turned = there == shape[::-1] and (there != shape or low_rank.is_turned)
        if not is_turned and there != shape:
            self._problems[name] = f"has the shape {there}, and what an adapter adds has {shape}"
            return
        size = dtypes.BY_CODE[self._arithmetic.code].itemsize
        if low_rank.rank * there[1] * size > _MAX_FACTOR_BYTES:
            self._problems[name] = f"is too wide for a product of rank {low_rank.rank}"
            return
        member = len(self._arithmetic.weights) + number
        factors = [self._joined.position[f"{member}/{one}"] for one in (low_rank.left, low_rank.right)]
        weight = self._arithmetic.adapter_weights[number] * low_rank.scale
        rows = tuple(reversed(factors)) if is_turned else tuple(factors)
        terms[name].append(TensorTerm(weight, rows, low_rank.rank, is_turned))


def _untied(chosen: Sequence[Entries], terms: Mapping[int, Sequence[TensorTerm]]) -> Entries:
    """The first of ``chosen``: what shares its bytes there still does so if it does in all of them, and gets
    the same added."""
    first = chosen[0]
    others = [_first_of_tied(one) for one in chosen[1:]]

    def is_tied(entry: TensorEntry, to: TensorEntry) -> bool:
        same = all(tied[entry.fqn] == tied[to.fqn] for tied in others)
        return same and terms[entry.tensor][len(chosen) :] == terms[to.tensor][len(chosen) :]

    tensors = []
    for number, entry in enumerate(first.tensors):
        keeps = entry.tied_to == number or is_tied(entry, first.tensors[entry.tied_to])
        tensors.append(entry if keeps else entry._replace(tied_to=number))
    return replace(first, tensors=tensors)


def _first_of_tied(entries: Entries) -> dict[str, str]:
    return {entry.fqn: entries.tensors[entry.tied_to].fqn for entry in entries.tensors}


def _origin(members: Sequence[Source], arithmetic: Arithmetic) -> dict[str, Any]:
    weights = (*arithmetic.weights, *arithmetic.adapter_weights)
    sources = [
        {
            "url": member.name,
            "format": member.index.format,
            "save_id": member.index.provenance.get("save_id"),
            "weight": weight,
        }
        for member, weight in zip(members, weights, strict=True)
    ]
    return {"merged_from": sources, "accumulate": arithmetic.accumulate}
