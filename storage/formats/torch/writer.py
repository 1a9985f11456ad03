"""Writer of torch.save files without torch: `data.pkl` and the zip layout.

The pickle has nested containers, plain values and tensors in protocol 2 without memo, readable by
`torch.load(weights_only=True)`. A tensor is a `TensorRef` to a storage, a zip entry named by a persistent
id.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.native import record
from dcp.storage.formats.pickle.classes import FACTORIES
from dcp.storage.formats.torch.pickle_reader import DevicePickle, SizePickle
from dcp.storage.formats.torch.python_values import harmless_pickle
from dcp.storage.geometry.strides import Int64, c_strides

MAX_DEPTH: Final = 256
"""Maximum nesting, because torch's pickler stops at Python's recursion limit."""

_FACTORIES: Final[Mapping[Any, bytes]] = {None: b"N"} | {
    kind: f"c__builtin__\n{kind.__name__}\n".encode() for kind in FACTORIES.values()
}


_AROUND_ITEMS: Final[Mapping[type, tuple[bytes, bytes]]] = {
    list: (b"](", b"e"),
    tuple: (b"(", b"t"),
    SizePickle: (b"ctorch\nSize\n((", b"ttR"),
    set: (b"c__builtin__\nset\n(](", b"etR"),
}

_SHORT_TEXTS: Final = [b"X" + size.to_bytes(4, "little") for size in range(256)]
"""Cached heads of short texts, as frequent as tensors."""


class TensorRef(NamedTuple):
    """C-ordered tensor that fills a prefix of storage ``key`` of ``storage_elements``."""

    dtype_code: int
    key: str
    storage_elements: int
    sizes: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """C-ordered tensor with bytes in its own storage; compared by identity."""

    dtype_code: int
    sizes: tuple[int, ...]
    data: bytes
    requires_grad: bool = False


Storages = dict[str | PickledTensor, str]
"""Storages by the key of `TensorRef`s, or the tensor of a single storage."""


def encode_torch_pickle(value: Any, storages: Storages) -> bytes:
    """Return the pickle of ``value``.

    Supported are dict, OrderedDict (with ``_metadata``), Counter, list, tuple, set, None, bool, int, float,
    complex, str, bytes, `SizePickle` and `TensorRef`, nested; torch's dtypes and devices as `Dtype` and
    `DevicePickle`; deques and defaultdicts of these; and harmless values (`python_values`). ``storages``
    receives the storages of all `TensorRef`s and `PickledTensor`s, numbered in the order of torch.load.

    Raises:
        PlanError: For other values.
    """
    writer = _PickleWriter(storages)
    writer.write(value, 0)
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _PickleWriter:
    def __init__(self, storages: Storages) -> None:
        self.parts: list[bytes] = []
        self._storages = storages

    def write(self, value: Any, depth: int) -> None:
        atom = _ATOMS.get(type(value))
        if atom is not None:
            self.parts.append(atom(value))
        elif type(value) is TensorRef:
            self._write_tensor(*value)
        elif type(value) is PickledTensor:
            elements = len(value.data) // dtypes.BY_CODE[value.dtype_code].itemsize
            self._write_tensor(value.dtype_code, value, elements, value.sizes, value.requires_grad)
        elif type(value) is dtypes.Dtype:
            self.parts.append(b"ctorch\n" + value.name.encode() + b"\n")
        elif type(value) is DevicePickle:
            index = b"" if value.index is None else record.pickled_integer(value.index)
            self.parts.append(b"ctorch\ndevice\n(" + _text(value.type) + index + b"tR")
        else:
            self._write_container(value, depth + 1)

    def _write_container(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise PlanError(f"the state dict is nested deeper than {MAX_DEPTH} levels: flatten it")
        put, kind = self.parts.append, type(value)
        if kind is dict or kind is OrderedDict:
            put(b"}(" if kind is dict else record.EMPTY_ORDERED_DICT + b"(")
            for key, item in value.items():
                if type(key) is str:
                    put(_text(key))
                else:
                    self.write(key, depth)
                if type(item) is TensorRef:  # the most frequent value
                    self._write_tensor(*item)
                else:
                    self.write(item, depth)
            put(b"u")
            if getattr(value, "_metadata", None) is not None:
                put(b"}(" + _text("_metadata"))  # versions of modules in a module's state dict
                self.write(value._metadata, depth)
                put(b"ub")
        elif kind is Counter:
            put(b"ccollections\nCounter\n(")
            self.write(dict(value), depth)
            put(b"tR")
        elif kind in _AROUND_ITEMS:
            put(_AROUND_ITEMS[kind][0])
            self._write_all(value, depth)
            put(_AROUND_ITEMS[kind][1])
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
            raise PlanError(
                f"a {kind.__name__} cannot be converted to a torch.save file: exclude the entry, or load the "
                "checkpoint and use torch.save"
            )

    def _write_tensor(
        self,
        code: int,
        key: str | PickledTensor,
        elements: int,
        sizes: tuple[int, ...],
        requires_grad: bool,
    ) -> None:
        before, after = _tensor_parts(code, elements, sizes, requires_grad)
        name = self._storages.setdefault(key, str(len(self._storages)))
        self.parts += (before, _text(name), after)

    def _write_all(self, items: Any, depth: int) -> None:
        for item in items:
            self.write(item, depth)


def _text(value: str) -> bytes:
    data = value.encode() if value.isascii() else value.encode("utf-8", "surrogatepass")
    size = len(data)
    return (_SHORT_TEXTS[size] if size < 256 else b"X" + size.to_bytes(4, "little")) + data


def _binary(value: bytes) -> bytes:
    """Pickle bytes like Python's pickler in protocol 2, which has no opcode for bytes."""
    if not value:
        return b"c_codecs\nencode\n(X\0\0\0\0X\6\0\0\0latin1tR"
    return b"c_codecs\nencode\n(" + _text(value.decode("latin1")) + _text("latin1") + b"tR"


