"""One load as its features see it, and what a feature can do there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp.planners.by_value import has_plain_types, like
from dcp.planners.columns import HeldBoxes
from dcp.planners.flatten import Flat, flatten, replace_element
from dcp.planners.layout.local_tensor import flatten_sharded
from dcp.planners.load.options import LoadAttempt, LoadOptions
from dcp.planners.load.selection import Matches, Selection, renamer
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import ByteRuns, Pieces
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.destinations import Filled, classify

__all__ = ["LoadCall", "LoadSession", "ReadWhole", "View"]

ReadWhole = Callable[[Sequence[str]], tuple[Any, Mapping[str, Path]]]
"""Reads what is below some names of the checkpoint, whole: a nested state, and the paths of its entries."""


class View:
    """A checkpoint as it is shown to a load: names, shapes and chunks of ``index``.

    ``unmapped`` are names that a map would have to know.
    """

    def __init__(self, index: CheckpointIndex, unmapped: frozenset[str] = frozenset()) -> None:
        self.index = index
        self.unmapped = unmapped

    def reads(
        self, engine: ReadEngine, pieces: Pieces, memory: LocalMemory
    ) -> tuple[ByteRuns, Iterator[Filled]]:
        """What is read for ``pieces`` of the index: runs, and elements into views of the local tensors."""
        engine.resolve(pieces.chunks)
        return classify(engine, pieces, memory)

    def lost(self, unexpected: Sequence[str]) -> list[str]:
        """Those of the ``unexpected`` names that are lost for a reason of the view's own."""
        return []


class LoadCall:
    """The entries of a state dict that one rank loads, and what the checkpoint calls them.

    ``flat`` is the state dict ``root`` by flat key. After `choose` ``values`` are the entries that are
    loaded, ``names`` what the checkpoint calls all of them where anything is renamed, and ``matches`` how
    patterns fare, if there are any.
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

    def flattened(self, *, legacy: bool = False) -> Flat:
        """``root`` by flat key; with the keys of torch before 2.4 if ``legacy``."""
        flat = Flat(self.root, {}, (), {}, {}, {}, frozenset())
        if self.flattens:
            flat = flatten(self.root, rank=self.rank, legacy=legacy)
        return flat._replace(values=flatten_sharded(flat.values)) if self._flattens_sharded else flat

    def selected(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of ``values`` that the patterns select."""
        selection = self.selection
        if selection is None:
            return values
        return {fqn: value for fqn, value in values.items() if selection.selects(fqn)}

    def stored(self, fqn: str) -> str:
        """What the checkpoint calls an entry."""
        return fqn if self.renamed is None else self.renamed(fqn)

    def choose(self, stored_names: Callable[[], Sequence[str]]) -> None:
        """Take the entries that the patterns select, under the checkpoint's names.

        ``stored_names`` has all of the latter.
        """
        flat = self.flat.values
        self.names = None if self.renamed is None else {fqn: self.renamed(fqn) for fqn in flat}
        self.values, selection = self.selected(flat), self.selection
        self.matches = None
        if selection is not None:
            self.matches = selection.match(flat, self.attempt.unasked, stored_names())

    def leave(self, fqns: set[str]) -> None:
        """Take some entries out of those that are loaded."""
        if fqns:
            self.values = {fqn: value for fqn, value in self.values.items() if fqn not in fqns}

    def unexpected(self, stored: Sequence[str]) -> tuple[str, ...]:
        """Of the ``stored`` names that are not loaded those that nobody left out on purpose."""
        if self.values is self.flat.values:
            return tuple(stored)
        names, selection = self.names, self.selection
        left = (fqn for fqn in self.flat.values if fqn not in self.values)
        others = set(left) if names is None else {names[fqn] for fqn in left}
        selects = selection.selects if selection is not None else lambda _: True
        return tuple(name for name in stored if name not in others and selects(name))

    # -- values ----------------------------------------------------------------------------------------------

    def put(self, fqn: str, value: Any) -> None:
        """Put a value where the state dict has ``fqn``."""
        value = like(self.flat.values.get(fqn), value)
        if self.flattens:
            replace_element(self.root, self.flat.paths[fqn], value)
            return
        self.flat.values[fqn] = value
        self.root[fqn] = value

    def put_all(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
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


@dataclass(eq=False)
class LoadSession:
    """One feature in one load on one rank; what a feature has no part in does nothing.

    The methods are called in this order, each of all sessions before the next; `put` once the whole load has
    succeeded, `accept` before that.
    """

    call: LoadCall

    def state(self) -> None:
        """Put other values into the state dict, before anything is known of the checkpoint."""

    def names(self, index: CheckpointIndex) -> None:
        """Take other flat keys."""

    def entries(self, index: CheckpointIndex) -> None:
        """Leave out entries that are not loaded, or name them otherwise."""

    def destinations(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``values``, some of them in other memory."""
        return values

    def boxes(
        self, pieces: Pieces, index: CheckpointIndex, held: HeldBoxes, memory: LocalMemory
    ) -> LocalMemory:
        """The memory to load into, some of it in place of the state dict's."""
        return memory

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the checkpoint's ``names``, which are not loaded, that are to be reported."""
        return names

    def accept(self, fqn: str, value: Any) -> bool:
        """Take a loaded value; False where it goes to the state dict."""
        return False

    def loaded(self, read_whole: ReadWhole) -> None:
        """Make what is made of other entries of the checkpoint."""

    def put(self) -> None:
        """Put what was made or loaded apart into the state dict."""
