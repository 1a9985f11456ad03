"""The manifest: a `CheckpointIndex` as one msgpack file, small and quick to decode, with a CRC over itself.

`docs/format.md` specifies the bytes. Columns that follow from others (payload lengths, positions of ragged
rows) are not stored; offsets are stored relative to what they are near to. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from dcp.storage.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    PlanError,
)
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import (
    MAX_DIMENSIONS,
    UNKNOWN,
    CheckpointIndex,
    Deferred,
    Int64,
    ObjectColumns,
    itemsizes,
    starts,
)
from dcp.storage.formats.native.column_codec import (
    Budget,
    ColumnEncoder,
    check_counts,
    decode_bytes,
    decode_column,
    decode_rows,
    decode_strings,
    encode_within_budget,
)
from dcp.storage.formats.native.manifest_fields import (
    MAX_PLAIN_SECTION_BYTES,
    get_column,
    get_crc,
    get_field,
    get_section,
    get_small,
    get_text,
    narrow,
    plain_section,
)
from dcp.storage.formats.native.planner_section import decode_planner_data, encode_planner_data
from dcp.storage.formats.native.strided_columns import decode_strided, encode_strided
from dcp.storage.formats.plain import decode_plain
from dcp.storage.formats.versions import reading_version
from dcp.storage.geometry.strides import extent

__all__ = [
    "MAX_MANIFEST_BYTES",
    "decode_manifest",
    "encode_manifest",
    "unpack_manifest",
]


MAX_MANIFEST_BYTES: Final = 1 << 30

_KIND: Final = "dcphub.manifest"
_VERSION: Final = (1, 0)
_CRC: Final = struct.Struct(">I")
_CRC_HEAD: Final = b"\xa5crc32\xce"
"""The last key of the map, and the head of its value: the CRC-32 itself is always the file's last 4 bytes."""

_LARGEST_PAYLOAD_BYTES: Final = 2.0**62


def encode_manifest(index: CheckpointIndex, *, is_checked: bool = False) -> bytes:
    """The manifest of ``index``; CheckpointFormatError if `CheckpointIndex.check` finds it inconsistent,
    unless the caller has asked that already.

    PlanError if planner data, provenance or user metadata are not plain (`dcp.storage.formats.plain`), or if
    the manifest would be larger than MAX_MANIFEST_BYTES.
    """
    if not is_checked:
        index.check()
    data = encode_within_budget(partial(_encode, index))
    if len(data) > MAX_MANIFEST_BYTES:
        raise PlanError(f"the manifest takes {len(data)} bytes, and the limit is {MAX_MANIFEST_BYTES}")
    return data


def decode_manifest(data: bytes | memoryview) -> CheckpointIndex:
    """The index of a manifest; consistent in itself, and never larger than the size of ``data`` warrants.

    CorruptCheckpointError if the bytes are not those that were written, UnsupportedFormatError for what a
    newer dcphub wrote, as far as this one does not know it, CheckpointFormatError for anything that no writer
    produces; for planner data that is so, when it is asked for.
    """
    data = bytes(data)
    fields = unpack_manifest(data)
    with reading_version(fields["version"], _VERSION, "the manifest"):
        index = _decode(fields, Budget(len(data)))
        index.check()
    return index


def _encode(index: CheckpointIndex, encoder: ColumnEncoder) -> bytes:
    fields = {
        "kind": _KIND,
        "version": list(_VERSION),
        "format": index.format,
        "files": {"names": encoder.strings(index.files), "sizes": encoder.column(index.file_sizes)},
        "tensors": _encode_tensors(index, encoder),
        "chunks": _encode_chunks(index, encoder),
        "objects": _encode_objects(index.objects, encoder),
        "planner_data": encode_planner_data(index.planner_data, encoder),
        "provenance": encoder.blob(plain_section(dict(index.provenance), "provenance")),
        "user": encoder.blob(plain_section(dict(index.user), "user metadata")),
        "torch_metadata_crc": index.torch_metadata_crc,
        "replaced_torch_metadata_crc": index.replaced_torch_metadata_crc,
    }
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(fields) + 1)
    for key, value in fields.items():
        packer.pack(key)
        packer.pack(value)
    body: bytes = packer.bytes() + _CRC_HEAD
    return body + _CRC.pack(crc32(body))


