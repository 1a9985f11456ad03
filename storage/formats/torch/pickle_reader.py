"""Reader of the `data.pkl` of torch.save files: nested containers of tensors and plain values, without
running code.

Decodes the types of `torch.load(weights_only=True)`: tensors to `TensorPickle`, OrderedDict and Counter to
`BuiltDict`, torch.Size to `SizePickle`, other values to themselves, and the classes of
`dcp.storage.formats.pickle.classes`. Everything else (sparse and quantized tensors, tensor subclasses,
other classes and functions) becomes `Ignored`, which affects a single entry. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import MAX_DIMENSIONS, UNKNOWN
from dcp.storage.formats.pickle.classes import NUMPY_GLOBALS, STDLIB_GLOBALS, is_cheap_key, made_of
from dcp.storage.formats.pickle.decoder import (
    BuiltDict,
    Constructor,
    Ignored,
    Instance,
    allow_list,
    decode_pickle,
)
from dcp.storage.geometry.strides import extent

MAX_TENSOR_PICKLE_BYTES: Final = 1 << 20
"""Maximum pickle size of a tensor; usual pickles have 200 bytes plus attributes."""

MAX_FILE_PICKLE_BYTES: Final = 64 << 20
"""Maximum pickle size of a file; 200,000 tensors take about 25 MB."""

ORDERED_DICT: Final = "collections.OrderedDict"
COUNTER: Final = "collections.Counter"
SIZE: Final = "torch.Size"
DEVICE: Final = "torch.device"
LAYOUT: Final = "torch.layout"

_CONTAINERS_PER_BYTE: Final = 0.25
"""Containers per byte; a view with a short name takes 50 bytes and seven containers."""

MAX_CONTAINERS: Final = 1_500_000
"""Maximum number of containers, enough for 200,000 tensors."""

_MAX_FOREIGN_NAMES: Final = 1000
_MAX_NAME_CHARACTERS: Final = 200
_MAX_KEY_CHARACTERS: Final = 64

_PYTHON2_MODULES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Python 2 module names, which torch.save writes in protocol 2."""

_QUANTISED: Final = ("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")

_Args = tuple[Any, ...]


class SizePickle(tuple[int, ...]):
    """Value of torch.Size."""

    __slots__ = ()
    kind: ClassVar[str] = SIZE


@dataclass(frozen=True, slots=True)
class DevicePickle:
    """Value of torch.device."""

    type: str
    index: int | None
    kind: ClassVar[str] = DEVICE


@dataclass(frozen=True, slots=True)
class TensorPickle:
    """Tensor of a torch.save archive with bytes in the archive's entry ``data/{storage_key}``.

    Element ``(i, j, ...)`` is element ``storage_offset + i * strides[0] + j * strides[1] + ...`` of the
    storage of ``storage_bytes`` bytes. All elements were checked to be inside.

    For a record, the storage begins at ``payload_offset`` of the file, and ``crc32`` covers it; None if not
    computed.
    """

    dtype_code: int
    storage_key: str
    storage_bytes: int
    storage_offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    payload_offset: int = UNKNOWN
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class _Storage:
    """Storage named by a persistent id."""

    dtype: dtypes.Dtype | None
    key: str
    elements: int


def decode_torch_pickle(
    data: bytes, *, limit_bytes: int = MAX_FILE_PICKLE_BYTES, max_containers: int = MAX_CONTAINERS
) -> Any:
    """Return the value of ``data`` in linear time and memory; the value may be deep, shared or
    self-referential.

    Raises:
        UnsafeObjectError: For disallowed opcodes and persistent ids.
        UnsupportedFormatError: For unsupported pickles.
        CheckpointFormatError: For malformed pickles and tensors outside of their storages.
    """
    per_byte = min(_CONTAINERS_PER_BYTE, max_containers / max(1, len(data)))
    return decode_pickle(
        data,
        find=_Globals().find,
        persistent_load=_load_storage,
        limit_bytes=limit_bytes,
        containers_per_byte=per_byte,
    )


def decode_tensor_pickle(data: bytes | memoryview) -> TensorPickle:
    """Return the dense tensor of a record's pickle.

    Raises:
        UnsafeObjectError: If the pickle needs more than a plain tensor.
        UnsupportedFormatError: For sparse, quantized, nested and conjugated tensors.
        CheckpointFormatError: For other pickles.
    """
    value = decode_pickle(
        data, find=_find_in_record, persistent_load=_load_storage, limit_bytes=MAX_TENSOR_PICKLE_BYTES
    )
    if isinstance(value, TensorPickle):
        return value
    if not isinstance(value, Ignored):
        raise CheckpointFormatError(f"the record must hold a tensor, not a {type(value).__name__}")
    if value.kind.endswith(" tensor") or value.kind.startswith("torch.per_"):
        kind = "quantized tensor" if value.kind.startswith("torch.") else value.kind
        raise UnsupportedFormatError(
            f"the record holds a {kind}, but only dense tensors are supported; save it as a dense tensor "
            "(to_dense(), dequantize(), resolve_conj() and resolve_neg())",
            tensor_kind=kind.removesuffix(" tensor"),
        )
    raise UnsafeObjectError(
        f"the record of a tensor needs {value.kind}, which is not on the allow-list; no code was run",
        global_name=value.kind,
    )


