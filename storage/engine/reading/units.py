"""What a thread does in one go, where a read is cheap: runs and regions as units of about 16 MiB."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dcp.storage.engine.reading.coalescing.clusters import Cluster, PlacedRuns, split_off_clusters
from dcp.storage.engine.reading.fragments import within_blocks
from dcp.storage.engine.reading.requests import ByteRuns, Elements, StridedRegion
from dcp.storage.engine.reading.source import ReadSource
from dcp.storage.engine.reading.worker import MAX_CLUSTER_BYTES, ReadWorker
from dcp.storage.formats.checksums import BLOCK_BYTES

__all__ = ["Unit", "region_units", "run_units"]

_UNIT_BYTES = 16 << 20

Unit = Callable[[ReadWorker], None]


def run_units(source: ReadSource, runs: ByteRuns) -> Iterator[Unit]:
    """Runs: small ones that lie closely by one read, large ones where they belong, block by block."""
    placed = PlacedRuns.of(runs, source.index.chunk_files, source.payloads.offsets)
    profile = source.profile
    small_bytes = min(profile.join_below_bytes, BLOCK_BYTES)
    is_small = placed.runs.sizes_bytes <= small_bytes
    if source.verify == "full":
        is_small &= placed.runs.sizes_bytes == source.index.payload_lengths[placed.runs.chunks]
    clusters, others = split_off_clusters(
        placed,
        is_small,
        gap_bytes=profile.gap_bytes,
        limit_bytes=min(profile.request_bytes, MAX_CLUSTER_BYTES),
    )
    yield from (partial(_cluster_unit, cluster) for cluster in clusters)
    batch: list[tuple[int, int, int, int]] = []
    batch_bytes = 0
    for _, _, size, chunk, position, address in others.tuples():
        for part in _split(chunk, position, size, address):
            batch.append(part)
            batch_bytes += part[2]
            if batch_bytes >= _UNIT_BYTES:
                yield _direct_unit(batch)
                batch, batch_bytes = [], 0
    if batch:
        yield _direct_unit(batch)


def region_units(source: ReadSource, regions: Sequence[StridedRegion]) -> Iterator[Unit]:
    """Regions, some of them at a time; a large one is divided."""
    batch: list[StridedRegion] = []
    batch_bytes = 0
    for region in regions:
        for part in _split_region(source, region):
            batch.append(part)
            batch_bytes += math.prod(part.elements.lengths) * source.itemsize(part.elements.chunk)
            if batch_bytes >= _UNIT_BYTES:
                yield _region_unit(batch)
                batch, batch_bytes = [], 0
    if batch:
        yield _region_unit(batch)


def _split_region(source: ReadSource, region: StridedRegion) -> Iterator[StridedRegion]:
    """Parts of about a unit's size along the axis that is slowest in the file, so that threads can share one
    large region."""
    chunk, begin, lengths, strides = region.elements
    size = math.prod(lengths) * source.itemsize(chunk)
    if size <= 2 * _UNIT_BYTES:
        yield region
        return
    slowest = next((axis for axis, length in enumerate(lengths) if length > 1), 0)
    length = lengths[slowest]
    rows = max(1, length * _UNIT_BYTES // size)
    for first in range(0, length, rows):
        own = (*lengths[:slowest], min(rows, length - first), *lengths[slowest + 1 :])
        part = Elements(chunk, begin + first * strides[slowest], own, strides)
        yield StridedRegion(part, region.address + first * region.strides[slowest], region.strides)


def _split(chunk: int, position: int, size: int, address: int) -> Iterator[tuple[int, int, int, int]]:
    """Parts of a run that end at block boundaries, about a quarter of a unit each."""
    for begin, end in within_blocks(size, position):
        yield chunk, position + begin, end - begin, address + begin


def _cluster_unit(cluster: Cluster, worker: ReadWorker) -> None:
    worker.read_cluster(cluster)


def _direct_unit(parts: list[tuple[int, int, int, int]]) -> Unit:
    def unit(worker: ReadWorker) -> None:
        for chunk, position, size, address in parts:
            worker.read_direct(chunk, position, size, address)

    return unit


def _region_unit(regions: list[StridedRegion]) -> Unit:
    def unit(worker: ReadWorker) -> None:
        for region in regions:
            worker.read_region(region)

    return unit
