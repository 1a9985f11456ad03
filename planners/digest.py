"""Digests of tensor bytes, so that ranks can compare replicas without exchanging them.

A digest is 64 bits over the logical bytes (C order, whatever the strides): CRC-32 and Adler-32, which find
accidents, not forgeries. 0 is reserved for "not known".
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import adler32, crc32

__all__ = [
    "ReplicaCheck",
    "digest_bytes",
    "digest_tensors",
]

ReplicaCheck = Literal["sampled", "full", "off"]

WHOLE_LIMIT_BYTES = 64 << 10
"""Tensors up to this size are digested whole; of larger ones ``sampled`` takes as much in samples."""
SAMPLE_BYTES = 4 << 10
SAMPLES = WHOLE_LIMIT_BYTES // SAMPLE_BYTES

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ_ONLY = 0x100


def _memory(tensor: torch.Tensor) -> Any:
    """Read-only view of a contiguous CPU tensor's bytes, valid only while the caller holds the tensor."""
    return _memory_view(tensor.data_ptr(), tensor.nbytes, _READ_ONLY) if tensor.nbytes else b""


def _combine(crc: int, adler: int) -> int:
    return (adler << 32 | crc) or 1


def digest_bytes(data: Any) -> int:
    """Digest of a buffer, never 0."""
    return _combine(crc32(data), adler32(data))


def _fetched(tensors: Sequence[torch.Tensor], rows: Sequence[int], *, full: bool) -> list[torch.Tensor]:
    """What is compared of tensors of one device, as flat bytes on the host."""
    parts = [_reduced(tensors[row], full=full) for row in rows]
    host = torch.cat(parts).cpu() if len(parts) > 1 else parts[0].cpu()
    places = accumulate((part.numel() for part in parts), initial=0)
    return [host[begin:end] for begin, end in pairwise(places)]


def _digest_contiguous(tensor: torch.Tensor) -> int:
    return digest_bytes(_memory(tensor))


def _sample_starts(nbytes: int) -> list[int]:
    """Byte positions of the samples: head, tail and evenly between, on multiples of 16 (any item size)."""
    span = nbytes - SAMPLE_BYTES
    return [span * number // (SAMPLES - 1) // 16 * 16 for number in range(SAMPLES - 1)] + [span]


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The sampled elements as one contiguous tensor on the tensor's device; copies nothing else."""
    itemsize, length = tensor.itemsize, SAMPLE_BYTES // tensor.itemsize
    places = [start // itemsize for start in _sample_starts(tensor.nbytes)]
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.cat([flat[place : place + length] for place in places])
    positions = np.concatenate([np.arange(place, place + length) for place in places])
    index = np.unravel_index(positions, tuple(tensor.shape))
    return tensor[tuple(torch.from_numpy(part).to(tensor.device) for part in index)]


def _digest_host(tensor: torch.Tensor, *, full: bool) -> int:
    if not full and tensor.nbytes > WHOLE_LIMIT_BYTES:
        if not tensor.is_contiguous():
            return _digest_contiguous(_sampled(tensor))
        data = _memory(tensor)
        crc, adler = 0, 1
        for start in _sample_starts(tensor.nbytes):
            sample = data[start : start + SAMPLE_BYTES]
            crc, adler = crc32(sample, crc), adler32(sample, adler)
        return _combine(crc, adler)
    return _digest_contiguous(tensor if tensor.is_contiguous() else tensor.contiguous())


def _reduced(tensor: torch.Tensor, *, full: bool) -> torch.Tensor:
    """What of a device tensor has to come to the host, as flat bytes on the device."""
    part = tensor if full or tensor.nbytes <= WHOLE_LIMIT_BYTES else _sampled(tensor)
    return part.contiguous().view(-1).view(torch.uint8)


def digest_tensors(
    tensors: Sequence[torch.Tensor], check: ReplicaCheck = "sampled"
) -> npt.NDArray[np.uint64]:
    """Digest of each tensor; zeros with ``off``.

    Tensors on other devices are sampled there, and one copy a device brings the samples of all.
    """
    digests = np.zeros(len(tensors), np.uint64)
    if check == "off":
        return digests
    full = check == "full"
    elsewhere: dict[torch.device, list[int]] = defaultdict(list)
    with torch.no_grad():
        for row, tensor in enumerate(tensors):
            if tensor.is_cpu:
                digests[row] = _digest_host(tensor, full=full)
            elif tensor.nbytes:
                elsewhere[tensor.device].append(row)
            else:
                digests[row] = digest_bytes(b"")
        for rows in elsewhere.values():
            _digest_device(tensors, rows, digests, full=full)
    return digests


def _digest_device(
    tensors: Sequence[torch.Tensor], rows: Sequence[int], digests: npt.NDArray[np.uint64], *, full: bool
) -> None:
    # with "full" a joint copy could need the memory of the whole model again, so it goes tensor by tensor
    batches = [[row] for row in rows] if full else [rows]
    for batch in batches:
        for row, part in zip(batch, _fetched(tensors, batch, full=full), strict=True):
            digests[row] = _digest_contiguous(part)
