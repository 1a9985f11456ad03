"""Derived indexes: selected rows, concatenated indexes, joined ranks, and a checkpoint without dropped
entries. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError, ReplicaMismatchError
from dcp.storage.formats.container_notes import join_notes, notes_by_path, structure_of_notes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, ObjectColumns, Path
from dcp.storage.geometry.strides import Int64, expand_ranges, gather_rows, starts

_CHUNK_COLUMNS: Final = ("record_offsets", "record_lengths", "payload_offsets", "payload_lengths")
_COLUMNS: Final = (
    *("dtype_codes", "shape_values", "requires_grad", "chunk_offsets", "chunk_sizes", "crcs", "file_sizes"),
    *_CHUNK_COLUMNS,
)
_OBJECT_COLUMNS: Final = ("offsets", "lengths", "crcs")
_RAGGED: Final = ("shape_start", "chunk_start", "crc_start")


def selected(
    index: CheckpointIndex, tensors: Int64, chunks: Int64, chunk_counts: npt.ArrayLike, objects: Int64
) -> CheckpointIndex:
    """Return the rows ``tensors`` with ``chunk_counts`` of ``chunks`` each, and the values ``objects``, in
    this order. Files, planner data and notes are unchanged.
    """
    old, columns = index.objects, ("files", "plain", *_OBJECT_COLUMNS)
    return replace(
        index,
        fqns=[index.fqns[row] for row in tensors.tolist()],
        dtype_codes=index.dtype_codes[tensors],
        shape_start=starts(index.ndims[tensors]),
        shape_values=gather_rows(index.shape_values, index.shape_start, tensors),
        requires_grad=index.requires_grad[tensors],
        chunk_start=starts(chunk_counts),
        chunk_offsets=gather_rows(index.chunk_offsets, index.box_start, chunks),
        chunk_sizes=gather_rows(index.chunk_sizes, index.box_start, chunks),
        chunk_files=index.chunk_files[chunks],
        **{name: getattr(index, name)[chunks] for name in _CHUNK_COLUMNS},
        crc_start=starts(np.diff(index.crc_start)[chunks]),
        crcs=gather_rows(index.crcs, index.crc_start, chunks),
        objects=ObjectColumns(
            fqns=[old.fqns[row] for row in objects.tolist()],
            values=old.values,
            **{name: getattr(old, name)[objects] for name in columns},
        ),
        stride_orders=_renumbered(index.stride_orders, tensors),
        payload_strides=_renumbered(index.payload_strides, chunks),
        record_crcs=_renumbered(index.record_crcs, chunks),
        digests=[index.digests[row] for row in tensors.tolist()] if len(index.digests) else (),
    )


def _renumbered(of_rows: Mapping[int, Any], rows: Int64) -> dict[int, Any]:
    if not of_rows:
        return {}
    return {new: of_rows[old] for new, old in enumerate(rows.tolist()) if old in of_rows}


def concatenated(parts: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """Return the rows of all ``parts`` without checkpoint-wide fields. Names may repeat; the result is not
    checked.
    """
    numbers: dict[bytes, int] = {}
    tables = [
        np.array([*(numbers.setdefault(value, len(numbers)) for value in part.objects.values), UNKNOWN])
        for part in parts
    ]
    tensors, chunks, files = (
        starts([len(getattr(part, name)) for part in parts]).tolist()
        for name in ("fqns", "chunk_files", "files")
    )
    objects = [part.objects for part in parts]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
    }
    for name in _RAGGED:
        columns[name] = starts(np.concatenate([np.diff(getattr(part, name)) for part in parts]))
    for name, begins in (("stride_orders", tensors), ("payload_strides", chunks), ("record_crcs", chunks)):
        columns[name] = {
            begin + row: value
            for begin, part in zip(begins, parts, strict=False)
            for row, value in getattr(part, name).items()
        }
    return CheckpointIndex(
        format=parts[0].format,
        fqns=list(chain.from_iterable(part.fqns for part in parts)),
        chunk_files=np.concatenate([part.chunk_files + at for at, part in zip(files, parts, strict=False)]),
        files=list(chain.from_iterable(part.files for part in parts)),
        objects=ObjectColumns(
            fqns=list(chain.from_iterable(one.fqns for one in objects)),
            files=np.concatenate(
                [np.where(one.files < 0, -1, one.files + at) for at, one in zip(files, objects, strict=False)]
            ),
            plain=np.concatenate([table[one.plain] for table, one in zip(tables, objects, strict=True)]),
            values=list(numbers),
            **{name: np.concatenate([getattr(one, name) for one in objects]) for name in _OBJECT_COLUMNS},
        ),
        **columns,
    )


def join_indexes(indexes: Mapping[int, CheckpointIndex], *, own_rank: int | None = None) -> CheckpointIndex:
    """Return the union of the indexes of ranks: equal names are one tensor with the chunks of all ranks.

    Repeated boxes and objects are kept once, from the lowest rank. Planner data is joined; provenance and
    user metadata are the lowest rank's. ``own_rank``, if present, comes first, and its data may differ.

    Raises:
        ReplicaMismatchError: If checksums show different data.
        CheckpointFormatError: If dtypes, shapes or the ranks of the save differ.
    """
    ranks = sorted(indexes, key=lambda rank: (rank != own_rank, rank))
    parts = [indexes[rank] for rank in ranks]
    if len(parts) == 1:
        return parts[0]
    worlds = {part.provenance.get("world_size") for part in parts} - {None}
    if len(worlds) > 1:
        raise CheckpointFormatError(
            f"the folder has parts of saves by {' and by '.join(sorted(map(str, worlds)))} ranks: remove the "
            "parts of the older save, and give each save its own checkpoint id"
        )
    whole = concatenated(parts)
    rank_of = np.repeat(ranks, [part.tensor_count for part in parts]).tolist()
    tensors: dict[str, int] = {}
    kept: dict[str, dict[Any, int]] = {}
    for row, fqn in enumerate(whole.fqns):
        first = tensors.setdefault(fqn, row)
        if whole.dtype_codes[first] != whole.dtype_codes[row] or whole.shape(first) != whole.shape(row):
            if rank_of[first] == own_rank:
                continue
            raise CheckpointFormatError(
                f"{fqn!r} is {whole.dtype(first).name} {whole.shape(first)} in the part of rank "
                f"{rank_of[first]}, but {whole.dtype(row).name} {whole.shape(row)} in the part of rank "
                f"{rank_of[row]}, so the parts do not form one checkpoint; load with as many ranks as saved",
                fqn=fqn,
                rank=rank_of[row],
            )
        boxes = kept.setdefault(fqn, {})
        for chunk in whole.chunks(row):
            other = boxes.setdefault(whole.box(chunk), chunk)
            crcs, rank = whole.block_crcs(other), rank_of[whole.chunk_tensors[other]]
            own_crcs = whole.block_crcs(chunk)
            if rank != own_rank and len(crcs) and len(own_crcs) and not np.array_equal(crcs, own_crcs):
                raise _mismatch(fqn, rank, rank_of[row])
    rank_of = np.repeat(ranks, [len(part.objects) for part in parts]).tolist()
    objects: dict[str, int] = {}
    for row, fqn in enumerate(whole.objects.fqns):
        first = objects.setdefault(fqn, row)
        if rank_of[first] != own_rank and _objects_differ(whole.objects, first, row):
            raise _mismatch(fqn, rank_of[first], rank_of[row])
    chunks = np.array([chunk for boxes in kept.values() for chunk in boxes.values()], np.int64)
    rows, object_rows = np.array([*tensors.values()], np.int64), np.array([*objects.values()], np.int64)
    joined = selected(whole, rows, chunks, [len(boxes) for boxes in kept.values()], object_rows)
    joined = replace(
        _with_distinct_files(joined),
        planner_data=_join_planner_data(parts),
        provenance={**parts[0].provenance, **_join_structure(parts)},
        user=parts[0].user,
    )
    joined.check()
    return joined


def _mismatch(fqn: str, first_rank: int, rank: int) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"ranks {first_rank} and {rank} saved {fqn!r} independently with different data; load with as many "
        "ranks as saved",
        fqn=fqn,
        rank=rank,
    )


def _objects_differ(objects: ObjectColumns, first: int, second: int) -> bool:
    """Return True if values certainly differ: plain encodings are canonical, equal records have
    equal CRCs.
    """
    plain, crcs = objects.plain[[first, second]].tolist(), objects.crcs[[first, second]].tolist()
    if min(plain) >= 0:
        return bool(plain[0] != plain[1])
    return min(crcs) >= 0 and bool(crcs[0] != crcs[1])


def _with_distinct_files(index: CheckpointIndex) -> CheckpointIndex:
    sizes: dict[str, int] = {}
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        known = sizes.setdefault(name, size)
        if UNKNOWN not in (known, size) and known != size:
            raise CheckpointFormatError(
                f"the parts of two ranks have different sizes for the file {name}: the checkpoint is damaged",
                path=name,
            )
        sizes[name] = max(known, size)
    number = {name: row for row, name in enumerate(sizes)}
    table = np.array([*map(number.__getitem__, index.files), -1], np.int64)  # row -1 stays -1
    return replace(
        index,
        files=list(sizes),
        file_sizes=np.array(list(sizes.values()), np.int64),
        chunk_files=table[index.chunk_files],
        objects=replace(index.objects, files=table[index.objects.files]),
    )


def _join_structure(parts: Sequence[CheckpointIndex]) -> dict[str, Any]:
    """Return the container notes of all parts; at a difference, the first part's."""
    noted = []
    for part in parts:
        paths = part.planner_data if isinstance(part.planner_data, Mapping) else {}
        noted.append((tuple(notes_by_path(part.provenance.get("structure")).values()), paths))
    return structure_of_notes(join_notes(noted)[0])


