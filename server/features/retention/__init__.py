"""Retention: policies, previews, deletion with grace, parts that are dropped, purges."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.retention.delete import DeleteKind
from dcp.server.features.retention.job import RetentionKind
from dcp.server.features.retention.prune import PruneKind
from dcp.server.features.retention.purge import PurgeKind

__all__ = ["feature"]

feature: Final = Feature(
    "retention",
    __name__,
    kinds=[RetentionKind(), DeleteKind(), PruneKind(), PurgeKind()],
    web=["api", "deletion_api", "forms"],
)
