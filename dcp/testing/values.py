"""Values that identify their place: the tensor, the element, the rank and the save that they belong to.

A value is a hash of these, cut to the bits of its dtype, always finite. Where a dtype has few bits,
`gram_width` neighbours together identify their place.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Identity", "bits_of", "bits_per_value", "coded_bits", "gram_width", "number_of", "write_bits"]

Bits = npt.NDArray[Any]
"""Elements as unsigned integers of their size; a complex one is two of them."""

_FLOATS: Final = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
    torch.complex128: (11, 52),
    torch.complex64: (8, 23),
    torch.complex32: (5, 10),
}
"""Bits of the exponent and of the fraction."""

_KNOWN_BITS: Final = 40
"""With so many, values of a few million elements are hardly ever alike."""

_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Identity(NamedTuple):
    """The owner of values: the tensor's ``name``, the ``rank`` if it is a rank's own, and the ``moment``."""

    name: str
    rank: int | None
    moment: str


def _hashes(of: Identity, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    text = f"{of.moment}\0{'' if of.rank is None else of.rank}\0{of.name}".encode()
    seed = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u8")
    mixed = seed + index.astype(np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _width(dtype: torch.dtype) -> int:
    """Give the bytes of one unsigned integer."""
    size = torch.empty(0, dtype=dtype).element_size()
    return size // 2 if dtype.is_complex else size


def bits_per_value(dtype: torch.dtype) -> int:
    """Count the bits of a value that are free, and so distinguish it from others."""
    if dtype in _FLOATS:
        return _FLOATS[dtype][1] + 3
    return 1 if dtype == torch.bool else 8 * _width(dtype) - 1


def gram_width(dtype: torch.dtype) -> int:
    """Count the neighbours that together identify their place."""
    return -(-_KNOWN_BITS // bits_per_value(dtype))


def coded_bits(of: Identity, index: npt.NDArray[np.int64], dtype: torch.dtype) -> Bits:
    """Compute the values of the elements ``index`` (row-major places in the whole tensor), as bits."""
    if dtype.is_complex:
        index = np.stack([2 * index, 2 * index + 1], -1).reshape(-1)
    hashes = _hashes(of, index)
    if dtype in _FLOATS:
        exponent, fraction = _FLOATS[dtype]
        around_one = np.uint64((1 << (exponent - 1)) - 3) + (hashes >> np.uint64(62))
        sign = (hashes >> np.uint64(61) & np.uint64(1)) << np.uint64(exponent + fraction)
        found = sign | around_one << np.uint64(fraction) | hashes & np.uint64((1 << fraction) - 1)
    else:
        found = hashes & np.uint64((1 << bits_per_value(dtype)) - 1)
    narrow: Bits = found.astype(f"u{_width(dtype)}")
    return narrow


def number_of(of: Identity) -> float:
    """Compute a value of a setting, such as a learning rate: small, positive, and like no other."""
    return float(_hashes(of, np.zeros(1, np.int64))[0] >> np.uint64(40)) / 2**30


def bits_of(tensor: torch.Tensor) -> Bits:
    """Give the elements of a plain tensor in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    found: Bits = plain.view(torch.uint8).numpy().view(f"u{_width(plain.dtype)}")
    return found


def write_bits(tensor: torch.Tensor, bits: Bits) -> None:
    """Set the elements of a plain tensor."""
    if tensor.numel():
        made = torch.from_numpy(bits.view(np.uint8).copy()).view(tensor.dtype).reshape(tensor.shape)
        with torch.no_grad():
            tensor.detach().copy_(made)
