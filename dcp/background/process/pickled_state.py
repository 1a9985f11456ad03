"""Python objects on their way from a trainer to its own writer process.

Both run the same program, so this is pickle, with three differences: staged tensors stay in shared memory; a
DTensor goes as its local tensor and the description of its mesh, because process groups stay behind; and
what the other process could not import is refused here, where the user can still be warned.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import types
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp.planners.layout.local_tensor import ShardClaim, claim_of, with_claim
from dcp.storage import torch_compat
from dcp.storage.errors import CheckpointError, WriterProcessError
from dcp.storage.tensors import is_whole_memory
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from dcp.staging.arena import HostArena

__all__ = ["map_memory", "pack", "tensor_view", "unpack"]

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
"""Errors of pickle, and of the objects' own ways of being pickled."""


# -- packing -------------------------------------------------------------------------------------------------


def pack(value: Any, what: str, arena: HostArena | None = None) -> bytes:
    """Pack ``value`` for `unpack` in the writer process; ``what`` names it in errors. Of tensors in ``arena``
    only the places are packed.

    Raises WriterProcessError for what cannot be pickled, or not be found by name there.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, arena).dump(value)
    except _UNPICKLABLE as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise WriterProcessError(
            f"{what} cannot be sent to the writer process: {reason.rstrip('.')}. {_WAY_OUT}."
        ) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arena: HostArena | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._begin = arena.address if arena is not None else 0
        self._size_bytes = arena.size_bytes if arena is not None else 0

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
        if tensor.layout is torch.strided and is_whole_memory(tensor) and not tensor.is_quantized:
            offset = tensor.data_ptr() - self._begin
            if 0 <= offset < self._size_bytes:
                parts = offset, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
                return _tensor, (*parts, claim_of(tensor))
        return NotImplemented  # torch's own way, with the bytes in the pickle


def _without_store(writer: FileSystemWriter) -> Any:
    """Reduce a writer without the state of its last save."""
    reduced = writer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        state = dict(reduced[2], _store=None, _previous=None, index=None, state_dict_cache=None)
        return (*reduced[:2], state, *reduced[3:])
    return reduced


# -- unpacking -----------------------------------------------------------------------------------------------

_memory: ContextVar[torch.Tensor] = ContextVar("memory of the state that is being unpacked")


def unpack(data: bytes, memory: torch.Tensor | None = None) -> Any:
    """Rebuild what `pack` was given; ``memory`` are the bytes of the arena, which its tensors view.

    Raises WriterProcessError for what this process cannot import or build.
    """
    token = _memory.set(memory if memory is not None else map_memory(-1, 0))
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WriterProcessError(
            "the writer process cannot rebuild what it was given: "
            f"{type(error).__name__}: {error}. {_WAY_OUT}."
        ) from error
    finally:
        _memory.reset(token)


def map_memory(fd: int, size_bytes: int) -> torch.Tensor:
    """Map the bytes of a memory file; the mapping lasts as long as the tensor and its views."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)


def tensor_view(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """View the contiguous tensor at byte ``offset`` of ``memory``."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return memory[offset : offset + size].view(dtype).view(shape)


def _tensor(
    offset: int, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, claim: ShardClaim | None
) -> torch.Tensor:
    tensor = tensor_view(_memory.get(), offset, shape, dtype).requires_grad_(requires_grad)
    return with_claim(tensor, claim)
