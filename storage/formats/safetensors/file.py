"""Safetensors files: their header, checked as its specification demands before anything is allocated, and a
`CheckpointIndex` of it.

Specification: https://github.com/huggingface/safetensors#format. An 8-byte little-endian length, that many
bytes of JSON, then the tensors' bytes, C-ordered and little-endian, without holes or overlaps. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import MAX_DIMENSIONS, CheckpointIndex, WholeTensor
from dcp.storage.formats.safetensors.format import SAFETENSORS
from dcp.storage.formats.safetensors.json_documents import parse_json

__all__ = [
    "MAX_HEADER_BYTES",
    "SafetensorsEntry",
    "SafetensorsHeader",
    "index_of_safetensors_file",
    "parse_header",
]

MAX_HEADER_BYTES: Final = 32 << 20
"""Against headers that exhaust the reader's memory. The specification's own cap is 100 MB, of which JSON
makes more than half a gigabyte here; 200,000 tensors take 26 MB."""

_MAX_OTHER_OBJECTS: Final = 1000
"""JSON objects that describe no tensor: the whole header and its metadata, and those that an error is
about."""

LENGTH_BYTES: Final = 8
_FIELDS: Final = frozenset(("dtype", "shape", "data_offsets"))
METADATA_KEY: Final = "__metadata__"

_CACHED_HEADER_BYTES: Final = 1 << 20
_SHARDING_KEY: Final = "DCP_SHARDING_INFO"
_HEAD_BYTES: Final = 64 << 10
_BY_SAFETENSORS_NAME: Final = {d.safetensors: d for d in dtypes.BY_CODE.values() if d.safetensors}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor; ``begin`` and ``end`` count bytes from `SafetensorsHeader.data_offset`."""

    dtype_code: int
    sizes: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Tensors by name, free-form ``metadata``, and where the first tensor's bytes are: ``data_offset``."""

    entries: Mapping[str, SafetensorsEntry]
    metadata: Mapping[str, str]
    data_offset: int


