"""Handover: checkpoints registered by reference in MLflow and Weights & Biases; no bytes are copied."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.handover.destinations import HandoverSettings
from dcp.server.features.handover.handing import HandoverKind

__all__ = ["feature"]

feature: Final = Feature(
    "handover",
    __name__,
    kinds=[HandoverKind()],
    settings=HandoverSettings,
    web=["handover_pages"],
    work=["triggers"],
)
