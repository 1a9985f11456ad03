"""A storage and planners written by a user against torch's interfaces alone."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.futures import Future

__all__ = ["ItemReader", "ItemWriter", "PlainLoadPlanner", "PlainSavePlanner"]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _Placed:
    """The common part of the reader and the writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.calls: list[str] = []
        self.places: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Change the folder."""
        self.path = Path(checkpoint_id) if checkpoint_id else self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path."""
        return True


class ItemWriter(_Placed, StorageWriter):
    """Pickles each item into a file of its own; uses the interface before torch added keywords."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Record the call; without the ``rank`` and ``use_collectives`` of newer storages."""
        self.calls.append("set_up")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder."""
        self.calls.append("local")
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks."""
        self.calls.append("global")
        return [
            SavePlan(plan.items, storage_data={"number": number}, planner_data=plan.planner_data)
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write a pickle for each item."""
        self.calls.append("write")
        results = []
        for number, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            content = data.getvalue() if isinstance(data, io.BytesIO) else data.detach().clone()
            name = f"{plan.storage_data['number']}-{number}.pickle"
            (self.path / name).write_bytes(pickle.dumps(content))
            results.append(WriteResult(item.index, 0, name))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata with the file names."""
        self.calls.append("finish")
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        (self.path / "index.pickle").write_bytes(pickle.dumps(metadata))

    def storage_meta(self) -> StorageMeta | None:
        """Return no metadata."""
        return None


class ItemReader(_Placed, StorageReader):
    """Reads the files of `ItemWriter`."""

    def read_metadata(self) -> Metadata:
        """Read the metadata; without the ``rank`` of newer storages."""
        metadata: Metadata = pickle.loads((self.path / "index.pickle").read_bytes())
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Keep the file names."""
        self.places = metadata.storage_data or {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each item."""
        for item in plan.items:
            content = pickle.loads((self.path / self.places[item.storage_index]).read_bytes())
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(content))
                continue
            for dim, (begin, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                content = content.narrow(dim, begin, size)
            target = planner.resolve_tensor(item)
            target.copy_(content)
            planner.commit_tensor(item, target)
        return _done(None)


class PlainSavePlanner(SavePlanner):
    """Plans a flat state dict by torch's helper functions, without the default planner."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return torch's items."""
        return create_default_local_save_plan(self.state_dict, self.is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return torch's metadata, without deduplication."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor, or torch.save of a value."""
        value = find_state_dict_object(self.state_dict, write_item.index)
        if isinstance(value, torch.Tensor):
            return value
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


class PlainLoadPlanner(LoadPlanner):
    """Loads a flat state dict in the same way."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state."""
        self.state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        """Return torch's items."""
        if self.metadata is None:
            raise ValueError("no metadata")
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return torch's plans."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store the value in the state."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the item's part of the local tensor."""
        tensor: torch.Tensor = find_state_dict_object(self.state_dict, read_item.dest_index).detach()
        for dim, (begin, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, begin, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor was filled in place."""
