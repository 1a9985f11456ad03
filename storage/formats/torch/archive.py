"""Archives of `torch.save`: stored zip entries, with zip64 if needed, and records with a zip or a
safetensors blob.

A record needs two or three small reads. Input is untrusted: every position is checked against the record,
and sizes against limits. Torch-free, and without zipfile, which is slower.

The directory of a file names the local header of an entry but not the header's length, because torch pads
headers to align storages to 64 bytes (or ``.storage_alignment``). The end of an entry follows from the next
header and the possible data descriptors. If exactly one position is aligned, it is used without a read,
after a comparison with two real headers. Otherwise local headers are read, neighbors together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.safetensors import parse_header
from dcp.storage.formats.torch.pickle_reader import (
    MAX_TENSOR_PICKLE_BYTES,
    TensorPickle,
    decode_tensor_pickle,
    decode_torch_pickle,
)
from dcp.storage.formats.torch.python_values import python_value
from dcp.storage.geometry.strides import c_strides

MAX_DIRECTORY_BYTES: Final = 1 << 20
"""Maximum directory size of a record; a tensor takes about 500 bytes."""

LOCAL_SIGNATURE: Final = b"PK\3\4"

_EDGE_BYTES: Final = 1024
_LOCAL_BYTES: Final = 30
_CENTRAL: Final = struct.Struct("<4s4xHH4xIIIHHH8xI")
_CENTRAL_BYTES: Final = _CENTRAL.size
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4s28xQQQ")
_END64_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_NAME_LENGTHS: Final = struct.Struct("<HH")
_FACT_BYTES: Final = 16
"""Maximum size of small entries such as the version."""

_NEWEST_VERSION: Final = 10
"""Newest version of torch's reader; torch has written 3 since 1.6."""

_ZIP64_FIELD: Final = 1
_UNSET_16: Final = 0xFFFF
_UNSET_32: Final = 0xFFFFFFFF


class Window:
    """Record of a file: ``get(at, count)`` is relative to the record and refuses to leave it."""

    def __init__(
        self, read: Callable[[int, int], bytes], offset: int, length: int, *, edge_bytes: int = _EDGE_BYTES
    ) -> None:
        self._read = read
        self._offset = offset
        self.length = length
        self._tail_at = length - edge_bytes if length > 4 * edge_bytes else 0
        self._head = read(offset, edge_bytes if self._tail_at else length)
        self._tail = read(offset + self._tail_at, edge_bytes) if self._tail_at else self._head

    @classmethod
    def of(cls, data: bytes) -> Window:
        """Return a record in memory."""
        return cls(lambda at, count: data[at : at + count], 0, len(data))

    def get(self, at: int, count: int) -> bytes:
        """Return ``count`` bytes from position ``at`` of the record."""
        end = at + count
        if at < 0 or count < 0 or end > self.length:
            raise CheckpointFormatError("the record's zip is damaged: a position is outside of the record")
        if end <= len(self._head):
            data = self._head[at:end]
        elif at >= self._tail_at:
            data = self._tail[at - self._tail_at : end - self._tail_at]
        else:
            data = self._read(self._offset + at, count)
        if len(data) != count:
            raise CheckpointFormatError("the record is truncated: the file ends before the record does")
        return data


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """Stored entry: ``header_at`` is the position of its local header in the record, ``size`` is in bytes."""

    header_at: int
    size: int
    crc32: int


