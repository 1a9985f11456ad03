"""What one rank shall write of a save, and what it wrote: tables that travel between coordinator and rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgpack
import numpy as np
import numpy.typing as npt

from dcp.storage.formats.index import Int64, itemsizes
from dcp.storage.geometry.ragged import row_products

__all__ = ["WriteColumns", "WriteOutcome"]


@dataclass(frozen=True, eq=False)
class WriteColumns:
    """What one rank has to write, in the order of its file.

    Row i is a box of local tensor number ``sources[i]``: where it begins and its extent are the values of
    ``local_offsets`` and ``sizes`` from ``box_start[i]`` on. ``chunks`` is the chunk's row in the
    checkpoint's index. ``shares`` is the row (in these columns) whose payload this one shares, -1 for an own
    one. ``objects`` are rows of the rank's values to write, ``object_rows`` their rows in the index.
    """

    sources: Int64
    box_start: Int64
    sizes: Int64
    local_offsets: Int64
    chunks: Int64
    shares: Int64
    objects: Int64
    object_rows: Int64

    @cached_property
    def own_rows(self) -> Int64:
        """The rows that are written."""
        return np.flatnonzero(self.shares < 0)

    def payload_bytes(self, dtype_codes: npt.NDArray[np.uint8]) -> Int64:
        """Bytes of each row; ``dtype_codes`` are those of the local tensors."""
        return row_products(self.sizes, self.box_start) * itemsizes(dtype_codes[self.sources])

    def of_row(self, values: Int64, row: int) -> tuple[int, ...]:
        """A row's part of ``sizes`` or ``local_offsets``."""
        return tuple(values[self.box_start[row] : self.box_start[row + 1]].tolist())


@dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """Where one rank's chunks and objects ended up; what the coordinator needs for the index.

    Row i of the chunk columns belongs to row i of the rank's write plan. ``crc_counts`` says how many of
    ``crcs`` are row i's. ``files`` are indexed by ``chunk_files`` and ``object_files``. ``traffic`` is what
    the rank asked of the storage's service, as `Store.traffic` has it. ``digests`` are two words a row, what
    it adds to its tensor's sum, and ``has_digests`` says of which rows that is known; empty if of none.
    """

    files: list[str] = field(default_factory=list)
    file_sizes: list[int] = field(default_factory=list)
    chunk_files: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    record_offsets: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    record_lengths: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    payload_offsets: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    payload_lengths: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    crc_counts: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    crcs: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    has_digests: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    object_files: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    object_offsets: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    object_lengths: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    object_crcs: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    object_values: list[bytes | None] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)

    _ARRAYS = (
        ("chunk_files", "<i8"),
        ("record_offsets", "<i8"),
        ("record_lengths", "<i8"),
        ("payload_offsets", "<i8"),
        ("payload_lengths", "<i8"),
        ("crc_counts", "<i8"),
        ("crcs", "<u4"),
        ("digests", "<u8"),
        ("has_digests", "|u1"),
        ("object_files", "<i8"),
        ("object_offsets", "<i8"),
        ("object_lengths", "<i8"),
        ("object_crcs", "<i8"),
    )

    def encode(self) -> bytes:
        """Packed bytes for the way to the coordinator."""
        columns = {
            name: np.asarray(getattr(self, name)).astype(kind).tobytes() for name, kind in self._ARRAYS
        }
        plain = ("files", "file_sizes", "object_values", "seconds", "traffic")
        lists = {name: getattr(self, name) for name in plain}
        return bytes(msgpack.packb(columns | lists))

    @classmethod
    def decode(cls, data: bytes) -> WriteOutcome:
        """The inverse of `encode`."""
        fields = msgpack.unpackb(data)
        for name, kind in cls._ARRAYS:
            fields[name] = np.frombuffer(fields[name], dtype=kind)
        return cls(**fields)
