"""The features of the service, each a file or a folder, and those that other packages bring.

Each has its `dcp.server.core.feature.Feature` as ``feature``. Another package names such a value in the entry
point group ``dcphub.service_features``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from dcp.server.core.feature import Feature
from dcp.server.core.jobs.cleaning import CLEAN_UP
from dcp.server.core.jobs.kind import Kind
from dcp.server.core.jobs.schedules import PeriodicWork
from dcp.server.core.settings import Settings

__all__ = ["FEATURES", "features", "kinds", "schedules"]

FEATURES: Final = (
    "audit",
    "search",
    "checkpoints",
    "checkpoint_page",
    "retention",
    "diff",
    "downloads",
    "drift",
    "will_it_load",
    "jobs",
    "keys",
    "labels",
    "lineage",
    "roots",
    "rules",
    "runs",
    "shards",
    "statistics",
    "tensors",
    "verify",
    "webhooks",
    "convert",
    "scan",
    "overview",
    "sign_in",
    "operations",
)
"""Folders and files beside this one. Of two routes that fit a path the first one answers."""


@cache
def features() -> tuple[Feature, ...]:
    """All features: ours in order, then those of other packages by name."""
    ours = [importlib.import_module(f"{__name__}.{name}").feature for name in FEATURES]
    others = [
        one.load() for one in sorted(entry_points(group="dcphub.service_features"), key=lambda one: one.name)
    ]
    return (*ours, *(one for one in others if isinstance(one, Feature)))


@cache
def kinds() -> Mapping[str, Kind[Any]]:
    """The kinds of jobs of all features, by name."""
    found = [kind for feature in features() for kind in feature.kinds]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.name)}


def schedules(settings: Settings) -> Sequence[PeriodicWork]:
    """Collect the periodic work of all features, and the clean-up of the core."""
    return [*(work for feature in features() for work in feature.periodic_work(settings)), CLEAN_UP]
