"""Roots: configured locations of checkpoints. Only the settings change roots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from anyio import from_thread
from fastapi import Path

from dcp.server.catalog.runs import RootRow, root_row
from dcp.server.catalog.runs import list_roots as rows_of_roots
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.http.dependencies import check_visible
from dcp.server.core.http.readiness import OK, ReadinessDep
from dcp.server.core.logs import redact
from dcp.server.features.scan import ScanKind, ScanParams
from dcp.server.records.checkpoints import Root
from dcp.server.records.declaring import Shown, moment
from dcp.server.records.lists import Items

feature: Final = Feature("roots", __name__)

RootName = Annotated[
    str,
    Path(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Name of the root."),
]


@dataclass(frozen=True, slots=True)
class RootCheck:
    """State of a root's storage: reachable, and identical to the known location."""

    root: str
    is_ok: Annotated[bool, Shown("The storage is reachable and is the known one.")]
    detail: Annotated[str | None, Shown("Problem, or null.")]


@feature.page("/roots", "roots.html", tag="roots", errors=(), panels="root")
def list_roots(ask: Ask) -> Items[Root]:
    """List visible roots by name, with their last scans."""
    return Items(tuple(roots_of(ask)))


@feature.get("/roots/{root}", tag="roots")
def get_root(root: RootName, ask: Ask) -> Root:
    """Return a root."""
    check_visible(ask.caller, root)
    return next(_shown([ask.find(root_row, root)], ask))


@feature.get("/root-checks", tag="roots", errors=())
def check_roots(readiness: ReadinessDep, ask: Ask) -> Items[RootCheck]:
    """Check the storage of each root, at most two seconds ago."""
    found = sorted(from_thread.run(readiness.check_roots).items())
    return Items(
        tuple(
            RootCheck(root, result == OK, None if result == OK else result)
            for root, result in found
            if ask.caller.may_see(root)
        )
    )


@feature.form("/roots/{root}/scan", scope="write")
def scan_form(root: RootName, ask: Ask) -> str:
    """Scan the root now."""
    return f"/jobs/{ask.submit(ScanKind, ScanParams(root=root)).id}"


def roots_of(ask: Ask) -> Iterator[Root]:
    """Yield the visible roots by name."""
    return _shown(ask.find(rows_of_roots, ask.visible), ask)


def writable_roots(ask: Ask) -> list[Root]:
    """Return visible roots that jobs may write to."""
    return [root for root in roots_of(ask) if root.is_configured and not root.readonly]


def _shown(rows: Iterable[RootRow], ask: Ask) -> Iterator[Root]:
    for row in rows:
        settings = ask.settings.roots.get(row.name)
        yield Root(
            row.name,
            description="" if settings is None else settings.description,
            url=redact(row.url) if ask.caller.may("admin", row.name) else None,
            is_configured=row.is_configured,
            readonly=settings is None or settings.readonly,
            scan_every_seconds=None if settings is None else settings.scan_seconds or None,
            scanned_at=None if row.scanned_seconds is None else moment(row.scanned_seconds),
            scan_error=None if row.scan_error is None else redact(row.scan_error),
            lost=row.lost,
            last_scan=row.scan_state,
        )
