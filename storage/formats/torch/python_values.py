"""Python values of decoded pickles, and the harmless values that load without trust. Torch-free.

*Harmless* are plain data (`dcp.storage.formats.plain`), containers of the standard library, numpy's arrays,
scalars and dtypes of plain types, and values of `dcp.storage.formats.pickle.classes`. All are made by this
package or by constructors with checked arguments.

A value of an index is its plain encoding or, only for torch.save files, HARMLESS_MARK and a pickle, decoded
like all pickles here. Manifests never have the latter.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.pickle.classes import (
    ArrayPickle,
    DefaultDictPickle,
    DequePickle,
    DtypePickle,
    LatePickle,
    is_plain_dtype,
)
from dcp.storage.formats.pickle.decoder import BuiltDict
from dcp.storage.formats.plain import MAX_FOREIGN_PLAIN_BYTES, NUMBER_HEADS, decode_plain, encode_plain
from dcp.storage.formats.torch.pickle_reader import COUNTER, decode_torch_pickle

HARMLESS_MARK: Final = b"\xc1"
"""Byte that msgpack never uses."""

MAX_DEPTH: Final = 64

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_FIXED: Final = (
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    fractions.Fraction,
    range,
    slice,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    type(pathlib.Path()),
    types.EllipsisType,
    types.NotImplementedType,
)
"""Types that the decoder returns unchanged."""

_KEYS: Final = frozenset({type(None), bool, int, float, str, bytes})
"""Key types without many colliding hashes; the decoder limits large integers."""

_LEAVES: Final = frozenset((*_FIXED, uuid.UUID, bytearray, io.BytesIO))
_FREE_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 64
"""Approximate size of an array's names and shape."""


def is_harmless_leaf(value: Any) -> bool:
    """Return True for values that load without trust and are neither plain data nor containers."""
    kind = type(value)
    if kind in _LEAVES:
        zone = getattr(value, "tzinfo", None)
        return zone is None or type(zone) is datetime.timezone
    if kind is np.ndarray or isinstance(value, np.generic):
        return kind.__module__ == "numpy" and is_plain_dtype(value.dtype)
    return isinstance(value, np.dtype) and is_plain_dtype(value)


def harmless_pickle(value: Any) -> bytes | None:
    """Return the protocol 2 pickle of a harmless leaf, frozenset, deque or defaultdict, without its first
    two and last bytes, to embed in a pickle. None for other values.
    """
    return pickle.dumps(value, protocol=2)[2:-1] if _is_harmless(value, 0) else None


def _is_harmless(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _ATOMS or is_harmless_leaf(value):
        return True
    if depth > MAX_DEPTH:
        return False
    if kind in (set, frozenset):
        return all(map(_is_key, value))
    if kind in (list, tuple, deque):
        return all(_is_harmless(item, depth + 1) for item in value)
    if kind in (dict, OrderedDict, Counter) or (
        kind is defaultdict and getattr(value.default_factory, "__module__", "builtins") == "builtins"
    ):
        return all(map(_is_key, value)) and all(_is_harmless(item, depth + 1) for item in value.values())
    return False


def _is_key(value: Any) -> bool:
    return type(value) in _KEYS or (type(value) is tuple and all(map(_is_key, value)))


def value_text(value: Any) -> str:
    """Return the repr of a value, with the content of buffers."""
    return f"BytesIO({value.getvalue()!r})" if type(value) is io.BytesIO else repr(value)


# -- values of an index --------------------------------------------------------------------------------------


def encode_value(value: Any, *, limit_bytes: int = MAX_FOREIGN_PLAIN_BYTES) -> bytes | None:
    """Return the encoding of ``value`` for an index of a torch.save file; None if not harmless or too
    large.
    """
    encoded = encode_plain(value, limit_bytes=limit_bytes)
    if encoded is not None or not _is_harmless(value, 0):
        return encoded
    data = HARMLESS_MARK + pickle.dumps(value, protocol=4)
    return data if len(data) <= limit_bytes else None


def decode_value(data: bytes) -> Any:
    """Return the value of `encode_value` without running code; CheckpointFormatError for other bytes."""
    if data[:1] != HARMLESS_MARK:
        return decode_plain(data, limit_bytes=MAX_FOREIGN_PLAIN_BYTES)
    if len(data) > MAX_FOREIGN_PLAIN_BYTES:
        raise CheckpointFormatError(
            f"a value has {len(data)} bytes, more than the limit of {MAX_FOREIGN_PLAIN_BYTES}"
        )
    return python_value(decode_torch_pickle(data[1:]), len(data))


def decode_values(encoded: Sequence[bytes]) -> list[Any]:
    """Decode many values like `decode_value`; numbers, None and booleans are decoded in bulk."""
    unpack, heads = msgpack.unpackb, NUMBER_HEADS
    try:
        return [unpack(data) if data and data[0] in heads else decode_value(data) for data in encoded]
    except CheckpointFormatError:
        raise
    except ValueError as error:
        raise CheckpointFormatError(f"malformed plain data: {error}") from error


def leaf_bytes(decoded: Any) -> int | None:
    """Return the approximate encoded size of a decoded leaf; None if not harmless."""
    kind = type(decoded)
    if kind is ArrayPickle:
        return None if decoded.array is None else _HEAD_BYTES + int(decoded.array.nbytes)
    if kind in (set, frozenset, bytearray):
        return _HEAD_BYTES + sum(_HEAD_BYTES + _length(item) for item in decoded)
    if kind is DtypePickle:
        return None if decoded.dtype is None else _HEAD_BYTES * int(decoded.fields)
    if kind is LatePickle:
        return None if decoded.value is None else _HEAD_BYTES + _late_bytes(decoded.value)
    if isinstance(decoded, np.generic):
        return _HEAD_BYTES + int(decoded.nbytes)
    return _HEAD_BYTES + sum(map(_length, getattr(decoded, "parts", ()))) if kind in _FIXED else None


def _late_bytes(value: Any) -> int:
    return len(value.getvalue()) if type(value) is io.BytesIO else 16


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | tuple) else 1


