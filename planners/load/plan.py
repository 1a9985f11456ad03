"""The load plan of one rank: which part of which stored chunk goes to which place of which local tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import HeldBoxes
from dcp.planners.load.key_hints import hint_for_missing
from dcp.planners.load.selection import Selection
from dcp.storage.engine.reading.requests import Pieces
from dcp.storage.errors import (
    DtypeMismatchError,
    MissingKeyError,
    PlanError,
    ShapeMismatchError,
)
from dcp.storage.formats import dtypes
from dcp.storage.formats.dropped import dropped_from
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.geometry.joins import BoxSet, cut_overlaps, intersecting_pairs, overlapping_pairs
from dcp.storage.geometry.ragged import expand_ranges, gather_rows, row_matrix
from dcp.storage.near_names import listed

__all__ = ["LoadPlan", "LoadProblems", "intersect", "pieces_of", "plan_load"]

_MAX_LISTED: Final = 20
"""Names in the facts of one error; the rest is counted."""

_SHOWN: Final = 3
"""Problems of a kind in the message."""

_ADVICE: Final[Mapping[type[PlanError], str]] = {
    ShapeMismatchError: "Build the state dict with the shapes that were saved.",
    DtypeMismatchError: 'To convert while loading: dtype="cast".',
}

_PER_RANK_ADVICE: Final = (
    "Some of these are PerRank values, which each rank has of its own: where another number of ranks saved "
    'them, per_rank="keep" leaves them as they are.'
)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """The reads of one rank: ``pieces`` of tensors, in the order of the wanted boxes, and values.

    ``objects`` are rows of the index' object columns; ``object_fqns`` the names they go to. What the plan was
    allowed to pass over: ``missing``, wanted and not stored; ``unexpected``, stored and not wanted; ``cast``,
    stored in another dtype.
    """

    pieces: Pieces
    objects: Int64
    object_fqns: Sequence[str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


class _Intersections(NamedTuple):
    """Intersections: wanted box, chunk, and the shared region ``[low, high)`` in the global tensor."""

    boxes: Int64
    chunks: Int64
    low: Int64
    high: Int64


def plan_load(
    index: CheckpointIndex,
    wanted: HeldBoxes,
    object_fqns: Sequence[str] = (),
    *,
    names: Mapping[str, str] | None = None,
    allow_missing: bool = False,
    cast: bool = False,
    is_per_rank: Callable[[str], bool] | None = None,
) -> LoadPlan:
    """Plan reading ``wanted`` and the values ``object_fqns`` from a checkpoint.

    Every element of every wanted box is read exactly once, also where stored chunks overlap. ``names`` are
    what the checkpoint calls all of these, where that differs; several may have one name.

    Raises one error with all problems: MissingKeyError (unless ``allow_missing``), ShapeMismatchError,
    DtypeMismatchError (unless ``cast``), PlanError for a tensor wanted as another value or the reverse, and
    for elements that are not stored.
    ``is_per_rank`` says whether a name is of a `PerRank` value, about which the advice of the error is
    another.
    """
    problems = LoadProblems(names or {})
    known = index.position, index.objects.position
    stored = [*wanted.fqns, *object_fqns]
    if names is not None:
        stored = [names[fqn] for fqn in stored]
    count = len(stored) - len(object_fqns)
    tensor_rows = _rows(known[0], stored[:count])
    object_rows = _rows(known[1], stored[count:])
    missing: list[str] = []
    if (tensor_rows < 0).any() or (object_rows < 0).any():
        missing += _check_keys(wanted.fqns, tensor_rows, known[1], problems, is_tensor=True)
        missing += _check_keys(object_fqns, object_rows, known[0], problems, is_tensor=False)
    if missing and not allow_missing:
        problems.missing = missing
        problems.lacks_per_rank = is_per_rank is not None and any(map(is_per_rank, missing))
    usable, cast_fqns = _check_tensors(index, wanted, tensor_rows, cast=cast, problems=problems)
    parts = intersect(index, wanted, tensor_rows, usable, problems)
    unexpected = _unexpected(index, tensor_rows, object_rows)
    if problems.missing or problems.shapes or problems.dtypes or problems.others:
        problems.raise_all(lambda: _hint(index, stored, unexpected, is_renamed=names is not None))
    found = object_rows >= 0
    if not found.all():
        object_fqns = [object_fqns[row] for row in np.flatnonzero(found).tolist()]
    return LoadPlan(
        pieces_of(index, wanted, parts),
        object_rows[found],
        object_fqns,
        tuple(missing),
        unexpected,
        tuple(cast_fqns),
    )


def _hint(
    index: CheckpointIndex, stored: Sequence[str], unexpected: Sequence[str], *, is_renamed: bool
) -> str:
    """Return what to say about the names that are not there."""
    absent: list[str] = []
    present: list[str] = []
    for name in stored:
        is_there = name in index.position or name in index.objects.position
        (present if is_there else absent).append(name)
    shown = _dropped_hint(index, absent)
    return shown or hint_for_missing(absent, unexpected, present, is_renamed=is_renamed)


def _dropped_hint(index: CheckpointIndex, absent: Sequence[str]) -> str:
    """Return which parts of the checkpoint that were dropped from it have had these names; "" if none had."""
    shown = []
    for part in dropped_from(index.provenance):
        selection = Selection.of(part.patterns, None) if part.patterns else None
        if selection is not None and any(map(selection.selects, absent)):
            shown.append(str(part))
    if not shown:
        return ""
    return f"{'; '.join(shown)}, to free its bytes: load the rest (exclude=...), or a step that still has it."


def _rows(position: Mapping[str, int], wanted: Sequence[str]) -> Int64:
    if not len(wanted):
        return np.zeros(0, np.int64)
    if list(position) == list(wanted):  # the very state that was saved
        return np.arange(len(wanted), dtype=np.int64)
    lookup = position.get
    return np.array([lookup(fqn, -1) for fqn in wanted], np.int64)


def _check_keys(
    fqns: Sequence[str],
    rows: Int64,
    others: Mapping[str, int],
    problems: LoadProblems,
    *,
    is_tensor: bool,
) -> list[str]:
    """Return names that are not stored at all; those stored as another kind, which ``others`` has, are
    problems."""
    missing = []
    for row in np.flatnonzero(rows < 0).tolist():
        fqn = fqns[row]
        if problems.names.get(fqn, fqn) not in others:
            missing.append(fqn)
        elif is_tensor:
            problems.others[fqn] = (
                f"{problems.shown(fqn)} is a tensor in the state dict, but another value in the checkpoint"
            )
        else:
            problems.others[fqn] = (
                f"{problems.shown(fqn)} is a tensor in the checkpoint, but no tensor in the state dict"
            )
    return missing


def _unexpected(index: CheckpointIndex, tensors: Int64, objects: Int64) -> tuple[str, ...]:
    unwanted = np.ones(index.tensor_count, bool)
    unwanted[tensors[tensors >= 0]] = False
    names = list(map(index.fqns.__getitem__, np.flatnonzero(unwanted).tolist()))
    unwanted = np.ones(len(index.objects), bool)
    unwanted[objects[objects >= 0]] = False
    return (*names, *map(index.objects.fqns.__getitem__, np.flatnonzero(unwanted).tolist()))


def _check_tensors(
    index: CheckpointIndex, wanted: HeldBoxes, rows: Int64, *, cast: bool, problems: LoadProblems
) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Return (wanted tensors that are stored in the wanted shape, names whose dtype differs)."""
    found = np.flatnonzero(rows >= 0)
    stored = rows[found]
    wrong = wanted.ndims[found] != index.ndims[stored]
    alike = np.flatnonzero(~wrong & (wanted.ndims[found] > 0))
    if len(alike):
        mine = gather_rows(wanted.shape_values, wanted.shape_start, found[alike])
        theirs = gather_rows(index.shape_values, index.shape_start, stored[alike])
        begin = starts(wanted.ndims[found[alike]])[:-1]
        wrong[alike] = np.logical_or.reduceat(mine != theirs, begin)
    for place in np.flatnonzero(wrong).tolist():
        row, fqn = int(found[place]), wanted.fqns[int(found[place])]
        shape = tuple(wanted.shape_values[wanted.shape_start[row] : wanted.shape_start[row + 1]].tolist())
        stored_shape = index.shape(int(stored[place]))
        problems.shapes[fqn] = (
            f"Size mismatch between saved {stored_shape} and current: {shape} for {problems.shown(fqn)}"
        )
    differs = found[wanted.dtype_codes[found] != index.dtype_codes[stored]].tolist()
    if not cast:
        for row in differs:
            mine_name = dtypes.BY_CODE[int(wanted.dtype_codes[row])].name
            stored_name = index.dtype(int(rows[row])).name
            problems.dtypes[wanted.fqns[row]] = (
                f"{problems.shown(wanted.fqns[row])} is {mine_name}, stored is {stored_name}"
            )
    usable = np.zeros(len(rows), bool)
    usable[found[~wrong]] = True
    return usable, list(map(wanted.fqns.__getitem__, differs))


