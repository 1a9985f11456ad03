"""`.metadata` as stock torch reads it: pickle opcodes emitted straight from the columns of an index.

No torch and no object per chunk: everything that repeats (class references, strings, sizes, dtype properties)
is put into the pickle's memo once, at the front, so that the entry of a chunk is a row of fixed width and all
rows of a checkpoint are one numpy array. The pickle is protocol 4, in one frame. Its opcodes stand in another
order than stock's; the objects that `pickle.load` builds from it are equal.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress, count, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex, Int64, starts

__all__ = ["TORCH_METADATA_VERSION", "encode_torch_metadata", "torch_metadata_head"]

TORCH_METADATA_VERSION = "1.0.0"
"""What stock calls CURRENT_DCP_VERSION; old readers ignore it."""

MAX_PLAIN_DEPTH = 64
"""Nesting of a custom planner's data beyond which it is refused: deep nesting breaks recursive readers."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SLAB_ROWS = 1 << 16  # rows joined at once: bounds the temporary copies at a few MB
_UINT32 = np.dtype("<u4")
_FRAME_BYTES = 11
"""What stands before the content: protocol, opcode of the frame and its length."""

_SHORTEST_RUN = 16
"""Rows with equally many entries, one after the other, from which on they are joined as an array."""
_STRINGS = frozenset({str})
_TUPLES = frozenset({tuple})

_Refs = npt.NDArray[np.uint32]
_Parts = Sequence[bytes | npt.NDArray[Any]]


def encode_torch_metadata(index: CheckpointIndex, *, checkpoint_id: str, save_id: str) -> bytes:
    """The `.metadata` of ``index``: what stock ``pickle.load`` turns into its `Metadata`.

    Keys are those of the tensors, then those of the objects, each in index order. Chunks carry their position
    in their tensor as index hint; ranges are those of the records, files those of ``index.files``. An object
    without a stored blob (``files`` -1) cannot be expressed and is left out.

    Takes about 2 microseconds a tensor and 0.6 a chunk.
    Raises PlanError where ``planner_data`` is not plain data.
    """
    memo = _Memo()
    memo.number(save_id)  # first of all, for `torch_metadata_head`
    names = memo.strings(list(index.fqns))
    stored = np.flatnonzero(index.objects.files >= 0)
    object_names = memo.strings([index.objects.fqns[row] for row in stored.tolist()])
    shapes, offsets, sizes = _size_refs(memo, index)
    body = [
        memo.instance(_METADATA, "Metadata"),
        b"}(",
        memo.string("state_dict_metadata"),
        b"}(",
        b"".join(_tensor_entries(memo, index, names, shapes, offsets, sizes)),
        *_object_entries(memo, object_names),
        b"u",
        memo.string("planner_data"),
        _planner_data(memo, index.planner_data),
        memo.string("storage_data"),
        b"}(",
        *_chunk_ranges(memo, index, names, offsets),
        *_object_ranges(memo, index, object_names, stored),
        b"u",
        memo.string("storage_meta"),
        _storage_meta(memo, checkpoint_id, save_id),
        memo.string("version"),
        memo.string(TORCH_METADATA_VERSION),
        b"ub.",
    ]
    # Joined once, because for many tensors a second copy is the peak of a save's memory.
    content_bytes = sum(map(len, memo.definitions)) + sum(map(len, body))
    return b"".join((_frame(content_bytes), *memo.definitions, *body))


def torch_metadata_head(save_id: str, size_bytes: int) -> bytes:
    """What a `.metadata` of ``size_bytes`` begins with if `encode_torch_metadata` made it for ``save_id``.

    Nobody else writes it: stock begins with other opcodes, and a save's id is its own. So a few bytes tell
    which save a file is of that may have hundreds of megabytes.
    """
    return _frame(max(0, size_bytes - _FRAME_BYTES)) + _string(save_id)


def _frame(content_bytes: int) -> bytes:
    return b"\x80\x04\x95" + content_bytes.to_bytes(8, "little")


