"""Differences of two checkpoints by their indexes, or from the result of a job.

No payload is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from dcp.inspection.values.difference import (
    ObjectDifference,
    TensorDifference,
    TensorFacts,
    ValueDifference,
    diff,
)
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.server.catalog.inputs import short_name
from dcp.server.catalog.names import is_of_optimizer
from dcp.server.core.data.access import OpenCheckpoint
from dcp.server.features.diff import Basis, DifferenceOrder, with_texts
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex

_KINDS: Final = ("added", "removed", "shape", "dtype", "changed", "undecided")
_TENSOR_BYTES: Final = 1200
"""Memory of a differing tensor: name, facts of both sides, values."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ContentDifference:
    """Tensors and values that differ. ``equal`` and ``equal_objects`` count the rest. ``counts`` cover all
    differing tensors by kind; ``tensors`` can be the first of these only."""

    basis: Basis
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    object_count: int
    equal: int
    equal_objects: int
    counts: Mapping[str, int]

    @property
    def is_cut(self) -> bool:
        """True if ``tensors`` is incomplete."""
        return sum(self.counts.values()) > len(self.tensors)

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the differences in bytes."""
        return _TENSOR_BYTES * (len(self.tensors) + len(self.objects) + 1)


def chosen(
    found: ContentDifference, kinds: Collection[str], glob: str | None, order: DifferenceOrder
) -> list[TensorDifference]:
    """Return tensors of the kinds (default: all) with matching names, in order."""
    tensors = [
        one
        for one in found.tensors
        if (not kinds or one.kind in kinds) and (glob is None or fnmatchcase(one.fqn, glob))
    ]
    return tensors if order == "name" else sorted(tensors, key=_ORDERS[order])


def _most(amount: Callable[[ValueDifference], float | None]) -> Callable[[TensorDifference], float]:
    """Return a sort key: largest first, unknown amounts last."""

    def key(one: TensorDifference) -> float:
        value = None if one.values is None else amount(one.values)
        return 1.0 if value is None else -value

    return key


def _distance(values: ValueDifference) -> float | None:
    """Return the distance of a tensor; infinite if no value is finite."""
    return math.inf if values.relative_l2 is None and values.nonfinite else values.relative_l2


_ORDERS: Final[Mapping[str, Callable[[TensorDifference], Any]]] = {
    "relative_l2": _most(_distance),
    "changed": _most(lambda values: values.differing / (values.elements or 1)),
    "nonfinite": _most(lambda values: values.nonfinite),
    "weights": lambda one: (is_of_optimizer(one.fqn), _most(_distance)(one)),
}


def of_document(result: Mapping[str, Any]) -> ContentDifference:
    """Return the differences in the result of a job."""
    tensors = tuple(map(_known_difference, result["tensors"]))
    objects = tuple(ObjectDifference(**one) for one in result["objects"])
    counts = _counts(tensors) | result.get("counts", {})
    equal, equal_objects = result["equal_tensors"], result["equal_objects"]
    return ContentDifference("values", tensors, objects, result["object_count"], equal, equal_objects, counts)


def _known_difference(one: Mapping[str, Any]) -> TensorDifference:
    before = _known_facts(one["before"])
    # saves work: most tensors have equal facts on both sides, and there may be tens of thousands
    after = before if one["before"] == one["after"] else _known_facts(one["after"])
    values = None if one["values"] is None else ValueDifference(**one["values"])
    return TensorDifference(one["fqn"], one["kind"], before, after, values)


def _known_facts(facts: Mapping[str, Any] | None) -> TensorFacts | None:
    return None if facts is None else TensorFacts(facts["fqn"], facts["dtype"], tuple(facts["shape"]))


def _counts(tensors: Collection[TensorDifference]) -> dict[str, int]:
    """Return counts for every kind of difference."""
    kinds: list[str] = [tensor.kind for tensor in tensors]
    return dict.fromkeys(_KINDS, 0) | Counter(kinds)


def _of_indexes(
    basis: Basis,
    tensors: tuple[TensorDifference, ...],
    objects: tuple[ObjectDifference, ...],
    equal: int,
    equal_objects: int,
) -> ContentDifference:
    shown = tuple(with_texts(objects))
    return ContentDifference(basis, tensors, shown, len(objects), equal, equal_objects, _counts(tensors))


def compare(a: OpenCheckpoint, b: OpenCheckpoint, basis: Basis | None = None) -> ContentDifference:
    """Compare ``b`` with the earlier ``a``, by checksums if both indexes contain checksums.

    Raises errors of the checkpoints, and of the storage.
    """
    if basis is None:
        basis = "checksums" if _has_checksums(a.index) and _has_checksums(b.index) else "structure"
    if basis == "structure":
        return _by_structure(a.index, b.index)
    with (
        TensorReader(a.store, a.index, name="a", threads=1) as first,
        TensorReader(b.store, b.index, name="b", threads=1) as second,
    ):
        found = diff(first, second, values=False)
    return _of_indexes(basis, found.tensors, found.objects, len(found.equal), found.equal_objects)


def _has_checksums(index: CheckpointIndex) -> bool:
    # other formats have a checksum in each record, and need one read per record
    return bool(len(index.crcs)) or not int(index.payload_lengths.sum())


def _by_structure(a: CheckpointIndex, b: CheckpointIndex) -> ContentDifference:
    tensors = []
    names = [*a.fqns, *(fqn for fqn in b.fqns if fqn not in a.position)]
    for fqn in names:
        before, after = _facts(a, fqn), _facts(b, fqn)
        if before is None or after is None:
            kind: Literal["added", "removed", "shape", "dtype"] = "added" if before is None else "removed"
        elif before.shape != after.shape:
            kind = "shape"
        elif before.dtype != after.dtype:
            kind = "dtype"
        else:
            continue
        tensors.append(TensorDifference(fqn, kind, before, after))
    mine, theirs = a.objects.position, b.objects.position
    objects = [ObjectDifference(fqn, "removed") for fqn in mine if fqn not in theirs]
    objects += [ObjectDifference(fqn, "added") for fqn in theirs if fqn not in mine]
    return _of_indexes(
        "structure",
        tuple(tensors),
        tuple(objects),
        len(names) - len(tensors),
        len(mine.keys() & theirs.keys()),
    )


def _facts(index: CheckpointIndex, fqn: str) -> TensorFacts | None:
    row = index.position.get(fqn)
    return None if row is None else TensorFacts(fqn, index.dtype(row).name, index.shape(row))


_LEVELS: Final = 6


@dataclass(slots=True)
class WeightChange:
    """Change of a tensor, or of all tensors below a name. ``differing``, ``added``, and ``unbounded`` count
    tensors. Unbounded tensors have no relative distance: all 0 before, not finite, or of another shape."""

    total_bytes: int
    differing: int = 0
    added: int = 0
    unbounded: int = 0
    _squares: float = 0.0

    @property
    def relative_l2(self) -> float:
        """Root mean square of the relative L2 distances, weighted by bytes."""
        return math.sqrt(self._squares / self.total_bytes) if self.total_bytes else 0.0

    @property
    def colour(self) -> str:
        """CSS class: one level per power of ten, the last level from 0.1."""
        if self.added and self.added == self.differing:
            return "new"
        if self.unbounded:
            return f"q{_LEVELS}"
        if not self.differing or not self.relative_l2:
            return "q1" if self.differing else "q0"
        return f"q{min(_LEVELS, max(1, _LEVELS + 1 + math.floor(math.log10(self.relative_l2))))}"

    def add(self, one: TensorDifference, after: TensorFacts) -> None:
        """Count a differing tensor; ``after`` are its facts."""
        self.differing += 1
        if one.values is None:
            self.added += one.kind == "added"
            self.unbounded += one.kind != "added"
        elif one.values.relative_l2 is None or one.values.nonfinite:
            self.unbounded += one.values.differing > 0
        else:
            size = math.prod(after.shape) * dtypes.BY_NAME[after.dtype].itemsize
            self._squares += size * one.values.relative_l2**2


def changes_below(found: ContentDifference, prefix: str, nodes: Any) -> dict[str, WeightChange]:
    """Return the changes by name for one level of the tree."""
    start = f"{prefix}." if prefix else ""
    names = {node.name.partition(".")[0]: node.name for node in nodes}

    def name_of(fqn: str) -> str | None:
        return names.get(fqn[len(start) :].partition(".")[0]) if fqn.startswith(start) else None

    return _changes(found, {node.name: node.bytes for node in nodes}, name_of)


def changes_of_list(found: ContentDifference, entries: Any) -> dict[str, WeightChange]:
    """Return the changes of tensors, by name."""
    return _changes(found, {entry.fqn: entry.bytes for entry in entries}, short_name)


def _changes(
    found: ContentDifference, sizes: dict[str, int], name_of: Callable[[str], str | None]
) -> dict[str, WeightChange]:
    """Return the change of each name in ``sizes``; ``name_of`` assigns tensors to names."""
    changes = {name: WeightChange(size) for name, size in sizes.items()}
    for one in found.tensors:
        name = None if one.after is None else name_of(one.fqn)
        if name in changes and one.after is not None:
            changes[name].add(one, one.after)
    return changes
