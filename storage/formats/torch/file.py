"""A torch.save file (zip format, torch 1.6 and later) as a `CheckpointIndex`, by a few ranged reads.

The file may be of any size: its directory and pickle are read, no tensor. Names, and what a file without a
dict at its root gives, are in `dcp.storage.formats.torch.structure`. Entries that need a class or function
outside the allow-list, or are no dense tensors, are listed in ``provenance["refused_objects"]`` (name -> what
is needed) and missing otherwise; nothing of the file is ever run. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, ObjectColumns, WholeTensor
from dcp.storage.formats.torch.archive import TorchArchive
from dcp.storage.formats.torch.format import TORCH_SAVE
from dcp.storage.formats.torch.pickle_reader import MAX_FILE_PICKLE_BYTES, decode_torch_pickle
from dcp.storage.formats.torch.structure import FlatFile, flatten_torch
from dcp.storage.formats.torch.tensor_pickle import TensorPickle
from dcp.storage.formats.torch.zip_reader import ZipEntry, check_byte_order, check_version
from dcp.storage.geometry.strides import dense_order, extent

__all__ = ["index_of_torch_file"]

_EXPANDED_BYTES: Final = 16 << 30
_EXPANSION: Final = 1024
"""How much more than its own size a file's tensors may have: expanded masks and views of one buffer do."""


def index_of_torch_file(read: Callable[[int, int], bytes], size_bytes: int, name: str) -> CheckpointIndex:
    """Return the index of the file ``name``, of which ``read(offset, length)`` reads exactly that.

    A chunk is a whole tensor: its record is the storage's bytes, its payload those from the tensor's first
    element to its last. Tied tensors and views share records; ``record_crcs`` has the checksums.

    Raises UnsupportedFormatError for torch's older formats, TorchScript, big-endian files and a file that is
    one object of another class, CheckpointFormatError for damaged and hostile ones, CorruptCheckpointError
    where the pickle differs from its checksum.
    """
    archive = TorchArchive(read, size_bytes, name)
    try:
        check_version(archive.content(b"version", 16))
        check_byte_order(archive.content(b"byteorder", 16))
    except CheckpointFormatError as error:
        raise type(error)(f"{name}: {error}", **error.facts) from error
    pickled = archive.content(b"data.pkl", MAX_FILE_PICKLE_BYTES)
    try:
        flat = flatten_torch(decode_torch_pickle(pickled), len(pickled))
    except CheckpointFormatError as error:
        raise type(error)(f"{name}: {error}", **error.facts) from error
    if not flat.paths and flat.refused.keys() == {"value"}:
        raise UnsafeObjectError(
            f"{name} holds one object, which needs {flat.refused['value']}; nothing of it was run. Save a "
            "state dict instead: torch.save(model.state_dict(), ...)",
            global_name=flat.refused["value"],
        )
    _check_expansion(flat, size_bytes, name)
    return _index(flat, archive, size_bytes, name)


def _check_expansion(flat: FlatFile, size_bytes: int, name: str) -> None:
    """Refuse too large tensors: views that overlap and tensors that repeat their elements cost what they
    describe, wherever they are read or converted: a kilobyte must not ask for a petabyte."""
    views = {
        (one.storage_key, one.storage_offset, one.sizes, one.dtype_code): one for one in flat.tensors.values()
    }
    described = sum(math.prod(one.sizes) * dtypes.BY_CODE[one.dtype_code].itemsize for one in views.values())
    limit = _EXPANDED_BYTES + _EXPANSION * size_bytes
    if described > limit:
        raise CheckpointFormatError(
            f"{name} has {size_bytes} bytes, and its tensors would have {described}, more than is taken "
            f"({limit}): save clones of expanded tensors instead of the views",
            path=name,
        )


def _storages(flat: FlatFile, archive: TorchArchive, name: str) -> dict[str, ZipEntry]:
    """Return the entries of the zip that tensors refer to, by storage key."""
    found: dict[str, ZipEntry] = {}
    for fqn, tensor in flat.tensors.items():
        entry = found.get(tensor.storage_key)
        if entry is None:
            entry = archive.entries.get(b"data/" + tensor.storage_key.encode("utf-8", "surrogatepass"))
            if entry is None:
                raise CheckpointFormatError(
                    f"{name}: the zip has no storage {tensor.storage_key!r}, which {fqn[:200]!r} needs",
                    fqn=fqn,
                )
            found[tensor.storage_key] = entry
        if entry.size != tensor.storage_bytes:
            raise CheckpointFormatError(
                f"{name}: the storage of {fqn[:200]!r} has {entry.size} bytes, not {tensor.storage_bytes}",
                fqn=fqn,
            )
    return found


def _index(flat: FlatFile, archive: TorchArchive, size_bytes: int, name: str) -> CheckpointIndex:
    storages = _storages(flat, archive, name)
    places = archive.places(list(storages.values()))
    tensors: list[WholeTensor] = []
    records, record_lengths, lengths, strides, crcs = [], [], [], {}, {}
    for row, (fqn, tensor) in enumerate(flat.tensors.items()):
        entry, itemsize = storages[tensor.storage_key], dtypes.BY_CODE[tensor.dtype_code].itemsize
        record = places[entry.header_at]
        begin = record + (tensor.storage_offset * itemsize if 0 not in tensor.sizes else 0)
        tensors.append(WholeTensor(fqn, tensor.dtype_code, tensor.sizes, name, begin))
        records.append(record)
        record_lengths.append(entry.size)
        lengths.append(extent(tensor.sizes, tensor.strides) * itemsize)
        if not tensor.contiguous:
            strides[row] = tensor.strides
        if entry.crc32 and entry.size:
            crcs[row] = entry.crc32
    refused = {"refused_objects": flat.refused} if flat.refused else {}
    return CheckpointIndex.of_whole_tensors(
        TORCH_SAVE.name,
        tensors,
        {name: size_bytes},
        requires_grad=np.array([tensor.requires_grad for tensor in flat.tensors.values()], dtype=np.uint8),
        record_offsets=np.array(records, dtype=np.int64),
        record_lengths=np.array(record_lengths, dtype=np.int64),
        payload_lengths=np.array(lengths, dtype=np.int64),
        objects=_objects(flat.values),
        stride_orders=_stride_orders(list(flat.tensors.values())),
        payload_strides=strides,
        record_crcs=crcs,
        planner_data=flat.paths,
        provenance={"structure": flat.structure} | refused,
    )


def _stride_orders(tensors: list[TensorPickle]) -> dict[int, tuple[int, ...]]:
    """Return the stride orders of the tensors that are dense, but not C-ordered (channels_last, a
    transpose)."""
    orders = {}
    for row, tensor in enumerate(tensors):
        if not tensor.contiguous:
            order = dense_order(tensor.sizes, tensor.strides)
            if order is not None:
                orders[row] = order
    return orders


def _objects(values: Mapping[str, bytes]) -> ObjectColumns:
    count = len(values)
    encoded: dict[bytes, int] = {}
    plain = [encoded.setdefault(value, len(encoded)) for value in values.values()]
    return ObjectColumns(
        fqns=list(values),
        files=np.full(count, UNKNOWN, dtype=np.int64),
        offsets=np.zeros(count, dtype=np.int64),
        lengths=np.zeros(count, dtype=np.int64),
        crcs=np.full(count, UNKNOWN, dtype=np.int64),
        plain=np.array(plain, dtype=np.int64),
        values=list(encoded),
    )