class _Globals:
    """Allowed globals of a pickle."""

    def __init__(self) -> None:
        self._foreign: dict[str, Constructor] = {}

    def find(self, module: str, name: str) -> Any:
        module = _PYTHON2_MODULES.get(module, module)
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        full = f"{module}.{name}"[:_MAX_NAME_CHARACTERS]
        if full not in self._foreign:
            if len(self._foreign) >= _MAX_FOREIGN_NAMES:
                raise UnsafeObjectError(
                    f"the pickle names more than {_MAX_FOREIGN_NAMES} classes and functions that are not on "
                    "the allow-list; no code was run",
                    global_name=full,
                )
            self._foreign[full] = _ignoring(full, full, is_tensor=full.startswith("torch._utils._rebuild_"))
        return self._foreign[full]


def _ignoring(name: str, kind: str, *, is_tensor: bool) -> Constructor:
    def ignore(_: _Args) -> Ignored:
        return Ignored(kind, is_tensor=is_tensor)

    return Constructor(name, reduce=ignore, new=ignore)


def _malformed(what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"the pickle has an invalid {what}, not as written by torch.save")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise _malformed(what)


# -- tensors -------------------------------------------------------------------------------------------------


def _load_storage(value: Any) -> _Storage:
    """Return the storage of the persistent id ``value``."""
    if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
        raise _malformed("storage")
    _, kind, key, _, elements = value
    name = kind.name if type(kind) is Constructor else ""
    if name not in _STORAGES or type(key) is not str or len(key) > _MAX_KEY_CHARACTERS:
        raise _malformed("storage's class or key")
    return _Storage(_STORAGES[name], key, _natural(elements, "storage's size"))


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise _malformed(what)
    return value


def _naturals(values: Any, what: str) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMENSIONS:
        raise _malformed(what)
    return tuple(_natural(value, what) for value in values)


def _rebuild_v2(args: _Args) -> TensorPickle | Ignored:
    _require(6 <= len(args) <= 7, "tensor")
    dtype = args[0].dtype if isinstance(args[0], _Storage) else None
    return _rebuild_v3((*args[:6], dtype or dtypes.BY_NAME["uint8"], *args[6:]))


def _rebuild_v3(args: _Args) -> TensorPickle | Ignored:
    _require(7 <= len(args) <= 8, "tensor")
    storage, offset, sizes, strides, grad, _, dtype, *metadata = args
    if not isinstance(storage, _Storage) or not isinstance(dtype, dtypes.Dtype) or type(grad) is not bool:
        raise _malformed("tensor")
    if any(metadata):  # a view whose stored bytes differ from its values
        return Ignored("lazily conjugated or negated tensor", is_tensor=True)
    result = TensorPickle(
        dtype_code=dtype.code,
        storage_key=storage.key,
        storage_bytes=storage.elements * (storage.dtype.itemsize if storage.dtype else 1),
        storage_offset=_natural(offset, "tensor's storage offset"),
        sizes=_naturals(sizes, "tensor's sizes"),
        strides=_naturals(strides, "tensor's strides"),
        requires_grad=grad,
    )
    _require(len(result.sizes) == len(result.strides), "tensor's strides")
    # Elements outside of the storage would be bytes of other data.
    end = result.storage_offset + extent(result.sizes, result.strides) if 0 not in result.sizes else 0
    if end * dtype.itemsize > result.storage_bytes or math.prod(result.sizes) >= 1 << 62:
        raise CheckpointFormatError(
            f"the pickle has a tensor of shape {result.sizes} that exceeds its storage of "
            f"{result.storage_bytes} bytes"
        )
    return result


def _rebuild_parameter(args: _Args) -> TensorPickle:
    _require(3 <= len(args) <= 4, "parameter")
    data, grad = args[:2]
    if not isinstance(data, TensorPickle) or type(grad) is not bool:
        raise _malformed("parameter")
    return replace(data, requires_grad=grad)


def _foreign_in(args: _Args) -> str | None:
    """Return the name of the first argument that does not belong to a dense tensor."""
    for value in args:
        if isinstance(value, Ignored):
            return value.kind
        if type(value) is Constructor and value.name not in _OWN_NAMES:
            return value.name
    return None


def _readable(name: str, rebuild: Callable[[_Args], Any]) -> Constructor:
    """Return ``rebuild`` with unreadable tensors as `Ignored`."""

    def reduce(args: _Args) -> Any:
        foreign = _foreign_in(args)
        return rebuild(args) if foreign is None else Ignored(foreign, is_tensor=True)

    return Constructor(f"torch._utils.{name}", reduce=reduce)


