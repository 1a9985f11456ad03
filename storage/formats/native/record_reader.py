"""Finds a tensor's bytes in a record that somebody else wrote: `torch.save`'s zip, or a safetensors blob.

Costs three small reads a record. Torch-free; hostile input gives a typed error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.safetensors.file import parse_header
from dcp.storage.formats.torch.pickle_reader import MAX_TENSOR_PICKLE_BYTES, decode_tensor_pickle
from dcp.storage.formats.torch.tensor_pickle import TensorPickle
from dcp.storage.formats.torch.zip_reader import (
    LOCAL_SIGNATURE,
    Window,
    ZipEntry,
    check_version,
    entry_start,
    read_directory,
)

__all__ = ["StoredTensor", "locate_payload"]

_CACHED_PICKLE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a record has its tensor's storage, and how the tensor lies in it.

    ``payload_offset`` is absolute in the file; the tensor begins ``storage_offset_elements`` behind it, with
    ``strides`` in elements, and is known to lie within the ``payload_bytes``. ``crc32`` covers the whole
    payload; None where none was computed.
    """

    dtype_code: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset_elements: int
    payload_offset: int
    payload_bytes: int
    crc32: int | None


def locate_payload(
    read: Callable[[int, int], bytes], record_offset: int, record_length: int, *, fqn: str
) -> StoredTensor:
    """The tensor in the record at ``record_offset``; ``read(offset, length)`` takes absolute file offsets.

    A record that is no zip is what stock writes with SerializationFormat.SAFETENSORS: all tensors of the file
    in one safetensors blob at that offset, this one under ``fqn``; ``record_length`` is then its size.
    Raises CheckpointFormatError, UnsafeObjectError or UnsupportedFormatError, with ``fqn``.
    """
    try:
        if read(record_offset, min(record_length, 4)) == LOCAL_SIGNATURE:
            return _locate_in_zip(Window(read, record_offset, record_length), record_offset)
        return _locate_in_safetensors(read, record_offset, fqn)
    except CheckpointFormatError as error:
        if error.fqn:
            raise
        raise type(error)(f"the record of {fqn!r}: {error}", **(error.facts | {"fqn": fqn})) from error


def _locate_in_zip(window: Window, record_offset: int) -> StoredTensor:
    entries = read_directory(window)
    root = next(iter(entries), b"").partition(b"/")[0] + b"/"
    if root + b"version" in entries:
        check_version(_content(window, entries, root + b"version", 16))
    pickled = _content(window, entries, root + b"data.pkl", MAX_TENSOR_PICKLE_BYTES)
    tensor = (
        _decode_cached(pickled) if len(pickled) <= _CACHED_PICKLE_BYTES else decode_tensor_pickle(pickled)
    )
    itemsize = dtypes.BY_CODE[tensor.dtype_code].itemsize
    if itemsize > 1 and root + b"byteorder" in entries:
        _check_byte_order(_content(window, entries, root + b"byteorder", 16))
    payload = entries.get(root + b"data/" + tensor.storage_key.encode("utf-8", "surrogatepass"))
    if payload is None:
        raise CheckpointFormatError(f"its zip has no storage {tensor.storage_key[:40]!r}")
    if tensor.storage_bytes != payload.size:
        raise CheckpointFormatError(f"its storage has {payload.size} bytes instead of {tensor.storage_bytes}")
    return StoredTensor(
        tensor.dtype_code,
        tensor.sizes,
        tensor.strides,
        tensor.storage_offset,
        record_offset + entry_start(window, payload),
        payload.size,
        payload.crc32 if payload.crc32 or not payload.size else None,
    )


def _content(window: Window, entries: dict[bytes, ZipEntry], name: bytes, limit_bytes: int) -> bytes:
    entry = entries.get(name)
    if entry is None or entry.size > limit_bytes:
        raise CheckpointFormatError(f"its zip has no {name!r}, or more than {limit_bytes} bytes of it")
    data = window.get(entry_start(window, entry), entry.size)
    if entry.crc32 not in (0, crc32(data)):  # a flipped bit in the strides would be another tensor
        raise CheckpointFormatError(f"the entry {name!r} of its zip differs from the zip's checksum")
    return data


def _check_byte_order(order: bytes) -> None:
    if order == b"big":
        raise UnsupportedFormatError("it was saved on a big-endian machine; convert it there first")
    if order != b"little":
        raise CheckpointFormatError(f"its zip names an unknown byte order {order!r}")


@lru_cache(maxsize=4096)
def _decode_cached(pickled: bytes) -> TensorPickle:
    """Checkpoints repeat few shapes, and equal shapes have equal pickles."""
    return decode_tensor_pickle(pickled)


def _locate_in_safetensors(read: Callable[[int, int], bytes], record_offset: int, fqn: str) -> StoredTensor:
    header = parse_header(lambda at, length: read(record_offset + at, length), None)
    entry = header.entries.get(fqn)
    if entry is None:
        raise CheckpointFormatError("it is not in the safetensors header at its place")
    sizes, strides = entry.sizes, [1] * len(entry.sizes)
    for dimension in range(len(sizes) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * max(sizes[dimension + 1], 1)
    start = record_offset + header.data_offset + entry.begin
    return StoredTensor(entry.dtype_code, sizes, tuple(strides), 0, start, entry.end - entry.begin, None)
