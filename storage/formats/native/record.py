"""Records: a minimal zip for one tensor, like that of `torch.save`, with a raw payload.

A record is an uncompressed zip of ``r/data.pkl`` (how to rebuild the tensor), ``r/version`` and
``r/data/0`` (the bytes). Everything before the payload is known in advance; the CRC-32 follows in a data
descriptor and the central directory (PKWARE APPNOTE.TXT 6.3.10, general purpose bit 3). A writer streams
prefix, payload and suffix in one pass over the payload.

Prefix and suffix depend on dtype, shape and the file offset modulo 64, and are cached. Imports neither
torch nor zipfile. `docs/reference/format.md` specifies the bytes.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Final

from dcp.storage.errors import UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import MAX_DIMENSIONS
from dcp.storage.geometry.strides import c_strides

ALIGNMENT_BYTES: Final = 64
"""Alignment of payloads in the file, for vector instructions on mapped tensors."""

ALIGNED_PAYLOAD_BYTES: Final = 4096
"""Minimum size of aligned payloads; padding would be significant for smaller ones."""

_MAX_CACHED_TEMPLATES: Final = 16384

_ZIP64_BYTES: Final = 0xFFFFFFFF - 0xFFFF
"""Minimum size of entries with zip64 fields, with a margin for the directory's offset."""

UNSET_32: Final = 0xFFFFFFFF
DESCRIPTOR_FLAG: Final = 1 << 3
DOS_EPOCH: Final = 0x0021 << 16
"""1980-01-01 00:00 as DOS date and time, to give equal tensors equal bytes."""

PADDING_FIELD: Final = 0x4246
"""Extra field id for padding, as in torch.save ("FB")."""

ZIP64_FIELD: Final = 0x0001
LOCAL: Final = struct.Struct("<4sHHHIIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHIIIIHHHHHII")
END: Final = struct.Struct("<4sHHHHIIH")
END64: Final = struct.Struct("<4sQHHIIQQQQ")
END64_LOCATOR: Final = struct.Struct("<4sIQI")

_LOCAL_CRC_AT: Final = 14
_CENTRAL_CRC_AT: Final = 16

_PICKLE_NAME: Final = b"r/data.pkl"
_VERSION_NAME: Final = b"r/version"
_PAYLOAD_NAME: Final = b"r/data/0"
_VERSION: Final = b"3\n"


class OpenRecord:
    """Tensor record before its payload is written: ``prefix``, payload, ``suffix(crc32)``.

    ``record_bytes`` is the length of the record. Instances are immutable and shared between records of
    equal dtype, shape and alignment.
    """

    __slots__ = ("_after_crc", "_after_descriptor", "_before_crc", "payload_bytes", "prefix", "record_bytes")

    def __init__(
        self, prefix: bytes, payload_bytes: int, before: bytes, between: bytes, after: bytes
    ) -> None:
        self.prefix = prefix
        self.payload_bytes = payload_bytes
        self._before_crc = before
        self._after_descriptor = between
        self._after_crc = after
        suffix_bytes = len(before) + len(between) + len(after) + 8
        self.record_bytes = len(prefix) + payload_bytes + suffix_bytes

    @property
    def crc_positions(self) -> tuple[int, int]:
        """Positions of both CRC-32s in the result of `suffix`."""
        first = len(self._before_crc)
        return first, first + 4 + len(self._after_descriptor)

    def suffix(self, crc32: int) -> bytes:
        """Return the bytes after a payload with CRC ``crc32``."""
        crc = crc32.to_bytes(4, "little")
        return self._before_crc + crc + self._after_descriptor + crc + self._after_crc


def begin_record(dtype_code: int, sizes: tuple[int, ...], payload_bytes: int, file_offset: int) -> OpenRecord:
    """Return the record of a contiguous tensor of ``sizes`` at ``file_offset`` of its file.

    ``payload_bytes`` is the length of the raw bytes. From ALIGNED_PAYLOAD_BYTES, the payload's file offset
    ``file_offset + len(prefix)`` is a multiple of ALIGNMENT_BYTES.
    """
    phase = file_offset & (ALIGNMENT_BYTES - 1) if payload_bytes >= ALIGNED_PAYLOAD_BYTES else -1
    return _make_record(dtype_code, sizes, payload_bytes, phase)


