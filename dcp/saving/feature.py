"""Features of a save: their methods, which the steps of a save call.

The steps (`dcp.saving.columns`) call each method of all features in the order of `dcp.features.registry`; a
feature that has no part in a save does nothing there. A feature is a value of the save's options and storage,
the same in the training loop, a thread and a writer process. The core imports none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dcp.planners.columns import SaveColumns
    from dcp.planners.rank_state import RankState
    from dcp.saving.options import SaveOptions
    from dcp.storage.engine.observers import Observer
    from dcp.storage.engine.write_tables import WriteColumns
    from dcp.storage.errors import PlanError
    from dcp.storage.formats.index import CheckpointIndex, Int64
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["SaveFeature"]


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
        ranks have written, one rank after the other in the order of their rows.
        """
        return index
