"""Megatron-Core's distributed checkpoints through dcp::

    dcp.integrations.megatron.use()

before anything is saved or loaded. A program that calls `megatron.core.dist_checkpointing` itself can give it
the strategies instead::

    dist_checkpointing.save(state, folder, DcpSaveStrategy())
    dist_checkpointing.load(state, folder, DcpLoadStrategy())

Folders and what is in them keep Megatron's names, so that each reads what the other saved.
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
"""The object in which Megatron stores all values but `ShardedTensor` and `ShardedObject`. It reads this one
by itself, without comparing checksums, before it asks a strategy."""

Mode = Literal["thread", "process"]
_Folder = str | os.PathLike[str]


def use(*, mode: Mode = "thread", process_group: ProcessGroup | None = None, **options: Any) -> None:
    """Make all of Megatron's distributed checkpoints (``--ckpt-format torch_dist``) go through dcp, in this
    process: those of `megatron.training`, of programs above it, and of `dist_checkpointing.save` and `load`.

    ``mode`` is that of `DcpSaveStrategy`, the options are those of `DcpLoadStrategy`; both take
    ``process_group``. Raises OptionError for another ``mode``.
    """
    saves = DcpSaveStrategy(mode=mode, process_group=process_group)
    loads = DcpLoadStrategy(process_group=process_group, **options)
    TorchDistSaveShardedStrategy.save = lambda self, *given, **named: saves.save(*given, **named)
    TorchDistSaveShardedStrategy.async_save = lambda self, *given, **named: saves.async_save(*given, **named)
    TorchDistLoadShardedStrategy.load = lambda self, *given, **named: loads.load(*given, **named)


class DcpSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves the sharded part of a state dict, and with it the values that all ranks have in common, in one
    commit.

    Of replicas the one that Megatron calls the main one is stored; `FullyParallelSaveStrategyWrapper` around
    this strategy spreads them over the ranks.

    Args:
        mode: Where asynchronous saves are written, once the state is copied: in a "thread", or in a "process"
            of its own, which commits its copy even if training is killed.
        process_group: The ranks that save together; the default group without it.

    Raises:
        OptionError: ``mode`` is none of these.
    """

    def __init__(self, *, mode: Mode = "thread", process_group: ProcessGroup | None = None) -> None:
        if mode not in get_args(Mode):
            raise OptionError(f"mode must be 'thread' or 'process', not {mode!r}")
        super().__init__()
        self._kind = AsyncCheckpointerType(mode)
        self._process_group = process_group

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Folder) -> None:
        """Save, and commit. All ranks call it; raises the errors of `dcp.save`."""
        self._save(save, sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Folder, async_strategy: str = "nvrx"
    ) -> Any:
        """Copy the state, and write it in the background. Gives a request for Megatron's queue, which is done
        when the save is, and then raises its error."""
        save = partial(async_save, async_checkpointer_type=self._kind)
        future = self._save(save, sharded_state_dict, checkpoint_dir)
        return _request(future, get_async_strategy(async_strategy, "AsyncRequest")[1])

    def _save(self, save: Callable[..., Any], sharded_state_dict: dict[str, Any], folder: _Folder) -> Any:
        begin = partial(save, checkpoint_id=folder, process_group=self._process_group)
        with refused_by_all(begin):
            state = _main_replicas(sharded_state_dict)
        return begin(state)


class DcpLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads checkpoints of any number of ranks, dcp's or Megatron's own, and compares all that is read with
    its checksums; the state that ranks have in common is compared as well.

    Args:
        process_group: The ranks that load together, and call it alike; the default group without it.
        dtype: "exact" refuses tensors that were saved in another dtype, "cast" converts them.
        weights_only: False allows objects of any class, whose pickles may run code. Without it those that
            `torch.serialization.add_safe_globals` names are, as Megatron does for its own.
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
        """Fill the tensors in place, or in new memory where there are none yet; return the state dict with
        tensors and objects themselves in it.

        Raises:
            MissingKeyError: The checkpoint lacks an entry.
            ShapeMismatchError: A tensor has another global shape there, and no ``allow_shape_mismatch``.
            DtypeMismatchError: A tensor has another dtype there, without ``dtype="cast"``.
            CorruptCheckpointError: Bytes are not those that were committed.
            UnsafeObjectError: An object needs ``weights_only=False``.
            CheckpointError: Others of `dcp.load`.
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
"""A box of a global tensor, held by this rank: shape of the whole, place, and elements."""


@dataclass(frozen=True)
class _Parts:
    """This rank's boxes of one global tensor, by torch's protocol for such."""

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
    """Give the state that this rank stores, by Megatron's names."""
    force_all_tensors_to_non_fp8(sharded_state_dict)
    stored = [entry for entry in nested_values(sharded_state_dict) if is_main_replica(entry.replica_id)]
    parts = ((tensor.key, _part(tensor)) for tensor in stored if isinstance(tensor, ShardedTensor))
    return _objects(stored) | _by_name(parts)


def _objects(entries: Iterable[Any]) -> dict[str, Any]:
    """Give objects in tuples, which are stored as one value; Megatron takes either tuples or lists."""
    return {entry.unique_key: (entry.data,) for entry in entries if isinstance(entry, ShardedObject)}


def _by_name(parts: Iterable[tuple[str, _OwnBox]]) -> dict[str, Any]:
    named: dict[str, Any] = defaultdict(_Parts)
    for name, part in parts:
        named[name].parts.append(part)
    return dict(named)


def _part(tensor: Any, stored_shape: tuple[int, ...] | None = None) -> _OwnBox:
    """Give the part of a `ShardedTensor` that is within ``stored_shape``."""
    data = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
    offsets, shape = tuple(tensor.global_offset), tuple(stored_shape or tensor.global_shape)
    ends = zip(data.shape, shape, offsets, strict=True)
    data = data[tuple(slice(max(0, min(size, extent - offset))) for size, extent, offset in ends)]
    return torch.Size(shape), ChunkStorageMetadata(torch.Size(offsets), data.shape), data


def _destinations(entries: Iterable[Any], index: CheckpointIndex) -> dict[str, Any]:
    """Give the tensors to fill; those that may be stored in another shape are zero elsewhere."""
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
    """Make a request of Megatron's that waits for a save under way, in the process that it is run in."""
    name = f"dcp-save-{uuid.uuid4().hex}"
    held = os.memfd_create(name)  # in no folder, where a killed training would leave it
    future.add_done_callback(lambda _: os.close(held))

    def raise_failure() -> None:
        future.result()

    return request_class(_wait, (f"/proc/{os.getpid()}/fd/{held}", name), [raise_failure])


def _wait(place: str, name: str) -> None:
    """Wait until the process of the save has closed the file ``name``, which is its ``place``, or ended."""
    with contextlib.suppress(OSError):
        while name in os.readlink(place):  # noqa: PTH115 - what it names is no path
            time.sleep(0.05)
