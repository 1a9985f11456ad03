"""The zip of a torch.save file, laid out before its contents are there.

Entries are stored, each aligned to 64 bytes as torch aligns them, with the very padding and zip64 rules of
its writer, so that `torch.serialization.config.load.calculate_storage_offsets` works too. A CRC-32 stands
behind its entry, in a data descriptor, and in the central directory at the end (PKWARE APPNOTE.TXT 6.3.10,
general purpose bit 3): so a file may be written front to back while the CRCs are computed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
_LOCAL_BYTES: Final = 30
_FIELD_BYTES: Final = 4
_CENTRAL_BYTES: Final = 46
_CENTRAL_CRC_AT: Final = 16
_DESCRIPTOR_CRC_AT: Final = 4
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR: Final = struct.Struct("<4sIQI")

_NOTHING: Final[Mapping[int, bytes]] = MappingProxyType({})

_Column = tuple[str, Any]
"""A type of NumPy's, and values of it, or one for all rows."""


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
        self._folder = folder.encode()
        self._pieces: list[bytes] = []
        self._part_begin = 0
        self._count = 0
        self._directory: list[bytes] = []
        self._directory_bytes = 0
        self._directory_holes: list[tuple[int, int]] = []

    def add(self, name: str, data: bytes) -> None:
        """An entry whose contents are ``data``."""
        names = _EntryNames(self._folder + b"/" + name.encode())
        one = _PlacedEntries.of(names, self.size_bytes, np.array([len(data)]), np.array([crc32(data)]))
        self._pieces += [*one.headers(local_crcs=one.crcs), data, *one.descriptors()]
        self.size_bytes = one.end
        self._note(one, np.full(1, -1))

    def reserve(
        self, folder: str, sizes: Int64, keys: Int64, crcs: Int64, contents: Mapping[int, bytes] = _NOTHING
    ) -> Int64:
        """Entries of ``sizes`` bytes that the caller writes; returns where each begins in the file.

        They are called ``folder/0`` and so on. ``keys`` (not negative) name them in ``crc_holes``; -1 where
        the one of ``crcs`` is right, as that of nothing is. Those in ``contents``, by number, are known now.
        """
        if not len(sizes):
            return sizes
        is_known = np.zeros(len(sizes), bool)
        is_known[list(contents)] = True
        keys = np.where((sizes > 0) & ~is_known, keys, -1)
        crcs = np.where((sizes > 0) & (keys < 0), crcs, 0)
        for number, data in contents.items():
            crcs[number] = crc32(data)
        names = _EntryNames(self._folder + b"/" + folder.encode() + b"/", len(sizes))
        rows = _PlacedEntries.of(names, self.size_bytes, sizes, crcs)
        ends = rows.begins + sizes
        headers, descriptors = rows.headers(local_crcs=np.where(is_known, crcs, 0)), rows.descriptors()
        # What stands between two of them is one part: the end of the one, and the beginning of the other.
        parts = [b"".join([*self._pieces, headers[0]]), *map(add, descriptors, headers[1:])]
        for number, data in contents.items():
            parts[number] += data
        self.offsets += [self._part_begin, *ends[:-1].tolist()]
        self.parts += parts
        self._pieces, self._part_begin = descriptors[-1:], int(ends[-1])
        wanted = np.flatnonzero(keys >= 0)
        places = ends[wanted] + _DESCRIPTOR_CRC_AT
        self.crc_holes += zip(keys[wanted].tolist(), places.tolist(), strict=True)
        self._note(rows, keys)
        self.size_bytes = rows.end
        return rows.begins

    def finish(self) -> None:
        """The central directory, and the end of the zip."""
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
        self._pieces = self._directory = []
        self.size_bytes += size + len(end)

    def _note(self, rows: _PlacedEntries, keys: Int64) -> None:
        """``rows`` for the central directory."""
        records = rows.central()
        ends = self._directory_bytes + np.cumsum(rows.central_bytes)
        wanted = np.flatnonzero(keys >= 0)
        places = (ends - rows.central_bytes)[wanted] + _CENTRAL_CRC_AT
        self._directory_holes += zip(keys[wanted].tolist(), places.tolist(), strict=True)
        self._directory += records
        self._directory_bytes = int(ends[-1])
        self._count += len(keys)