# -- what a pickle held --------------------------------------------------------------------------------------


def python_value(
    decoded: Any, pickle_bytes: int, special: Mapping[type, Callable[[Any], Any]] | None = None
) -> Any:
    """Return the value of the result of `decode_torch_pickle`; shared parts stay shared.

    ``special`` makes values of torch by the placeholder's type. ``pickle_bytes`` is the pickle's size.

    Raises:
        UnsafeObjectError: For a class that is not harmless, with its name.
        CheckpointFormatError: For values that contain themselves, are nested too deeply, or are much larger
            than the pickle.
    """
    return _PythonValues(pickle_bytes, special or {}).of(decoded, 0)


def kind_of(decoded: Any) -> str:
    """Return the class needed by a decoded value that is not harmless."""
    if isinstance(decoded, Dtype):
        return f"torch.{decoded.name}"
    name = getattr(decoded, "kind", None) or getattr(decoded, "name", None)
    return str(name) if name else f"a {type(decoded).__name__}"


_OPEN: Final = object()


class _PythonValues:
    def __init__(self, pickle_bytes: int, special: Mapping[type, Callable[[Any], Any]]) -> None:
        self._special = special
        self._made: dict[int, Any] = {}
        self._bytes_left = 2 * pickle_bytes + _FREE_BYTES

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        made = self._made.get(id(value), self)
        if made is _OPEN:
            raise CheckpointFormatError(
                "the pickle has a container that contains itself, which is not supported"
            )
        if made is not self:
            return made
        if depth > MAX_DEPTH:
            raise CheckpointFormatError(f"the pickle is nested deeper than {MAX_DEPTH} levels, the limit")
        self._made[id(value)] = _OPEN
        self._made[id(value)] = result = self._make(value, kind, depth + 1)
        return result

    def _make(self, value: Any, kind: type, depth: int) -> Any:
        if kind in self._special:
            return self._special[kind](value)
        if kind in (set, frozenset):
            return kind([_checked_key(item) for item in value])
        if kind in (list, tuple):
            return kind([self.of(item, depth) for item in value])
        if isinstance(value, dict):
            return self._dict(value, depth)
        if kind is DequePickle:
            return deque([self.of(item, depth) for item in value], value.max_length)
        if kind is ArrayPickle and value.array is not None:
            self._count(value.array.nbytes)  # a pickle may refer to its bytes many times
            return value.array.copy(order="K")  # a writable copy
        if kind is DtypePickle and value.dtype is not None:
            return value.dtype
        if kind is LatePickle and value.value is not None:
            self._count(_late_bytes(value.value))
            return value.value
        if kind is bytearray or kind in _FIXED or isinstance(value, np.generic):
            return value
        raise UnsafeObjectError(f"needs {kind_of(value)}", global_name=kind_of(value))

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        items = {_checked_key(key): self.of(item, depth) for key, item in value.items()}
        if isinstance(value, DefaultDictPickle):
            return defaultdict(value.factory, items)
        if not isinstance(value, BuiltDict):
            return items
        if value.kind == COUNTER and value.state is None:
            return Counter(items)
        result = OrderedDict(items)
        metadata = value.state.get("_metadata") if isinstance(value.state, dict) else None
        if metadata is not None:  # of a module's state dict; other attributes are ignored
            result._metadata = self.of(metadata, depth)  # type: ignore[attr-defined]  # as torch.nn.Module does
        return result

    def _count(self, size_bytes: int) -> None:
        self._bytes_left -= size_bytes
        if self._bytes_left < 0:
            raise CheckpointFormatError("the pickle repeats shared arrays to many times its length")


def _checked_key(key: Any) -> Any:
    if not _is_key(key):
        raise UnsafeObjectError(f"needs {kind_of(key)} as a key")
    return key
