"""Reports of loads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from reprlib import Repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp.loading.call import LoadCall
    from dcp.storage.engine.requests import ReadStats
    from dcp.storage.formats.index import CheckpointIndex

__all__ = ["LoadReport"]

_SHORT = Repr()
_SHORT.maxlist = _SHORT.maxdict = 12
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 4
"""For a prompt: a checkpoint may have a million names that a load did not ask for."""


@dataclass
class LoadReport:
    """The result of `dcp.load` on this rank.

    ``missing``: names in the state dict that the checkpoint lacks (only with partial loading allowed; their
    values are as they were). ``unexpected``: names of the checkpoint that this rank did not load because it
    did not ask for them or, with ``unexpected="ignore"``, had no place for them; those that ``only`` and
    ``exclude`` leave out do not count. ``cast``: names of tensors converted from another stored dtype.
    ``lossy``: what such a conversion lost besides digits, by the checkpoint's name: values beyond the range,
    imaginary parts, fractions. ``renamed``: names of the checkpoint by those of the state dict, where they
    differ. ``kept_per_rank``: `PerRank` values that are as they were, because the checkpoint has none for
    this rank. ``rescaled``: `Rescale` values that their rules made, because another number of ranks saved.

    ``bytes_needed``: payload bytes that this rank asked for; ``bytes_read``: bytes fetched from storage, also
    of other values and of headers. ``blocks_verified`` and ``blocks_unverified``: checksum blocks compared,
    and those read without being compared (partly needed, or the format has no checksum). ``seconds``: by
    phase. ``attempts``: more than 1 where the checkpoint was replaced while it was being read, and its
    successor was loaded.

    ``storage`` is what this rank asked of the storage's service, empty for a disk: "requests" (each attempt)
    and their number by kind, "retries", "bytes_received", "request_seconds" (the sum, also of concurrent
    ones) and "slowest_request_seconds".

    ``save_id``, ``world_size`` (number of ranks that saved) and ``user_metadata`` are the checkpoint's, where
    its format and the storage tell them.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    kept_per_rank: list[str] = field(default_factory=list)
    attempts: int = 1
    storage: dict[str, float] = field(default_factory=dict)
    save_id: str | None = None
    world_size: int | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    rescaled: list[str] = field(default_factory=list)
    lossy: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = (f"{each.name}={_SHORT.repr(getattr(self, each.name))}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"

    def note(self, call: LoadCall | None, index: CheckpointIndex | None, stats: ReadStats | None) -> None:
        """Take what the plan passed over, what the checkpoint says of itself, and what reading cost, as far
        as it is known."""
        if call is not None:
            self.missing, self.cast = list(call.missing), list(call.cast)
            self.unexpected, self.renamed = list(call.unexpected), dict(call.renamed_names)
        if index is not None:
            save_id, world_size = index.provenance.get("save_id"), index.provenance.get("world_size")
            self.save_id = save_id if isinstance(save_id, str) else None
            self.world_size = world_size if isinstance(world_size, int) else None
            self.user_metadata = dict(index.user)
        if stats is not None:
            self.bytes_needed, self.bytes_read = stats.bytes_needed, stats.bytes_read
            self.blocks_verified, self.blocks_unverified = stats.blocks_verified, stats.blocks_unverified
            self.lossy = dict(stats.lossy)
