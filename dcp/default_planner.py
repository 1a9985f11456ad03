"""Names of ``torch.distributed.checkpoint.default_planner``, with dcp's planners.

The functions on plan objects are torch's, for custom planners.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp.calls.torch_names import names_of
from dcp.features.registry import features_of
from dcp.loading.call import LoadCall
from dcp.loading.feature import LoadFeature, load_features
from dcp.planners.flatten import set_element
from dcp.planners.layout.local_tensor import BoxLookup
from dcp.planners.load.selection import (
    LoadDtype,
    LoadOptions,
    Matches,
    Patterns,
    PerRankLoad,
    Rename,
    Unexpected,
    check_matches,
)
from dcp.planners.per_rank import current_rank
from dcp.planners.rescale import Rescale
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.torch_plans import read_items
from dcp.storage.errors import MissingKeyError, PlanError
from dcp.storage.formats.container_notes import empty_dicts, notes_by_path, with_original_keys
from dcp.storage.formats.index import Path
from dcp.storage.torch_storage.metadata import index_from_metadata, known_provenance

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

if not TYPE_CHECKING:
    __getattr__ = names_of("default_planner")


class DefaultLoadPlanner(torch_planner.DefaultLoadPlanner):
    """Plan a load, with checked dtypes and safe decoding of objects.

    Args:
        flatten_state_dict: As in torch, like the other positional parameters.
        dtype: "exact" raises DtypeMismatchError for another stored dtype; "cast" converts.
        weights_only: False unpickles any object, which can run code. Use False for trusted files only.
        only: Patterns of the entries to load (`dcp.planners.load.selection`).
        exclude: Patterns of the entries to leave unchanged.
        rename: Regular expressions from keys of the state dict to keys of the checkpoint.
        per_rank: "keep" leaves `PerRank` values without a rule unchanged if the number of ranks differs, or
            if the checkpoint has none.
        unexpected: "ignore" skips entries of the checkpoint under a key of the state dict that have no place
            in the state dict.

    Attributes:
        rank: Rank of this process, for `PerRank` values.
        world_size: Number of ranks, for `PerRank` values.
        call: The current load, set by `set_up_planner`.
    """

    mappings: dict[str, Path]

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        dtype: LoadDtype = "exact",
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
        self.dtype, self.weights_only = dtype, weights_only
        self.only, self.exclude, self.rename = only, exclude, rename
        self.per_rank, self.unexpected = per_rank, unexpected
        self.rank: int | None = None
        self.world_size: int | None = None
        self.opens: Callable[..., LoadCall] | None = None
        self._given = LoadOptions()
        self._call: LoadCall | None = None
        self._lookup: BoxLookup | None = None

    @property
    def call(self) -> LoadCall:
        """The present load. Raises PlanError before `set_up_planner`."""
        if self._call is None:
            raise PlanError("call set_up_planner() of the load planner first")
        return self._call

    def begin_load(
        self, opens: Callable[..., LoadCall], options: LoadOptions, rank: int, world_size: int
    ) -> None:
        """Reset the planner for a load with ``options``, made by ``opens``."""
        self.opens, self._given, self.rank, self.world_size = opens, options, rank, world_size
        self._call, self.original_state_dict = None, {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state dict to load into, and materialize its tensors on the meta device."""
        self._call = call = self._opened(state_dict)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = call.flat.values, call.flat.paths
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._lookup = None

    def adopt(self) -> LoadCall:
        """Return the load for a state dict that a subclass set in its `set_up_planner`."""
        if self._call is None and self.original_state_dict:
            self._call = self._opened(self.original_state_dict)
        call = self._call or self.call
        if call.flat.values is not self.state_dict:
            call.flat = replace(call.flat, values=self.state_dict, paths=self.mappings)
        return call

    def _opened(self, state_dict: dict[str, Any]) -> LoadCall:
        options, opens = LoadOptions().over(self), self.opens
        if opens is not None:
            options = self._given.over(self)  # a subclass may have set attributes
        else:  # for a load run by torch
            world_size = self.world_size
            if world_size is None:
                world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            rank = current_rank() if self.rank is None else self.rank
            features = load_features(features_of(LoadFeature), options)
            opens = partial(LoadCall, features=features, rank=rank, world_size=world_size)
        return opens(
            state_dict,
            options,
            flattens=self.flatten_state_dict,
            flattens_sharded=self.flatten_sharded_tensors,
        )

    def check_chosen(self) -> None:
        """Raise PlanError if a subclass ignored the options that select entries."""
        call = self.call
        given = [name for name in ("only", "exclude", "rename") if getattr(call.options, name) is not None]
        given += ["per_rank"] if call.options.per_rank != "exact" else []
        given += ["Rescale"] if any(isinstance(own, Rescale) for own in call.flat.per_rank.values()) else []
        if given and not hasattr(call, "index"):
            raise PlanError(
                f"{', '.join(given)} would be ignored: {type(self).__name__} makes its load plan without "
                "calling DefaultLoadPlanner.create_local_plan"
            )

    def create_local_plan(self) -> LoadPlan:
        """Return the read plan of this rank as torch's plan object."""
        if self.metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        index, call = index_from_metadata(self.metadata), self.adopt()
        plan, wanted, _ = call.plan(index)
        self.state_dict, self.mappings = call.flat.values, call.flat.paths
        return LoadPlan(read_items(plan, wanted, index), planner_data=call.matches)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. Raises PlanError for patterns without a match on any rank."""
        check_matches([plan.planner_data for plan in global_plan if isinstance(plan.planner_data, Matches)])
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the stored bytes of an object."""
        self.call.take_blob(read_item.dest_index.fqn, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return a fresh buffer: objects are replaced, not filled."""
        return io.BytesIO()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return a view of the box named by ``index``."""
        if self._lookup is None:
            self._lookup = BoxLookup()
        tensor: torch.Tensor = self._lookup.find(self.state_dict, index)
        return tensor


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Fill an empty dict with a checkpoint, or with the entries at or below ``keys``.

    A key is a flat key, or the key of a nested dict or list. Keys keep their types if dcp saved the
    checkpoint. Tensors are complete and on the CPU, on every rank. Unlike torch's planner, this planner runs
    no pickle by default, and raises MissingKeyError for a missing key.
    """

    def __init__(self, keys: Collection[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"unexpected": "ignore"} | kwargs)  # entries outside of `keys` are expected
        self.keys = keys
        self._filled: dict[str, Any] | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Build the state to load in ``state_dict``, which must be empty."""
        if state_dict is self._filled:
            state_dict.clear()  # entries of a failed attempt
        if state_dict:
            raise PlanError(f"{type(self).__name__} needs an empty state dict, but this dict has entries")
        if metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        self._filled = state_dict
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        notes = notes_by_path(known_provenance(metadata).get("structure"))
        entries = metadata.state_dict_metadata
        in_order = dict.fromkeys((*(fqn for fqn in paths if fqn in entries), *entries))
        places: list[tuple[Any, Path, Any]] = [
            (fqn, paths.get(fqn, (fqn,)), entries[fqn]) for fqn in in_order
        ]
        places += [(None, path, {}) for path in empty_dicts(notes, paths.values())]
        nested: dict[str, Any] = {}
        found: set[str] = set()
        for fqn, path, entry in places:
            names = {*accumulate(map(str, path), "{}.{}".format)} | ({fqn} if fqn is not None else set())
            if self.keys is None or not names.isdisjoint(self.keys):
                found |= names
                if isinstance(entry, TensorStorageMetadata):
                    entry = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
                set_element(nested, path, entry)
        state_dict.update(with_original_keys(nested, notes))
        absent = sorted(set(self.keys or ()) - found)
        if absent:
            raise MissingKeyError(
                f"the checkpoint has no entries below {', '.join(map(repr, absent))}", fqns=absent
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)
