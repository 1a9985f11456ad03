"""A checkpoint without some of its entries: its index, and the note that says what was dropped and when.

What stays refers to the bytes that it referred to before. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64, Path
from dcp.storage.formats.views import selected
from dcp.storage.geometry.ragged import expand_ranges

__all__ = ["DroppedPart", "dropped_from", "noted_in", "without"]

_KEY: Final = "dropped"
"""Of the provenance."""


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """Entries that were dropped ``seconds`` after the epoch: the entries called so (``name``) and their globs
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
    """Return what was dropped from a checkpoint since it was saved, as its provenance says, which may be a
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
    """Return the provenance, with ``part`` added to what was dropped."""
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
    """Return ``index`` without the entries called ``dropped``, and without the files that only they had bytes
    in."""
    tensors, objects = (
        np.array([row for row, name in enumerate(names) if name not in dropped], np.int64)
        for names in (index.fqns, index.objects.fqns)
    )
    counts = np.diff(index.chunk_start)[tensors]
    found = selected(index, tensors, expand_ranges(index.chunk_start[tensors], counts), counts, objects)
    files, file_of = _used(np.concatenate([found.chunk_files, found.objects.files]), len(index.files))
    values, value_of = _used(found.objects.plain, len(index.objects.values))
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
        planner_data=_paths_without(index.planner_data, dropped),
        provenance=_provenance_without(index, dropped),
    )


def _used(numbers: Int64, count: int) -> tuple[Int64, Int64]:
    """Return the numbers that are used, and the new number of each, behind which stands the one that -1
    takes."""
    used = np.unique(numbers[numbers >= 0])
    new = np.full(count + 1, UNKNOWN, np.int64)
    new[used] = np.arange(len(used))
    return used, new


def _paths_without(planner_data: Any, dropped: Collection[str]) -> Any:
    if not isinstance(planner_data, Mapping):
        return planner_data
    return {name: path for name, path in planner_data.items() if name not in dropped}


def _provenance_without(index: CheckpointIndex, dropped: Collection[str]) -> Mapping[str, Any]:
    """Remove the notes on containers that only held what is dropped: they would be made again, empty."""
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
    """Return the containers of the entries that count."""
    chosen = (path for name, path in paths.items() if counts(name) and isinstance(path, tuple))
    return {path[:depth] for path in chosen for depth in range(len(path))}


def _is_in(note: Any, containers: Collection[Path]) -> bool:
    path = note.get("path") if isinstance(note, dict) else None
    if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
        return False
    return any(tuple(path[:depth]) in containers for depth in range(len(path) + 1))
