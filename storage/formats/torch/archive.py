"""The zip of one torch.save file: its entries, and where the bytes of each begin, found by few reads.

The directory says where an entry's local header is, not how long that header is: torch pads it, so that
storages begin at multiples of 64 bytes (or of what ``.storage_alignment`` says). Where the entry ends is
known from the next header, and what stands between (a data descriptor) from the zip format, so the place
follows without a read: it is taken if it is the only one that is aligned, and compared with two real headers.
Entries of which that does not hold are in the files of other writers; then their headers are read, neighbours
together. Torch-free; hostile input gives a typed error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.torch.zip_reader import LOCAL_SIGNATURE, Window, ZipEntry, read_directory

__all__ = ["MAX_FILE_DIRECTORY_BYTES", "MAX_FILE_ENTRIES", "TorchArchive"]

MAX_FILE_DIRECTORY_BYTES: Final = 32 << 20
"""200,000 storages have some 15 MB of directory."""

MAX_FILE_ENTRIES: Final = 400_000

_EDGE_BYTES: Final = 64 << 10
"""Read at both ends of the file at once: all of a small file, the pickle of most, the directory of many."""

_LOCAL_BYTES: Final = 30
_NAME_LENGTHS: Final = struct.Struct("<HH")
_DESCRIPTOR_BYTES: Final = (16, 24, 12, 20, 0)
"""A data descriptor, with or without zip64 and signature; none."""

_DEFAULT_ALIGNMENT: Final = 64
_LEAST_ALIGNMENT: Final = 32
"""Below it, two lengths of a descriptor could both give an aligned place."""
_LONGEST_FIELD_BYTES: Final = 64
"""More than torch's padding field and the zip64 field have without the padding."""

_WINDOW_BYTES: Final = 256 << 10
_SAMPLES: Final = 2

_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number which torch's format of before 1.6 begins with."""
_TAR_MAGIC_AT: Final = 257


