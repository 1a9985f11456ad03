"""Features of a save: their methods, which the steps of a save call.

The steps (`dcp.saving.columns`) call each method of all features in the order of `dcp.features.registry`; a
feature that has no part in a save does nothing there. A feature is a value of the save's options and storage,
the same in the training loop, a thread and a writer process. The core imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dcp.planners.columns import SaveColumns
from dcp.planners.rank_state import RankState
from dcp.storage.engine.observers import Observer
from dcp.storage.engine.write_tables import WriteColumns, WriteOutcome
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.formats.index import CheckpointIndex, Int64
from dcp.storage.packing import pack, unpack

if TYPE_CHECKING:
    from dcp.saving.options import SaveOptions
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["Features", "SaveFeature"]


@dataclass(frozen=True)
class SaveFeature:
    """One feature in one save. Methods are listed in the order in which they are called."""

    options: SaveOptions
    writer: FileSystemWriter

    name: ClassVar[str] = ""
    """Stands for the feature in messages between ranks."""

    def agreed(self) -> dict[str, Any]:
        """Options that must be the same on all ranks, by the names that a caller knows."""
        return {}

    def held(self, local: RankState, *, is_part: bool) -> RankState:
        """Another view of what this rank has; ``is_part``: other ranks take part in the save."""
        return local

    def explained(self, error: PlanError, parts: Sequence[SaveColumns]) -> PlanError | None:
        """On the coordinator: a better error for a plan of ``parts`` that failed; None where it has none."""
        return None

    def groups(self, local: RankState) -> Int64 | None:
        """A number for each local tensor: those of different numbers go into different files."""
        return None

    def observer(self, local: RankState, columns: WriteColumns) -> Observer | None:
        """An object that sees the bytes of the rows that this rank writes; None for none."""
        return None

    def manifest(self, index: CheckpointIndex, rows: Int64, found: Sequence[Any]) -> CheckpointIndex:
        """On the coordinator, before the commit: the index with what goes into it.

        ``found`` is what the observer's `finish` returned, by rank; ``rows`` the chunks of the index that the
        ranks have written, one rank after the other in the order of their rows. What a feature notes in the
        provenance is under its own name.
        """
        return index


class Features:
    """The features of one save, in their order, called one after the other.

    They are made when the first is called, within a step, so that what one raises reaches all ranks. What is
    no error of this package is raised as a CheckpointError that names the feature.
    """

    def __init__(
        self, kinds: Sequence[type[SaveFeature]], options: SaveOptions, writer: FileSystemWriter
    ) -> None:
        self._kinds, self._options, self._writer = kinds, options, writer

    @cached_property
    def _all(self) -> list[SaveFeature]:
        return [self._call(kind, "", kind, self._options, self._writer) for kind in self._kinds]

    def _with(self, method: str) -> Iterator[SaveFeature]:
        """The features that have a method of their own."""
        return (one for one in self._all if getattr(type(one), method) is not getattr(SaveFeature, method))

    def agreed(self) -> dict[str, Any]:
        """The names of all, and their options, which must be the same on all ranks."""
        found: dict[str, Any] = {"features": [feature.name for feature in self._all]}
        for feature in self._with("agreed"):
            own = self._ask(feature, "agreed", dict)
            if odd := [key for key in own if not isinstance(key, str) or key in found]:
                raise _refused(feature, "agreed", f"{odd[0]!r} is no name of an option, or another one's")
            found |= own
        return found

    def held(self, local: RankState, *, is_part: bool) -> RankState:
        """What this rank has, as the last one sees it."""
        for feature in self._with("held"):
            local = self._ask(feature, "held", RankState, local, is_part=is_part)
        return local

    def explained(self, error: PlanError, parts: Sequence[SaveColumns]) -> PlanError:
        """``error``, or the first better one."""
        found = (
            self._ask(feature, "explained", PlanError | None, error, parts)
            for feature in self._with("explained")
        )
        return next((better for better in found if better is not None), error)

    def groups(self, local: RankState) -> Int64 | None:
        """The groups of the first one that has any."""
        for feature in self._with("groups"):
            numbers = self._ask(feature, "groups", np.ndarray | None, local)
            if numbers is not None and numbers.shape != (len(local.sources),):
                raise _refused(feature, "groups", f"{len(local.sources)} numbers are wanted")
            if numbers is not None:
                found: Int64 = numbers.astype(np.int64)
                return found
        return None

    def observers(self, local: RankState, columns: WriteColumns) -> dict[str, Observer]:
        """The observers, by the names of their features."""
        found = {
            feature.name: self._ask(feature, "observer", Observer | None, local, columns)
            for feature in self._with("observer")
        }
        return {name: observer for name, observer in found.items() if observer is not None}

    def found_by(self, observers: Mapping[str, Observer]) -> dict[str, Any]:
        """What observers return at the end, as it is after its way to the coordinator."""
        found = {}
        for name, observer in observers.items():
            try:
                found[name] = unpack(pack(observer.finish()))
            except Exception as error:
                raise CheckpointError(f"feature {name!r}, finish: {type(error).__name__}: {error}") from error
        return found

    def manifest(
        self, index: CheckpointIndex, rows: Int64, outcomes: Sequence[WriteOutcome]
    ) -> CheckpointIndex:
        """The index with what all put into it."""
        for feature in self._with("manifest"):
            found = [outcome.found.get(feature.name) for outcome in outcomes]
            before = dict(index.provenance)
            index = self._ask(feature, "manifest", CheckpointIndex, index, rows, found)
            changed = {*before, *index.provenance} - {feature.name}
            if any(before.get(key) != index.provenance.get(key) for key in changed):
                raise _refused(feature, "manifest", "the provenance changed under another name than its own")
        return index

    def _ask(self, feature: SaveFeature, method: str, kind: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._call(type(feature), f", {method}", getattr(feature, method), *args, **kwargs)
        if not isinstance(result, kind):
            raise _refused(feature, method, f"it returned a {type(result).__name__}")
        return result

    @staticmethod
    def _call(
        kind: type[SaveFeature], method: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return function(*args, **kwargs)
        except CheckpointError:
            raise
        except Exception as error:
            text = f"feature {kind.name!r}{method}: {type(error).__name__}: {error}"
            raise CheckpointError(text) from error


def _refused(feature: SaveFeature, method: str, why: str) -> CheckpointError:
    return CheckpointError(f"feature {feature.name!r}, {method}: {why}")
