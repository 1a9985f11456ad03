"""Small runs that lie closely in a file: read as one, checked and handed out one after the other.

A checkpoint may have many thousands of them, so they are found with arrays, and nothing is made for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import GATHERED_BYTES, copy_small, gather_small, scatter_small
from dcp.storage.engine.reading.coalescing.neighbours import coalesce_columns
from dcp.storage.engine.reading.requests import ByteRuns
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_rows
from dcp.storage.formats.index import Int64

__all__ = ["Cluster", "PlacedRuns", "split_off_clusters"]


_ALIKE_FROM = 8
"""Runs of one small size from which on they are copied together."""


@dataclass(frozen=True, eq=False)
class PlacedRuns:
    """Runs and where their bytes are in the files, in that order."""

    files: Int64
    offsets: Int64
    runs: ByteRuns

    @classmethod
    def of(cls, runs: ByteRuns, chunk_files: Int64, payload_offsets: Int64) -> PlacedRuns:
        """Runs of chunks whose payloads are resolved; without those that have no bytes."""
        files = chunk_files[runs.chunks]
        offsets = payload_offsets[runs.chunks] + runs.payload_positions
        order = np.lexsort((runs.sizes_bytes, offsets, files))
        return cls(files, offsets, runs).take(order[runs.sizes_bytes[order] > 0])

    def take(self, rows: npt.NDArray[np.generic] | slice) -> PlacedRuns:
        """The rows at ``rows``."""
        return PlacedRuns(self.files[rows], self.offsets[rows], self.runs.take(rows))

    def tuples(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(file, offset, size, chunk, payload position, address) of each."""
        runs = self.runs
        columns = (runs.sizes_bytes, runs.chunks, runs.payload_positions, runs.addresses)
        places = (self.files, self.offsets, *columns)
        return zip(*(column.tolist() for column in places), strict=True)


@dataclass(frozen=True, eq=False)
class Cluster:
    """Runs that lie in bytes ``begin`` to ``end`` of a file, each in one block of its payload."""

    file: int
    begin: int
    end: int
    members: PlacedRuns

    def copy_out(self, address: int, data: memoryview | None = None) -> npt.NDArray[np.uint32]:
        """Copy the runs out of the cluster's bytes at ``address``; their CRC-32, given these as ``data``."""
        runs = self.members.runs
        begins, sizes, targets = self.members.offsets - self.begin, runs.sizes_bytes, runs.addresses
        crcs = np.zeros(len(begins), np.uint32)
        one_by_one = np.ones(len(begins), np.bool_)
        for size in np.unique(sizes[sizes <= GATHERED_BYTES]).tolist():
            alike = np.flatnonzero(sizes == size)
            if len(alike) < _ALIKE_FROM:
                continue
            rows = gather_small(address + begins[alike], size)
            if data is not None:
                crcs[alike] = crc32_rows(rows)
            scatter_small(targets[alike], rows)
            one_by_one[alike] = False
        left = np.flatnonzero(one_by_one)
        columns = (left, begins[left], sizes[left], targets[left])
        for row, begin, size, target in zip(*(column.tolist() for column in columns), strict=True):
            if data is not None:
                crcs[row] = crc32(data[begin : begin + size])
            copy_small(target, address + begin, size)
        return crcs


def split_off_clusters(
    placed: PlacedRuns, is_small: npt.NDArray[np.bool_], *, gap_bytes: int, limit_bytes: int
) -> tuple[list[Cluster], PlacedRuns]:
    """(clusters of at most ``limit_bytes``, the other runs).

    Only runs that ``is_small`` names, and that lie in one block of their payload, get into clusters. Gaps up
    to ``gap_bytes`` between them are read for nothing. Runs that share bytes with their neighbours stay
    alone.
    """
    offsets, runs = placed.offsets, placed.runs
    ends = offsets + runs.sizes_bytes
    positions, last = runs.payload_positions, runs.payload_positions + runs.sizes_bytes - 1
    usable = is_small & (positions // BLOCK_BYTES == last // BLOCK_BYTES)
    first = coalesce_columns(
        placed.files, offsets, ends, usable, gap_bytes=gap_bytes, limit_bytes=limit_bytes
    )
    counts = np.diff(np.append(first, len(offsets)))
    several = counts > 1
    clusters = []
    for begin, count in zip(first[several].tolist(), counts[several].tolist(), strict=True):
        members = placed.take(slice(begin, begin + count))
        end = int(ends[begin + count - 1])
        clusters.append(Cluster(int(members.files[0]), int(members.offsets[0]), end, members))
    return clusters, placed.take(~np.repeat(several, counts))