def read_directory(
    window: Window, *, limit_bytes: int = MAX_DIRECTORY_BYTES, limit_entries: int = MAX_DIRECTORY_BYTES
) -> dict[bytes, ZipEntry]:
    """Return the entries by name, in directory order.

    Raises:
        CheckpointFormatError: Above the limits, before the directory is read.
    """
    count, directory_bytes, directory_at = _find_directory(window)
    if directory_bytes > limit_bytes or count > limit_entries or count * _CENTRAL_BYTES > directory_bytes:
        raise CheckpointFormatError(
            f"the record's zip directory claims {count} entries in {directory_bytes} bytes, which is "
            "impossible or above the limit: the file is damaged or hostile"
        )
    directory = window.get(directory_at, directory_bytes)
    entries: dict[bytes, ZipEntry] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL_BYTES > directory_bytes:
            raise CheckpointFormatError("the record's zip directory is truncated")
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
                f"the record's zip entry {name!r} is compressed or encrypted, unlike files of torch.save; "
                "load it with torch.load(weights_only=True) and save it again with torch.save"
            )
        if _UNSET_32 in (packed, size, header_at):
            extra = directory[extra_at : extra_at + extra_bytes]
            size, packed, header_at = _zip64_values(extra, size, packed, header_at)
        if packed != size or name in entries:
            raise CheckpointFormatError(f"the record's zip entry {name!r} is malformed or duplicate")
        entries[name] = ZipEntry(header_at, size, crc)
    return entries


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return the number of entries, size and position of the directory."""
    end_at = window.length - _END.size
    signature, disk, directory_disk, disk_count, count, directory_bytes, directory_at, comment_bytes = (
        _END.unpack(window.get(end_at, _END.size))
    )
    one_disk = {disk, directory_disk} <= {0, _UNSET_16} and disk_count == count
    if signature != b"PK\5\6" or comment_bytes or not one_disk:
        raise CheckpointFormatError("the record has no zip end record: it is truncated or damaged")
    if count == _UNSET_16 or _UNSET_32 in (directory_bytes, directory_at):
        locator = window.get(end_at - _END64_LOCATOR.size, _END64_LOCATOR.size)
        signature, end64_at = _END64_LOCATOR.unpack(locator)
        if signature != b"PK\6\7":
            raise CheckpointFormatError("the record's zip is damaged: its zip64 locator is missing")
        end64 = window.get(end64_at, _END64.size)
        signature, count, directory_bytes, directory_at = _END64.unpack(end64)
        if signature != b"PK\6\6":
            raise CheckpointFormatError("the record's zip is damaged: its zip64 end record is missing")
    return count, directory_bytes, directory_at


def _zip64_values(extra: bytes, size: int, packed: int, header_at: int) -> tuple[int, int, int]:
    """Return the fields beyond 32 bits from the zip64 extra field."""
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
    """Return the position of an entry's bytes in the record."""
    return _start(entry, window.get(entry.header_at, _LOCAL_BYTES), window.length)


def _start(entry: ZipEntry, header: bytes, end: int) -> int:
    """Return the start of the bytes of an entry with local header ``header`` that ends before ``end``."""
    if not header.startswith(LOCAL_SIGNATURE):
        raise CheckpointFormatError("the zip is damaged: an entry's local header is missing")
    name_bytes, extra_bytes = _NAME_LENGTHS.unpack_from(header, 26)
    start: int = entry.header_at + _LOCAL_BYTES + name_bytes + extra_bytes
    if start + entry.size > end:
        raise CheckpointFormatError("the zip is damaged: an entry overlaps the next entry or the end")
    return start


def check_names(entries: dict[bytes, ZipEntry]) -> None:
    """Raise CheckpointFormatError unless the names are those of torch.save: a folder with a pickle."""
    folders = {name.partition(b"/")[0] for name in entries}
    folder = folders.pop() if len(folders) == 1 else b""
    needed = {folder + b"/data.pkl", folder + b"/version"}
    if not folder or not needed <= entries.keys() or not all(name.isascii() for name in entries):
        raise CheckpointFormatError(
            "the record's zip is not a folder with data.pkl and version, as torch.save writes it: its "
            "directory is damaged"
        )


