"""Reads the directory of a zip as `torch.save` writes it: stored entries, with zip64 where needed.

Reads little (a record of torch is opened with two small reads) and trusts nothing: every position is checked
against the record before it is used, sizes against named caps. Torch-free, and without zipfile, which reads
and builds more per archive than a whole record costs here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from dcp.storage.formats.checksums import crc32

__all__ = [
    "LOCAL_SIGNATURE",
    "TorchZip",
    "Window",
    "ZipEntry",
    "check_byte_order",
    "check_entries",
    "check_names",
    "check_version",
    "entry_start",
    "read_directory",
]

MAX_DIRECTORY_BYTES: Final = 1 << 20
"""A record of one tensor has some 500 bytes of directory."""

LOCAL_SIGNATURE: Final = b"PK\3\4"

_EDGE_BYTES: Final = 1024
_WHOLE_BYTES: Final = 4096
_LOCAL_BYTES: Final = 30
_CENTRAL: Final = struct.Struct("<4s4xHH4xIIIHHH8xI")
_CENTRAL_BYTES: Final = _CENTRAL.size
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4s28xQQQ")
_END64_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_NAME_LENGTHS: Final = struct.Struct("<HH")
_FACT_BYTES: Final = 16
"""Of entries such as the version."""

_NEWEST_VERSION: Final = 10
"""What torch's reader takes at most; its writer has written 3 since torch 1.6."""

_ZIP64_FIELD: Final = 1
_UNSET_16: Final = 0xFFFF
_UNSET_32: Final = 0xFFFFFFFF


class Window:
    """One record of a file: ``get(at, count)`` counts from the record's begin, and refuses to leave it."""

    def __init__(self, read: Callable[[int, int], bytes], offset: int, length: int) -> None:
        self._read = read
        self._offset = offset
        self.length = length
        if length <= _WHOLE_BYTES:
            self._head = self._tail = read(offset, length)
            self._tail_at = 0
        else:
            self._head = read(offset, _EDGE_BYTES)
            self._tail_at = length - _EDGE_BYTES
            self._tail = read(offset + self._tail_at, _EDGE_BYTES)

    def get(self, at: int, count: int) -> bytes:
        """Return ``count`` bytes from position ``at`` of the record."""
        end = at + count
        if at < 0 or count < 0 or end > self.length:
            raise CheckpointFormatError("a position in the record's zip reaches outside the record")
        if end <= len(self._head):
            data = self._head[at:end]
        elif at >= self._tail_at:
            data = self._tail[at - self._tail_at : end - self._tail_at]
        else:
            data = self._read(self._offset + at, count)
        if len(data) != count:
            raise CheckpointFormatError("the record ends too early")
        return data


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """A stored entry: ``header_at`` is the position of its local header in the record, ``size`` in bytes."""

    header_at: int
    size: int
    crc32: int


def read_directory(
    window: Window, *, limit_bytes: int = MAX_DIRECTORY_BYTES, limit_entries: int = MAX_DIRECTORY_BYTES
) -> dict[bytes, ZipEntry]:
    """Return the entries by name, in the directory's order. Raises CheckpointFormatError above the limits,
    before it is read."""
    count, directory_bytes, directory_at = _find_directory(window)
    if directory_bytes > limit_bytes or count > limit_entries or count * _CENTRAL_BYTES > directory_bytes:
        raise CheckpointFormatError(
            f"the record's zip directory claims {count} entries in {directory_bytes} bytes"
        )
    directory = window.get(directory_at, directory_bytes)
    entries: dict[bytes, ZipEntry] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL_BYTES > directory_bytes:
            raise CheckpointFormatError("the record's zip directory ends too early")
        signature, flags, method, crc, packed, size, name_bytes, extra_bytes, comment_bytes, header_at = (
            _CENTRAL.unpack_from(directory, at)
        )
        name_at = at + _CENTRAL_BYTES
        extra_at = name_at + name_bytes
        at = extra_at + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or at > directory_bytes:
            raise CheckpointFormatError("the record's zip directory is malformed")
        name = directory[name_at:extra_at]
        if method or flags & 1:
            raise UnsupportedFormatError(
                f"the record's zip entry {name!r} is compressed or encrypted; torch.save stores plainly"
            )
        if _UNSET_32 in (packed, size, header_at):
            extra = directory[extra_at : extra_at + extra_bytes]
            size, packed, header_at = _zip64_values(extra, size, packed, header_at)
        if packed != size or name in entries:
            raise CheckpointFormatError(f"the record's zip entry {name!r} is malformed or there twice")
        entries[name] = ZipEntry(header_at, size, crc)
    return entries


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return the number of entries, size and position of the directory, from the record at the zip's end."""
    end_at = window.length - _END.size
    signature, disk, directory_disk, disk_count, count, directory_bytes, directory_at, comment_bytes = (
        _END.unpack(window.get(end_at, _END.size))
    )
    one_disk = {disk, directory_disk} <= {0, _UNSET_16} and disk_count == count
    if signature != b"PK\5\6" or comment_bytes or not one_disk:
        raise CheckpointFormatError("the record does not end as a zip does: it is truncated or damaged")
    if count == _UNSET_16 or _UNSET_32 in (directory_bytes, directory_at):
        locator = window.get(end_at - _END64_LOCATOR.size, _END64_LOCATOR.size)
        signature, end64_at = _END64_LOCATOR.unpack(locator)
        if signature != b"PK\6\7":
            raise CheckpointFormatError("the record's zip lacks its zip64 locator")
        end64 = window.get(end64_at, _END64.size)
        signature, count, directory_bytes, directory_at = _END64.unpack(end64)
        if signature != b"PK\6\6":
            raise CheckpointFormatError("the record's zip lacks its zip64 end")
    return count, directory_bytes, directory_at