class _Memo:
    """The shared values of the pickle: ``definitions`` puts each into the memo, and nothing on the stack."""

    def __init__(self) -> None:
        self.definitions: list[bytes] = []
        self._count = 0
        self._strings: dict[str, int] = {}
        self._globals: dict[tuple[str, str], bytes] = {}
        self._longest: tuple[Sequence[str], _Refs] = (), np.zeros(0, _UINT32)

    def add(self, opcodes: bytes) -> int:
        """Memo number of the value that ``opcodes`` push."""
        self.definitions.append(opcodes + b"\x940")  # MEMOIZE, POP
        self._count += 1
        return self._count - 1

    def number(self, text: str) -> int:
        """Memo number of a string."""
        known = self._strings.get(text)
        if known is None:
            known = self._strings[text] = self.add(_string(text))
        return known

    def string(self, text: str) -> bytes:
        """Opcodes that push a string."""
        return _get(self.number(text))

    def strings(self, texts: Sequence[str]) -> _Refs:
        """Memo numbers of many strings: `number`, without a call for each."""
        if texts == self._longest[0]:  # as a flat state dict has, three times
            return self._longest[1]
        refs = self._string_refs(texts)
        if len(texts) > len(self._longest[0]):
            self._longest = texts, refs
        return refs

    def _string_refs(self, texts: Sequence[str]) -> _Refs:
        known, begin = self._strings, self._count
        with contextlib.suppress(KeyError):  # mostly all of them are known, or none is
            return np.fromiter(map(known.__getitem__, texts), dtype=_UINT32, count=len(texts))
        fresh = dict(zip(texts, count(begin), strict=False))
        if len(fresh) == len(texts) and fresh.keys().isdisjoint(known):
            known |= fresh
            self.definitions.extend(_memoized_strings(texts))
            self._count += len(texts)
            return np.arange(begin, self._count, dtype=_UINT32)
        unknown = [text for text in fresh if text not in known]
        known.update(zip(unknown, count(begin), strict=False))
        self.definitions.extend(_memoized_strings(unknown))
        self._count += len(unknown)
        return np.fromiter(map(known.__getitem__, texts), dtype=_UINT32, count=len(texts))

    def named(self, module: str, name: str) -> bytes:
        """Opcodes that push a global."""
        known = self._globals.get((module, name))
        if known is None:
            known = _get(self.add(self.string(module) + self.string(name) + b"\x93"))
            self._globals[module, name] = known
        return known

    def instance(self, module: str, name: str) -> bytes:
        """Opcodes that push a new instance of a class, for BUILD to fill."""
        return self.named(module, name) + b")\x81"


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def _memoized_strings(texts: Sequence[str]) -> Iterator[bytes]:
    """Opcodes that put many strings into the memo: of each X, its length, itself, MEMOIZE, POP."""
    for begin in range(0, len(texts), _SLAB_ROWS):
        encoded: Sequence[str | bytes] = texts[begin : begin + _SLAB_ROWS]
        joined = "".join(cast("Sequence[str]", encoded))
        if not joined.isascii():
            encoded = [text.encode("utf-8", "surrogatepass") for text in texts[begin : begin + _SLAB_ROWS]]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        start = starts(lengths + 7)
        heads, tails = start[:-1], start[1:] - 2
        opcodes = np.empty(int(start[-1]), np.uint8)
        is_text = np.ones(len(opcodes), np.bool_)
        for number, column in enumerate(lengths.astype("<u4").view(np.uint8).reshape(-1, 4).T, start=1):
            opcodes[heads + number], is_text[heads + number] = column, False
        for places, opcode in ((heads, b"X"), (tails, b"\x94"), (tails + 1, b"0")):
            opcodes[places], is_text[places] = opcode[0], False
        opcodes[is_text] = np.frombuffer(joined.encode("utf-8", "surrogatepass"), np.uint8)
        yield opcodes.tobytes()


def _get(number: int) -> bytes:
    if number < 256:
        return b"h" + number.to_bytes(1)
    return b"j" + number.to_bytes(4, "little")


