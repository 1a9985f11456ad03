"""Several checkpoints as one source: tensor and file names begin with the source's number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, starmap
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from dcp.conversion.adapters import LowRank, low_ranks
from dcp.conversion.arithmetic import Arithmetic
from dcp.conversion.layout import TensorTerms
from dcp.inspection.entries import Entries, TargetDtype, TensorEntry, mapped_entries
from dcp.planners.load.selection import Patterns, Rename, Selection, check_patterns, check_rules, renamer
from dcp.planners.weight_maps.axes import model_config
from dcp.planners.weight_maps.mapped_index import map_sources
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.dtypes import CASTABLE
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, complete_index
from dcp.storage.geometry.strides import Int64, gather_rows, row_sums, starts
from dcp.storage.near_names import listed, near_names
from dcp.storage.stores.base import FileInfo, ReadHandle, ReadOnlyStore, Store
from dcp.storage.threads import WorkerThreads

T = TypeVar("T")

_FORMAT: Final = "joined"
_AT_ONCE: Final = 2
"""Indexes read at a time; the index of a file with many tensors takes much memory during the read."""
_COLUMNS: Final = (
    "dtype_codes",
    "shape_values",
    "requires_grad",
    "chunk_offsets",
    "chunk_sizes",
    "record_offsets",
    "record_lengths",
    "payload_offsets",
    "payload_lengths",
    "crcs",
    "file_sizes",
)
_RAGGED: Final = ("shape_start", "chunk_start", "crc_start")


class JoinedStore(ReadOnlyStore):
    """Files of several ``stores``, picklable: ``model.pt`` of store 2 is ``2.model.pt``."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.url = " + ".join(store.url for store in stores)
        profiles = [store.read_profile for store in stores]
        # One store with expensive requests decides: large requests suit all stores.
        self.read_profile = next((profile for profile in profiles if profile.scatter), profiles[0])
        self.capabilities = replace(
            self.capabilities, is_shared=all(store.capabilities.is_shared for store in stores)
        )

    def path_of(self, name: str) -> str:
        """Return the path inside the store of the file."""
        store, own = self._owner(name)
        return store.path_of(own)

    def list(self) -> list[FileInfo]:
        """Return the files of all stores."""
        found = {store.url: store.list() for store in self.stores}
        return [
            replace(info, name=f"{number}.{info.name}")
            for number, store in enumerate(self.stores)
            for info in found[store.url]
        ]

    def stat(self, name: str) -> FileInfo | None:
        """Return the facts of a file."""
        store, own = self._owner(name)
        info = store.stat(own)
        return None if info is None else replace(info, name=name)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Return a read handle of the store of the file."""
        store, own = self._owner(name)
        return store.open_read(own, expected_bytes=expected_bytes)

    def _owner(self, name: str) -> tuple[Store, str]:
        number, _, own = name.partition(".")
        return self.stores[int(number)], own


def open_joined(members: Sequence[Callable[[], Source]]) -> Source:
    """Open ``members`` as one source, a few at a time. Raises the errors of the members.

    Rows of the first source keep their numbers; tensors and chunks of the others follow. Values come from the
    first source.
    """
    with WorkerThreads(min(_AT_ONCE, len(members))) as pool:
        found = list(pool.map(_opened, members))
    fqns = found[0].index.fqns
    for number, member in enumerate(found[1:], 1):
        # Share equal names, of which there may be very many, to save memory. The nesting of the state comes
        # from the first source.
        own = member.index.fqns
        shared = replace(member.index, fqns=fqns if own == fqns else own, planner_data=None)
        found[number] = replace(member, index=shared)
    index = _joined_index([member.index for member in found])
    name = " + ".join(member.name for member in found)
    store = JoinedStore([member.store for member in found])
    return Source(store, index, name, None, tuple(_parts_of(index, found)))


def _opened(member: Callable[[], Source]) -> Source:
    found = member()
    return replace(found, index=complete_index(found.store, found.index))


def _parts_of(joined: CheckpointIndex, members: Sequence[Source]) -> Iterator[Source]:
    """Yield the sources with columns as views of ``joined``, to save memory."""
    begins = dict.fromkeys(_COLUMNS, 0)
    for member in members:
        ends = {name: begin + len(getattr(member.index, name)) for name, begin in begins.items()}
        own = {name: getattr(joined, name)[begins[name] : end] for name, end in ends.items()}
        yield replace(member, index=replace(member.index, **own))
        begins = ends


class _JoinedNames(Sequence[str]):
    """Names of all sources, made on access; names of source 2 begin with ``2/``."""

    def __init__(self, members: Sequence[Sequence[str]]) -> None:
        self._members = members
        self._begins = starts(list(map(len, members))).tolist()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __iter__(self) -> Iterator[str]:
        return (f"{number}/{name}" for number, names in enumerate(self._members) for name in names)

    def __getitem__(self, row: Any) -> Any:  # by row, the only supported index
        return f"{bisect_right(self._begins, row) - 1}/{self.own_name(row)}"

    def own_name(self, row: int) -> str:
        """Return the name without the number, for messages that name the source."""
        number = bisect_right(self._begins, row) - 1
        return str(self._members[number][row - self._begins[number]])


def _joined_index(parts: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """Return one index of several complete indexes, concatenated."""
    tensors, chunks, files = (
        starts([len(getattr(part, name)) for part in parts]).tolist()
        for name in ("fqns", "chunk_files", "files")
    )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
    }
    for name in _RAGGED:
        columns[name] = starts(np.concatenate([np.diff(getattr(part, name)) for part in parts]))
    return CheckpointIndex(
        format=_FORMAT,
        fqns=_JoinedNames([part.fqns for part in parts]),
        chunk_files=np.concatenate([part.chunk_files + files[at] for at, part in enumerate(parts)]),
        files=[f"{number}.{name}" for number, part in enumerate(parts) for name in part.files],
        objects=parts[0].objects,
        stride_orders=_moved([part.stride_orders for part in parts], tensors),
        payload_strides=_moved([part.payload_strides for part in parts], chunks),
        record_crcs=_moved([part.record_crcs for part in parts], chunks),
        provenance={"save_id": [part.provenance.get("save_id") for part in parts]},
        **columns,
    )


def _moved(parts: Sequence[Mapping[int, T]], begins: Sequence[int]) -> dict[int, T]:
    """Return the values by row of all sources joined."""
    return {begins[at] + row: value for at, part in enumerate(parts) for row, value in part.items()}


_MAX_LISTED: Final = 50
_MAX_FACTOR_BYTES: Final = 64 << 20
"""Largest product factor that is held in memory."""
_METRICS: Final = "metrics"
"""User metadata of one checkpoint that a merge does not keep."""
_OUTPUT: Final = ("lm_head", "embed_out")
"""Modules of transformers that may be tied to the embeddings."""
_WHOLE_NUMBERS: Final = frozenset(
    dtypes.BY_NAME[name].code
    for name in ("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64")
)


def merge_entries(
    members: Sequence[Source],
    arithmetic: Arithmetic,
    weight_maps: Sequence[WeightMap | None] = (),
    *,
    config: Mapping[str, Any] | None = None,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: TargetDtype = None,
) -> tuple[Entries, TensorTerms, Sequence[MappedTensor] | None, tuple[str, ...]]:
    """Choose the entries of the target and the sums that compute them.

    Args:
        members: Sources, followed by adapters.
        weight_maps: One map for all sources or one for each; not with adapters.
        config: Configuration of the target's model; default: the file beside the first source, if adapters
            need it.
        only: Patterns on the names of each source; so are ``exclude`` and ``rename``.

    Returns:
        The entries; their terms by row of the first source (rows of all joined sources, or of mapped
        tensors); the mapped tensors; new names of entries copied from the first source.

    Raises:
        PlanError: Tensors do not match; all names with reasons.
        MissingKeyError: A pattern matches nothing in any source.
    """
    count = len(arithmetic.weights)
    sources, adapters = members[:count], members[count:]
    maps = weight_maps if len(weight_maps) == count else [*weight_maps, None][:1] * count
    chosen = _chosen(sources, maps, only, exclude, rename, dtype)
    added = [(adapter, low_ranks(adapter.index, adapter.store)) for adapter in adapters]
    if adapters and config is None:
        config = model_config(sources[0].store)
    is_tied = bool(config and config.get("tie_word_embeddings"))
    own = [entries for entries, _ in chosen]
    merging = _Merging(own, added, arithmetic, is_tied)
    terms = merging.terms()
    merging.raise_problems([source.name for source in members])
    made = None
    if any(maps):
        made = [tensor for number, one in enumerate(chosen) for tensor in _made(number, *one)]
    first = _untied(own[0], own[1:], terms)
    user = {name: value for name, value in first.index.user.items() if name != _METRICS}
    first = replace(first, index=replace(first.index, user=user, digests=()))  # sums have no digests
    return first, terms, made, tuple(sorted(merging.unmerged))


def _chosen(
    sources: Sequence[Source],
    maps: Sequence[WeightMap | None],
    only: Patterns | None,
    exclude: Patterns | None,
    rename: Rename | None,
    dtype: TargetDtype,
) -> list[tuple[Entries, Sequence[MappedTensor] | None]]:
    """Return the selected entries of each source, mapped; the first source is cast. Patterns must match in at
    least one source."""
    names = [[*source.index.fqns, *source.index.objects.fqns] for source in sources]
    selection = Selection.of(only, exclude)
    if selection is not None:
        check_patterns(selection, [name for own in names for name in own])
    renamed = renamer(rename)
    if isinstance(rename, Mapping) and not any(maps):
        check_rules(rename, [name for own in names for name in own])
    found: list[tuple[Entries, Sequence[MappedTensor] | None]] = []
    for source, own, weights in zip(sources, names, maps, strict=True):
        included, excluded = (_matching(given, own) for given in (only, exclude))
        if only is not None and not included:
            found.append((Entries(source.index, [], []), None))
            continue
        given: dict[str, Any] = {"only": included, "exclude": excluded or None, "rename": renamed}
        given["dtype"] = None if found else dtype
        found.append(mapped_entries(source.index, source.store, weights, **given))
    return found


def _made(number: int, entries: Entries, mapped: Sequence[MappedTensor] | None) -> Iterator[MappedTensor]:
    """Yield the tensors of a source after its map, with pieces of all joined sources."""
    for tensor in mapped or starmap(MappedTensor.same, map_sources(entries.index)):
        sides = ((one, one.source._replace(name=f"{number}/{one.source.name}")) for one in tensor.pieces)
        yield replace(tensor, pieces=[one._replace(source=side) for one, side in sides])


def _matching(patterns: Patterns | None, names: Sequence[str]) -> list[str] | None:
    """Return the names that match any of ``names``."""
    if patterns is None:
        return None
    given = [patterns] if isinstance(patterns, str) else patterns
    selections = ((one, Selection.of([one], None)) for one in given)
    return [one for one, selects in selections if selects is None or any(map(selects.selects, names))]


@dataclass
class _Merging:
    """Compares the sources, all tensors at a time; ``problems`` are by name, and few."""

    sources: Sequence[Entries]
    adapters: Sequence[tuple[Source, Sequence[LowRank]]]
    arithmetic: Arithmetic
    is_tied: bool
    problems: dict[str, str] = field(default_factory=dict)
    unmerged: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        indexes = [*(one.index for one in self.sources), *(one.index for one, _ in self.adapters)]
        self.begins = list(accumulate((index.tensor_count for index in indexes), initial=0))
        """The first row of each source, of all joined."""

    def terms(self) -> TensorTerms:
        """Return the terms by row of the first source, and collect problems."""
        names, rows = self._aligned()
        summed = self._summed(names, rows)
        kept = np.array([at for at, name in enumerate(names) if name in self.unmerged], np.int64)
        joined = np.stack([own + begin for own, begin in zip(rows, self.begins, strict=False)])
        tensors = {names[at]: int(rows[0][at]) for at in summed.tolist()} if self.adapters else {}
        products = list(self._products(tensors))
        parts = (
            (np.repeat(rows[0][summed], len(rows)), rows[0][kept]),
            (np.tile(np.array(self.arithmetic.weights, np.float64), len(summed)), np.ones(len(kept))),
            (joined[:, summed].T.reshape(-1), joined[0, kept]),
        )
        plain = [np.concatenate(one) for one in parts]
        plain += [np.zeros(len(plain[0]), kind) for kind in (np.int64, np.int64, bool)]
        added = zip(*products, strict=True) if products else [()] * len(plain)
        of, *columns = (
            np.append(one, np.array(more, one.dtype)) for one, more in zip(plain, added, strict=True)
        )
        order = np.argsort(of, kind="stable")
        start = starts(np.bincount(of, minlength=self.sources[0].index.tensor_count))
        return TensorTerms(start, *(column[order] for column in columns))

    def raise_problems(self, names: Sequence[str]) -> None:
        """Raise PlanError with all collected problems; ``names`` are of the sources."""
        if not self.problems:
            return
        shown = [f"{name!r} {problem}" for name, problem in self.problems.items()]
        where = "; ".join(f"{number}: {name}" for number, name in enumerate(names, 1))
        raise PlanError(
            f"{len(shown)} tensors cannot be merged: {listed(shown, most=_MAX_LISTED, show=str)}. The "
            f"sources are {where}. Exclude these tensors (exclude=), or rename them (rename=)",
            fqns=list(self.problems),
            problems=shown,
        )

    def _aligned(self) -> tuple[list[str], list[Int64]]:
        """Return names common to all sources, with their rows in each."""
        first = self.sources[0].names
        if all(one.names == first for one in self.sources[1:]):
            return first, [one.rows for one in self.sources]
        places = [dict(zip(one.names, range(len(one.names)), strict=True)) for one in self.sources]
        common = []
        for name in dict.fromkeys(name for one in self.sources for name in one.names):
            missing = [str(number) for number, own in enumerate(places, 1) if name not in own]
            if missing:
                self.problems[name] = f"is missing from {', '.join(missing)}"
            else:
                common.append(name)
        chosen = (np.array([own[name] for name in common], np.int64) for own in places)
        return common, [one.rows[places] for one, places in zip(self.sources, chosen, strict=True)]

    def _summed(self, names: Sequence[str], rows: Sequence[Int64]) -> Int64:
        """Return positions in ``names`` of summed tensors; collect copied tensors and problems."""
        indexes = [one.index for one in self.sources]
        pairs = list(zip(indexes, rows, strict=True))
        alike = np.ones(len(names), bool)
        for index, own in pairs[1:]:
            alike &= _of_one_shape(indexes[0], rows[0], index, own)
        codes = np.stack([index.dtype_codes[own] for index, own in pairs])
        floating = np.isin(codes, list(CASTABLE)).all(axis=0)
        for at in np.flatnonzero(~alike).tolist():
            shapes = [str(index.shape(int(own[at]))) for index, own in pairs]
            self.problems[names[at]] = f"has different shapes: {', '.join(shapes)}"
        is_sum = len(self.sources) > 1 or self.arithmetic.weights != (1.0,)
        for at in np.flatnonzero(alike & ~floating).tolist():
            own_codes = codes[:, at].tolist()
            types = [dtypes.BY_CODE[code].name for code in own_codes]
            if len(set(types)) > 1:
                self.problems[names[at]] = f"has different dtypes: {', '.join(types)}"
            elif is_sum and own_codes[0] not in _WHOLE_NUMBERS:
                self.problems[names[at]] = f"is {types[0]}, a dtype that cannot be summed"
            self.unmerged.add(names[at])
        return np.flatnonzero(alike & floating)

    def _products(self, tensors: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
        """Yield adapters' products for ``tensors`` (rows of the first source) as rows of `TensorTerms`."""
        for number, (adapter, added) in enumerate(self.adapters):
            for low_rank in added:
                row = tensors.get(low_rank.target)
                is_turned = self._fits(low_rank, row, tensors)
                if row is None or is_turned is None:
                    continue
                begin, position = self.begins[len(self.sources) + number], adapter.index.position
                factors = [begin + position[one] for one in (low_rank.left, low_rank.right)]
                weight = self.arithmetic.adapter_weights[number] * low_rank.scale
                left, right = reversed(factors) if is_turned else factors
                yield row, weight, left, right, low_rank.rank, is_turned

    def _fits(self, low_rank: LowRank, row: int | None, tensors: Mapping[str, int]) -> bool | None:
        """Return True if a product must be transposed, None with a collected problem if shapes differ."""
        name, shape = low_rank.target, low_rank.shape
        if name in self.problems:
            return None
        if self.is_tied and (low_rank.is_embedding or name.removesuffix(".weight").endswith(_OUTPUT)):
            if not low_rank.keeps_ties:
                self.problems[name] = (
                    "is tied to the other embedding (tie_word_embeddings in config.json), which would change "
                    "as well: pass a base model saved with untied embeddings"
                )
            if row is None or not low_rank.keeps_ties:  # the tied tensor gets the same product
                return None
        if row is None:
            close = near_names(name, tensors, most=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            self.problems[name] = f"is adapted, but the base has no such floating-point tensor{meant}"
            return None
        there = self.sources[0].index.shape(row)
        is_turned = there == shape[::-1] and (there != shape or low_rank.is_turned)
        if not is_turned and there != shape:
            self.problems[name] = f"has the shape {there}, but the adapter's update has the shape {shape}"
            return None
        size = dtypes.BY_CODE[self.arithmetic.code].itemsize
        if low_rank.rank * there[1] * size > _MAX_FACTOR_BYTES:
            self.problems[name] = f"is too large for the adapter's update of rank {low_rank.rank}"
            return None
        return is_turned


def _of_one_shape(
    first: CheckpointIndex, rows: Int64, other: CheckpointIndex, own: Int64
) -> npt.NDArray[np.bool_]:
    """Compare shapes of ``rows`` and ``own`` tensor by tensor."""
    found: npt.NDArray[np.bool_] = first.ndims[rows] == other.ndims[own]
    alike = np.flatnonzero(found)
    differs = gather_rows(first.shape_values, first.shape_start, rows[alike]) != gather_rows(
        other.shape_values, other.shape_start, own[alike]
    )
    found[alike] = row_sums(differs.astype(np.int64), starts(first.ndims[rows[alike]])) == 0
    return found


def _untied(first: Entries, others: Sequence[Entries], terms: TensorTerms) -> Entries:
    """Return ``first`` with ties kept only if all ``others`` share them and products are equal."""

    ties = [{entry.fqn: one.names[entry.tied_to] for entry in one.tensors} for one in others]

    def is_tied(entry: TensorEntry, to: TensorEntry) -> bool:
        same = all(own.get(entry.fqn, entry.fqn) == own.get(to.fqn, to.fqn) for own in ties)
        return same and terms.products(entry.tensor) == terms.products(to.tensor)

    tensors = []
    for number, entry in enumerate(first.tensors):
        keeps = entry.tied_to == number or is_tied(entry, first.tensors[entry.tied_to])
        tensors.append(entry if keeps else entry._replace(tied_to=number))
    return replace(first, tensors=tensors)


def merge_origin(members: Sequence[Source], arithmetic: Arithmetic) -> dict[str, Any]:
    """Return the provenance entry of a merge."""
    weights = (*arithmetic.weights, *arithmetic.adapter_weights)
    sources = [
        {
            "url": member.name,
            "format": member.index.format,
            "save_id": member.index.provenance.get("save_id"),
            "weight": weight,
        }
        for member, weight in zip(members, weights, strict=True)
    ]
    return {"merged_from": sources, "accumulate": arithmetic.accumulate}
