"""What is known of a state dict from the save before, so that an unchanged one need not be looked at in full.

A tensor's columns follow from facts that can be compared cheaply for all tensors together (`TensorFacts`),
and for DTensors from mesh and placements. That a tensor is the same object proves nothing and is not used: it
can be given other memory or another shape in place. Where any fact differs, or could not be compared, the
state is looked at in full again. No tensor is kept alive.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from dcp.planners.cache.state_tree import StateTree
from dcp.planners.columns import SaveColumns
from dcp.planners.flatten import Flat, flatten
from dcp.planners.layout.local import LocalTensors
from dcp.planners.layout.local_tensor import has_plain_memory, has_sharded_tensor, is_tensor_class
from dcp.planners.layout.shared_storage import item_ties
from dcp.planners.layout.tensor_facts import TensorFacts
from dcp.storage.formats.container_notes import Note
from dcp.storage.formats.index import Int64, Path

__all__ = ["KnownState", "LocalPart", "Sources"]

_TensorGuards: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)
"""Not public: where torch lacks it, every state is looked at in full."""

_local, _spec = attrgetter("_local_tensor"), attrgetter("_spec")
_mesh = attrgetter("mesh")
_SPEC_FACTS = tuple(map(attrgetter, ("placements", "shard_order", "use_strided_shard_as_shard_order")))


class Sources(list[torch.Tensor]):
    """Local tensors by source number.

    ``memory`` is one object for as long as addresses, devices, dtypes, sizes and strides are the same from
    save to save; None: not known. It belongs to the list, so that copies of the tensors do not inherit it.
    """

    memory: object | None = None


class LocalPart(NamedTuple):
    """A rank's columns, the local tensors by source number, the values by object row.

    ``replicated`` (by item) says which boxes other ranks may hold too.
    """

    columns: SaveColumns
    sources: Sources
    objects: list[Any]
    replicated: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, local: LocalTensors, columns: SaveColumns) -> LocalPart:
        """The part of a state that was looked at in full."""
        return cls(columns, Sources(local.sources), list(local.objects.values()), local.item_replicated)


class _Layouts:
    """Where DTensors lie: mesh and placements by tensor. Mostly many tensors have one spec."""

    def __init__(self, specs: list[Any]) -> None:
        distinct = {id(spec): spec for spec in specs}
        numbers = {number: position for position, number in enumerate(distinct)}
        self._ids = list(map(id, specs))
        self._numbers = [numbers[number] for number in self._ids]
        self._specs = list(map(weakref.ref, distinct.values()))
        meshes = list(map(_mesh, distinct.values()))
        self._meshes = list(map(weakref.ref, {id(mesh): mesh for mesh in meshes}.values()))
        self._facts = [list(map(id, meshes)), *(list(map(fact, distinct.values())) for fact in _SPEC_FACTS)]

    def are_of(self, specs: list[Any]) -> bool:
        """Whether specs have these meshes and placements; an id is a spec's or mesh's while that lives."""
        if not all(mesh() is not None for mesh in self._meshes):
            return False
        facts = self._facts
        if list(map(id, specs)) == self._ids and all(spec() is not None for spec in self._specs):
            specs = [spec() for spec in self._specs]  # each once; its fields may have been changed
        else:
            facts = [[values[number] for number in self._numbers] for values in facts]
        if list(map(id, map(_mesh, specs))) != facts[0]:
            return False
        return all(
            list(map(fact, specs)) == values for fact, values in zip(_SPEC_FACTS, facts[1:], strict=True)
        )


@dataclass(frozen=True, eq=False)
class _Facts:
    """What is compared, and the columns that follow from it.

    ``types`` and the masks of tensors and objects are by flat key, ``has_source`` by tensor: a rank may hold
    no element of one. ``tensors`` are facts of all tensors and then of the DTensors' local ones.
    """

    shape: object | None
    fqns: tuple[str, ...]
    types: list[type]
    is_tensor: list[bool]
    is_object: list[bool]
    has_source: list[bool]
    dtensors: list[int]
    tensors: TensorFacts
    layouts: _Layouts
    pointers: Int64
    memory: object
    columns: SaveColumns
    replicated: npt.NDArray[np.uint8]


class _Held(NamedTuple):
    """The tensors of a flat state dict in order, DTensors' local tensors and specs, and for each tensor the
    plain one that has its bytes."""

    tensors: list[Any]
    locals: list[torch.Tensor]
    specs: list[Any]
    plain: list[torch.Tensor]

    @classmethod
    def of(cls, tensors: list[Any], dtensors: list[int]) -> _Held:
        if not dtensors:
            return cls(tensors, [], [], tensors)
        if len(dtensors) == len(tensors):
            locals_ = list(map(_local, tensors))
            return cls(tensors, locals_, list(map(_spec, tensors)), locals_)
        chosen = [tensors[position] for position in dtensors]
        locals_, plain = list(map(_local, chosen)), tensors.copy()
        for position, local in zip(dtensors, locals_, strict=True):
            plain[position] = local
        return cls(tensors, locals_, list(map(_spec, chosen)), plain)

    @property
    def all(self) -> list[torch.Tensor]:
        """The tensors, then the local ones."""
        return [*self.tensors, *self.locals] if self.locals else self.tensors

    def are_as(self, facts: _Facts) -> bool:
        return facts.tensors.are_of(self.all) and facts.layouts.are_of(self.specs)


class _Tree(NamedTuple):
    """The shape of a state dict on a rank, and the flat names, paths and notes that follow."""

    tree: StateTree
    rank: int
    fqns: tuple[str, ...]
    paths: dict[str, Path]
    notes: Sequence[Note]


class KnownState:
    """The shape and the facts of the state dict that was saved last.

    Used by one thread at a time; `clear` may be called from another.
    """

    def __init__(self) -> None:
        self._tree: _Tree | None = None
        self._facts: _Facts | None = None

    def __reduce__(self) -> tuple[type[KnownState], tuple[()]]:
        return KnownState, ()  # a copy, in this process or another, knows nothing yet

    def clear(self) -> None:
        """Forget everything."""
        self._tree = None
        self._facts = None

    # -- names -----------------------------------------------------------------------------------------------

    def flatten(self, state_dict: Mapping[Any, Any], rank: int) -> tuple[Flat, object | None]:
        """What flattening gives, and what stands for the state's shape: one object for as long as names,
        paths and the values' classes are the same; None for unusual states."""
        known = self._tree
        if known is not None and known.rank == rank:
            leaves = known.tree.leaves(state_dict)
            if leaves is not None:
                # a copy of the paths, since planners show theirs to everybody
                values = dict(zip(known.fqns, leaves, strict=True))
                return Flat(values, dict(known.paths), known.notes, {}), known
        self.clear()  # equal flat names do not make equal paths
        flat = flatten(state_dict, rank=rank)
        tree = StateTree.of(state_dict)
        if tree is not None and not has_sharded_tensor(flat.values.values()):
            self._tree = _Tree(tree, rank, tuple(flat.values), dict(flat.paths), flat.notes)
        return flat, self._tree

    # -- tensors ---------------------------------------------------------------------------------------------

    def recall(self, flat: Mapping[str, Any], shape: object | None, *, with_paths: bool) -> LocalPart | None:
        """The columns of a flat state dict whose facts are those that `remember` was given, else None.

        Only where tensors lie may differ: ties are then found anew. ``with_paths`` if `flatten` made it,
        which also gave the ``shape``.
        """
        facts = self._facts
        if facts is None or with_paths != (facts.columns.planner_data is not None):
            return None
        values = list(flat.values())
        if (shape is None or facts.shape is not shape) and not (
            tuple(flat) == facts.fqns
            and {str}.issuperset(map(type, flat))
            and list(map(type, values)) == facts.types
        ):
            return None
        objects = list(compress(values, facts.is_object))
        held = _Held.of(list(compress(values, facts.is_tensor)) if objects else values, facts.dtensors)
        if not held.are_as(facts):
            return None
        sources = Sources(held.plain if all(facts.has_source) else compress(held.plain, facts.has_source))
        pointers = np.fromiter(map(torch.Tensor.data_ptr, sources), np.int64, len(sources))
        if not np.array_equal(pointers, facts.pointers):
            if not np.array_equal(pointers != 0, facts.pointers != 0):
                return None  # freed memory is an error, which names the tensor when it is looked at in full
            facts = self._moved(facts, sources, pointers)
        sources.memory = facts.memory
        return LocalPart(facts.columns, sources, objects, facts.replicated)

    def _moved(self, facts: _Facts, sources: list[torch.Tensor], pointers: Int64) -> _Facts:
        columns = facts.columns
        ties = item_ties(columns, sources, pointers)
        if not np.array_equal(ties, columns.item_ties):
            columns = replace(columns, item_ties=ties)
        moved = replace(facts, pointers=pointers, columns=columns, memory=object())
        if self._facts is facts:  # else it was cleared meanwhile
            self._facts = moved
        return moved

    def remember(
        self, flat: Mapping[str, Any], shape: object | None, local: LocalTensors, columns: SaveColumns
    ) -> LocalPart:
        """Keep the facts of a state that was looked at in full.

        Of a state that holds other than plain tensors, DTensors and values nothing is kept: what such tensors
        are made of cannot be compared cheaply.
        """
        facts = self._facts = self._facts_of(flat, shape, local, columns)
        part = LocalPart.of(local, columns if facts is None else facts.columns)
        part.sources.memory = None if facts is None else facts.memory
        return part

    def _facts_of(
        self, flat: Mapping[str, Any], shape: object | None, local: LocalTensors, columns: SaveColumns
    ) -> _Facts | None:
        values = list(flat.values())
        types = list(map(type, values))
        tensor_types = {cls: is_tensor_class(cls) for cls in set(types)}
        is_tensor = list(map(tensor_types.__getitem__, types))
        tensors = list(compress(values, is_tensor))
        dtensors: list[int] = []
        if any(issubclass(cls, DTensor) for cls in tensor_types):
            dtensors = [position for position, value in enumerate(tensors) if isinstance(value, DTensor)]
        held = _Held.of(tensors, dtensors)
        if not has_plain_memory(held.tensors, held.locals):
            return None
        if columns.planner_data is not None:
            if not isinstance(shape, _Tree) or shape is not self._tree:
                return None
            columns = replace(columns, planner_data=shape.paths)
        has_source = _matching(held.plain, local.sources)
        if sum(has_source) != len(local.sources):
            return None  # of a conjugated view a copy is stored
        return _Facts(
            shape=shape,
            fqns=tuple(flat),
            types=types,
            is_tensor=is_tensor,
            is_object=[not tensor for tensor in is_tensor],
            has_source=has_source,
            dtensors=dtensors,
            tensors=TensorFacts(held.all),
            layouts=_Layouts(held.specs),
            pointers=local.pointers,
            memory=object(),
            columns=columns,
            replicated=local.item_replicated,
        )


def _matching(tensors: list[torch.Tensor], sources: list[torch.Tensor]) -> list[bool]:
    """By tensor, whether it is the next of ``sources``."""
    if len(tensors) == len(sources) and all(map(operator.is_, tensors, sources)):
        return [True] * len(tensors)
    position, matching = 0, []
    for tensor in tensors:
        found = position < len(sources) and sources[position] is tensor
        matching.append(found)
        position += found
    return matching
