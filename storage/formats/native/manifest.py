"""Manifest: a `CheckpointIndex` as a small msgpack file with a CRC.

`docs/reference/format.md` specifies the bytes. Derived columns (payload lengths, positions of ragged rows)
are not stored; offsets are relative to nearby values. Payload strides and record checksums never occur on
disk, only when ranks load a torch.save file together and exchange its index as a manifest. Torch-free.

A column of integers is ``[count, first, base, width, packing, data]``. ``data`` holds little-endian
unsigned residuals of ``width`` bytes (0: all zero; 8: signed, base 0). With ``first`` nil they are ``value
- base``; otherwise ``first`` is the first value and they are ``value[i] - value[i - 1] - base``, one fewer
than ``count``. ``packing`` 1 means a zlib stream. Arithmetic is modulo 2**64.

Input is untrusted: a budget limits decoded memory before allocation.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, pairwise, repeat
from operator import is_, not_
from typing import Any, Final, cast

import msgpack
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from dcp.storage.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    PlanError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import MAX_DIMENSIONS, UNKNOWN, CheckpointIndex, ObjectColumns, itemsizes
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.geometry.strides import Int64, extent, row_products, starts

MAX_MANIFEST_BYTES: Final = 1 << 30
MAX_PLAIN_SECTION_BYTES: Final = 64 << 20
"""Limit of planner data, provenance and user metadata each."""

_KIND: Final = "dcphub.manifest"
_VERSION: Final = (1, 0)
_CRC: Final = struct.Struct(">I")
_CRC_HEAD: Final = b"\xa5crc32\xce"
"""Last key of the map and head of its value; the CRC-32 is the file's last 4 bytes."""

_BUDGET_FLOOR_BYTES: Final = 32 << 20
_BUDGET_RATIO: Final = 256
"""Budget: n bytes decode to at most _BUDGET_FLOOR_BYTES + _BUDGET_RATIO * n bytes of columns."""

_STRING_OVERHEAD_BYTES: Final = 64
_PACKING_WORTHWHILE_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 1 << 16
_RAW, _ZLIB = 0, 1
_InflateError: Final = cast(type[Exception], isal_zlib.error)  # the stubs declare an instance
_WIDTHS: Final = {0: "<u1", 1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}
_WIDTH_OF_BITS: Final = (*[1] * 9, *[2] * 8, *[4] * 16, *[8] * 32)

_CRCS: Final = ("torch_metadata_crc", "replaced_torch_metadata_crc")
_OBJECT_COLUMNS: Final = ("files", "offsets", "lengths", "crcs", "plain")
_STRUCTURAL: Final = ("fqns", "dtypes", "ndims", "shapes")
_LARGEST_PAYLOAD_BYTES: Final = 2.0**62
_NAMES: Final = frozenset({str})
_TUPLES: Final = frozenset({tuple})
_INTEGERS: Final = frozenset({int})
_INT64_RANGE: Final = range(-(1 << 63), 1 << 63)


@contextmanager
def reading_version(version: Any, known: tuple[int, int], what: str) -> Iterator[None]:
    """Decode ``what`` of version ``version`` within this block; ``known`` is the reader's version.

    Raises:
        UnsupportedFormatError: For another major version, or an undecodable later minor version.
        CheckpointFormatError: For an invalid version.
    """
    if not isinstance(version, list) or list(map(type, version)) != [int, int]:
        raise CheckpointFormatError(f"{what} has no valid format version")
    found = (version[0], version[1])
    text = f"{what} has format version {found[0]}.{found[1]}, but this dcphub reads {known[0]}.{known[1]}"
    if found[0] != known[0]:
        age = "newer" if found > known else "older"
        raise UnsupportedFormatError(
            f"{text}: it was written by a {age} dcphub; load it with that version", version=version
        )
    try:
        yield
    except CheckpointFormatError as error:
        if found <= known or isinstance(error, UnsupportedFormatError):
            raise
        raise UnsupportedFormatError(
            f"{text}: it was written by a newer dcphub with unknown features ({error}); upgrade dcphub",
            **(error.facts | {"version": version}),
        ) from error


# -- writing -------------------------------------------------------------------------------------------------


