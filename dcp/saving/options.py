"""Options of a save, as one value that is handed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.storage.errors import OptionError
from dcp.storage.formats.native.manifest import MAX_PLAIN_SECTION_BYTES
from dcp.storage.formats.plain import encode_plain

if TYPE_CHECKING:
    from dcp.planners.save.planner import PlanOptions
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["SaveOptions", "compared_options"]

_OF_WRITERS: Final = ("overwrite", "torch_compatible", "digests", "sync_files", "single_file_per_rank")
_OF_PLANS: Final = {
    "dedup_to_lowest_rank": "dedup_save_to_lowest_rank",
    "split_bytes": "split_bytes",
    "replica_check": "replica_check",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """The options of `dcp.save` and `CheckpointManager`, which say what they mean; of a manager's also its
    ``step`` and what its run was ``resumed_from``."""

    step: int | None = None
    resumed_from: Mapping[str, Any] | None = None
    use_collectives: bool = True
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    progress: bool | ProgressCallback | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    map: WeightMap | None = None
    map_must_invert: bool = False
    """What is saved through the map will be restored through its inverse."""
    retries: int = 0
    retry_pause_seconds: float = 1.0
    apart: tuple[tuple[str, ...], ...] = ()
    """Globs on names: what those of one tuple match goes into files of its own, so that it can be dropped
    later without rewriting the rest. On columns only; those of a manager have no effect elsewhere."""

    def check(self) -> None:
        """Raise OptionError for user metadata that no manifest can hold: now, not after all was written."""
        if not isinstance(self.user_metadata, Mapping):
            raise OptionError(f"user_metadata must be a dict, not a {type(self.user_metadata).__name__}")
        for key, value in self.user_metadata.items():
            if not isinstance(key, str) or encode_plain(value, limit_bytes=MAX_PLAIN_SECTION_BYTES) is None:
                raise OptionError(
                    f"user_metadata[{key!r}], a {type(value).__name__}, cannot be stored: give plain data "
                    "(None, numbers, text, bytes, and lists, tuples and dicts of them) under a string"
                )


def compared_options(
    options: SaveOptions, writer: FileSystemWriter | None, plan: PlanOptions | None
) -> dict[str, Any]:
    """Return options that must be the same on all ranks, by the names that their caller knows; those of other
    packages' writers and planners (None) are not known."""
    found: dict[str, Any] = {} if options.step is None else {"step": options.step}
    for name in _OF_WRITERS if writer is not None else ():
        found[name] = getattr(writer, name)
    for own, name in _OF_PLANS.items() if plan is not None else ():
        found[name] = getattr(plan, own)
    return found
