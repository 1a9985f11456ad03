"""The pickle and the storages of one torch.save blob in memory; torch-free."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.torch.pickle_reader import decode_torch_pickle
from dcp.storage.formats.torch.tensor_pickle import TensorPickle
from dcp.storage.formats.torch.zip_reader import TorchZip, Window

__all__ = ["MAX_BLOB_BYTES", "ObjectBlob"]

MAX_BLOB_BYTES: Final = 1 << 30
_MAX_CONTAINERS: Final = 6_000_000
"""Of a list of numpy's scalars each takes four."""

_EXPANSION: Final = 64
_FREE_BYTES: Final = 1 << 20


class ObjectBlob:
    """A blob that `torch.save` wrote; ``decoded`` is the value of its pickle of ``pickle_bytes``."""

    def __init__(self, blob: bytes) -> None:
        """Raise CheckpointFormatError where it is no such zip, or damaged."""
        self._archive = TorchZip(Window(lambda at, count: blob[at : at + count], 0, len(blob)))
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