def encode_manifest(index: CheckpointIndex, *, is_checked: bool = False) -> bytes:
    """Return the manifest of ``index``. With ``is_checked``, skip `CheckpointIndex.check`.

    Raises:
        CheckpointFormatError: If the index is inconsistent.
        PlanError: If planner data, provenance or user metadata are not plain (`dcp.storage.formats.plain`),
            or the manifest exceeds MAX_MANIFEST_BYTES.
    """
    if not is_checked:
        index.check()
    encoder = _ColumnEncoder(compact=True)
    data = _encode(index, encoder)
    if encoder.decoded_bytes > _BUDGET_FLOOR_BYTES + _BUDGET_RATIO * len(data):
        data = _encode(index, _ColumnEncoder(compact=False))  # regular data beyond the reader's budget
    if len(data) > MAX_MANIFEST_BYTES:
        raise PlanError(
            f"the manifest would have {len(data)} bytes, more than the limit of {MAX_MANIFEST_BYTES}: save "
            "fewer tensors, or split the state into several checkpoints"
        )
    return data


class _ColumnEncoder:
    """Column encoder that counts in ``decoded_bytes`` the memory needed by a reader.

    ``compact=False`` avoids encodings that expand without bound.
    """

    def __init__(self, *, compact: bool) -> None:
        self._compact = compact
        self._longest: tuple[list[str], list[Any], int] = [], [], 0
        self.decoded_bytes = 0

    def column(self, values: npt.ArrayLike) -> list[Any]:
        """Encode a column of integers."""
        column = np.ascontiguousarray(values).astype(np.int64, copy=False)
        self.decoded_bytes += 8 * len(column)
        first, stored = None, column
        base, width = _base_and_width(column)
        if width and len(column) > 1:
            steps = np.diff(column)
            step_base, step_width = _base_and_width(steps)
            if step_width < width:
                first, stored, base, width = int(column[0]), steps, step_base, step_width
        if width == 0 and not self._compact:
            width = 1
        data = (stored - base).astype(_WIDTHS[width]).tobytes() if width else b""
        return [len(column), first, base, width, *self.blob(data)[1:]]

    def blob(self, data: bytes) -> list[Any]:
        """Encode a compressible byte string: ``[size, packing, data]``."""
        sample = data[:_SAMPLE_BYTES]
        is_long = self._compact and len(data) >= _PACKING_WORTHWHILE_BYTES
        if not is_long or len(isal_zlib.compress(sample, 1)) > len(sample) * 7 // 8:
            return [len(data), _RAW, data]
        self.decoded_bytes += len(data)
        return [len(data), _ZLIB, isal_zlib.compress(data, 1)]

    def rows(self, rows: Sequence[bytes] | Sequence[str], joined: bytes) -> list[Any]:
        """Encode byte or ASCII strings given as ``joined``: ``[lengths, joined bytes]``."""
        self.decoded_bytes += _STRING_OVERHEAD_BYTES * len(rows)
        return [self.column(np.fromiter(map(len, rows), np.int64, len(rows))), self.blob(joined)]

    def strings(self, texts: Sequence[str]) -> list[Any]:
        """Encode strings as `rows` of UTF-8, with lone surrogates (WTF-8)."""
        listed, before = list(texts), self.decoded_bytes
        if listed and listed == self._longest[0]:  # a flat state dict has its names three times
            self.decoded_bytes += self._longest[2]
            return self._longest[1]
        joined = "".join(listed)
        rows = listed if joined.isascii() else [text.encode("utf-8", "surrogatepass") for text in listed]
        encoded = self.rows(rows, joined.encode("utf-8", "surrogatepass"))
        if len(listed) > len(self._longest[0]):
            self._longest = listed, encoded, self.decoded_bytes - before
        return encoded

    def plain(self, value: Any, what: str) -> list[Any]:
        """Encode plain data as a blob; PlanError for other data."""
        encoded = encode_plain(value, limit_bytes=MAX_PLAIN_SECTION_BYTES)
        if encoded is None:
            raise PlanError(
                f"{what} cannot be stored in the manifest: it has values other than None, bool, int, float, "
                "complex, str, bytes, list, tuple and dict, or more than "
                f"{MAX_PLAIN_SECTION_BYTES >> 20} MiB"
            )
        return self.blob(encoded)


