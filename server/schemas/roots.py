"""Roots."""

from __future__ import annotations

from typing import Any

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
    lost: int = Field(
        default=0,
        description="Checkpoints that the last scan did not find and kept as they were, because they are too "
        "many at once. If they are gone for good: a job scan with accept_lost.",
    )
    last_scan: Any = Field(
        default=None,
        description="What the last scan did that came to its end: found, opened, new, vanished, trouble, ...",
    )


class RootList(Answer):
    """All roots that the key may see, by name."""

    items: list[RootAnswer]