@dataclass(frozen=True, slots=True)
class _EntryNames:
    """``prefix`` alone, or followed by each of ``count`` numbers."""

    prefix: bytes
    count: int = 0

    @property
    def digits(self) -> Int64:
        """How many each number has."""
        if not self.count:
            return np.zeros(1, np.int64)
        powers = 10 ** np.arange(1, 19, dtype=np.int64)
        return 1 + np.searchsorted(powers, np.arange(self.count), "right").astype(np.int64)

    def columns(self, rows: Int64, digits: int) -> list[_Column]:
        """Those of ``rows``, whose numbers have so many digits."""
        columns: list[_Column] = [(f"S{len(self.prefix)}", self.prefix)]
        if digits:
            powers = 10 ** np.arange(digits - 1, -1, -1, dtype=np.int64)
            columns.append((f"({digits},)u1", rows[:, None] // powers % 10 + ord("0")))
        return columns


@dataclass(frozen=True, eq=False)
class _PlacedEntries:
    """Entries that follow one another: headers begin at ``offsets``, contents at ``begins``.

    ``end`` is behind the last.
    """

    names: _EntryNames
    digits: Int64
    sizes: Int64
    crcs: Int64
    offsets: Int64
    begins: Int64
    end: int

    @classmethod
    def of(cls, names: _EntryNames, offset: int, sizes: Int64, crcs: Int64) -> _PlacedEntries:
        """From ``offset`` of the file on."""
        digits = names.digits
        first_far = 0 if offset >= _UNSET_32 else len(sizes)
        while True:  # twice at most: what is far is so for a larger header, and nothing before it is
            far = np.arange(len(sizes)) >= first_far
            heads = _LOCAL_BYTES + len(names.prefix) + digits + _zip64_bytes(2 * (sizes >= _UNSET_32) + far)
            heads += _FIELD_BYTES
            tails = sizes + _descriptor_bytes(sizes, far)
            steps = np.concatenate([offset + heads[:1], tails[:-1] + heads[1:]])
            begins = np.cumsum(-(-steps // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
            offsets = np.concatenate([[offset], (begins + tails)[:-1]])
            found = int(np.searchsorted(offsets, _UNSET_32))
            if found >= first_far:
                return cls(names, digits, sizes, crcs, offsets, begins, int(begins[-1] + tails[-1]))
            first_far = found

    @cached_property
    def large(self) -> NDArray[np.bool_]:
        """The rows of 4 GiB and more."""
        return self.sizes >= _UNSET_32

    @cached_property
    def far(self) -> NDArray[np.bool_]:
        """The rows that begin behind 4 GiB and more."""
        return self.offsets >= _UNSET_32

    @cached_property
    def zip64_bytes(self) -> Int64:
        """The bytes of the field in the local header, and in the central directory."""
        return _zip64_bytes(2 * self.large + self.far)

    @property
    def central_bytes(self) -> Int64:
        """The bytes of each row's record in the central directory."""
        return _CENTRAL_BYTES + len(self.names.prefix) + self.digits + self.zip64_bytes

    @property
    def _kinds(self) -> Int64:
        """Equal for those whose headers are alike, but for their paddings."""
        return 4 * self.digits + 2 * self.large + self.far

    def headers(self, *, local_crcs: Int64) -> list[bytes]:
        """What stands before the contents of each."""
        fixed = _LOCAL_BYTES + len(self.names.prefix) + self.digits + self.zip64_bytes + _FIELD_BYTES
        paddings = self.begins - self.offsets - fixed
        found = np.empty(len(self.sizes), object)
        for rows in _alike(self._kinds * ALIGNMENT_BYTES + paddings):
            one = rows[0]
            columns: list[_Column] = [
                ("S4", b"PK\3\4"),
                ("<u2", np.where(self.zip64_bytes[one], 45, 20)),
                ("<u2", self._flags(rows)),
                ("<u2", 0),
                ("<u4", _DOS_EPOCH),
                ("<u4", local_crcs[rows]),
                *[("<u4", np.minimum(self.sizes[rows], _UNSET_32))] * 2,
                ("<u2", len(self.names.prefix) + self.digits[one]),
                ("<u2", self.zip64_bytes[one] + _FIELD_BYTES + paddings[one]),
                *self.names.columns(rows, int(self.digits[one])),
                *self._zip64(rows),
                ("<u2", _PADDING_FIELD),
                ("<u2", paddings[one]),
                (f"S{paddings[one]}", b"Z" * int(paddings[one])),
            ]
            found[rows] = _split(_table(len(rows), columns))
        return list(found)

    def descriptors(self) -> list[bytes]:
        """What stands behind the contents of each."""
        found = np.full(len(self.sizes), b"", object)  # as torch's writer does: of nothing there is none
        for rows in _alike(2 * (self.large | self.far) + (self.sizes > 0)):
            if not self.sizes[rows[0]]:
                continue
            wide = "<u8" if self.large[rows[0]] or self.far[rows[0]] else "<u4"
            columns: list[_Column] = [("S4", b"PK\7\10"), ("<u4", self.crcs[rows])]
            found[rows] = _split(_table(len(rows), [*columns, *[(wide, self.sizes[rows])] * 2]))
        return list(found)

    def central(self) -> list[bytes]:
        """Records of the central directory, joined where they are alike."""
        found = []
        for rows in np.split(np.arange(len(self.sizes)), 1 + np.flatnonzero(np.diff(self._kinds))):
            one = rows[0]
            version = np.where(self.zip64_bytes[one], 45, 20)
            columns: list[_Column] = [
                ("S4", b"PK\1\2"),
                ("<u2", version),
                ("<u2", version),
                ("<u2", self._flags(rows)),
                ("<u2", 0),
                ("<u4", _DOS_EPOCH),
                ("<u4", self.crcs[rows]),
                *[("<u4", np.minimum(self.sizes[rows], _UNSET_32))] * 2,
                ("<u2", len(self.names.prefix) + self.digits[one]),
                ("<u2", self.zip64_bytes[one]),
                ("S10", b""),  # no comment, the first disk, no attributes
                ("<u4", np.minimum(self.offsets[rows], _UNSET_32)),
                *self.names.columns(rows, int(self.digits[one])),
                *self._zip64(rows),
            ]
            found.append(_table(len(rows), columns).tobytes())
        return found

    def _flags(self, rows: Int64) -> Int64:
        utf8 = 0 if self.names.prefix.isascii() else _UTF8_FLAG
        return np.where(self.sizes[rows] > 0, _DESCRIPTOR_FLAG | utf8, utf8)

    def _zip64(self, rows: Int64) -> list[_Column]:
        """The field for what is above 4 GiB of ``rows``, which are alike in that."""
        size = int(self.zip64_bytes[rows[0]])
        if not size:
            return []
        columns: list[_Column] = [("<u2", _ZIP64_FIELD), ("<u2", size - _FIELD_BYTES)]
        columns += [("<u8", self.sizes[rows])] * 2 if self.large[rows[0]] else []
        return [*columns, ("<u8", self.offsets[rows])] if self.far[rows[0]] else columns


def _zip64_bytes(fields: Int64) -> Int64:
    return np.where(fields > 0, _FIELD_BYTES + 8 * fields, 0)


def _descriptor_bytes(sizes: Int64, far: NDArray[np.bool_]) -> Int64:
    return np.where(sizes > 0, np.where((sizes >= _UNSET_32) | far, 24, 16), 0)


def _alike(kinds: Int64) -> list[Int64]:
    """Rows by their kind, a small number."""
    order = np.argsort(kinds.astype(np.int16), kind="stable")
    return np.split(order, 1 + np.flatnonzero(np.diff(kinds[order])))


def _table(count: int, columns: Sequence[_Column]) -> NDArray[np.void]:
    """Packed records."""
    table = np.empty(count, [(f"{number}", kind) for number, (kind, _) in enumerate(columns)])
    for number, (_, values) in enumerate(columns):
        table[f"{number}"] = values
    return table


def _split(table: NDArray[np.void]) -> list[bytes]:
    """The bytes of each record."""
    records: list[bytes] = table.view(f"V{table.itemsize}").tolist()
    return records
