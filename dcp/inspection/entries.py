"""Select, rename and cast entries of a checkpoint, and find tensors with shared bytes.

All layouts of conversions start from `Entries`, so that every option works for every format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.load.selection import Patterns, Rename, Selection, check_patterns, check_rules, renamer
from dcp.planners.weight_maps.mapped_index import map_index
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import CheckpointFormatError, PlanError, UnsupportedFormatError
from dcp.storage.formats.container_notes import STRUCTURE_VERSION
from dcp.storage.formats.dtypes import CASTABLE, check_castable
from dcp.storage.formats.index import CheckpointIndex, Path, itemsizes
from dcp.storage.geometry.strides import Int64, row_products
from dcp.storage.stores.base import Store

TargetDtype = str | Mapping[str, str] | None
"""One dtype for every floating-point tensor, or dtypes by glob of source names (first match)."""

_MAX_LISTED = 10


class TensorEntry(NamedTuple):
    """One tensor of the output: source row, new name, dtype code, and the entry with the same bytes (own
    number if first)."""

    tensor: int
    fqn: str
    dtype_code: int
    tied_to: int


class Value(NamedTuple):
    """One value of the output: row in the source's objects, and new name."""

    row: int
    fqn: str


@dataclass(frozen=True, eq=False)
class Entries:
    """Selected entries. ``paths`` by new name follow the source's state dict, if recorded. ``source_names``
    maps back.

    ``refused`` are untrusted values by new name, with the required classes. ``empty`` are paths of selected
    empty containers.
    """

    index: CheckpointIndex
    tensors: Sequence[TensorEntry]
    values: Sequence[Value]
    paths: Mapping[str, Path] = field(default_factory=dict)
    source_names: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    empty: frozenset[Path] = frozenset()

    @cached_property
    def names(self) -> list[str]:
        """New name of each tensor."""
        return list(map(itemgetter(1), self.tensors))

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each tensor."""
        values, bounds = self.index.shape_values.tolist(), self.index.shape_start.tolist()
        return [tuple(values[bounds[row] : bounds[row + 1]]) for row, *_ in self.tensors]

    @cached_property
    def rows(self) -> Int64:
        """Source row of each tensor."""
        return np.array(list(map(itemgetter(0), self.tensors)), np.int64)

    @cached_property
    def codes(self) -> Int64:
        """Target dtype code of each tensor."""
        return np.array(list(map(itemgetter(2), self.tensors)), np.int64)

    @cached_property
    def elements(self) -> Int64:
        """Number of elements of each tensor."""
        return row_products(self.index.shape_values, self.index.shape_start)[self.rows]

    @property
    def size_bytes(self) -> Int64:
        """Target size of each tensor."""
        return self.elements * itemsizes(self.codes.astype(np.uint8))

    def structure(self) -> dict[str, Any] | None:
        """Return the source's notes on containers of the selected entries."""
        structure = self.index.provenance.get("structure")
        if not isinstance(structure, dict) or not isinstance(structure.get("containers"), list):
            return None
        if structure.get("version") != STRUCTURE_VERSION:
            raise UnsupportedFormatError(
                f"the structure of the state is stored in a version other than {STRUCTURE_VERSION}, by a "
                "newer dcphub: upgrade dcphub to read the checkpoint"
            )
        known = structure.get("values", {})
        if not isinstance(known, dict):
            raise CheckpointFormatError("the stored structure of the state is malformed")
        paths, is_renamed = self.paths.values(), list(self.source_names) != [*self.source_names.values()]
        if len(paths) == self.index.tensor_count + len(self.index.objects) and not is_renamed:
            return structure
        children: dict[Path, set[str]] = {}
        for path in [*paths, *self.empty]:
            for depth in range(len(path)):
                children.setdefault(path[:depth], set()).add(str(path[depth]))
        children.update((path, set()) for path in self.empty - children.keys())
        containers = []
        for note in structure["containers"]:
            noted = _noted_path(note)
            names = children.get(noted) if noted is not None else None
            if names is None or note.get("kind") in ("tensor", "value"):
                continue
            note = {key: value for key, value in note.items() if key != "metadata"}
            if not names <= {str(key) for key in note.get("keys", names)}:
                note.pop("keys")
            containers.append(note)
        kinds = {name: known[old] for name, old in self.source_names.items() if old in known}
        return {"version": STRUCTURE_VERSION, "containers": containers, "values": kinds}


