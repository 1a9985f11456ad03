"""Checksums of blocks that are read in several pieces: combined once the pieces are all there."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from dcp.storage.formats.checksums import crc32_combine

__all__ = ["Fragments"]

_MAX_FRAGMENTS = 64
"""A block that is read in more pieces than this is not worth combining."""


@dataclass(slots=True)
class _Block:
    """End and CRC-32 of each fragment, by its begin; positions count from the block's."""

    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    covered_bytes: int = 0
    is_complete: bool = False


class Fragments:
    """What is known of blocks that nobody read in one piece. Thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._lock = threading.Lock()

    def add(self, chunk: int, block: int, begin: int, end: int, crc: int, block_bytes: int) -> int | None:
        """Note the CRC-32 of bytes ``begin`` to ``end`` of a block; the whole block's once they are all."""
        with self._lock:
            known = self._blocks.setdefault((chunk, block), _Block())
            if known.is_complete or begin in known.parts or len(known.parts) == _MAX_FRAGMENTS:
                return None
            known.parts[begin] = end, crc
            known.covered_bytes += end - begin
            if known.covered_bytes < block_bytes:
                return None
            total = _combined(known.parts, block_bytes)
            known.is_complete = total is not None
            return total

    def take_incomplete(self) -> int:
        """How many blocks have bytes that nobody read; forgets all."""
        with self._lock:
            count = sum(not block.is_complete for block in self._blocks.values())
            self._blocks.clear()
            return count


def _combined(parts: dict[int, tuple[int, int]], block_bytes: int) -> int | None:
    """The CRC-32 of the whole; None if the parts overlap instead of following one another."""
    position = total = 0
    while position < block_bytes:
        part = parts.get(position)
        if part is None:
            return None
        end, crc = part
        total = crc32_combine(total, crc, end - position)
        position = end
    return total