class TorchZip:
    """Zip of an object or tensor: entries by name, without the archive's folder."""

    _damage: type[CheckpointError] = CheckpointFormatError
    _ends: Mapping[int, int] = MappingProxyType({})
    """End of each entry's space by its header's position; the end of the record by default."""

    def __init__(self, window: Window, **limits: int) -> None:
        """Read the directory; ``limits`` are those of `read_directory`.

        Raises:
            UnsupportedFormatError: For a newer torch.
            CheckpointFormatError: For other zips.
        """
        self.window = window
        entries = read_directory(window, **limits)
        folder = next(iter(entries), b"").partition(b"/")[0] + b"/"
        if not all(name.startswith(folder) for name in entries) or folder + b"data.pkl" not in entries:
            raise CheckpointFormatError(
                "the zip was not written by torch.save: it is not one folder with data.pkl"
            )
        self._folder_bytes = len(folder)
        self.entries = {name[len(folder) :]: entry for name, entry in entries.items()}
        text = self.content(b"version", _FACT_BYTES).strip()
        if text.isdigit() and len(text) < 10 and int(text) > _NEWEST_VERSION:
            raise UnsupportedFormatError(
                f"the zip of torch.save has version {int(text)}, but the newest supported version is "
                f"{_NEWEST_VERSION}: load it with a newer torch and save it again"
            )

    def check_byte_order(self) -> None:
        """Raise an error unless the entry ``byteorder`` is absent or says little-endian."""
        order = self.content(b"byteorder", _FACT_BYTES)
        if order == b"big":
            raise UnsupportedFormatError(
                "the zip was saved on a big-endian machine, which is not supported: load it there with torch "
                "and save it as safetensors"
            )
        if order not in (b"", b"little"):
            raise CheckpointFormatError(f"the zip has the unknown byte order {order!r}")

    def content(self, name: bytes, limit_bytes: int) -> bytes:
        """Return the bytes of an entry after a CRC-32 check; b"" if absent."""
        entry = self.entries.get(name)
        if entry is None:
            return b""
        if entry.size > limit_bytes:
            raise CheckpointFormatError(
                f"{name.decode('ascii', 'replace')} of the zip, which holds all objects of the file, has "
                f"{entry.size} bytes, more than the limit of {limit_bytes}; load the file with "
                "torch.load(weights_only=True), and save large lists, strings and bytes separately, or as "
                "tensors"
            )
        header = self.window.get(entry.header_at, _LOCAL_BYTES)
        start = _start(entry, header, self._ends.get(entry.header_at, self.window.length))
        data = self.window.get(start, entry.size)
        if entry.crc32 not in (0, found := crc32(data)):
            raise self._damage(
                f"entry {name!r} of the zip is damaged: its CRC-32 is {found:08x}, expected {entry.crc32:08x}"
            )
        return data


def check_entries(data: bytes) -> None:
    """Check the checksums of a zip in memory; torch can omit them.

    Raises:
        CheckpointFormatError: For differences and for other zips.
    """
    window = Window.of(data)
    check_names(read_directory(window))
    archive = TorchZip(window)
    for name in archive.entries:
        archive.content(name, len(data))


# -- files ---------------------------------------------------------------------------------------------------


MAX_FILE_DIRECTORY_BYTES: Final = 32 << 20
"""Maximum directory size of a file; 200,000 storages take about 15 MB."""

MAX_FILE_ENTRIES: Final = 400_000

_FILE_EDGE_BYTES: Final = 64 << 10
"""Bytes read at both ends of a file: all of a small file, the pickle or directory of many."""

_DESCRIPTOR_BYTES: Final = (16, 24, 12, 20, 0)
"""Possible sizes of a data descriptor, with or without zip64 and signature, or absent."""

_DEFAULT_ALIGNMENT: Final = 64
_LEAST_ALIGNMENT: Final = 32
"""Minimum alignment; below, two descriptor sizes may give aligned positions."""
_LONGEST_FIELD_BYTES: Final = 64
"""Maximum size of extra fields without padding."""

_WINDOW_BYTES: Final = 256 << 10
_SAMPLES: Final = 2

_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Pickled number at the start of torch's format before 1.6."""
_TAR_MAGIC_AT: Final = 257


