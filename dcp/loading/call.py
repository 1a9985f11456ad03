"""One load on one rank: which entries of a state dict are filled, from where, and what becomes of values."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dcp.features.order import open_load
from dcp.features.strictness import lost_entries
from dcp.planners.by_value import has_plain_types, like
from dcp.planners.columns import HeldBoxes
from dcp.planners.flatten import Flat, flatten, replace_element
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import KINDS, OBJECT, PLAIN, flatten_sharded
from dcp.planners.load.objects import load_object
from dcp.planners.load.options import LoadAttempt, LoadOptions
from dcp.planners.load.plan import LoadPlan, plan_load
from dcp.planners.load.selection import Matches, Selection, renamer
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory

__all__ = ["LoadCall"]

_MAX_LISTED = 10


class LoadCall:
    """The entries of a state dict that one rank loads, what the checkpoint calls them, and where they go.

    ``flat`` is the state dict ``root`` by flat key. After `choose` ``values`` are the entries that are
    loaded, ``names`` what the checkpoint calls all of them where anything is renamed, and ``matches`` how
    patterns fare, if there are any. After `plan` ``missing`` (only with ``allow_partial_load``),
    ``unexpected``, ``cast`` and ``renamed_names`` (those of the checkpoint, by the state dict's) say what was
    passed over or is called otherwise; ``lost`` are those of the unexpected ones that are not to be ignored.
    """

    def __init__(
        self,
        root: dict[str, Any],
        attempt: LoadAttempt,
        options: LoadOptions,
        rank: int,
        world_size: int,
        *,
        flattens: bool = True,
        flattens_sharded: bool = True,
    ) -> None:
        self.root = root
        self.attempt = attempt
        self.options = options
        self.rank, self.world_size = rank, world_size
        self.flattens = flattens
        self.selection = Selection.of(options.only, options.exclude)
        self.renamed = renamer(options.rename)
        self.names: dict[str, str] | None = None
        self.matches: Matches | None = None
        self._flattens_sharded = flattens_sharded
        self.flat = self.flattened()
        self.values: Mapping[str, Any] = self.flat.values
        self.is_chosen = False
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.cast: tuple[str, ...] = ()
        self.renamed_names: dict[str, str] = {}
        self.lost: tuple[str, ...] = ()
        self._waiting: set[str] | None = None
        self._later: list[tuple[Sequence[str], Sequence[Any]]] = []
        self.sessions = open_load(self)
        for session in self.sessions:
            session.state()

    def flattened(self, *, legacy: bool = False) -> Flat:
        """``root`` by flat key; with the keys of torch before 2.4 if ``legacy``."""
        flat = Flat(self.root, {}, (), {}, {}, {}, frozenset())
        if self.flattens:
            with garbage_collection_paused():
                flat = flatten(self.root, rank=self.rank, legacy=legacy)
        return flat._replace(values=flatten_sharded(flat.values)) if self._flattens_sharded else flat

    def selected(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return those of ``values`` that the patterns select."""
        selection = self.selection
        if selection is None:
            return values
        return {fqn: value for fqn, value in values.items() if selection.selects(fqn)}

    def stored(self, fqn: str) -> str:
        """Return what the checkpoint calls an entry."""
        return fqn if self.renamed is None else self.renamed(fqn)

    # -- plan ------------------------------------------------------------------------------------------------

    def choose(self, index: CheckpointIndex) -> None:
        """Decide what is loaded from where, and how patterns fare.

        Planning does it, too. Done before, ranks can agree on the patterns before anything is read.
        """
        for session in self.sessions:
            session.names(index)
        flat, selection = self.flat.values, self.selection
        self.names = None if self.renamed is None else {fqn: self.renamed(fqn) for fqn in flat}
        self.values = self.selected(flat)
        if selection is not None:
            stored = [*index.fqns, *index.objects.fqns]
            self.matches = selection.match(flat, self.attempt.unasked, stored)
        for session in self.sessions:
            session.entries(index)
        self.is_chosen = True

    def leave(self, fqns: set[str]) -> None:
        """Take some entries out of those that are loaded."""
        if fqns:
            self.values = {fqn: value for fqn, value in self.values.items() if fqn not in fqns}

    def plan(self, index: CheckpointIndex) -> tuple[LoadPlan, HeldBoxes, LocalMemory]:
        """(what to read, the boxes that are filled, local tensors by destination number).

        The tensors are the state dict's own and may require grad; but where some share memory, others may
        take their places until `store`. Raises one error with everything that does not fit (see
        `dcp.planners.load.plan.plan_load`), and PlanError unless the plan fills what it must.
        """
        with garbage_collection_paused():
            self.choose(index)
            values = self.values
            for session in self.sessions:
                values = session.destinations(values)
            local = collect_tensors(values, purpose="load")
            held, memory, object_fqns = local.columns, local.memory, local.columns.objects.fqns
            plan = plan_load(
                index,
                held,
                object_fqns,
                names=self.names,
                allow_missing=bool(self.options.allow_partial_load),
                cast=self.options.dtype == "cast",
                is_per_rank=self.flat.owners.__contains__,
            )
            self._note(plan, index)
            self._waiting = set()
            if self.attempt.stores_later:
                self._waiting.update(object_fqns, *(session.later for session in self.sessions))
            for session in self.sessions:
                memory = session.boxes(plan.pieces, index, held, memory)
            return plan, held, memory

    def _note(self, plan: LoadPlan, index: CheckpointIndex) -> None:
        self.missing, self.cast = plan.missing, plan.cast
        unexpected = self._not_left(plan.unexpected)
        for session in self.sessions:
            unexpected = session.unexpected(unexpected)
        self.unexpected = unexpected
        self.lost = lost_entries(self, unexpected, index) if unexpected else ()
        missing, names = set(plan.missing), self.names or {}
        self.renamed_names = {
            fqn: names[fqn]
            for fqn in (self.values if names else ())
            if names[fqn] != fqn and fqn not in missing
        }
        must_fill = self.attempt.must_fill
        stale = sorted(name for name in must_fill if name in missing or name not in self.values)
        if stale:
            raise PlanError(
                f"a load that failed may have filled {listed(stale, most=_MAX_LISTED)} from "
                "another checkpoint, and this one has nothing to put there, so the state would be of two "
                "checkpoints; build it anew and load this one alone",
                fqns=stale[:_MAX_LISTED],
            )

    def _not_left(self, stored: tuple[str, ...]) -> tuple[str, ...]:
        """Of the ``stored`` names that are not loaded those that nobody left out on purpose."""
        if self.values is self.flat.values:
            return stored
        names, selection = self.names, self.selection
        left = (fqn for fqn in self.flat.values if fqn not in self.values)
        others = set(left) if names is None else {names[fqn] for fqn in left}
        selects = selection.selects if selection is not None else lambda _: True
        return tuple(name for name in stored if name not in others and selects(name))

    # -- values ----------------------------------------------------------------------------------------------

    def take(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """Take loaded values, which wait for `store` unless the load says otherwise."""
        if self.flat.facts:
            pairs = [
                (fqn, value)
                for fqn, value in zip(fqns, values, strict=True)
                if not any(session.accept(fqn, value) for session in self.sessions)
            ]
            fqns, values = [fqn for fqn, _ in pairs], [value for _, value in pairs]
        if self.attempt.stores_later:
            self._later.append((fqns, values))
        else:
            self._put_all(fqns, values)

    def take_blob(self, fqn: str, blob: bytes | io.BytesIO) -> None:
        """As `take`, from a value's torch.save bytes."""
        self.take([fqn], [load_object(fqn, blob, weights_only=self.options.weights_only is not False)])

    def store(self) -> None:
        """Put what has waited for the whole load to succeed. Raises PlanError where entries that differ were
        to be put into the same memory."""
        for session in self.sessions:
            session.put()
        later, self._later = self._later, []
        for fqns, values in later:
            self._put_all(fqns, values)

    def put(self, fqn: str, value: Any) -> None:
        """Put a value where the state dict has ``fqn``."""
        value = like(self.flat.values.get(fqn), value)
        if self.flattens:
            replace_element(self.root, self.flat.paths[fqn], value)
            return
        self.flat.values[fqn] = value
        self.root[fqn] = value

    def _put_all(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """`put` of many: all together where the state dict is flat and its values are of the same types."""
        root, current = self.root, self.flat.values
        # Only a dict in which nothing is opened has the keys that flattening gives.
        if self.flattens and type(root) is dict and list(root) == list(current):
            types = list(map(type, values))
            if has_plain_types(types) and types == list(map(type, map(current.get, fqns))):
                root.update(zip(fqns, values, strict=True))
                return
        for fqn, value in zip(fqns, values, strict=True):
            self.put(fqn, value)

    # -- what has changed ------------------------------------------------------------------------------------

    @property
    def untouched_keys(self) -> frozenset[str]:
        """Keys of the top level of which nothing was loaded, though they have entries."""
        if self.values is self.flat.values:
            return frozenset()
        tops = self.flat.paths
        made = (fqn for session in self.sessions for fqn in session.made)
        touched, every = (
            {str(tops[fqn][0]) if fqn in tops else fqn for fqn in fqns}
            for fqns in ([*self.values, *made], self.flat.values)
        )
        return frozenset(every - touched)

    @property
    def touched(self) -> frozenset[str]:
        """Entries that the load, be it done or failed, may have changed, and those that it had to fill."""
        if self._waiting is None:
            return self.attempt.must_fill
        return self.attempt.must_fill | (self.values.keys() - {*self.missing, *self._waiting})

    @property
    def new(self) -> list[str]:
        """Entries that had no memory before."""
        return [fqn for session in self.sessions for fqn in session.new]

    def tell_autograd(self) -> None:
        """Let a backward whose forward was before the load notice it: DTensors are filled below torch, and
        what changes their local tensors does not change the versions of their own."""
        values = self.flat.values if self._waiting is not None else {}
        if {KINDS[cls] for cls in set(map(type, values.values()))} <= {PLAIN, OBJECT}:
            return  # the reader has told of plain tensors
        touched = map(values.get, self.touched)
        increment_version([value for value in touched if isinstance(value, torch.Tensor)])
