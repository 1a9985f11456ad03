"""Fields of the manifest's maps by name: CheckpointFormatError for what is missing, or is something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats.index import Int64
from dcp.storage.formats.native.column_codec import Budget, decode_column
from dcp.storage.formats.plain import encode_plain

__all__ = [
    "MAX_PLAIN_SECTION_BYTES",
    "get_column",
    "get_crc",
    "get_field",
    "get_section",
    "get_small",
    "get_text",
    "narrow",
    "plain_section",
]

MAX_PLAIN_SECTION_BYTES: Final = 64 << 20
"""Limit of planner data, provenance and user metadata each."""


def get_section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A map."""
    section = get_field(fields, name)
    if not isinstance(section, dict):
        raise CheckpointFormatError(f"{name} of the manifest is not a map")
    return section


def get_field(fields: Mapping[str, Any], name: str) -> Any:
    """A value of any kind."""
    if name not in fields:
        raise CheckpointFormatError(f"the manifest lacks {name}")
    return fields[name]


def get_text(fields: Mapping[str, Any], name: str) -> str:
    """A string."""
    value = get_field(fields, name)
    if not isinstance(value, str):
        raise CheckpointFormatError(f"{name} of the manifest is not a string")
    return value


def get_column(section: Mapping[str, Any], name: str, rows: int, budget: Budget) -> Int64:
    """A column of so many rows."""
    column = decode_column(get_field(section, name), budget)
    if len(column) != rows:
        raise CheckpointFormatError(f"column {name} of the manifest has {len(column)} rows, not {rows}")
    return column


def get_small(
    section: Mapping[str, Any], name: str, dtype: Any, rows: int, budget: Budget
) -> npt.NDArray[Any]:
    """A column of so many rows, as a narrower type."""
    return narrow(get_column(section, name, rows, budget), name, dtype)


def narrow(column: Int64, name: str, dtype: Any) -> npt.NDArray[Any]:
    """A column as a narrower type, which it must fit."""
    if len(column) and (int(column.min()) < 0 or int(column.max()) > np.iinfo(dtype).max):
        raise CheckpointFormatError(f"column {name} of the manifest is out of range")
    return column.astype(dtype)


def get_crc(fields: Mapping[str, Any], name: str) -> int | None:
    """A CRC-32, or None."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= 0xFFFFFFFF):
        raise CheckpointFormatError(f"{name} of the manifest is not a CRC-32")
    return value


def plain_section(value: Any, what: str) -> bytes:
    """Plain data, encoded; PlanError for other."""
    encoded = encode_plain(value, limit_bytes=MAX_PLAIN_SECTION_BYTES)
    if encoded is None:
        raise PlanError(
            f"{what} cannot be stored in the manifest: it holds something else than None, bool, int, float, "
            f"complex, str, bytes, list, tuple and dict, or more than {MAX_PLAIN_SECTION_BYTES >> 20} MiB"
        )
    return encoded