def _encode_tensors(index: CheckpointIndex, encoder: ColumnEncoder) -> dict[str, Any]:
    rows = sorted(index.stride_orders)
    orders = [dimension for row in rows for dimension in index.stride_orders[row]]
    return {
        "fqns": encoder.strings(index.fqns),
        "dtypes": encoder.column(index.dtype_codes),
        "ndims": encoder.column(np.diff(index.shape_start)),
        "shapes": encoder.column(index.shape_values),
        "requires_grad": encoder.column(index.requires_grad),
        "chunk_counts": encoder.column(np.diff(index.chunk_start)),
        "stride_rows": encoder.column(np.array(rows, dtype=np.int64)),
        "stride_orders": encoder.column(np.array(orders, dtype=np.int64)),
        **({"digests": encoder.rows(index.digests)} if any(index.digests) else {}),
    }


def _encode_chunks(index: CheckpointIndex, encoder: ColumnEncoder) -> dict[str, Any]:
    unknown = index.payload_offsets == UNKNOWN
    heads = np.where(unknown, UNKNOWN, index.payload_offsets - index.record_offsets)
    has_crcs = (np.diff(index.crc_start) > 0) | (index.payload_lengths == 0)
    return {
        "offsets": encoder.column(index.chunk_offsets),
        "sizes": encoder.column(index.chunk_sizes),
        "files": encoder.column(index.chunk_files),
        "record_offsets": encoder.column(index.record_offsets),
        "record_overheads": encoder.column(index.record_lengths - index.payload_lengths),
        "payload_heads": encoder.column(heads),
        "has_crcs": encoder.column(has_crcs),
        "crcs": encoder.column(index.crcs),
        **encode_strided(index, encoder),
    }


def _encode_objects(objects: ObjectColumns, encoder: ColumnEncoder) -> dict[str, Any]:
    return {
        "fqns": encoder.strings(objects.fqns),
        "files": encoder.column(objects.files),
        "offsets": encoder.column(objects.offsets),
        "lengths": encoder.column(objects.lengths),
        "crcs": encoder.column(objects.crcs),
        "plain": encoder.column(objects.plain),
        "values": encoder.rows(objects.values),
    }


