"""Features of a save: their methods, which the steps of a save call.

The steps (`dcp.saving.columns`) call each method of those that have a part in the save, in the order of
`dcp.features.registry`. A feature is a value of the save's options and storage, the same in the training
loop, a thread and a writer process. The core imports none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from dcp.calls.plain_errors import ask, refused
from dcp.planners.columns import SaveColumns
from dcp.planners.rank_state import RankState
from dcp.storage.engine.observers import Observer
from dcp.storage.engine.write_tables import WriteColumns, WriteOutcome
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, Int64
from dcp.storage.packing import pack, unpack

if TYPE_CHECKING:
    from dcp.saving.options import SaveOptions
    from dcp.saving.save import SavingRank
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["Features", "SaveFeature"]

_METHODS: Final = ("agreed", "held", "explained", "groups", "observer", "manifest")

_FACTS: Final = frozenset(
    {"assemble_seconds", "dcphub_version", "durable", "rank_seconds", "rank_traffic", "replaced_files"}
    | {"resumed_from", "save_id", "structure", "time", "torch_version", "world_size"}
)
"""Names of the provenance that saves have."""


@dataclass(frozen=True)
class SaveFeature:
    """One feature in one save.

    Methods are listed in the order in which they are called; `held` comes first where the state is staged.
    """

    options: SaveOptions
    writer: FileSystemWriter

    name: ClassVar[str] = ""
    """Stands for the feature in messages between ranks."""

    option: ClassVar[str] = ""
    """The option of a save or its storage without which the feature has no part in it."""

    def agreed(self) -> dict[str, Any]:
        """Return options that must be the same on all ranks, by the names that a caller knows."""
        return {}

    def held(self, local: RankState, at: SavingRank) -> RankState:
        """Return another view of what this rank has."""
        return local

    def explained(self, error: PlanError, parts: Sequence[SaveColumns]) -> PlanError | None:
        """Make a better error of a plan of ``parts`` that failed, on the coordinator; None for none."""
        return None

    def groups(self, local: RankState) -> Int64 | None:
        """Return a number for each local tensor: those of different numbers go into different files; None for
        one group."""
        return None

    def observer(self, local: RankState, columns: WriteColumns) -> Observer | None:
        """Make an object that sees the bytes of the rows that this rank writes; None for none."""
        return None

    def manifest(self, index: CheckpointIndex, rows: Int64, found: Sequence[Any]) -> CheckpointIndex:
        """Return the index with what goes into it, on the coordinator before the commit.

        ``found`` is what the observer's `finish` returned, by rank; ``rows`` the chunks of the index that the
        ranks have written, one rank after the other in the order of their rows. What a feature notes in the
        provenance is under its own name.
        """
        return index


class Features:
    """The features of one save, in their order, called one after the other.

    What is no error of this package is raised as a CheckpointError that names the feature.
    """

    def __init__(
        self, kinds: Sequence[type[SaveFeature]], options: SaveOptions, writer: FileSystemWriter
    ) -> None:
        self._names: list[str] = []
        self._with: dict[str, list[SaveFeature]] = defaultdict(list)
        """Those that have a method of their own, by its name."""
        for kind in kinds:
            self._names.append(kind.name)
            if kind.name in _FACTS:
                raise refused(kind.name, "name", "the provenance has a fact of each save under it: rename it")
            if kind.option:
                given = [getattr(of, kind.option) for of in (options, writer) if hasattr(of, kind.option)]
                if not given:
                    raise refused(kind.name, "option", f"neither a save nor its writer has {kind.option!r}")
                if not any(given):
                    continue
            feature = ask(kind.name, "__init__", kind, SaveFeature, options, writer)
            for method in _METHODS:
                if getattr(kind, method) is not getattr(SaveFeature, method):
                    self._with[method].append(feature)

    def agreed(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add all features' names and options to the ``options`` that must be the same on all
        ranks."""
        found = options | {"features": self._names}
        for feature in self._with["agreed"]:
            for name, value in ask(feature.name, "agreed", feature.agreed, dict).items():
                if not isinstance(name, str) or name in found:
                    raise refused(feature.name, "agreed", f"{name!r} is another option's name, or no name")
                found[name] = value
        return found

    def held(self, local: RankState, at: SavingRank) -> RankState:
        """Return what this rank has, as the last one sees it."""
        for feature in self._with["held"]:
            local = ask(feature.name, "held", feature.held, RankState, local, at)
        return local

    def explain(self, error: PlanError, parts: Sequence[SaveColumns]) -> None:
        """Raise the first better error, if there is one."""
        for feature in self._with["explained"]:
            better = ask(feature.name, "explained", feature.explained, PlanError | None, error, parts)
            if better is not None:
                raise better from error

    def groups(self, local: RankState) -> Int64 | None:
        """Return the groups of the first one that has any."""
        for feature in self._with["groups"]:
            numbers = ask(feature.name, "groups", feature.groups, np.ndarray | None, local)
            if numbers is None:
                continue
            if numbers.shape != (len(local.sources),):
                raise refused(feature.name, "groups", f"{len(local.sources)} numbers are wanted")
            found: Int64 = numbers.astype(np.int64)
            return found
        return None

    def observers(self, local: RankState, columns: WriteColumns) -> dict[str, Observer]:
        """Make the observers, by the names of their features."""
        found = {}
        for feature in self._with["observer"]:
            observer = ask(feature.name, "observer", feature.observer, Observer | None, local, columns)
            if observer is not None:
                found[feature.name] = observer
                observer.name = feature.name
        return found

    def found_by(self, observers: Mapping[str, Observer]) -> dict[str, Any]:
        """Return what observers found, as it is after its way to the coordinator."""
        found = {}
        for name, observer in observers.items():
            found[name] = ask(name, "finish", lambda one: unpack(pack(one.finish())), object, observer)
        return found

    def manifest(
        self, index: CheckpointIndex, writes: Sequence[WriteColumns], outcomes: Sequence[WriteOutcome]
    ) -> CheckpointIndex:
        """Return the index with what all put into it."""
        for feature in self._with["manifest"]:
            rows = np.concatenate([columns.chunks for columns in writes])
            found = [outcome.found.get(feature.name) for outcome in outcomes]
            before = dict(index.provenance)
            index = ask(feature.name, "manifest", feature.manifest, CheckpointIndex, index, rows, found)
            changed = {*before, *index.provenance} - {feature.name}
            if any(before.get(key) != index.provenance.get(key) for key in changed):
                raise refused(
                    feature.name, "manifest", "the provenance changed under another name than its own"
                )
        return index
