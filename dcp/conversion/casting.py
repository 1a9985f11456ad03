"""Casts between floating-point types on numpy arrays, with the rounding of torch's ``Tensor.to``.

bfloat16 and two float8 types are handled as bits, because numpy lacks them. Wider types are rounded to
float32 first, as in torch. NaN stays NaN with unspecified bits. Too large numbers become infinite, or the
largest number in float8_e4m3fn, which has no infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.inspection.values import elements
from dcp.storage.formats import dtypes

_Array = npt.NDArray[Any]

TOO_LARGE: Final[dict[int, float]] = {
    dtypes.BY_NAME[name].code: limit
    for name, limit in {
        "float64": np.inf,
        "float32": 2.0**128 - 2.0**103,
        "float16": 65520.0,
        "bfloat16": 2.0**128 - 2.0**119,
        "float8_e4m3fn": float(np.nextafter(464.0, np.inf)),
        "float8_e5m2": 61440.0,
    }.items()
}
"""Smallest number too large for a type, by code."""


def stored_dtype(code: int) -> np.dtype[Any]:
    """Return the numpy dtype of stored elements of a castable type."""
    return elements.stored_dtype(dtypes.BY_CODE[code])


def cast(data: memoryview, source_code: int, target_code: int) -> _Array:
    """Return the elements of type ``source_code`` in ``data`` as an array of bytes of type
    ``target_code``."""
    source, target = dtypes.BY_CODE[source_code], dtypes.BY_CODE[target_code]
    values = np.frombuffer(data, elements.stored_dtype(source))
    with np.errstate(over="ignore", invalid="ignore"):
        if source.name == "float64":
            values = values.astype("<f4")
        elif not {source.name, target.name} <= {"float32", "float64"}:
            values = elements.as_float32(values, source)
    return narrowed(values, target_code)


def widened(stored: _Array, code: int, out: _Array) -> _Array:
    """Convert ``stored`` elements of type ``code`` to the type of ``out`` (float32 or float64).

    Returns ``stored`` itself or ``out``. Wider types are rounded once.
    """
    dtype = dtypes.BY_CODE[code]
    if stored.dtype == out.dtype:
        return stored
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.name == "bfloat16" and out.dtype == np.float32:
            np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[:] = stored if dtype.name == "float64" else elements.as_float32(stored, dtype)
    return out


def narrowed(values: _Array, code: int) -> _Array:
    """Convert float32 or float64 numbers to bytes of type ``code``, rounded once to nearest, ties to even.

    The caller checks for NaN and numbers from `TOO_LARGE` on.
    """
    dtype = dtypes.BY_CODE[code]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype.name in ("float64", "float32", "float16"):
            kind = elements.stored_dtype(dtype)
            return np.ascontiguousarray(values.astype(kind, copy=False)).view(np.uint8)
        single = values if values.dtype == np.float32 else _odd_single(values)
        return _ENCODE[dtype.name](single).view(np.uint8)


def _odd_single(values: _Array) -> _Array:
    """Round to float32 "to odd": a second rounding to fewer bits then equals a single rounding (Boldo and
    Melquiond, Emulation of FMA and correctly rounded sums, 2008)."""
    single = values.astype(np.float32)
    back = single.astype(np.float64)
    bits = single.view(np.uint32)
    bits -= (np.abs(back) > np.abs(values)).astype(np.uint32)
    bits |= (back != values).astype(np.uint32)
    return single


def _single_to_bfloat16(values: _Array) -> _Array:
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")


def _single_to_float8(
    values: _Array, *, mantissa_bits: int, bias: int, too_large: int, infinite: int
) -> _Array:
    """Round to nearest, ties to even.

    ``too_large``: exponent and mantissa, as in float32, of the first number not rounded; ``infinite``: the
    replacement of these numbers.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    sign = (bits >> 24).astype(np.uint8) & 0x80
    bits = bits & np.uint32(0x7FFFFFFF)
    shift = 23 - mantissa_bits
    # Below the smallest normal number: an addition rounds to the remaining bits.
    magic = np.uint32((127 - bias + 1 + shift) << 23)
    small = (bits.view(np.float32) + magic.view(np.float32)).view(np.uint32) - magic
    odd = (bits >> shift) & 1
    normal = (
        bits + np.uint32(((bias - 127) << 23) % (1 << 32)) + odd + np.uint32((1 << (shift - 1)) - 1)
    ) >> shift
    result = np.where(bits < np.uint32((128 - bias) << 23), small, normal)
    result = np.where(bits >= np.uint32(too_large), np.uint32(infinite), result)
    result = np.where(bits > np.uint32(0x7F800000), np.uint32(0x7F), result)
    return result.astype(np.uint8) | sign


_ENCODE: Final[dict[str, Callable[[_Array], _Array]]] = {
    "bfloat16": _single_to_bfloat16,
    "float8_e4m3fn": partial(_single_to_float8, mantissa_bits=3, bias=7, too_large=1086 << 20, infinite=0x7E),
    "float8_e5m2": partial(_single_to_float8, mantissa_bits=2, bias=15, too_large=143 << 23, infinite=0x7C),
}
