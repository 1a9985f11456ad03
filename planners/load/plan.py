"""Load plan of a rank: parts of stored chunks and their destinations in local tensors."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat, starmap
from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import HeldBoxes
from dcp.planners.load.selection import Selection, renamer
from dcp.storage.engine.requests import Pieces
from dcp.storage.errors import DtypeMismatchError, MissingKeyError, PlanError, ShapeMismatchError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.views import dropped_from
from dcp.storage.geometry.boxes import BoxSet, cut_overlaps, intersecting_pairs, overlapping_pairs
from dcp.storage.geometry.strides import Int64, expand_ranges, gather_rows, row_matrix, starts
from dcp.storage.near_names import listed, near_names

_MAX_LISTED: Final = 20
"""Maximum number of names in the facts of an error."""

_SHOWN: Final = 3
"""Maximum number of problems of a kind in a message."""

_ADVICE: Final[Mapping[type[PlanError], str]] = {
    ShapeMismatchError: "Use the saved shapes in the state dict.",
    DtypeMismatchError: 'To convert while loading: dtype="cast".',
}

_KINDS: Final = (MissingKeyError, ShapeMismatchError, DtypeMismatchError, PlanError)
"""Kinds of problems, in the order of messages."""

_OTHER_KINDS: Final = (
    "Use the saved kind of value in the state dict (dcp show lists it), or pass exclude=[...]."
)

_PER_RANK_ADVICE: Final = (
    'Some are PerRank values, saved by another number of ranks: per_rank="keep" leaves them unchanged.'
)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Reads of a rank: ``pieces`` of tensors in the order of wanted boxes, and objects.

    ``objects`` are rows of the index's object columns, ``object_fqns`` their destination names. Permitted
    differences: ``missing`` (wanted, not stored), ``unexpected`` (stored, not wanted), ``cast`` (other
    dtype).
    """

    pieces: Pieces
    objects: Int64
    object_fqns: Sequence[str]
    missing: Sequence[str] = ()
    unexpected: tuple[str, ...] = ()
    cast: Sequence[str] = ()


def plan_load(
    index: CheckpointIndex,
    wanted: HeldBoxes,
    object_fqns: Sequence[str],
    *,
    names: Mapping[str, str] | None,
    allow_missing: bool,
    cast: bool,
    per_rank: Collection[str],
    lost: Callable[[tuple[str, ...]], str] = lambda _: "",
) -> LoadPlan:
    """Plan reading ``wanted`` boxes and the objects ``object_fqns`` from a checkpoint.

    Every wanted element is read exactly once, even if stored chunks overlap. ``names`` are stored names
    where different; several may be equal. ``per_rank`` are names of `PerRank` values, with different advice
    in errors. ``lost`` describes unexpected names in an error about other problems.

    Raises:
        MissingKeyError: For missing keys, unless ``allow_missing``.
        ShapeMismatchError: For different shapes.
        DtypeMismatchError: For different dtypes, unless ``cast``.
        PlanError: For tensors wanted as objects or the reverse, for elements that are not stored, and for
            problems of several kinds.
    """
    problems = LoadProblems(names or {})
    tensors, values = index.position, index.objects.position
    stored = [*wanted.fqns, *object_fqns]
    if names is not None:
        stored = [names[fqn] for fqn in stored]
    count = len(wanted.fqns)
    tensor_rows = np.fromiter(map(tensors.get, stored[:count], repeat(-1)), np.int64)
    object_rows = np.fromiter(map(values.get, stored[count:], repeat(-1)), np.int64)
    missing: list[str] = []
    if (tensor_rows < 0).any() or (object_rows < 0).any():
        kind = "is a tensor in the state dict, but another value in the checkpoint"
        missing += _missing(wanted.fqns, tensor_rows, values, kind, problems)
        kind = "is a tensor in the checkpoint, but another value in the state dict"
        missing += _missing(object_fqns, object_rows, tensors, kind, problems)
    if missing and not allow_missing:
        problems.texts[MissingKeyError] = {fqn: problems.shown(fqn) for fqn in missing}
    usable, cast_fqns = _check_tensors(index, wanted, tensor_rows, cast=cast, problems=problems)
    pieces = intersect(index, wanted, tensor_rows, usable, problems)
    unwanted = np.ones(index.tensor_count + len(index.objects), bool)
    unwanted[tensor_rows[tensor_rows >= 0]] = False
    found = object_rows >= 0
    unwanted[index.tensor_count + object_rows[found]] = False
    every = [*index.fqns, *index.objects.fqns]
    unexpected = tuple(map(every.__getitem__, np.flatnonzero(unwanted).tolist()))
    if problems.texts:
        asked = {*stored}  # values of another kind are reported above
        unexpected = tuple(name for name in unexpected if name not in asked)
        hint = Hint("")
        if MissingKeyError in problems.texts:
            hint = _hint(index, wanted, stored, unexpected, is_renamed=names is not None)
        left = tuple(name for name in unexpected if name not in hint.names)
        problems.raise_all(hint.text, per_rank, lost(left))
    object_fqns = list(compress(object_fqns, found.tolist()))
    return LoadPlan(pieces, object_rows[found], object_fqns, missing, unexpected, cast_fqns)


