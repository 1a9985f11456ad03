"""The features of the service, each a file or a folder, and those that other packages bring.

`FEATURES` names the modules; each has its `dcp.server.core.feature.Feature` as ``feature``. Another package names
such a module in the entry point group ``dcphub.features``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from dcp.server.core.feature import Feature
from dcp.server.jobs.kind import Kind
from dcp.server.jobs.kinds.convert import ConvertKind
from dcp.server.jobs.kinds.delete import DeleteKind
from dcp.server.jobs.kinds.diff import DiffKind
from dcp.server.jobs.kinds.merge import MergeKind
from dcp.server.jobs.kinds.prune import PruneKind
from dcp.server.jobs.kinds.purge import PurgeKind
from dcp.server.jobs.kinds.retention import RetentionKind
from dcp.server.jobs.kinds.scan import ScanKind
from dcp.server.jobs.kinds.shapes import ShapesKind
from dcp.server.jobs.kinds.stats import StatsKind
from dcp.server.jobs.kinds.verify import VerifyKind

__all__ = ["FEATURES", "features", "kinds"]

FEATURES: Final = ("dcp.server.features.drift",)

_KINDS: Final[tuple[Kind[Any], ...]] = (
    ConvertKind(),
    DeleteKind(),
    DiffKind(),
    MergeKind(),
    PruneKind(),
    PurgeKind(),
    RetentionKind(),
    ScanKind(),
    ShapesKind(),
    StatsKind(),
    VerifyKind(),
)


@cache
def features() -> tuple[Feature, ...]:
    """All features: ours in order, then those of other packages by name."""
    ours = [importlib.import_module(module).feature for module in FEATURES]
    others = [one.load() for one in sorted(entry_points(group="dcphub.features"), key=lambda one: one.name)]
    return (*ours, *(one for one in others if isinstance(one, Feature)))


@cache
def kinds() -> Mapping[str, Kind[Any]]:
    """The kinds of jobs of all features, by name."""
    found = [*_KINDS, *(kind for feature in features() for kind in feature.kinds)]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.name)}