def _zip64_values(extra: bytes, size: int, packed: int, header_at: int) -> tuple[int, int, int]:
    """Return the fields that do not fit in 32 bits, in the order in which the zip64 extra field lists those
    it has."""
    at = 0
    while at + 4 <= len(extra):
        field, length = _NAME_LENGTHS.unpack_from(extra, at)
        at += 4
        if field == _ZIP64_FIELD:
            wanted = [value == _UNSET_32 for value in (size, packed, header_at)]
            if length < 8 * sum(wanted) or at + length > len(extra):
                break
            wide = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, at))
            size, packed, header_at = (
                next(wide) if want else value
                for want, value in zip(wanted, (size, packed, header_at), strict=True)
            )
            return size, packed, header_at
        at += length
    raise CheckpointFormatError("the record's zip has a malformed zip64 field")


def entry_start(window: Window, entry: ZipEntry) -> int:
    """Return the position of an entry's bytes in the record, behind its local header."""
    header = window.get(entry.header_at, _LOCAL_BYTES)
    if not header.startswith(LOCAL_SIGNATURE):
        raise CheckpointFormatError("an entry of the record's zip has no header where the directory says")
    name_bytes, extra_bytes = _NAME_LENGTHS.unpack_from(header, 26)
    start: int = entry.header_at + _LOCAL_BYTES + name_bytes + extra_bytes
    if start + entry.size > window.length:
        raise CheckpointFormatError("an entry of the record's zip reaches outside the record")
    return start


def check_names(entries: dict[bytes, ZipEntry]) -> None:
    """Raise CheckpointFormatError unless the names are torch.save's: one folder with a pickle in it."""
    folders = {name.partition(b"/")[0] for name in entries}
    folder = folders.pop() if len(folders) == 1 else b""
    needed = {folder + b"/data.pkl", folder + b"/version"}
    if not folder or not needed <= entries.keys() or not all(name.isascii() for name in entries):
        raise CheckpointFormatError("the record's zip lacks what torch.save writes: its directory is damaged")


def check_version(version: bytes) -> None:
    """Raise UnsupportedFormatError where the entry ``version`` of a zip is above what torch 2.15 reads."""
    text = version.strip()
    if text.isdigit() and len(text) < 10 and int(text) > _NEWEST_VERSION:
        raise UnsupportedFormatError(
            f"the zip of torch.save has version {int(text)}, and {_NEWEST_VERSION} is the newest known here: "
            "it was written by a newer torch; load it with that, and save it again"
        )


def check_byte_order(order: bytes) -> None:
    """Raise for an entry ``byteorder`` that is neither absent nor little-endian."""
    if order == b"big":
        raise UnsupportedFormatError("it was saved on a big-endian machine; convert it there first")
    if order not in (b"", b"little"):
        raise CheckpointFormatError(f"its zip names an unknown byte order {order!r}")


class TorchZip:
    """The zip of one object or tensor: its entries by name, without the archive's folder."""

    def __init__(self, window: Window) -> None:
        """Raise UnsupportedFormatError for the zip of a newer torch, CheckpointFormatError for a damaged
        one."""
        self._window = window
        entries = read_directory(window)
        folder = next((name for name in entries if name.endswith(b"/data.pkl")), b"data.pkl")[
            : -len(b"data.pkl")
        ]
        self.entries = {
            name.removeprefix(folder): entry for name, entry in entries.items() if name.startswith(folder)
        }
        check_version(self.content(b"version", _FACT_BYTES))

    def check_byte_order(self) -> None:
        """Raise UnsupportedFormatError for big-endian values."""
        check_byte_order(self.content(b"byteorder", _FACT_BYTES))

    def start(self, entry: ZipEntry) -> int:
        """Return the position of an entry's bytes in the window."""
        return entry_start(self._window, entry)

    def content(self, name: bytes, limit_bytes: int) -> bytes:
        """Return the bytes of an entry, compared with its CRC-32; b"" if there is none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            return b""
        if entry.size > limit_bytes:
            raise CheckpointFormatError(f"its zip has more than {limit_bytes} bytes of {name!r}")
        data = self._window.get(self.start(entry), entry.size)
        if entry.crc32 not in (0, crc32(data)):  # a flipped bit in the strides would be another tensor
            raise CheckpointFormatError(f"the entry {name!r} of its zip differs from the zip's checksum")
        return data


def check_entries(data: bytes) -> None:
    """Compare the entries of a zip in memory with their checksums, which torch can leave out.

    Raises CorruptCheckpointError for bytes that differ, CheckpointFormatError for what is no zip of torch's.
    """
    window = Window(lambda at, count: data[at : at + count], 0, len(data))
    entries = read_directory(window)
    check_names(entries)
    for name, entry in entries.items():
        start = entry_start(window, entry)
        found = crc32(memoryview(data)[start : start + entry.size])
        if entry.crc32 not in (0, found):
            raise CorruptCheckpointError(
                f"entry {name!r} has CRC-32 {found:08x}, its zip says {entry.crc32:08x}"
            )
