"""Features of the service: built-in features, and features of installed packages.

Each module declares a `dcp.server.core.feature.Feature` as ``feature``. Other packages use the entry point
group ``dcphub.service_features``.
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
from dcp.server.core.security.accounts import NO_ROLES, RoleSettings
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
    "role_settings",
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
    "run_metrics",  # before runs: some paths below runs have no number
    "runs",
    "shards",
    "stages",
    "tensors",
    "verify",
    "webhooks",
    "handover",
    "convert",
    "scan",
    "overview",
    "people",
    "quotas",
    "sign_in",
    "operations",
)
"""Modules beside this file. If two routes match a path, the first route answers."""

_WITHOUT_WORK: Final = ("shards",)
"""Packages that declare pages and routes only. Their import loads FastAPI, so workers skip them."""


@cache
def features(*, is_worker: bool = False) -> tuple[Feature, ...]:
    """Return all features: built-in features in order, then features of other packages by name.

    ``is_worker``: leave out built-in features of pages and routes only. Raises FeatureError.
    """
    ours = [
        importlib.import_module(f"{__name__}.{name}").feature
        for name in FEATURES
        if not is_worker or _has_work(name)
    ]
    others = [_load(one) for one in sorted(entry_points(group=_GROUP), key=lambda one: one.name)]
    found = (*ours, *others)
    _check_unique("name", [(one.name, one) for one in found])
    return found


def _has_work(name: str) -> bool:
    spec = importlib.util.find_spec(f"{__name__}.{name}")
    return name not in _WITHOUT_WORK and spec is not None and spec.submodule_search_locations is not None


def _load(entry: EntryPoint) -> Feature:
    package = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    where = f"feature {entry.name!r} of the package {package} ({entry.value}, entry point {_GROUP!r})"
    try:
        found = entry.load()
    except Exception as error:
        raise FeatureError(f"{where} cannot be imported: {error!r}") from error
    if not isinstance(found, Feature):
        raise FeatureError(f"{where} must be a dcp.server.core.feature.Feature, not {type(found).__name__}")
    found.package = package
    return found


@cache
def kinds() -> Mapping[str, Kind[Any]]:
    """Return the kinds of jobs of all features, by name. Raises FeatureError."""
    found = [(kind, feature) for feature in features(is_worker=True) for kind in feature.kinds]
    for kind, feature in found:
        if not isinstance(kind, Kind) or kind.scope not in get_args(Scope):
            raise FeatureError(
                f"{feature.label}: {kind!r} is not a job kind: pass an instance of a subclass of Kind with a "
                "scope"
            )
        kind.feature = feature.name
        if kind.button:
            _check_button(kind)
    _check_unique("kind of job", [(kind.name, feature) for kind, feature in found])
    return {kind.name: kind for kind, _ in sorted(found, key=lambda one: one[0].name)}


def _check_button(kind: Kind[Any]) -> None:
    try:
        kind.params(checkpoint_id=1)
    except ValueError as error:
        raise FeatureError(
            f"job kind {kind.name!r}: a button needs the parameter checkpoint_id, and defaults for all other "
            f"parameters: {error}"
        ) from None


@cache
def event_kinds() -> tuple[str, ...]:
    """Return all kinds of events: kinds of the catalog, then kinds of features. Raises FeatureError."""
    emitted = [(kind, one) for one in features(is_worker=True) for kind in one.events]
    core = Feature("core", __name__)
    _check_unique("kind of event", [*emitted, *((kind, core) for kind in CHECKPOINT_EVENTS)])
    return (*CHECKPOINT_EVENTS, *(kind for kind, _ in emitted))


def schedules(settings: Settings) -> Sequence[PeriodicWork]:
    """Return the periodic work of all features, and the clean-up of the core."""
    found = features(is_worker=True)
    work = [(work, feature) for feature in found for work in feature.periodic_work(settings)]
    _check_events(found)
    core = Feature("core", __name__)
    named = [*((one.name, feature) for one, feature in work), (CLEAN_UP.name, core)]
    _check_unique("consumer or schedule", named)
    return [*(one for one, _ in work), CLEAN_UP]


def _check_events(found: Sequence[Feature]) -> None:
    known = event_kinds()
    for feature in found:
        for consumer in feature.consumers:
            if missing := sorted((consumer.kinds or frozenset()) - set(known)):
                raise FeatureError(
                    f"{feature.label}: consumer {consumer.name!r}: no event has the kind {missing[0]!r}; "
                    f"kinds are {', '.join(sorted(known))}"
                )


def allowances(settings: Settings) -> Allowances:
    """Return the allowances of the feature that declares some, or of the settings. Raises FeatureError."""
    found = [one for one in features(is_worker=True) if one.allowances is not None]
    if len(found) > 1:
        raise FeatureError(
            f"features {', '.join(one.name for one in found)} all declare allowances: uninstall all but one"
        )
    return next((one.allowances for one in found if one.allowances is not None), Allowances)(settings)


def role_settings(settings: Settings) -> RoleSettings:
    """Return the roles from the settings of a feature. Raises FeatureError if several features have roles."""
    found = [one.roles(settings) for one in features(is_worker=True) if one.roles is not None]
    if len(found) > 1:
        raise FeatureError("several features define roles in their settings: uninstall all but one")
    return found[0] if found else NO_ROLES


def check_settings(settings: Settings) -> None:
    """Check the settings of features. Raises FeatureError for invalid values, and for unknown features."""
    known = {one.name: one for one in features() if one.settings is not None}
    for name in settings.features:
        if name not in known:
            raise FeatureError(f"settings features.{name}: unknown feature, or a feature without settings")
    for one in known.values():
        one.options(settings)


def _check_unique(what: str, given: Sequence[tuple[str, Feature]]) -> None:
    for name, count in Counter(name for name, _ in given).items():
        if count > 1:
            holders = " and ".join(dict.fromkeys(one.label for held, one in given if held == name))
            raise FeatureError(f"{count} features have a {what} {name!r}: {holders}; rename one of them")
