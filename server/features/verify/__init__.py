"""Verification: every byte compared with its checksum, by a job."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.verify.job import VerifyKind

__all__ = ["feature"]

feature: Final = Feature("verify", __name__, kinds=[VerifyKind()], web=["web"])