def intersect(
    index: CheckpointIndex,
    wanted: HeldBoxes,
    rows: Int64,
    usable: npt.NDArray[np.bool_],
    problems: LoadProblems,
) -> list[_Intersections]:
    """Intersect those wanted boxes whose tensors are ``usable`` with the chunks of the tensors ``rows``.

    Each element is there once; boxes of which elements are not stored are noted as problems.
    """
    box_tensors = wanted.item_tensors
    boxes = np.flatnonzero(usable[box_tensors])
    ndims = wanted.ndims[box_tensors[boxes]]
    parts = []
    for ndim in np.flatnonzero(np.bincount(ndims)).tolist():
        chosen = boxes[ndims == ndim]
        low = row_matrix(wanted.item_offsets, wanted.box_start, chosen, ndim)
        sizes = row_matrix(wanted.item_sizes, wanted.box_start, chosen, ndim)
        full = (sizes > 0).all(axis=1)
        if not full.all():
            chosen, low, sizes = chosen[full], low[full], sizes[full]
        pieces = _intersect_ndim(index, chosen, rows[box_tensors[chosen]], low, low + sizes)
        pieces, gaps = _cover(pieces, chosen, low, low + sizes)
        for place, volume in gaps:
            fqn, box = wanted.fqns[int(box_tensors[chosen[place]])], sizes[place].tolist()
            problems.others[fqn] = (
                f"{fqn!r}: of the box at {low[place].tolist()} of sizes {box} the checkpoint stores {volume} "
                f"of {int(np.prod(sizes[place]))} elements"
            )
        parts.append(pieces)
    return parts


