"""All features, in their order: those of this package, and those that were added.

These come by `register_feature`, or from a package whose metadata names them: the entry point group
`dcphub.features`. All ranks must have the same; the first step of a save compares their names.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from dcp.features.digests import Digests
from dcp.features.foreign_values import ForeignValues
from dcp.features.parts import Parts
from dcp.features.saved_map import SavedMap
from dcp.saving.feature import SaveFeature
from dcp.storage.errors import OptionError
from dcp.storage.extensions import extension_names, loaded_extension

__all__ = ["GROUP", "SAVE_FEATURES", "register_feature", "save_features"]

GROUP: Final = "dcphub.features"

SAVE_FEATURES: list[type[SaveFeature]] = [ForeignValues, SavedMap, Parts, Digests]

_registered: list[type[SaveFeature]] = []


def register_feature(feature: type[SaveFeature]) -> None:
    """Use ``feature`` in all saves of this process; OptionError for what is no feature."""
    _registered.append(_checked(feature))


def save_features() -> list[type[SaveFeature]]:
    """List the features of a save: this package's, those of installed packages by name, those registered;
    each once. OptionError for two of one name."""
    found: dict[str, type[SaveFeature]] = {}
    for feature in (*SAVE_FEATURES, *_installed(), *_registered):
        if found.setdefault(feature.name, feature) is not feature:
            raise OptionError(f"two features are called {feature.name!r}: give each a name of its own")
    return [*found.values()]


@cache
def _installed() -> tuple[type[SaveFeature], ...]:
    return tuple(_checked(loaded_extension(GROUP, name)) for name in extension_names(GROUP))


def _checked(feature: Any) -> type[SaveFeature]:
    if not (isinstance(feature, type) and issubclass(feature, SaveFeature)) or not (
        isinstance(feature.name, str) and feature.name
    ):
        raise OptionError(
            f"{feature!r} is no feature: derive a class from dcp.saving.feature.SaveFeature, with a name"
        )
    return feature
