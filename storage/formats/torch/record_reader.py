"""Records that others wrote, `torch.save`'s zip or a safetensors blob: the places of tensors' bytes, found by
three small reads, and the values of a blob in memory. Torch-free; hostile input gives a typed error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.safetensors import parse_header
from dcp.storage.formats.torch.archive import LOCAL_SIGNATURE, TorchZip, Window, entry_start
from dcp.storage.formats.torch.pickle_reader import (
    MAX_TENSOR_PICKLE_BYTES,
    TensorPickle,
    decode_tensor_pickle,
    decode_torch_pickle,
)
from dcp.storage.geometry.strides import c_strides

_CACHED_PICKLE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor's storage in its record, and the layout of the tensor in it.

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
    """Return the tensor in the record at ``record_offset``; ``read(offset, length)`` takes absolute file
    offsets.

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
    archive = TorchZip(window)
    pickled = archive.content(b"data.pkl", MAX_TENSOR_PICKLE_BYTES)
    tensor = (
        _decode_cached(pickled) if len(pickled) <= _CACHED_PICKLE_BYTES else decode_tensor_pickle(pickled)
    )
    if dtypes.BY_CODE[tensor.dtype_code].itemsize > 1:
        archive.check_byte_order()
    payload = archive.entries.get(b"data/" + tensor.storage_key.encode("utf-8", "surrogatepass"))
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


@lru_cache(maxsize=4096)
def _decode_cached(pickled: bytes) -> TensorPickle:
    """Decode each pickle once: checkpoints repeat few shapes, and equal shapes have equal pickles."""
    return decode_tensor_pickle(pickled)


def _locate_in_safetensors(read: Callable[[int, int], bytes], record_offset: int, fqn: str) -> StoredTensor:
    header = parse_header(lambda at, length: read(record_offset + at, length), None)
    entry = header.entries.get(fqn)
    if entry is None:
        raise CheckpointFormatError("it is not in the safetensors header at its place")
    start = record_offset + header.data_offset + entry.begin
    size_bytes = entry.end - entry.begin
    return StoredTensor(entry.dtype_code, entry.sizes, c_strides(entry.sizes), 0, start, size_bytes, None)


MAX_BLOB_BYTES: Final = 1 << 30
_MAX_CONTAINERS: Final = 6_000_000
"""Of a list of numpy's scalars each takes four."""

_EXPANSION: Final = 64
_FREE_BYTES: Final = 1 << 20


class ObjectBlob:
    """A blob that `torch.save` wrote; ``decoded`` is the value of its pickle of ``pickle_bytes``."""

    def __init__(self, blob: bytes) -> None:
        """Raise CheckpointFormatError where it is no such zip, or damaged."""
        self._archive = TorchZip(Window.of(blob))
        self._archive.check_byte_order()
        pickled = self._archive.content(b"data.pkl", MAX_BLOB_BYTES)
        self.pickle_bytes = len(pickled)
        self._left = _EXPANSION * len(blob) + _FREE_BYTES
        self.decoded: Any = decode_torch_pickle(
            pickled, limit_bytes=MAX_BLOB_BYTES, max_containers=_MAX_CONTAINERS
        )

    def elements(self, tensor: TensorPickle) -> npt.NDArray[Any]:
        """Return the elements of ``tensor`` in C order, as unsigned integers or pairs of them of its
        itemsize."""
        data = self._archive.content(
            b"data/" + tensor.storage_key.encode("utf-8", "surrogatepass"), MAX_BLOB_BYTES
        )
        if len(data) != tensor.storage_bytes:
            raise CheckpointFormatError("a tensor's storage is not as long as its pickle says")
        size = dtypes.BY_CODE[tensor.dtype_code].itemsize
        code = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}[size]
        self._left -= size * math.prod(tensor.sizes)
        if self._left < 0:
            raise CheckpointFormatError("the object's tensors have many times its own length")
        strides = [stride * size for stride in tensor.strides]
        begin = tensor.storage_offset * size
        try:
            if 0 in tensor.sizes:
                return np.zeros(tensor.sizes, code)
            flat = np.frombuffer(data, code, count=(len(data) - begin) // size, offset=begin)
            return np.lib.stride_tricks.as_strided(flat, tensor.sizes, strides).copy(order="C")
        except ValueError as error:  # of more dimensions than numpy has, or sizes whose product overflows
            raise CheckpointFormatError(f"a tensor of shape {tensor.sizes} cannot be made") from error
