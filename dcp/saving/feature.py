"""Features of a save: classes with methods that the steps of a save call.

The steps (`dcp.saving.save`) call each method of the active features, in the order of
`dcp.features.registry`. A feature depends on the save's options and storage only, so it is the same in the
training loop, a thread and a writer process. The core imports no feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dcp.calls.features import Feature, Features, ask, refused
from dcp.planners.columns import SaveColumns
from dcp.planners.rank_state import RankState
from dcp.storage.engine.write import Observer, WriteColumns
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.strides import Int64

if TYPE_CHECKING:
    from dcp.saving.save import SaveOptions, SavingRank
    from dcp.storage.torch_storage.writer import FileSystemWriter

_FACTS: Final = frozenset(
    {"assemble_seconds", "dcphub_version", "durable", "rank_seconds", "rank_traffic", "replaced_files"}
    | {"resumed_from", "save_id", "structure", "time", "torch_version", "world_size"}
)
"""Names of the standard provenance."""


@dataclass(frozen=True)
class SaveFeature(Feature):
    """One feature in one save. Methods are listed in the order of their calls; for a staged save, `held` is
    called first.
    """

    options: SaveOptions
    writer: FileSystemWriter

    def held(self, local: RankState, at: SavingRank) -> RankState:
        """Return another view of this rank's state."""
        return local

    def explained(self, error: PlanError, parts: Sequence[SaveColumns]) -> PlanError | None:
        """Return a better error for a failed plan of ``parts``, on the coordinator, or None."""
        return None

    def groups(self, local: RankState) -> Int64 | None:
        """Return a number for each local tensor; each number gets separate files. None for one group."""
        return None

    def observer(self, local: RankState, columns: WriteColumns) -> Observer | None:
        """Return an object that observes the bytes written by this rank; None for no observer."""
        return None

    def manifest(self, index: CheckpointIndex, rows: Int64, found: Sequence[Any]) -> CheckpointIndex:
        """Return the index with the feature's additions, on the coordinator before the commit.

        ``found`` has the results of the observers' `finish` by rank. ``rows`` are the chunks written by the
        ranks, in order. A feature's provenance is stored under its name.
        """
        return index


def save_features(
    kinds: Sequence[type[SaveFeature]], options: SaveOptions, writer: FileSystemWriter
) -> Features[SaveFeature]:
    """Return the active features of a save."""
    made = []
    for kind in kinds:
        if kind.name in _FACTS:
            raise refused(
                kind.name, "name", "the name is reserved for a fact of the provenance: rename the feature"
            )
        owner = options if hasattr(options, kind.option) else writer
        if kind.option and not hasattr(owner, kind.option):
            raise refused(kind.name, "option", f"neither save() nor the writer has an option {kind.option!r}")
        if not kind.option or getattr(owner, kind.option):
            made.append(ask(kind.name, "__init__", kind, SaveFeature, options, writer))
    return Features(SaveFeature, made, [kind.name for kind in kinds])
