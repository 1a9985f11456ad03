"""Element types of checkpoints by stable code. Torch-free.

Codes are part of the format: new codes are appended, old codes never reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dcp.storage.errors import OptionError


@dataclass(frozen=True, slots=True)
class Dtype:
    """Element type: ``name`` is the attribute of the torch module, ``itemsize`` is in bytes.

    ``storage_class`` is the legacy storage class in torch.save pickles; None for newer types, which use
    UntypedStorage and `torch._utils._rebuild_tensor_v3`. ``safetensors`` is the name in a safetensors
    header, None if unsupported.
    """

    code: int
    name: str
    itemsize: int
    storage_class: str | None = None
    safetensors: str | None = None


_TABLE = (
    Dtype(1, "float32", 4, "FloatStorage", "F32"),
    Dtype(2, "float64", 8, "DoubleStorage", "F64"),
    Dtype(3, "float16", 2, "HalfStorage", "F16"),
    Dtype(4, "bfloat16", 2, "BFloat16Storage", "BF16"),
    Dtype(5, "uint8", 1, "ByteStorage", "U8"),
    Dtype(6, "int8", 1, "CharStorage", "I8"),
    Dtype(7, "int16", 2, "ShortStorage", "I16"),
    Dtype(8, "int32", 4, "IntStorage", "I32"),
    Dtype(9, "int64", 8, "LongStorage", "I64"),
    Dtype(10, "bool", 1, "BoolStorage", "BOOL"),
    Dtype(11, "complex32", 4, None),
    Dtype(12, "complex64", 8, "ComplexFloatStorage", "C64"),
    Dtype(13, "complex128", 16, "ComplexDoubleStorage"),
    Dtype(14, "uint16", 2, None, "U16"),
    Dtype(15, "uint32", 4, None, "U32"),
    Dtype(16, "uint64", 8, None, "U64"),
    Dtype(17, "float8_e4m3fn", 1, None, "F8_E4M3"),
    Dtype(18, "float8_e5m2", 1, None, "F8_E5M2"),
    Dtype(19, "float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
    Dtype(20, "float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
    Dtype(21, "float8_e8m0fnu", 1, None, "F8_E8M0"),
    Dtype(22, "float4_e2m1fn_x2", 1, None),
    Dtype(23, "bits1x8", 1),
    Dtype(24, "bits2x4", 1),
    Dtype(25, "bits4x2", 1),
    Dtype(26, "bits8", 1),
    Dtype(27, "bits16", 2),
)

BY_CODE = MappingProxyType({dtype.code: dtype for dtype in _TABLE})
BY_NAME = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
BY_STORAGE_CLASS = MappingProxyType({d.storage_class: d for d in _TABLE if d.storage_class})

_CASTABLE: Final = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

CASTABLE: Final = frozenset(BY_NAME[name].code for name in _CASTABLE)
"""Codes of types with casts in conversions and `dcp.read`."""


def check_castable(name: object) -> int:
    """Return the code of the dtype ``name``, with or without ``torch.``.

    Raises:
        OptionError: If the dtype cannot be cast.
    """
    text = str(name).removeprefix("torch.")
    if text not in _CASTABLE:
        raise OptionError(f"dtype must be one of {', '.join(_CASTABLE)}, not {text!r}")
    return BY_NAME[text].code
