"""Retention: policies and previews, deletion with a grace period, dropped parts, and purges."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.retention.deletion import DeleteKind, PruneKind
from dcp.server.features.retention.policies import RetentionKind, is_policy_due, submit_policies
from dcp.server.features.retention.purge import PurgeKind, is_purge_due, submit_purges

__all__ = ["feature"]

feature: Final = Feature(
    "retention",
    __name__,
    kinds=[RetentionKind(), DeleteKind(), PruneKind(), PurgeKind()],
    web=["retention_routes"],
)
feature.schedule("retention", 10.0, is_needed=is_policy_due)(submit_policies)
feature.schedule("purges", 10.0, is_needed=is_purge_due)(submit_purges)