def _join_planner_data(parts: Sequence[CheckpointIndex]) -> Any:
    joined: dict[Any, Any] = {}
    for part in parts:
        if isinstance(part.planner_data, Mapping):
            joined |= {fqn: path for fqn, path in part.planner_data.items() if fqn not in joined}
        elif part.planner_data is not None:
            return parts[0].planner_data
    return joined or None


_KEY: Final = "dropped"
"""Key in the provenance."""

_COUNTS: Final = ("tensors", "objects", "bytes")


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """Dropped entries: ``name``, ``patterns`` (globs), ``seconds`` since the epoch, numbers of tensors and
    objects, and ``bytes`` of the tensors.
    """

    name: str
    patterns: tuple[str, ...]
    seconds: float
    tensors: int
    objects: int
    bytes: int

    def __str__(self) -> str:
        try:
            when = f"{datetime.fromtimestamp(self.seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
        except (OverflowError, ValueError, OSError):  # of an invalid manifest
            when = "an unknown date"
        return f"{self.name} was dropped on {when}"


def dropped_from(provenance: Mapping[str, Any]) -> tuple[DroppedPart, ...]:
    """Return the dropped parts from an (untrusted) provenance; () for none."""
    notes = provenance.get(_KEY)
    if not isinstance(notes, list | tuple):
        return ()
    parts = []
    for note in notes:
        get = note.get if isinstance(note, dict) else {}.get
        name, patterns, seconds, *counts = map(get, ("name", "patterns", "time", *_COUNTS))
        if type(name) is str and isinstance(patterns, list | tuple) and type(seconds) is float:
            numbers = (count if type(count) is int else 0 for count in counts)
            parts.append(DroppedPart(name, tuple(map(str, patterns)), seconds, *numbers))
    return tuple(parts)


