"""The manifest's planner data: how nested containers were flattened, or what a custom planner left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.column_codec import (
    Budget,
    ColumnEncoder,
    check_counts,
    decode_bytes,
    decode_column,
    decode_strings,
)
from dcp.storage.formats.index import Int64, starts
from dcp.storage.formats.manifest_fields import (
    MAX_PLAIN_SECTION_BYTES,
    get_column,
    get_field,
    plain_section,
)
from dcp.storage.formats.plain import decode_plain

__all__ = ["decode_planner_data", "encode_planner_data"]


def encode_planner_data(planner_data: Any, encoder: ColumnEncoder) -> dict[str, Any] | None:
    """The section of the manifest; PlanError for data that is not plain."""
    if planner_data is None:
        return None
    if not _is_paths(planner_data):
        return {"plain": encoder.blob(plain_section(planner_data, "planner data"))}
    parts = [part for path in planner_data.values() for part in path]
    is_position = np.fromiter((type(part) is int for part in parts), dtype=np.uint8, count=len(parts))
    positions = [part for part in parts if type(part) is int]
    return {
        "fqns": encoder.strings(list(planner_data)),
        "path_lengths": encoder.column([len(path) for path in planner_data.values()]),
        "is_position": encoder.column(is_position),
        "positions": encoder.column(np.array(positions, dtype=np.int64)),
        "keys": encoder.strings([part for part in parts if type(part) is str]),
    }


def _is_paths(planner_data: Any) -> bool:
    """Whether this is what flattening leaves (fqn to path), which has a compact form."""
    if type(planner_data) is not dict:
        return False
    return all(
        type(fqn) is str and type(path) is tuple and all(_is_path_part(part) for part in path)
        for fqn, path in planner_data.items()
    )


def _is_path_part(part: Any) -> bool:
    return type(part) is str or (type(part) is int and -(1 << 63) <= part < 1 << 63)


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
    parts = np.empty(len(is_position), dtype=object)
    parts[is_position != 0] = positions.tolist()
    parts[is_position == 0] = keys
    flat, bounds = parts.tolist(), starts(lengths).tolist()
    return [tuple(flat[begin:end]) for begin, end in pairwise(bounds)]
