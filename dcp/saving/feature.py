"""Features of a save: their methods, which the steps of a save call.

The steps (`dcp.saving.save`) call each method of those that have a part in the save, in the order of
`dcp.features.registry`. A feature is a value of the save's options and storage, the same in the training
loop, a thread and a writer process. The core imports none of them.
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
"""Names of the provenance that saves have."""


@dataclass(frozen=True)
class SaveFeature(Feature):
    """One feature in one save.

    Methods are listed in the order in which they are called; `held` comes first where the state is staged.
    """

    options: SaveOptions
    writer: FileSystemWriter

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


def save_features(
    kinds: Sequence[type[SaveFeature]], options: SaveOptions, writer: FileSystemWriter
) -> Features[SaveFeature]:
    """Make the features that have a part in a save."""
    made = []
    for kind in kinds:
        if kind.name in _FACTS:
            raise refused(kind.name, "name", "the provenance has a fact of each save under it: rename it")
        owner = options if hasattr(options, kind.option) else writer
        if kind.option and not hasattr(owner, kind.option):
            raise refused(kind.name, "option", f"neither a save nor its writer has {kind.option!r}")
        if not kind.option or getattr(owner, kind.option):
            made.append(ask(kind.name, "__init__", kind, SaveFeature, options, writer))
    return Features(SaveFeature, made, [kind.name for kind in kinds])
