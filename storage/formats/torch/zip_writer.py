"""The zip of a torch.save file, laid out before its contents are there.

Entries are stored, each aligned to 64 bytes as torch aligns them, with the very padding and zip64 rules of
its writer, so that `torch.serialization.config.load.calculate_storage_offsets` works too. A CRC-32 stands
behind its entry, in a data descriptor, and in the central directory at the end (PKWARE APPNOTE.TXT 6.3.10,
general purpose bit 3): so a file may be written front to back while the CRCs are computed, which `zipfile`
cannot do.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import Int64

__all__ = ["ALIGNMENT_BYTES", "ZipLayout"]

ALIGNMENT_BYTES: Final = 64

_UNSET_16: Final = 0xFFFF
_UNSET_32: Final = 0xFFFFFFFF
_DESCRIPTOR_FLAG: Final = 1 << 3
_UTF8_FLAG: Final = 1 << 11
_DOS_EPOCH: Final = 0x0021 << 16
"""1980-01-01 00:00 as DOS date and time: equal contents give equal files."""

_PADDING_FIELD: Final = 0x4246
_ZIP64_FIELD: Final = 0x0001
_LOCAL: Final = struct.Struct("<4sHHHIIIIHH")
_FIELD: Final = struct.Struct("<HH")
_CENTRAL: Final = struct.Struct("<4sHHHHIIIIHH10xI")
"""Without a comment, on the first disk, without attributes."""
_CENTRAL_CRC_AT: Final = 16
_DESCRIPTORS: Final = (struct.Struct("<4sIII"), struct.Struct("<4sIQQ"))
_DESCRIPTOR_CRC_AT: Final = 4
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR: Final = struct.Struct("<4sIQI")

_NOTHING: Final[Mapping[int, bytes]] = MappingProxyType({})


class ZipLayout:
    """Grows by `add` (contents known now) and `reserve` (contents to come); `finish` ends it.

    ``offsets`` and ``parts`` are all bytes but those of reserved entries, in the order of the file, and where
    each part begins. ``crc_holes`` are (key of the entry, offset in the file) of CRC-32s that are to come.
    """

    def __init__(self, folder: str) -> None:
        self.offsets: list[int] = []
        self.parts: list[bytes] = []
        self.crc_holes: list[tuple[int, int]] = []
        self.size_bytes = 0
        self._folder = folder
        self._pieces: list[bytes] = []
        self._part_begin = 0
        self._directory: list[bytes] = []
        self._directory_bytes = self._count = 0
        self._directory_holes: list[tuple[int, int]] = []

    def add(self, name: str, data: bytes) -> None:
        """Add an entry whose contents are ``data``."""
        self._place(name, len(data), -1, crc32(data), data)

    def reserve(
        self, folder: str, sizes: Int64, keys: Int64, crcs: Int64, contents: Mapping[int, bytes] = _NOTHING
    ) -> Int64:
        """Reserve entries of ``sizes`` bytes that the caller writes; return where each begins in the file.

        They are called ``folder/0`` and so on. ``keys`` (not negative) name them in ``crc_holes``; -1 where
        the one of ``crcs`` is right, as that of nothing is. Those in ``contents``, by number, are known now.
        """
        begins = []
        rows = zip(sizes.tolist(), keys.tolist(), crcs.tolist(), strict=True)
        for number, (size, key, crc) in enumerate(rows):
            data = contents.get(number)
            crc = crc32(data) if data is not None else crc if size else 0
            begins.append(self._place(f"{folder}/{number}", size, key, crc, data))
        return np.array(begins, np.int64)

    def _place(self, name: str, size: int, key: int, crc: int, data: bytes | None) -> int:
        """Lay out one entry, whose ``data`` are None where they are to come; return where they begin."""
        encoded = f"{self._folder}/{name}".encode()
        offset, name_bytes, short = self.size_bytes, len(encoded), min(size, _UNSET_32)
        flags = (_DESCRIPTOR_FLAG if size else 0) | (0 if encoded.isascii() else _UTF8_FLAG)
        version, wide = 20, b""
        is_wide = size >= _UNSET_32 or offset >= _UNSET_32
        if is_wide:
            values = [size, size] * (size >= _UNSET_32) + [offset] * (offset >= _UNSET_32)
            wide = struct.pack(f"<HH{len(values)}Q", _ZIP64_FIELD, 8 * len(values), *values)
            version = 45
        unpadded = offset + _LOCAL.size + name_bytes + len(wide) + _FIELD.size
        padding = -unpadded % ALIGNMENT_BYTES
        begin = unpadded + padding
        end = begin + size
        extra = wide + _FIELD.pack(_PADDING_FIELD, padding) + b"Z" * padding
        local = (version, flags, 0, _DOS_EPOCH, 0 if data is None else crc, short, short)
        self._pieces += (_LOCAL.pack(b"PK\3\4", *local, name_bytes, len(extra)), encoded, extra)
        if data is not None:
            self._pieces.append(data)
        else:
            self.offsets.append(self._part_begin)
            self.parts.append(b"".join(self._pieces))
            self._pieces, self._part_begin = [], end
            if key >= 0 and size:
                crc = 0
                self.crc_holes.append((key, end + _DESCRIPTOR_CRC_AT))
                self._directory_holes.append((key, self._directory_bytes + _CENTRAL_CRC_AT))
        if size:  # as torch's writer does: of nothing there is no descriptor
            descriptor = _DESCRIPTORS[is_wide].pack(b"PK\7\10", crc, size, size)
            self._pieces.append(descriptor)
            end += len(descriptor)
        central = (version, version, flags, 0, _DOS_EPOCH, crc, short, short, name_bytes, len(wide))
        self._directory += (_CENTRAL.pack(b"PK\1\2", *central, min(offset, _UNSET_32)), encoded, wide)
        self._directory_bytes += _CENTRAL.size + name_bytes + len(wide)
        self._count += 1
        self.size_bytes = end
        return begin

    def finish(self) -> None:
        """Add the central directory, and the end of the zip."""
        begin, count, size = self.size_bytes, self._count, self._directory_bytes
        end = b""
        if count >= _UNSET_16 or size >= _UNSET_32 or begin >= _UNSET_32:
            end += _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
            end += _END64_LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        short_count = min(count, _UNSET_16)
        end += _END.pack(
            b"PK\5\6", 0, 0, short_count, short_count, min(size, _UNSET_32), min(begin, _UNSET_32), 0
        )
        self.offsets.append(self._part_begin)
        self.parts.append(b"".join([*self._pieces, *self._directory, end]))
        self.crc_holes += [(key, begin + place) for key, place in self._directory_holes]
        self.size_bytes += size + len(end)
