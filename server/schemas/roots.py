"""Roots."""

from __future__ import annotations

from pydantic import Field

from dcp.server.schemas.common import Answer

__all__ = ["RootAnswer", "RootList"]


class RootAnswer(Answer):
    """A place where checkpoints are found."""

    name: str
    description: str
    url: str | None = Field(description="Where it is; only for keys with the scope admin.")
    is_configured: bool = Field(description="False: the settings name it no more; its rows are kept.")
    readonly: bool
    scan_every_seconds: float | None = Field(description="None: only when it is asked for.")
    scanned_at: str | None
    scan_error: str | None


class RootList(Answer):
    """All roots that the key may see, by name."""

    items: list[RootAnswer]