def _missing(
    fqns: Sequence[str], rows: Int64, others: Mapping[str, int], kind: str, problems: LoadProblems
) -> list[str]:
    """Return missing names; names stored as another ``kind`` (in ``others``) are problems."""
    missing = []
    for row in np.flatnonzero(rows < 0).tolist():
        fqn = fqns[row]
        if problems.names.get(fqn, fqn) not in others:
            missing.append(fqn)
        else:
            problems.texts[PlanError][fqn] = f"{problems.shown(fqn)} {kind}"
            problems.has_other_kinds = True
    return missing


def _check_tensors(
    index: CheckpointIndex, wanted: HeldBoxes, rows: Int64, *, cast: bool, problems: LoadProblems
) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Return (wanted tensors stored in the wanted shape, names with another dtype)."""
    found = np.flatnonzero(rows >= 0)
    stored = rows[found]
    wrong = wanted.ndims[found] != index.ndims[stored]
    alike = np.flatnonzero(~wrong & (wanted.ndims[found] > 0))
    if len(alike):
        mine = gather_rows(wanted.shape_values, wanted.shape_start, found[alike])
        theirs = gather_rows(index.shape_values, index.shape_start, stored[alike])
        begin = starts(wanted.ndims[found[alike]])[:-1]
        wrong[alike] = np.logical_or.reduceat(mine != theirs, begin)
    for row in found[wrong].tolist():
        fqn, stored_shape = wanted.fqns[row], index.shape(int(rows[row]))
        shape = tuple(wanted.shape_values[wanted.shape_start[row] : wanted.shape_start[row + 1]].tolist())
        problems.texts[ShapeMismatchError][fqn] = (
            f"Size mismatch between saved {stored_shape} and current: {shape} for {problems.shown(fqn)}"
        )
    differs = found[wanted.dtype_codes[found] != index.dtype_codes[stored]].tolist()
    for row in () if cast else differs:
        fqn, own = wanted.fqns[row], dtypes.BY_CODE[int(wanted.dtype_codes[row])].name
        is_stored = f"stored is {index.dtype(int(rows[row])).name}"
        problems.texts[DtypeMismatchError][fqn] = f"{problems.shown(fqn)} is {own}, {is_stored}"
    usable = np.zeros(len(rows), bool)
    usable[found[~wrong]] = True
    return usable, list(map(wanted.fqns.__getitem__, differs))


def intersect(
    index: CheckpointIndex,
    wanted: HeldBoxes,
    rows: Int64,
    usable: npt.NDArray[np.bool_],
    problems: LoadProblems,
) -> Pieces:
    """Intersect ``usable`` wanted boxes with the chunks of the tensors ``rows``.

    Each element occurs once, in the order of the boxes; boxes with unstored elements are problems.
    """
    box_tensors = wanted.item_tensors
    boxes = np.flatnonzero(usable[box_tensors])
    ndims = wanted.ndims[box_tensors[boxes]]
    columns: list[list[Int64]] = list(map(list, [[np.zeros(0, np.int64)]] * 5))
    for ndim in np.flatnonzero(np.bincount(ndims)).tolist():
        chosen = boxes[ndims == ndim]
        low = row_matrix(wanted.item_offsets, wanted.box_start, chosen, ndim)
        sizes = row_matrix(wanted.item_sizes, wanted.box_start, chosen, ndim)
        full = (sizes > 0).all(axis=1)
        if not full.all():
            chosen, low, sizes = chosen[full], low[full], sizes[full]
        found, volumes = _intersect_ndim(index, rows[box_tensors[chosen]], low, low + sizes)
        for place in np.flatnonzero(volumes != sizes.prod(axis=1)).tolist():
            fqn, box = wanted.fqns[int(box_tensors[chosen[place]])], sizes[place].tolist()
            problems.texts[PlanError][fqn] = (
                f"{fqn!r}: the checkpoint stores {volumes[place]} of {int(np.prod(sizes[place]))} elements "
                f"of the box at {low[place].tolist()} with sizes {box}"
            )
        met, *others = found
        for column, values in zip(columns, (chosen[met], *others, np.full(len(met), ndim)), strict=True):
            column.append(values.ravel())
    boxes, chunks, low, high, ndims = map(np.concatenate, columns)
    order = np.argsort(boxes, kind="stable")
    flat = expand_ranges(starts(ndims)[:-1][order], ndims[order])
    boxes, chunks, low, high = boxes[order], chunks[order], low[flat], high[flat]
    box_low = gather_rows(wanted.item_offsets, wanted.box_start, boxes)
    local = gather_rows(wanted.item_local_offsets, wanted.box_start, boxes)
    return Pieces(
        chunks=chunks,
        boxes=boxes,
        dests=wanted.item_sources[boxes],
        box_start=starts(ndims[order]),
        storage_offsets=low - gather_rows(index.chunk_offsets, index.box_start, chunks),
        dest_offsets=low - box_low + local,
        lengths=high - low,
    )


def _intersect_ndim(
    index: CheckpointIndex, tensors: Int64, low: Int64, high: Int64
) -> tuple[tuple[Int64, Int64, Int64, Int64], Int64]:
    """Intersect boxes of equal dimensionality, one per tensor of ``tensors``, with the chunks.

    Returns columns (box, chunk, begin and end of the shared region), and the number of elements by box.
    Overlapping chunks of some foreign checkpoints are cut, and the numbers prove coverage.
    """
    ndim = low.shape[1]
    filled = np.zeros(len(low), np.int64)
    wanted_tensors = np.flatnonzero(np.bincount(tensors))  # faster than np.unique
    counts = index.chunk_start[wanted_tensors + 1] - index.chunk_start[wanted_tensors]
    lone = len(wanted_tensors) == len(tensors) and bool((counts == 1).all())
    if lone:
        # one chunk and one box per tensor: no search needed
        chunks, boxes = index.chunk_start[tensors], np.arange(len(low), dtype=np.int64)
    else:
        chunks = expand_ranges(index.chunk_start[wanted_tensors], counts)
    chunk_low = row_matrix(index.chunk_offsets, index.box_start, chunks, ndim)
    chunk_high = chunk_low + row_matrix(index.chunk_sizes, index.box_start, chunks, ndim)
    if not lone:
        stored = BoxSet(np.repeat(wanted_tensors, counts), chunk_low, chunk_high)
        boxes, pair_chunk = intersecting_pairs(BoxSet(tensors, low, high), stored)
        chunks, chunk_low, chunk_high = chunks[pair_chunk], chunk_low[pair_chunk], chunk_high[pair_chunk]
        low, high = low[boxes], high[boxes]
    low, high = np.maximum(low, chunk_low), np.minimum(high, chunk_high)
    met = (high > low).all(axis=1)
    if not met.all():
        boxes, chunks, low, high = boxes[met], chunks[met], low[met], high[met]
    if (np.bincount(boxes) > 1).any():
        regions = BoxSet(boxes, low, high)
        earlier, later = overlapping_pairs(regions)
        if len(earlier):
            rows, parts = cut_overlaps(regions, earlier, later)
            boxes, chunks, low, high = parts.groups, chunks[rows], parts.low, parts.high
    np.add.at(filled, boxes, np.prod(high - low, axis=1, dtype=np.int64))
    return (boxes, chunks, low, high), filled


# -- problems ------------------------------------------------------------------------------------------------


@dataclass
class LoadProblems:
    """Differences between a state dict and a checkpoint: ``texts`` by name and by class of error.

    ``names`` are stored names where different. Messages use stock torch's words, because programs search
    for them.
    """

    names: Mapping[str, str]
    texts: dict[type[PlanError], dict[str, str]] = field(default_factory=partial(defaultdict, dict))
    has_other_kinds: bool = False
    """True if a tensor here is an object there or the reverse."""

    def shown(self, fqn: str) -> str:
        """Return a name for a message, with the stored name if different."""
        name = self.names.get(fqn, fqn)
        return f"{fqn!r}" if fqn == name else f"{fqn!r} (renamed to {name!r})"

    def raise_all(self, hint: str = "", per_rank: Collection[str] = (), lost: str = "") -> NoReturn:
        """Raise one error for all problems: of their class if all are of one kind, else a PlanError.
        ``hint`` concerns missing names, ``lost`` unexpected ones.
        """
        found = {kind: self.texts[kind] for kind in _KINDS if kind in self.texts}
        each = [(kind, fqn, text) for kind, texts in found.items() for fqn, text in texts.items()]
        lines = [_line(kind, list(texts.values())) for kind, texts in found.items()]
        missing = found.get(MissingKeyError, {})
        if missing and hint:
            lines.insert(1, hint)
        if len(found) > 1:
            lines.insert(0, f"the checkpoint does not fit the state dict, {len(each)} problems:")
        advice = [_ADVICE[kind] for kind in found if kind in _ADVICE]
        if self.has_other_kinds:
            advice.append(_OTHER_KINDS)
        if any(fqn in per_rank for fqn in missing):
            advice.append(_PER_RANK_ADVICE)
        if advice:
            lines.append(" ".join(advice))
        if lost:
            lines.append(lost)
        raise (next(iter(found)) if len(found) == 1 else PlanError)(
            "\n".join(lines),
            problems=[
                f"{text} is not in the checkpoint" if kind is MissingKeyError else text
                for kind, _, text in each[:_MAX_LISTED]
            ],
            fqns=[fqn for _, fqn, _ in each[:_MAX_LISTED]],
        )


def _line(kind: type[PlanError], shown: Sequence[str]) -> str:
    if kind is MissingKeyError:
        return f"Missing key in checkpoint state_dict: {listed(shown, most=_SHOWN, show=str)}."
    more = f"; and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return f"{'; '.join(shown[:_SHOWN])}{more}."


# -- hints for names that are missing ------------------------------------------------------------------------

_WRAPPERS: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Key parts of module wrappers: DDP, torch.compile, FSDP, activation checkpointing."""

