"""The zip of a torch.save file, laid out before its contents are there.

Entries are stored, each aligned to 64 bytes as torch aligns them, with the very padding and zip64 rules of
its writer, so that `torch.serialization.config.load.calculate_storage_offsets` works too. A CRC-32 stands
behind its entry, in a data descriptor, and in the central directory at the end (PKWARE APPNOTE.TXT 6.3.10,
general purpose bit 3): so a file may be written front to back while the CRCs are computed.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from dcp.storage.formats.checksums import crc32

__all__ = ["ALIGNMENT_BYTES", "ZipLayout", "ZipPart"]

ALIGNMENT_BYTES: Final = 64

_UNSET_16: Final = 0xFFFF
_UNSET_32: Final = 0xFFFFFFFF
_DESCRIPTOR_FLAG: Final = 1 << 3
_UTF8_FLAG: Final = 1 << 11
_DOS_EPOCH: Final = 0x0021 << 16
"""1980-01-01 00:00 as DOS date and time: equal contents give equal files."""

_PADDING_FIELD: Final = 0x4246
_ZIP64_FIELD: Final = 0x0001
_PADDINGS: Final = [
    struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding for padding in range(ALIGNMENT_BYTES)
]
_LOCAL: Final = struct.Struct("<4sHHHIIIIHH")
_LOCAL_BYTES: Final = 30
_FIELD_BYTES: Final = 4
_CENTRAL: Final = struct.Struct("<4sHHHHIIIIHHHHHII")
_CENTRAL_CRC_AT: Final = 16
_DESCRIPTOR: Final = struct.Struct("<4sIII")
_DESCRIPTOR_64: Final = struct.Struct("<4sIQQ")
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR: Final = struct.Struct("<4sIQI")


class ZipPart(NamedTuple):
    """``data`` at ``offset`` of the file; ``crc_holes`` are (key of the entry, place in ``data``)."""

    offset: int
    data: bytes
    crc_holes: tuple[tuple[int, int], ...] = ()


class _Entry(NamedTuple):
    name: bytes
    size: int
    offset: int
    crc: int
    key: int


class ZipLayout:
    """Grows by `add` (contents known now) and `reserve` (contents to come); `finish` ends it.

    ``parts`` are all bytes but those of reserved entries, in the order of the file.
    """

    def __init__(self, folder: str) -> None:
        self.parts: list[ZipPart] = []
        self.size_bytes = 0
        self._folder = folder
        self._entries: list[_Entry] = []
        self._part_begin = 0
        self._pieces: list[bytes] = []
        self._holes: list[tuple[int, int]] = []

    def add(self, name: str, data: bytes) -> None:
        """An entry whose contents are ``data``."""
        crc = crc32(data)
        self._begin(name, len(data), crc, -1, local_crc=crc)
        self._put(data)
        self._end_entry(len(data), crc, -1)

    def reserve(self, name: str, size: int, key: int, crc: int | None = None) -> int:
        """An entry of ``size`` bytes that somebody else writes; returns where they begin in the file.

        ``key`` (not negative) names it in the parts' ``crc_holes``, unless its ``crc`` is known, as that of
        nothing is.
        """
        if crc is not None or not size:
            key = -1
        crc = crc or 0
        self._begin(name, size, crc, key, local_crc=0)  # the same bytes, known or not
        self._close_part()
        offset = self.size_bytes
        self.size_bytes = self._part_begin = offset + size
        self._end_entry(size, crc, key)
        return offset

    def finish(self) -> None:
        """The central directory, and the end of the zip."""
        begin = self.size_bytes
        directory, holes = bytearray(), []
        for entry in self._entries:
            if entry.key >= 0:
                holes.append((entry.key, len(directory) + _CENTRAL_CRC_AT))
            directory += _central(entry)
        count, size = len(self._entries), len(directory)
        if count >= _UNSET_16 or size >= _UNSET_32 or begin >= _UNSET_32:
            directory += _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
            directory += _END64_LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        short_count = min(count, _UNSET_16)
        directory += _END.pack(
            b"PK\5\6", 0, 0, short_count, short_count, min(size, _UNSET_32), min(begin, _UNSET_32), 0
        )
        self._put(bytes(directory), tuple(holes))
        self._close_part()

    def _put(self, data: bytes, holes: tuple[tuple[int, int], ...] = ()) -> None:
        at = self.size_bytes - self._part_begin
        self._holes += [(key, at + place) for key, place in holes] if holes else ()
        self._pieces.append(data)
        self.size_bytes += len(data)

    def _close_part(self) -> None:
        """What was put since the last reserved entry is one part."""
        if self._pieces:
            self.parts.append(ZipPart(self._part_begin, b"".join(self._pieces), tuple(self._holes)))
            self._pieces, self._holes = [], []

    def _begin(self, name: str, size: int, crc: int, key: int, *, local_crc: int) -> None:
        encoded = f"{self._folder}/{name}".encode()
        offset = self.size_bytes
        self._entries.append(_Entry(encoded, size, offset, crc, key))
        zip64, short = b"", size
        if size >= _UNSET_32 or offset >= _UNSET_32:
            fields = ([size, size] if size >= _UNSET_32 else []) + ([offset] if offset >= _UNSET_32 else [])
            zip64 = struct.pack(f"<HH{len(fields)}Q", _ZIP64_FIELD, 8 * len(fields), *fields)
            short = min(size, _UNSET_32)
        unpadded = offset + _LOCAL_BYTES + len(encoded) + len(zip64) + _FIELD_BYTES
        extra = zip64 + _PADDINGS[-unpadded % ALIGNMENT_BYTES]
        version = 45 if zip64 else 20
        header = _LOCAL.pack(
            b"PK\3\4",
            version,
            _flags(encoded, size),
            0,
            _DOS_EPOCH,
            local_crc,
            short,
            short,
            len(encoded),
            len(extra),
        )
        self._put(header + encoded + extra)

    def _end_entry(self, size: int, crc: int, key: int) -> None:
        if not size:  # as torch's writer does: nothing to describe
            return
        wide = size >= _UNSET_32 or self._entries[-1].offset >= _UNSET_32
        descriptor = (_DESCRIPTOR_64 if wide else _DESCRIPTOR).pack(b"PK\7\10", crc, size, size)
        self._put(descriptor, ((key, 4),) if key >= 0 else ())


def _flags(name: bytes, size: int) -> int:
    return (_DESCRIPTOR_FLAG if size else 0) | (0 if name.isascii() else _UTF8_FLAG)


def _central(entry: _Entry) -> bytes:
    size, version, extra = entry.size, 20, b""
    if size >= _UNSET_32 or entry.offset >= _UNSET_32:
        fields = [value for value in (size, size, entry.offset) if value >= _UNSET_32]
        extra = struct.pack(f"<HH{len(fields)}Q", _ZIP64_FIELD, 8 * len(fields), *fields)
        size, version = min(size, _UNSET_32), 45
    header = _CENTRAL.pack(
        b"PK\1\2",
        version,
        version,
        _flags(entry.name, entry.size),
        0,
        _DOS_EPOCH,
        entry.crc,
        size,
        size,
        len(entry.name),
        len(extra),
        0,
        0,
        0,
        0,
        min(entry.offset, _UNSET_32),
    )
    return header + entry.name + extra
