"""What a manifest says of its checkpoint as a whole, without decoding what it says of each tensor.

For whoever looks at thousands of them: a catalog. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import UNKNOWN
from dcp.storage.formats.native.column_codec import Budget, decode_bytes, decode_column
from dcp.storage.formats.native.manifest import unpack_manifest
from dcp.storage.formats.native.manifest_fields import MAX_PLAIN_SECTION_BYTES
from dcp.storage.formats.plain import decode_plain

__all__ = ["ManifestSummary", "summarize_manifest"]

_STRUCTURAL: Final = ("fqns", "dtypes", "ndims", "shapes")


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """The part of a `CheckpointIndex` that is about all of it.

    Equal ``structure_key`` mean the same names, shapes and dtypes; different ones may, too. ``bytes`` are
    those of the files, None where a size is not known. ``has_digests``: it has some of its tensors'.
    """

    format: str
    structure_key: bytes
    file_count: int
    bytes: int | None
    provenance: Mapping[str, Any]
    user: Mapping[str, Any]
    torch_metadata_crc: int | None
    replaced_torch_metadata_crc: int | None
    has_digests: bool = False


def summarize_manifest(data: bytes) -> ManifestSummary:
    """The summary of a manifest; its CRC is checked, its columns are not, save for the files' sizes.

    Raises what `dcp.storage.formats.native.manifest.decode_manifest` does, as far as it looks.
    """
    fields = unpack_manifest(data)
    budget = Budget(len(data))
    sizes = decode_column(_item(_item(fields, "files"), "sizes"), budget)
    known = not (sizes == UNKNOWN).any()
    return ManifestSummary(
        format=_typed(fields, "format", str),
        structure_key=_structure_key(fields),
        file_count=len(sizes),
        bytes=sum(sizes.tolist()) if known else None,
        provenance=_plain_dict(fields, "provenance", budget),
        user=_plain_dict(fields, "user", budget),
        torch_metadata_crc=_crc(fields.get("torch_metadata_crc")),
        replaced_torch_metadata_crc=_crc(fields.get("replaced_torch_metadata_crc")),
        has_digests="digests" in fields["tensors"],
    )


def _structure_key(fields: Mapping[str, Any]) -> bytes:
    """A digest of the encoded columns that names, shapes and dtypes are decoded from."""
    tensors = _item(fields, "tensors")
    columns = [_item(tensors, name) for name in _STRUCTURAL]
    columns.append(_item(_item(fields, "objects"), "fqns"))
    packed: bytes = msgpack.packb(columns)
    return hashlib.sha256(packed).digest()


def _plain_dict(fields: Mapping[str, Any], name: str, budget: Budget) -> dict[str, Any]:
    encoded = decode_bytes(_item(fields, name), budget)
    try:
        # Many times as quick. Plain msgpack means the same to both but for the extensions, which end it.
        value = msgpack.unpackb(encoded, strict_map_key=False, ext_hook=_refuse)
    except (ValueError, TypeError, msgpack.UnpackException):
        value = decode_plain(encoded, limit_bytes=MAX_PLAIN_SECTION_BYTES)
    if type(value) is not dict:
        raise CheckpointFormatError(f"{name} of the manifest is not a dict")
    return value


def _refuse(code: int, data: bytes) -> None:
    raise ValueError("a tuple, a complex number or a large one: for the decoder of plain data")


def _item(section: Any, name: str) -> Any:
    if not isinstance(section, dict) or name not in section:
        raise CheckpointFormatError(f"the manifest lacks {name}")
    return section[name]


def _typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = _item(fields, name)
    if type(value) is not kind:
        raise CheckpointFormatError(f"{name} of the manifest is not of the type {kind.__name__}")
    return value


def _crc(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= 0xFFFFFFFF):
        raise CheckpointFormatError("a checksum of the manifest is not a CRC-32")
    return value
