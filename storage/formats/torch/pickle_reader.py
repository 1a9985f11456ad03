"""The `data.pkl` of a torch.save file: nested containers of tensors and plain values; nothing of it is run.

Decoded is what `torch.load(weights_only=True)` knows: tensors to `TensorPickle`, an OrderedDict or Counter to
`BuiltDict`, torch.Size to `SizePickle`, the rest to what it is; so are the classes of
`dcp.storage.formats.pickle.classes`. Everything else (sparse and quantised tensors, tensor subclasses, any
class or function outside the list) becomes an `Ignored` value, which spoils the entry that needs it and no
other. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.pickle.classes import NUMPY_GLOBALS, STDLIB_GLOBALS
from dcp.storage.formats.pickle.decoder import (
    BuiltDict,
    Constructor,
    Ignored,
    Instance,
    allow_list,
    decode_pickle,
)
from dcp.storage.geometry.strides import is_c_ordered

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


MAX_TENSOR_PICKLE_BYTES: Final = 1 << 20
"""A pickled tensor takes some 200 bytes; attributes set on the tensor object come on top."""

MAX_FILE_PICKLE_BYTES: Final = 64 << 20
"""200,000 tensors take some 25 MB."""

ORDERED_DICT: Final = "collections.OrderedDict"
COUNTER: Final = "collections.Counter"
SIZE: Final = "torch.Size"
DEVICE: Final = "torch.device"
LAYOUT: Final = "torch.layout"

_CONTAINERS_PER_BYTE: Final = 0.25
"""A view with a name of one letter takes 50 bytes and needs seven."""

MAX_CONTAINERS: Final = 1_500_000
"""Enough for 200,000 tensors. A file of some megabytes must not make a gigabyte of objects."""

_MAX_FOREIGN_NAMES: Final = 1000
_MAX_NAME_CHARACTERS: Final = 200

_PYTHON2_MODULES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""torch.save writes protocol 2, in which modules have the names of Python 2."""


