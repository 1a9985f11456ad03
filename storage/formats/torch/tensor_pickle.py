"""Tensors in pickles of torch.save: their dtype, shape and place in their storage; torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.pickle.decoder import Constructor
from dcp.storage.geometry.strides import is_c_ordered

__all__ = [
    "MAX_DIMENSIONS",
    "TENSOR_GLOBALS",
    "TensorClass",
    "TensorPickle",
    "load_storage",
]

MAX_DIMENSIONS = 64
"""What torch allows."""

_MAX_KEY_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class TensorPickle:
    """One tensor of a torch.save archive; its bytes are the archive's entry ``data/{storage_key}``.

    Element ``(i, j, ...)`` stands at element ``storage_offset + i * strides[0] + j * strides[1] + ...`` of
    the storage, which has ``storage_bytes`` bytes, and all elements were checked to lie inside it.
    """

    dtype_code: int
    storage_key: str
    storage_bytes: int
    storage_offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @property
    def contiguous(self) -> bool:
        """Return whether the elements stand in C order without gaps."""
        return is_c_ordered(self.sizes, self.strides)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage that a persistent id names; ``dtype`` is None for an untyped storage, whose elements are
    bytes."""

    dtype: dtypes.Dtype | None
    key: str
    elements: int


@dataclass(frozen=True, slots=True)
class _StorageClass:
    """A legacy storage class; ``dtype`` is None for UntypedStorage."""

    dtype: dtypes.Dtype | None


@dataclass(frozen=True, slots=True)
class TensorClass:
    """A class of which the plain tensor data is all that a checkpoint needs."""


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointFormatError(f"a pickled tensor's {what} is not a number from 0 to 2**62")
    return value


def _naturals(values: Any, what: str) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMENSIONS:
        raise CheckpointFormatError(f"a pickled tensor's {what} are not a tuple of at most {MAX_DIMENSIONS}")
    return tuple(_natural(value, what) for value in values)


def _arguments(args: tuple[Any, ...], least: int, most: int, name: str) -> tuple[Any, ...]:
    if not least <= len(args) <= most:
        raise CheckpointFormatError(f"a pickle calls {name} with {len(args)} arguments")
    return args + (None,) * (most - len(args))


def load_storage(value: Any) -> _Storage:
    """Return what the persistent id ``value`` names; CheckpointFormatError for what torch.save does not
    write."""
    if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
        raise CheckpointFormatError("a pickled storage is not of the kind that torch.save writes")
    _, kind, key, _, elements = value
    if not isinstance(kind, _StorageClass):
        raise CheckpointFormatError("a pickled storage has no storage class")
    if type(key) is not str or len(key) > _MAX_KEY_CHARACTERS:
        raise CheckpointFormatError("a pickled storage's key is not a short string")
    return _Storage(kind.dtype, key, _natural(elements, "storage size"))


def _rebuild_v2(args: tuple[Any, ...]) -> TensorPickle:
    storage, offset, sizes, strides, grad, _, metadata = _arguments(args, 6, 7, "_rebuild_tensor_v2")
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    return _tensor(storage, offset, sizes, strides, grad, dtype or dtypes.BY_NAME["uint8"], metadata)


def _rebuild_v3(args: tuple[Any, ...]) -> TensorPickle:
    storage, offset, sizes, strides, grad, _, dtype, metadata = _arguments(args, 7, 8, "_rebuild_tensor_v3")
    return _tensor(storage, offset, sizes, strides, grad, dtype, metadata)


def _tensor(
    storage: Any, offset: Any, sizes: Any, strides: Any, grad: Any, dtype: Any, metadata: Any
) -> TensorPickle:
    if not isinstance(storage, _Storage):
        raise CheckpointFormatError("a pickled tensor has no storage")
    if not isinstance(dtype, dtypes.Dtype):
        raise CheckpointFormatError("a pickled tensor has no dtype")
    if metadata:
        raise UnsupportedFormatError(
            "a pickled tensor is a lazily conjugated or negated view, whose stored bytes are not its values; "
            "save it after resolve_conj() and resolve_neg()"
        )
    if type(grad) is not bool:
        raise CheckpointFormatError("a pickled tensor's requires_grad is not a bool")
    itemsize = storage.dtype.itemsize if storage.dtype else 1
    result = TensorPickle(
        dtype_code=dtype.code,
        storage_key=storage.key,
        storage_bytes=storage.elements * itemsize,
        storage_offset=_natural(offset, "storage offset"),
        sizes=_naturals(sizes, "sizes"),
        strides=_naturals(strides, "strides"),
        requires_grad=grad,
    )
    _check_inside(result, dtype.itemsize)
    return result


def _check_inside(tensor: TensorPickle, itemsize: int) -> None:
    """Refuse elements outside the storage: they would be other data's bytes."""
    if len(tensor.sizes) != len(tensor.strides):
        raise CheckpointFormatError("a pickled tensor has not as many strides as sizes")
    if 0 in tensor.sizes:
        return
    last = tensor.storage_offset + sum(
        (size - 1) * stride for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
    )
    if (last + 1) * itemsize > tensor.storage_bytes or math.prod(tensor.sizes) >= 1 << 62:
        raise CheckpointFormatError(
            f"a pickled tensor of sizes {tensor.sizes} reaches beyond the {tensor.storage_bytes} bytes stored"
        )


def _rebuild_parameter(args: tuple[Any, ...], *, count: int) -> TensorPickle:
    data, grad = _arguments(args, count, count, "_rebuild_parameter")[:2]
    if not isinstance(data, TensorPickle) or type(grad) is not bool:
        raise CheckpointFormatError("a pickled parameter has no tensor")
    return replace(data, requires_grad=grad)


def _refuse(_: tuple[Any, ...], *, kind: str) -> Any:
    raise UnsupportedFormatError(
        f"the record holds a {kind} tensor, and only dense ones can be read; save it as dense tensors",
        tensor_kind=kind,
    )


_QUANTISED = ("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")


def _function(name: str, **named: Any) -> dict[tuple[str, str], Constructor]:
    return {("torch._utils", name): Constructor(f"torch._utils.{name}", **named)}


TENSOR_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch.storage", "UntypedStorage"): _StorageClass(None),
    ("torch", "Tensor"): TensorClass(),
    ("torch.nn.parameter", "Parameter"): TensorClass(),
    ("torch.nn.parameter", "Buffer"): TensorClass(),
    **_function("_rebuild_tensor_v2", reduce=_rebuild_v2),
    **_function("_rebuild_tensor_v3", reduce=_rebuild_v3),
    **_function("_rebuild_parameter", reduce=partial(_rebuild_parameter, count=3)),
    **_function("_rebuild_parameter_with_state", reduce=partial(_rebuild_parameter, count=4)),
    **dict.fromkeys((("torch", name) for name in _QUANTISED), _StorageClass(None)),
    **_function("_rebuild_sparse_tensor", reduce=partial(_refuse, kind="sparse")),
    **_function("_rebuild_qtensor", reduce=partial(_refuse, kind="quantised")),
    **_function("_rebuild_nested_tensor", reduce=partial(_refuse, kind="nested")),
    **_function("_rebuild_meta_tensor_no_storage", reduce=partial(_refuse, kind="meta")),
    **{("torch", name): _StorageClass(dtype) for name, dtype in dtypes.BY_STORAGE_CLASS.items()},
    **{("torch", name): dtype for name, dtype in dtypes.BY_NAME.items()},
}
"""Names that a pickled tensor may use, as inert values and functions of this package."""
