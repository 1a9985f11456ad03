"""All features in order: built-in ones, then added ones.

Features are added by `register_feature`, or by the entry point group `dcphub.features` of an installed
package. All ranks must have the same features; the first step of a save or load compares their names.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, TypeVar

from dcp.calls.features import Feature
from dcp.features.digests import Digests
from dcp.features.entries import LegacyKeys, OpenedTuples, Renames, Strictness, Subclasses, TrustedValues
from dcp.features.foreign_values import ForeignValues
from dcp.features.memory import MetaTensors, SharedMemory
from dcp.features.parts import Parts
from dcp.features.per_rank import PerRankValues
from dcp.features.saved_map import SavedMap
from dcp.features.stateful import StatefulObjects
from dcp.features.weight_map import LoadedMap
from dcp.loading.feature import LoadFeature
from dcp.saving.feature import SaveFeature
from dcp.storage.errors import OptionError
from dcp.storage.extensions import extension_names, loaded_extension

__all__ = [
    "GROUP",
    "LOAD_FEATURES",
    "SAVE_FEATURES",
    "LoadFeature",
    "SaveFeature",
    "features_of",
    "register_feature",
]

logger = logging.getLogger(__name__)

GROUP: Final = "dcphub.features"

_CLOSE: Final = 0.8
"""Similarity from which a method name counts as misspelt."""

SAVE_FEATURES: list[type[SaveFeature]] = [ForeignValues, SavedMap, Parts, Digests]

LOAD_FEATURES: list[type[LoadFeature]] = [
    LoadedMap,
    StatefulObjects,
    MetaTensors,
    LegacyKeys,
    Renames,
    TrustedValues,
    SharedMemory,
    Subclasses,
    PerRankValues,
    OpenedTuples,
    Strictness,
]

_registered: list[type[SaveFeature] | type[LoadFeature]] = []

F = TypeVar("F", SaveFeature, LoadFeature)


def register_feature(feature: type[SaveFeature] | type[LoadFeature]) -> None:
    """Use ``feature`` in all saves or loads of this process. OptionError for objects that are not
    features."""
    _registered.append(_checked(feature))


def features_of(base: type[F]) -> list[type[F]]:
    """List the features derived from ``base``: built-in, installed (by name), registered; each once.
    OptionError for duplicate names."""
    every = dict.fromkeys((*SAVE_FEATURES, *LOAD_FEATURES, *_installed(), *_registered))
    found: dict[str, type[F]] = {}
    for feature in every:
        if issubclass(feature, base):
            other = found.setdefault(feature.name, feature)
            if other is not feature:
                one, two = (f"{each.__module__}.{each.__qualname__}" for each in (other, feature))
                raise OptionError(f"two features have the name {feature.name!r}: {one} and {two}; rename one")
    return list(found.values())


@cache
def _installed() -> tuple[type[SaveFeature] | type[LoadFeature], ...]:
    return tuple(_checked(loaded_extension(GROUP, name)) for name in extension_names(GROUP))


def _checked(feature: Any) -> type[SaveFeature] | type[LoadFeature]:
    if not (isinstance(feature, type) and issubclass(feature, SaveFeature | LoadFeature)) or not (
        isinstance(feature.name, str) and feature.name
    ):
        raise OptionError(
            f"{feature!r} is not a feature: derive a class from dcp.saving.feature.SaveFeature or "
            "dcp.loading.feature.LoadFeature, with a name"
        )
    base = SaveFeature if issubclass(feature, SaveFeature) else LoadFeature
    for method in vars(feature).keys() - vars(base).keys() - vars(Feature).keys():
        near = get_close_matches(method, vars(base), n=1, cutoff=_CLOSE)
        if near and callable(getattr(feature, method)) and not method.startswith("_"):
            logger.warning("feature %r: no step calls %s(). Did you mean %r?", feature.name, method, near[0])
    return feature