_SUGGESTED: Final = 2
"""Maximum number of missing keys with a suggestion each."""

_DEPTH: Final = 64
"""Maximum number of removed leading parts of a name."""

_GROUP: Final = re.compile(r"(?:^|\.)param_groups\.[0-9]+(?:\.params)?$")

_PREFIXES: Final = 8
"""Maximum number of tried prefixes."""

OTHER_GROUPS: Final = (
    "Parameter groups of an optimizer are numbered: after adding or removing groups, states may go to the "
    "wrong group. Save and load by parameter names: get_optimizer_state_dict() with "
    "StateDictOptions(flatten_optimizer_state_dict=True)"
)
"""Advice for options that would omit a parameter group."""

Rules = Mapping[str, str]


class Hint(NamedTuple):
    """Advice about missing names, and the ``names`` of the checkpoint that it proposes for them."""

    text: str
    names: Collection[str] = ()


@dataclass(frozen=True)
class Shapes:
    """Shapes by name: ``own`` of missing names, ``saved`` of names of the checkpoint. None is no tensor."""

    own: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    saved: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)

    def fit(self, name: str, other: str) -> bool:
        """Return False for different shapes; unknown shapes fit."""
        return name not in self.own or other not in self.saved or self.own[name] == self.saved[other]

    def shown(self, name: str, other: str) -> str:
        """Return ``other`` for a message, with both shapes if they differ."""
        if self.fit(name, other):
            return repr(other)
        saved, own = ("no tensor" if one is None else one for one in (self.saved[other], self.own[name]))
        return f"{other!r} (saved {saved}, current {own})"


