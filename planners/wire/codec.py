"""Plan columns as bytes, for the way between ranks.

Names, shapes and paths, which are mostly equal on all ranks, are sections of their own with equal bytes for
equal content: a cache shared by the decoding of many plans decodes each once, and equal sections come back as
one object.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from dcp.planners.columns import RankSets, SaveColumns, SaveObjects
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.formats.container_notes import decode_notes, encode_notes
from dcp.storage.packing import pack, unpack

__all__ = [
    "SectionCache",
    "decode_rank_sets",
    "decode_save_columns",
    "decode_write_columns",
    "encode_rank_sets",
    "encode_save_columns",
    "encode_write_columns",
]

SectionCache = dict[bytes, Any]
"""Decoded sections by their bytes; lives as long as one global plan."""

_NAMES: Final = ("fqns", "dtype_codes", "requires_grad", "shape_start", "shape_values", "stride_orders")
_ITEMS: Final = tuple(each.name for each in fields(SaveColumns) if each.name.startswith("item_"))


def encode_save_columns(columns: SaveColumns) -> bytes:
    """One rank's save plan as bytes."""
    objects = columns.objects
    sections = (
        {name: getattr(columns, name) for name in _NAMES},
        objects.fqns,
        columns.planner_data,
        encode_notes(columns.notes),
        ([getattr(columns, name) for name in _ITEMS], objects.digests, objects.sizes),
    )
    return pack([pack(section) for section in sections])


def decode_save_columns(data: bytes, cache: SectionCache | None = None) -> SaveColumns:
    """The inverse of `encode_save_columns`; give all ranks' plans one ``cache``."""
    cache = cache if cache is not None else {}
    *shared, own = unpack(data)
    for section in shared:
        if section not in cache:
            cache[section] = unpack(section)
    names, object_names, paths, notes = (cache[section] for section in shared)
    items, digests, sizes = unpack(own)
    return SaveColumns(
        **names,
        **dict(zip(_ITEMS, items, strict=True)),
        objects=SaveObjects(object_names, digests, sizes),
        planner_data=paths,
        notes=decode_notes(notes),
    )


def encode_write_columns(columns: WriteColumns) -> bytes:
    """Return what one rank has to write, as bytes."""
    return _packed(columns)


def decode_write_columns(data: bytes) -> WriteColumns:
    """The inverse of `encode_write_columns`."""
    return WriteColumns(*unpack(data))


def encode_rank_sets(sets: RankSets) -> bytes:
    """Return which rows a rank has to fold, as bytes."""
    return _packed(sets)


def decode_rank_sets(data: bytes) -> RankSets:
    """The inverse of `encode_rank_sets`."""
    return RankSets(*unpack(data))


def _packed(columns: WriteColumns | RankSets) -> bytes:
    return pack([getattr(columns, each.name) for each in fields(columns)])
