"""What a conversion did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a report is asked for where nothing is converted
    from dcp.conversion.copying.checks import TargetChecksums
    from dcp.conversion.layouts.layout import TargetLayout
    from dcp.storage.engine.reading.requests import ReadStats

__all__ = ["ConversionReport", "report_of"]


@dataclass(frozen=True)
class ConversionReport:
    """What `dcp.convert` did.

    ``files`` are the names of the files made, in ``target``; ``tensor_count`` and ``bytes_written`` (headers
    included) are of the whole output. ``bytes_read`` counts this run only, as do ``seconds``, by phase
    ("total" is all of it). ``tasks`` is the number of independent pieces of work, ``tasks_resumed`` of those
    that an earlier run had done. ``blocks_verified`` blocks of the source had the checksums that it records,
    ``blocks_unverified`` have none. ``dropped_objects`` are values that the target's format cannot hold.
    ``weights`` are those of a merge, by name of the source or adapter in their order; its ``unmerged``
    tensors, of whole numbers, are those of the first.

    ``checksums`` is the CRC-32 of each tensor's bytes in the target, by its name there, where those are in
    one piece; a ``dcp`` target has its checksums in its manifest.
    """

    source: str
    target: str
    format: str
    files: tuple[str, ...] = ()
    tensor_count: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    tasks: int = 0
    tasks_resumed: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    dropped_objects: tuple[str, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    unmerged: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict, repr=False)


def report_of(
    layout: TargetLayout, checksums: TargetChecksums, stats: ReadStats, **facts: Any
) -> ConversionReport:
    """The report on a target of ``layout``; ``facts`` are the fields that neither of these tells."""
    index = layout.index
    return ConversionReport(
        files=(*layout.file_names, *layout.last_files),
        tensor_count=len(layout.tensor_copies) if index is None else index.tensor_count,
        bytes_written=sum(layout.file_sizes),
        blocks_verified=stats.blocks_verified,
        blocks_unverified=stats.blocks_unverified,
        checksums={fqn: checksums.whole(copy) for fqn, copy in layout.tensor_copies.items()},
        **facts,
    )
