"""Casts between floating-point types on plain numpy arrays, rounded as torch's ``Tensor.to`` rounds.

bfloat16 and the two float8 types, which numpy lacks, are handled as their bits. Whatever is wider than
float32 goes through it, as in torch, so that the double rounding is the same. NaN stays NaN (torch does not
promise its bits); what is too large becomes infinite, in float8_e4m3fn, which has no infinity, the largest
number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import OptionError
from dcp.storage.formats import dtypes

__all__ = ["CASTABLE", "TOO_LARGE", "cast", "check_castable", "narrowed", "stored_dtype", "widened"]

_Array = npt.NDArray[Any]

_STORED: Final[dict[str, str]] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
}
"""What the elements are to numpy."""

CASTABLE: Final = frozenset(dtypes.BY_NAME[name].code for name in _STORED)
"""Codes of the types that can be cast to each other."""

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
"""The smallest number that rounds to none of a type, by its code."""


def check_castable(name: object) -> int:
    """The code of the dtype called ``name`` (``torch.`` before it is fine); PlanError if there is no cast."""
    text = str(name).removeprefix("torch.")
    if text not in _STORED:
        raise OptionError(f"dtype must be one of {', '.join(_STORED)}, not {text!r}")
    return dtypes.BY_NAME[text].code


def stored_dtype(code: int) -> np.dtype[Any]:
    """What the elements of a type that can be cast are to numpy."""
    return np.dtype(_STORED[dtypes.BY_CODE[code].name])


def cast(elements: memoryview, source_code: int, target_code: int) -> _Array:
    """The elements of type ``source_code`` in ``elements`` as an array of bytes of type ``target_code``."""
    source, target = dtypes.BY_CODE[source_code].name, dtypes.BY_CODE[target_code].name
    values = np.frombuffer(elements, _STORED[source])
    with np.errstate(over="ignore", invalid="ignore"):
        if {source, target} == {"float64", "float32"}:
            return values.astype(_STORED[target]).view(np.uint8)
        single = _DECODE[source](values)
        return _ENCODE[target](single).view(np.uint8)


def widened(elements: _Array, code: int, out: _Array) -> _Array:
    """The elements of type ``code``, stored as ``elements``, in the type of ``out``, float32 or float64:
    ``elements`` themselves, or put into ``out``. What is wider is rounded once."""
    name = dtypes.BY_CODE[code].name
    if elements.dtype == out.dtype:
        return elements
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "bfloat16" and out.dtype == np.float32:
            np.left_shift(elements, 16, out=out.view(np.uint32), dtype=np.uint32)
        elif name in ("float32", "float64"):
            out[:] = elements
        else:
            out[:] = _DECODE[name](elements)
    return out


def narrowed(values: _Array, code: int) -> _Array:
    """Numbers of float32 or float64 as bytes of the type ``code``: rounded once, to the nearest, ties to
    even. Numbers from `TOO_LARGE` on, and what is none, are for the caller to find."""
    name = dtypes.BY_CODE[code].name
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if _STORED[name].startswith("<f"):
            return np.ascontiguousarray(values.astype(_STORED[name], copy=False)).view(np.uint8)
        single = values if values.dtype == np.float32 else _odd_single(values)
        return _ENCODE[name](single).view(np.uint8)


def _odd_single(values: _Array) -> _Array:
    """As float32, "rounded to odd": what is rounded again, to fewer bits, is then as if it were rounded once
    (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008)."""
    single = values.astype(np.float32)
    back = single.astype(np.float64)
    bits = single.view(np.uint32)
    bits -= (np.abs(back) > np.abs(values)).astype(np.uint32)
    bits |= (back != values).astype(np.uint32)
    return single


def _bfloat16_to_single(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _single_to_bfloat16(values: _Array) -> _Array:
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")


@lru_cache(maxsize=1)
def _e4m3fn_values() -> _Array:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def _e5m2_to_single(bits: _Array) -> _Array:
    """It is the upper half of a float16."""
    return (bits.astype("<u2") << 8).view("<f2").astype(np.float32)


def _single_to_float8(
    values: _Array, *, mantissa_bits: int, bias: int, too_large: int, infinite: int
) -> _Array:
    """Round to nearest, ties to even. ``too_large``: exponent field and mantissa, as of float32, from which
    on it is not rounded any more; ``infinite``: what such values become."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    sign = (bits >> 24).astype(np.uint8) & 0x80
    bits = bits & np.uint32(0x7FFFFFFF)
    shift = 23 - mantissa_bits
    # Below the smallest normal number: an addition whose result has just the bits that are left.
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


def _single_to_e4m3fn(values: _Array) -> _Array:
    return _single_to_float8(values, mantissa_bits=3, bias=7, too_large=1086 << 20, infinite=0x7E)


def _single_to_e5m2(values: _Array) -> _Array:
    return _single_to_float8(values, mantissa_bits=2, bias=15, too_large=143 << 23, infinite=0x7C)


_DECODE: Final[dict[str, Callable[[_Array], _Array]]] = {
    "float64": lambda values: values.astype("<f4"),
    "float32": lambda values: values,
    "float16": lambda values: values.astype("<f4"),
    "bfloat16": _bfloat16_to_single,
    "float8_e4m3fn": lambda values: _e4m3fn_values()[values],
    "float8_e5m2": _e5m2_to_single,
}

_ENCODE: Final[dict[str, Callable[[_Array], _Array]]] = {
    "float64": lambda values: values.astype("<f8"),
    "float32": lambda values: np.ascontiguousarray(values),
    "float16": lambda values: values.astype("<f2"),
    "bfloat16": _single_to_bfloat16,
    "float8_e4m3fn": _single_to_e4m3fn,
    "float8_e5m2": _single_to_e5m2,
}
