"""What a feature can do in a load: sessions, and views of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp.planners.columns import HeldBoxes
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import ByteRuns, Pieces
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.destinations import Filled, classify

if TYPE_CHECKING:
    from dcp.loading.call import LoadCall
    from dcp.loading.report import LoadReport

__all__ = ["LoadSession", "ReadWhole", "View"]

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
        """Return what is read for ``pieces`` of the index: runs, and elements into views of the local
        tensors."""
        engine.resolve(pieces.chunks)
        return classify(engine, pieces, memory)

    def lost(self, unexpected: Sequence[str]) -> list[str]:
        """Return those of the ``unexpected`` names that are lost for a reason of the view's own."""
        return []


@dataclass(eq=False)
class LoadSession:
    """One feature in one load on one rank; what a feature has no part in does nothing.

    The methods are called in this order, each of all sessions before the next; `put` once the whole load has
    succeeded.
    """

    call: LoadCall
    later: Sequence[str] = ()
    """Entries whose tensors are filled by `put` alone."""
    made: Sequence[str] = ()
    """Entries that are made by the feature, and planned by nobody."""
    new: Sequence[str] = ()
    """Entries that were given memory."""

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
        """Return those of the checkpoint's ``names``, which are not loaded, that are to be reported."""
        return names

    def accept(self, fqn: str, value: Any) -> bool:
        """Take a loaded value; False where it goes to the state dict."""
        return False

    def loaded(self, read_whole: ReadWhole) -> None:
        """Make what is made of other entries of the checkpoint."""

    def put(self) -> None:
        """Put what was made or loaded apart into the state dict."""

    def done(self, report: LoadReport, *, is_coordinator: bool) -> None:
        """Say what was done, after the load."""
