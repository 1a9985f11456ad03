"""Default save planner: columns for dcphub's saves, torch's plan objects for other storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch.distributed as dist
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp.planners.by_value import by_value
from dcp.planners.flatten import flatten
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.local import collect_tensors, item_ties
from dcp.planners.layout.local_tensor import BoxLookup, flatten_sharded
from dcp.planners.per_rank import current_rank
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import SPLIT_BYTES, plan_save
from dcp.planners.torch_plans import (
    NotedPlan,
    columns_from_plan,
    metadata_from_plans,
    plan_from_writes,
    write_items,
)
from dcp.planners.value_digests import ReplicaCheck
from dcp.storage.errors import OptionError
from dcp.storage.formats.container_notes import ContainerNote
from dcp.storage.formats.index import Path


class DefaultSavePlanner(torch_planner.DefaultSavePlanner):
    """Save planner with torch's interface that compares and balances replicas and supports strided shards.

    The positional parameters are torch's. Attribute ``rank`` is the rank in the save, by default that of the
    default process group.

    Args:
        flatten_state_dict: Flatten nested containers.
        flatten_sharded_tensors: Flatten nested ShardedTensors.
        dedup_replicated_tensors: Ignored; for compatibility.
        dedup_save_to_lowest_rank: Let the lowest holder write replicated boxes.
        enable_plan_caching: Reuse plans; `dcp.save` keeps the plan in the object that saves. torch's global
            caches are not used.
        replica_check: Compare replicas between ranks by all bytes ("full"), up to 64 KiB each ("sampled"),
            or not ("off").
        split_bytes: Size above which several ranks write a replicated box; None for never.
    """

    mappings: dict[str, Path]
    plan: SavePlan

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        replica_check: ReplicaCheck = "full",
        split_bytes: int | None = SPLIT_BYTES,
    ) -> None:
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors, dedup_save_to_lowest_rank
        )
        if replica_check not in get_args(ReplicaCheck):
            choices = ", ".join(map(repr, get_args(ReplicaCheck)))
            raise OptionError(f"replica_check must be one of {choices}, not {replica_check!r}")
        self.enable_plan_caching = enable_plan_caching
        self.replica_check = replica_check
        self.split_bytes = split_bytes
        self.rank: int | None = None
        self.foreign_keys: dict[str, str] = {}
        self.structure: Mapping[str, Any] = {}
        self._notes: Sequence[ContainerNote] = ()
        self._lookup = BoxLookup()
        self._box_sizes: dict[MetadataIndex, tuple[int, ...]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state dict of this rank."""
        flat, self._notes, self.foreign_keys = state_dict, (), {}
        self.structure = {}
        if self.flatten_state_dict:
            rank = self.rank if self.rank is not None else current_rank()
            with garbage_collection_paused():
                made = flatten(state_dict, rank=rank)
            flat, self.mappings, self._notes = made.values, made.paths, made.notes
            self.foreign_keys = made.foreign_keys
        if self.flatten_sharded_tensors:
            flat = flatten_sharded(flat)
        self.state_dict = flat
        self.is_coordinator = is_coordinator
        self._lookup = BoxLookup()
        self._box_sizes = {}

    # -- columns ---------------------------------------------------------------------------------------------

    def create_local_columns(self, *, digests: bool = True) -> RankState:
        """Return the columns, local tensors by source number, and values by object row.

        Tensors belong to the state dict and may require grad. ``digests=False`` leaves digests of replicas
        to the caller.

        Raises:
            PlanError: For tensors that cannot be stored, all in one error.
        """
        with garbage_collection_paused():
            local = collect_tensors(self.state_dict)
        columns = replace(
            local.columns,
            item_ties=item_ties(local.columns, local.memory),
            planner_data=self.mappings if self.flatten_state_dict else None,
            notes=self._notes,
        )
        local = replace(local, columns=columns, foreign_keys=self.foreign_keys)
        return local.with_digests(self.replica_check) if digests and self.replica_check != "off" else local

    # -- torch's interface -----------------------------------------------------------------------------------

    def create_local_plan(self) -> SavePlan:
        """Return the boxes and objects of this rank as torch's plan."""
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        local = self.create_local_columns(digests=together)
        items = write_items(local.columns, local.memory.tensors, list(self.state_dict))
        paths = self.mappings if self.flatten_state_dict else None
        self.plan = NotedPlan(items, planner_data=paths, notes=self._notes)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the writes of each rank and torch's metadata, from plans that may have been modified.

        ``planner_data`` of the metadata is joined from plans with paths, else None.
        """
        converted = [columns_from_plan(plan) for plan in all_plans]
        planned = plan_save(
            [columns for columns, _, _ in converted],
            dedup_to_lowest_rank=self.dedup_save_to_lowest_rank,
            split_bytes=self.split_bytes,
            check_replicas=self.replica_check != "off",
        )
        self.global_plan = [
            plan_from_writes(plan, writes, planned.index, tensor_items, object_items)
            for plan, writes, (_, tensor_items, object_items) in zip(
                all_plans, planned.writes, converted, strict=True
            )
        ]
        self.metadata = metadata_from_plans(planned.index, all_plans)
        self.structure = planned.index.provenance
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Set the writes of this rank."""
        self.plan = new_plan
        self._box_sizes = {
            item.index: tuple(item.tensor_data.chunk.sizes) for item in new_plan.items if item.tensor_data
        }
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor (a view of local memory) or BytesIO of an item."""
        if write_item.tensor_data is not None:
            # for planners whose finish_plan did not pass the plan on
            self._box_sizes.setdefault(write_item.index, tuple(write_item.tensor_data.chunk.sizes))
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the tensor, or the bytes of an object; for values equal to plain data, those of the plain
        data.
        """
        is_value = write_item.type is WriteItemType.BYTE_IO
        return super().transform_object(write_item, by_value(object) if is_value else object)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value or box view named by ``index``; PlanError if absent."""
        return self._lookup.find(self.state_dict, index, self._box_sizes.get(index))
