"""The `data.pkl` of a torch.save file, written without torch: nested containers, plain values and tensors.

Protocol 2 without memo, as `torch.load(weights_only=True)` reads it. A tensor is a `TensorRef`: its storage
is an entry of the file's zip, named by a persistent id.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.pickle.stdlib_classes import FACTORIES
from dcp.storage.formats.torch.pickle_reader import DevicePickle
from dcp.storage.formats.torch.python_values import harmless_pickle
from dcp.storage.geometry.strides import c_strides

__all__ = ["MAX_DEPTH", "PickledTensor", "SizeValue", "TensorRef", "encode_torch_pickle"]

MAX_DEPTH: Final = 256
"""Nesting above this is refused: torch's own pickler stops at Python's recursion limit."""

_EMPTY_ORDERED: Final = b"ccollections\nOrderedDict\n)R"
_FACTORIES: Final[Mapping[Any, bytes]] = {None: b"N"} | {
    kind: f"c__builtin__\n{kind.__name__}\n".encode() for kind in FACTORIES.values()
}


_SHORT_TEXTS: Final = [b"X" + size.to_bytes(4, "little") for size in range(256)]
"""How texts begin: there are as many as tensors."""


class SizeValue(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()


class TensorRef(NamedTuple):
    """A C-ordered tensor that fills a prefix of storage ``key`` of ``storage_elements``."""

    dtype_code: int
    key: str
    storage_elements: int
    sizes: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """A C-ordered tensor with its bytes, which are a storage of its own; compared by identity."""

    dtype_code: int
    sizes: tuple[int, ...]
    data: bytes
    requires_grad: bool = False

    def ref(self, key: str) -> TensorRef:
        """Return the tensor, stored as ``key``."""
        elements = len(self.data) // dtypes.BY_CODE[self.dtype_code].itemsize
        return TensorRef(self.dtype_code, key, elements, self.sizes, requires_grad=self.requires_grad)


def encode_torch_pickle(value: Any, keys: Mapping[Any, str] | None = None) -> bytes:
    """Return the pickle of ``value``: dict, OrderedDict (also with ``_metadata``), Counter, list, tuple, set,
    None, bool, int, float, complex, str, bytes, `SizeValue` and `TensorRef`, nested, torch's dtypes and
    devices as `Dtype` and `DevicePickle`, deques and defaultdicts of all these, and what is harmless
    (`python_values`). ``keys`` names the storages of every `PickledTensor` in it, and anew those of
    `TensorRef`s that it has. PlanError for anything else."""
    writer = _PickleWriter(keys or {})
    writer.write(value, 0)
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _PickleWriter:
    def __init__(self, keys: Mapping[Any, str]) -> None:
        self.parts: list[bytes] = []
        self._keys = keys

    def write(self, value: Any, depth: int) -> None:
        atom = _ATOMS.get(type(value))
        if atom is not None:
            self.parts.append(atom(value))
        elif type(value) is TensorRef:
            self.parts += _tensor(value, self._keys.get(value.key, value.key))
        elif type(value) is PickledTensor:
            key = self._keys[value]
            self.parts += _tensor(value.ref(key), key)
        elif type(value) is dtypes.Dtype:
            self.parts.append(b"ctorch\n" + value.name.encode() + b"\n")
        elif type(value) is DevicePickle:
            self.parts.append(_device(value))
        else:
            self._write_container(value, depth + 1)

    def _write_container(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise PlanError(f"the state dict is nested deeper than {MAX_DEPTH} levels")
        put, kind = self.parts.append, type(value)
        if kind is dict or kind is OrderedDict:
            put(b"}(" if kind is dict else _EMPTY_ORDERED + b"(")
            for key, item in value.items():
                if type(key) is str:
                    put(_text(key))
                else:
                    self.write(key, depth)
                if type(item) is TensorRef:  # the most there is
                    self.parts += _tensor(item, self._keys.get(item.key, item.key))
                else:
                    self.write(item, depth)
            put(b"u")
            if getattr(value, "_metadata", None) is not None:
                self._write_metadata(value._metadata, depth)
        elif kind is Counter:
            put(b"ccollections\nCounter\n(")
            self.write(dict(value), depth)
            put(b"tR")
        elif kind is list:
            put(b"](")
            self._write_all(value, depth)
            put(b"e")
        elif kind is tuple:
            put(b"(")
            self._write_all(value, depth)
            put(b"t")
        elif kind is SizeValue:
            put(b"ctorch\nSize\n((")
            self._write_all(value, depth)
            put(b"ttR")
        elif kind is set:
            put(b"c__builtin__\nset\n(](")
            self._write_all(value, depth)
            put(b"etR")
        elif (inner := harmless_pickle(value)) is not None:
            put(inner)
        elif kind is deque:
            put(b"ccollections\ndeque\n(]")
            self.write(value.maxlen, depth)
            put(b"tR(")
            self._write_all(value, depth)
            put(b"e")
        elif kind is defaultdict and value.default_factory in _FACTORIES:
            put(b"ccollections\ndefaultdict\n(" + _FACTORIES[value.default_factory] + b"tR(")
            self._write_all((part for item in value.items() for part in item), depth)
            put(b"u")
        else:
            raise PlanError(f"a {kind.__name__} cannot be written to a torch.save file without torch")

    def _write_metadata(self, metadata: Any, depth: int) -> None:
        """Write the attribute that a module's state dict has: versions of modules."""
        self.parts.append(b"}(" + _text("_metadata"))
        self.write(metadata, depth)
        self.parts.append(b"ub")

    def _write_all(self, items: Any, depth: int) -> None:
        for item in items:
            self.write(item, depth)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1)
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = (value if value >= 0 else ~value).bit_length() // 8 + 1
    data = value.to_bytes(length, "little", signed=True)
    if length < 256:
        return b"\x8a" + length.to_bytes(1) + data
    return b"\x8b" + length.to_bytes(4, "little") + data


