"""How a scan is asked for: by a user, by the clock, or by a job that has changed what is to be found."""

from __future__ import annotations

import hashlib

from dcp.server.core.jobs.ledger.states import JobSpec

__all__ = ["scan_spec"]


def scan_spec(
    root: str, below: str = "", *, created_by: str, priority: int = 0, accept_lost: int = 0
) -> JobSpec:
    """A scan; there is one of a place at a time, however many ask for it."""
    place = f"{root}/{below}\0{accept_lost}" if accept_lost else f"{root}/{below}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:40]
    return JobSpec(
        kind="scan",
        params={"root": root, "below": below, "accept_lost": accept_lost},
        created_by=created_by,
        priority=priority,
        root=root,
        dedup_key=f"scan:{digest}",
    )
