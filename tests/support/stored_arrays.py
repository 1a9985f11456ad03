"""Numpy arrays in data files, as a save has them, and requests to read them back by the engine alone."""

from __future__ import annotations

import numpy as np

from dcp.storage.engine.reading.requests import ByteRuns, Region
from dcp.storage.engine.write import DataFile
from dcp.storage.formats.index import CheckpointIndex, starts
from dcp.storage.stores import Store

__all__ = ["no_runs", "region_of", "runs_of", "write_arrays"]

_CODES = {1: 5, 2: 7, 4: 8, 8: 9, 16: 13}


def write_arrays(store: Store, arrays: list[np.ndarray], name: str = "data.distcp") -> CheckpointIndex:
    """One data file with ``arrays``, and the index of it: a whole chunk each."""
    store.make_root()
    file = DataFile(store, name, durable=False)
    for array in arrays:
        file.tensor(_CODES[array.itemsize], array.shape, array.nbytes, (memoryview(array.tobytes()),))
    file.finish()
    rows, count = file.rows, len(arrays)
    sizes = np.array([n for array in arrays for n in array.shape], dtype=np.int64)
    ndims = [array.ndim for array in arrays]
    index = CheckpointIndex(
        format="dcp",
        fqns=[f"t{number}" for number in range(count)],
        dtype_codes=np.array([_CODES[array.itemsize] for array in arrays], dtype=np.uint8),
        requires_grad=np.zeros(count, np.uint8),
        shape_start=starts(ndims),
        shape_values=sizes,
        chunk_start=starts([1] * count),
        chunk_offsets=np.zeros(len(sizes), np.int64),
        chunk_sizes=sizes,
        chunk_files=np.zeros(count, np.int64),
        record_offsets=np.array(rows.record_offsets, dtype=np.int64),
        record_lengths=np.array(rows.record_lengths, dtype=np.int64),
        payload_offsets=np.array(rows.payload_offsets, dtype=np.int64),
        payload_lengths=np.array(rows.payload_lengths, dtype=np.int64),
        crc_start=starts(rows.crc_counts),
        crcs=np.array(rows.crcs, dtype=np.uint32),
        files=[name],
        file_sizes=np.array([file.size_bytes], dtype=np.int64),
    )
    index.check()
    return index


def region_of(chunk: int, target: np.ndarray, offsets: tuple[int, ...]) -> Region:
    """A region that fills ``target`` from ``offsets`` of a chunk."""
    return Region(chunk, offsets, target.shape, target.ctypes.data, target.strides)


def no_runs() -> ByteRuns:
    """Runs that ask for nothing."""
    return ByteRuns(*(np.zeros(0, np.int64) for _ in range(4)))


def runs_of(rows: list[tuple[int, int, np.ndarray]]) -> ByteRuns:
    """Runs that fill each array from a payload position (bytes) of a chunk on: (chunk, position, array)."""
    columns = [
        [chunk for chunk, _, _ in rows],
        [position for _, position, _ in rows],
        [target.nbytes for _, _, target in rows],
        [target.ctypes.data for _, _, target in rows],
    ]
    return ByteRuns(*(np.array(column, dtype=np.int64) for column in columns))
