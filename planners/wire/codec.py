"""Plan columns as bytes, for the way between ranks.

msgpack of packed columns (`dcp.storage.formats.native.column_codec`), never pickle. Names, shapes and paths,
which are mostly equal on all ranks, are sections of their own with equal bytes for equal content: a cache
shared by the decoding of many plans decodes each once, and equal sections come back as one object. Each
section has a budget of its own, so that its bytes do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dcp.planners.columns import RankSets, SaveColumns, SaveObjects
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.container_notes import ContainerNote, decode_notes, encode_notes
from dcp.storage.formats.index import Int64, Path, starts
from dcp.storage.formats.native.column_codec import (
    Budget,
    ColumnEncoder,
    decode_bytes,
    decode_column,
    decode_strings,
    encode_within_budget,
)

__all__ = [
    "SectionCache",
    "decode_rank_sets",
    "decode_save_columns",
    "decode_write_columns",
    "encode_rank_sets",
    "encode_save_columns",
    "encode_write_columns",
]

VERSION = 2

SectionCache = dict[bytes, Any]
"""Decoded sections by their bytes; lives as long as one global plan."""

_SAVE_PARTS = ("names", "object_names", "paths", "notes", "items")
_ITEM_COLUMNS = ("item_tensors", "item_sources", "item_sharded", "item_ties")
_BOX_COLUMNS = ("item_offsets", "item_sizes", "item_local_offsets")
_WRITE_COLUMNS = ("sources", "chunks", "shares", "objects", "object_rows")
_WRITE_BOXES = ("sizes", "local_offsets")


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpack(data: bytes, what: str, *, use_list: bool = True) -> Any:
    try:
        return msgpack.unpackb(
            data,
            use_list=use_list,
            unicode_errors="surrogatepass",
            strict_map_key=False,
            max_ext_len=0,
            max_str_len=len(data),
            max_bin_len=len(data),
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CheckpointFormatError(f"{what} is not valid msgpack: {error}") from error


def _fields(value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not set(names) <= set(value):
        raise CheckpointFormatError(f"{what} lacks some of its columns: {', '.join(names)}")
    return value


def encode_save_columns(columns: SaveColumns) -> bytes:
    """One rank's save plan as bytes."""
    sections = {
        "names": _encode_names,
        "object_names": _encode_object_names,
        "paths": _encode_paths,
        "items": _encode_items,
    }
    packed = {name: encode_within_budget(partial(encode, columns)) for name, encode in sections.items()}
    return _pack({"version": VERSION, **packed, "notes": encode_notes(columns.notes)})


def _encode_names(columns: SaveColumns, encoder: ColumnEncoder) -> bytes:
    return _pack(
        {
            "fqns": encoder.strings(columns.fqns),
            "dtypes": encoder.column(columns.dtype_codes),
            "grad": encoder.column(columns.requires_grad),
            "ndims": encoder.column(columns.ndims),
            "shapes": encoder.column(columns.shape_values),
            "orders": sorted((int(row), list(order)) for row, order in columns.stride_orders.items()),
        }
    )


def _encode_object_names(columns: SaveColumns, encoder: ColumnEncoder) -> bytes:
    return _pack(encoder.strings(columns.objects.fqns))


def _encode_paths(columns: SaveColumns, encoder: ColumnEncoder) -> bytes:
    if columns.planner_data is None:
        return _pack(None)
    pairs = [list(columns.planner_data.keys()), list(columns.planner_data.values())]
    return _pack(encoder.blob(_pack(pairs)))


def _encode_items(columns: SaveColumns, encoder: ColumnEncoder) -> bytes:
    items = {name: encoder.column(getattr(columns, name)) for name in (*_ITEM_COLUMNS, *_BOX_COLUMNS)}
    items["item_digests"] = encoder.column(columns.item_digests.view(np.int64))
    items["object_digests"] = encoder.column(columns.objects.digests.view(np.int64))
    items["object_sizes"] = encoder.column(columns.objects.sizes)
    return _pack(items)


def decode_save_columns(data: bytes, cache: SectionCache | None = None) -> SaveColumns:
    """The inverse of `encode_save_columns`; give all ranks' plans one ``cache``.

    Raises CheckpointFormatError for bytes that no rank of this version sends.
    """
    parts = _fields(_unpack(data, "a save plan"), ("version", *_SAVE_PARTS), "a save plan")
    if parts["version"] != VERSION:
        raise UnsupportedFormatError(
            f"a save plan of version {parts['version']!r} was received, this is {VERSION}; "
            "all ranks must run the same version of dcphub"
        )
    if not all(isinstance(parts[name], bytes) for name in _SAVE_PARTS):
        raise CheckpointFormatError("a save plan has a section that is no bytes")
    cache = cache if cache is not None else {}
    names = _cached(cache, b"n", parts["names"], _decode_names)
    object_names = _cached(cache, b"o", parts["object_names"], _decode_object_names)
    paths = _cached(cache, b"p", parts["paths"], _decode_paths)
    notes = _cached(cache, b"c", parts["notes"], _decode_notes)
    columns = _decode_items(parts["items"], Budget(len(parts["items"])), names, object_names, paths)
    columns = replace(columns, notes=notes)
    _check_save(columns)
    return columns