class SizePickle(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()
    kind: ClassVar[str] = SIZE


@dataclass(frozen=True, slots=True)
class DevicePickle:
    """A torch.device."""

    type: str
    index: int | None
    kind: ClassVar[str] = DEVICE


def decode_torch_pickle(
    data: bytes, *, limit_bytes: int = MAX_FILE_PICKLE_BYTES, max_containers: int = MAX_CONTAINERS
) -> Any:
    """Return the value of ``data``, in time and memory linear in its length; it may be deep, shared or
    self-referring.

    Raises UnsafeObjectError and UnsupportedFormatError for opcodes and persistent ids that no state dict
    needs, CheckpointFormatError for what no pickler writes and for tensors that reach outside their storages.
    """
    per_byte = min(_CONTAINERS_PER_BYTE, max_containers / max(1, len(data)))
    return decode_pickle(
        data,
        find=_Globals().find,
        persistent_load=load_storage,
        limit_bytes=limit_bytes,
        containers_per_byte=per_byte,
    )


def decode_tensor_pickle(data: bytes | memoryview) -> TensorPickle:
    """Return the tensor that a record's pickle holds, if it is a dense tensor and nothing else.

    Raises UnsafeObjectError where it needs anything that a plain tensor does not, UnsupportedFormatError for
    sparse, quantised, nested and conjugated tensors, CheckpointFormatError for whatever torch.save does not
    write.
    """
    value = decode_pickle(
        data, find=_find_in_record, persistent_load=load_storage, limit_bytes=MAX_TENSOR_PICKLE_BYTES
    )
    if isinstance(value, TensorPickle):
        return value
    if not isinstance(value, Ignored):
        raise CheckpointFormatError(f"the record should hold a tensor, and holds a {type(value).__name__}")
    if value.kind.endswith(" tensor") or value.kind.startswith("torch.per_"):
        kind = "quantised tensor" if value.kind.startswith("torch.") else value.kind
        raise UnsupportedFormatError(
            f"the record holds a {kind}, and only dense ones can be read; save it as a dense one (after "
            "resolve_conj() and resolve_neg())",
            tensor_kind=kind.removesuffix(" tensor"),
        )
    raise UnsafeObjectError(f"the record of a tensor needs {value.kind}", global_name=value.kind)


class _Globals:
    """Meanings of the globals of one pickle."""

    def __init__(self) -> None:
        self._foreign: dict[str, Constructor] = {}

    def find(self, module: str, name: str) -> Any:
        module = _PYTHON2_MODULES.get(module, module)
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        full = f"{module}.{name}"[:_MAX_NAME_CHARACTERS]
        known = self._foreign.get(full)
        if known is None:
            if len(self._foreign) >= _MAX_FOREIGN_NAMES:
                raise UnsafeObjectError(
                    f"the pickle names more than {_MAX_FOREIGN_NAMES} classes and functions that a state "
                    "dict does not need; nothing of it was run",
                    global_name=full,
                )
            known = self._foreign[full] = _foreign(full)
        return known


def _foreign(name: str) -> Constructor:
    is_tensor = name.startswith("torch._utils._rebuild_")

    def ignore(_: tuple[Any, ...]) -> Ignored:
        return Ignored(name, is_tensor=is_tensor)

    return Constructor(name, reduce=ignore, new=ignore)


def _foreign_in(args: tuple[Any, ...]) -> str | None:
    """Return the name of the first argument that is nothing a dense tensor is made of."""
    for value in args:
        if isinstance(value, Ignored):
            return value.kind
        if type(value) is Constructor and value.name not in _OWN_NAMES:
            return value.name
    return None


def _readable(name: str, rebuild: Callable[[tuple[Any, ...]], Any]) -> Constructor:
    """Return ``rebuild``, with tensors that cannot be read ignored."""

    def reduce(args: tuple[Any, ...]) -> Any:
        foreign = _foreign_in(args)
        if foreign is not None:
            return Ignored(foreign, is_tensor=True)
        try:
            return rebuild(args)
        except UnsupportedFormatError as error:
            kind = error.tensor_kind or "lazily conjugated or negated"
            return Ignored(f"{kind} tensor", is_tensor=True)

    return Constructor(name, reduce=reduce)


def _from_type(args: tuple[Any, ...]) -> Any:
    """Return a tensor with attributes, or of a subclass: only the tensor itself is a checkpoint's."""
    if len(args) != 4:
        raise CheckpointFormatError(f"a pickle calls _rebuild_from_type_v2 with {len(args)} arguments")
    function, kind, inner, _ = args
    foreign = _foreign_in((kind, function))
    if foreign is not None:
        return Ignored(foreign, is_tensor=True)
    if type(inner) is not tuple or not isinstance(kind, TensorClass):
        raise CheckpointFormatError("a pickled tensor's class is not a tensor class")
    if type(function) is not Constructor or not function.name.startswith("torch._utils._rebuild_"):
        raise CheckpointFormatError("a pickled tensor is not built as torch builds tensors")
    result = function.reduce(inner) if function.reduce is not None else None
    if not isinstance(result, (TensorPickle, Ignored)):
        raise CheckpointFormatError("a pickled tensor is not built as torch builds tensors")
    return result


def _size(args: tuple[Any, ...]) -> Any:
    sizes: Any = args[0] if len(args) == 1 else None
    if (
        type(sizes) not in (tuple, list)
        or len(sizes) > MAX_DIMENSIONS
        or any(type(n) is not int for n in sizes)
    ):
        raise CheckpointFormatError(f"a pickled torch.Size is not made of up to {MAX_DIMENSIONS} integers")
    return SizePickle(sizes)


def _device(args: tuple[Any, ...]) -> DevicePickle:
    if not 1 <= len(args) <= 2 or type(args[0]) is not str or len(args[0]) > _MAX_NAME_CHARACTERS:
        raise CheckpointFormatError("a pickled torch.device is not made of a type and a number")
    index = args[1] if len(args) == 2 else None
    if index is not None and (type(index) is not int or not 0 <= index < 1 << 15):
        raise CheckpointFormatError("a pickled torch.device is not made of a type and a number")
    return DevicePickle(args[0], index)


def _mapping(kind: str) -> Constructor:
    def build(args: tuple[Any, ...]) -> BuiltDict:
        """Make it from nothing, a dict, or pairs."""
        result = BuiltDict(kind)
        if args in ((), ([],)):
            return result
        if len(args) != 1 or not isinstance(args[0], (dict, list)) or isinstance(args[0], BuiltDict):
            raise CheckpointFormatError(f"a pickled {kind} is not made of pairs")
        pairs = args[0].items() if isinstance(args[0], dict) else args[0]
        for pair in pairs:
            if type(pair) not in (tuple, list) or len(pair) != 2 or not _is_cheap_key(pair[0]):
                raise CheckpointFormatError(f"a pickled {kind} is not made of pairs of key and value")
            result[pair[0]] = pair[1]
        return result

    return Constructor(kind, reduce=build)


def _is_cheap_key(key: Any) -> bool:
    """Return whether a key is cheap to hash: integers beyond 60 bits can be chosen to have one hash."""
    return type(key) is str or (type(key) is int and abs(key) < 1 << 60)


def _bytes(args: tuple[Any, ...]) -> bytes:
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise CheckpointFormatError("pickled bytes are not in the form that protocol 2 has")
    try:
        return args[0].encode("latin1")
    except UnicodeEncodeError as error:
        raise CheckpointFormatError("pickled bytes are not in the form that protocol 2 has") from error


def _complex(args: tuple[Any, ...]) -> complex:
    if len(args) != 2 or not all(type(part) in (int, float) for part in args):
        raise CheckpointFormatError("a pickled complex number is not made of two numbers")
    return complex(float(args[0]), float(args[1]))


def _globals() -> dict[tuple[str, str], Any]:
    allowed: dict[tuple[str, str], Any] = {}
    for (module, name), value in TENSOR_GLOBALS.items():
        rebuild = value.reduce if type(value) is Constructor else None
        if module == "torch._utils" and rebuild is not None:
            allowed[module, name] = _readable(value.name, rebuild)
        else:
            allowed[module, name] = value
    allowed["torch._tensor", "_rebuild_from_type_v2"] = Constructor(
        "torch._tensor._rebuild_from_type_v2", reduce=_from_type
    )
    return (
        allowed
        | NUMPY_GLOBALS
        | STDLIB_GLOBALS
        | {
            ("collections", "OrderedDict"): _mapping(ORDERED_DICT),
            ("collections", "Counter"): _mapping(COUNTER),
            ("torch", "Size"): Constructor(SIZE, reduce=_size),
            ("torch", "device"): Constructor(DEVICE, reduce=_device),
            ("torch.serialization", "_get_layout"): Constructor(LAYOUT, reduce=lambda _: Instance(LAYOUT)),
            ("_codecs", "encode"): Constructor("_codecs.encode", reduce=_bytes),
            ("builtins", "complex"): Constructor("builtins.complex", reduce=_complex),
        }
    )


_ALLOWED: Final = _globals()
_OWN_NAMES: Final = frozenset(
    value.name
    for place, value in _ALLOWED.items()
    if type(value) is Constructor and place not in NUMPY_GLOBALS and place not in STDLIB_GLOBALS
)
_find_in_record: Final = allow_list(
    _ALLOWED
    | {
        ("torch", name): _foreign(f"torch.{name}")  # of quantised tensors, which are refused as such
        for name in ("per_tensor_affine", "per_channel_affine")
    },
    what="the record of a tensor",
)