class TorchArchive(TorchZip):
    """Entries of a file by name, without the archive's folder."""

    _damage = CorruptCheckpointError

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        """Read the directory.

        Raises:
            UnsupportedFormatError: For formats of torch before 1.6 and TorchScript.
            CheckpointFormatError: For other files.
        """
        window = Window(read, 0, size_bytes, edge_bytes=_FILE_EDGE_BYTES)
        head = window.get(0, min(size_bytes, 1024))
        if not head.startswith(LOCAL_SIGNATURE):
            raise _not_a_zip(head)
        super().__init__(window, limit_bytes=MAX_FILE_DIRECTORY_BYTES, limit_entries=MAX_FILE_ENTRIES)
        if b"constants.pkl" in self.entries:
            raise UnsupportedFormatError(
                "the file is a TorchScript archive, a program with weights; load it with torch.jit.load and "
                "save its state_dict() with torch.save"
            )
        starts = sorted(entry.header_at for entry in self.entries.values())
        self._ends = dict(pairwise([*starts, size_bytes]))
        if len(self._ends) != len(self.entries):
            raise CheckpointFormatError("the zip is damaged: two entries have the same position")
        for name, entry in self.entries.items():
            least = entry.header_at + _LOCAL_BYTES + self._folder_bytes + len(name)
            if least + entry.size > self._ends[entry.header_at]:
                raise CheckpointFormatError(
                    f"the zip is damaged: entry {name[:80]!r} overlaps the next entry or the end"
                )

    def places(self, names: Collection[bytes]) -> dict[bytes, int]:
        """Return the file positions of the entries ``names``."""
        text = self.content(b".storage_alignment", _FACT_BYTES)
        alignment = int(text) if text.isdigit() and int(text) > 0 else _DEFAULT_ALIGNMENT
        computed = {name: self._computed(name, alignment) for name in names}
        found = {name: place for name, place in computed.items() if place is not None}
        ordered = sorted(found, key=self._header_at)
        real = self._read_places({*ordered[:1], *ordered[-1:]})
        if any(found[name] != place for name, place in real.items()):
            found = {}  # another padding: read every header
        return found | self._read_places([name for name in names if name not in found])

    def _header_at(self, name: bytes) -> int:
        return self.entries[name].header_at

    def _computed(self, name: bytes, alignment: int) -> int | None:
        """Return the position if it follows from the neighbors, else None."""
        entry = self.entries[name]
        least = entry.header_at + _LOCAL_BYTES + self._folder_bytes + len(name)
        last = self._ends[entry.header_at] - entry.size
        if last == least or not entry.size:
            return least  # no room for padding, or no bytes
        if alignment < _LEAST_ALIGNMENT or last > least + alignment + _LONGEST_FIELD_BYTES + 24:
            return None
        places = [last - length for length in _DESCRIPTOR_BYTES if (last - length) % alignment == 0]
        return places[0] if len(places) == 1 and places[0] >= least + 4 else None

    def _read_places(self, names: Collection[bytes]) -> dict[bytes, int]:
        """Return positions from the local headers, read together if near."""
        found: dict[bytes, int] = {}
        data, data_at = b"", 0
        for name in sorted(names, key=self._header_at):
            entry = self.entries[name]
            begin, end = entry.header_at, self._ends[entry.header_at]
            if begin + _LOCAL_BYTES > data_at + len(data):
                is_near = end - begin < _WINDOW_BYTES // 16 and len(names) > _SAMPLES
                length = min(_WINDOW_BYTES if is_near else _LOCAL_BYTES, self.window.length - begin)
                data, data_at = self.window.get(begin, length), begin
            found[name] = _start(entry, data[begin - data_at : begin - data_at + _LOCAL_BYTES], end)
        return found


def _not_a_zip(head: bytes) -> CheckpointFormatError:
    way_out = "load it with torch.load(weights_only=True) and save it again with torch.save"
    if head.startswith(_LEGACY_MAGIC):
        return UnsupportedFormatError(
            "the file has the format of torch before 1.6 (or of _use_new_zipfile_serialization=False), which "
            f"is not supported; {way_out}"
        )
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return UnsupportedFormatError(
            f"the file has the tar format of torch before 0.1.10, which is not supported; {way_out}"
        )
    if head[:1] == b"\x80":
        return UnsupportedFormatError(f"the file is a plain pickle, not a file of torch.save; {way_out}")
    return CheckpointFormatError(
        "the file was not written by torch.save: it is not a zip archive. Check the path, and the suffix if "
        "it has another format"
    )


# -- records and blobs ---------------------------------------------------------------------------------------


_CACHED_PICKLE_BYTES: Final = 1024


def locate_payload(
    read: Callable[[int, int], bytes], record_offset: int, record_length: int, *, fqn: str
) -> TensorPickle:
    """Return the tensor in the record at ``record_offset``, with ``payload_offset`` and ``crc32``;
    ``read(offset, length)`` takes file offsets.

    A record without a zip is a safetensors blob of ``record_length`` bytes with all tensors of the file
    (stock's SerializationFormat.SAFETENSORS), with the tensor ``fqn``.

    Raises:
        CheckpointFormatError: For an invalid record.
        UnsafeObjectError: For a disallowed class.
        UnsupportedFormatError: For unsupported tensors.
    """
    try:
        if read(record_offset, min(record_length, 4)) == LOCAL_SIGNATURE:
            return _locate_in_zip(Window(read, record_offset, record_length), record_offset)
        return _locate_in_safetensors(read, record_offset, fqn)
    except CheckpointFormatError as error:
        if error.fqn:
            raise
        raise type(error)(f"the record of {fqn!r}: {error}", **(error.facts | {"fqn": fqn})) from error


