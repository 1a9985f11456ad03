"""The default load planner: torch's interface to a load."""

from __future__ import annotations

import io
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp.loading.call import LoadCall
from dcp.planners.layout.lookup import BoxLookup
from dcp.planners.load.options import LoadAttempt, LoadOptions, PerRankLoad, Unexpected
from dcp.planners.load.selection import Matches, Patterns, Rename, check_matches
from dcp.planners.per_rank import current_rank
from dcp.planners.rescale import Rescale
from dcp.planners.torch_plans import index_from_metadata, read_items
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import Path

__all__ = ["DefaultLoadPlanner", "PerRankLoad"]


class DefaultLoadPlanner(torch_planner.DefaultLoadPlanner):
    """Plans as torch's planner of that name does, with dtypes checked and objects loaded safely.

    The positional parameters are torch's. ``dtype="cast"`` lets stored values be converted to the dtype of
    the state dict; "exact" raises DtypeMismatchError. ``weights_only=False`` lets stored objects run code
    (pickle); give it only for checkpoints you trust. ``rank`` and ``world_size`` are of this process, for
    `PerRank` values.

    ``only`` and ``exclude`` are patterns of the entries to load (`dcp.planners.load.selection`); others are
    left as they are. ``rename`` goes from the state dict's keys to the checkpoint's. ``per_rank="keep"``
    leaves `PerRank` values without a rule as they are where another number of ranks saved, or the checkpoint
    has none of them. ``unexpected="ignore"`` lets `dcp.load` leave entries of the checkpoint that lie below a
    key of the state dict's top level, and have no place there.

    ``call`` is the load since `set_up_planner`, with what its plan has passed over.
    """

    mappings: dict[str, Path]

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        dtype: Literal["exact", "cast"] = "exact",
        weights_only: bool = True,
        only: Patterns | None = None,
        exclude: Patterns | None = None,
        rename: Rename | None = None,
        per_rank: PerRankLoad = "exact",
        unexpected: Unexpected = "error",
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        LoadOptions(
            only=only, exclude=exclude, rename=rename, per_rank=per_rank, unexpected=unexpected
        ).check()
        self.dtype = dtype
        self.weights_only = weights_only
        self.only = only
        self.exclude = exclude
        self.rename = rename
        self.per_rank: PerRankLoad = per_rank
        self.unexpected: Unexpected = unexpected
        self.rank: int | None = None
        self.world_size: int | None = None
        self._call: LoadCall | None = None
        self._attempt = LoadAttempt()
        self._lookup = BoxLookup()

    @property
    def call(self) -> LoadCall:
        """The present load. Raises PlanError before `set_up_planner`."""
        if self._call is None:
            raise PlanError("the load planner was not set up")
        return self._call

    @property
    def missing_keys(self) -> tuple[str, ...]:
        """Entries that the checkpoint lacks; after planning, with ``allow_partial_load``."""
        return self._call.missing if self._call is not None else ()

    @property
    def unexpected_keys(self) -> tuple[str, ...]:
        """Names of the checkpoint without a place in the state dict; after planning."""
        return self._call.unexpected if self._call is not None else ()

    @property
    def cast_keys(self) -> tuple[str, ...]:
        """Entries that are converted to the dtype of the state dict; after planning."""
        return self._call.cast if self._call is not None else ()

    @property
    def renamed_keys(self) -> dict[str, str]:
        """Names of the checkpoint by those of the state dict, where they differ; after planning."""
        return self._call.renamed_names if self._call is not None else {}

    def begin_load(self, rank: int, world_size: int, attempt: LoadAttempt) -> None:
        """Forget the load before; this one is of rank ``rank`` of ``world_size``, until `end_load`."""
        self.rank, self.world_size, self._attempt, self._call = rank, world_size, attempt, None
        self.original_state_dict = {}

    def end_load(self) -> frozenset[str]:
        """The load is done, be it well or not: what was found stays, what it was asked for does not.

        Returns the entries that it may have changed, and those that it had to fill.
        """
        attempt, self._attempt = self._attempt, LoadAttempt()
        if self._call is None:
            return attempt.must_fill
        self._call.tell_autograd()
        return self._call.touched

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to load into; tensors on the meta device are replaced in it by real ones."""
        self._call = call = self._opened(state_dict)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = call.flat.values, call.flat.paths
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._lookup = BoxLookup()

    def adopt(self) -> LoadCall:
        """Return the present load, of what a subclass made of the state dict in its own `set_up_planner`."""
        if self._call is None and self.original_state_dict:
            self._call = self._opened(self.original_state_dict)
        call = self.call
        if call.flat.values is not self.state_dict:
            call.flat = call.flat._replace(values=self.state_dict, paths=self.mappings)
        return call

    def _opened(self, state_dict: dict[str, Any]) -> LoadCall:
        attempt, world_size = self._attempt, self.world_size
        if world_size is None:
            world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return LoadCall(
            state_dict,
            attempt,
            attempt.options.over(self),
            current_rank() if self.rank is None else self.rank,
            world_size,
            flattens=self.flatten_state_dict,
            flattens_sharded=self.flatten_sharded_tensors,
        )

    def check_chosen(self) -> None:
        """Raise PlanError where a subclass has planned without heeding which entries to load."""
        call = self.call
        given = [name for name in ("only", "exclude", "rename") if getattr(call.options, name) is not None]
        given += ["per_rank"] if call.options.per_rank != "exact" else []
        given += ["Rescale"] if any(isinstance(own, Rescale) for own in call.flat.per_rank.values()) else []
        if given and not call.is_chosen:
            raise PlanError(
                f"{', '.join(given)} cannot be heeded: {type(self).__name__} makes its load plan without "
                "DefaultLoadPlanner.create_local_plan"
            )

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads, as torch's plan."""
        if self.metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        index, call = index_from_metadata(self.metadata), self.adopt()
        plan, wanted, _ = call.plan(index)
        self.state_dict, self.mappings = call.flat.values, call.flat.paths
        return LoadPlan(read_items(plan, wanted, index), planner_data=call.matches)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add. Raises PlanError for patterns that match nothing on any rank."""
        check_matches([plan.planner_data for plan in global_plan if isinstance(plan.planner_data, Matches)])
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the stored bytes of an object."""
        self.call.take_blob(read_item.dest_index.fqn, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A fresh buffer: objects are replaced, not filled."""
        return io.BytesIO()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The view of the wanted box that ``index`` names."""
        tensor: torch.Tensor = self._lookup.find(self.state_dict, index)
        return tensor
