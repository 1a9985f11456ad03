"""What can be asked of the read engine, and what it tells of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp.storage.formats.index import Int64

__all__ = ["BoxRequest", "ByteRuns", "PutBox", "ReadStats", "Region", "Verify"]

Verify = Literal["blocks", "full", "none"]
"""``blocks``: check every block that is read whole. ``full``: also read the rest of blocks that are needed
only in part, and check them. ``none``: check nothing."""


@dataclass(frozen=True, eq=False)
class ByteRuns:
    """Contiguous pieces: ``size_bytes`` from position ``payload_positions`` of a chunk's payload to
    ``addresses``."""

    chunks: Int64
    payload_positions: Int64
    sizes_bytes: Int64
    addresses: Int64

    @classmethod
    def joined(cls, several: Sequence[ByteRuns]) -> ByteRuns:
        """All of ``several``, of which there is at least one."""
        if len(several) == 1:
            return several[0]
        columns = zip(
            *((r.chunks, r.payload_positions, r.sizes_bytes, r.addresses) for r in several), strict=True
        )
        return cls(*map(np.concatenate, columns))

    def take(self, rows: npt.NDArray[np.generic] | slice) -> ByteRuns:
        """Those at ``rows``."""
        return ByteRuns(
            self.chunks[rows], self.payload_positions[rows], self.sizes_bytes[rows], self.addresses[rows]
        )


@dataclass(frozen=True, slots=True)
class Region:
    """A box of chunk ``chunk`` (``offsets``, ``lengths`` within the chunk) to memory at ``address``.

    ``strides`` are the destination's, in bytes.
    """

    chunk: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    address: int
    strides: tuple[int, ...]


PutBox: TypeAlias = Callable[[tuple[int, ...], "npt.NDArray[Any]"], None]
"""Takes a part of a box: its offsets within the box, and its elements, as unsigned integers of their size (or
complex numbers for 16 bytes), unaligned and strided, in memory that is used again afterwards. Called from any
thread, once for each part."""


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """A box of chunk ``chunk`` (``offsets``, ``lengths`` within the chunk) that is handed out in parts."""

    chunk: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    put: PutBox


@dataclass
class ReadStats:
    """What a read cost: bytes asked for, bytes fetched from storage, blocks checked and not checked."""

    bytes_needed: int = 0
    bytes_read: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0

    def add(self, other: ReadStats) -> None:
        """Sum up another thread's figures."""
        self.bytes_needed += other.bytes_needed
        self.bytes_read += other.bytes_read
        self.blocks_verified += other.blocks_verified
        self.blocks_unverified += other.blocks_unverified
