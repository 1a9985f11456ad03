"""Plans of conversions and results of tasks as text, for jobs whose parts run in processes of their own.

Columns are packed as differences from row to row, because neighbours hardly differ. Nothing is pickled: of
objects there are the kinds that are named here. The sum that zlib keeps shows what has changed since.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

import numpy as np

from dcp.conversion.copying.tasks import Task, TaskBatch, TaskResult
from dcp.conversion.driver import Prepared
from dcp.conversion.layouts.layout import Copies, Hole, Literals, TargetLayout
from dcp.conversion.layouts.sources import SourceColumns, TaskCopies, TermColumns
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.packing import pack, unpack

__all__ = ["decode", "encode"]

T = TypeVar("T")

_KINDS: Final = (Prepared, TaskBatch, Task, TaskCopies, SourceColumns, TermColumns, TargetLayout, Copies)
_INDEX, _RESULT = -1, -2
_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
_DAMAGED: Final = "the plan of a conversion, or the result of a task, is damaged"
_LEFT_OUT: Final = ("literals", "replaced")
"""Fields of a layout that publishing does not need: tasks write the literals."""


def encode(value: Prepared | TaskBatch | TaskResult) -> str:
    """Make text of a plan (without its literals), a batch or its result; `decode` is the inverse."""
    return base64.b64encode(zlib.compress(pack(_packed(value)))).decode("ascii")


def decode(text: str, kind: type[T]) -> T:
    """Make an object of ``kind`` of what `encode` wrote. Raises CheckpointFormatError for anything else."""
    try:
        found = _restored(unpack(zlib.decompress(base64.b64decode(text))))
    except (*_UNREADABLE, zlib.error) as error:
        raise CheckpointFormatError(_DAMAGED) from error
    if not isinstance(found, kind):
        raise CheckpointFormatError(_DAMAGED)
    return found


def _packed(value: Any) -> Any:
    """Return plain data and arrays; objects are dicts with the key None."""
    if isinstance(value, np.ndarray):
        return np.diff(value, axis=0, prepend=np.int64(0)) if value.dtype.kind == "i" else value
    if isinstance(value, CheckpointIndex):
        return {None: (_INDEX, encode_manifest(value, is_checked=True))}
    if isinstance(value, TaskResult):
        return {None: (_RESULT, value.encode())}
    if isinstance(value, tuple | list):
        return [_packed(one) for one in value]
    if not isinstance(value, _KINDS):
        return dict(value) if isinstance(value, Mapping) else value
    names = [one.name for one in fields(value)]
    if isinstance(value, TargetLayout):
        names = [name for name in names if name not in _LEFT_OUT]
    return {None: (_KINDS.index(type(value)), {name: _packed(getattr(value, name)) for name in names})}


def _restored(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.cumsum(value, axis=0) if value.dtype.kind == "i" else value
    if isinstance(value, tuple):
        return tuple(map(_restored, value))
    if not isinstance(value, dict) or None not in value:
        return value
    number, own = value[None]
    if number < 0:
        return decode_manifest(own) if number == _INDEX else TaskResult.decode(own)
    kind: Any = _KINDS[number]
    own = {name: _restored(one) for name, one in own.items()}
    if kind is TargetLayout:
        own["literals"] = Literals.of([])
    if kind in (TargetLayout, Task):
        own["holes"] = tuple(Hole(*hole) for hole in own["holes"])
    return kind(**own)
