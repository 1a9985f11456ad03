"""Elements of stored tensors as numpy arrays, with exact decoding of other dtypes. Torch-free.

bfloat16 and 8-bit floats are unsigned integers of their size. `as_float32` returns their exact values, by a
shift or a table of 256 codes. Formats: OCP 8-bit Floating Point (OFP8, revision 1.0), OCP Microscaling (e8m0,
e2m1), and the "fnuz" variants of Noune et al., "8-bit Numerical Formats for Deep Neural Networks" (2022).
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import PlanError
from dcp.storage.formats.dtypes import Dtype

Array = npt.NDArray[Any]

_INTEGERS: Final = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}
_NUMPY: Final = _INTEGERS | {"float16", "float32", "float64", "complex64", "complex128"}
_OPAQUE: Final = frozenset({"bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"})


def stored_dtype(dtype: Dtype) -> np.dtype[Any]:
    """Return the numpy dtype that `TensorReader` uses: the same dtype, or unsigned integers."""
    return np.dtype(dtype.name if dtype.name in _NUMPY else f"u{dtype.itemsize}").newbyteorder("<")


def is_opaque(dtype: Dtype) -> bool:
    """Test for elements that are bits without a numeric value."""
    return dtype.name in _OPAQUE


def is_integral(dtype: Dtype) -> bool:
    """Test for integers and bools."""
    return dtype.name in _INTEGERS


def as_float32(array: Array, dtype: Dtype) -> npt.NDArray[np.float32]:
    """Return the exact values of stored 8-bit and 16-bit floats (NaN and signed zero kept).

    ``array`` has the `stored_dtype` and any shape. float4_e2m1fn_x2 packs two values in each element, low
    bits first: the last dimension doubles (0-d becomes 1-d). float32 is returned unchanged. Raises
    `PlanError` for other dtypes.
    """
    if dtype.name == "float32":
        return np.asarray(array, dtype=np.float32)
    if dtype.name == "float16":
        return array.astype(np.float32)
    if dtype.name == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "float4_e2m1fn_x2":
        pairs = np.stack([array & 15, array >> 4], axis=-1)
        return _table("float4_e2m1fn")[pairs].reshape((*array.shape[:-1], -1))
    if dtype.name in _FLOATS or dtype.name == "float8_e8m0fnu":
        return _table(dtype.name)[array]
    raise PlanError(f"float32 cannot represent all values of {dtype.name}; use `decode`")


def decode(array: Array, dtype: Dtype) -> Array:
    """Return stored elements in a dtype for calculations.

    8-bit floats and bfloat16 become float32, complex32 becomes complex64; other arrays are returned
    unchanged.
    """
    if dtype.name == "complex32":
        halves = np.ascontiguousarray(array)[..., None].view("<f2").astype(np.float32)
        return halves.view(np.complex64)[..., 0]
    if dtype.name in _NUMPY or is_opaque(dtype):
        return array
    return as_float32(array, dtype)


# -- tables --------------------------------------------------------------------------------------------------

_FLOATS: Final = MappingProxyType(
    {
        # (bits of the exponent, bits of the mantissa, bias)
        "float8_e4m3fn": (4, 3, 7),
        "float8_e4m3fnuz": (4, 3, 8),
        "float8_e5m2": (5, 2, 15),
        "float8_e5m2fnuz": (5, 2, 16),
        "float4_e2m1fn": (2, 1, 1),
    }
)


@cache
def _table(name: str) -> npt.NDArray[np.float32]:
    """Return the value of each code."""
    if name == "float8_e8m0fnu":
        table = np.ldexp(np.float64(1), np.arange(256) - 127)
        table[255] = np.nan
        return table.astype(np.float32)
    exponent_bits, mantissa_bits, bias = _FLOATS[name]
    codes = np.arange(2 << (exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = np.ldexp(1 + fraction, exponent - bias)
    table = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    negative = codes >> (exponent_bits + mantissa_bits) == 1
    table = np.where(negative, -table, table)
    if name.endswith("fnuz"):  # no infinities; the code of negative zero is NaN
        table[len(codes) // 2] = np.nan
    elif name == "float8_e4m3fn":  # no infinities
        table[[0x7F, 0xFF]] = np.nan
    elif name == "float8_e5m2":  # as IEEE 754 has it
        table[[0x7C, 0xFC]] = np.inf, -np.inf
        table[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return table.astype(np.float32)
