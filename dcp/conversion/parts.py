"""What a part of a staged conversion did, as plain JSON: sizes, and checksums by the million.

Checksums go column by column, as differences from row to row, through zlib: neighbours' owners and positions
hardly differ, so that little more than the checksums themselves is left.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dcp.conversion.tasks import TaskResult
from dcp.storage.engine.reading.fragments import Fragment
from dcp.storage.errors import CheckpointFormatError

__all__ = ["PartResult"]

_COLUMNS: Final = 4
_MAX_BYTES: Final = 1 << 30


@dataclass
class PartResult:
    """Sizes, and the checksums of what was read and written; `to_json` and `of_json` are inverse."""

    part: int
    bytes_read: int = 0
    bytes_written: int = 0
    sources: list[Fragment] = field(default_factory=list)
    targets: list[Fragment] = field(default_factory=list)

    def add(self, result: TaskResult) -> None:
        """Take what one task did."""
        self.bytes_read += result.bytes_read
        self.bytes_written += result.bytes_written
        self.sources += result.sources
        self.targets += result.targets

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "part": self.part,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "sources": _packed(self.sources),
            "targets": _packed(self.targets),
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> PartResult:
        """From plain data. Raises CheckpointFormatError for what `to_json` does not write."""
        return cls(
            data["part"],
            data["bytes_read"],
            data["bytes_written"],
            _unpacked(data["sources"]),
            _unpacked(data["targets"]),
        )


def _packed(fragments: list[Fragment]) -> str:
    rows = np.array(fragments, "<i8").reshape(-1, _COLUMNS)
    columns = np.diff(rows.T, axis=1, prepend=np.int64(0))
    return base64.b64encode(zlib.compress(columns.tobytes(), 6)).decode("ascii")


def _unpacked(text: str) -> list[Fragment]:
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text), _MAX_BYTES)
    if unpack.unconsumed_tail or len(data) % (8 * _COLUMNS):
        raise CheckpointFormatError("the checksums of a part of a conversion are damaged")
    columns = np.frombuffer(data, "<i8").reshape(_COLUMNS, -1)
    return [Fragment(*row) for row in np.cumsum(columns, axis=1).T.tolist()]
