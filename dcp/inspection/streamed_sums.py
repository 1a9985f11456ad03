"""Digests from what a verification reads anyway: the bytes of payloads, in blocks and by several threads."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from dcp.storage.digests.boxes import blocks_of
from dcp.storage.digests.field import BLOCK_BYTES, power, product
from dcp.storage.digests.places import LogicalPlaces
from dcp.storage.digests.runs import KEY, run_value
from dcp.storage.digests.shown import SUM_BYTES
from dcp.storage.engine.memory import item_view
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.registry import is_of_files
from dcp.storage.geometry.ragged import gather_rows, row_products

__all__ = ["StreamedSums"]


class StreamedSums:
    """The sums of the tensors each of whose chunks is a run of its bytes, and is stored for itself.

    Of others, as those cut by columns and tied ones, `sums` has none: they are read again.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        tensors = index.chunk_tensors
        places = LogicalPlaces(
            index.box_start,
            gather_rows(index.shape_values, index.shape_start, tensors),
            index.chunk_offsets,
            index.chunk_sizes,
            index.itemsizes[tensors],
        )
        self._firsts = item_view(places.firsts)
        self._tensors = item_view(tensors)
        sizes = row_products(index.shape_values, index.shape_start)
        volumes = np.zeros_like(sizes)
        np.add.at(volumes, tensors, places.volumes)
        is_streamed = volumes == sizes
        is_fit = (places.is_run & _are_own(index)) | (index.payload_lengths == 0)
        is_streamed[tensors[~is_fit]] = False
        self._blocks = [blocks_of(size) for size in (sizes * index.itemsizes).tolist()]
        self._sums = dict.fromkeys(np.flatnonzero(is_streamed).tolist(), 0)
        self._lock = threading.Lock()
        self.left_bytes = int((sizes * index.itemsizes)[~is_streamed].sum(dtype=np.float64))
        """Of the tensors that it has no sums of."""

    @property
    def sums(self) -> dict[int, bytes]:
        """The sums by tensor row, once all payloads were read."""
        return {row: total.to_bytes(SUM_BYTES, "big") for row, total in self._sums.items()}

    def add(self, chunk: int, begin: int, data: memoryview) -> None:
        """The bytes of a chunk's payload from ``begin`` on."""
        row = self._tensors[chunk]
        if row not in self._sums or not len(data):
            return
        first = self._firsts[chunk] + begin
        value = run_value(data, first % BLOCK_BYTES)
        behind = self._blocks[row] - blocks_of(first + len(data))
        if behind:
            value = product(power(KEY, behind), value)
        with self._lock:
            self._sums[row] ^= value


def _are_own(index: CheckpointIndex) -> npt.NDArray[np.bool_]:
    """Chunks whose record is no other one's, and whose payload, C-ordered, is where that is read."""
    known: npt.NDArray[np.bool_] = index.payload_offsets != UNKNOWN
    filled = np.flatnonzero(index.payload_lengths)
    if not len(filled):
        return known
    stored = np.stack([index.chunk_files[filled], index.record_offsets[filled]])
    _, number, count = np.unique(stored, axis=1, return_inverse=True, return_counts=True)
    known[filled] &= count[number.reshape(-1)] == 1
    known[[*index.payload_strides]] = False
    if is_of_files(index.format):  # whole storages are read there
        known &= index.payload_lengths == index.record_lengths
    return known
