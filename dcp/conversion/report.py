"""Report on a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ConversionReport"]


@dataclass(frozen=True)
class ConversionReport:
    """The result of `dcp.convert`.

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
