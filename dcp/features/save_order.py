"""All features of a save, in their order."""

from __future__ import annotations

from dcp.features.digests import Digests
from dcp.features.parts import Parts
from dcp.features.saved_map import SavedMap
from dcp.saving.feature import SaveFeature

__all__ = ["SAVE_FEATURES"]

SAVE_FEATURES: list[type[SaveFeature]] = [SavedMap, Parts, Digests]
