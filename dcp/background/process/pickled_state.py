"""Python objects on their way from a trainer to its own writer process.

Both run the same program, so this is pickle, with three differences: bytes of tensors go into shared memory;
a DTensor goes as its local tensor and the description of its mesh, because process groups stay behind; and
what the other process could not import is refused here, where the user can still be told.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp.planners.layout.checkpointable import ShardClaim, claim_of, with_claim
from dcp.storage import torch_compat
from dcp.storage.errors import CheckpointError, WriterProcessError
from dcp.storage.tensors import byte_pieces
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = [
    "PickledState",
    "map_memory",
    "pack",
    "read_file",
    "tensor_view",
    "unpack",
    "write_file",
    "write_tensors",
]

_ALIGNMENT = 64
_WAY_OUT = (
    "Define its classes and functions at the top level of a module that the writer process can import, or "
    "save in a thread of the trainer (AsyncCheckpointerType.THREAD)"
)

_UNPICKLABLE = (
    CheckpointError,
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    RecursionError,
    RuntimeError,
)
"""What pickle raises, and what the objects' own ways of being pickled may."""


# -- packing -------------------------------------------------------------------------------------------------


@dataclass
class PickledState:
    """The pickle, and the tensors whose bytes belong at their offsets of a memory of ``size_bytes``."""

    data: bytes = b""
    tensors: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    size_bytes: int = 0


def pack(value: Any, what: str) -> PickledState:
    """Pack ``value`` for `unpack` in the writer process; ``what`` names it in errors.

    Raises WriterProcessError for what cannot be pickled, or not be found by name there.
    """
    packed, buffer = PickledState(), io.BytesIO()
    try:
        _Pickler(buffer, packed).dump(value)
    except _UNPICKLABLE as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise WriterProcessError(
            f"{what} cannot be sent to the writer process: {reason.rstrip('.')}. {_WAY_OUT}."
        ) from error
    packed.data = buffer.getvalue()
    return packed


def write_tensors(packed: PickledState) -> int:
    """A new memory file with the state's tensors; the descriptor is the caller's."""
    memory = os.memfd_create("dcp-staged", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, packed.size_bytes)
        for offset, tensor in packed.tensors:
            for piece in byte_pieces(tensor):
                rest = memoryview(piece)
                while rest:
                    written = os.pwrite(memory, rest, offset)
                    rest, offset = rest[written:], offset + written
    except BaseException:
        os.close(memory)
        raise
    return memory


def write_file(fill: Callable[[BinaryIO], object]) -> int:
    """A new memory file with what ``fill`` writes to it; the descriptor is the caller's."""
    memory = os.memfd_create("dcp-values", os.MFD_CLOEXEC)
    try:
        with os.fdopen(memory, "wb", closefd=False) as file:
            fill(file)
    except BaseException:
        os.close(memory)
        raise
    return memory


def read_file(fd: int) -> BinaryIO:
    """What `write_file` made, from its beginning; closing it leaves ``fd`` open."""
    file = os.fdopen(fd, "rb", closefd=False)
    file.seek(0)
    return file


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, packed: PickledState) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._packed = packed
        self._places: dict[tuple[int, int], int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, DeviceMesh):
            return torch_compat.mesh_of_parts, torch_compat.mesh_parts(obj)
        if isinstance(obj, FileSystemWriter):
            return _without_store(obj)
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            raise CheckpointError(
                f"{obj.__qualname__} is defined in the script that is being run (__main__), which the writer "
                "process does not run"
            )
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch_compat.ShardedTensor):
            return torch_compat.sharded_of_parts, torch_compat.sharded_parts(tensor)
        if isinstance(tensor, DTensor):
            return torch_compat.dtensor_of_parts, torch_compat.dtensor_parts(tensor)
        if not tensor.is_cpu:
            raise CheckpointError(f"a tensor on {tensor.device} is not a staged copy")
        if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "__tensor_flatten__"):
            return NotImplemented  # torch's own way, with the bytes in the pickle
        parts = self._place(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        return _tensor, (*parts, claim_of(tensor))

    def _place(self, tensor: torch.Tensor) -> int:
        """The tensor's offset in the state's memory; tensors that are one in memory stay one."""
        dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        key = (tensor.data_ptr(), tensor.nbytes) if dense else (-1, id(tensor))
        offset = self._places.get(key)
        if offset is None:
            packed = self._packed
            offset = self._places[key] = -(-packed.size_bytes // _ALIGNMENT) * _ALIGNMENT
            packed.tensors.append((offset, tensor.detach()))  # which also keeps its id and address from reuse
            packed.size_bytes = offset + tensor.nbytes
        return offset


def _without_store(writer: FileSystemWriter) -> Any:
    """How to pickle a writer: without what belongs to the save that it did last."""
    reduced = writer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        state = dict(reduced[2], _store=None, _previous=None, index=None, state_dict_cache=None)
        return (*reduced[:2], state, *reduced[3:])
    return reduced


# -- unpacking -----------------------------------------------------------------------------------------------

_memory: ContextVar[torch.Tensor] = ContextVar("memory of the state that is being unpacked")


def unpack(data: bytes, memory: torch.Tensor | None = None) -> Any:
    """What `pack` was given; ``memory`` are the bytes of its tensors, which become views.

    Raises WriterProcessError for what this process cannot import or build.
    """
    with _unpacking(memory if memory is not None else torch.empty(0, dtype=torch.uint8, device="cpu")):
        try:
            return pickle.loads(data)
        except Exception as error:
            raise WriterProcessError(
                "the writer process cannot rebuild what it was given: "
                f"{type(error).__name__}: {error}. {_WAY_OUT}."
            ) from error


def map_memory(fd: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a memory file; the mapping lasts as long as the tensor and its views."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)


@contextlib.contextmanager
def _unpacking(memory: torch.Tensor) -> Iterator[None]:
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


def tensor_view(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The contiguous tensor at byte ``offset`` of ``memory``."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return memory[offset : offset + size].view(dtype).view(shape)


def _tensor(
    offset: int, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, claim: ShardClaim | None
) -> torch.Tensor:
    tensor = tensor_view(_memory.get(), offset, shape, dtype).requires_grad_(requires_grad)
    return with_claim(tensor, claim)