def object_record(pickle_bytes: bytes) -> bytes:
    """Return the record of an object for `torch.load`; ``pickle_bytes`` is its pickle in protocol 2."""
    if len(pickle_bytes) >= _ZIP64_BYTES:
        raise UnsupportedFormatError(
            f"the pickle of an object has {len(pickle_bytes)} bytes, more than the limit of 4 GiB: store "
            "large data as tensors",
            size_bytes=len(pickle_bytes),
        )
    head, before, between, after = _object_template(len(pickle_bytes))
    crc = crc32(pickle_bytes).to_bytes(4, "little")
    return b"".join((head, crc, before, pickle_bytes, between, crc, after))


@lru_cache(maxsize=1024)
def _object_template(size_bytes: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the parts around the two CRC-32s and the pickle of ``size_bytes``."""
    entry = _local_entry(_PICKLE_NAME, b"", 0, size_bytes)
    version_offset = len(entry) + size_bytes
    directory = _directory_entry(_PICKLE_NAME, 0, size_bytes, 0)
    rest = _directory_entry(_VERSION_NAME, _VERSION_CRC, len(_VERSION), version_offset)
    end_at, directory_bytes = version_offset + len(_VERSION_ENTRY), len(directory) + len(rest)
    rest += END.pack(b"PK\5\6", 0, 0, 2, 2, directory_bytes, end_at, 0)
    local, central = _LOCAL_CRC_AT, _CENTRAL_CRC_AT
    return (
        entry[:local],
        entry[local + 4 :],
        _VERSION_ENTRY + directory[:central],
        directory[central + 4 :] + rest,
    )


@lru_cache(maxsize=_MAX_CACHED_TEMPLATES)
def _make_record(dtype_code: int, sizes: tuple[int, ...], payload_bytes: int, phase: int) -> OpenRecord:
    dtype = dtypes.BY_CODE[dtype_code]
    if len(sizes) > MAX_DIMENSIONS or payload_bytes != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{payload_bytes} bytes are not a {dtype.name} tensor of sizes {sizes}")
    geometry = _pickled_integers(sizes) + _pickled_integers(c_strides(sizes))
    before, after = tensor_pickle_parts(dtype_code, math.prod(sizes), geometry)
    pickled = b"\x80\2" + before + b"X\1\0\0\0000" + after + b"."  # protocol 2, without memo
    pickle_crc = crc32(pickled)
    head = _local_entry(_PICKLE_NAME, pickled, pickle_crc)
    version_offset = len(head)
    head += _VERSION_ENTRY
    payload_offset = len(head)
    zip64 = payload_bytes >= _ZIP64_BYTES
    head += _payload_header(zip64, payload_offset, phase)
    version, sizes_layout, short = (45, "<QQ", UNSET_32) if zip64 else (20, "<II", payload_bytes)
    extra = struct.pack("<HHQQ", ZIP64_FIELD, 16, payload_bytes, payload_bytes) if zip64 else b""
    between = struct.pack(sizes_layout, payload_bytes, payload_bytes)
    between += struct.pack("<4sHHHHI", b"PK\1\2", version, version, DESCRIPTOR_FLAG, 0, DOS_EPOCH)
    lengths = len(_PAYLOAD_NAME), len(extra)
    directory_rest = struct.pack("<IIHHHHHII", short, short, *lengths, 0, 0, 0, 0, payload_offset)
    directory_rest += _PAYLOAD_NAME + extra
    directory_rest += _directory_entry(_PICKLE_NAME, pickle_crc, len(pickled), 0)
    directory_rest += _directory_entry(_VERSION_NAME, _VERSION_CRC, len(_VERSION), version_offset)
    descriptor_bytes = 24 if zip64 else 16
    directory_bytes = _DIRECTORY_HEAD_BYTES + 4 + len(directory_rest)
    directory_offset = len(head) + payload_bytes + descriptor_bytes
    end, end_offset = b"", directory_offset
    if zip64:
        end = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, 3, 3, directory_bytes, directory_offset)
        end += END64_LOCATOR.pack(b"PK\6\7", 0, directory_offset + directory_bytes, 1)
        end_offset = UNSET_32
    end += END.pack(b"PK\5\6", 0, 0, 3, 3, directory_bytes, end_offset, 0)
    return OpenRecord(head, payload_bytes, b"PK\7\10", between, directory_rest + end)


def _local_entry(name: bytes, data: bytes, crc: int, size_bytes: int | None = None) -> bytes:
    """Return a local header and its data; ``size_bytes`` if the data follow separately."""
    size = len(data) if size_bytes is None else size_bytes
    header = LOCAL.pack(b"PK\3\4", 20, 0, 0, DOS_EPOCH, crc, size, size, len(name), 0)
    return header + name + data


def _directory_entry(name: bytes, crc: int, size: int, offset: int) -> bytes:
    header = _CENTRAL.pack(
        b"PK\1\2", 20, 20, 0, 0, DOS_EPOCH, crc, size, size, len(name), 0, 0, 0, 0, 0, offset
    )
    return header + name


_VERSION_CRC: Final = crc32(_VERSION)
_VERSION_ENTRY: Final = _local_entry(_VERSION_NAME, _VERSION, _VERSION_CRC)
_DIRECTORY_HEAD_BYTES: Final = 16


def _payload_header(zip64: bool, offset: int, phase: int) -> bytes:
    """Return the payload's local header; the data descriptor has sizes and CRC."""
    extra = struct.pack("<HHQQ", ZIP64_FIELD, 16, 0, 0) if zip64 else b""
    size = UNSET_32 if zip64 else 0
    if phase >= 0:
        unpadded = phase + offset + LOCAL.size + len(_PAYLOAD_NAME) + len(extra)
        padding = -unpadded % ALIGNMENT_BYTES
        if padding:
            padding += ALIGNMENT_BYTES if padding < 4 else 0  # the header of the extra field has 4 bytes
            extra += struct.pack("<HH", PADDING_FIELD, padding - 4).ljust(padding, b"\0")
    version = 45 if zip64 else 20
    header = LOCAL.pack(
        b"PK\3\4", version, DESCRIPTOR_FLAG, 0, DOS_EPOCH, 0, size, size, len(_PAYLOAD_NAME), len(extra)
    )
    return header + _PAYLOAD_NAME + extra


def tensor_pickle_parts(
    dtype_code: int, storage_elements: int, geometry: bytes, *, requires_grad: bool = False
) -> tuple[bytes, bytes]:
    """Return the parts before and after the pickled storage key of a tensor pickle; ``geometry`` is pickled
    sizes and strides.
    """
    dtype = dtypes.BY_CODE[dtype_code]
    if dtype.storage_class is None:
        rebuild, storage, unit = b"_rebuild_tensor_v3", b"ctorch.storage\nUntypedStorage\n", dtype.itemsize
        last = b"ctorch\n" + dtype.name.encode() + b"\n"
    else:
        rebuild, unit, last = b"_rebuild_tensor_v2", 1, b""
        storage = b"ctorch\n" + dtype.storage_class.encode() + b"\n"
    before = b"ctorch._utils\n" + rebuild + b"\n((X\7\0\0\0storage" + storage
    after = b"X\3\0\0\0cpu" + pickled_integer(storage_elements * unit) + b"tQK\0" + geometry
    after += (b"\x88" if requires_grad else b"\x89") + EMPTY_ORDERED_DICT + last + b"tR"
    return before, after


EMPTY_ORDERED_DICT: Final = b"ccollections\nOrderedDict\n)R"


def pickled_integer(value: int) -> bytes:
    """Return the opcodes that push an integer, as Python's pickler in protocol 2."""
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1)
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = (value if value >= 0 else ~value).bit_length() // 8 + 1  # one bit for the sign
    data = value.to_bytes(length, "little", signed=True)
    if length < 256:
        return b"\x8a" + length.to_bytes(1) + data
    return b"\x8b" + length.to_bytes(4, "little") + data


def _pickled_integers(values: tuple[int, ...]) -> bytes:
    encoded = b"".join(map(pickled_integer, values))
    if len(values) <= 3:
        return encoded + (b")", b"\x85", b"\x86", b"\x87")[len(values)]
    return b"(" + encoded + b"t"