def _text(value: str) -> bytes:
    data = value.encode() if value.isascii() else value.encode("utf-8", "surrogatepass")
    size = len(data)
    return (_SHORT_TEXTS[size] if size < 256 else b"X" + size.to_bytes(4, "little")) + data


def _binary(value: bytes) -> bytes:
    """Pickle bytes as Python's own pickler does in protocol 2, which has no opcode for bytes."""
    if not value:
        return b"c_codecs\nencode\n(X\0\0\0\0X\6\0\0\0latin1tR"
    return b"c_codecs\nencode\n(" + _text(value.decode("latin1")) + _text("latin1") + b"tR"


def _complex(value: complex) -> bytes:
    return b"c__builtin__\ncomplex\n(" + _double(value.real) + _double(value.imag) + b"tR"


def _device(device: DevicePickle) -> bytes:
    index = b"" if device.index is None else _integer(device.index)
    return b"ctorch\ndevice\n(" + _text(device.type) + index + b"tR"


def _double(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


_ATOMS: Final[Mapping[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: _double,
    complex: _complex,
    str: _text,
    bytes: _binary,
}


def _numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"


def _tensor(tensor: TensorRef, key: str) -> tuple[bytes, bytes, bytes]:
    code, _, elements, sizes, requires_grad = tensor
    before, after = _tensor_parts(code, elements, sizes, requires_grad)
    return before, _text(key), after


@lru_cache(maxsize=256)
def _tensor_parts(
    dtype_code: int, storage_elements: int, sizes: tuple[int, ...], requires_grad: bool
) -> tuple[bytes, bytes]:
    """Return what stands before and after the key of a storage: a checkpoint has many tensors of few
    shapes."""
    dtype = dtypes.BY_CODE[dtype_code]
    if dtype.storage_class is None:
        rebuild, storage, unit = b"_rebuild_tensor_v3", b"ctorch.storage\nUntypedStorage\n", dtype.itemsize
        last = b"ctorch\n" + dtype.name.encode() + b"\n"
    else:
        rebuild, unit, last = b"_rebuild_tensor_v2", 1, b""
        storage = b"ctorch\n" + dtype.storage_class.encode() + b"\n"
    before = b"ctorch._utils\n" + rebuild + b"\n((" + _text("storage") + storage
    geometry = b"K\0" + _numbers(sizes) + _numbers(c_strides(sizes))
    grad = b"\x88" if requires_grad else b"\x89"
    after = _text("cpu") + _integer(storage_elements * unit) + b"tQ" + geometry
    after += grad + _EMPTY_ORDERED + last + b"tR"
    return before, after
