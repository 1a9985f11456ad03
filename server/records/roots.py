"""Roots: where checkpoints are found."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from dcp.server.records.declaring import Shown

__all__ = ["Root"]


@dataclass(frozen=True, slots=True)
class Root:
    """A place where the service finds checkpoints; ``url`` is shown to admins only.

    ``lost`` checkpoints were not found by the last scan, and are kept as they were, because they are too many
    at once; ``last_scan`` is its report.
    """

    name: str
    description: str = ""
    url: Annotated[str | None, Shown("Where it is; only for keys with the scope admin.")] = None
    is_configured: Annotated[bool, Shown("False: the settings name it no more; its rows are kept.")] = True
    readonly: bool = False
    scan_every_seconds: Annotated[float | None, Shown("None: only on request.")] = None
    scanned_at: datetime | None = None
    scan_error: str | None = None
    lost: Annotated[
        int,
        Shown(
            "Checkpoints that the last scan did not find and kept as they were, because they are too many at "
            "once. If they are gone for good: a job scan with accept_lost.",
            may_be_absent=True,
        ),
    ] = 0
    last_scan: Annotated[
        Any,
        Shown(
            "What the last scan did that came to its end: found, opened, new, vanished, trouble, ...",
            may_be_absent=True,
        ),
    ] = None