@garbage_collection_paused()
def choose_entries(
    index: CheckpointIndex,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: TargetDtype = None,
) -> Entries:
    """Apply the options of a conversion. PlanError for patterns and rules without a match, duplicate new
    names, and unsupported casts."""
    unread = index.provenance.get("refused_objects")
    unread = unread if isinstance(unread, dict) else {}
    names = [*index.fqns, *index.objects.fqns, *unread]
    selection, renaming = Selection.of(only, exclude), renamer(rename)
    known = _known_paths(index)
    containers = _empty_containers(index, known)
    if selection is not None:
        check_patterns(selection, [*names, *containers.values()])
        names = list(filter(selection.selects, names))
        containers = {path: name for path, name in containers.items() if selection.selects(name)}
    if isinstance(rename, Mapping):
        check_rules(rename, [*names, *containers.values()])
    new_names = dict(zip(names, map(renaming, names) if renaming else names, strict=True))
    if len(set(new_names.values())) < len(new_names) or "" in new_names.values():
        _refuse_names(new_names)
    tensors = _tensors(index, new_names, dtype)
    objects = enumerate(index.objects.fqns)
    values = [Value(row, new_names[name]) for row, name in objects if name in new_names]
    paths = _paths(new_names, {*map(itemgetter(1), tensors), *map(itemgetter(1), values)}, known or {})
    source_names = dict(zip(new_names.values(), new_names, strict=True))
    refused = {new_names[name]: f"needs {need}" for name, need in unread.items() if name in new_names}
    empty = frozenset(path for path, name in containers.items() if not renaming or renaming(name) == name)
    return Entries(index, tensors, values, paths, source_names, refused, empty)


def mapped_entries(
    index: CheckpointIndex,
    store: Store,
    weights: WeightMap | None,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    **named: Any,
) -> tuple[Entries, Sequence[MappedTensor] | None]:
    """Choose entries as `choose_entries`, or of the checkpoint in ``store`` after ``weights``, returned too.

    ``only`` and ``exclude`` match names before the map; ``rename`` and ``dtype`` (``named``) match names
    after the map.
    """
    if weights is None:
        return choose_entries(index, only=only, exclude=exclude, **named), None
    mapped = map_index(index, store, weights, only, exclude)
    entries = choose_entries(mapped.index, **named)
    values = [value for value in entries.values if value.row in mapped.objects]
    kept = {one.fqn for part in (entries.tensors, values) for one in part}
    paths = {fqn: path for fqn, path in entries.paths.items() if fqn in kept}
    return replace(entries, values=values, paths=paths), mapped.tensors


def _tensors(index: CheckpointIndex, new_names: Mapping[str, str], dtype: TargetDtype) -> list[TensorEntry]:
    """Return the entries with new names, by column to save memory."""
    rows = np.flatnonzero([*map(new_names.__contains__, index.fqns)]).tolist()
    names = index.fqns if len(rows) == len(index.fqns) else [index.fqns[row] for row in rows]
    codes = index.dtype_codes[np.array(rows, np.int64)].tolist()
    if dtype is not None:
        codes = _cast(names, codes, dtype)
    tied_to, firsts = list(range(len(rows))), first_of_ties(index, rows)
    if firsts != rows:
        numbers: dict[tuple[int, int], int] = {}
        for number, key in enumerate(zip(codes, firsts, strict=True)):
            tied_to[number] = numbers.setdefault(key, number)
    return list(map(TensorEntry, rows, map(new_names.__getitem__, names), codes, tied_to))


def _cast(names: Sequence[str], codes: Sequence[int], dtype: str | Mapping[str, str]) -> list[int]:
    """Return target dtype codes by tensor name; only floating-point tensors are cast. PlanError for a glob
    without a match."""
    rules = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    wanted = {glob: check_castable(name) for glob, name in rules.items()}
    used, found = set[str](), list(codes)
    for number, name in enumerate(names):
        glob = next((glob for glob in wanted if fnmatchcase(name, glob)), None)
        if glob is not None:
            used.add(glob)
            found[number] = wanted[glob] if codes[number] in CASTABLE else codes[number]
    idle = [glob for glob in wanted if glob not in used]
    if idle and isinstance(dtype, Mapping):
        raise PlanError(f"dtype: {', '.join(map(repr, idle[:_MAX_LISTED]))} match no tensor", patterns=idle)
    return found


