"""Conversions between torch tensors and bytes: dtype codes, C-ordered pieces, addresses and strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import view
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import itemsizes
from dcp.storage.geometry.boxes import Box, split_box
from dcp.storage.geometry.strides import Int64, row_products, starts

_SLAB_BYTES = 4 << 20
_COPY_BELOW_BYTES = 128 << 10
"""Maximum size of strided or device tensors copied as a whole; larger ones use a reused buffer."""

_TORCH_BY_CODE: dict[int, torch.dtype] = {
    code: getattr(torch, dtype.name) for code, dtype in dtypes.BY_CODE.items() if hasattr(torch, dtype.name)
}
_CODE_BY_TORCH: dict[torch.dtype, int] = {dtype: code for code, dtype in _TORCH_BY_CODE.items()}


def torch_dtype(code: int) -> torch.dtype:
    """Return the torch dtype of a format code."""
    try:
        return _TORCH_BY_CODE[code]
    except KeyError:
        raise PlanError(
            f"torch {torch.__version__} has no dtype for the checkpoint's dtype code {code}: upgrade torch"
        ) from None


def dtype_code(dtype: torch.dtype, *, fqn: str = "") -> int:
    """Return the format code of a torch dtype.

    Raises:
        PlanError: For dtypes that a checkpoint cannot hold, such as quantized types.
    """
    code = _CODE_BY_TORCH.get(dtype)
    if code is None:
        raise PlanError(
            f"tensor {fqn!r} has dtype {dtype}, which cannot be stored: convert it first", fqn=fqn
        )
    return code


def is_addressable(tensor: torch.Tensor) -> bool:
    """Return True if elements are accessible at ``data_ptr`` with the tensor's strides."""
    return tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def is_whole_memory(tensor: torch.Tensor) -> bool:
    """Return True if the ``nbytes`` at ``data_ptr`` are the elements in C order."""
    return is_addressable(tensor) and tensor.is_contiguous()


@dataclass(frozen=True, eq=False)
class LocalMemory:
    """Local tensors of a rank, with properties of their memory.

    ``is_plain``: elements are at ``pointers`` in C order in CPU memory, neither conjugated nor negated;
    other addresses are meaningless. ``dtype_codes`` is 0 for unsupported dtypes. Shapes are ragged:
    ``shape_start``, ``shape_values``.
    """

    tensors: Sequence[torch.Tensor]
    is_plain: npt.NDArray[np.bool_]
    pointers: Int64
    dtype_codes: npt.NDArray[np.uint8]
    shape_start: Int64
    shape_values: Int64

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> LocalMemory:
        """Return the properties of ``tensors``."""
        is_plain = [is_whole_memory(tensor) for tensor in tensors]
        addresses = [t.data_ptr() if plain else 0 for t, plain in zip(tensors, is_plain, strict=True)]
        shapes = [tensor.shape for tensor in tensors]
        return cls(
            tensors,
            np.array(is_plain, np.bool_),
            np.array(addresses, np.int64),
            np.array([_CODE_BY_TORCH.get(tensor.dtype, 0) for tensor in tensors], np.uint8),
            starts([len(shape) for shape in shapes]),
            np.fromiter(chain.from_iterable(shapes), np.int64),
        )

    @cached_property
    def volumes(self) -> Int64:
        """Number of elements by tensor."""
        return row_products(self.shape_values, self.shape_start)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors; shared memory counts repeatedly."""
        return int((self.volumes * itemsizes(self.dtype_codes)).sum())


def byte_pieces(tensor: torch.Tensor) -> Iterable[bytes | memoryview]:
    """Return the elements as C-ordered bytes, in one or more pieces.

    A contiguous CPU tensor is a view of its memory, which the caller keeps alive. Other large tensors come
    through a reused buffer: use each piece before the next.
    """
    if is_whole_memory(tensor):
        return (view(tensor.data_ptr(), tensor.nbytes),)
    if tensor.nbytes < _COPY_BELOW_BYTES:
        copy = as_copied(tensor.detach().resolve_conj().resolve_neg()).to("cpu").contiguous()
        return (bytes(view(copy.data_ptr(), copy.nbytes)),)
    return _slabs(tensor.detach())


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, viewed as bytes if elements have one byte: torch lacks strided copies for some
    dtypes (float4_e2m1fn_x2).
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def finish_device_work(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for queued device work on ``tensors`` before other threads copy.

    Threads use their own streams, which are not ordered after the caller's stream.
    """
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        torch.accelerator.synchronize(device)


def _slabs(tensor: torch.Tensor) -> Iterator[memoryview]:
    pinned = not tensor.is_cpu and torch.accelerator.is_available()
    tensor = as_copied(tensor)
    buffer = torch.empty(_SLAB_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    for box in split_box(Box.whole(tensor.shape), _SLAB_BYTES // tensor.element_size()):
        slab = narrow(tensor, *box)
        target = buffer[: slab.nbytes].view(tensor.dtype).view(slab.shape)
        target.copy_(slab)
        yield view(target.data_ptr(), slab.nbytes)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the view of a box of ``tensor``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor
