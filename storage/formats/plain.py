"""Plain data as canonical msgpack that keeps exact Python types.

None, bool, int of any size, float (NaN payloads, infinities, signed zero), complex, str, bytes, list, tuple,
and dict in insertion order with keys of these. Exact types only: a subclass (numpy's float64, an OrderedDict,
an IntEnum) would come back as something else, so it is not plain.

What msgpack lacks is written as extension types: a tuple is an array whose first element is an empty
TUPLE_EXTENSION; a complex is COMPLEX_EXTENSION with two little-endian doubles; an int outside msgpack's range
is INTEGER_EXTENSION with its shortest little-endian two's complement. Equal values of equal types give equal
bytes, so encodings can be compared and shared. Torch-free.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any, Final

import msgpack

from dcp.storage.errors import CheckpointFormatError

__all__ = [
    "MAX_FOREIGN_PLAIN_BYTES",
    "MAX_PLAIN_BYTES",
    "MAX_PLAIN_DEPTH",
    "NUMBER_HEADS",
    "decode_plain",
    "encode_plain",
]

MAX_PLAIN_BYTES: Final = 64 << 10
"""Larger values are stored as records; the manifest is for small ones."""

MAX_FOREIGN_PLAIN_BYTES: Final = 64 << 20
"""Of values in indexes of torch.save files, which have no records: as much as their pickles may have."""

MAX_PLAIN_DEPTH: Final = 64

TUPLE_EXTENSION: Final = 1
COMPLEX_EXTENSION: Final = 2
INTEGER_EXTENSION: Final = 3

_STRINGS: Final = frozenset({str})
_TUPLES: Final = frozenset({tuple})
_TUPLE_MARK: Final = msgpack.ExtType(TUPLE_EXTENSION, b"")
_COMPLEX: Final = struct.Struct("<dd")
_SMALLEST_INT: Final = -(1 << 63)
_LARGEST_INT: Final = (1 << 64) - 1
_ATOMS: Final = frozenset({type(None), bool, float})
_NUMBERS: Final = msgpack.Packer()
"""For all threads: to pack one number is one step of the interpreter's."""

NUMBER_HEADS: Final = frozenset(
    (*range(0x80), 0xC0, 0xC2, 0xC3, 0xCB, *range(0xCC, 0xD4), *range(0xE0, 0x100))
)
"""First bytes of None, booleans, floats and integers, which have their length in them."""


class _NotPlainError(Exception):
    """The value is not plain data, too deep or too large."""


def encode_plain(value: Any, *, limit_bytes: int = MAX_PLAIN_BYTES) -> bytes | None:
    """The encoding of ``value``; None if it is not plain, deeper than MAX_PLAIN_DEPTH or above the limit."""
    kind = type(value)
    if (kind in _ATOMS or (kind is int and _SMALLEST_INT <= value <= _LARGEST_INT)) and limit_bytes >= 9:
        number: bytes = _NUMBERS.pack(value)
        return number
    encoder = _Encoder(limit_bytes)
    try:
        encoder.write(value, 0)
    except _NotPlainError:
        return None
    data = encoder.packer.bytes()
    return data if len(data) <= limit_bytes else None


class _Encoder:
    def __init__(self, limit_bytes: int) -> None:
        self.packer = msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")
        self._left = limit_bytes

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._spend(1)
        if kind in _ATOMS:
            self.packer.pack(value)
        elif kind is int:
            self._write_int(value)
        elif kind is str or kind is bytes:
            self._spend(len(value))
            self.packer.pack(value)
        elif kind is complex:
            self.packer.pack_ext_type(COMPLEX_EXTENSION, _COMPLEX.pack(value.real, value.imag))
        else:
            self._write_container(value, kind, depth + 1)

    def _write_container(self, value: Any, kind: type, depth: int) -> None:
        if depth > MAX_PLAIN_DEPTH or kind not in (list, tuple, dict):
            raise _NotPlainError
        if kind is dict and depth < MAX_PLAIN_DEPTH and _are_paths(value):
            paths = value.values()
            self._spend(2 * len(value) + sum(map(len, value)) + sum(map(len, paths)))
            self._spend(sum(map(len, chain.from_iterable(paths))))
            self.packer.pack({name: [_TUPLE_MARK, *path] for name, path in value.items()})
            return
        if kind is dict:
            self.packer.pack_map_header(len(value))
            for key, item in value.items():
                self.write(key, depth)
                self.write(item, depth)
            return
        if _STRINGS.issuperset(map(type, value)):  # names and paths, as many as there are tensors: at once
            self._spend(len(value) + sum(map(len, value)))
            self.packer.pack([_TUPLE_MARK, *value] if kind is tuple else value)
            return
        if kind is tuple:
            self.packer.pack_array_header(len(value) + 1)
            self.packer.pack_ext_type(TUPLE_EXTENSION, b"")
        else:
            self.packer.pack_array_header(len(value))
        for item in value:
            self.write(item, depth)

    def _write_int(self, value: int) -> None:
        if _SMALLEST_INT <= value <= _LARGEST_INT:
            self.packer.pack(value)
            return
        size = _int_bytes(value)
        self._spend(size)
        self.packer.pack_ext_type(INTEGER_EXTENSION, value.to_bytes(size, "little", signed=True))

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _NotPlainError


