"""Files of torch.save as indexes, and plain readers of the tensors described by an index."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import torch

from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.torch.structure import index_of_torch_file
from tests.support.harmless_values import same


def saved(value: Any) -> bytes:
    """Return the bytes of stock torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def reader(data: bytes, log: list[tuple[int, int]] | None = None) -> Callable[[int, int], bytes]:
    """Return a function that reads ranges of ``data``, and never beyond its end."""

    def read(offset: int, length: int) -> bytes:
        assert offset >= 0 and offset + length <= len(data), (offset, length, len(data))
        if log is not None:
            log.append((offset, length))
        return data[offset : offset + length]

    return read


def index_of(data: bytes, name: str = "model.pt") -> CheckpointIndex:
    """Return the index of a file in memory."""
    return index_of_torch_file(reader(data), len(data), name)


def tensor_at(index: CheckpointIndex, data: bytes, row: int) -> torch.Tensor:
    """Return a tensor as described by the index."""
    dtype = getattr(torch, index.dtype(row).name)
    shape = index.shape(row)
    begin, length = int(index.payload_offsets[row]), int(index.payload_lengths[row])
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data[begin : begin + length]), dtype=torch.uint8).view(dtype)
    strides = index.payload_strides.get(row)
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def assert_same(got: Any, wanted: Any) -> None:
    """Check that types, structure, order, dtypes and bits are equal."""
    assert same(got, wanted), (got, wanted)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in C order, as bytes."""
    dense = tensor.detach().contiguous()
    return b"" if not dense.numel() else bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
