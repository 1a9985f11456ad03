"""Megatron-Core: distributed checkpoints through dcp.

Call this function before the first save or load::

    dcp.integrations.megatron.use()

Or pass the strategies to `megatron.core.dist_checkpointing`::

    dist_checkpointing.save(state, folder, DcpSaveStrategy())
    dist_checkpointing.load(state, folder, DcpLoadStrategy())

Folders and contents keep Megatron's names; either side reads the other's checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp.background.writers import SaveFuture
from dcp.errors import CorruptCheckpointError, OptionError
from dcp.integrations.trainer_state import committed_beside, package_of, refused_by_all
from dcp.planners.load.selection import LoadKeywords
from dcp.state_dict_loader import load
from dcp.state_dict_saver import AsyncCheckpointerType, async_save, save
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.torch_storage.reader import FileSystemReader

with package_of("megatron", "Megatron-Core 0.19 and Python 3.12 or newer"):
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
        get_async_strategy,
    )
    from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COMMON: Final = "common_state/shard_0_1"
"""Object with all values of Megatron except `ShardedTensor` and `ShardedObject`. Megatron reads it without
checksums before calling a strategy.
"""

Mode = Literal["thread", "process"]
_Folder = str | os.PathLike[str]


def use(*, mode: Mode = "thread", process_group: ProcessGroup | None = None, **options: Any) -> None:
    """Route all distributed checkpoints of Megatron (``--ckpt-format torch_dist``) in this process through
    dcp.

    Affects `megatron.training`, programs based on it, and `dist_checkpointing.save` and `load`.

    Args:
        mode: As for `DcpSaveStrategy`.
        process_group: Ranks that save and load together.
        **options: As for `DcpLoadStrategy`.

    Raises:
        OptionError: For an invalid ``mode``.
    """
    saves = DcpSaveStrategy(mode=mode, process_group=process_group)
    loads = DcpLoadStrategy(process_group=process_group, **options)
    TorchDistSaveShardedStrategy.save = lambda self, *given, **named: saves.save(*given, **named)
    TorchDistSaveShardedStrategy.async_save = lambda self, *given, **named: saves.async_save(*given, **named)
    TorchDistLoadShardedStrategy.load = lambda self, *given, **named: loads.load(*given, **named)


class DcpSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy: sharded and common values in one commit.

    Stores Megatron's main replicas; wrap in `FullyParallelSaveStrategyWrapper` to distribute them over
    ranks.

    Args:
        mode: Asynchronous saves write in a "thread", or in a "process" that commits even if training is
            killed.
        process_group: Ranks that save together; by default the default group.

    Raises:
        OptionError: For an invalid ``mode``.
    """

    def __init__(self, *, mode: Mode = "thread", process_group: ProcessGroup | None = None) -> None:
        if mode not in get_args(Mode):
            raise OptionError(f"mode must be 'thread' or 'process', not {mode!r}")
        super().__init__()
        self._kind = AsyncCheckpointerType(mode)
        self._process_group = process_group

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Folder) -> None:
        """Save and commit, on all ranks. Raises the errors of `dcp.save`."""
        self._save(save, sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Folder, async_strategy: str = "nvrx"
    ) -> Any:
        """Copy the state and write in the background; return a request for Megatron's queue that ends with
        the save and raises its error.
        """
        save = partial(async_save, async_checkpointer_type=self._kind)
        future = self._save(save, sharded_state_dict, checkpoint_dir)
        return _request(future, get_async_strategy(async_strategy, "AsyncRequest")[1])

    def _save(self, save: Callable[..., Any], sharded_state_dict: dict[str, Any], folder: _Folder) -> Any:
        begin = partial(save, checkpoint_id=folder, process_group=self._process_group)
        with refused_by_all(begin):
            state = _main_replicas(sharded_state_dict)
        return begin(state)


class DcpLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Load strategy: checkpoints of dcp or Megatron, of any number of ranks, with all bytes verified,
    including common values.

    Args:
        process_group: Ranks that load together; by default the default group.
        dtype: "exact" refuses tensors of another dtype, "cast" converts.
        weights_only: False allows objects of any class, whose pickles may run code. By default, classes in
            `torch.serialization.add_safe_globals` are allowed.
    """

    def __init__(
        self,
        *,
        process_group: ProcessGroup | None = None,
        dtype: Literal["exact", "cast"] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        super().__init__(stream_ckpt_dequant=False)
        self._process_group = process_group
        self._options: LoadKeywords = {"dtype": dtype, "weights_only": weights_only}

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Folder, async_strategy: str = "mcore"
    ) -> Any:
        """Fill the tensors in place, or in new memory; return the state dict with tensors and objects.

        Raises:
            MissingKeyError: The checkpoint lacks an entry.
            ShapeMismatchError: A global shape differs without ``allow_shape_mismatch``.
            DtypeMismatchError: A dtype differs without ``dtype="cast"``.
            CorruptCheckpointError: Bytes are damaged.
            UnsafeObjectError: An object needs ``weights_only=False``.
            CheckpointError: Other errors of `dcp.load`.
        """
        force_all_tensors_to_non_fp8(sharded_state_dict)
        wanted = list(nested_values(sharded_state_dict))
        reader = FileSystemReader(checkpoint_dir)
        try:
            index = reader.read_index()
            if _COMMON in index.objects.position:  # which ranks have in common: compared with its checksum
                with reader.engine(index) as engine:
                    list(reader.read_objects(engine, [_COMMON]))
            target = _objects(wanted) | _destinations(wanted, index)
            load(target, storage_reader=reader, process_group=self._process_group, **self._options)
        except CorruptCheckpointError as error:
            beside = committed_beside(Path(checkpoint_dir))
            others = ", ".join(sorted(Path(one).name for one in beside)) or "none"
            error.add_note(
                f"Megatron loads another iteration with --ckpt-step; committed beside this one: {others}"
            )
            raise

        def loaded(entry: Any) -> Any:
            return target[entry.unique_key][0] if isinstance(entry, ShardedObject) else entry.data.detach()

        return dict_list_map_outplace(loaded, sharded_state_dict)


_OwnBox = tuple[torch.Size, ChunkStorageMetadata, torch.Tensor]
"""Box of a global tensor on this rank: global shape, offsets and elements."""


@dataclass(frozen=True)
class _Parts:
    """Boxes of a global tensor on this rank, with torch's checkpoint protocol."""

    parts: list[_OwnBox] = field(default_factory=list)

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(data), shape),
            )
            for number, (shape, chunk, data) in enumerate(self.parts)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for _, chunk, _ in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.index or 0][-1]


def _main_replicas(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state stored by this rank, by Megatron's names."""
    force_all_tensors_to_non_fp8(sharded_state_dict)
    stored = [entry for entry in nested_values(sharded_state_dict) if is_main_replica(entry.replica_id)]
    parts = ((tensor.key, _part(tensor)) for tensor in stored if isinstance(tensor, ShardedTensor))
    return _objects(stored) | _by_name(parts)


def _objects(entries: Iterable[Any]) -> dict[str, Any]:
    """Return objects in tuples, stored as one value each."""
    return {entry.unique_key: (entry.data,) for entry in entries if isinstance(entry, ShardedObject)}


def _by_name(parts: Iterable[tuple[str, _OwnBox]]) -> dict[str, Any]:
    named: dict[str, Any] = defaultdict(_Parts)
    for name, part in parts:
        named[name].parts.append(part)
    return dict(named)


def _part(tensor: Any, stored_shape: tuple[int, ...] | None = None) -> _OwnBox:
    """Return the part of a `ShardedTensor` within ``stored_shape``."""
    data = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
    offsets, shape = tuple(tensor.global_offset), tuple(stored_shape or tensor.global_shape)
    ends = zip(data.shape, shape, offsets, strict=True)
    data = data[tuple(slice(max(0, min(size, extent - offset))) for size, extent, offset in ends)]
    return torch.Size(shape), ChunkStorageMetadata(torch.Size(offsets), data.shape), data


def _destinations(entries: Iterable[Any], index: CheckpointIndex) -> dict[str, Any]:
    """Return the tensors to fill, zeroed where the stored shape may be smaller."""
    tensors = [entry for entry in entries if isinstance(entry, ShardedTensor)]
    for tensor in tensors:
        tensor.init_data("cpu")
    parts = []
    for tensor in tensors:
        stored_shape = None
        if tensor.allow_shape_mismatch and tensor.key in index.position:
            tensor.data.detach().zero_()
            stored_shape = index.shape(index.position[tensor.key])
        part = _part(tensor, stored_shape)
        if part[-1].numel() or not tensor.data.numel():
            parts.append((tensor.key, part))
    return _by_name(parts)


def _request(future: SaveFuture, request_class: Any) -> Any:
    """Return a Megatron request that waits for a pending save in the process that runs the request."""
    name = f"dcp-save-{uuid.uuid4().hex}"
    held = os.memfd_create(name)  # in no folder, where a killed training would leave it
    future.add_done_callback(lambda _: os.close(held))

    def raise_failure() -> None:
        future.result()

    return request_class(_wait, (f"/proc/{os.getpid()}/fd/{held}", name), [raise_failure])


def _wait(place: str, name: str) -> None:
    """Wait until the saving process has closed the file ``name`` at ``place``, or ended."""
    with contextlib.suppress(OSError):
        while name in os.readlink(place):  # noqa: PTH115 - what it names is no path
            time.sleep(0.05)