def _cached(cache: SectionCache, kind: bytes, section: bytes, decode: Any) -> Any:
    key = kind + section
    if key not in cache:
        cache[key] = decode(section, Budget(len(section)))
    return cache[key]


def _decode_names(section: bytes, budget: Budget) -> dict[str, Any]:
    wanted = ("fqns", "dtypes", "grad", "ndims", "shapes", "orders")
    raw = _fields(_unpack(section, "a plan's names"), wanted, "a plan's names")
    ndims = decode_column(raw["ndims"], budget)
    codes, grads = decode_column(raw["dtypes"], budget), decode_column(raw["grad"], budget)
    fqns = tuple(decode_strings(raw["fqns"], budget))
    shapes = decode_column(raw["shapes"], budget)
    if not len(fqns) == len(ndims) == len(codes) == len(grads) or (ndims < 0).any() or (ndims > 64).any():
        raise CheckpointFormatError("a save plan's tensor columns disagree in length")
    if int(ndims.sum()) != len(shapes) or (shapes < 0).any():
        raise CheckpointFormatError("a save plan's shapes do not fit its tensors")
    if not np.isin(codes, list(dtypes.BY_CODE)).all() or not np.isin(grads, (0, 1)).all():
        raise CheckpointFormatError("a save plan names an unknown dtype")
    try:
        orders = {int(row): tuple(int(dim) for dim in order) for row, order in raw["orders"]}
    except (TypeError, ValueError) as error:
        raise CheckpointFormatError("a save plan's stride orders are malformed") from error
    if not all(
        0 <= row < len(fqns) and sorted(order) == list(range(ndims[row])) for row, order in orders.items()
    ):
        raise CheckpointFormatError("a save plan's stride orders are no permutations")
    return {
        "fqns": fqns,
        "dtype_codes": codes.astype(np.uint8),
        "requires_grad": grads.astype(np.uint8),
        "shape_start": starts(ndims),
        "shape_values": shapes,
        "stride_orders": orders,
    }


def _decode_object_names(section: bytes, budget: Budget) -> tuple[str, ...]:
    return tuple(decode_strings(_unpack(section, "a plan's object names"), budget))


def _decode_paths(section: bytes, budget: Budget) -> Mapping[str, Path] | None:
    blob = _unpack(section, "a plan's paths")
    if blob is None:
        return None
    pairs = _unpack(decode_bytes(blob, budget), "a plan's paths", use_list=False)
    if not isinstance(pairs, tuple) or len(pairs) != 2 or not all(isinstance(side, tuple) for side in pairs):
        raise CheckpointFormatError("a save plan's paths are malformed")
    fqns, paths = pairs
    if len(fqns) != len(paths) or not all(type(fqn) is str for fqn in fqns):
        raise CheckpointFormatError("a save plan's paths do not fit their names")
    for path in paths:
        if not isinstance(path, tuple) or not all(type(part) in (str, int) for part in path):
            raise CheckpointFormatError("a save plan's path is not made of names and positions")
    return dict(zip(fqns, paths, strict=True))


def _decode_notes(section: bytes, budget: Budget) -> Sequence[ContainerNote]:
    budget.spend(len(section))
    return tuple(decode_notes(section))


def _decode_items(
    section: bytes, budget: Budget, names: dict[str, Any], object_names: tuple[str, ...], paths: Any
) -> SaveColumns:
    wanted = (*_ITEM_COLUMNS, *_BOX_COLUMNS, "item_digests", "object_digests", "object_sizes")
    raw = _fields(_unpack(section, "a plan's items"), wanted, "a plan's items")
    column = {name: decode_column(raw[name], budget) for name in wanted}
    objects = SaveObjects(object_names, _uint64(column["object_digests"]), column["object_sizes"])
    return SaveColumns(
        **names,
        item_tensors=column["item_tensors"],
        item_offsets=column["item_offsets"],
        item_sizes=column["item_sizes"],
        item_local_offsets=column["item_local_offsets"],
        item_sources=column["item_sources"],
        item_sharded=column["item_sharded"].astype(np.uint8),
        item_digests=_uint64(column["item_digests"]),
        item_ties=column["item_ties"],
        objects=objects,
        planner_data=paths,
    )


def _uint64(column: Int64) -> npt.NDArray[np.uint64]:
    return column.view(np.uint64)