def noted_in(provenance: Mapping[str, Any], part: DroppedPart) -> dict[str, Any]:
    """Return the provenance with ``part`` added to the dropped parts."""
    before = provenance.get(_KEY)
    counts = {key: getattr(part, key) for key in _COUNTS}
    note = {"name": part.name, "patterns": list(part.patterns), "time": part.seconds, **counts}
    return {**provenance, _KEY: [*(before if isinstance(before, list | tuple) else ()), note]}


def without(index: CheckpointIndex, dropped: Collection[str]) -> CheckpointIndex:
    """Return ``index`` without the entries ``dropped`` and without unreferenced files."""
    tensors, objects = (
        np.array([row for row, name in enumerate(names) if name not in dropped], np.int64)
        for names in (index.fqns, index.objects.fqns)
    )
    counts = np.diff(index.chunk_start)[tensors]
    found = selected(index, tensors, expand_ranges(index.chunk_start[tensors], counts), counts, objects)
    files, file_of = _used(np.concatenate([found.chunk_files, found.objects.files]), len(index.files))
    values, value_of = _used(found.objects.plain, len(index.objects.values))
    paths = index.planner_data
    if isinstance(paths, Mapping):
        paths = {name: path for name, path in paths.items() if name not in dropped}
    return replace(
        found,
        chunk_files=file_of[found.chunk_files],
        files=[index.files[number] for number in files.tolist()],
        file_sizes=index.file_sizes[files],
        objects=replace(
            found.objects,
            files=file_of[found.objects.files],
            plain=value_of[found.objects.plain],
            values=[found.objects.values[number] for number in values.tolist()],
        ),
        planner_data=paths,
        provenance=_provenance_without(index, dropped),
    )


def _used(numbers: Int64, count: int) -> tuple[Int64, Int64]:
    """Return the used numbers and the new number of each; -1 maps to the last."""
    used = np.unique(numbers[numbers >= 0])
    new = np.full(count + 1, UNKNOWN, np.int64)
    new[used] = np.arange(len(used))
    return used, new


def _provenance_without(index: CheckpointIndex, dropped: Collection[str]) -> Mapping[str, Any]:
    """Return the provenance without notes on containers that only held dropped entries."""
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
    """Return the containers of the counted entries."""
    chosen = (path for name, path in paths.items() if counts(name) and isinstance(path, tuple))
    return {path[:depth] for path in chosen for depth in range(len(path))}


def _is_in(note: Any, containers: Collection[Path]) -> bool:
    path = note.get("path") if isinstance(note, dict) else None
    if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
        return False
    return any(tuple(path[:depth]) in containers for depth in range(len(path) + 1))
