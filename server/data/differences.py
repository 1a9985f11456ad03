"""What differs between two checkpoints as far as their indexes tell, without reading a payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dcp.inspection.values.difference import TensorDifference, TensorFacts, diff_readers
from dcp.inspection.values.object_differences import ObjectDifference
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.server.data.opening import OpenCheckpoint
from dcp.server.records.contents import Basis
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["IndexDifference", "compare"]

_KINDS: Final = ("added", "removed", "shape", "dtype", "changed", "undecided")


@dataclass(frozen=True, slots=True)
class IndexDifference:
    """``equal`` counts the tensors in which nothing was found to differ, ``equal_objects`` the values."""

    basis: Basis
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    equal: int
    equal_objects: int

    @property
    def counts(self) -> dict[str, int]:
        """Tensors by kind of difference; every kind is there."""
        found = dict.fromkeys(_KINDS, 0)
        for tensor in self.tensors:
            found[tensor.kind] += 1
        return found


def compare(a: OpenCheckpoint, b: OpenCheckpoint, basis: Basis | None = None) -> IndexDifference:
    """``b`` compared with ``a``, the one before; by checksums where both have those in their indexes.

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
        found = diff_readers(first, second, values=False)
    return IndexDifference(basis, found.tensors, found.objects, len(found.equal), found.equal_objects)


def _has_checksums(index: CheckpointIndex) -> bool:
    # Others have a checksum in each record, which would have to be opened, one by one.
    return bool(len(index.crcs)) or not int(index.payload_lengths.sum())


def _by_structure(a: CheckpointIndex, b: CheckpointIndex) -> IndexDifference:
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
    return IndexDifference(
        "structure",
        tuple(tensors),
        tuple(objects),
        len(names) - len(tensors),
        len(mine.keys() & theirs.keys()),
    )


def _facts(index: CheckpointIndex, fqn: str) -> TensorFacts | None:
    row = index.position.get(fqn)
    return None if row is None else TensorFacts(fqn, index.dtype(row).name, index.shape(row))
