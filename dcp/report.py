"""What a load did."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LoadReport"]


@dataclass
class LoadReport:
    """What `dcp.load` did on this rank.

    ``missing``: names in the state dict that the checkpoint lacks (only with partial loading allowed; their
    values are as they were). ``unexpected``: names of the checkpoint that the state dict did not ask for.
    ``cast``: names of tensors converted from another stored dtype. ``bytes_needed``: payload bytes that
    this rank asked for; ``bytes_read``: bytes fetched from storage for them. ``blocks_verified`` and
    ``blocks_unverified``: checksum blocks compared, and those read without being compared (partly needed, or
    the format has no checksum). ``seconds``: by phase.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
