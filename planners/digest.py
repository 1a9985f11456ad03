"""Digests of tensor bytes, so that ranks can compare replicas without exchanging them.

A digest is 64 bits over the logical bytes (C order, whatever the strides), which find accidents, not
forgeries. 0 is reserved for "not known". The host's memory is read once, by CRC-32. Large tensors of other
devices stay there: blocks of 64 KiB are multiplied by fixed random numbers and summed, and the sums are
copied. The two kinds of digests cannot be compared with each other (`is_made_on_device`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import adler32, crc32

from dcp.storage.engine.memory import view

__all__ = [
    "ReplicaCheck",
    "block_sums",
    "digest_bytes",
    "digest_tensors",
    "is_made_on_device",
]

ReplicaCheck = Literal["sampled", "full", "off"]

WHOLE_LIMIT_BYTES = 64 << 10
"""Tensors up to this size are copied whole from any device; of larger ones ``sampled`` takes as much in
samples."""
SAMPLE_BYTES = 4 << 10
SAMPLES = WHOLE_LIMIT_BYTES // SAMPLE_BYTES

_CRC_BLOCK_BYTES: Final = 1 << 20
"""Adler-32 has a third of the speed of CRC-32, so it takes the CRCs of blocks instead of the bytes."""
_SUM_BLOCK_BYTES: Final = 64 << 10
_SUMMED_BYTES: Final = 32 << 20
"""At once, because the products take four times as much memory of the device."""
_WORD_BYTES: Final = 4
_FROM_DEVICE: Final = np.uint64(0xFFFF << 48)
"""No Adler-32 is that high."""


def _combine(crc: int, adler: int) -> int:
    return (adler << 32 | crc) or 1


def digest_bytes(data: Any) -> int:
    """Compute the digest of a buffer, never 0."""
    return _combine(crc32(data), adler32(data))


def is_made_on_device(digest: int) -> bool:
    """Test whether a digest is of a large tensor and was made on an accelerator."""
    return digest >= int(_FROM_DEVICE)


def _digest_contiguous(tensor: torch.Tensor) -> int:
    data = view(tensor.data_ptr(), tensor.nbytes)
    if tensor.nbytes <= WHOLE_LIMIT_BYTES:
        return digest_bytes(data)
    blocks = range(0, tensor.nbytes, _CRC_BLOCK_BYTES)
    return digest_bytes(np.array([crc32(data[at : at + _CRC_BLOCK_BYTES]) for at in blocks], "<u4"))


def _sample_starts(nbytes: int) -> list[int]:
    """Place the samples: head, tail and evenly between, on multiples of 16 (any item size)."""
    span = nbytes - SAMPLE_BYTES
    return [span * number // (SAMPLES - 1) // 16 * 16 for number in range(SAMPLES - 1)] + [span]


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the sampled elements to one contiguous tensor on the tensor's device."""
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
        data = view(tensor.data_ptr(), tensor.nbytes)
        crc, adler = 0, 1
        for start in _sample_starts(tensor.nbytes):
            sample = data[start : start + SAMPLE_BYTES]
            crc, adler = crc32(sample, crc), adler32(sample, adler)
        return _combine(crc, adler)
    return _digest_contiguous(tensor if tensor.is_contiguous() else tensor.contiguous())


def _reduced(tensor: torch.Tensor, *, full: bool) -> torch.Tensor:
    """Reduce a device tensor to the bytes that have to come to the host."""
    if tensor.nbytes <= WHOLE_LIMIT_BYTES:
        return _flat_bytes(tensor)
    return block_sums(_flat_bytes(tensor)) if full else _flat_bytes(_sampled(tensor))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # of one element any stride is dense


def block_sums(data: torch.Tensor) -> torch.Tensor:
    """Compute for each whole block of ``data`` the sum of its words times random numbers modulo 2**64; behind
    these come the bytes behind the last block, all as flat bytes.

    Blocks that differ have equal sums by chance only, at worst once in 2**32: words have 32 bits, numbers 64.
    """
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // _SUM_BLOCK_BYTES * _SUM_BLOCK_BYTES
    factors = _factors(data.device)
    sums = [
        (part.view(torch.int32).view(-1, len(factors)) * factors).sum(1)
        for part in torch.split(data[:whole], _SUMMED_BYTES)
    ]
    return torch.cat([torch.cat(sums).view(torch.uint8), data[whole:]])


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> torch.Tensor:
    """Make a random number for each word of a block, the same in every process."""
    numbers = np.random.PCG64(0).random_raw(_SUM_BLOCK_BYTES // _WORD_BYTES).view(np.int64)
    return torch.from_numpy(numbers).to(device)


def digest_tensors(tensors: Sequence[torch.Tensor], check: ReplicaCheck = "full") -> npt.NDArray[np.uint64]:
    """Compute a digest of each tensor: of all bytes with ``full``, of some with ``sampled``, 0 with ``off``.

    Tensors of other devices are reduced there, and copied together.
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
            parts = [_reduced(tensors[row], full=full) for row in rows]
            host = torch.cat(parts).cpu()
            for row, part in zip(rows, torch.split(host, [part.numel() for part in parts]), strict=True):
                digests[row] = _digest_contiguous(part)
                if full and tensors[row].nbytes > WHOLE_LIMIT_BYTES:
                    digests[row] |= _FROM_DEVICE
    return digests