def unpack_manifest(data: bytes) -> dict[str, Any]:
    """The fields of a manifest, still encoded; CRC and version are checked. Raises as `decode_manifest`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointFormatError(
            f"a manifest of {len(data)} bytes is above the limit of {MAX_MANIFEST_BYTES}"
        )
    tail = len(data) - _CRC.size
    if tail < len(_CRC_HEAD) or data[tail - len(_CRC_HEAD) : tail] != _CRC_HEAD:
        raise CorruptCheckpointError(
            f"the manifest does not end with its checksum ({len(data)} bytes): it is truncated or damaged"
        )
    (expected,) = _CRC.unpack_from(data, tail)
    found = crc32(memoryview(data)[:tail])
    if found != expected:
        raise CorruptCheckpointError(
            f"the manifest's CRC-32 is {found:08x}, not {expected:08x}: these are not the bytes committed"
        )
    try:
        # Limits first: msgpack allocates an array on the word of its header.
        fields = msgpack.unpackb(data, max_array_len=16, max_map_len=256, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CheckpointFormatError(f"the manifest is not msgpack as specified: {error}") from error
    if not isinstance(fields, dict) or fields.get("kind") != _KIND:
        raise CheckpointFormatError("the file is not a dcphub manifest")
    with reading_version(fields.get("version"), _VERSION, "the manifest"):
        return fields


def _decode(fields: dict[str, Any], budget: Budget) -> CheckpointIndex:
    files = get_section(fields, "files")
    names = decode_strings(get_field(files, "names"), budget)
    tensors = get_section(fields, "tensors")
    fqns = decode_strings(get_field(tensors, "fqns"), budget)
    codes = get_small(tensors, "dtypes", np.uint8, len(fqns), budget)
    ndims = get_column(tensors, "ndims", len(fqns), budget)
    shape_values = decode_column(get_field(tensors, "shapes"), budget)
    if len(ndims) and int(ndims.max()) > MAX_DIMENSIONS:
        raise CheckpointFormatError(f"a tensor of the manifest has more than {MAX_DIMENSIONS} dimensions")
    check_counts(ndims, len(shape_values), "numbers of dimensions")
    return CheckpointIndex(
        format=get_text(fields, "format"),
        fqns=fqns,
        dtype_codes=codes,
        shape_start=starts(ndims),
        shape_values=shape_values,
        requires_grad=get_small(tensors, "requires_grad", np.uint8, len(fqns), budget),
        **_decode_chunks(tensors, get_section(fields, "chunks"), ndims, codes, budget),
        files=names,
        file_sizes=get_column(files, "sizes", len(names), budget),
        objects=_decode_objects(get_section(fields, "objects"), budget),
        digests=decode_rows(tensors["digests"], budget) if "digests" in tensors else (),
        stride_orders=_decode_stride_orders(tensors, ndims, budget),
        provenance=_decode_plain_dict(fields, "provenance", budget),
        user=_decode_plain_dict(fields, "user", budget),
        torch_metadata_crc=get_crc(fields, "torch_metadata_crc"),
        replaced_torch_metadata_crc=get_crc(fields, "replaced_torch_metadata_crc"),
        planner_data=_planner_data(fields, budget),
    )


def _decode_chunks(
    tensors: Mapping[str, Any],
    chunks: Mapping[str, Any],
    ndims: Int64,
    codes: npt.NDArray[np.uint8],
    budget: Budget,
) -> dict[str, Any]:
    files = decode_column(get_field(chunks, "files"), budget)
    count = len(files)
    chunk_counts = get_column(tensors, "chunk_counts", len(ndims), budget)
    check_counts(chunk_counts, count, "numbers of chunks")
    offsets = decode_column(get_field(chunks, "offsets"), budget)
    sizes = decode_column(get_field(chunks, "sizes"), budget)
    box_ndims = np.repeat(ndims, chunk_counts)
    if int(box_ndims.sum()) != len(sizes) or len(offsets) != len(sizes):
        raise CheckpointFormatError("boxes of the manifest have the wrong number of dimensions")
    chunk_codes = np.repeat(codes, chunk_counts)
    payload_lengths = _payload_lengths(sizes, box_ndims, chunk_codes)
    strides, record_crcs = decode_strided(chunks, box_ndims, budget)
    if strides:
        _set_extents(payload_lengths, strides, sizes, starts(box_ndims), chunk_codes)
    record_offsets = get_column(chunks, "record_offsets", count, budget)
    heads = get_column(chunks, "payload_heads", count, budget)
    has_crcs = get_small(chunks, "has_crcs", np.uint8, count, budget)
    crcs = decode_column(get_field(chunks, "crcs"), budget)
    crc_counts = -(-payload_lengths // BLOCK_BYTES) * (has_crcs != 0)
    check_counts(crc_counts, len(crcs), "numbers of checksums")
    return {
        "chunk_start": starts(chunk_counts),
        "chunk_offsets": offsets,
        "chunk_sizes": sizes,
        "chunk_files": files,
        "record_offsets": record_offsets,
        "record_lengths": get_column(chunks, "record_overheads", count, budget) + payload_lengths,
        "payload_offsets": np.where(heads == UNKNOWN, UNKNOWN, record_offsets + heads),
        "payload_lengths": payload_lengths,
        "crc_start": starts(crc_counts),
        "crcs": narrow(crcs, "crcs", np.uint32),
        "payload_strides": strides,
        "record_crcs": record_crcs,
    }


def _set_extents(
    lengths: Int64,
    strides: Mapping[int, tuple[int, ...]],
    sizes: Int64,
    box_start: Int64,
    codes: npt.NDArray[np.uint8],
) -> None:
    for row, steps in strides.items():
        box = tuple(sizes[box_start[row] : box_start[row + 1]].tolist())
        dtype = dtypes.BY_CODE.get(int(codes[row]))
        length = extent(box, steps) * (dtype.itemsize if dtype is not None else 0)
        if not 0 <= length <= _LARGEST_PAYLOAD_BYTES:
            raise CheckpointFormatError("a chunk of the manifest is larger than any storage")
        lengths[row] = length


def _payload_lengths(sizes: Int64, box_ndims: Int64, codes: npt.NDArray[np.uint8]) -> Int64:
    """Bytes of each box; refuses boxes whose size wraps around in int64."""
    if len(sizes) and int(sizes.min()) < 0:
        raise CheckpointFormatError("a chunk of the manifest has a negative size")
    lengths = itemsizes(codes)
    boxed = box_ndims > 0
    begins = (np.cumsum(box_ndims) - box_ndims)[boxed]
    if len(begins):
        approximate = np.multiply.reduceat(sizes.astype(np.float64), begins)
        if (approximate * lengths[boxed] > _LARGEST_PAYLOAD_BYTES).any():
            raise CheckpointFormatError("a chunk of the manifest is larger than any storage")
        lengths[boxed] *= np.multiply.reduceat(sizes, begins)
    return lengths


def _decode_objects(objects: Mapping[str, Any], budget: Budget) -> ObjectColumns:
    fqns = decode_strings(get_field(objects, "fqns"), budget)
    columns = {
        name: get_column(objects, name, len(fqns), budget)
        for name in ("files", "offsets", "lengths", "crcs", "plain")
    }
    return ObjectColumns(fqns=fqns, values=decode_rows(get_field(objects, "values"), budget), **columns)


def _decode_stride_orders(
    tensors: Mapping[str, Any], ndims: Int64, budget: Budget
) -> dict[int, tuple[int, ...]]:
    rows = decode_column(get_field(tensors, "stride_rows"), budget)
    orders = decode_column(get_field(tensors, "stride_orders"), budget).tolist()
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(ndims)):
        raise CheckpointFormatError("a stride order of the manifest belongs to no tensor")
    check_counts(ndims[rows], len(orders), "stride orders")
    result = {}
    for row, (begin, end) in zip(rows.tolist(), pairwise(starts(ndims[rows]).tolist()), strict=True):
        order = tuple(orders[begin:end])
        if sorted(order) != list(range(end - begin)):
            raise CheckpointFormatError("a stride order of the manifest is not a permutation of dimensions")
        result[row] = order
    return result


def _planner_data(fields: Mapping[str, Any], budget: Budget) -> Deferred | None:
    """Decoded when it is asked for: a load does not, and it takes longer than all the rest."""
    if fields.get("planner_data") is None:
        return None
    version, section, left = fields["version"], get_section(fields, "planner_data"), copy(budget)

    def decode() -> Any:
        with reading_version(version, _VERSION, "the manifest"):
            return decode_planner_data(section, left)

    return Deferred(decode)


def _decode_plain_dict(fields: Mapping[str, Any], name: str, budget: Budget) -> dict[str, Any]:
    encoded = decode_bytes(get_field(fields, name), budget)
    value = decode_plain(encoded, limit_bytes=MAX_PLAIN_SECTION_BYTES)
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"{name} of the manifest is not a dict")
    return value
