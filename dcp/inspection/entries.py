"""The entries of a checkpoint, from its index: tensors, by modules too, and values.

No tensor is read, and torch is not needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.plain import MAX_PLAIN_BYTES
from dcp.storage.formats.torch.python_values import decode_value, python_value
from dcp.storage.formats.torch.record_reader import ObjectBlob
from dcp.storage.stores.base import Store

_Place: TypeAlias = tuple[int, int, int]

_BLOBS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: its global shape, and the number, bytes and files of its chunks."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One non-tensor value. ``value`` counts only where ``is_plain`` (or harmless otherwise); others stay
    pickled, ``bytes`` long."""

    fqn: str
    is_plain: bool
    value: Any
    bytes: int
    file: str | None


@dataclass(slots=True)
class ModuleNode:
    """A module: what is below one dotted prefix. ``tensor`` is set where the name itself is a tensor."""

    name: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    tensor: TensorRow | None = None
    children: list[ModuleNode] = field(default_factory=list)


def tensor_rows(index: CheckpointIndex) -> list[TensorRow]:
    """Return all tensors in the order of the index."""
    sizes = np.zeros(index.tensor_count, dtype=np.int64)
    np.add.at(sizes, index.chunk_tensors, index.payload_lengths)
    pairs = np.unique(np.stack([index.chunk_tensors, index.chunk_files]), axis=1)
    ends = np.searchsorted(pairs[0], np.arange(index.tensor_count + 1)).tolist()
    names = [index.files[file] for file in pairs[1].tolist()]
    columns = zip(index.fqns, np.diff(index.chunk_start).tolist(), sizes.tolist(), strict=True)
    return [
        TensorRow(
            fqn, index.dtype(row).name, index.shape(row), *rest, tuple(names[ends[row] : ends[row + 1]])
        )
        for row, (fqn, *rest) in enumerate(columns)
    ]


def object_rows(
    store: Store,
    index: CheckpointIndex,
    fqns: Sequence[str] | None = None,
    *,
    limit_bytes: int = MAX_PLAIN_BYTES,
) -> list[ObjectRow]:
    """List the values ``fqns`` that are no tensors, by default all in the order of the index.

    Plain ones are decoded, and of those that are pickled the harmless ones of up to ``limit_bytes``.
    """
    objects, position = index.objects, index.objects.position
    chosen = range(len(objects)) if fqns is None else [position[fqn] for fqn in fqns]
    columns = (column[chosen].tolist() for column in (objects.files, objects.offsets, objects.lengths))
    places = list(zip(*columns, strict=True))
    plain = objects.plain[chosen].tolist()
    pickled = {place for place, at in zip(places, plain, strict=True) if at == UNKNOWN}
    decoded = _plain_values(store, index, [one for one in sorted(pickled) if one[2] <= limit_bytes])
    values = {at: decode_value(objects.values[at]) for at in {*plain} - {UNKNOWN}}
    rows = []
    for row, place, at in zip(chosen, places, plain, strict=True):
        fqn, size_bytes = objects.fqns[row], place[2]
        name = index.files[place[0]] if place[0] != UNKNOWN else None
        if at == UNKNOWN:
            rows.append(ObjectRow(fqn, place in decoded, decoded.get(place), size_bytes, name))
        else:
            size_bytes = len(objects.values[at]) if name is None else size_bytes
            rows.append(ObjectRow(fqn, True, values[at], size_bytes, name))
    return rows


def _plain_values(store: Store, index: CheckpointIndex, places: list[_Place]) -> dict[_Place, Any]:
    """Return values at ``places`` (file, offset, length) that are harmless, decoded without running
    anything."""
    found: dict[_Place, Any] = {}
    with ReadEngine(store, index, threads=store.read_profile.threads or 1) as engine:
        for first in range(0, len(places), _BLOBS_AT_ONCE):
            some = places[first : first + _BLOBS_AT_ONCE]
            for place, blob in zip(some, engine.read_blobs(some), strict=True):
                with contextlib.suppress(CheckpointFormatError):  # it is not harmless, or no torch.save blob
                    opened = ObjectBlob(blob)
                    found[place] = python_value(opened.decoded, opened.pickle_bytes)
    return found


def module_tree(rows: Iterable[TensorRow]) -> ModuleNode:
    """Return tensors grouped by the dots in their names, with sums; the root has an empty name."""
    root = ModuleNode("")
    by_path: dict[tuple[str, ...], ModuleNode] = {}
    for row in rows:
        parts, node = tuple(row.fqn.split(".")), root
        for depth in range(len(parts) + 1):
            if depth and parts[:depth] not in by_path:
                by_path[parts[:depth]] = ModuleNode(parts[depth - 1])
                node.children.append(by_path[parts[:depth]])
            node = by_path[parts[:depth]] if depth else root
            node.tensors += 1
            node.elements += math.prod(row.shape)
            node.bytes += row.bytes
        node.tensor = row
    return root


# -- ties ----------------------------------------------------------------------------------------------------


def first_of_ties(index: CheckpointIndex, rows: list[int]) -> list[int]:
    """Return for each of the tensors ``rows`` the first one among them that has the same bytes of the same
    files."""
    tied = _may_be_tied(index)
    if not tied:
        return rows
    firsts: dict[tuple[Any, ...], int] = {}
    return [firsts.setdefault(_identity(index, row), row) if row in tied else row for row in rows]


def _may_be_tied(index: CheckpointIndex) -> set[int]:
    """Return tensors whose first chunk begins where another one's does; none where their places are not
    known."""
    if len(index.payload_offsets) < len(index.chunk_files):
        return set()
    rows = np.flatnonzero(np.diff(index.chunk_start) > 0)
    chunks = index.chunk_start[rows]
    offsets = index.payload_offsets[chunks]
    places = np.where(offsets < 0, index.record_offsets[chunks], offsets)
    order = np.lexsort((places, index.chunk_files[chunks]))
    files, places = index.chunk_files[chunks][order], places[order]
    same = np.zeros(len(rows) + 1, bool)
    same[1:-1] = (files[1:] == files[:-1]) & (places[1:] == places[:-1])
    return set(rows[order][same[1:] | same[:-1]].tolist())


def _identity(index: CheckpointIndex, row: int) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that share all of their bytes, and for no others."""
    chunks = index.chunks(row)
    rows = slice(chunks.start, chunks.stop)
    if not int(index.payload_lengths[rows].sum()):
        return (row,)
    offsets = index.payload_offsets[rows]
    places = np.where(offsets < 0, index.record_offsets[rows], offsets)
    boxes = slice(int(index.box_start[chunks.start]), int(index.box_start[chunks.stop]))
    strides = index.payload_strides
    return (
        int(index.dtype_codes[row]),
        index.shape(row),
        index.chunk_files[rows].tobytes(),
        places.tobytes(),
        index.chunk_offsets[boxes].tobytes(),
        index.chunk_sizes[boxes].tobytes(),
        tuple(strides.get(chunk) for chunk in chunks) if strides else None,
    )