def _from_type(args: _Args) -> Any:
    """Return the plain tensor of a tensor with attributes or of a subclass."""
    _require(len(args) == 4, "tensor of a class")
    function, kind, inner, _ = args
    foreign = _foreign_in((kind, function))
    if foreign is not None:
        return Ignored(foreign, is_tensor=True)
    _require(type(inner) is tuple and getattr(kind, "name", "") in _TENSORS, "tensor of a class")
    is_known = type(function) is Constructor and function.name.startswith("torch._utils._rebuild_")
    result = function.reduce(inner) if is_known and function.reduce is not None else None
    _require(isinstance(result, (TensorPickle, Ignored)), "tensor of a class")
    return result


# -- other values --------------------------------------------------------------------------------------------


def _size(args: _Args) -> SizePickle:
    (sizes,) = args
    _require(type(sizes) in (tuple, list) and len(sizes) <= MAX_DIMENSIONS, SIZE)
    _require(all(type(size) is int for size in sizes), SIZE)
    return SizePickle(sizes)


def _device(args: _Args) -> DevicePickle:
    kind, index = args if len(args) == 2 else (*args, None)
    _require(type(kind) is str and len(kind) <= _MAX_NAME_CHARACTERS, DEVICE)
    _require(index is None or (type(index) is int and 0 <= index < 1 << 15), DEVICE)
    return DevicePickle(kind, index)


def _mapping(kind: str) -> Constructor:
    def build(args: _Args) -> BuiltDict:
        """Build from nothing, a dict, or pairs."""
        given = args[0] if len(args) == 1 else () if args else []
        if not isinstance(given, dict | list) or isinstance(given, BuiltDict):
            raise _malformed(kind)
        result = BuiltDict(kind)
        for pair in given.items() if isinstance(given, dict) else given:
            if type(pair) not in (tuple, list) or len(pair) != 2 or not is_cheap_key(pair[0]):
                raise _malformed(kind)
            result[pair[0]] = pair[1]
        return result

    return Constructor(kind, reduce=build)


def _bytes(args: _Args) -> bytes:
    """Return bytes in the form of protocol 2."""
    text, encoding = args
    _require(type(text) is str and encoding == "latin1", "bytes")
    return str(text).encode("latin1")


def _complex(args: _Args) -> complex:
    real, imaginary = args
    _require(all(type(part) in (int, float) for part in args), "complex number")
    return complex(float(real), float(imaginary))


_STORAGES: Final[dict[str, dtypes.Dtype | None]] = {
    "torch.storage.UntypedStorage": None,
    **dict.fromkeys(f"torch.{name}" for name in _QUANTISED),
    **{f"torch.{name}": dtype for name, dtype in dtypes.BY_STORAGE_CLASS.items()},
}
"""Storage classes; None for bytes."""

_TENSORS: Final = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
"""Tensor classes whose plain data suffices."""

_OWN: Final[dict[tuple[str, str], Any]] = {
    **{
        (module, name): Constructor(f"{module}.{name}")
        for module, _, name in (full.rpartition(".") for full in (*_STORAGES, *_TENSORS))
    },
    **{("torch", name): dtype for name, dtype in dtypes.BY_NAME.items()},
    **{
        ("torch._utils", name): _readable(name, rebuild)
        for name, rebuild in (
            ("_rebuild_tensor_v2", _rebuild_v2),
            ("_rebuild_tensor_v3", _rebuild_v3),
            ("_rebuild_parameter", _rebuild_parameter),
            ("_rebuild_parameter_with_state", _rebuild_parameter),
        )
    },
    **{
        ("torch._utils", name): _ignoring(f"torch._utils.{name}", f"{kind} tensor", is_tensor=True)
        for name, kind in (
            ("_rebuild_sparse_tensor", "sparse"),
            ("_rebuild_qtensor", "quantized"),
            ("_rebuild_nested_tensor", "nested"),
            ("_rebuild_meta_tensor_no_storage", "meta"),
        )
    },
    ("torch._tensor", "_rebuild_from_type_v2"): Constructor(
        "torch._tensor._rebuild_from_type_v2", reduce=_from_type
    ),
    ("collections", "OrderedDict"): _mapping(ORDERED_DICT),
    ("collections", "Counter"): _mapping(COUNTER),
    ("torch", "Size"): made_of(SIZE, _size),
    ("torch", "device"): made_of(DEVICE, _device),
    ("torch.serialization", "_get_layout"): Constructor(LAYOUT, reduce=lambda _: Instance(LAYOUT)),
    ("_codecs", "encode"): made_of("_codecs.encode", _bytes),
    ("builtins", "complex"): made_of("builtins.complex", _complex),
}
_ALLOWED: Final = _OWN | NUMPY_GLOBALS | STDLIB_GLOBALS
_OWN_NAMES: Final = frozenset(value.name for value in _OWN.values() if type(value) is Constructor)
_find_in_record: Final = allow_list(
    _ALLOWED
    | {
        ("torch", name): _ignoring(f"torch.{name}", f"torch.{name}", is_tensor=False)
        for name in ("per_tensor_affine", "per_channel_affine")  # of quantized tensors, refused as such
    },
    what="the record of a tensor",
)
