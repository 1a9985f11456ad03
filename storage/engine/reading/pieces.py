"""Requests for what is wanted: runs and boxes as pieces of files, joined.

One request is read at once: large pieces straight into their destination, the rest through scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from operator import itemgetter

import numpy as np

from dcp.storage.engine.memory import item_dtype, view
from dcp.storage.engine.reading.coalescing import (
    CHEAP_GAP_BYTES,
    COPIED_BELOW_BYTES,
    NO_CHUNK,
    Cluster,
    Copy,
    JoinedRequest,
    PlacedRuns,
    RequestPiece,
    join,
    split_off_clusters,
)
from dcp.storage.engine.reading.requests import BoxRequest, ByteRuns, PutBox
from dcp.storage.engine.reading.source import ReadSource
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.geometry.payload_parts import BoxPart, box_parts, reaches

__all__ = ["requests_for"]

_LEAST_REQUEST_BYTES = 4 << 20

_CLUSTERS_PER_REQUEST = 8
"""Clusters are not divided between requests, so that a request may be short of full by one."""

_SPARSE_GAP_BYTES = 512 << 10
"""Rows of a box that lie farther apart than this on a disk are read one by one."""


def requests_for(
    source: ReadSource, runs: ByteRuns, boxes: Iterable[BoxRequest], needed_bytes: int, threads: int
) -> tuple[list[JoinedRequest], list[Copy]]:
    """The requests for ``runs`` and ``boxes``; smaller ones than the store likes where that keeps all threads
    busy."""
    profile = source.profile
    share = -(-needed_bytes // threads)
    request_bytes = min(profile.request_bytes, max(_LEAST_REQUEST_BYTES, share))
    # not much less than a block, or checksums would have to be combined from many parts
    copied_bytes = min(request_bytes, max(_LEAST_REQUEST_BYTES, profile.join_below_bytes))
    clusters, others = _clusters(source, runs, copied_bytes)
    pieces = []
    for cluster in clusters:
        size = cluster.end - cluster.begin
        pieces.append(RequestPiece(cluster.file, cluster.begin, size, NO_CHUNK, 0, 0, cluster))
    pieces += _run_pieces(source, others)
    # on a disk as much as scratch memory has anyway, so that fewer blocks are in two parts
    box_bytes = copied_bytes if profile.scatter else 2 * BLOCK_BYTES
    for box in boxes:
        pieces += _box_pieces(source, box, box_bytes)
    pieces.sort(key=itemgetter(0, 1, 2))
    return join(pieces, profile, request_bytes)


def _clusters(source: ReadSource, runs: ByteRuns, copied_bytes: int) -> tuple[list[Cluster], PlacedRuns]:
    """Runs that are to be copied anyway, and follow one another so closely that one request reads them."""
    placed = PlacedRuns.of(runs, source.index.chunk_files, source.payloads.offsets)
    profile = source.profile
    is_small = placed.runs.sizes_bytes < min(COPIED_BELOW_BYTES, profile.join_below_bytes)
    if source.verify == "full":
        is_small &= placed.runs.sizes_bytes == source.index.payload_lengths[placed.runs.chunks]
    return split_off_clusters(
        placed,
        is_small,
        gap_bytes=min(CHEAP_GAP_BYTES, profile.gap_bytes),
        limit_bytes=copied_bytes // _CLUSTERS_PER_REQUEST if profile.scatter else copied_bytes,
    )


def _run_pieces(source: ReadSource, placed: PlacedRuns) -> Iterator[RequestPiece]:
    for place in placed.tuples():
        piece = RequestPiece(*place, None)
        if source.verify == "full":
            yield from _with_whole_blocks(piece, source.payload_lengths[piece.chunk])
        else:
            yield piece


def _with_whole_blocks(piece: RequestPiece, payload_bytes: int) -> Iterator[RequestPiece]:
    """``piece``, and the rest of the blocks that it has only a part of."""
    if piece.size_bytes == payload_bytes:
        yield piece
        return
    origin = piece.offset - piece.position
    begin, end = piece.position, piece.position + piece.size_bytes
    while begin < end:
        block = begin // BLOCK_BYTES * BLOCK_BYTES
        block_end = min(block + BLOCK_BYTES, payload_bytes)
        address = piece.address + begin - piece.position
        if begin == block and end >= block_end:
            stop = end if end == payload_bytes else end // BLOCK_BYTES * BLOCK_BYTES
            yield RequestPiece(piece.file, origin + begin, stop - begin, piece.chunk, begin, address, None)
        else:
            stop = min(end, block_end)
            put = partial(_put_part, address, begin - block, stop - block)
            yield RequestPiece(piece.file, origin + block, block_end - block, piece.chunk, block, 0, put)
        begin = stop


def _put_part(address: int, begin: int, end: int, data: memoryview) -> None:
    view(address, end - begin)[:] = data[begin:end]


def _box_pieces(source: ReadSource, box: BoxRequest, limit_bytes: int) -> Iterator[RequestPiece]:
    chunk, begin, lengths, strides = box.elements
    gap_bytes = source.profile.gap_bytes if source.profile.scatter else _SPARSE_GAP_BYTES
    itemsize = source.itemsize(chunk)
    parts = [*box_parts(begin, lengths, strides, itemsize, limit_bytes=limit_bytes, gap_bytes=gap_bytes)]
    file, origin = int(source.index.chunk_files[chunk]), source.payloads.offset(chunk)
    overlap = any(after.begin < part.end for part, after in pairwise(parts))
    if source.verify == "none" or overlap:
        reached: Iterable[tuple[int, int]] = ((part.begin, part.end) for part in parts)
    else:
        payload_bytes = source.payload_lengths[chunk]
        reached = reaches(parts, payload_bytes, gap_bytes=gap_bytes, whole_blocks=source.verify == "full")
    dtype = item_dtype(itemsize)
    for part, (first, end) in zip(parts, reached, strict=True):
        take = partial(_put_elements, box.put, part, dtype, part.begin - first, strides)
        yield RequestPiece(file, origin + first, end - first, chunk, first, 0, take)


def _put_elements(
    put: PutBox,
    part: BoxPart,
    dtype: np.dtype[np.generic],
    at: int,
    strides: tuple[int, ...],
    data: memoryview,
) -> None:
    put(part.offsets, np.ndarray(part.lengths, dtype, data, at, strides))
