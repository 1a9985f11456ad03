"""Safetensors files: check headers, build a `CheckpointIndex`, and write headers like the safetensors
library.

Specification: https://github.com/huggingface/safetensors#format. An 8-byte little-endian length, JSON of
this length, then the tensors' bytes, C-ordered and little-endian, without holes or overlaps. The format
holds named tensors and strings. Other contents of a checkpoint (objects, nesting, ties) go into a string of
``__metadata__`` (`dcp.storage.formats.safetensors_extras`). Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from json.encoder import encode_basestring
from typing import Any, Final, NamedTuple

import numpy as np

from dcp.storage.errors import CheckpointFormatError, PlanError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import MAX_DIMENSIONS, CheckpointIndex, WholeTensor
from dcp.storage.formats.registry import SAFETENSORS
from dcp.storage.near_names import listed

_MAX_COUNTS: Final = ((b'"', 4_000_000, "strings"), (b"[", 1_000_000, "lists"), (b",", 4_000_000, "values"))
"""Limits of JSON tokens, enough for 300,000 tensors in 32 MiB, checked before parsing to bound memory."""


def parse_json(
    text: bytes, what: str, convert: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Return a JSON object named ``what`` in errors; ``convert`` may replace objects.

    Raises:
        CheckpointFormatError: For other JSON and duplicate keys.
    """
    for mark, limit, kind in _MAX_COUNTS:
        if text.count(mark) > limit:
            raise CheckpointFormatError(
                f"{what} has more than {limit:,} {kind}, the limit of this reader: it is damaged or hostile"
            )
    try:
        document = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=partial(_unique, what, convert),
            parse_constant=partial(_no_constant, what),
        )
    except CheckpointFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointFormatError(f"{what} is not a JSON object")
    return document


