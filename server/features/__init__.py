"""The features of the service, each a file or a folder, and those that other packages bring.

Each has its `dcp.server.core.feature.Feature` as ``feature``. Another package names such a value in the entry
point group ``dcphub.service_features``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import Kind

__all__ = ["FEATURES", "features", "kinds"]

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
    return (*_ours(), *_others())


def _ours(*, only_folders: bool = False) -> list[Feature]:
    names = [f"{__name__}.{name}" for name in FEATURES]
    if only_folders:
        names = [name for name in names if _is_folder(name)]
    return [importlib.import_module(name).feature for name in names]


def _is_folder(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def _others() -> list[Feature]:
    points = sorted(entry_points(group="dcphub.service_features"), key=lambda point: point.name)
    return [one for one in (point.load() for point in points) if isinstance(one, Feature)]


@cache
def kinds() -> Mapping[str, Kind[Any]]:
    """The kinds of jobs of all features, by name. Features of a single file have none, and are not imported:
    workers do not need the pages."""
    found = [kind for feature in (*_ours(only_folders=True), *_others()) for kind in feature.kinds]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.name)}
