"""Plan columns: messages between ranks, executed by writer and reader.

One numpy array per attribute instead of an object per item. Ragged columns follow
`dcp.storage.formats.index`: flat values plus a ``*_start`` array. Boxes have ``ndim`` values per item,
sliced by ``box_start``. `SaveColumns` goes to the coordinator, `WriteColumns` (`dcp.storage.engine.write`)
comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.formats.container_notes import ContainerNote, decode_notes, encode_notes
from dcp.storage.formats.index import Path
from dcp.storage.geometry.strides import Int64, starts
from dcp.storage.packing import pack, unpack


@dataclass(frozen=True, eq=False)
class SaveObjects:
    """Objects of a rank: names and digests of values.

    ``digests`` is uint64: 0 for unknown (a plan made elsewhere), NOT_COMPARABLE of
    `dcp.planners.value_digests` for values without comparable state. ``sizes`` are approximate bytes, for
    balancing.
    """

    fqns: Sequence[str] = ()
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    sizes: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldBoxes:
    """Tensors in the memory of a rank, to save or to load into.

    Tensors (n rows): ``fqns``, ``dtype_codes``, global shapes (``shape_start``/``shape_values``). Items (m
    rows): boxes of tensors ``item_tensors``. ``item_offsets``/``item_sizes`` are in the global tensor;
    ``item_local_offsets`` is the start in local tensor ``item_sources`` (an index into a list that stays on
    the rank).
    """

    fqns: Sequence[str]
    dtype_codes: npt.NDArray[np.uint8]
    shape_start: Int64
    shape_values: Int64
    item_tensors: Int64
    item_offsets: Int64
    item_sizes: Int64
    item_local_offsets: Int64
    item_sources: Int64

    @cached_property
    def ndims(self) -> Int64:
        """Number of dimensions by tensor."""
        return np.diff(self.shape_start)

    @cached_property
    def box_start(self) -> Int64:
        """Positions of the items' boxes."""
        return starts(self.ndims[self.item_tensors])


@dataclass(frozen=True, eq=False, kw_only=True)
class SaveColumns(HeldBoxes):
    """Local save plan of a rank: everything that the rank can write.

    ``item_sharded`` is 0 for plain tensors (each rank has the whole), 1 for boxes of DTensor and
    ShardedTensor. ``item_digests`` (uint64, 0 for none) are digests of boxes for the replica check.
    ``item_ties`` (int64): items with equal non-negative numbers share memory and need one record; -1
    otherwise. ``planner_data`` maps fqn to the path in the nested state dict (or is None), ``notes``
    describe containers (`dcp.storage.formats.container_notes`).
    """

    requires_grad: npt.NDArray[np.uint8]
    item_sharded: npt.NDArray[np.uint8]
    item_digests: npt.NDArray[np.uint64]
    item_ties: Int64
    objects: SaveObjects = field(default_factory=SaveObjects)
    planner_data: Mapping[str, Path] | None = None
    notes: Sequence[ContainerNote] = ()
    stride_orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def box_columns(
    fqns: Sequence[str],
    dtype_codes: Sequence[int],
    requires_grad: Sequence[bool],
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    offsets: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    sharded: Sequence[bool],
    **others: Any,
) -> SaveColumns:
    """Return the columns of tensors with boxes of ``rows``, each a separate local tensor."""
    extents, count = _flat(sizes), len(rows)
    columns = {
        "fqns": tuple(fqns),
        "dtype_codes": np.array(dtype_codes, np.uint8),
        "requires_grad": np.array(requires_grad, np.uint8),
        "shape_start": starts(list(map(len, shapes))),
        "shape_values": _flat(shapes),
        "item_tensors": np.array(rows, np.int64),
        "item_offsets": _flat(offsets),
        "item_sizes": extents,
        "item_local_offsets": np.zeros_like(extents),
        "item_sources": np.arange(count, dtype=np.int64),
        "item_sharded": np.array(sharded, np.uint8),
        "item_digests": np.zeros(count, np.uint64),
        "item_ties": np.full(count, -1, np.int64),
    }
    return SaveColumns(**{**columns, **others})


def _flat(rows: Iterable[Sequence[int]]) -> Int64:
    return np.fromiter(chain.from_iterable(rows), np.int64)


class RankSets(NamedTuple):
    """Sets of replicas of a rank, ascending by ``numbers``, which are the same on all ranks.

    Set i has ``rows[start[i]:start[i + 1]]`` in an order common to all ranks of the set: rows of items, and
    -1 - row of objects.
    """

    numbers: Int64
    start: Int64
    rows: Int64


# -- as bytes, for the way between ranks ---------------------------------------------------------------------

SectionCache = dict[bytes, Any]
"""Decoded sections by bytes, for one global plan."""

_NAMES: Final = ("fqns", "dtype_codes", "requires_grad", "shape_start", "shape_values", "stride_orders")
ITEM_COLUMNS: Final = tuple(each.name for each in fields(SaveColumns) if each.name.startswith("item_"))


def encode_save_columns(columns: SaveColumns) -> bytes:
    """Pack the save plan of a rank.

    Names, shapes and paths are separate sections with equal bytes for equal content; a shared cache decodes
    equal sections of many ranks once.
    """
    objects = columns.objects
    sections = (
        {name: getattr(columns, name) for name in _NAMES},
        objects.fqns,
        columns.planner_data,
        encode_notes(columns.notes),
        ([getattr(columns, name) for name in ITEM_COLUMNS], objects.digests, objects.sizes),
    )
    return pack([pack(section) for section in sections])


def decode_save_columns(data: bytes, cache: SectionCache | None = None) -> SaveColumns:
    """Unpack the plan of `encode_save_columns`; pass one ``cache`` for all ranks."""
    cache = cache if cache is not None else {}
    *shared, own = unpack(data)
    for section in shared:
        if section not in cache:
            cache[section] = unpack(section)
    names, object_names, paths, notes = (cache[section] for section in shared)
    items, digests, sizes = unpack(own)
    return SaveColumns(
        **names,
        **dict(zip(ITEM_COLUMNS, items, strict=True)),
        objects=SaveObjects(object_names, digests, sizes),
        planner_data=paths,
        notes=decode_notes(notes),
    )
