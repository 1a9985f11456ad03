"""The manifest's planner data: how nested containers were flattened, or what a custom planner left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain, compress, pairwise
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import Int64, starts
from dcp.storage.formats.native.column_codec import (
    Budget,
    ColumnEncoder,
    check_counts,
    decode_bytes,
    decode_column,
    decode_strings,
)
from dcp.storage.formats.native.manifest_fields import (
    MAX_PLAIN_SECTION_BYTES,
    get_column,
    get_field,
    plain_section,
)
from dcp.storage.formats.plain import decode_plain

__all__ = ["decode_planner_data", "encode_planner_data"]

_NAMES: Final = frozenset({str})
_TUPLES: Final = frozenset({tuple})
_PARTS: Final = frozenset({str, int})


def encode_planner_data(planner_data: Any, encoder: ColumnEncoder) -> dict[str, Any] | None:
    """The section of the manifest; PlanError for data that is not plain."""
    if planner_data is None:
        return None
    parts = _path_parts(planner_data)
    if parts is None:
        return {"plain": encoder.blob(plain_section(planner_data, "planner data"))}
    is_position, positions, keys = np.zeros(len(parts), np.bool_), [], parts
    if not _NAMES.issuperset(map(type, parts)):
        is_position = np.array([type(part) is int for part in parts], np.bool_)
        positions = list(compress(parts, is_position.tolist()))
        keys = list(compress(parts, (~is_position).tolist()))
    lengths = np.fromiter(map(len, planner_data.values()), np.int64, len(planner_data))
    return {
        "fqns": encoder.strings(list(planner_data)),
        "path_lengths": encoder.column(lengths),
        "is_position": encoder.column(is_position),
        "positions": encoder.column(np.array(positions, dtype=np.int64)),
        "keys": encoder.strings(keys),
    }


def _path_parts(planner_data: Any) -> list[Any] | None:
    """The parts of all paths, if this is what flattening leaves (fqn to path), which has a compact form."""
    if type(planner_data) is not dict:
        return None
    paths = planner_data.values()
    if not (_NAMES.issuperset(map(type, planner_data)) and _TUPLES.issuperset(map(type, paths))):
        return None
    parts = list(chain.from_iterable(paths))
    # By kinds, because there may be a million parts, and hardly any is a position.
    kinds = set(map(type, parts))
    positions = (part for part in parts if type(part) is int) if int in kinds else ()
    is_compact = kinds <= _PARTS and all(-(1 << 63) <= part < 1 << 63 for part in positions)
    return parts if is_compact else None


def decode_planner_data(section: Mapping[str, Any], left: Budget) -> Any:
    """What `encode_planner_data` was given, for as much memory as is ``left``."""
    budget = copy(left)  # two threads may ask at a time
    if "plain" in section:
        encoded = decode_bytes(section["plain"], budget)
        return decode_plain(encoded, limit_bytes=MAX_PLAIN_SECTION_BYTES)
    fqns = decode_strings(get_field(section, "fqns"), budget)
    lengths = get_column(section, "path_lengths", len(fqns), budget)
    is_position = decode_column(get_field(section, "is_position"), budget)
    check_counts(lengths, len(is_position), "path lengths")
    positions = decode_column(get_field(section, "positions"), budget)
    keys = decode_strings(get_field(section, "keys"), budget)
    if int(np.count_nonzero(is_position)) != len(positions) or len(is_position) != len(positions) + len(keys):
        raise CheckpointFormatError("paths of the manifest's planner data do not add up")
    return dict(zip(fqns, _paths(lengths, is_position, positions, keys), strict=True))


def _paths(
    lengths: Int64, is_position: Int64, positions: Int64, keys: Sequence[str]
) -> list[tuple[str | int, ...]]:
    flat: Sequence[str | int] = keys
    if len(positions):
        parts = np.empty(len(is_position), dtype=object)
        parts[is_position != 0] = positions.tolist()
        parts[is_position == 0] = keys
        flat = parts.tolist()
    if len(lengths) and (lengths == lengths[0]).all() and lengths[0]:
        return list(zip(*[iter(flat)] * int(lengths[0]), strict=True))
    bounds = starts(lengths).tolist()
    return [tuple(flat[begin:end]) for begin, end in pairwise(bounds)]
