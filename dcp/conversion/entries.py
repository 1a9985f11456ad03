"""Entries of a conversion: what is taken from a checkpoint, under which names, cast to what, tied to what.

A target's layout is made from `Entries` alone, so that every option works alike for all formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from dcp.conversion.casting import CASTABLE, check_castable
from dcp.inspection.checkpoints import first_of_ties
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.load.selection import Patterns, Rename, Selection, check_patterns, renamer
from dcp.planners.weight_maps.mapped_index import map_index
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import CheckpointFormatError, PlanError, UnsupportedFormatError
from dcp.storage.formats.container_notes import STRUCTURE_VERSION
from dcp.storage.formats.index import CheckpointIndex, Path, itemsizes
from dcp.storage.geometry.strides import Int64, row_products
from dcp.storage.stores.base import Store

TargetDtype = str | Mapping[str, str] | None
"""One dtype for every floating-point tensor, or dtypes by glob of the source's names (first match counts)."""

_MAX_LISTED = 10


class TensorEntry(NamedTuple):
    """One tensor of the output: the source's row, its new name and path, its dtype code there, and the entry
    whose bytes it shares (its own number if none before it)."""

    tensor: int
    fqn: str
    path: Path
    dtype_code: int
    tied_to: int


class Value(NamedTuple):
    """One value that is no tensor: its row in the source's objects."""

    row: int
    fqn: str
    path: Path


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries that are converted, in the order of the source's state dict. ``source_names`` gives the
    names there.

    ``refused`` are values of the source that may not be decoded, by new name, with what they need.
    ``empty`` are the paths of the source's empty containers that are chosen and not renamed.
    """

    index: CheckpointIndex
    tensors: Sequence[TensorEntry]
    values: Sequence[Value]
    source_names: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    empty: frozenset[Path] = frozenset()

    @cached_property
    def names(self) -> list[str]:
        """The new name of each tensor."""
        return list(map(itemgetter(1), self.tensors))

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each entry's tensor."""
        values, bounds = self.index.shape_values.tolist(), self.index.shape_start.tolist()
        return [tuple(values[bounds[row] : bounds[row + 1]]) for row, *_ in self.tensors]

    @cached_property
    def rows(self) -> Int64:
        """The row in the source of each entry's tensor."""
        return np.array(list(map(itemgetter(0), self.tensors)), np.int64)

    @cached_property
    def codes(self) -> Int64:
        """The dtype code in the target of each entry's tensor."""
        return np.array(list(map(itemgetter(3), self.tensors)), np.int64)

    @cached_property
    def elements(self) -> Int64:
        """The number of elements of each entry's tensor."""
        return row_products(self.index.shape_values, self.index.shape_start)[self.rows]

    @property
    def size_bytes(self) -> Int64:
        """The size in the target of each entry's tensor."""
        return self.elements * itemsizes(self.codes.astype(np.uint8))

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Paths by new name, in the order of the source's state dict, where it tells that."""
        paths = {entry.fqn: entry.path for entry in self.tensors}
        paths |= {value.fqn: value.path for value in self.values}
        known = _known_paths(self.index)
        if known is None:
            return paths
        if known.keys() == paths.keys() and not self.is_renamed:
            return dict(known)
        new_names = {self.source_names[name]: name for name in paths}
        return {new_names[name]: paths[new_names[name]] for name in known if name in new_names} | paths

    def structure(self) -> dict[str, Any] | None:
        """Return the source's notes on those containers that hold what is converted."""
        structure = self.index.provenance.get("structure")
        if not isinstance(structure, dict) or not isinstance(structure.get("containers"), list):
            return None
        if structure.get("version") != STRUCTURE_VERSION:
            raise UnsupportedFormatError(
                f"how the state was nested is noted in another version than {STRUCTURE_VERSION}: it was "
                "written by a newer dcphub; read it with one"
            )
        known = structure.get("values", {})
        if not isinstance(known, dict):
            raise CheckpointFormatError("the notes on the structure of the checkpoint are malformed")
        paths = [*(entry.path for entry in self.tensors), *(value.path for value in self.values)]
        if len(paths) == self.index.tensor_count + len(self.index.objects) and not self.is_renamed:
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

    @property
    def is_renamed(self) -> bool:
        """Return whether any name differs from the source's."""
        return list(self.source_names) != list(self.source_names.values())