_UNKNOWN: Final = Shapes()


def _hint(
    index: CheckpointIndex,
    wanted: HeldBoxes,
    stored: Sequence[str],
    unexpected: Sequence[str],
    *,
    is_renamed: bool,
) -> Hint:
    """Return advice about missing names among the ``stored`` names, those of ``wanted`` tensors first."""
    absent: list[str] = []
    present: list[str] = []
    for name in stored:
        is_there = name in index.position or name in index.objects.position
        (present if is_there else absent).append(name)
    dropped = []
    for part in dropped_from(index.provenance):
        selection = Selection.of(part.patterns, None) if part.patterns else None
        if selection is not None and any(map(selection.selects, absent)):
            dropped.append(str(part))
    if dropped:
        advice = "load the rest (exclude=...), or load a step that still has the entry"
        return Hint(f"{'; '.join(dropped)}, to free space: {advice}.")
    own: dict[str, tuple[int, ...] | None] = dict.fromkeys(absent)
    for row, name in enumerate(stored[: len(wanted.fqns)]):
        if name in own:
            begin, end = wanted.shape_start[row : row + 2]
            own[name] = tuple(wanted.shape_values[begin:end].tolist())
    shapes = Shapes(own, shapes_of(index, unexpected))
    return hint_for_missing(list(own), unexpected, present, is_renamed=is_renamed, shapes=shapes)


