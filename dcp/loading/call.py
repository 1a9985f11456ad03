"""One load on one rank: which entries of a state dict are filled, from where, and what becomes of values."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dcp.loading.feature import Features, View
from dcp.planners.by_value import has_plain_types, like
from dcp.planners.columns import HeldBoxes
from dcp.planners.flatten import Flat, flatten, replace_element
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import KINDS, OBJECT, PLAIN, flatten_sharded
from dcp.planners.load.objects import load_object
from dcp.planners.load.options import LoadOptions
from dcp.planners.load.plan import LoadPlan, plan_load
from dcp.planners.load.selection import Matches, Selection, renamer
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.torch.python_values import decode_values
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["LoadAttempt", "LoadCall"]

_MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAttempt:
    """One attempt of a load: what an engine asks of the planner for it.

    ``unasked``: keys of the top level whose entries the caller left out, because nothing of them can be
    selected. ``must_fill``: entries that the load has to fill, because one that failed may have filled them.
    ``defers_values``: values wait for `LoadCall.store`, so that a load which fails changes none of them.
    """

    options: LoadOptions = field(default_factory=LoadOptions)
    unasked: tuple[str, ...] = ()
    must_fill: frozenset[str] = frozenset()
    defers_values: bool = False


class LoadCall:
    """The entries of a state dict that one rank loads, what the checkpoint calls them, and where they go.

    ``flat`` is the state dict ``root`` by flat key. After `choose` ``values`` are the entries that are
    loaded, ``names`` what the checkpoint calls all of them where anything is renamed, and ``matches`` what
    patterns match, if there are any. After `plan` ``missing`` (only with ``allow_partial_load``),
    ``unexpected``, ``cast`` and ``renamed_names`` (those of the checkpoint, by the state dict's) say what was
    passed over or is called otherwise. ``scales`` are names of the checkpoint that its reader makes other
    tensors of.
    """

    scales: Collection[str] = ()
    index: CheckpointIndex
    """What is loaded from, since `choose`."""
    view: View | None = None
    """The same with how it is read, where dcp's own steps read it."""

    def __init__(
        self,
        root: dict[str, Any],
        attempt: LoadAttempt,
        options: LoadOptions,
        rank: int,
        world_size: int,
        features: Features,
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
        self._waiting: set[str] | None = None
        self._later: list[tuple[Sequence[str], Sequence[Any]]] = []
        self.features = features
        features.open(self)
        features.each("state")

    def flattened(self, *, legacy: bool = False) -> Flat:
        """Return ``root`` by flat key; with the keys of torch before 2.4 if ``legacy``."""
        flat = Flat(self.root)
        if self.flattens:
            with garbage_collection_paused():
                flat = flatten(self.root, rank=self.rank, legacy=legacy)
        if self._flattens_sharded:
            flat.values = flatten_sharded(flat.values)
        return flat

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
        """Decide what is loaded from where, and what patterns match.

        Planning does it, too. Done before, ranks can agree on the patterns before anything is read.
        """
        self.index = index
        self.features.each("names", index)
        flat, selection = self.flat.values, self.selection
        self.names = None if self.renamed is None else {fqn: self.renamed(fqn) for fqn in flat}
        self.values = self.selected(flat)
        if selection is not None:
            stored = [*index.fqns, *index.objects.fqns]
            self.matches = selection.match(flat, self.attempt.unasked, stored)
        self.features.each("entries", index)
        self.is_chosen = True

    def leave(self, fqns: set[str]) -> None:
        """Take some entries out of those that are loaded."""
        if fqns:
            self.values = {fqn: value for fqn, value in self.values.items() if fqn not in fqns}

    def plan(self, index: CheckpointIndex) -> tuple[LoadPlan, HeldBoxes, LocalMemory]:
        """Return (what to read, the boxes that are filled, local tensors by destination number).

        The tensors are the state dict's own and may require grad; but where some share memory, others may
        take their places until `store`. Raises one error with everything that does not fit (see
        `dcp.planners.load.plan.plan_load`), and PlanError unless the plan fills what it must.
        """
        with garbage_collection_paused():
            self.choose(index)
            values = self.values
            if self.attempt.defers_values:
                values = self.features.through("destinations", Mapping, values)
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
            self._note(plan)
            self._waiting = set()
            if self.attempt.defers_values:
                self._waiting.update(object_fqns, *[feature.later for feature in self.features.part])
                for _, ask in self.features.having("boxes"):
                    memory = ask(LocalMemory, plan.pieces, index, held, memory)
            return plan, held, memory

    def _note(self, plan: LoadPlan) -> None:
        self.missing, self.cast = plan.missing, plan.cast
        self.unexpected = self.features.through("unexpected", tuple, self._not_left(plan.unexpected))
        missing, names = set(plan.missing), self.names
        if names is not None:
            self.renamed_names = {
                fqn: names[fqn] for fqn in self.values if names[fqn] != fqn and fqn not in missing
            }
        must_fill = self.attempt.must_fill
        stale = sorted((must_fill & missing) | (must_fill - self.values.keys()))
        if stale:
            raise PlanError(
                f"a load that failed may have filled {listed(stale, most=_MAX_LISTED)} from "
                "another checkpoint, and this one has nothing to put there, so the state would be of two "
                "checkpoints; build it anew and load this one alone",
                fqns=stale[:_MAX_LISTED],
            )

    def _not_left(self, stored: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the ``stored`` names that are not loaded, and that no pattern leaves out."""
        if self.values is self.flat.values:
            return stored
        names, selection = self.names, self.selection
        left = (fqn for fqn in self.flat.values if fqn not in self.values)
        others = set(left) if names is None else {names[fqn] for fqn in left}
        selects = selection.selects if selection is not None else lambda _: True
        return tuple(name for name in stored if name not in others and selects(name))

    # -- values ----------------------------------------------------------------------------------------------

    def read_values(self, reader: FileSystemReader, engine: ReadEngine, plan: LoadPlan) -> None:
        """Read and take the planned values that are no tensors."""
        objects, fqns = engine.index.objects, plan.object_fqns
        plain = objects.plain[plan.objects]
        is_plain = plain >= 0
        if is_plain.all():
            self.take(fqns, decode_values(list(map(objects.values.__getitem__, plain.tolist()))))
            return
        values = list(map(objects.values.__getitem__, plain[is_plain].tolist()))
        self.take(list(compress(fqns, is_plain.tolist())), decode_values(values))
        pickled = [objects.fqns[row] for row in plan.objects[~is_plain].tolist()]
        names = compress(fqns, (~is_plain).tolist())
        for fqn, blob in zip(names, reader.read_objects(engine, pickled), strict=True):
            self.take_blob(fqn, blob)

    def take(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """Take loaded values, which wait for `store` unless the load says otherwise."""
        for _, accepts in self.features.having("accept"):
            left = [not accepts(bool, fqn, value) for fqn, value in zip(fqns, values, strict=True)]
            fqns, values = list(compress(fqns, left)), list(compress(values, left))
        if self.attempt.defers_values:
            self._later.append((fqns, values))
        else:
            self._put_all(fqns, values)

    def take_blob(self, fqn: str, blob: bytes | io.BytesIO) -> None:
        """As `take`, from a value's torch.save bytes."""
        self.take([fqn], [load_object(fqn, blob, weights_only=self.options.weights_only is not False)])

    def store(self) -> None:
        """Put what has waited for the whole load to succeed. Raises PlanError where entries that differ were
        to be put into the same memory."""
        self.features.each("put")
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
        made = (fqn for feature in self.features.part for fqn in feature.made)
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
        found: list[str] = []
        for feature in self.features.part:
            found += feature.new
        return found

    def tell_autograd(self) -> None:
        """Let a backward whose forward was before the load notice it: DTensors are filled below torch, and
        what changes their local tensors does not change the versions of their own."""
        values = self.flat.values if self._waiting is not None else {}
        kinds = set(map(KINDS.__getitem__, set(map(type, values.values()))))
        if kinds <= {PLAIN, OBJECT}:
            return  # the reader did so for plain tensors
        touched = map(values.get, self.touched)
        increment_version([value for value in touched if isinstance(value, torch.Tensor)])