def _double(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


_ATOMS: Final[Mapping[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: record.pickled_integer,
    float: _double,
    complex: lambda value: b"c__builtin__\ncomplex\n(" + _double(value.real) + _double(value.imag) + b"tR",
    str: _text,
    bytes: _binary,
}


@lru_cache(maxsize=256)
def _tensor_parts(
    dtype_code: int, storage_elements: int, sizes: tuple[int, ...], requires_grad: bool
) -> tuple[bytes, bytes]:
    """Return the parts before and after the storage key of a tensor, cached by shape."""
    numbers = (b"".join(map(record.pickled_integer, row)) for row in (sizes, c_strides(sizes)))
    geometry = b"".join(b"(" + row + b"t" for row in numbers)
    return record.tensor_pickle_parts(dtype_code, storage_elements, geometry, requires_grad=requires_grad)


_UNSET_16: Final = 0xFFFF
_UTF8_FLAG: Final = 1 << 11
_FIELD: Final = struct.Struct("<HH")
_CENTRAL: Final = struct.Struct("<4sHHHHIIIIHH10xI")
"""Central directory entry without comment and attributes, on the first disk."""
_CENTRAL_CRC_AT: Final = 16
_DESCRIPTORS: Final = (struct.Struct("<4sIII"), struct.Struct("<4sIQQ"))
_DESCRIPTOR_CRC_AT: Final = 4

_NOTHING: Final[Mapping[int, bytes]] = MappingProxyType({})


class ZipLayout:
    """Zip layout, extended by `add` (known contents) and `reserve` (later contents), ended by `finish`.

    ``parts`` and ``offsets`` are all bytes outside of reserved entries, in file order, with their
    positions. ``crc_holes`` are (entry key, file offset) of pending CRC-32s.
    """

    def __init__(self, folder: str) -> None:
        self.offsets: list[int] = []
        self.parts: list[bytes] = []
        self.crc_holes: list[tuple[int, int]] = []
        self.size_bytes = 0
        self._folder = folder
        self._pieces: list[bytes] = []
        self._part_begin = 0
        self._directory: list[bytes] = []
        self._directory_bytes = self._count = 0
        self._directory_holes: list[tuple[int, int]] = []

    def reserve(
        self, folder: str, sizes: Int64, keys: Int64, crcs: Int64, contents: Mapping[int, bytes] = _NOTHING
    ) -> Int64:
        """Reserve entries of ``sizes`` bytes for the caller to write; return their file positions.

        Entries are named ``folder/0`` and so on. ``keys`` (not negative) name entries in ``crc_holes``; -1
        uses the CRC in ``crcs``. Entries in ``contents`` (by number) are known.
        """
        begins = []
        rows = zip(sizes.tolist(), keys.tolist(), crcs.tolist(), strict=True)
        for number, (size, key, crc) in enumerate(rows):
            begins.append(self.add(f"{folder}/{number}", contents.get(number), size, key, crc))
        return np.array(begins, np.int64)

    def add(self, name: str, data: bytes | None, size: int = 0, key: int = -1, crc: int = 0) -> int:
        """Add an entry with contents ``data``, or reserve ``size`` bytes if None; return the position."""
        if data is not None:
            size, crc = len(data), crc32(data)
        elif not size:
            crc = 0
        encoded = f"{self._folder}/{name}".encode()
        offset, name_bytes, short = self.size_bytes, len(encoded), min(size, record.UNSET_32)
        flags = (record.DESCRIPTOR_FLAG if size else 0) | (0 if encoded.isascii() else _UTF8_FLAG)
        version, wide = 20, b""
        is_wide = size >= record.UNSET_32 or offset >= record.UNSET_32
        if is_wide:
            values = [size, size] * (size >= record.UNSET_32) + [offset] * (offset >= record.UNSET_32)
            wide = struct.pack(f"<HH{len(values)}Q", record.ZIP64_FIELD, 8 * len(values), *values)
            version = 45
        unpadded = offset + record.LOCAL.size + name_bytes + len(wide) + _FIELD.size
        padding = -unpadded % record.ALIGNMENT_BYTES
        begin = unpadded + padding
        end = begin + size
        extra = wide + _FIELD.pack(record.PADDING_FIELD, padding) + b"Z" * padding
        local = (version, flags, 0, record.DOS_EPOCH, 0 if data is None else crc, short, short)
        self._pieces += (record.LOCAL.pack(b"PK\3\4", *local, name_bytes, len(extra)), encoded, extra)
        if data is not None:
            self._pieces.append(data)
        else:
            self.offsets.append(self._part_begin)
            self.parts.append(b"".join(self._pieces))
            self._pieces, self._part_begin = [], end
            if key >= 0 and size:
                crc = 0
                self.crc_holes.append((key, end + _DESCRIPTOR_CRC_AT))
                self._directory_holes.append((key, self._directory_bytes + _CENTRAL_CRC_AT))
        if size:  # empty entries have no descriptor, as in torch
            descriptor = _DESCRIPTORS[is_wide].pack(b"PK\7\10", crc, size, size)
            self._pieces.append(descriptor)
            end += len(descriptor)
        central = (version, version, flags, 0, record.DOS_EPOCH, crc, short, short, name_bytes, len(wide))
        self._directory += (_CENTRAL.pack(b"PK\1\2", *central, min(offset, record.UNSET_32)), encoded, wide)
        self._directory_bytes += _CENTRAL.size + name_bytes + len(wide)
        self._count += 1
        self.size_bytes = end
        return begin

    def finish(self) -> None:
        """Add the central directory and the end of the zip."""
        begin, count, size = self.size_bytes, self._count, self._directory_bytes
        end = b""
        if count >= _UNSET_16 or size >= record.UNSET_32 or begin >= record.UNSET_32:
            end += record.END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
            end += record.END64_LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        counts = (min(count, _UNSET_16),) * 2
        places = (min(size, record.UNSET_32), min(begin, record.UNSET_32))
        end += record.END.pack(b"PK\5\6", 0, 0, *counts, *places, 0)
        self.offsets.append(self._part_begin)
        self.parts.append(b"".join([*self._pieces, *self._directory, end]))
        self.crc_holes += [(key, begin + place) for key, place in self._directory_holes]
        self.size_bytes += size + len(end)
