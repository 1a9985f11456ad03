"""Requests to readers, and the figures of their work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import array_at
from dcp.storage.geometry.strides import Int64

__all__ = [
    "BoxRequest",
    "ByteRuns",
    "Elements",
    "Pieces",
    "PutBox",
    "ReadStats",
    "Verify",
    "put_at",
]

Verify = Literal["blocks", "full", "none"]
"""``blocks``: check every block that is read whole. ``full``: also read the rest of blocks that are needed
only in part, and check them. ``none``: check nothing."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of stored chunks, and where they go.

    Row i copies the box at ``storage_offsets`` of extent ``lengths`` of chunk ``chunks[i]`` (a row of the
    index) to ``dest_offsets`` of local tensor number ``dests[i]``, for the wanted box ``boxes[i]``. Boxes are
    ragged, sliced by ``box_start``.
    """

    chunks: Int64
    boxes: Int64
    dests: Int64
    box_start: Int64
    storage_offsets: Int64
    dest_offsets: Int64
    lengths: Int64


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
        """Return all of ``several``, of which there is at least one."""
        if len(several) == 1:
            return several[0]
        columns = zip(
            *((r.chunks, r.payload_positions, r.sizes_bytes, r.addresses) for r in several), strict=True
        )
        return cls(*map(np.concatenate, columns))

    @classmethod
    def none(cls) -> ByteRuns:
        """No runs."""
        return cls(*np.zeros((4, 0), np.int64))

    def take(self, rows: npt.NDArray[np.generic] | slice) -> ByteRuns:
        """Return the rows at ``rows``."""
        return ByteRuns(
            self.chunks[rows], self.payload_positions[rows], self.sizes_bytes[rows], self.addresses[rows]
        )


class Elements(NamedTuple):
    """Elements of chunk ``chunk`` at regular steps: a box of it, or what a box of another shape has of it.

    ``lengths`` by axis, the payload's slowest first. The first one is at byte ``begin`` of the payload;
    ``strides`` are bytes of it, descending.
    """

    chunk: int
    begin: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]


PutBox: TypeAlias = Callable[[tuple[int, ...], "npt.NDArray[Any]"], None]
"""Takes a part of elements: its offsets by axis, and those elements, as unsigned integers of their size (or
complex numbers for 16 bytes), unaligned and strided, in memory that is used again afterwards. Called from any
thread, once for each part."""


class BoxRequest(NamedTuple):
    """``elements`` that are handed out in parts."""

    elements: Elements
    put: PutBox


def put_at(address: int, itemsize: int, strides: Sequence[int]) -> PutBox:
    """Puts elements into memory from ``address`` on; ``strides`` are bytes of that, by axis."""
    steps = tuple(strides)

    def put(offsets: tuple[int, ...], elements: npt.NDArray[np.generic]) -> None:
        first = address + sum(i * step for i, step in zip(offsets, steps, strict=True))
        np.copyto(array_at(first, itemsize, elements.shape, steps), elements)

    return put


@dataclass
class ReadStats:
    """The cost of a read: bytes asked for, bytes fetched from storage, blocks checked and not checked; and
    losses of conversions, by stored tensor."""

    bytes_needed: int = 0
    bytes_read: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    lossy: dict[str, str] = field(default_factory=dict)

    def add(self, other: ReadStats) -> None:
        """Sum up another thread's figures."""
        self.bytes_needed += other.bytes_needed
        self.bytes_read += other.bytes_read
        self.blocks_verified += other.blocks_verified
        self.blocks_unverified += other.blocks_unverified
        self.lossy |= other.lossy
