"""The features of the service, each a file or a folder, and those that other packages bring.

Each has its `dcp.server.core.feature.Feature` as ``feature``. Another package names such a value in the entry
point group ``dcphub.service_features``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, get_args

from dcp.server.catalog.events import CHECKPOINT_EVENTS
from dcp.server.core.allowances import Allowances
from dcp.server.core.feature import Feature, FeatureError
from dcp.server.core.jobs.kind import Kind
from dcp.server.core.jobs.schedules import CLEAN_UP, PeriodicWork
from dcp.server.core.settings import Settings
from dcp.server.records.administration import Scope

__all__ = [
    "FEATURES",
    "FeatureError",
    "allowances",
    "check_settings",
    "event_kinds",
    "features",
    "kinds",
    "schedules",
]

_GROUP: Final = "dcphub.service_features"

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
    "notes",
    "roots",
    "rules",
    "run_metrics",  # before runs: of its paths some are no number
    "runs",
    "shards",
    "statistics",
    "tensors",
    "verify",
    "webhooks",
    "handover",
    "convert",
    "scan",
    "overview",
    "sign_in",
    "operations",
)
"""Folders and files beside this one. Of two routes that fit a path the first one answers."""

_WITHOUT_WORK: Final = ("shards", "tensors")
"""Folders of pages and routes alone, as files are: they import FastAPI, and a worker does without them."""


@cache
def features(*, is_worker: bool = False) -> tuple[Feature, ...]:
    """All features: ours in order, then those of other packages by name. Raises FeatureError.

    ``is_worker``: without ours of pages and routes alone.
    """
    ours = [
        importlib.import_module(f"{__name__}.{name}").feature
        for name in FEATURES
        if not is_worker or _has_work(name)
    ]
    others = [_load(one) for one in sorted(entry_points(group=_GROUP), key=lambda one: one.name)]
    found = (*ours, *others)
    _check_unique("feature", [one.name for one in found])
    return found


def _has_work(name: str) -> bool:
    spec = importlib.util.find_spec(f"{__name__}.{name}")
    return name not in _WITHOUT_WORK and spec is not None and spec.submodule_search_locations is not None


def _load(entry: EntryPoint) -> Feature:
    where = f"feature {entry.name!r} ({entry.value}, entry point {_GROUP!r})"
    try:
        found = entry.load()
    except Exception as error:
        raise FeatureError(f"{where} cannot be imported: {error!r}") from error
    if not isinstance(found, Feature):
        raise FeatureError(f"{where} is no dcp.server.core.feature.Feature but {type(found).__name__}")
    return found


@cache
def kinds() -> Mapping[str, Kind[Any]]:
    """The kinds of jobs of all features, by name. Raises FeatureError."""
    found = [kind for feature in features(is_worker=True) for kind in feature.kinds]
    for kind in found:
        if not isinstance(kind, Kind) or kind.scope not in get_args(Scope):
            raise FeatureError(
                f"{kind!r} is no kind of job with a scope: an object of a subclass of Kind is needed"
            )
        if kind.button:
            _check_button(kind)
    _check_unique("kind of job", [kind.name for kind in found])
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.name)}


def _check_button(kind: Kind[Any]) -> None:
    try:
        kind.params(checkpoint_id=1)
    except ValueError as error:
        raise FeatureError(
            f"kind of job {kind.name!r}: a button needs parameters with checkpoint_id, and defaults for all "
            f"others: {error}"
        ) from None


@cache
def event_kinds() -> tuple[str, ...]:
    """All kinds of events: those of the catalog, then those that features emit. Raises FeatureError."""
    found = (*CHECKPOINT_EVENTS, *(kind for one in features(is_worker=True) for kind in one.events))
    _check_unique("kind of event", found)
    return found


def schedules(settings: Settings) -> Sequence[PeriodicWork]:
    """Collect the periodic work of all features, and the clean-up of the core."""
    found = features(is_worker=True)
    work = [*(work for feature in found for work in feature.periodic_work(settings)), CLEAN_UP]
    _check_unique("consumer or schedule", [one.name for one in work])
    for consumer in (consumer for feature in found for consumer in feature.consumers):
        unknown = sorted((consumer.kinds or set()) - set(event_kinds()))
        if unknown:
            raise FeatureError(f"consumer {consumer.name!r}: no feature emits events {', '.join(unknown)}")
    return work


def allowances(settings: Settings) -> Allowances:
    """Make the allowances of the one feature that has some, or those of the settings. Raises FeatureError."""
    found = [one for one in features(is_worker=True) if one.allowances is not None]
    if len(found) > 1:
        raise FeatureError(f"features {', '.join(one.name for one in found)} have allowances; one may")
    return next((one.allowances for one in found if one.allowances is not None), Allowances)(settings)


def check_settings(settings: Settings) -> None:
    """Check the settings of features. Raises FeatureError for wrong values, and for a name without them."""
    known = {one.name: one for one in features() if one.settings is not None}
    for name in settings.features:
        if name not in known:
            raise FeatureError(f"settings features.{name}: no feature of this name has settings")
    for one in known.values():
        one.options(settings)


def _check_unique(what: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise FeatureError(f"{count} features have a {what} {name!r}; rename one of them")
