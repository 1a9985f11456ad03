"""A conversion's plan as plain data, for whoever carries out a part of it in another process or publishes it.

What comes by column is packed as differences from row to row, because neighbours hardly differ; all of it
goes through zlib. Nothing is pickled.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final, TypeVar

import msgpack
import numpy as np

from dcp.conversion.copying.tasks import Task, TaskBatch, TaskResult
from dcp.conversion.layouts.columns import SourceColumns, TaskCopies
from dcp.conversion.layouts.layout import Copies, Hole, Literals, TargetLayout
from dcp.conversion.layouts.terms import TermColumns
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest

__all__ = [
    "decode_batch",
    "decode_layout",
    "decode_result",
    "encode_batch",
    "encode_layout",
    "encode_result",
]

C = TypeVar("C", Copies, SourceColumns)

_MAX_BYTES: Final = 1 << 30
_DAMAGED: Final = "the plan of a conversion, or what came of it, is damaged"


def encode_batch(batch: TaskBatch) -> str:
    """``batch`` as text; `decode_batch` is the inverse."""
    return _packed([batch.number, batch.is_all, [_packed_task(task) for task in batch.tasks]])


def decode_batch(text: str) -> TaskBatch:
    """Raises CheckpointFormatError for what `encode_batch` does not write."""
    with _damage_told():
        number, is_all, tasks = _plain(text)
        return TaskBatch(number, tuple(_unpacked_task(*task) for task in tasks), is_all)


def encode_layout(layout: TargetLayout) -> str:
    """Of ``layout`` what publishing needs: all but the bytes of its literals, which tasks write."""
    index = b"" if layout.index is None else encode_manifest(layout.index, is_checked=True)
    return _packed(
        [
            list(layout.file_names),
            list(map(int, layout.file_sizes)),
            _columns(layout.copies),
            _rows(layout.holes, 3),
            index,
            None if layout.chunk_copies is None else _column(layout.chunk_copies),
            dict(layout.last_files),
            {fqn: int(copy) for fqn, copy in layout.tensor_copies.items()},
        ]
    )


def decode_layout(text: str) -> TargetLayout:
    """Without literals. Raises CheckpointFormatError for what `encode_layout` does not write."""
    with _damage_told():
        names, sizes, copies, holes, index, chunk_copies, last_files, tensor_copies = _plain(text)
        return TargetLayout(
            names,
            sizes,
            Literals.of([]),
            _of_columns(Copies, copies),
            [Hole(*row) for row in _of_rows(holes, 3)],
            decode_manifest(index) if index else None,
            None if chunk_copies is None else _of_column(chunk_copies),
            last_files,
            tensor_copies,
        )


def encode_result(result: TaskResult) -> str:
    """``result`` as text; `decode_result` is the inverse."""
    return _text(result.encode())


def decode_result(text: str) -> TaskResult:
    """Raises CheckpointFormatError for what `encode_result` does not write."""
    with _damage_told():
        return TaskResult.decode(_bytes(text))


# -- tasks ---------------------------------------------------------------------------------------------------


def _packed_task(task: Task) -> list[Any]:
    copies = task.copies
    own = [_column(getattr(copies, name)) for name in _TASK_COLUMNS]
    files = [(number, *file) for number, file in task.source_files.items()]
    facts = [task.number, task.name, task.file_bytes, task.begin, task.end]
    columns = [*own, _columns(copies.sources), _packed_terms(copies.terms)]
    return [*facts, list(task.literals), columns, files, _rows(task.holes, 3)]


def _unpacked_task(
    number: int,
    name: str,
    file_bytes: int,
    begin: int,
    end: int,
    literals: Any,
    copies: Any,
    files: Any,
    holes: Any,
) -> Task:
    *own, sources, terms = copies
    by_name = dict(zip(_TASK_COLUMNS, map(_of_column, own), strict=True))
    return Task(
        number,
        name,
        file_bytes,
        begin,
        end,
        tuple((offset, data) for offset, data in literals),
        TaskCopies(**by_name, sources=_of_columns(SourceColumns, sources), terms=_unpacked_terms(terms)),
        {file: (file_name, size) for file, file_name, size in files},
        tuple(Hole(*row) for row in _of_rows(holes, 3)),
    )


_TASK_COLUMNS: Final = tuple(
    field.name for field in fields(TaskCopies) if field.name not in ("sources", "terms")
)


def _packed_terms(terms: TermColumns | None) -> list[Any] | None:
    if terms is None:
        return None
    columns = (_column(getattr(terms, name)) for name in _TERM_COLUMNS)
    return [terms.accumulate, terms.weights.astype("<f8").tobytes(), *columns]


def _unpacked_terms(packed: list[Any] | None) -> TermColumns | None:
    if packed is None:
        return None
    accumulate, weights, *columns = packed
    by_name = dict(zip(_TERM_COLUMNS, map(_of_column, columns), strict=True))
    return TermColumns(accumulate, weights=np.frombuffer(weights, "<f8"), **by_name)


_TERM_COLUMNS: Final = ("start", "ranks", "widths", "codes")


# -- columns -------------------------------------------------------------------------------------------------


def _columns(values: Copies | SourceColumns) -> list[bytes]:
    return [_column(getattr(values, field.name)) for field in fields(values)]


def _of_columns(kind: type[C], packed: Sequence[bytes]) -> C:
    return kind(*map(_of_column, packed))


def _column(values: Any) -> bytes:
    return np.diff(np.asarray(values, "<i8"), prepend=np.int64(0)).tobytes()


def _of_column(packed: bytes) -> Any:
    return np.cumsum(np.frombuffer(packed, "<i8"))


def _rows(rows: Sequence[tuple[int, ...]], width: int) -> list[bytes]:
    return [_column(column) for column in np.array(rows, "<i8").reshape(-1, width).T]


def _of_rows(packed: Sequence[bytes], width: int) -> list[list[int]]:
    rows: list[list[int]] = np.array([_of_column(column) for column in packed]).reshape(width, -1).T.tolist()
    return rows


def _packed(plain: Any) -> str:
    return _text(msgpack.packb(plain, unicode_errors="surrogatepass"))


def _plain(text: str) -> Any:
    return msgpack.unpackb(_bytes(text), strict_map_key=False, unicode_errors="surrogatepass")


@contextmanager
def _damage_told() -> Iterator[None]:
    """CheckpointFormatError for what is no text of ours, or another."""
    try:
        yield
    except (ValueError, TypeError, msgpack.UnpackException, zlib.error) as error:
        raise CheckpointFormatError(_DAMAGED) from error


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _bytes(text: str) -> bytes:
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text), _MAX_BYTES)
    if unpack.unconsumed_tail:
        raise CheckpointFormatError(_DAMAGED)
    return data
