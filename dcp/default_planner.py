"""The names of ``torch.distributed.checkpoint.default_planner``, with our planners.

The functions on torch's plan objects are torch's own, for custom planners that call them.
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
            raise PlanError("the load planner was not set up")
        return self._call

    def begin_load(
        self, opens: Callable[..., LoadCall], options: LoadOptions, rank: int, world_size: int
    ) -> None:
        """Forget the load before; the next one, by ``options``, is what ``opens`` makes, until that is None
        again."""
        self.opens, self._given, self.rank, self.world_size = opens, options, rank, world_size
        self._call, self.original_state_dict = None, {}

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
        self._lookup = None

    def adopt(self) -> LoadCall:
        """Return the present load, of what a subclass made of the state dict in its own `set_up_planner`."""
        if self._call is None and self.original_state_dict:
            self._call = self._opened(self.original_state_dict)
        call = self._call or self.call
        if call.flat.values is not self.state_dict:
            call.flat = replace(call.flat, values=self.state_dict, paths=self.mappings)
        return call

    def _opened(self, state_dict: dict[str, Any]) -> LoadCall:
        options, opens = LoadOptions().over(self), self.opens
        if opens is not None:
            options = self._given.over(self)  # a subclass may set its own until now
        else:  # a load of torch's own
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
        """Raise PlanError where a subclass has planned without heeding which entries to load."""
        call = self.call
        given = [name for name in ("only", "exclude", "rename") if getattr(call.options, name) is not None]
        given += ["per_rank"] if call.options.per_rank != "exact" else []
        given += ["Rescale"] if any(isinstance(own, Rescale) for own in call.flat.per_rank.values()) else []
        if given and not hasattr(call, "index"):
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
        """Add nothing. Raises PlanError for patterns that match nothing on any rank."""
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
        """Return the view of the wanted box that ``index`` names."""
        if self._lookup is None:
            self._lookup = BoxLookup()
        tensor: torch.Tensor = self._lookup.find(self.state_dict, index)
        return tensor


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Fills an empty dict with what the checkpoint has: all, or what is at or below one of ``keys``.

    A key names an entry by its flat key, or a dict or list that entries were nested in. Keys of dicts are of
    the types that were saved, where dcp saved the checkpoint. Tensors are whole and on the CPU, on every
    rank that loads. Other than torch's planner it runs no pickle (``weights_only``), and raises
    MissingKeyError for a key that the checkpoint does not have.
    """

    def __init__(self, keys: Collection[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"unexpected": "ignore"} | kwargs)  # the dict has what was asked for
        self.keys = keys
        self._filled: dict[str, Any] | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Build what is to be loaded in ``state_dict``, which has to be empty."""
        if state_dict is self._filled:
            state_dict.clear()  # what an attempt that failed has left
        if state_dict:
            raise PlanError(f"{type(self).__name__} fills an empty dict, and this one has entries")
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
                f"the checkpoint has nothing under {', '.join(map(repr, absent))}", fqns=absent
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)
