"""A checkpoint without some of its entries: its index, and the note that says what was dropped and when.

What stays refers to the bytes that it referred to before. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64, ObjectColumns, Path, starts
from dcp.storage.geometry.ragged import expand_ranges, gather_rows

__all__ = ["DroppedPart", "dropped_from", "noted_in", "without"]

_KEY: Final = "dropped"
"""Of the provenance."""


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """What was dropped ``seconds`` after the epoch: the entries called so (``name``) and their globs
    (``patterns``), how many tensors and other values, and the ``bytes`` of the tensors."""

    name: str
    patterns: tuple[str, ...]
    seconds: float
    tensors: int
    objects: int
    bytes: int

    def __str__(self) -> str:
        try:
            when = f"{datetime.fromtimestamp(self.seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
        except (OverflowError, ValueError, OSError):  # a stranger's
            when = "an unknown day"
        return f"{self.name} was dropped on {when}"


def dropped_from(provenance: Mapping[str, Any]) -> tuple[DroppedPart, ...]:
    """What was dropped from a checkpoint since it was saved, as its provenance says, which may be a
    stranger's; () of all others."""
    notes = provenance.get(_KEY)
    if not isinstance(notes, list | tuple):
        return ()
    found = (_part_of(note) for note in notes if isinstance(note, dict))
    return tuple(part for part in found if part is not None)


def _part_of(note: Mapping[str, Any]) -> DroppedPart | None:
    name, patterns, seconds = note.get("name"), note.get("patterns"), note.get("time")
    if type(name) is not str or not isinstance(patterns, list | tuple) or type(seconds) is not float:
        return None
    counts = [note.get(key) for key in ("tensors", "objects", "bytes")]
    tensors, objects, size_bytes = (count if type(count) is int else 0 for count in counts)
    return DroppedPart(name, tuple(map(str, patterns)), seconds, tensors, objects, size_bytes)


def noted_in(provenance: Mapping[str, Any], part: DroppedPart) -> dict[str, Any]:
    """The provenance, with ``part`` added to what was dropped."""
    before = provenance.get(_KEY)
    note = {
        "name": part.name,
        "patterns": list(part.patterns),
        "time": part.seconds,
        "tensors": part.tensors,
        "objects": part.objects,
        "bytes": part.bytes,
    }
    return {**provenance, _KEY: [*(before if isinstance(before, list | tuple) else ()), note]}


def without(index: CheckpointIndex, dropped: Collection[str]) -> CheckpointIndex:
    """``index`` without the entries called ``dropped``, and without the files that only they had bytes in."""
    tensors = np.array([row for row, name in enumerate(index.fqns) if name not in dropped], np.int64)
    counts = np.diff(index.chunk_start)[tensors]
    chunks = expand_ranges(index.chunk_start[tensors], counts)
    objects = _objects_without(index.objects, dropped)
    used = np.union1d(index.chunk_files[chunks], objects.files[objects.files >= 0]).astype(np.int64)
    numbers = np.full(len(index.files) + 1, UNKNOWN, np.int64)  # the last is what -1, for no file, takes
    numbers[used] = np.arange(len(used))
    new_rows = {int(old): new for new, old in enumerate(tensors.tolist())}
    new_chunks = {int(old): new for new, old in enumerate(chunks.tolist())}
    return replace(
        index,
        fqns=[index.fqns[row] for row in tensors.tolist()],
        dtype_codes=index.dtype_codes[tensors],
        shape_start=starts(index.ndims[tensors]),
        shape_values=gather_rows(index.shape_values, index.shape_start, tensors),
        requires_grad=index.requires_grad[tensors],
        chunk_start=starts(counts),
        chunk_offsets=gather_rows(index.chunk_offsets, index.box_start, chunks),
        chunk_sizes=gather_rows(index.chunk_sizes, index.box_start, chunks),
        chunk_files=numbers[index.chunk_files[chunks]],
        record_offsets=index.record_offsets[chunks],
        record_lengths=index.record_lengths[chunks],
        payload_offsets=index.payload_offsets[chunks],
        payload_lengths=index.payload_lengths[chunks],
        crc_start=starts(np.diff(index.crc_start)[chunks]),
        crcs=_crcs(index, chunks),
        files=[index.files[number] for number in used.tolist()],
        file_sizes=index.file_sizes[used],
        objects=replace(objects, files=numbers[objects.files]),
        stride_orders={new_rows[row]: order for row, order in index.stride_orders.items() if row in new_rows},
        payload_strides=_renumbered(index.payload_strides, new_chunks),
        record_crcs=_renumbered(index.record_crcs, new_chunks),
        digests=[index.digests[row] for row in tensors.tolist()] if len(index.digests) else (),
        planner_data=_paths_without(index.planner_data, dropped),
        provenance=_provenance_without(index, dropped),
    )


def _crcs(index: CheckpointIndex, chunks: Int64) -> Any:
    return index.crcs[expand_ranges(index.crc_start[chunks], np.diff(index.crc_start)[chunks])]


def _renumbered(of_chunks: Mapping[int, Any], new: Mapping[int, int]) -> dict[int, Any]:
    return {new[chunk]: value for chunk, value in of_chunks.items() if chunk in new}


def _objects_without(objects: ObjectColumns, dropped: Collection[str]) -> ObjectColumns:
    rows = np.array([row for row, name in enumerate(objects.fqns) if name not in dropped], np.int64)
    plain = objects.plain[rows]
    used = np.unique(plain[plain >= 0])
    numbers = np.full(len(objects.values) + 1, UNKNOWN, np.int64)
    numbers[used] = np.arange(len(used))
    return ObjectColumns(
        fqns=[objects.fqns[row] for row in rows.tolist()],
        files=objects.files[rows],
        offsets=objects.offsets[rows],
        lengths=objects.lengths[rows],
        crcs=objects.crcs[rows],
        plain=numbers[plain],
        values=[objects.values[number] for number in used.tolist()],
    )


def _paths_without(planner_data: Any, dropped: Collection[str]) -> Any:
    if not isinstance(planner_data, Mapping):
        return planner_data
    return {name: path for name, path in planner_data.items() if name not in dropped}


def _provenance_without(index: CheckpointIndex, dropped: Collection[str]) -> Mapping[str, Any]:
    """Without the notes on containers that only held what is dropped: they would be made again, empty."""
    structure, paths = index.provenance.get("structure"), index.planner_data
    if not isinstance(structure, dict) or not isinstance(structure.get("containers"), list):
        return index.provenance
    if not isinstance(paths, Mapping):
        return index.provenance
    gone = _containers(paths, dropped.__contains__) - _containers(paths, lambda name: name not in dropped)
    containers = [note for note in structure["containers"] if not _is_in(note, gone)]
    values = structure.get("values")
    values = values if isinstance(values, dict) else {}
    values = {name: kind for name, kind in values.items() if name not in dropped}
    return {**index.provenance, "structure": {**structure, "containers": containers, "values": values}}


def _containers(paths: Mapping[str, Path], counts: Any) -> set[Path]:
    """Of the entries that count."""
    chosen = (path for name, path in paths.items() if counts(name) and isinstance(path, tuple))
    return {path[:depth] for path in chosen for depth in range(len(path))}


def _is_in(note: Any, containers: Collection[Path]) -> bool:
    path = note.get("path") if isinstance(note, dict) else None
    if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
        return False
    return any(tuple(path[:depth]) in containers for depth in range(len(path) + 1))
