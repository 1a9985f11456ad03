"""Shards: which rank holds what, phases of a save, the map of a checkpoint."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature, Link

__all__ = ["feature"]

feature: Final = Feature(
    "shards",
    __name__,
    web=["drawings_api", "api", "pages", "anatomy"],
    links=[
        Link("checkpoint", "Shards by rank", "/checkpoints/{id}/shards"),
        Link("checkpoint", "Save anatomy", "/checkpoints/{id}/anatomy"),
    ],
)