def _intersect_ndim(
    index: CheckpointIndex, boxes: Int64, tensors: Int64, low: Int64, high: Int64
) -> _Intersections:
    ndim = low.shape[1]
    wanted_tensors = np.flatnonzero(np.bincount(tensors))  # np.unique hashes each of them
    counts = index.chunk_start[wanted_tensors + 1] - index.chunk_start[wanted_tensors]
    lone = len(wanted_tensors) == len(tensors) and bool((counts == 1).all())
    if lone:
        # one chunk and one box a tensor: nothing to search
        chunks, pair_box = index.chunk_start[tensors], np.arange(len(boxes), dtype=np.int64)
    else:
        chunks = expand_ranges(index.chunk_start[wanted_tensors], counts)
    chunk_low = row_matrix(index.chunk_offsets, index.box_start, chunks, ndim)
    chunk_high = chunk_low + row_matrix(index.chunk_sizes, index.box_start, chunks, ndim)
    if not lone:
        stored = BoxSet(np.repeat(wanted_tensors, counts), chunk_low, chunk_high)
        pair_box, pair_chunk = intersecting_pairs(BoxSet(tensors, low, high), stored)
        chunks, chunk_low, chunk_high = chunks[pair_chunk], chunk_low[pair_chunk], chunk_high[pair_chunk]
        low, high = low[pair_box], high[pair_box]
    common_low, common_high = np.maximum(low, chunk_low), np.minimum(high, chunk_high)
    met = (common_high > common_low).all(axis=1)
    if not met.all():
        pair_box, chunks, common_low, common_high = (
            pair_box[met],
            chunks[met],
            common_low[met],
            common_high[met],
        )
    return _Intersections(pair_box, chunks, common_low, common_high)


def _cover(
    pieces: _Intersections, boxes: Int64, low: Int64, high: Int64
) -> tuple[_Intersections, list[tuple[int, int]]]:
    """Return (pieces without overlaps, (box position, elements there) of boxes that are not filled).

    Overlapping pieces, which some foreign checkpoints have, are reduced to disjoint ones first, so that
    volumes prove coverage and nothing is read twice.
    """
    if (np.bincount(pieces.boxes) > 1).any():
        found = BoxSet(pieces.boxes, pieces.low, pieces.high)
        earlier, later = overlapping_pairs(found)
        if len(earlier):
            rows, parts = cut_overlaps(found, earlier, later)
            pieces = _Intersections(parts.groups, pieces.chunks[rows], parts.low, parts.high)
    volumes = np.prod(pieces.high - pieces.low, axis=1, dtype=np.int64)
    filled = np.zeros(len(boxes), np.int64)
    np.add.at(filled, pieces.boxes, volumes)
    demanded = np.prod(high - low, axis=1, dtype=np.int64)
    short = np.flatnonzero(filled != demanded)
    gaps = list(zip(short.tolist(), filled[short].tolist(), strict=True))
    return _Intersections(boxes[pieces.boxes], pieces.chunks, pieces.low, pieces.high), gaps


