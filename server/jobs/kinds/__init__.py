"""What jobs there are, one module each; `KINDS` has them by name.

What several of them need is in `shared`; what a kind is, in `dcp.server.jobs.kind`.
"""

from __future__ import annotations

from typing import Any, Final

from dcp.server.jobs.kind import Kind
from dcp.server.jobs.kinds.convert import ConvertKind
from dcp.server.jobs.kinds.delete import DeleteKind
from dcp.server.jobs.kinds.diff import DiffKind
from dcp.server.jobs.kinds.drift import DriftKind
from dcp.server.jobs.kinds.merge import MergeKind
from dcp.server.jobs.kinds.prune import PruneKind
from dcp.server.jobs.kinds.purge import PurgeKind
from dcp.server.jobs.kinds.retention import RetentionKind
from dcp.server.jobs.kinds.scan import ScanKind
from dcp.server.jobs.kinds.shapes import ShapesKind
from dcp.server.jobs.kinds.stats import StatsKind
from dcp.server.jobs.kinds.verify import VerifyKind

__all__ = ["KINDS"]

_ALL: Final[tuple[Kind[Any], ...]] = (
    ConvertKind(),
    DeleteKind(),
    DiffKind(),
    DriftKind(),
    MergeKind(),
    PruneKind(),
    PurgeKind(),
    RetentionKind(),
    ScanKind(),
    ShapesKind(),
    StatsKind(),
    VerifyKind(),
)

KINDS: Final[dict[str, Kind[Any]]] = {kind.name: kind for kind in _ALL}