class TorchArchive:
    """The entries of one file, by name without the archive's folder; `read` takes positions in the file."""

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int, name: str) -> None:
        """Read the directory. Raises UnsupportedFormatError for torch's formats before 1.6 and TorchScript,
        CheckpointFormatError for whatever else is no zip of torch.save."""
        self._read = read
        self._size_bytes = size_bytes
        self._name = name
        self._head = read(0, min(_EDGE_BYTES, size_bytes))
        self._tail_at = max(0, size_bytes - _EDGE_BYTES)
        if not self._head.startswith(LOCAL_SIGNATURE):
            raise _not_a_zip(self._head, name)
        self._tail = self._head if not self._tail_at else read(self._tail_at, size_bytes - self._tail_at)
        entries = read_directory(
            Window(self._get, 0, size_bytes),
            limit_bytes=MAX_FILE_DIRECTORY_BYTES,
            limit_entries=MAX_FILE_ENTRIES,
        )
        self.entries = self._without_folder(entries)
        self._ends = self._check_ranges(entries)

    def _get(self, at: int, count: int) -> bytes:
        if at + count <= len(self._head):
            return self._head[at : at + count]
        if at >= self._tail_at:
            return self._tail[at - self._tail_at : at - self._tail_at + count]
        return self._read(at, count)

    def _without_folder(self, entries: dict[bytes, ZipEntry]) -> dict[bytes, ZipEntry]:
        folder = next(iter(entries), b"").partition(b"/")[0] + b"/"
        if not all(name.startswith(folder) for name in entries) or folder + b"data.pkl" not in entries:
            raise CheckpointFormatError(
                f"{self._name}: the zip lacks what torch.save writes (one folder with data.pkl in it)"
            )
        if folder + b"constants.pkl" in entries:
            raise UnsupportedFormatError(
                f"{self._name} is a TorchScript archive, a program with its weights; load it with "
                "torch.jit.load and save its state_dict() with torch.save"
            )
        return {name[len(folder) :]: entry for name, entry in entries.items()}

    def _check_ranges(self, entries: dict[bytes, ZipEntry]) -> dict[int, int]:
        """Return where the room of each entry ends, by the position of its header; no two entries may
        overlap."""
        self._headers = headers = {entry.header_at: len(name) for name, entry in entries.items()}
        if len(headers) != len(entries):
            raise CheckpointFormatError(f"{self._name}: two entries of the zip share one place")
        places = sorted(headers)
        ends = dict(pairwise([*places, self._size_bytes]))
        for name, entry in entries.items():
            if entry.header_at + _LOCAL_BYTES + len(name) + entry.size > ends[entry.header_at]:
                raise CheckpointFormatError(
                    f"{self._name}: entry {name[:80]!r} reaches into the next one, or beyond the end"
                )
        return ends

    # -- small entries ---------------------------------------------------------------------------------------

    def content(self, name: bytes, limit_bytes: int) -> bytes:
        """Return the bytes of a small entry, compared with its CRC-32; b"" if there is none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            return b""
        if entry.size > limit_bytes:
            raise CheckpointFormatError(
                f"{self._name}: {name.decode('ascii', 'replace')} of the zip, where all is that is no "
                f"tensor, has {entry.size} bytes, more than the {limit_bytes} that are read; load the "
                "file with torch.load(weights_only=True), and save large lists, texts and bytes apart, or as "
                "tensors"
            )
        room = min(self._ends[entry.header_at] - entry.header_at, entry.size + 1024)
        data = self._get(entry.header_at, room)
        begin = self._header_bytes(entry, data)
        found = data[begin : begin + entry.size]
        if len(found) < entry.size:
            found = self._get(entry.header_at + begin, entry.size)
        if entry.crc32 not in (0, crc32(found)):
            raise CorruptCheckpointError(
                f"{self._name}: entry {name!r} of the zip has CRC-32 {crc32(found):08x}, its directory says "
                f"{entry.crc32:08x}: the file is damaged",
                path=self._name,
            )
        return found

    def _header_bytes(self, entry: ZipEntry, data: bytes) -> int:
        """Return the length of an entry's local header, which ``data`` begins with."""
        if not data.startswith(LOCAL_SIGNATURE) or len(data) < _LOCAL_BYTES:
            raise CheckpointFormatError(
                f"{self._name}: no entry of the zip begins at byte {entry.header_at}, as its directory says"
            )
        name_bytes, extra_bytes = _NAME_LENGTHS.unpack_from(data, 26)
        length: int = _LOCAL_BYTES + name_bytes + extra_bytes
        if entry.header_at + length + entry.size > self._ends[entry.header_at]:
            raise CheckpointFormatError(
                f"{self._name}: the entry of the zip at byte {entry.header_at} reaches into the next one"
            )
        return length

    # -- places ----------------------------------------------------------------------------------------------

    def places(self, entries: list[ZipEntry]) -> dict[int, int]:
        """Return where the bytes of ``entries`` begin in the file, by the positions of their headers."""
        alignment = self._alignment()
        found: dict[int, int] = {}
        computed: list[ZipEntry] = []
        unknown: list[ZipEntry] = []
        for entry in entries:
            place = self._computed(entry, alignment)
            if place is None:
                unknown.append(entry)
            else:
                found[entry.header_at] = place
                computed.append(entry)
        if computed:
            computed.sort(key=lambda entry: entry.header_at)
            samples = [computed[0], computed[-1]][:_SAMPLES]
            real = self._read_places(samples)
            if any(found[at] != place for at, place in real.items()):
                unknown = entries  # no such padding after all: every header has to be looked at
        found.update(self._read_places(unknown))
        return found

    def _alignment(self) -> int:
        text = self.content(b".storage_alignment", 16)
        return int(text) if text.isdigit() and int(text) > 0 else _DEFAULT_ALIGNMENT

    def _computed(self, entry: ZipEntry, alignment: int) -> int | None:
        """Return the place if it follows from the neighbours, else None."""
        least = entry.header_at + _LOCAL_BYTES + self._headers[entry.header_at]
        last = self._ends[entry.header_at] - entry.size
        if last == least or not entry.size:
            return least  # no room for anything else, or nothing to read
        if alignment < _LEAST_ALIGNMENT or last > least + alignment + _LONGEST_FIELD_BYTES + 24:
            return None
        places = [last - length for length in _DESCRIPTOR_BYTES if (last - length) % alignment == 0]
        return places[0] if len(places) == 1 and places[0] >= least + 4 else None

    def _read_places(self, entries: list[ZipEntry]) -> dict[int, int]:
        """Return where contents begin, read from the local headers; near ones are read together."""
        found: dict[int, int] = {}
        window, window_at = b"", 0
        for entry in sorted(entries, key=lambda entry: entry.header_at):
            at = entry.header_at - window_at
            if at < 0 or at + _LOCAL_BYTES > len(window):
                window_at, at = entry.header_at, 0
                near = self._ends[entry.header_at] - entry.header_at < _WINDOW_BYTES // 16
                length = _WINDOW_BYTES if near and len(entries) > _SAMPLES else _LOCAL_BYTES
                window = self._get(window_at, min(length, self._size_bytes - window_at))
            found[entry.header_at] = entry.header_at + self._header_bytes(
                entry, window[at : at + _LOCAL_BYTES]
            )
        return found


def _not_a_zip(head: bytes, name: str) -> CheckpointFormatError:
    way_out = "load it with torch.load(weights_only=True) and save it again with torch.save"
    if head.startswith(_LEGACY_MAGIC):
        return UnsupportedFormatError(
            f"{name} is in the format that torch had before 1.6 (or was saved with "
            f"_use_new_zipfile_serialization=False), which cannot be read by ranges; {way_out}"
        )
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return UnsupportedFormatError(f"{name} is in the tar format that torch had before 0.1.10; {way_out}")
    if head[:1] == b"\x80":
        return UnsupportedFormatError(f"{name} is a bare pickle, not a file of torch.save; {way_out}")
    return CheckpointFormatError(f"{name} is no file of torch.save: it does not begin as a zip does")
