"""A conversion's plan as plain data, for whoever carries out a part of it in another process or publishes it.

Columns are packed as differences from row to row, because neighbours hardly differ; all of it goes through
zlib. Nothing is pickled: of objects there are the kinds that are named here.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgpack
import numpy as np

from dcp.conversion.copying.tasks import Task, TaskBatch, TaskResult
from dcp.conversion.layouts.layout import Copies, Hole, Literals, TargetLayout
from dcp.conversion.layouts.sources import SourceColumns, TaskCopies, TermColumns
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest

__all__ = [
    "decode_batch",
    "decode_layout",
    "decode_result",
    "encode_batch",
    "encode_layout",
    "encode_result",
]

_MAX_DEPTH: Final = 8
"""Of what stands within another; a batch has five."""

T = TypeVar("T")

_KINDS: Final = (TaskBatch, Task, TaskCopies, SourceColumns, TermColumns, TargetLayout, Copies)
_ARRAY, _INDEX, _OBJECT = range(3)
_DTYPES: Final = ("<i8", "<f8")
_LEFT_OUT: Final = ("literals", "replaced")
"""Fields of a layout that publishing does not need: tasks write the literals."""

_MAX_BYTES: Final = 1 << 30


def encode_batch(batch: TaskBatch) -> str:
    """``batch`` as text; `decode_batch` is the inverse."""
    return _text(_packed(batch))


def decode_batch(text: str) -> TaskBatch:
    """Raises CheckpointFormatError for what `encode_batch` does not write."""
    with _damage_reported():
        batch = _unpacked(text, TaskBatch)
        return replace(batch, tasks=tuple(batch.tasks))


def encode_layout(layout: TargetLayout) -> str:
    """``layout`` without its literals as text; `decode_layout` is the inverse."""
    return _text(_packed(layout))


def decode_layout(text: str) -> TargetLayout:
    """Without literals. Raises CheckpointFormatError for what `encode_layout` does not write."""
    return _unpacked(text, TargetLayout)


def encode_result(result: TaskResult) -> str:
    """``result`` as text; `decode_result` is the inverse."""
    return _text(result.encode())


def decode_result(text: str) -> TaskResult:
    """Raises CheckpointFormatError for what `encode_result` does not write."""
    with _damage_reported():
        return TaskResult.decode(_bytes(text))


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, default=_extension, unicode_errors="surrogatepass"))


def _extension(value: Any) -> Any:
    """Of what msgpack does not have."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, CheckpointIndex):
        return msgpack.ExtType(_INDEX, encode_manifest(value, is_checked=True))
    if isinstance(value, np.ndarray):
        kind = _DTYPES[value.dtype.kind == "f"]
        rows = value.astype(kind)
        if kind == "<i8":
            rows = np.diff(rows, axis=0, prepend=np.int64(0))
        return msgpack.ExtType(_ARRAY, _packed([kind, value.shape, rows.tobytes()]))
    own = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, TargetLayout):
        own = {name: field for name, field in own.items() if name not in _LEFT_OUT}
    return msgpack.ExtType(_OBJECT, _packed([_KINDS.index(type(value)), own]))


def _unpacked(text: str, kind: type[T]) -> T:
    with _damage_reported():
        found = _plain(_bytes(text))
        if not isinstance(found, kind):
            raise TypeError
        return found


def _plain(data: bytes, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    hook = partial(_of_extension, depth + 1)
    return msgpack.unpackb(data, ext_hook=hook, strict_map_key=False, unicode_errors="surrogatepass")


def _of_extension(depth: int, code: int, data: bytes) -> Any:
    if code == _INDEX:
        return decode_manifest(data)
    if code == _ARRAY:
        dtype, shape, packed = _plain(data, depth)
        rows: Any = np.frombuffer(packed, _DTYPES[_DTYPES.index(dtype)]).reshape(shape)
        return rows if dtype == "<f8" else np.cumsum(rows, axis=0)
    number, own = _plain(data, depth)
    kind: Any = _KINDS[number]
    if kind is TargetLayout:
        own["literals"] = Literals.of([])
    if kind in (TargetLayout, Task):
        own["holes"] = tuple(Hole(*hole) for hole in own["holes"])
    return kind(**own)


@contextmanager
def _damage_reported() -> Iterator[None]:
    """CheckpointFormatError for text that is not written here, or has changed since."""
    try:
        yield
    except (ValueError, TypeError, LookupError, msgpack.UnpackException, zlib.error) as error:
        raise CheckpointFormatError(
            "the plan of a conversion, or the result of a task, is damaged"
        ) from error


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _bytes(text: str) -> bytes:
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text), _MAX_BYTES)
    if unpack.unconsumed_tail:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return data