def _base_and_width(values: Int64) -> tuple[int, int]:
    if len(values) == 0:
        return 0, 0
    low, high = int(values.min()), int(values.max())
    if low == high:
        return low, 0
    width = _WIDTH_OF_BITS[(high - low).bit_length()]
    # no base if the width is the same without
    is_plain = width == 8 or (low >= 0 and _WIDTH_OF_BITS[high.bit_length()] == width)
    return (0 if is_plain else low), width


def _encode(index: CheckpointIndex, encoder: _ColumnEncoder) -> bytes:
    column, objects = encoder.column, index.objects
    heads = np.where(index.payload_offsets == UNKNOWN, UNKNOWN, index.payload_offsets - index.record_offsets)
    rows, orders = _flat(index.stride_orders)
    tensors = {
        "fqns": encoder.strings(index.fqns),
        "dtypes": column(index.dtype_codes),
        "ndims": column(np.diff(index.shape_start)),
        "shapes": column(index.shape_values),
        "requires_grad": column(index.requires_grad),
        "chunk_counts": column(np.diff(index.chunk_start)),
        "stride_rows": column(rows),
        "stride_orders": column(orders),
    }
    chunks = {
        "offsets": column(index.chunk_offsets),
        "sizes": column(index.chunk_sizes),
        "files": column(index.chunk_files),
        "record_offsets": column(index.record_offsets),
        "record_overheads": column(index.record_lengths - index.payload_lengths),
        "payload_heads": column(heads),
        "has_crcs": column((np.diff(index.crc_start) > 0) | (index.payload_lengths == 0)),
        "crcs": column(index.crcs),
    }
    values = {"fqns": encoder.strings(objects.fqns)}
    for name in _OBJECT_COLUMNS:
        values[name] = column(getattr(objects, name))
    values["values"] = encoder.rows(objects.values, b"".join(objects.values))
    if any(index.digests):
        tensors["digests"] = encoder.rows(index.digests, b"".join(index.digests))
    if index.payload_strides:
        rows, strides = _flat(index.payload_strides)
        chunks |= {"strided_rows": column(rows), "strides": column(strides)}
    if index.record_crcs:
        rows, crcs = list(index.record_crcs), list(index.record_crcs.values())
        chunks |= {"record_crc_rows": column(rows), "record_crcs": column(crcs)}
    fields: dict[str, Any] = {
        "kind": _KIND,
        "version": list(_VERSION),
        "format": index.format,
        "files": {"names": encoder.strings(index.files), "sizes": column(index.file_sizes)},
        "tensors": tensors,
        "chunks": chunks,
        "objects": values,
        "planner_data": _encode_planner_data(index.planner_data, encoder),
        "provenance": encoder.plain(dict(index.provenance), "provenance"),
        "user": encoder.plain(dict(index.user), "user metadata"),
        "torch_metadata_crc": index.torch_metadata_crc,
        "replaced_torch_metadata_crc": index.replaced_torch_metadata_crc,
        "crc32": 0xFFFFFFFF,
    }
    body: bytes = msgpack.packb(fields)[: -_CRC.size]
    return body + _CRC.pack(crc32(body))


