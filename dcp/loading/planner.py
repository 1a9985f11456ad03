"""The default load planner: columns for our own engine, torch's plan objects for others."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp.features.base import LoadCall, LoadSession
from dcp.features.meta import MetaTensors
from dcp.features.order import open_load
from dcp.features.per_rank import PerRankValues
from dcp.features.strictness import lost_entries
from dcp.planners.columns import HeldBoxes
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import KINDS, OBJECT, PLAIN
from dcp.planners.layout.lookup import BoxLookup
from dcp.planners.load.objects import load_object
from dcp.planners.load.options import LoadAttempt, LoadOptions, PerRankLoad, Unexpected
from dcp.planners.load.plan import LoadPlan, plan_load
from dcp.planners.load.selection import Matches, Patterns, Rename, check_matches
from dcp.planners.per_rank import current_rank
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

    After planning, ``missing_keys`` (only with ``allow_partial_load``), ``unexpected_keys``, ``cast_keys``
    and ``renamed_keys`` (those of the checkpoint, by the state dict's) say what was passed over or is called
    otherwise; ``lost_keys`` are those of the unexpected ones that are not to be ignored.
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
        self.lost_keys: tuple[str, ...] = ()
        self.call: LoadCall | None = None
        self.sessions: list[LoadSession] = []
        self._attempt = LoadAttempt()
        self._is_chosen = False
        self._waiting: set[str] | None = None
        self._later: list[tuple[Sequence[str], Sequence[Any]]] = []
        self._lookup = BoxLookup()

    def begin_load(self, rank: int, world_size: int, attempt: LoadAttempt | None = None) -> None:
        """Forget the load before; this one is of rank ``rank`` of ``world_size``, until `end_load`."""
        self.rank, self.world_size = rank, world_size
        self._attempt = attempt if attempt is not None else LoadAttempt()
        self.call, self.sessions = None, []
        self.unexpected_keys, self.lost_keys = (), ()
        self._is_chosen, self._waiting, self._later = False, None, []

    def end_load(self) -> None:
        """The load is done, be it well or not: what was found stays, what it was asked for does not."""
        self._attempt = LoadAttempt(must_fill=self._attempt.must_fill)
        self._tell_autograd()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to load into; tensors on the meta device are replaced in it by real ones."""
        attempt = self._attempt
        with garbage_collection_paused():
            self.call = call = LoadCall(
                state_dict,
                attempt,
                attempt.options.over(self),
                current_rank() if self.rank is None else self.rank,
                _current_world_size() if self.world_size is None else self.world_size,
                flattens=self.flatten_state_dict,
                flattens_sharded=self.flatten_sharded_tensors,
            )
        self.sessions = open_load(call)
        for session in self.sessions:
            session.state()
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._take_flat(call)
        self._lookup = BoxLookup()

    def _take_flat(self, call: LoadCall) -> None:
        self.state_dict, self.mappings = call.flat.values, call.flat.paths

    @property
    def per_rank_values(self) -> PerRankValues | None:
        """The session of `PerRank` values, if there are any."""
        return next((each for each in self.sessions if isinstance(each, PerRankValues)), None)

    # -- columns ---------------------------------------------------------------------------------------------

    def create_load_columns(self, index: CheckpointIndex) -> tuple[LoadPlan, LocalMemory]:
        """(what to read, local tensors by destination number).

        The tensors are the state dict's own and may require grad; but where some share memory, others may
        take their places until `store_values`. Raises one error with everything that does
        not fit (see `dcp.planners.load.plan.plan_load`).
        """
        with garbage_collection_paused():
            plan, wanted, memory = self._plan(index)
            for session in self.sessions:
                memory = session.boxes(plan.pieces, index, wanted, memory)
            return plan, memory

    def store_object(self, fqn: str, value: Any) -> None:
        """Put a loaded value where the state dict has the flat key ``fqn``, unless a feature takes it."""
        self.store_objects([fqn], [value])

    def store_objects(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """`store_object` of many."""
        call = self._call
        if call.flat.facts:
            pairs = [
                (fqn, value)
                for fqn, value in zip(fqns, values, strict=True)
                if not any(session.accept(fqn, value) for session in self.sessions)
            ]
            fqns, values = [fqn for fqn, _ in pairs], [value for _, value in pairs]
        if self._attempt.stores_later:
            self._later.append((fqns, values))
        else:
            call.put_all(fqns, values)

    def store_values(self) -> None:
        """Put what has waited for the whole load to succeed. Raises PlanError where entries that differ were
        to be put into the same memory."""
        for session in self.sessions:
            session.put()
        later, self._later = self._later, []
        for fqns, values in later:
            self._call.put_all(fqns, values)

    def store_blob(self, fqn: str, blob: bytes | io.BytesIO) -> None:
        """As `store_object`, from the value's torch.save bytes."""
        self.store_object(
            fqn, load_object(fqn, blob, weights_only=self._call.options.weights_only is not False)
        )

    # -- what is loaded from where ---------------------------------------------------------------------------

    @property
    def _call(self) -> LoadCall:
        if self.call is None:
            raise PlanError("the load planner was not set up")
        return self.call

    def choose(self, index: CheckpointIndex) -> Matches | None:
        """Decide what is loaded from where; how the patterns fared (see `check_matches`), if there are any.

        Planning does it, too. Done before, ranks can agree on the patterns before anything is read.
        """
        call = self._call
        for session in self.sessions:
            session.names(index)
        call.choose(lambda: [*index.fqns, *index.objects.fqns])
        for session in self.sessions:
            session.entries(index)
        self._take_flat(call)
        self._is_chosen = True
        return call.matches

    @property
    def untouched_keys(self) -> frozenset[str]:
        """Keys of the top level of which nothing was loaded, though they have entries."""
        call = self.call
        if call is None or call.values is call.flat.values:
            return frozenset()
        tops, own = call.flat.paths, self.per_rank_values
        made = own.made_entries() if own is not None else []
        touched, every = (
            {str(tops[fqn][0]) if fqn in tops else fqn for fqn in fqns}
            for fqns in ([*call.values, *made], call.flat.values)
        )
        return frozenset(every - touched)

    @property
    def materialised_keys(self) -> tuple[str, ...]:
        """Entries that had no memory before."""
        return next((each.keys for each in self.sessions if isinstance(each, MetaTensors)), ())

    @property
    def touched_keys(self) -> frozenset[str]:
        """Entries that the load, be it done or failed, may have changed, and those that it had to fill."""
        touched = self._attempt.must_fill
        if self._waiting is None:
            return touched
        return touched | (self._call.values.keys() - {*self.missing_keys, *self._waiting})

    def _tell_autograd(self) -> None:
        """Let a backward whose forward was before the load notice it: DTensors are filled below torch, and
        what changes their local tensors does not change the versions of their own."""
        values = self._call.flat.values if self._waiting is not None else {}
        if {KINDS[cls] for cls in set(map(type, values.values()))} <= {PLAIN, OBJECT}:
            return  # the reader has told of plain tensors
        touched = map(values.get, self.touched_keys)
        increment_version([value for value in touched if isinstance(value, torch.Tensor)])

    def check_chosen(self) -> None:
        """Raise PlanError where a subclass has planned without heeding which entries to load."""
        call = self._call
        given = [name for name in ("only", "exclude", "rename") if getattr(call.options, name) is not None]
        given += ["per_rank"] if call.options.per_rank != "exact" else []
        given += ["Rescale"] if any(isinstance(own, Rescale) for own in call.flat.per_rank.values()) else []
        if given and not self._is_chosen:
            raise PlanError(
                f"{', '.join(given)} cannot be heeded: {type(self).__name__} makes its load plan without "
                "DefaultLoadPlanner.create_local_plan"
            )

    def _plan(self, index: CheckpointIndex) -> tuple[LoadPlan, HeldBoxes, LocalMemory]:
        self.choose(index)
        call, values = self._call, self._call.values
        for session in self.sessions:
            values = session.destinations(values)
        local = collect_tensors(values, purpose="load")
        object_fqns = local.columns.objects.fqns
        plan = plan_load(
            index,
            local.columns,
            object_fqns,
            names=call.names,
            allow_missing=bool(call.options.allow_partial_load),
            cast=call.options.dtype == "cast",
            is_per_rank=call.flat.owners.__contains__,
        )
        self._note(call, plan)
        own = self.per_rank_values
        waiting = [*object_fqns, *(own.waiting() if own is not None else ())]
        self._waiting = set(waiting) if self._attempt.stores_later else set()
        return plan, local.columns, local.memory

    def _note(self, call: LoadCall, findings: LoadPlan) -> None:
        """Keep what the plan has found. Raises PlanError unless it fills what it must."""
        self.missing_keys, self.cast_keys = findings.missing, findings.cast
        unexpected = call.unexpected(findings.unexpected)
        for session in self.sessions:
            unexpected = session.unexpected(unexpected)
        self.unexpected_keys = unexpected
        self.lost_keys = lost_entries(call, unexpected, self.metadata) if unexpected else ()
        missing, names = set(findings.missing), call.names or {}
        self.renamed_keys = {
            fqn: names[fqn]
            for fqn in (call.values if names else ())
            if names[fqn] != fqn and fqn not in missing
        }
        must_fill = self._attempt.must_fill
        stale = sorted(name for name in must_fill if name in missing or name not in call.values)
        if stale:
            raise PlanError(
                f"a load that failed may have filled {listed(stale, most=_MAX_LISTED)} from "
                "another checkpoint, and this one has nothing to put there, so the state would be of two "
                "checkpoints; build it anew and load this one alone",
                fqns=stale[:_MAX_LISTED],
            )

    # -- torch's interface -----------------------------------------------------------------------------------

    def create_local_plan(self) -> torch_plans.LoadPlan:
        """What this rank reads, as torch's plan."""
        if self.metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        index = index_from_metadata(self.metadata)
        plan, wanted, _ = self._plan(index)
        return torch_plans.LoadPlan(read_items(plan, wanted, index), planner_data=self._call.matches)

    def create_global_plan(self, global_plan: list[torch_plans.LoadPlan]) -> list[torch_plans.LoadPlan]:
        """Nothing to add. Raises PlanError for patterns that match nothing on any rank."""
        check_matches([plan.planner_data for plan in global_plan if isinstance(plan.planner_data, Matches)])
        plans: list[torch_plans.LoadPlan] = super().create_global_plan(global_plan)
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
