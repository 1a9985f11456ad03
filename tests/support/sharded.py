"""Checkpoints with any sharding, written without ranks: each tensor is cut into given boxes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.engine.write import CHUNK_COLUMNS, DataFile
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.geometry.strides import starts
from dcp.storage.stores import PosixStore, Store

__all__ = ["ALL", "Boxes", "grid", "save_sharded", "tensor_bytes"]

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""(offsets, sizes) of each chunk."""

ALL: Boxes = ()
"""A single chunk with all elements."""


def grid(shape: Sequence[int], cuts: Sequence[int]) -> Boxes:
    """Cut ``shape`` into ``cuts[d]`` parts along each dimension; the first parts are larger."""
    edges = [
        [0, *itertools.accumulate(n // c + (i < n % c) for i in range(c))]
        for n, c in zip(shape, cuts, strict=True)
    ]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [
        (tuple(low for low, _ in box), tuple(high - low for low, high in box))
        for box in itertools.product(*spans)
    ]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def save_sharded(
    path: Path | Store, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Boxes], *, files: int = 4
) -> Path:
    """Save a checkpoint whose tensors are cut by ``boxes``; tensors without boxes stay whole."""
    store = path if isinstance(path, Store) else PosixStore(path)
    store.make_root()
    names = [f"__{number}_0.0badc0de.distcp" for number in range(files)]
    data = [DataFile(store, name, durable=False) for name in names]
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int]] = []
    for row, (fqn, tensor) in enumerate(tensors.items()):
        chosen = boxes.get(fqn) or [((0,) * tensor.ndim, tuple(tensor.shape))]
        for number, (offsets, sizes) in enumerate(chosen):
            part = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            file = data[number % files]
            content = tensor_bytes(part)
            code = dtypes.BY_NAME[str(tensor.dtype).removeprefix("torch.")].code
            file.tensor(code, sizes, len(content), (memoryview(content),))
            rows.append((row, offsets, sizes, number % files, len(file.chunks) // CHUNK_COLUMNS - 1))
    for file in data:
        file.finish()
    store.publish(MANIFEST_NAME, encode_manifest(_index(tensors, rows, data)), durable=False)
    return path if isinstance(path, Path) else Path(store.url)


def _index(
    tensors: Mapping[str, torch.Tensor],
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int]],
    data: list[DataFile],
) -> CheckpointIndex:
    tables = [np.array(file.chunks).reshape(-1, CHUNK_COLUMNS) for file in data]
    chunks = np.array([tables[file][at] for *_, file, at in rows], np.int64).reshape(-1, 5).T
    crcs: list[int] = []
    for *_, file, at in rows:
        begin = tables[file][:at, 4].sum()
        crcs += data[file].crcs[begin : begin + tables[file][at, 4]]
    counts = np.bincount([row for row, *_ in rows], minlength=len(tensors))
    codes = [dtypes.BY_NAME[str(tensor.dtype).removeprefix("torch.")].code for tensor in tensors.values()]
    return CheckpointIndex(
        format="dcp",
        fqns=list(tensors),
        dtype_codes=np.array(codes, dtype=np.uint8),
        shape_start=starts([tensor.ndim for tensor in tensors.values()]),
        shape_values=np.array([n for tensor in tensors.values() for n in tensor.shape], dtype=np.int64),
        requires_grad=np.zeros(len(tensors), np.uint8),
        chunk_start=starts(counts),
        chunk_offsets=np.array([o for _, offsets, *_ in rows for o in offsets], dtype=np.int64),
        chunk_sizes=np.array([n for _, _, sizes, *_ in rows for n in sizes], dtype=np.int64),
        chunk_files=np.array([file for *_, file, _ in rows], dtype=np.int64),
        record_offsets=chunks[0],
        record_lengths=chunks[1],
        payload_offsets=chunks[2],
        payload_lengths=chunks[3],
        crc_start=starts(chunks[4]),
        crcs=np.array(crcs, dtype=np.uint32),
        files=[file.name for file in data],
        file_sizes=np.array([file.size_bytes for file in data], dtype=np.int64),
    )
