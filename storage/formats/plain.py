"""Plain data as canonical msgpack with exact Python types.

None, bool, int of any size, float (NaN payloads, infinities, signed zero), complex, str, bytes, list,
tuple, and dict in insertion order with keys of these types. Subclasses (numpy's float64, OrderedDict,
IntEnum) are not plain, because their type would be lost.

Extension types cover the rest: a tuple is an array whose first element is an empty TUPLE_EXTENSION; a
complex is COMPLEX_EXTENSION with two little-endian doubles; an int outside msgpack's range is
INTEGER_EXTENSION with the shortest little-endian two's complement. Equal values of equal types give equal
bytes. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgpack

from dcp.storage.errors import CheckpointFormatError

MAX_PLAIN_BYTES: Final = 64 << 10
"""Maximum size in the manifest; larger values are stored as records."""

MAX_FOREIGN_PLAIN_BYTES: Final = 64 << 20
"""Maximum size in indexes of torch.save files, which have no records."""

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
"""Packer for numbers, shared by all threads because packing a number is atomic."""

_SHORT_BYTES: Final = 64
"""Maximum size of inputs that need no checks of container heads."""

NUMBER_HEADS: Final = frozenset(
    (*range(0x80), 0xC0, 0xC2, 0xC3, 0xCB, *range(0xCC, 0xD4), *range(0xE0, 0x100))
)
"""First bytes of None, booleans, floats and integers."""


def encode_plain(value: Any, *, limit_bytes: int = MAX_PLAIN_BYTES) -> bytes | None:
    """Return the encoding of ``value``; None if not plain, deeper than MAX_PLAIN_DEPTH or above the limit."""
    kind = type(value)
    if kind in _ATOMS or (kind is int and _SMALLEST_INT <= value <= _LARGEST_INT):
        number: bytes = _NUMBERS.pack(value)
        return number
    encoder = _Encoder(limit_bytes)
    try:
        encoder.write(value, 0)
    except ValueError:
        return None
    data = encoder.packer.bytes()
    return data if len(data) <= limit_bytes else None


class _Encoder:
    def __init__(self, limit_bytes: int) -> None:
        self.packer = msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")
        self._left = limit_bytes

    def write(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._left -= len(value) + 1 if kind is str or kind is bytes else 1
        if self._left < 0:
            raise ValueError
        if kind in _ATOMS or kind is str or kind is bytes:
            self.packer.pack(value)
        elif kind is int:
            if _SMALLEST_INT <= value <= _LARGEST_INT:
                self.packer.pack(value)
            else:
                size = (value if value >= 0 else ~value).bit_length() // 8 + 1
                self._left -= size
                encoded = value.to_bytes(size, "little", signed=True)
                self.packer.pack_ext_type(INTEGER_EXTENSION, encoded)
        elif kind is complex:
            self.packer.pack_ext_type(COMPLEX_EXTENSION, _COMPLEX.pack(value.real, value.imag))
        elif depth >= MAX_PLAIN_DEPTH:
            raise ValueError
        elif kind is dict:
            self._write_dict(value, depth + 1)
        elif kind is list or kind is tuple:
            self._write_sequence(value, kind is tuple, depth + 1)
        else:
            raise ValueError

    def _write_dict(self, value: dict[Any, Any], depth: int) -> None:
        if (  # paths by name, one per tensor: pack them together
            value
            and depth < MAX_PLAIN_DEPTH
            and _STRINGS.issuperset(map(type, value))
            and _TUPLES.issuperset(map(type, value.values()))
            and _STRINGS.issuperset(map(type, chain.from_iterable(value.values())))
        ):
            paths = value.values()
            self._left -= 2 * len(value) + sum(map(len, value)) + sum(map(len, paths))
            self._left -= sum(map(len, chain.from_iterable(paths)))
            if self._left < 0:
                raise ValueError
            self.packer.pack({name: [_TUPLE_MARK, *path] for name, path in value.items()})
            return
        self.packer.pack_map_header(len(value))
        for key, item in value.items():
            self.write(key, depth)
            self.write(item, depth)

    def _write_sequence(self, value: Sequence[Any], is_tuple: bool, depth: int) -> None:
        if _STRINGS.issuperset(map(type, value)):  # names and paths, one per tensor: pack them together
            self._left -= len(value) + sum(map(len, value))
            if self._left < 0:
                raise ValueError
            self.packer.pack([_TUPLE_MARK, *value] if is_tuple else value)
            return
        self.packer.pack_array_header(len(value) + is_tuple)
        if is_tuple:
            self.packer.pack_ext_type(TUPLE_EXTENSION, b"")
        for item in value:
            self.write(item, depth)


def decode_plain(data: bytes, *, limit_bytes: int = MAX_PLAIN_BYTES) -> Any:
    """Return the value of `encode_plain`, in time and memory bounded by the input's size.

    Raises:
        CheckpointFormatError: For other bytes.
    """
    if len(data) > limit_bytes:
        raise CheckpointFormatError(f"plain data has {len(data)} bytes, more than the limit of {limit_bytes}")
    try:
        if len(data) > _SHORT_BYTES:
            unpacker = msgpack.Unpacker(max_buffer_size=len(data))
            unpacker.feed(data)
            unpacker.skip()  # checks the heads of containers without allocation
        value = msgpack.unpackb(
            data,
            ext_hook=_extension,
            list_hook=_tuple_or_list,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except CheckpointFormatError:
        raise
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError) as error:
        raise CheckpointFormatError(f"plain data is not valid msgpack: {error}") from error
    if encode_plain(value, limit_bytes=len(data)) != data:
        raise CheckpointFormatError(
            f"plain data is not in the canonical encoding, or nested deeper than {MAX_PLAIN_DEPTH} levels"
        )
    return value


_TUPLE: Final = object()


def _tuple_or_list(items: list[Any]) -> Any:
    return tuple(items[1:]) if items and items[0] is _TUPLE else items


def _extension(code: int, data: bytes) -> Any:
    if code == TUPLE_EXTENSION and not data:
        return _TUPLE
    if code == COMPLEX_EXTENSION and len(data) == _COMPLEX.size:
        return complex(*_COMPLEX.unpack(data))
    if code == INTEGER_EXTENSION:
        return int.from_bytes(data, "little", signed=True)
    raise CheckpointFormatError(f"plain data has an unknown extension type {code}")
