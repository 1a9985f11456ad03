"""The default load planner: columns for our own engine, torch's plan objects for everybody else's."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import filterfalse
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from dcp.planners.by_value import has_plain_types, like
from dcp.planners.columns import LoadColumns, WantedColumns
from dcp.planners.flatten import flatten, replace_element
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.checkpointable import claim_of, with_claim
from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import KINDS, OBJECT, PLAIN, flatten_sharded
from dcp.planners.layout.lookup import BoxLookup
from dcp.planners.layout.materialise import has_meta_tensor, materialise
from dcp.planners.layout.tensor_parts import FACTS, check_facts
from dcp.planners.load.objects import load_object
from dcp.planners.load.optimizer_dicts import prefixes_without_state
from dcp.planners.load.options import LoadAttempt, LoadOptions, PerRankLoad
from dcp.planners.load.plan import LoadFindings, plan_load
from dcp.planners.load.rescaling import StatesOfRanks, states_to_rescale
from dcp.planners.load.selection import (
    LoadSelection,
    Matches,
    Patterns,
    Rename,
    Selection,
    check_matches,
    choose,
    renamer,
)
from dcp.planners.load.shared_targets import SharedTarget, load_apart, store_shared
from dcp.planners.load.unexpected import Unexpected, names_within, unexpected_keys
from dcp.planners.per_rank import PerRank, current_rank, rank_holder, rank_number
from dcp.planners.rescale import Rescale
from dcp.planners.wire.torch_plans import index_from_metadata, read_items
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory

__all__ = ["DefaultLoadPlanner", "PerRankLoad", "uses_columns"]

_MAX_LISTED = 10


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

    After planning, ``missing_keys`` (only with ``allow_partial_load``), ``unexpected_keys``, ``cast_keys``,
    ``renamed_keys`` (those of the checkpoint, by the state dict's) and ``kept_per_rank`` say what was passed
    over or is called otherwise; ``lost_keys`` are those of the unexpected ones that are not to be ignored;
    ``left_per_rank`` are values of which the checkpoint has those of ranks that this job has not;
    ``rescaled`` are `Rescale` values for which another number of ranks saved, and which whoever loads makes.
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
        self.missing_keys: tuple[str, ...] = ()
        self.unexpected_keys: tuple[str, ...] = ()
        self.cast_keys: tuple[str, ...] = ()
        self.renamed_keys: dict[str, str] = {}
        self.kept_per_rank: tuple[str, ...] = ()
        self.lost_keys: tuple[str, ...] = ()
        self.left_per_rank: tuple[str, ...] = ()
        self.materialised_keys: tuple[str, ...] = ()
        self.rescaled: Sequence[StatesOfRanks] = ()
        self._per_rank: Mapping[str, PerRank] = {}
        self._owners: Mapping[str, str] = {}
        self._facts: frozenset[str] = frozenset()
        self._selection: LoadSelection | None = None
        self._planned: tuple[LoadSelection, Sequence[str]] | None = None
        self._attempt = LoadAttempt()
        self._touched: frozenset[str] = frozenset()
        self._later: list[tuple[Sequence[str], Sequence[Any]]] = []
        self._made: list[tuple[Rescale, Any]] = []
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._shared: list[SharedTarget] = []
        self._lookup = BoxLookup()

    def begin_load(self, rank: int, world_size: int, attempt: LoadAttempt | None = None) -> None:
        """Forget the load before; this one is of rank ``rank`` of ``world_size``, until `end_load`."""
        self.rank, self.world_size = rank, world_size
        self._attempt = attempt if attempt is not None else LoadAttempt()
        self._selection = self._planned = None
        self.unexpected_keys, self.lost_keys, self.left_per_rank = (), (), ()
        self.materialised_keys, self.rescaled = (), ()
        self._touched = self._attempt.must_fill
        self._later, self._made, self._copies, self._shared = [], [], [], []

    def end_load(self) -> None:
        """The load is done, be it well or not: what was found stays, what it was asked for does not."""
        self._attempt = LoadAttempt()
        self._tell_autograd()

    @property
    def _load_options(self) -> LoadOptions:
        """Those that the present load was given, over the planner's own."""
        return self._attempt.options.over(self)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to load into; tensors on the meta device are replaced in it by real ones."""
        self.original_state_dict = state_dict
        with garbage_collection_paused():
            self.state_dict = self._flattened(state_dict, legacy=False)
        if self._materialise():
            self.state_dict = self._flattened(state_dict, legacy=False)
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._lookup = BoxLookup()

    def _materialise(self) -> bool:
        """Give memory to tensors that are to be loaded and have none; whether there were any."""
        options, chosen = self._load_options, self.state_dict
        selection = Selection.of(options.only, options.exclude)
        if selection is not None:
            chosen = {fqn: value for fqn, value in chosen.items() if selection.selects(fqn)}
        if not has_meta_tensor(chosen.values()):
            return False
        names = []
        for fqn, value in list(chosen.items()):
            if self._may_be_kept(fqn):  # and must not become whatever is in new memory
                continue
            real = materialise(value)
            if real is not value:
                self._check_place(fqn)
                self._put(fqn, real)
                names.append(fqn)
        self.materialised_keys = tuple(names)
        return True

    def _check_place(self, fqn: str) -> None:
        """Raise PlanError for a part of a tensor without memory, which cannot be replaced."""
        name = next((each for each in self._facts if fqn.startswith(each.removesuffix(FACTS))), None)
        if name is not None:
            raise PlanError(
                f"tensor {name.removesuffix('.' + FACTS)!r} is a subclass made of inner tensors, on the meta "
                "device: give it memory before the load",
                fqn=fqn,
            )

    def _flattened(self, state_dict: dict[str, Any], *, legacy: bool) -> dict[str, Any]:
        flat = state_dict
        if self.flatten_state_dict:
            made = flatten(state_dict, rank=self._own_rank(), legacy=legacy)
            flat, self.mappings = made.values, made.paths
            self._per_rank, self._owners, self._facts = made.per_rank, made.owners, made.facts
        return flatten_sharded(flat) if self.flatten_sharded_tensors else flat

    # -- columns ---------------------------------------------------------------------------------------------

    def create_load_columns(self, index: CheckpointIndex) -> tuple[LoadColumns, LocalMemory]:
        """(what to read, local tensors by destination number).

        The tensors are the state dict's own and may require grad; but where some share memory, others may
        take their places until `store_values`. Raises one error with everything that does
        not fit (see `dcp.planners.load.plan.plan_load`).
        """
        with garbage_collection_paused():
            columns, wanted, memory = self._plan(index)
            memory, self._shared = load_apart(columns, index, wanted, memory)
            return columns, memory

    def store_object(self, fqn: str, value: Any) -> None:
        """Put a loaded value where the state dict has the flat key ``fqn``.

        What tells of a tensor made of others is compared instead; PlanError where it differs.
        """
        if fqn in self._facts:
            check_facts(fqn, self.state_dict[fqn], value)
        elif self._attempt.stores_later:
            self._later.append(([fqn], [value]))
        else:
            self._put(fqn, value)

    def store_objects(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """`store_object` of many."""
        if self._facts:
            for fqn, value in zip(fqns, values, strict=True):
                self.store_object(fqn, value)
        elif self._attempt.stores_later:
            self._later.append((fqns, values))
        else:
            self._put_all(fqns, values)

    def store_rescaled(self, value: StatesOfRanks, made: Any) -> None:
        """Put what the rule of one of ``rescaled`` has made."""
        if self._attempt.stores_later:
            self._made.append((value.target, made))
        else:
            value.target.value = made

    def store_values(self) -> None:
        """Put what has waited for the whole load to succeed. Raises PlanError where entries that differ were
        to be put into the same memory."""
        shared, self._shared = self._shared, []
        store_shared(shared)
        rescaled, self._made = self._made, []
        for target, made in rescaled:
            target.value = made
        later, self._later = self._later, []
        for fqns, values in later:
            self._put_all(fqns, values)
        copies, self._copies = self._copies, []
        with torch.no_grad():
            for _, tensor, loaded in copies:
                tensor.copy_(loaded)

    def _put_all(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """`_put` of many: all together where the state dict is flat and its values are of the same types."""
        root, current = self.original_state_dict, self.state_dict
        # Only a dict in which nothing is opened has the keys that flattening gives.
        if self.flatten_state_dict and type(root) is dict and list(root) == list(current):
            types = list(map(type, values))
            if has_plain_types(types) and types == list(map(type, map(current.get, fqns))):
                root.update(zip(fqns, values, strict=True))
                return
        for fqn, value in zip(fqns, values, strict=True):
            self._put(fqn, value)

    def _put(self, fqn: str, value: Any) -> None:
        value = like(self.state_dict.get(fqn), value)
        if self.flatten_state_dict:
            replace_element(self.original_state_dict, self.mappings[fqn], value)
            return
        self.state_dict[fqn] = value
        if self.original_state_dict is not self.state_dict:
            self.original_state_dict[fqn] = value

    def store_blob(self, fqn: str, blob: bytes | io.BytesIO) -> None:
        """As `store_object`, from the value's torch.save bytes."""
        self.store_object(
            fqn, load_object(fqn, blob, weights_only=self._load_options.weights_only is not False)
        )

    # -- what is loaded from where ---------------------------------------------------------------------------

    def choose(self, index: CheckpointIndex) -> Matches | None:
        """Decide what is loaded from where; how the patterns fared (see `check_matches`), if there are any.

        Planning does it, too. Done before, ranks can agree on the patterns before anything is read.
        """
        return self._choose(index).matches

    def _choose(self, index: CheckpointIndex) -> LoadSelection:
        options = self._load_options
        selection, renamed = Selection.of(options.only, options.exclude), renamer(options.rename)
        self._use_legacy_keys(index, selection, renamed)
        self.rescaled = states_to_rescale(
            self._per_rank,
            self._owners,
            index,
            selection=selection,
            renamed=renamed,
            rank=self._own_rank(),
            world_size=self._own_world_size(),
        )
        names, keeps = {value.name for value in self.rescaled}, options.per_rank == "keep"
        self._selection = chosen = choose(
            self.state_dict,
            index,
            selection=selection,
            renamed=renamed,
            keep={fqn: name for fqn, name in self._owners.items() if keeps and name not in names},
            world_size=self._own_world_size(),
            unasked=self._attempt.unasked,
            left={fqn for fqn, name in self._owners.items() if name in names},
        )
        return chosen

    @property
    def untouched_keys(self) -> frozenset[str]:
        """Keys of the top level of which nothing was loaded, though they have entries."""
        if self._selection is None or self._selection.values is self.state_dict:
            return frozenset()
        tops = self.mappings if self.flatten_state_dict else {}
        made = {value.name for value in self.rescaled if value.target.rule != "keep"}
        own = [fqn for fqn, name in self._owners.items() if name in made]
        touched, every = (
            {str(tops[fqn][0]) if fqn in tops else fqn for fqn in fqns}
            for fqns in ([*self._selection.values, *own], self.state_dict)
        )
        return frozenset(every - touched)

    @property
    def touched_keys(self) -> frozenset[str]:
        """Entries that the load, be it done or failed, may have changed, and those that it had to fill."""
        if self._planned is None:
            return self._touched
        chosen, waiting = self._planned
        return self._touched | (chosen.values.keys() - {*self.missing_keys, *waiting})

    def _tell_autograd(self) -> None:
        """Let a backward whose forward was before the load notice it: DTensors are filled below torch, and
        what changes their local tensors does not change the versions of their own."""
        kinds = {KINDS[cls] for cls in set(map(type, self.state_dict.values()))} if self._planned else set()
        if kinds <= {PLAIN, OBJECT}:
            return  # the reader has told of plain tensors
        values = (self.state_dict.get(fqn) for fqn in self.touched_keys)
        increment_version([value for value in values if isinstance(value, torch.Tensor)])

    def check_chosen(self) -> None:
        """Raise PlanError where a subclass has planned without heeding which entries to load."""
        options = self._load_options
        given = [name for name in ("only", "exclude", "rename") if getattr(options, name) is not None]
        given += ["per_rank"] if options.per_rank != "exact" else []
        given += ["Rescale"] if any(isinstance(own, Rescale) for own in self._per_rank.values()) else []
        if given and self._selection is None:
            raise PlanError(
                f"{', '.join(given)} cannot be heeded: {type(self).__name__} makes its load plan without "
                "DefaultLoadPlanner.create_local_plan"
            )

    def _may_be_kept(self, fqn: str) -> bool:
        """Whether an entry is of a `PerRank` value that a load may leave as it is."""
        own = self._per_rank.get(self._owners.get(fqn, ""))
        return own is not None and (
            own.rule == "keep" if isinstance(own, Rescale) else self._load_options.per_rank == "keep"
        )

    def _own_rank(self) -> int:
        return self.rank if self.rank is not None else current_rank()

    def _own_world_size(self) -> int:
        return self.world_size if self.world_size is not None else _current_world_size()

    def _plan(self, index: CheckpointIndex) -> tuple[LoadColumns, WantedColumns, LocalMemory]:
        options, chosen = self._load_options, self._choose(index)
        local = collect_tensors(self._destinations(chosen), purpose="load")
        held, object_fqns = local.columns.held(), local.columns.objects.fqns
        wanted = WantedColumns(
            **held,
            object_fqns=object_fqns,
            stored_fqns=chosen.stored_names(local.columns.fqns),
            stored_object_fqns=chosen.stored_names(object_fqns),
        )
        columns = plan_load(
            index,
            wanted,
            allow_missing=bool(options.allow_partial_load),
            cast=options.dtype == "cast",
            is_per_rank=self._owners.__contains__,
        )
        self._note(chosen, columns.extra)
        waiting = [*object_fqns, *(fqn for fqn, *_ in self._copies)] if self._attempt.stores_later else []
        self._planned = chosen, waiting
        return columns, wanted, local.memory

    def _destinations(self, chosen: LoadSelection) -> Mapping[str, Any]:
        """The chosen entries; in place of `PerRank` tensors new memory, if they may stay unfilled.

        The checkpoint that is loaded after this one turned out to be damaged may leave them as they are, or
        be of another number of ranks.
        """
        keeps = self._load_options.per_rank == "keep"
        self._copies = []
        own = [
            fqn for fqn, name in self._owners.items() if keeps or isinstance(self._per_rank[name], Rescale)
        ]
        if not self._attempt.stores_later or not own:
            return chosen.values
        values = dict(chosen.values)
        for fqn in own:
            value = values.get(fqn)
            if isinstance(value, torch.Tensor):
                # what lies outside of the boxes of a CheckpointableTensor is kept as well
                values[fqn] = with_claim(value.detach().clone(), claim_of(value))
                self._copies.append((fqn, value, values[fqn]))
        return values

    def _note(self, chosen: LoadSelection, findings: LoadFindings) -> None:
        """What there is to tell about the plan. Raises PlanError unless it fills what it must."""
        self.missing_keys, self.cast_keys = findings.missing, findings.cast
        self.unexpected_keys = self._of_no_other_rank(chosen.unexpected(findings.unexpected), chosen)
        self.kept_per_rank = chosen.kept
        self.lost_keys = ()
        options = self._load_options
        if options.unexpected == "error" and self.flatten_state_dict and self.unexpected_keys:
            self.lost_keys = names_within(
                self.unexpected_keys, self.original_state_dict, self.mappings, renamer(options.rename)
            )
            self._check_own_optimizers()
        missing, names = set(findings.missing), chosen.names or {}
        self.renamed_keys = {
            fqn: names[fqn]
            for fqn in (chosen.values if names else ())
            if names[fqn] != fqn and fqn not in missing
        }
        stale = sorted(
            name for name in self._attempt.must_fill if name in missing or name not in chosen.values
        )
        if stale:
            raise PlanError(
                f"a load that failed may have filled {listed(stale, most=_MAX_LISTED)} from "
                "another checkpoint, and this one has nothing to put there, so the state would be of two "
                "checkpoints; build it anew and load this one alone",
                fqns=stale[:_MAX_LISTED],
            )

    def _check_own_optimizers(self) -> None:
        """Raise UnexpectedKeyError for state of parameters that an optimizer's dict of this rank has, and no
        state of any: that another rank takes it is no help here."""
        if self._load_options.rename is not None or (self.world_size or 1) == 1:
            return  # what is lost on all ranks is told with all the rest
        below = prefixes_without_state(self.original_state_dict)
        lost = [name for name in self.lost_keys if below and name.startswith(below)]
        if lost and self.metadata is not None:
            raise unexpected_keys(list(self.metadata.state_dict_metadata), lost)

    def _of_no_other_rank(self, unexpected: tuple[str, ...], chosen: LoadSelection) -> tuple[str, ...]:
        """Without what other ranks have of the `PerRank` values here, be they loaded or kept."""
        found = {name: holder for name in unexpected if (holder := rank_holder(name)) is not None}
        if not found:
            return unexpected
        stored = chosen.names or {}
        rescaled = {value.stored for value in self.rescaled}
        holders = {rank_holder(stored.get(fqn, fqn)) for fqn in self._owners} | rescaled
        of_ranks = {name: holder for name, holder in found.items() if holder in holders}
        here = self._own_world_size()
        absent = {holder for name, holder in of_ranks.items() if rank_number(name) >= here}
        self.left_per_rank = tuple(sorted(absent - rescaled))
        return tuple(name for name in unexpected if name not in of_ranks)

    def _use_legacy_keys(
        self,
        index: CheckpointIndex,
        selection: Selection | None,
        renamed: Callable[[str], str] | None,
    ) -> None:
        """Take the keys of torch before 2.4 where the checkpoint has those instead of today's."""

        def chosen(flat: Mapping[str, Any]) -> tuple[Collection[str], Collection[str]]:
            fqns = flat.keys() if selection is None else [fqn for fqn in flat if selection.selects(fqn)]
            return fqns, fqns if renamed is None else [renamed(fqn) for fqn in fqns]

        tensors, objects = index.position, index.objects.position
        others = filterfalse(tensors.__contains__, chosen(self.state_dict)[1])
        if not self.flatten_state_dict or all(map(objects.__contains__, others)):
            return
        current, mappings = self.state_dict, self.mappings
        own = self._per_rank, self._owners, self._facts
        legacy = self._flattened(self.original_state_dict, legacy=True)
        if any(
            fqn not in current and (name in tensors or name in objects)
            for fqn, name in zip(*chosen(legacy), strict=True)
        ):
            self.state_dict = legacy
        else:
            self.mappings = mappings
            self._per_rank, self._owners, self._facts = own

    # -- torch's interface -----------------------------------------------------------------------------------

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads, as torch's plan."""
        if self.metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        index = index_from_metadata(self.metadata)
        columns, wanted, _ = self._plan(index)
        chosen = self._selection
        matches = chosen.matches if chosen is not None else None
        return LoadPlan(read_items(columns, wanted, index), planner_data=matches)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add. Raises PlanError for patterns that match nothing on any rank."""
        check_matches([plan.planner_data for plan in global_plan if isinstance(plan.planner_data, Matches)])
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the stored bytes of an object."""
        self.store_blob(read_item.dest_index.fqn, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A fresh buffer: objects are replaced, not filled."""
        return io.BytesIO()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The view of the wanted box that ``index`` names."""
        tensor: torch.Tensor = self._lookup.find(self.state_dict, index)
        return tensor


_COLUMNAR_STEPS = (
    "create_load_columns",
    "store_object",
    "store_objects",
    "store_blob",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_bytes",
    "resolve_tensor",
    "commit_tensor",
    "lookup_tensor",
    "transform_tensor",
)


def _current_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def uses_columns(planner: LoadPlanner) -> bool:
    """Whether `dcp.load` may plan with columns: ours, with none of the steps overridden that these leave
    out."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), step) is getattr(DefaultLoadPlanner, step) and step not in vars(planner)
        for step in _COLUMNAR_STEPS
    )