def _rows(count: int, *parts: bytes | npt.NDArray[Any]) -> Iterator[bytes]:
    """Rows of fixed width, joined: bytes stand in every row, of an array (little-endian) each has its own."""
    for begin in range(0, count, _SLAB_ROWS):
        yield _table(begin, min(begin + _SLAB_ROWS, count), parts).tobytes()


def _table(begin: int, end: int, parts: Sequence[bytes | npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    columns = [
        np.broadcast_to(np.frombuffer(part, np.uint8), (end - begin, len(part)))
        if isinstance(part, bytes)
        else np.ascontiguousarray(part[begin:end]).view(np.uint8).reshape(end - begin, part.itemsize)
        for part in parts
    ]
    return np.concatenate(columns, axis=1)


def _nested_rows(counts: Int64, head: _Parts, entry: _Parts, tail: bytes) -> Iterator[bytes]:
    """Rows of ``head``, each followed by its ``counts`` rows of ``entry``, and by ``tail``; parts as of
    `_rows`."""
    start = starts(counts)
    edges = np.flatnonzero(np.diff(counts)) + 1
    if len(edges) * _SHORTEST_RUN > len(counts):
        edges = edges[:0]
    slabs = np.arange(0, len(counts), _SLAB_ROWS)
    for begin, end in pairwise([*np.union1d(slabs, edges).tolist(), len(counts)]):
        heads, entries = _table(begin, end, head), _table(int(start[begin]), int(start[end]), entry)
        if (counts[begin:end] == counts[begin]).all():  # as long as these are alike, so are whole rows
            tails = np.broadcast_to(np.frombuffer(tail, np.uint8), (end - begin, len(tail)))
            yield np.concatenate([heads, entries.reshape(end - begin, -1), tails], axis=1).tobytes()
            continue
        head_bytes, bounds = heads.shape[1], ((start[begin : end + 1] - start[begin]) * entries.shape[1])
        joined_heads, joined_entries = heads.tobytes(), entries.tobytes()
        for row, (first, last) in enumerate(pairwise(bounds.tolist())):
            yield joined_heads[row * head_bytes : (row + 1) * head_bytes]
            yield joined_entries[first:last]
            yield tail


def _int_column(values: Int64) -> tuple[bytes, npt.NDArray[Any]]:
    """(opcode, argument column) which push non-negative integers: four bytes each if all fit, else eight."""
    if values.size == 0 or int(values.max()) < 1 << 31:
        return b"J", values.astype("<i4")
    return b"\x8a\x08", values.astype("<i8")


def _distinct(values: Int64) -> list[int]:
    result: list[int] = np.flatnonzero(np.bincount(values)).tolist()
    return result


def _size_refs(memo: _Memo, index: CheckpointIndex) -> tuple[_Refs, _Refs, _Refs]:
    """Memo numbers of torch.Size by tensor (shape) and by chunk (offsets, sizes); equal ones share one."""
    size_class = memo.named("torch", "Size")
    shapes = np.zeros(index.tensor_count, dtype=_UINT32)
    offsets = np.zeros(index.chunk_count, dtype=_UINT32)
    sizes = np.zeros(index.chunk_count, dtype=_UINT32)
    chunk_ndims = np.diff(index.box_start)
    for ndim in _distinct(index.ndims):
        known: dict[bytes, int] = {}
        for refs, begins, ndims, values in (
            (shapes, index.shape_start, index.ndims, index.shape_values),
            (offsets, index.box_start, chunk_ndims, index.chunk_offsets),
            (sizes, index.box_start, chunk_ndims, index.chunk_sizes),
        ):
            rows = np.flatnonzero(ndims == ndim)
            table = values[begins[rows][:, None] + np.arange(ndim)]
            refs[rows] = _table_refs(memo, size_class, table, known)
    return shapes, offsets, sizes


def _table_refs(memo: _Memo, size_class: bytes, table: Int64, known: dict[bytes, int]) -> _Refs:
    rows, ndim = table.shape
    if ndim == 0:
        keys = [b""] * min(rows, 1)
    else:
        keys = np.ascontiguousarray(table, dtype="<i8").view(f"V{8 * ndim}").ravel().tolist()
    for key in dict.fromkeys(keys):
        if key not in known:
            known[key] = memo.add(_size_opcodes(size_class, np.frombuffer(key, dtype="<i8").tolist()))
    if ndim == 0:
        return np.full(rows, known.get(b"", 0), _UINT32)
    return np.fromiter(map(known.__getitem__, keys), dtype=_UINT32, count=rows)


def _size_opcodes(size_class: bytes, values: list[int]) -> bytes:
    return b"".join((size_class, b"(", *map(_int, values), b"t\x85R"))


def _properties_refs(memo: _Memo, index: CheckpointIndex) -> _Refs:
    """Memo numbers of the TensorProperties state by tensor.

    Only the state is shared, so that each tensor still gets an instance of its own.
    """
    layout = memo.named("torch.serialization", "_get_layout") + memo.string("torch.strided") + b"\x85R"
    contiguous = memo.named(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
    fixed = _get(memo.add(layout)), _get(memo.add(contiguous))
    kinds = index.dtype_codes.astype(np.int64) * 2 + (index.requires_grad != 0)
    table = np.zeros(512, dtype=_UINT32)
    for kind in _distinct(kinds):
        dtype = memo.named("torch", dtypes.BY_CODE[kind // 2].name)
        grad = b"\x88" if kind % 2 else b"\x89"
        table[kind] = memo.add(b"(" + dtype + fixed[0] + grad + fixed[1] + b"\x89t")
    refs: _Refs = table[kinds]
    return refs


def _tensor_entries(
    memo: _Memo, index: CheckpointIndex, names: _Refs, shapes: _Refs, offsets: _Refs, sizes: _Refs
) -> Iterator[bytes]:
    chunk = (
        memo.instance(_METADATA, "ChunkStorageMetadata") + b"}(" + memo.string("offsets") + b"j",
        offsets,
        memo.string("sizes") + b"j",
        sizes,
        b"ub",
    )
    head = (
        b"j",
        names,
        memo.instance(_METADATA, "TensorStorageMetadata")
        + b"}("
        + memo.string("properties")
        + memo.instance(_METADATA, "TensorProperties")
        + b"j",
        _properties_refs(memo, index),
        b"b" + memo.string("size") + b"j",
        shapes,
        memo.string("chunks") + b"](",
    )
    return _nested_rows(np.diff(index.chunk_start), head, chunk, b"eub")


def _object_entries(memo: _Memo, names: _Refs) -> Iterator[bytes]:
    yield from _rows(len(names), b"j", names, memo.instance(_METADATA, "BytesStorageMetadata"))


def _range_parts(memo: _Memo, files: _Refs, begins: Int64, lengths: Int64) -> tuple[Any, ...]:
    offset_opcode, offset_values = _int_column(begins)
    length_opcode, length_values = _int_column(lengths)
    head = memo.instance(_FILESYSTEM, "_StorageInfo") + b"}("
    return (
        head + memo.string("relative_path") + b"j",
        files,
        memo.string("offset") + offset_opcode,
        offset_values,
        memo.string("length") + length_opcode,
        length_values,
        b"ub",
    )


def _chunk_ranges(memo: _Memo, index: CheckpointIndex, names: _Refs, offsets: _Refs) -> Iterator[bytes]:
    files = memo.strings(index.files)[index.chunk_files]
    places = np.arange(index.chunk_count, dtype=np.int64) - index.chunk_start[index.chunk_tensors]
    yield from _rows(
        index.chunk_count,
        memo.instance(_METADATA, "MetadataIndex") + b"}(" + memo.string("fqn") + b"j",
        names[index.chunk_tensors],
        memo.string("index") + b"J",
        places.astype("<i4"),
        memo.string("offset") + b"j",
        offsets,
        b"ub",
        *_range_parts(memo, files, index.record_offsets, index.record_lengths),
    )


def _object_ranges(memo: _Memo, index: CheckpointIndex, names: _Refs, stored: Int64) -> Iterator[bytes]:
    objects = index.objects
    files = memo.strings(index.files)[objects.files[stored]]
    yield from _rows(
        len(stored),
        memo.instance(_METADATA, "MetadataIndex") + b"}(" + memo.string("fqn") + b"j",
        names,
        memo.string("index") + b"Nub",
        *_range_parts(memo, files, objects.offsets[stored], objects.lengths[stored]),
    )


def _storage_meta(memo: _Memo, checkpoint_id: str, save_id: str) -> bytes:
    return b"".join(
        (
            memo.instance(_METADATA, "StorageMeta"),
            b"}(",
            memo.string("checkpoint_id") + memo.string(checkpoint_id),
            memo.string("save_id") + memo.string(save_id),
            memo.string("load_id") + b"N",
            memo.string("modules") + b"]",
            b"ub",
        )
    )


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    data = pickle.encode_long(value)
    if len(data) < 256:
        return b"\x8a" + len(data).to_bytes(1) + data
    return b"\x8b" + len(data).to_bytes(4, "little") + data


def _planner_data(memo: _Memo, data: Any) -> bytes:
    if type(data) is dict and _TUPLES.issuperset(map(type, data.values())):
        paths = _paths(memo, data)
        if paths is not None:
            return paths
    return _plain(data)


def _paths(memo: _Memo, data: Mapping[str, tuple[Any, ...]]) -> bytes | None:
    """Opcodes of a mapping from names to paths, each distinct part encoded once; None if it is not one."""
    parts = list(chain.from_iterable(data.values()))
    texts, of_text = parts, np.ones(len(parts), np.bool_)
    positions: list[Any] = []
    if not _STRINGS.issuperset(map(type, parts)):
        of_text = np.array([type(part) is str for part in parts], np.bool_)
        texts = list(compress(parts, of_text.tolist()))
        positions = list(compress(parts, (~of_text).tolist()))
    if not all(type(part) is int and 0 <= part < 1 << 31 for part in positions):
        return None
    if not _STRINGS.issuperset(map(type, data)):
        return None
    # Both kinds of part are an opcode with four bytes: a row of fixed width.
    arguments = np.zeros(len(parts), dtype=_UINT32)
    arguments[of_text] = memo.strings(texts)
    arguments[~of_text] = positions
    opcodes = np.where(of_text, np.uint8(b"j"[0]), np.uint8(b"J"[0]))
    lengths = np.fromiter(map(len, data.values()), np.int64, len(data))
    head = (b"j", memo.strings(list(data)), b"(")
    return b"".join((b"}(", *_nested_rows(lengths, head, (opcodes, arguments), b"t"), b"u"))


def _plain(value: Any) -> bytes:
    """Opcodes that push plain data, without use of the memo."""
    _check_plain(value, 0)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)  # 4 would put frames inside our frame
    pickler.fast = True  # no memo: its numbers would collide with ours
    pickler.dump(value)
    return buffer.getvalue()[2:-1]  # without PROTO and STOP


def _check_plain(value: Any, depth: int) -> None:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return
    if depth >= MAX_PLAIN_DEPTH:
        raise PlanError(
            f"planner_data is nested deeper than {MAX_PLAIN_DEPTH} levels; keep it flat to save it",
            depth=depth,
        )
    if kind in (list, tuple):
        for item in value:
            _check_plain(item, depth + 1)
    elif kind is dict:
        for key, item in value.items():
            _check_plain(key, depth + 1)
            _check_plain(item, depth + 1)
    else:
        type_name = f"{kind.__module__}.{kind.__qualname__}"
        raise PlanError(
            f"planner_data holds a {type_name}, and only plain data (None, bool, int, float, str, bytes, "
            "list, tuple, dict) can be saved; have the planner keep its state in these",
            type_name=type_name,
        )