def _flat(of_rows: Mapping[int, tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Return (rows, concatenated values)."""
    rows = sorted(of_rows)
    return rows, list(chain.from_iterable(map(of_rows.__getitem__, rows)))


def _encode_planner_data(data: Any, encoder: _ColumnEncoder) -> dict[str, Any] | None:
    """Encode paths by name compactly, and other plain data unchanged."""
    if data is None:
        return None
    paths: list[Any] = list(data.values()) if type(data) is dict else [None]
    if _TUPLES.issuperset(map(type, paths)) and _NAMES.issuperset(map(type, data)):
        # Vectorized by type, because there may be a million parts, with few positions.
        parts = list(chain.from_iterable(paths))
        is_name = list(map(is_, map(type, parts), repeat(str)))
        positions = list(compress(parts, map(not_, is_name)))
        if _INTEGERS.issuperset(map(type, positions)) and all(map(_INT64_RANGE.__contains__, positions)):
            return {
                "fqns": encoder.strings(list(data)),
                "path_lengths": encoder.column(np.fromiter(map(len, paths), np.int64, len(paths))),
                "is_position": encoder.column(~np.array(is_name, np.bool_)),
                "positions": encoder.column(positions),
                "keys": encoder.strings(list(compress(parts, is_name))),
            }
    return {"plain": encoder.plain(data, "planner data")}


# -- reading -------------------------------------------------------------------------------------------------


def decode_manifest(data: bytes | memoryview) -> CheckpointIndex:
    """Return the index of a manifest, checked, in memory bounded by the size of ``data``.

    Raises:
        CorruptCheckpointError: If the bytes are damaged.
        UnsupportedFormatError: For unreadable data of a newer dcphub.
        CheckpointFormatError: For invalid data; for planner data, on first access.
    """
    section = _unpack(bytes(data))
    version = section.values.get("version")
    with reading_version(version, _VERSION, "the manifest"):
        index = _decode(section)
        index.check()
        if section.values.get("planner_data") is not None:  # rarely needed, and the slowest part
            index.defer_planner_data(partial(_decode_planner_data, section.section("planner_data"), version))
    return index


def _unpack(data: bytes) -> _Section:
    """Return the encoded fields of a manifest with a valid CRC. Raises like `decode_manifest`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointFormatError(
            f"the manifest has {len(data)} bytes, more than the limit of {MAX_MANIFEST_BYTES}"
        )
    tail = len(data) - _CRC.size
    if not data[: max(0, tail)].endswith(_CRC_HEAD):
        raise CorruptCheckpointError(
            f"the manifest ({len(data)} bytes) does not end with its checksum: it is truncated or damaged. "
            "Load another checkpoint"
        )
    (expected,) = _CRC.unpack_from(data, tail)
    found = crc32(memoryview(data)[:tail])
    if found != expected:
        raise CorruptCheckpointError(
            f"the manifest is damaged: its CRC-32 is {found:08x}, expected {expected:08x}. Load another "
            "checkpoint"
        )
    try:
        # With limits, because msgpack allocates an array of the size in its header.
        fields = msgpack.unpackb(data, max_array_len=16, max_map_len=256, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CheckpointFormatError(f"the manifest is not valid msgpack: {error}") from error
    if not isinstance(fields, dict) or fields.get("kind") != _KIND:
        raise CheckpointFormatError("the file is not a dcphub manifest")
    return _Section(fields, "root", [_BUDGET_FLOOR_BYTES + _BUDGET_RATIO * len(data)])


class _Section:
    """Map of the manifest, decoded within a memory budget shared by all sections.

    Raises CheckpointFormatError for missing or invalid fields.
    """

    def __init__(self, values: Any, name: str, budget: list[int]) -> None:
        if not isinstance(values, dict):
            raise CheckpointFormatError(f"field {name} of the manifest is not a map")
        self.values = values
        self.budget = budget

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise CheckpointFormatError(f"the manifest lacks the field {name}")
        return self.values[name]

    def section(self, name: str) -> _Section:
        """Return a nested map."""
        return _Section(self[name], name, self.budget)

    def column(self, name: str, rows: int | None = None, dtype: Any = np.int64) -> npt.NDArray[Any]:
        """Return a column of ``rows`` values that fit in ``dtype``."""
        column = self._integers(self[name])
        if rows is not None and len(column) != rows:
            raise CheckpointFormatError(
                f"column {name} of the manifest has {len(column)} rows, expected {rows}"
            )
        if dtype is np.int64:
            return column
        if len(column) and (int(column.min()) < 0 or int(column.max()) > np.iinfo(dtype).max):
            raise CheckpointFormatError(f"column {name} of the manifest has values out of range")
        return column.astype(dtype)

    def strings(self, name: str) -> list[str]:
        """Decode strings."""
        blob, places = self._rows(self[name])
        if blob.isascii():
            return list(map(blob.decode("ascii").__getitem__, places))
        try:
            return [blob[place].decode("utf-8", "surrogatepass") for place in places]
        except UnicodeDecodeError as error:
            raise CheckpointFormatError(f"column {name} of the manifest is not valid UTF-8") from error

    def rows(self, name: str) -> list[bytes]:
        """Decode byte strings."""
        blob, places = self._rows(self[name])
        return list(map(blob.__getitem__, places))

    def plain(self, name: str, *, quickly: bool = False) -> Any:
        """Decode plain data."""
        encoded = self._blob(self[name])
        if quickly:
            try:
                # Both decoders agree on data without extension types, which `_refuse` rejects.
                return msgpack.unpackb(encoded, strict_map_key=False, ext_hook=_refuse)
            except (ValueError, TypeError, msgpack.UnpackException):
                pass
        return decode_plain(encoded, limit_bytes=MAX_PLAIN_SECTION_BYTES)

    def by_row(self, rows: str, values: str, counts: Int64) -> dict[int, tuple[int, ...]]:
        """Return the values of a few rows with ``counts`` values each; inverse of `_flat`."""
        found = self.column(rows)
        if len(found) and (int(found.min()) < 0 or int(found.max()) >= len(counts)):
            raise CheckpointFormatError(f"column {rows} of the manifest has values out of range")
        flat = self.column(values).tolist()
        bounds = _starts_of(counts[found], len(flat), values).tolist()
        result: dict[int, tuple[int, ...]] = {}
        for row, (begin, end) in zip(found.tolist(), pairwise(bounds), strict=True):
            result[row] = tuple(flat[begin:end])
        if len(result) != len(found):
            raise CheckpointFormatError(f"column {rows} of the manifest has duplicate rows")
        return result

    def facts(self, *, quickly: bool = False) -> dict[str, Any]:
        """Return the fields of the whole checkpoint."""
        if not isinstance(self["format"], str):
            raise CheckpointFormatError("field format of the manifest is not a string")
        facts: dict[str, Any] = {"format": self["format"]}
        for name in _CRCS:
            crc = facts[name] = self.values.get(name)
            if crc is not None and (type(crc) is not int or not 0 <= crc <= 0xFFFFFFFF):
                raise CheckpointFormatError(f"field {name} of the manifest is not a CRC-32")
        for name in ("provenance", "user"):
            facts[name] = self.plain(name, quickly=quickly)
            if not isinstance(facts[name], dict):
                raise CheckpointFormatError(f"field {name} of the manifest is not a dict")
        return facts

    def _spend(self, size_bytes: int) -> None:
        self.budget[0] -= size_bytes
        if self.budget[0] < 0:
            raise CheckpointFormatError(
                "the manifest decodes to far more memory than its size permits: it is damaged or hostile"
            )

    def _integers(self, encoded: Any) -> Int64:
        count, first, base, width, packing, data = _parts(encoded, 6)
        numbers = (count, base, 0 if first is None else first, width)
        if not _INTEGERS.issuperset(map(type, numbers)) or not 0 <= count < 1 << 48 or width not in _WIDTHS:
            raise CheckpointFormatError("a column of the manifest has an invalid count, base or width")
        if not all(map(_INT64_RANGE.__contains__, numbers)) or (first is not None and not count):
            raise CheckpointFormatError("a column of the manifest has an invalid first value or base")
        self._spend(8 * count)
        stored = count if first is None else count - 1
        raw = self._blob([stored * width, packing, data])
        values = np.frombuffer(raw, _WIDTHS[width]).astype(np.int64) if width else np.zeros(stored, np.int64)
        if base:
            values += np.int64(base)
        if first is None:
            return values
        values = np.concatenate((np.array([first], np.int64), values))
        return np.cumsum(values, out=values)

    def _rows(self, encoded: Any) -> tuple[bytes, Iterator[slice]]:
        lengths_column, blob_field = _parts(encoded, 2)
        lengths = self._integers(lengths_column)
        self._spend(_STRING_OVERHEAD_BYTES * len(lengths))
        blob = self._blob(blob_field)
        start = _starts_of(lengths, len(blob), "lengths of strings").tolist()
        return blob, map(slice, start[:-1], start[1:])

    def _blob(self, encoded: Any) -> bytes:
        """Decode a byte string of `_ColumnEncoder.blob`."""
        size, packing, data = _parts(encoded, 3)
        if type(size) is not int or size < 0 or not isinstance(data, bytes) or packing not in (_RAW, _ZLIB):
            raise CheckpointFormatError("a column of the manifest is malformed, or has an unknown packing")
        if packing == _ZLIB:
            self._spend(size)
            stream = isal_zlib.decompressobj()
            try:
                data = stream.decompress(data, size + 1)
            except (ValueError, OverflowError, _InflateError) as error:
                raise CheckpointFormatError(
                    f"a column of the manifest is not a valid zlib stream: {error}"
                ) from error
            if not stream.eof or stream.unused_data:
                raise CheckpointFormatError(f"a column of the manifest does not decompress to {size} bytes")
        if len(data) != size:
            raise CheckpointFormatError(f"a column of the manifest has {len(data)} bytes, expected {size}")
        return data


def _refuse(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} needs decode_plain()")


def _parts(encoded: Any, count: int) -> list[Any]:
    if not isinstance(encoded, list) or len(encoded) != count:
        raise CheckpointFormatError(f"a column of the manifest is not an array of {count} fields")
    return encoded


def _starts_of(counts: Int64, total: int, what: str) -> Int64:
    """Return the start positions of rows of ``counts``.

    Raises:
        CheckpointFormatError: If the sum is not ``total``.
    """
    # Each count is bounded first, to prevent overflow of the sum.
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > total):
        raise CheckpointFormatError(f"{what} in the manifest are out of range")
    begins = starts(counts)
    if int(begins[-1]) != total:
        raise CheckpointFormatError(f"{what} in the manifest do not sum up to {total}")
    return begins


def _decode(fields: _Section) -> CheckpointIndex:
    files, tensors, objects = map(fields.section, ("files", "tensors", "objects"))
    names, fqns, object_names = files.strings("names"), tensors.strings("fqns"), objects.strings("fqns")
    codes = tensors.column("dtypes", len(fqns), np.uint8)
    ndims, shape_values = tensors.column("ndims", len(fqns)), tensors.column("shapes")
    if len(ndims) and int(ndims.max()) > MAX_DIMENSIONS:
        raise CheckpointFormatError(f"a tensor in the manifest has more than {MAX_DIMENSIONS} dimensions")
    shape_start = _starts_of(ndims, len(shape_values), "numbers of dimensions")
    orders = tensors.by_row("stride_rows", "stride_orders", ndims)
    for order in orders.values():
        if sorted(order) != list(range(len(order))):
            raise CheckpointFormatError(
                "a stride order in the manifest is not a permutation of the dimensions"
            )
    object_columns: dict[str, Any] = {"fqns": object_names, "values": objects.rows("values")}
    for name in _OBJECT_COLUMNS:
        object_columns[name] = objects.column(name, len(object_names))
    return CheckpointIndex(
        **fields.facts(),
        fqns=fqns,
        dtype_codes=codes,
        shape_start=shape_start,
        shape_values=shape_values,
        requires_grad=tensors.column("requires_grad", len(fqns), np.uint8),
        **_decode_chunks(fields.section("chunks"), tensors.column("chunk_counts", len(fqns)), ndims, codes),
        files=names,
        file_sizes=files.column("sizes", len(names)),
        objects=ObjectColumns(**object_columns),
        digests=tensors.rows("digests") if "digests" in tensors.values else [],
        stride_orders=orders,
    )


def _decode_chunks(
    chunks: _Section, counts: Int64, tensor_ndims: Int64, codes: npt.NDArray[np.uint8]
) -> dict[str, Any]:
    files, offsets, sizes = chunks.column("files"), chunks.column("offsets"), chunks.column("sizes")
    count = len(files)
    chunk_start = _starts_of(counts, count, "numbers of chunks")
    ndims, element_bytes = np.repeat(tensor_ndims, counts), itemsizes(np.repeat(codes, counts))
    box_start = starts(ndims)
    if int(box_start[-1]) != len(sizes) or len(offsets) != len(sizes):
        raise CheckpointFormatError("boxes in the manifest have the wrong number of dimensions")
    if len(sizes) and int(sizes.min()) < 0:
        raise CheckpointFormatError("a chunk in the manifest has a negative size")
    lengths = row_products(sizes, box_start) * element_bytes
    bounds = (
        row_products(sizes.astype(np.float64), box_start) * element_bytes
    )  # in float64, because the int64 lengths may have overflowed
    strides = chunks.by_row("strided_rows", "strides", ndims) if "strided_rows" in chunks.values else {}
    for row, steps in strides.items():
        box = sizes[box_start[row] : box_start[row + 1]].tolist()
        bounds[row] = length = extent(box, steps) * int(element_bytes[row])
        lengths[row] = length if 0 <= length <= _LARGEST_PAYLOAD_BYTES else 0
    if ((bounds < 0) | (bounds > _LARGEST_PAYLOAD_BYTES)).any():
        raise CheckpointFormatError("a chunk in the manifest has more than 2**62 bytes")
    record_crcs: dict[int, int] = {}
    if "record_crc_rows" in chunks.values:
        by_row = chunks.by_row("record_crc_rows", "record_crcs", np.ones(count, np.int64))
        record_crcs = {row: crc for row, (crc,) in by_row.items()}
    record_offsets, heads = chunks.column("record_offsets", count), chunks.column("payload_heads", count)
    crcs = chunks.column("crcs", dtype=np.uint32)
    crc_counts = -(-lengths // BLOCK_BYTES) * (chunks.column("has_crcs", count, np.uint8) != 0)
    return {
        "chunk_start": chunk_start,
        "chunk_offsets": offsets,
        "chunk_sizes": sizes,
        "chunk_files": files,
        "record_offsets": record_offsets,
        "record_lengths": chunks.column("record_overheads", count) + lengths,
        "payload_offsets": np.where(heads == UNKNOWN, UNKNOWN, record_offsets + heads),
        "payload_lengths": lengths,
        "crc_start": _starts_of(crc_counts, len(crcs), "numbers of checksums"),
        "crcs": crcs,
        "payload_strides": strides,
        "record_crcs": record_crcs,
    }


def _decode_planner_data(section: _Section, version: Any) -> Any:
    section = _Section(section.values, "planner_data", [*section.budget])  # a budget per calling thread
    with reading_version(version, _VERSION, "the manifest"):
        if "plain" in section.values:
            return section.plain("plain")
        fqns, is_position = section.strings("fqns"), section.column("is_position") != 0
        lengths = section.column("path_lengths", len(fqns))
        bounds = _starts_of(lengths, len(is_position), "path lengths").tolist()
        positions, keys = section.column("positions"), section.strings("keys")
        if np.count_nonzero(is_position) != len(positions) or len(is_position) != len(positions) + len(keys):
            raise CheckpointFormatError("the paths in the manifest's planner data are inconsistent")
        flat: Sequence[str | int] = keys
        if len(positions):
            parts = np.empty(len(is_position), dtype=object)
            parts[is_position], parts[~is_position] = positions.tolist(), keys
            flat = parts.tolist()
        paths = map(tuple, map(flat.__getitem__, map(slice, bounds[:-1], bounds[1:])))
        return dict(zip(fqns, paths, strict=True))


# -- the whole -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """Summary of a `CheckpointIndex` for catalogs of thousands.

    Equal ``structure_key`` mean equal names, shapes and dtypes; the converse need not hold. ``bytes`` are
    file sizes, None if unknown. ``has_digests``: some tensors have digests.
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
    """Return the summary of a manifest. The CRC is checked, columns other than file sizes are not.

    Raises the errors of `decode_manifest` for decoded fields.
    """
    fields = _unpack(data)
    with reading_version(fields.values.get("version"), _VERSION, "the manifest"):
        sizes, tensors = fields.section("files").column("sizes"), fields.section("tensors")
        # A digest of the encoded columns that names, shapes and dtypes are decoded from.
        columns = [*map(tensors.__getitem__, _STRUCTURAL), fields.section("objects")["fqns"]]
        return ManifestSummary(
            **fields.facts(quickly=True),
            structure_key=hashlib.sha256(msgpack.packb(columns)).digest(),
            file_count=len(sizes),
            bytes=None if (sizes == UNKNOWN).any() else sum(sizes.tolist()),
            has_digests="digests" in tensors.values,
        )