def _locate_in_zip(window: Window, record_offset: int) -> TensorPickle:
    archive = TorchZip(window)
    pickled = archive.content(b"data.pkl", MAX_TENSOR_PICKLE_BYTES)
    tensor = (
        _decode_cached(pickled) if len(pickled) <= _CACHED_PICKLE_BYTES else decode_tensor_pickle(pickled)
    )
    if dtypes.BY_CODE[tensor.dtype_code].itemsize > 1:
        archive.check_byte_order()
    payload = archive.entries.get(b"data/" + tensor.storage_key.encode("utf-8", "surrogatepass"))
    if payload is None:
        raise CheckpointFormatError(f"the zip lacks the tensor's storage {tensor.storage_key[:40]!r}")
    if tensor.storage_bytes != payload.size:
        raise CheckpointFormatError(
            f"the tensor's storage has {payload.size} bytes, expected {tensor.storage_bytes}"
        )
    crc = payload.crc32 if payload.crc32 or not payload.size else None
    return replace(tensor, payload_offset=record_offset + entry_start(window, payload), crc32=crc)


@lru_cache(maxsize=4096)
def _decode_cached(pickled: bytes) -> TensorPickle:
    """Decode a pickle, cached because equal shapes have equal pickles."""
    return decode_tensor_pickle(pickled)


def _locate_in_safetensors(read: Callable[[int, int], bytes], record_offset: int, fqn: str) -> TensorPickle:
    entries, _, data_offset = parse_header(lambda at, length: read(record_offset + at, length), None)
    entry = entries.get(fqn)
    if entry is None:
        raise CheckpointFormatError("the safetensors header at this position has no such tensor")
    start = record_offset + data_offset + entry.begin
    size_bytes = entry.end - entry.begin
    strides = c_strides(entry.sizes)
    return TensorPickle(entry.dtype_code, "", size_bytes, 0, entry.sizes, strides, False, start)


MAX_BLOB_BYTES: Final = 1 << 30
_MAX_CONTAINERS: Final = 6_000_000
"""Maximum number of containers; each numpy scalar takes four."""

_EXPANSION: Final = 64
_FREE_BYTES: Final = 1 << 20


class ObjectBlob:
    """Blob written by `torch.save`."""

    def __init__(self, blob: bytes) -> None:
        """Raise CheckpointFormatError for other or damaged data."""
        self._archive = TorchZip(Window.of(blob))
        self._archive.check_byte_order()
        self._left = _EXPANSION * len(blob) + _FREE_BYTES

    def value(self, special: Mapping[type, Callable[[Any], Any]] | None = None) -> Any:
        """Return the value of `python_value`."""
        pickled = self._archive.content(b"data.pkl", MAX_BLOB_BYTES)
        decoded = decode_torch_pickle(pickled, limit_bytes=MAX_BLOB_BYTES, max_containers=_MAX_CONTAINERS)
        return python_value(decoded, len(pickled), special)

    def elements(self, tensor: TensorPickle) -> npt.NDArray[Any]:
        """Return the elements of ``tensor`` in C order, as unsigned integers or pairs."""
        data = self._archive.content(
            b"data/" + tensor.storage_key.encode("utf-8", "surrogatepass"), MAX_BLOB_BYTES
        )
        if len(data) != tensor.storage_bytes:
            raise CheckpointFormatError(
                f"the object is damaged: a tensor's storage has {len(data)} bytes, expected "
                f"{tensor.storage_bytes}"
            )
        size = dtypes.BY_CODE[tensor.dtype_code].itemsize
        code = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}[size]
        self._left -= size * math.prod(tensor.sizes)
        if self._left < 0:
            raise CheckpointFormatError(
                f"the object's tensors are more than {_EXPANSION} times larger than the object: it is "
                "hostile, or holds expanded views; save clones of the views"
            )
        strides = [stride * size for stride in tensor.strides]
        begin = tensor.storage_offset * size
        try:
            if 0 in tensor.sizes:
                return np.zeros(tensor.sizes, code)
            flat = np.frombuffer(data, code, count=(len(data) - begin) // size, offset=begin)
            return np.lib.stride_tricks.as_strided(flat, tensor.sizes, strides).copy(order="C")
        except ValueError as error:  # too many dimensions for numpy, or an overflow of the product of sizes
            raise CheckpointFormatError(
                f"the object has a tensor of shape {tensor.sizes}, which numpy cannot hold"
            ) from error
