"""Checksums of blocks that are read in several pieces: combined once the pieces are all there.

Pieces come in any order, from any thread or task, and more than once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp.storage.formats.checksums import BLOCK_BYTES, crc32_combine

__all__ = ["Fragment", "Fragments", "within_blocks"]


class Fragment(NamedTuple):
    """The CRC-32 of bytes ``begin`` to ``end`` of payload (or copy) number ``owner``; in one block of it."""

    owner: int
    begin: int
    end: int
    crc: int


def within_blocks(size_bytes: int, position: int, other: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of parts of ``size_bytes`` that lie in one block each: of the payload of which they
    are the bytes from ``position`` on, and of another one of which they are those from ``other`` on."""
    begin, shift = 0, 0 if other is None else other - position
    while begin < size_bytes:
        at = position + begin
        left = BLOCK_BYTES - max(at % BLOCK_BYTES, (at + shift) % BLOCK_BYTES)
        end = min(size_bytes, begin + left)
        yield begin, end
        begin = end


@dataclass(slots=True)
class _Block:
    """End and CRC-32 of each fragment, by its begin; positions count from the block's."""

    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    covered_bytes: int = 0
    is_complete: bool = False


class Fragments:
    """The blocks that are not read in one piece. Thread-safe.

    A block that comes in more than ``limit`` pieces is not worth combining.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._lock = threading.Lock()

    def add(self, fragment: Fragment, owner_bytes: int) -> int | None:
        """Return the CRC-32 of the fragment's block, once the first time that it is known; ``owner_bytes`` is
        the size of the payload. For a fragment that is a whole block it is returned each time."""
        owner, first, last, crc = fragment
        block, begin = divmod(first, BLOCK_BYTES)
        end = begin + last - first
        block_bytes = min(BLOCK_BYTES, owner_bytes - block * BLOCK_BYTES)
        if end - begin == block_bytes:
            known = self._blocks.get((owner, block))
            if known is not None:
                known.is_complete = True
            return crc
        with self._lock:
            known = self._blocks.setdefault((owner, block), _Block())
            if known.is_complete or begin in known.parts or len(known.parts) == self._limit:
                return None
            known.parts[begin] = end, crc
            known.covered_bytes += end - begin
            if known.covered_bytes < block_bytes:
                return None
            total = _combined(known.parts, block_bytes)
            known.is_complete = total is not None
            if known.is_complete:
                known.parts = {}
            return total

    def incomplete(self) -> list[tuple[int, int]]:
        """Return (owner, block) of those that have bytes which were not read."""
        with self._lock:
            return [key for key, block in self._blocks.items() if not block.is_complete]

    def end(self) -> int:
        """Forget all; return how many blocks have bytes that were not read."""
        count = len(self.incomplete()) if self._blocks else 0
        self._blocks.clear()
        return count


def _combined(parts: dict[int, tuple[int, int]], block_bytes: int) -> int | None:
    """Return the CRC-32 of the whole; None if the parts overlap instead of following one another."""
    position = total = 0
    while position < block_bytes:
        part = parts.get(position)
        if part is None:
            return None
        end, crc = part
        total = crc32_combine(total, crc, end - position) if position else crc
        position = end
    return total