def pieces_of(index: CheckpointIndex, wanted: HeldBoxes, parts: Sequence[_Intersections]) -> Pieces:
    """Put intersections into ragged columns, in the order of the wanted boxes."""
    columns: list[list[Int64]] = list(map(list, [[np.zeros(0, np.int64)]] * 5))
    for part in parts:
        ndims = np.full(len(part.boxes), part.low.shape[1], np.int64)
        each = part.boxes, part.chunks, part.low.ravel(), part.high.ravel(), ndims
        for column, values in zip(columns, each, strict=True):
            column.append(values)
    boxes, chunks, low, high, ndims = map(np.concatenate, columns)
    order = np.argsort(boxes, kind="stable")
    flat = expand_ranges(starts(ndims)[:-1][order], ndims[order])
    boxes, chunks, low, high = boxes[order], chunks[order], low[flat], high[flat]
    chunk_low = gather_rows(index.chunk_offsets, index.box_start, chunks)
    box_low = gather_rows(wanted.item_offsets, wanted.box_start, boxes)
    local = gather_rows(wanted.item_local_offsets, wanted.box_start, boxes)
    return Pieces(
        chunks=chunks,
        boxes=boxes,
        dests=wanted.item_sources[boxes],
        box_start=starts(ndims[order]),
        storage_offsets=low - chunk_low,
        dest_offsets=low - box_low + local,
        lengths=high - low,
    )


# -- problems ------------------------------------------------------------------------------------------------


@dataclass
class LoadProblems:
    """Misfits between a state dict and a checkpoint, by kind: text by name of the state dict.

    ``names`` are what the checkpoint calls them where that differs. Messages have the words in which stock
    torch says the same, since programs look for them.
    """

    names: Mapping[str, str]
    missing: Sequence[str] = ()
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    lacks_per_rank: bool = False

    def shown(self, fqn: str) -> str:
        """Return a name for a message, with what the checkpoint calls it where that differs."""
        name = self.names.get(fqn, fqn)
        return f"{fqn!r}" if fqn == name else f"{fqn!r} (renamed to {name!r})"

    def raise_all(self, hint_for_missing: Callable[[], str]) -> NoReturn:
        """Raise one error for all problems: of their own class where they are of one kind, else a
        PlanError."""
        kinds: list[tuple[type[PlanError], Mapping[str, str]]] = [
            (MissingKeyError, {fqn: self.shown(fqn) for fqn in self.missing}),
            (ShapeMismatchError, self.shapes),
            (DtypeMismatchError, self.dtypes),
            (PlanError, self.others),
        ]
        found = [(cls, problems) for cls, problems in kinds if problems]
        lines = [_said(cls, list(problems.values())) for cls, problems in found]
        if len(found) > 1:
            count = sum(len(problems) for _, problems in found)
            lines.insert(0, f"the checkpoint does not fit the state dict, {count} problems:")
        if self.missing:
            lines[-len(found)] = "\n".join(filter(None, [lines[-len(found)], hint_for_missing()]))
        advice = [_ADVICE[cls] for cls, _ in found if cls in _ADVICE]
        if self.lacks_per_rank:
            advice.append(_PER_RANK_ADVICE)
        if advice:
            lines.append(" ".join(advice))
        cls = found[0][0] if len(found) == 1 else PlanError
        raise cls(
            "\n".join(lines),
            problems=[text for cls, problems in found for text in _each(cls, problems)][:_MAX_LISTED],
            fqns=[fqn for _, problems in found for fqn in problems][:_MAX_LISTED],
        )


def _said(cls: type[PlanError], shown: Sequence[str]) -> str:
    if cls is MissingKeyError:
        return f"Missing key in checkpoint state_dict: {listed(shown, most=_SHOWN, show=str)}."
    more = f"; and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return f"{'; '.join(shown[:_SHOWN])}{more}."


def _each(cls: type[PlanError], problems: Mapping[str, str]) -> Sequence[str]:
    if cls is MissingKeyError:
        return [f"{shown} is not in the checkpoint" for shown in problems.values()]
    return list(problems.values())