def _empty_containers(index: CheckpointIndex, known: Mapping[str, Path] | None) -> dict[Path, str]:
    """Return names of empty containers by path, from untrusted notes."""
    structure = index.provenance.get("structure")
    containers = structure.get("containers") if isinstance(structure, dict) else None
    if known is None or not isinstance(containers, list) or not containers:
        return {}
    parents = {path[:depth] for path in known.values() for depth in range(len(path))}
    empty = (path for path in map(_noted_path, containers) if path and path not in parents)
    return {path: ".".join(map(str, path)) for path in empty}


def _noted_path(note: Any) -> Path | None:
    """Return the path of a container's note, or None if malformed."""
    path = note.get("path") if isinstance(note, dict) and isinstance(note.get("keys", []), list) else None
    if isinstance(path, list) and all(type(part) in (str, int) for part in path):
        return tuple(path)
    return None


def _refuse_names(new_names: Mapping[str, str]) -> None:
    """Raise PlanError for empty and duplicate new names."""
    first: dict[str, str] = {}
    for old, new in new_names.items():
        if old and not new:
            raise PlanError(f"rename makes an empty name of {old!r}", fqn=old)
        if first.setdefault(new, old) != old:
            raise PlanError(f"rename maps both {first[new]!r} and {old!r} to {new!r}", fqn=new)


def _known_paths(index: CheckpointIndex) -> Mapping[str, Path] | None:
    """Return recorded paths of all entries; None if missing or malformed."""
    known = index.planner_data
    if not isinstance(known, Mapping):
        return None
    return known if {tuple}.issuperset(map(type, known.values())) and all(known.values()) else None


def _paths(
    new_names: Mapping[str, str], chosen: Collection[str], known: Mapping[str, Path]
) -> dict[str, Path]:
    """Return the paths of ``chosen`` by new name, ``known`` paths first."""
    found = {}
    for name in {**dict.fromkeys(known), **new_names}:
        new = new_names.get(name, "")
        if new in chosen:
            path = known.get(name, (name,))
            found[new] = path if name == new else _renamed(path, new)
    return found


def _renamed(path: Path, new: str) -> Path:
    """Return the path of a renamed entry: unchanged containers stay, the remaining name is one key."""
    kept, prefix = 0, ""
    for part in path[:-1]:
        longer = f"{prefix}{part}."
        if not new.startswith(longer):
            break
        kept, prefix = kept + 1, longer
    rest = new[len(prefix) :]
    if isinstance(path[kept], int) and rest.isdecimal():
        return (*path[:kept], int(rest))
    return (*path[:kept], rest)


# -- ties ----------------------------------------------------------------------------------------------------


def first_of_ties(index: CheckpointIndex, rows: list[int]) -> list[int]:
    """Return for each of ``rows`` the first tensor with the same bytes of the same files."""
    if len(index.payload_offsets) < len(index.chunk_files):
        return rows  # chunks without a known position
    stored = np.flatnonzero(np.diff(index.chunk_start) > 0)
    chunks = index.chunk_start[stored]
    offsets = index.payload_offsets[chunks]
    places = np.where(offsets < 0, index.record_offsets[chunks], offsets)
    order = np.lexsort((places, index.chunk_files[chunks]))
    files, places = index.chunk_files[chunks][order], places[order]
    same = np.zeros(len(stored) + 1, bool)
    same[1:-1] = (files[1:] == files[:-1]) & (places[1:] == places[:-1])
    if not same.any():
        return rows
    tied = set(stored[order][same[1:] | same[:-1]].tolist())  # only if all bytes are the same
    firsts: dict[tuple[Any, ...], int] = {}
    return [firsts.setdefault(_identity(index, row), row) if row in tied else row for row in rows]


def _identity(index: CheckpointIndex, row: int) -> tuple[Any, ...]:
    """Return a key, equal for tensors that share all of their bytes."""
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