def _check_save(columns: SaveColumns) -> None:
    count = len(columns.item_tensors)
    if not all(len(getattr(columns, name)) == count for name in (*_ITEM_COLUMNS, "item_digests")):
        raise CheckpointFormatError("a save plan's item columns disagree in length")
    if count and not 0 <= int(columns.item_tensors.min()) <= int(columns.item_tensors.max()) < len(
        columns.fqns
    ):
        raise CheckpointFormatError("a save plan's item names a tensor that is not there")
    total = int(columns.box_start[-1])
    if not all(len(getattr(columns, name)) == total for name in _BOX_COLUMNS):
        raise CheckpointFormatError("a save plan's boxes have the wrong number of dimensions")
    objects = columns.objects
    if not len(objects.fqns) == len(objects.digests) == len(objects.sizes):
        raise CheckpointFormatError("a save plan's object columns disagree in length")


def encode_write_columns(columns: WriteColumns) -> bytes:
    """What one rank has to write, as bytes."""
    return encode_within_budget(partial(_encode_writes, columns))


def _encode_writes(columns: WriteColumns, encoder: ColumnEncoder) -> bytes:
    packed = {name: encoder.column(getattr(columns, name)) for name in (*_WRITE_COLUMNS, *_WRITE_BOXES)}
    packed["ndims"] = encoder.column(np.diff(columns.box_start))
    return _pack({"version": VERSION, **packed})


def decode_write_columns(data: bytes) -> WriteColumns:
    """The inverse of `encode_write_columns`; raises CheckpointFormatError for what no coordinator sends."""
    wanted = (*_WRITE_COLUMNS, *_WRITE_BOXES, "ndims")
    raw = _fields(_unpack(data, "a write plan"), ("version", *wanted), "a write plan")
    if raw["version"] != VERSION:
        raise UnsupportedFormatError(
            f"a write plan of version {raw['version']!r} was received, this is {VERSION}; "
            "all ranks must run the same version of dcphub"
        )
    budget = Budget(len(data))
    column = {name: decode_column(raw[name], budget) for name in wanted}
    ndims, rows = column.pop("ndims"), len(column["sources"])
    if not len(ndims) == len(column["chunks"]) == len(column["shares"]) == rows or (ndims < 0).any():
        raise CheckpointFormatError("a write plan's columns disagree in length")
    if (ndims > 64).any() or any(len(column[name]) != int(ndims.sum()) for name in _WRITE_BOXES):
        raise CheckpointFormatError("a write plan's boxes have the wrong number of dimensions")
    if len(column["objects"]) != len(column["object_rows"]):
        raise CheckpointFormatError("a write plan's object columns disagree in length")
    shares = column["shares"]
    if (shares < -1).any() or (shares >= np.arange(rows)).any():
        raise CheckpointFormatError("a write plan shares a payload that is not written before")
    return WriteColumns(box_start=starts(ndims), **column)


_SET_COLUMNS = ("numbers", "items", "item_rows", "objects", "object_rows")


def encode_rank_sets(sets: RankSets) -> bytes:
    """Which rows a rank has to fold, as bytes."""
    return encode_within_budget(partial(_encode_sets, sets))


def _encode_sets(sets: RankSets, encoder: ColumnEncoder) -> bytes:
    columns = (
        sets.numbers,
        np.diff(sets.item_start),
        sets.item_rows,
        np.diff(sets.object_start),
        sets.object_rows,
    )
    return _pack({name: encoder.column(column) for name, column in zip(_SET_COLUMNS, columns, strict=True)})


def decode_rank_sets(data: bytes, *, items: int, objects: int) -> RankSets:
    """The inverse of `encode_rank_sets` on a rank of ``items`` and ``objects`` rows; raises
    CheckpointFormatError for what no coordinator sends."""
    raw = _fields(_unpack(data, "a fold plan"), _SET_COLUMNS, "a fold plan")
    budget = Budget(len(data))
    column = {name: decode_column(raw[name], budget) for name in _SET_COLUMNS}
    for counts, rows, limit in (("items", "item_rows", items), ("objects", "object_rows", objects)):
        if len(column[counts]) != len(column["numbers"]) or (column[counts] < 0).any():
            raise CheckpointFormatError("a fold plan's columns disagree in length")
        if int(column[counts].sum()) != len(column[rows]):
            raise CheckpointFormatError("a fold plan's rows do not fit its sets")
        if (column[rows] < 0).any() or (column[rows] >= limit).any():
            raise CheckpointFormatError("a fold plan names a row that the rank does not have")
    return RankSets(
        numbers=column["numbers"],
        item_start=starts(column["items"]),
        item_rows=column["item_rows"],
        object_start=starts(column["objects"]),
        object_rows=column["object_rows"],
    )
