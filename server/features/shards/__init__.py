"""Shards: the files and bytes of each rank, and the phases of a save."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature, Link

__all__ = ["feature"]

feature: Final = Feature(
    "shards",
    __name__,
    web=["web", "anatomy"],
    links=[
        Link("checkpoint", "Shards by rank", "/checkpoints/{id}/shards"),
        Link("checkpoint", "Save anatomy", "/checkpoints/{id}/anatomy"),
    ],
)