def shapes_of(index: CheckpointIndex, names: Iterable[str]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of ``names``, None for values that are no tensors."""
    rows = {name: index.position.get(name) for name in names}
    return {name: None if row is None else index.shape(row) for name, row in rows.items()}


def hint_for_missing(
    missing: Sequence[str],
    unused: Sequence[str],
    found: Collection[str],
    *,
    is_renamed: bool,
    shapes: Shapes = _UNKNOWN,
) -> Hint:
    """Return advice for ``missing`` names (at least one).

    ``unused``: names of the checkpoint that are not loaded; ``found``: names loaded unchanged, which no
    renaming may affect. ``is_renamed``: names come from ``rename=``. Names with the same shape come first.
    """
    rules, pairs = rename_for_missing(missing, unused, found, shapes)
    if rules:
        count = len(pairs)
        shown = ", ".join(f"{_raw(regex)}: {_raw(text)}" for regex, text in rules.items())
        which = (
            "it" if len(missing) == 1 else "all of them" if count == len(missing) else f"{count:,} of them"
        )
        how = f"add {{{shown}}} to rename" if is_renamed else f"pass rename={{{shown}}}"
        text = f"The checkpoint has {which} under other names: {how}."
        if odd := [shapes.shown(*pair) for pair in pairs.items() if not shapes.fit(*pair)]:
            text += f" With another shape: {listed(odd, show=str)}."
        return Hint(text, {other for name, other in pairs.items() if shapes.fit(name, other)})
    texts, proposed = [], set[str]()
    for name in missing[:_SUGGESTED]:
        same = [other for other in unused if shapes.fit(name, other)]
        near = near_names(name, same) or near_names(name, unused)
        near = near if len(missing) == 1 else near[:1]
        if near:
            shown = " or ".join(shapes.shown(name, other) for other in near)
            texts.append(shown if len(missing) == 1 else f"{shown} for {name!r}")
            proposed.update(other for other in near if shapes.fit(name, other))
    if texts:
        return Hint(f"Did you mean {', '.join(texts)}?", proposed)
    if any(map(is_group, missing)) and any(map(is_group, found)):
        return Hint(f"{OTHER_GROUPS}.")
    counts = Counter(name.partition(".")[0] for name in unused)
    several = {name.partition(".")[0] for name in unused if "." in name}
    tops = [f"{top}.* ({count:,})" if top in several else repr(top) for top, count in counts.items()]
    there = (
        f"The checkpoint has these entries that the state dict lacks: {listed(tops, show=str)}. List "
        f"all entries with dcp show. "
        if unused
        else ""
    )
    return Hint(f"{there}Set allow_partial_load=True to leave missing entries unchanged.")


def is_group(name: str) -> bool:
    """Return True for an optimizer's parameter group, or an entry common to all groups."""
    return _GROUP.search(name) is not None


def rename_for_missing(
    missing: Sequence[str], unused: Sequence[str], found: Collection[str], shapes: Shapes = _UNKNOWN
) -> tuple[Rules | None, Mapping[str, str]]:
    """Return the renaming that finds most of ``missing`` (at least half) with the same shape, and the names
    found by missing name; None without one. Arguments as in `hint_for_missing`.
    """
    there = frozenset(unused)
    best: tuple[Rules | None, Mapping[str, str]] = None, {}
    most = 0, 0
    for rules in _candidates(missing, unused):
        renamed = renamer(rules) or str
        pairs = {name: other for name in missing if (other := renamed(name)) in there}
        score = sum(starmap(shapes.fit, pairs.items())), len(pairs)
        if len(pairs) * 2 < len(missing) or score <= most or any(renamed(name) != name for name in found):
            continue
        best, most = (rules, pairs), score
        if score[0] == len(missing):
            break
    return best


def _candidates(missing: Sequence[str], unused: Sequence[str]) -> Iterator[Rules]:
    """Yield possible renamings: remove wrapper parts, add one of the checkpoint's at a constant depth, or
    replace a prefix.
    """
    present = {}
    for wrapper in _WRAPPERS:
        names = [name for name in missing if f".{wrapper}." in f".{name}"]
        if names:
            at_begin = all(name.startswith(f"{wrapper}.") for name in names)
            present[rf"^{wrapper}\." if at_begin else rf"\b{wrapper}\."] = ""
    if present:
        yield present
    wanted = frozenset(missing)
    for wrapper in _WRAPPERS:
        for name in unused:
            parts = name.split(".") if wrapper in name else []
            if wrapper in parts:
                depth = parts.index(wrapper)
                if ".".join(parts[:depth] + parts[depth + 1 :]) in wanted:
                    before = rf"^((?:[^.]+\.){{{depth}}})"
                    yield {before: rf"\1{wrapper}."} if depth else {"^": f"{wrapper}."}
                    break
    parts = missing[0].split(".") if len(missing) > 1 else []  # a single name would match any prefix
    for first in range(min(len(parts), _DEPTH)):
        suffix = ".".join(parts[first:])
        own = missing[0].removesuffix(suffix)
        others = dict.fromkeys(
            other.removesuffix(suffix) for other in unused if f".{other}".endswith(f".{suffix}")
        )
        for other in list(others)[:_PREFIXES]:
            yield {f"^{re.escape(own)}": other.replace("\\", r"\\")}
        if others:
            return


def _raw(text: str) -> str:
    """Return a string literal for a program."""
    return f'r"{text}"' if "\\" in text else f'"{text}"'
