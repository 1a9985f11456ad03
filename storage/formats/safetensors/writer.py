"""Headers of safetensors files, byte for byte as safetensors' own library writes them; torch-free.

The format holds named tensors and strings, nothing else. What else a checkpoint has (values, nesting, ties)
goes into one string of ``__metadata__`` under `EXTRAS_KEY`, which other readers pass over.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Final, NamedTuple

from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.formats.safetensors.file import MAX_HEADER_BYTES
from dcp.storage.near_names import listed

__all__ = [
    "EXTRAS_KEY",
    "HeaderTensor",
    "decode_extras",
    "encode_extras",
    "header_order",
    "safetensors_header",
]

EXTRAS_KEY: Final = "dcphub"
MAX_EXTRAS_BYTES: Final = 64 << 20

_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""Element types in the library's order: by falling size, so that all are aligned."""
_RANK: Final = {
    dtypes.BY_CODE[d.code].code: _ORDER.index(d.safetensors) for d in dtypes.BY_CODE.values() if d.safetensors
}


_CODES: Final = {code: dtypes.BY_CODE[code].safetensors for code in _RANK}


class HeaderTensor(NamedTuple):
    """A tensor to be described."""

    name: str
    dtype_code: int
    sizes: tuple[int, ...]
    size_bytes: int


def header_order(tensors: Sequence[HeaderTensor]) -> list[int]:
    """Return the order in which the library would write ``tensors``: element type, then name.

    PlanError with all tensors whose type or name a safetensors file cannot hold.
    """
    wrong = [
        f"{t.name!r} ({dtypes.BY_CODE[t.dtype_code].name})" for t in tensors if t.dtype_code not in _RANK
    ]
    names = [tensor.name for tensor in tensors]
    wrong += [f"{name!r}, a reserved name" for name in names if name == "__metadata__"]
    wrong += [f"{name!r}, which is no Unicode text" for name in names if not _is_text(name)]
    if wrong:
        raise PlanError(
            f"a safetensors file cannot hold {listed(wrong, most=10, show=str)}; exclude or rename them, or "
            "convert to another format"
        )
    # Code points are in the order of their UTF-8; two sorts, because comparing pairs takes longer.
    by_name = sorted(range(len(names)), key=names.__getitem__)
    return sorted(by_name, key=[_RANK[tensor.dtype_code] for tensor in tensors].__getitem__)


def safetensors_header(tensors: Sequence[HeaderTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the length and JSON of a file in which ``tensors`` stand one after the other; a multiple of 8
    bytes.

    PlanError if it would be larger than readers accept.
    """
    items = [f'"__metadata__":{_json(dict(metadata))}'] if metadata else []
    position = 0
    kinds: dict[tuple[int, tuple[int, ...]], str] = {}
    # Written by hand, because there may be millions, and as one document they would be as many dicts.
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
            f"the header of a safetensors file would take {len(text)} bytes, and readers accept "
            f"{MAX_HEADER_BYTES}: "
            "make smaller shards"
        )
    return len(text).to_bytes(8, "little") + text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encode_extras(extras: Mapping[str, Any]) -> str:
    """Return plain data as one string; PlanError if it is not plain, or more than MAX_EXTRAS_BYTES."""
    data = encode_plain(dict(extras), limit_bytes=MAX_EXTRAS_BYTES)
    if data is None:
        raise PlanError(
            "values and nesting of the checkpoint are too large for the metadata of a safetensors file"
        )
    return base64.b64encode(zlib.compress(data)).decode("ascii")


def decode_extras(text: str) -> dict[str, Any]:
    """Return the inverse of `encode_extras`; CheckpointFormatError for anything else, in bounded memory."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_EXTRAS_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise CheckpointFormatError(
            f"the safetensors metadata {EXTRAS_KEY!r} is malformed: {error}"
        ) from error
    if not stream.eof:
        raise CheckpointFormatError(f"the safetensors metadata {EXTRAS_KEY!r} is too large")
    value = decode_plain(data, limit_bytes=MAX_EXTRAS_BYTES)
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"the safetensors metadata {EXTRAS_KEY!r} is not a dict")
    return value


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= char <= "\udfff" for char in name)