@garbage_collection_paused()
def choose_entries(
    index: CheckpointIndex,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: TargetDtype = None,
) -> Entries:
    """Apply the options of a conversion; PlanError for patterns that match nothing, for two entries of one
    new name, and for casts that do not exist."""
    unread = index.provenance.get("refused_objects")
    unread = unread if isinstance(unread, dict) else {}
    names = [*index.fqns, *index.objects.fqns, *unread]
    selection, renaming = Selection.of(only, exclude), renamer(rename)
    containers = _empty_containers(index)
    if selection is not None:
        check_patterns(selection, [*names, *map(_name, containers)])
    chosen = names if selection is None else [name for name in names if selection.selects(name)]
    new_names = dict(zip(chosen, map(renaming, chosen) if renaming else chosen, strict=True))
    if len(set(new_names.values())) < len(new_names) or "" in new_names.values():
        _refuse_names(new_names)
    paths = _known_paths(index) or {}
    tensors = _tensors(index, new_names, paths, dtype)
    values = [
        Value(row, new_names[name], _path(name, new_names[name], paths.get(name)))
        for row, name in enumerate(index.objects.fqns)
        if name in new_names
    ]
    refused = {new_names[name]: f"needs {need}" for name, need in unread.items() if name in new_names}
    empty = {path: _name(path) for path in containers}
    empty = {path: name for path, name in empty.items() if selection is None or selection.selects(name)}
    kept = frozenset(path for path, name in empty.items() if renaming is None or renaming(name) == name)
    source_names = dict(zip(new_names.values(), new_names, strict=True))
    return Entries(index, tensors, values, source_names, refused, kept)


def mapped_entries(
    index: CheckpointIndex,
    store: Store,
    weights: WeightMap | None,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    **named: Any,
) -> tuple[Entries, Sequence[MappedTensor] | None]:
    """Choose entries as `choose_entries` does or, with a map, of what ``weights`` make of the checkpoint
    in ``store``, and return that as well: ``only`` and ``exclude`` choose before it, and ``rename`` and
    ``dtype``, which are ``named``, have the names after it."""
    if weights is None:
        return choose_entries(index, only=only, exclude=exclude, **named), None
    mapped = map_index(index, store, weights, only, exclude)
    entries = choose_entries(mapped.index, **named)
    chosen = [value for value in entries.values if value.row in mapped.objects]
    return replace(entries, values=chosen), mapped.tensors


def _tensors(
    index: CheckpointIndex, new_names: Mapping[str, str], paths: Mapping[str, Path], dtype: TargetDtype
) -> list[TensorEntry]:
    """Return the entries of those that have new names; by column, because there may be very many."""
    rows = [row for row, name in enumerate(index.fqns) if name in new_names]
    names = index.fqns if len(rows) == len(index.fqns) else [index.fqns[row] for row in rows]
    new = list(map(new_names.__getitem__, names))
    if new == names:
        own = [paths.get(name) or (name,) for name in names]
    else:
        own = [_path(*one, paths.get(one[0])) for one in zip(names, new, strict=True)]
    codes = index.dtype_codes[np.array(rows, np.int64)].tolist()
    if dtype is not None:
        codes = _cast(names, codes, dtype)
    tied_to, firsts = list(range(len(rows))), first_of_ties(index, rows)
    if firsts != rows:
        numbers: dict[tuple[int, int], int] = {}
        for number, key in enumerate(zip(codes, firsts, strict=True)):
            tied_to[number] = numbers.setdefault(key, number)
    return list(map(TensorEntry, rows, new, own, codes, tied_to))


def _cast(names: Sequence[str], codes: Sequence[int], dtype: str | Mapping[str, str]) -> list[int]:
    """Return the codes of the target's dtypes for tensors of those names; integers and the like are never
    cast. PlanError for a glob that matches nothing."""
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


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _empty_containers(index: CheckpointIndex) -> list[Path]:
    """Return their paths, from notes that may come from a stranger."""
    structure = index.provenance.get("structure")
    containers = structure.get("containers") if isinstance(structure, dict) else None
    known = _known_paths(index)
    if known is None or not isinstance(containers, list):
        return []
    parents = {path[:depth] for path in known.values() for depth in range(len(path))}
    return [path for path in map(_noted_path, containers) if path and path not in parents]


def _noted_path(note: Any) -> Path | None:
    """Return the path of the container that a note is of; None for a note that is malformed, as a stranger's
    may be."""
    path = note.get("path") if isinstance(note, dict) and isinstance(note.get("keys", []), list) else None
    if isinstance(path, list) and all(type(part) in (str, int) for part in path):
        return tuple(path)
    return None


def _refuse_names(new_names: Mapping[str, str]) -> None:
    """Raise PlanError for a new name that is empty, or that two entries have."""
    first: dict[str, str] = {}
    for old, new in new_names.items():
        if old and not new:
            raise PlanError(f"rename leaves nothing of the name {old!r}", fqn=old)
        if first.setdefault(new, old) != old:
            raise PlanError(f"rename gives {first[new]!r} and {old!r} one name, {new!r}", fqn=new)


def _known_paths(index: CheckpointIndex) -> Mapping[str, Path] | None:
    """Return the paths that the source has noted of all entries; None where it has none, or any is
    malformed."""
    known = index.planner_data
    if isinstance(known, Mapping) and all(isinstance(path, tuple) and path for path in known.values()):
        return known
    return None


def _path(name: str, new: str, path: Path | None) -> Path:
    """Return the path of a renamed entry: containers whose names are unchanged stay, the rest is one key."""
    if path is None:
        return (new,)
    if name == new:
        return path
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
