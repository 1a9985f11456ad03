"""Who holds what: the chunks of tensors by file and rank, from the index alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

import numpy as np

from dcp.server.catalog.values import clean_text
from dcp.server.records.contents import Chunk, RankShare, ShardedTensor
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex

__all__ = ["MAX_CHUNKS", "rank_of", "rank_shares", "sharded_tensors"]

MAX_CHUNKS: Final = 4096
"""Chunks of one tensor that are listed."""

_RANK_FILE: Final = re.compile(r"__([0-9]{1,9})_[0-9]+(?:\.[0-9A-Za-z-]+)?\.distcp")


def rank_of(file: str) -> int | None:
    """The rank that wrote a file, as its name says in checkpoints of ours and of stock DCP."""
    match = _RANK_FILE.fullmatch(file)
    return None if match is None else int(match[1])


def rank_shares(index: CheckpointIndex) -> list[RankShare]:
    """The shares by rank; what has none is the last."""
    ranks = [rank_of(name) for name in index.files]
    order = sorted(set(ranks), key=lambda rank: (rank is None, rank or 0))
    places = {rank: place for place, rank in enumerate(order)}
    by_file = np.array([places[rank] for rank in ranks], np.int64)
    by_chunk = by_file[index.chunk_files]
    sizes = np.zeros(len(order), np.int64)
    np.add.at(sizes, by_chunk, index.payload_lengths)
    pairs = np.unique(by_chunk * max(1, index.tensor_count) + index.chunk_tensors)
    chunks = np.bincount(by_chunk, minlength=len(order)).tolist()
    tensors = np.bincount(pairs // max(1, index.tensor_count), minlength=len(order)).tolist()
    shares = []
    for place, rank in enumerate(order):
        own = index.file_sizes[by_file == place]
        file_bytes = None if (own == UNKNOWN).any() else int(own.sum())
        shares.append(RankShare(rank, len(own), file_bytes, chunks[place], tensors[place], int(sizes[place])))
    return shares


def sharded_tensors(
    index: CheckpointIndex, *, after_row: int = -1, glob: str | None = None
) -> Iterator[tuple[int, ShardedTensor]]:
    """Tensors behind row ``after_row`` whose names match, with their rows, in the order of the index."""
    ranks = [rank_of(name) for name in index.files]
    for row in range(after_row + 1, index.tensor_count):
        fqn = index.fqns[row]
        if glob is not None and not fnmatchcase(fqn, glob):
            continue
        chunks = index.chunks(row)
        listed = tuple(_chunk(index, chunk, ranks) for chunk in chunks[:MAX_CHUNKS])
        yield (
            row,
            ShardedTensor(clean_text(fqn), index.dtype(row).name, index.shape(row), len(chunks), listed),
        )


def _chunk(index: CheckpointIndex, chunk: int, ranks: list[int | None]) -> Chunk:
    file = int(index.chunk_files[chunk])
    offsets, sizes = index.box(chunk)
    at = int(index.payload_offsets[chunk])
    return Chunk(
        ranks[file],
        clean_text(index.files[file]),
        offsets,
        sizes,
        int(index.payload_lengths[chunk]),
        None if at == UNKNOWN else at,
    )