def _unique(what: str, convert: Callable[[dict[str, Any]], Any] | None, pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CheckpointFormatError(f"{what} has duplicate keys")
    if not all(map(_is_text, result)):
        raise CheckpointFormatError(f"{what} has a key that is not valid Unicode text")
    return result if convert is None else convert(result)


def _no_constant(what: str, name: str) -> Any:
    raise CheckpointFormatError(f"{what} has the value {name}, which is not valid JSON")


MAX_HEADER_BYTES: Final = 32 << 20
"""Maximum header size. The specification allows 100 MB, over half a gigabyte of parsed JSON; 200,000
tensors take 26 MB.
"""

_MAX_OTHER_OBJECTS: Final = 1000
"""Maximum number of JSON objects other than tensors."""

LENGTH_BYTES: Final = 8
_FIELDS: Final = frozenset(("dtype", "shape", "data_offsets"))
METADATA_KEY: Final = "__metadata__"

_CACHED_HEADER_BYTES: Final = 1 << 20
_SHARDING_KEY: Final = "DCP_SHARDING_INFO"
_HEAD_BYTES: Final = 64 << 10
_BY_SAFETENSORS_NAME: Final = {d.safetensors: d for d in dtypes.BY_CODE.values() if d.safetensors}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Tensor entry; ``begin`` and ``end`` are bytes from the start of the first tensor."""

    dtype_code: int
    sizes: tuple[int, ...]
    begin: int
    end: int


SafetensorsHeader = tuple[Mapping[str, SafetensorsEntry], Mapping[str, str], int]
"""Tensors by name, metadata, and the position of the first tensor's bytes."""


def parse_header(read: Callable[[int, int], bytes], size: int | None) -> SafetensorsHeader:
    """Return the header of a safetensors file read by ``read(offset, length)``.

    ``size`` is the file's length in bytes; with it, the tensors must fill the file exactly. None for a blob
    of unknown length.

    Raises:
        CheckpointFormatError: For violations of the specification.
        UnsupportedFormatError: For unknown element types.
    """
    if size is not None and size < LENGTH_BYTES:
        raise CheckpointFormatError(
            f"the file has {size} bytes, too few for a safetensors file: it is truncated or of another format"
        )
    length = int.from_bytes(_exactly(read, 0, LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES or (size is not None and length > size - LENGTH_BYTES):
        raise CheckpointFormatError(
            f"the safetensors header claims {length} bytes, more than the file has or the limit of "
            f"{MAX_HEADER_BYTES}: the file is truncated, damaged or of another format"
        )
    text = _exactly(read, LENGTH_BYTES, length)
    header = _parse_cached(text) if length <= _CACHED_HEADER_BYTES else _parse(text)
    entries, _, data_offset = header
    described = data_offset + max((entry.end for entry in entries.values()), default=0)
    if size is not None and described != size:
        raise CheckpointFormatError(
            f"the safetensors file has {size} bytes, but its header describes {described}: it is truncated "
            "or damaged; download or copy it again"
        )
    return header


def _exactly(read: Callable[[int, int], bytes], offset: int, length: int) -> bytes:
    data = read(offset, length)
    if len(data) != length:
        raise CheckpointFormatError(
            f"the safetensors header ends after {len(data)} of {length} bytes: the file is truncated"
        )
    return bytes(data)


def _parse(text: bytes) -> SafetensorsHeader:
    if not text.startswith(b"{"):
        raise CheckpointFormatError(
            "the safetensors header does not begin with '{': the file is damaged or of another format"
        )
    document = parse_json(text, "the safetensors header", _compactly())
    metadata = document.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointFormatError("__metadata__ of the safetensors header does not map strings to strings")
    entries = {
        name: fields if isinstance(fields, SafetensorsEntry) else _entry(name, fields)
        for name, fields in document.items()
    }
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise CheckpointFormatError(
                f"tensor {name!r} begins at byte {entry.begin} of the safetensors data, expected {position}: "
                "tensors must not overlap or leave gaps",
                fqn=name,
            )
        position = entry.end
    return entries, metadata, LENGTH_BYTES + len(text)


@lru_cache(maxsize=4)
def _parse_cached(text: bytes) -> SafetensorsHeader:
    """Parse a header, cached for lookups of many tensors."""
    return _parse(text)


def _compactly() -> Callable[[dict[str, Any]], Any]:
    """Return a maker of compact entries during JSON parsing, with a fifth of the memory."""
    others, unknown_type = 0, ""

    def convert(fields: dict[str, Any]) -> Any:
        nonlocal others, unknown_type
        if fields.keys() >= _FIELDS:
            try:
                return _entry("", fields)
            except UnsupportedFormatError as error:
                unknown_type = error.element_type
            except CheckpointFormatError:
                pass  # raised later, when its name is known
        others += 1
        if others > _MAX_OTHER_OBJECTS:
            if unknown_type:
                raise UnsupportedFormatError(
                    f"the safetensors header has unknown element types, such as {unknown_type!r}: it was "
                    "written by a newer safetensors; upgrade dcphub"
                )
            raise CheckpointFormatError(
                f"the safetensors header has more than {_MAX_OTHER_OBJECTS} entries that describe no tensor: "
                "the file is damaged or hostile"
            )
        return fields

    return convert


def _entry(name: str, fields: Any) -> SafetensorsEntry:
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
        raise CheckpointFormatError(
            f"tensor {name!r} of the safetensors header lacks dtype, shape or data_offsets", fqn=name
        )
    type_name, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise CheckpointFormatError(
            f"tensor {name!r} of the safetensors header has an invalid shape or data_offsets", fqn=name
        )
    if not isinstance(type_name, str) or type_name not in _BY_SAFETENSORS_NAME:
        raise UnsupportedFormatError(
            f"tensor {name!r} has the safetensors element type {str(type_name)[:40]!r}, which this dcphub "
            "cannot read: it was written by a newer safetensors; upgrade dcphub",
            fqn=name,
            element_type=str(type_name)[:40],
        )
    dtype = _BY_SAFETENSORS_NAME[type_name]
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointFormatError(
            f"tensor {name!r} of the safetensors header has {end - begin} bytes, which do not match its "
            "dtype and shape",
            fqn=name,
        )
    return SafetensorsEntry(dtype.code, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


# -- index ---------------------------------------------------------------------------------------------------


def index_of_safetensors_file(
    read: Callable[[int, int], bytes], size_bytes: int, name: str
) -> CheckpointIndex:
    """Return the index of a safetensors file read by ``read(offset, length)``, with a checked header."""
    head = read(0, min(size_bytes, _HEAD_BYTES))

    def read_header(at: int, count: int) -> bytes:
        return head[at : at + count] if at + count <= len(head) else read(at, count)

    entries, notes, data_offset = parse_header(read_header, size_bytes)
    tensors = [
        WholeTensor(fqn, entry.dtype_code, entry.sizes, name, data_offset + entry.begin)
        for fqn, entry in entries.items()
    ]
    index = CheckpointIndex.of_whole_tensors(SAFETENSORS.name, tensors, {name: size_bytes})
    metadata, provenance = dict(notes), {}
    sharding = metadata.pop(_SHARDING_KEY, None)
    if sharding is not None:
        offsets, provenance = _shard_offsets(entries, sharding, name), {"sharded": True}
        index = replace(index, shape_values=index.shape_values + offsets, chunk_offsets=offsets)
        index.check()
    return replace(index, provenance=provenance, user=metadata)


def _shard_offsets(entries: Mapping[str, SafetensorsEntry], sharding: str, name: str) -> Any:
    """Return the flat offsets of the file's tensors in the global tensors, 0 without notes of stock DCP."""
    noted = parse_json(sharding.encode("utf-8", "surrogatepass"), f"{_SHARDING_KEY} of {name}")
    offsets: list[int] = []
    for fqn, entry in entries.items():
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
                f"{name}: {_SHARDING_KEY} has no valid saved_offsets for the shape of {fqn[:200]!r}", fqn=fqn
            )
        offsets += saved
    return np.array(offsets, dtype=np.int64)


_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""Element types in the library's order: by falling size, for alignment."""
_RANK: Final = {
    dtypes.BY_CODE[d.code].code: _ORDER.index(d.safetensors) for d in dtypes.BY_CODE.values() if d.safetensors
}


_CODES: Final = {code: dtypes.BY_CODE[code].safetensors for code in _RANK}


class HeaderTensor(NamedTuple):
    """Tensor to describe in a header."""

    name: str
    dtype_code: int
    sizes: tuple[int, ...]
    size_bytes: int


def header_order(tensors: Sequence[HeaderTensor]) -> list[int]:
    """Return the library's order of ``tensors``: element type, then name.

    Raises:
        PlanError: For types and names that a safetensors file cannot hold.
    """
    wrong = [
        f"{t.name!r} ({dtypes.BY_CODE[t.dtype_code].name})" for t in tensors if t.dtype_code not in _RANK
    ]
    names = [tensor.name for tensor in tensors]
    wrong += [f"{name!r} (reserved name)" for name in names if name == "__metadata__"]
    wrong += [f"{name!r} (not valid Unicode)" for name in names if not _is_text(name)]
    if wrong:
        raise PlanError(
            f"a safetensors file cannot hold {listed(wrong, most=10, show=str)}; exclude or rename them, or "
            "convert to another format"
        )
    # Code points are in the order of their UTF-8; two sorts, because comparing pairs takes longer.
    by_name = sorted(range(len(names)), key=names.__getitem__)
    return sorted(by_name, key=[_RANK[tensor.dtype_code] for tensor in tensors].__getitem__)


def safetensors_header(tensors: Sequence[HeaderTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of contiguous ``tensors``: length and JSON, padded to a multiple of 8 bytes.

    Raises:
        PlanError: If the header exceeds the limit of readers.
    """
    described = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
    items = [f'"__metadata__":{described}'] if metadata else []
    position = 0
    kinds: dict[tuple[int, tuple[int, ...]], str] = {}
    # Written piecewise, because there may be millions of entries.
    for name, dtype_code, sizes, size_bytes in tensors:
        end = position + size_bytes
        kind = kinds.get((dtype_code, sizes))
        if kind is None:
            kind = f'"dtype":"{_CODES[dtype_code]}","shape":[{",".join(map(str, sizes))}]'
            kinds[dtype_code, sizes] = kind
        items.append(f'{encode_basestring(name)}:{{{kind},"data_offsets":[{position},{end}]}}')
        position = end
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise PlanError(
            f"the header of a safetensors file would have {len(text)} bytes, but readers accept "
            f"{MAX_HEADER_BYTES}: make smaller shards"
        )
    return len(text).to_bytes(8, "little") + text


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= char <= "\udfff" for char in name)
