"""Packed values with numpy columns, for messages between the ranks of a job.

Uses msgpack, never pickle. Integers are narrowed and the result compressed: equal values give equal bytes,
and the plans of a thousand ranks stay small. Messages come from ranks of the same job and are trusted;
other message versions are refused.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack
import numpy as np
from isal import isal_zlib

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError

_VERSION: Final = 3
_ARRAY: Final = 1
_PLAIN, _COMPRESSED = b"\0", b"\1"
_COMPRESSED_FROM_BYTES: Final = 4096


def pack(value: Any) -> bytes:
    """Pack None, numbers, text, bytes, numpy numbers and arrays, and lists, tuples and dicts of these.

    Raises:
        TypeError: For other types.
    """
    data = msgpack.packb(value, default=_array, unicode_errors="surrogatepass")
    if len(data) < _COMPRESSED_FROM_BYTES:
        return bytes([_VERSION]) + _PLAIN + data
    return bytes([_VERSION]) + _COMPRESSED + isal_zlib.compress(data, 1)


def unpack(data: bytes) -> Any:
    """Unpack the result of `pack`; lists become tuples, numpy numbers become Python numbers."""
    if data[:1] != bytes([_VERSION]):
        raise UnsupportedFormatError(
            f"another rank sent a message of version {data[:1]!r}, expected {_VERSION}: all ranks must run "
            "the same version of dcphub"
        )
    try:
        content = isal_zlib.decompress(data[2:]) if data[1:2] == _COMPRESSED else data[2:]
        return msgpack.unpackb(
            content,
            ext_hook=_restored,
            use_list=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, isal_zlib.error) as error:  # type: ignore[misc]
        raise CheckpointFormatError(f"a message of another rank cannot be decoded: {error}") from error


def _array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks: {value!r:.80}")
    narrow = value.dtype
    if value.size and narrow.itemsize > 1 and narrow.kind in "iu":
        ends = int(value.min()), int(value.max())
        joined = np.result_type(*map(np.min_scalar_type, ends))
        narrow = joined if joined.kind in "iu" else narrow  # -1 and 1 << 63 join to a float, which rounds
    kinds = msgpack.packb((value.dtype.str, narrow.str, value.shape))
    return msgpack.ExtType(_ARRAY, kinds + value.astype(narrow, copy=False).tobytes())


def _restored(code: int, data: bytes) -> Any:
    unpacker = msgpack.Unpacker(use_list=False)
    unpacker.feed(data[:256])
    kind, narrow, shape = unpacker.unpack()
    values = np.frombuffer(data, narrow, offset=unpacker.tell())
    return values.astype(kind).reshape(shape)