def _are_paths(value: dict[Any, Any]) -> bool:
    """Return whether they are tuples of strings by name, as many as there are tensors: packed at once."""
    return (
        _STRINGS.issuperset(map(type, value))
        and _TUPLES.issuperset(map(type, value.values()))
        and _STRINGS.issuperset(map(type, chain.from_iterable(value.values())))
    )


def _int_bytes(value: int) -> int:
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


def decode_plain(data: bytes, *, limit_bytes: int = MAX_PLAIN_BYTES) -> Any:
    """The value of `encode_plain`; CheckpointFormatError for bytes that it does not write.

    Safe on hostile input: time and memory are bounded by the input's size.
    """
    if len(data) > limit_bytes:
        raise CheckpointFormatError(f"plain data of {len(data)} bytes is above the limit of {limit_bytes}")
    if data and data[0] in NUMBER_HEADS:
        try:
            return msgpack.unpackb(data)
        except ValueError as error:
            raise CheckpointFormatError(f"malformed plain data: {error}") from error
    decoder = _Decoder(data)
    try:
        value = decoder.read(0)
    except CheckpointFormatError:
        raise
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, struct.error) as error:
        raise CheckpointFormatError(f"malformed plain data: {error}") from error
    if decoder.position != len(data):
        raise CheckpointFormatError(f"plain data has {len(data) - decoder.position} bytes too many")
    if value is _TUPLE:
        raise CheckpointFormatError("plain data has a tuple mark outside an array")
    return value


_TUPLE: Final = object()


class _Decoder:
    """Reads containers step by step: msgpack's unpacker would allocate one on the word of its header."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._unpacker = msgpack.Unpacker(
            ext_hook=_extension, unicode_errors="surrogatepass", max_buffer_size=max(len(data), 1)
        )
        self._unpacker.feed(data)

    @property
    def position(self) -> int:
        return self._unpacker.tell()

    def read(self, depth: int) -> Any:
        position = self._unpacker.tell()
        if position >= len(self._data):
            raise CheckpointFormatError("plain data ends too early")
        head = self._data[position]
        if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
            return self._read_array(depth + 1)
        if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
            return self._read_map(depth + 1)
        value = self._unpacker.unpack()
        if type(value) is msgpack.Timestamp:  # msgpack decodes this extension before it asks the hook
            raise CheckpointFormatError("plain data has a timestamp")
        return value

    def _read_array(self, depth: int) -> Any:
        count = self._checked(self._unpacker.read_array_header(), depth)
        if count == 0:
            return []
        first = self.read(depth)
        if first is _TUPLE:
            return tuple([self._item(depth) for _ in range(count - 1)])
        items = [first]
        items.extend(self._item(depth) for _ in range(count - 1))
        return items

    def _read_map(self, depth: int) -> Any:
        count = self._checked(self._unpacker.read_map_header(), depth)
        result = {}
        for _ in range(count):
            key = self._item(depth)
            result[key] = self._item(depth)
        if len(result) != count:
            raise CheckpointFormatError("plain data has one dict key twice")
        return result

    def _item(self, depth: int) -> Any:
        item = self.read(depth)
        if item is _TUPLE:
            raise CheckpointFormatError("plain data has a tuple mark where a value belongs")
        return item

    def _checked(self, count: int, depth: int) -> int:
        if depth > MAX_PLAIN_DEPTH or count > len(self._data) - self._unpacker.tell():
            raise CheckpointFormatError("plain data is nested too deeply, or ends too early")
        return count


def _extension(code: int, data: bytes) -> Any:
    if code == TUPLE_EXTENSION and not data:
        return _TUPLE
    if code == COMPLEX_EXTENSION and len(data) == _COMPLEX.size:
        return complex(*_COMPLEX.unpack(data))
    if code == INTEGER_EXTENSION:
        return int.from_bytes(data, "little", signed=True)
    raise CheckpointFormatError(f"plain data has an unknown extension type {code}")
