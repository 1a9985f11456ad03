"""Jobs for conversions and merges of checkpoints."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.convert.conversion import ConvertKind
from dcp.server.features.convert.merge import MergeKind

__all__ = ["feature"]

feature: Final = Feature("convert", __name__, kinds=[ConvertKind(), MergeKind()], web=["convert_forms"])