def parse_header(read: Callable[[int, int], bytes], size: int | None) -> SafetensorsHeader:
    """Return the header of the safetensors file that ``read(offset, length)`` reads from its first byte on.

    ``size`` is the file's length in bytes, None where it is not known (a blob within another file); with it,
    the tensors must fill the file exactly. Raises CheckpointFormatError for what the specification forbids,
    UnsupportedFormatError for element types that this version does not know.
    """
    if size is not None and size < LENGTH_BYTES:
        raise CheckpointFormatError(f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(_exactly(read, 0, LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES or (size is not None and length > size - LENGTH_BYTES):
        raise CheckpointFormatError(
            f"the safetensors header claims {length} bytes, which is more than the file or the limit "
            f"({MAX_HEADER_BYTES}) allows"
        )
    text = _exactly(read, LENGTH_BYTES, length)
    header = _parse_cached(text) if length <= _CACHED_HEADER_BYTES else _parse(text)
    data_bytes = max((entry.end for entry in header.entries.values()), default=0)
    described = header.data_offset + data_bytes
    if size is not None and described != size:
        raise CheckpointFormatError(
            f"the safetensors file has {size} bytes, and its header describes {described}"
        )
    return header


def _exactly(read: Callable[[int, int], bytes], offset: int, length: int) -> bytes:
    data = read(offset, length)
    if len(data) != length:
        raise CheckpointFormatError(f"the safetensors header ends after {len(data)} of {length} bytes")
    return bytes(data)


def _parse(text: bytes) -> SafetensorsHeader:
    if not text.startswith(b"{"):
        raise CheckpointFormatError("the safetensors header does not begin with '{'")
    document = parse_json(text, "the safetensors header", _Compact().convert)
    metadata = document.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointFormatError("the safetensors header's __metadata__ does not map strings to strings")
    entries = {
        name: fields if isinstance(fields, SafetensorsEntry) else _entry(name, fields)
        for name, fields in document.items()
    }
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise CheckpointFormatError(
                f"tensor {name!r} begins at byte {entry.begin} of the safetensors data, not at {position}: "
                "tensors must neither overlap nor leave holes",
                fqn=name,
            )
        position = entry.end
    return SafetensorsHeader(entries, metadata, LENGTH_BYTES + len(text))


@lru_cache(maxsize=4)
def _parse_cached(text: bytes) -> SafetensorsHeader:
    """Parse a header once: readers look up one tensor after the other in it."""
    return _parse(text)


class _Compact:
    """Makes entries of JSON objects as soon as they are parsed: dicts and lists take five times the
    memory."""

    def __init__(self) -> None:
        self._others = 0
        self._unknown_type = ""

    def convert(self, fields: dict[str, Any]) -> Any:
        if fields.keys() >= _FIELDS:
            try:
                return _entry("", fields)
            except UnsupportedFormatError as error:
                self._unknown_type = error.element_type
            except CheckpointFormatError:
                pass  # raised later, when its name is known
        self._others += 1
        if self._others > _MAX_OTHER_OBJECTS:
            if self._unknown_type:
                raise UnsupportedFormatError(
                    "the safetensors header has element types that are not known here "
                    f"({self._unknown_type!r}): it was written by a newer safetensors"
                )
            raise CheckpointFormatError("the safetensors header is full of what describes no tensor")
        return fields


def _entry(name: str, fields: Any) -> SafetensorsEntry:
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
        raise CheckpointFormatError(
            f"tensor {name!r} of the safetensors header needs dtype, shape and data_offsets", fqn=name
        )
    type_name, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise CheckpointFormatError(
            f"tensor {name!r} of the safetensors header has a malformed shape or range", fqn=name
        )
    if not isinstance(type_name, str) or type_name not in _BY_SAFETENSORS_NAME:
        raise UnsupportedFormatError(
            f"tensor {name!r} has the safetensors element type {str(type_name)[:40]!r}, which is not known "
            "here: it was written by a newer safetensors",
            fqn=name,
            element_type=str(type_name)[:40],
        )
    dtype = _BY_SAFETENSORS_NAME[type_name]
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointFormatError(
            f"tensor {name!r} of the safetensors header has {end - begin} bytes, not its shape's",
            fqn=name,
        )
    return SafetensorsEntry(dtype.code, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


# -- an index of it ------------------------------------------------------------------------------------------


def index_of_safetensors_file(
    read: Callable[[int, int], bytes], size_bytes: int, name: str
) -> CheckpointIndex:
    """Return the index of one safetensors file, of which ``read(offset, length)`` reads exactly that.

    The header is checked as the format's specification demands.
    """
    head = read(0, min(size_bytes, _HEAD_BYTES))

    def read_header(at: int, count: int) -> bytes:
        return head[at : at + count] if at + count <= len(head) else read(at, count)

    header = parse_header(read_header, size_bytes)
    tensors = [
        WholeTensor(fqn, entry.dtype_code, entry.sizes, name, header.data_offset + entry.begin)
        for fqn, entry in header.entries.items()
    ]
    index = CheckpointIndex.of_whole_tensors(SAFETENSORS.name, tensors, {name: size_bytes})
    metadata, provenance = dict(header.metadata), {}
    if metadata.pop(_SHARDING_KEY, None) is not None:
        offsets, provenance = _shard_offsets(header, name), {"sharded": True}
        index = replace(index, shape_values=index.shape_values + offsets, chunk_offsets=offsets)
        index.check()
    return replace(index, provenance=provenance, user=metadata)


def _shard_offsets(header: SafetensorsHeader, name: str) -> Any:
    """Return where the tensors of the file stand in the whole ones, flat: 0, unless stock DCP noted it."""
    text = header.metadata[_SHARDING_KEY].encode("utf-8", "surrogatepass")
    noted = parse_json(text, f"{_SHARDING_KEY} of {name}")
    offsets: list[int] = []
    for fqn, entry in header.entries.items():
        info = noted.get(fqn)
        saved = [0] * len(entry.sizes) if info is None else None
        if isinstance(info, dict):
            saved = info.get("saved_offsets")
        if (
            not isinstance(saved, list)
            or len(saved) != len(entry.sizes) <= MAX_DIMENSIONS
            or not all(type(offset) is int and 0 <= offset < 1 << 62 for offset in saved)
        ):
            raise CheckpointFormatError(
                f"{name}: {_SHARDING_KEY} has no offsets for {fqn[:200]!r} that fit its shape", fqn=fqn
            )
        offsets += saved
    return np.array(offsets, dtype=np.int64)
