"""Rows of a catalog for pages: many checkpoints at once, findings, failed scans, audit entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import update

from dcp.inspection.checkpoints import open_index
from dcp.server.catalog import audit
from dcp.server.catalog.changes import upsert_checkpoints
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.structures import StructureFacts, Tensor
from dcp.server.core.http.routes import walk_routes
from dcp.server.core.security.principal import ALL_SCOPES, Principal
from dcp.server.database.tables import sessions
from dcp.server.features.lineage import add_lineage
from dcp.server.features.scan.reading import Registration, observe
from dcp.server.features.scan.scanner import scan_root
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats.native.manifest import encode_manifest
from tests.support.app import App
from tests.support.catalog_rows import T0

__all__ = [
    "add_steps",
    "derive",
    "end_sessions",
    "note",
    "posted_paths",
    "registered",
    "scan",
    "set_provenance",
    "structure_of",
]


def structure_of(names: Sequence[str], *, shape: tuple[int, ...] = (4,), size: int = 16) -> StructureFacts:
    """Return the structure of tensors with these names."""
    return StructureFacts.of([Tensor(name, "tensor", "float32", shape, size) for name in names])


def add_steps(app: App, run: str, steps: Sequence[int], **facts: Any) -> list[int]:
    """Insert steps of a run and return their ids. The step is also the size; with ``mixed``, even steps are
    torch checkpoints."""
    is_mixed, loss = facts.pop("mixed", False), facts.pop("loss", False)
    rows = [
        CheckpointFacts(
            root="main",
            key=f"{run}-{step}",
            format="torch_dcp" if is_mixed and not step % 2 else "dcp",
            observed_seconds=T0,
            committed_seconds=T0 + step,
            step=step,
            save_id=f"s{step}",
            fingerprint=f"f{step}",
            bytes=step,
            metrics={"loss": 1.0 / step} if loss else {},
            **facts,
        )
        for step in steps
    ]
    found: list[int] = []
    for begin in range(0, len(rows), 1000):
        some = rows[begin : begin + 1000]
        found += app.service.database.transact(
            lambda connection, some=some: [one.id for one in upsert_checkpoints(connection, some, now=T0)]
        )
    return found


def derive(app: App, child: int, *parents: int, **options: Any) -> None:
    """Record the parents of a checkpoint."""
    with app.service.database.write() as connection:
        for parent in parents:
            add_lineage(connection, child, parent, **options)


def end_sessions(app: App) -> None:
    """Expire all sessions."""
    with app.service.database.write() as connection:
        connection.execute(update(sessions).values(expires_seconds=app.service.clock() - 1))


def note(app: App, actor: str, action: str, target: str, detail: dict[str, Any], **options: Any) -> None:
    """Write an entry of the audit log."""
    with app.service.database.write() as connection:
        audit.record(connection, actor, action, target, detail, **options)


def scan(app: App, root: str = "main") -> None:
    """Scan a root, to update the catalog."""
    scan_root(app.service.database, app.service.roots, root)


def registered(app: App, key: str) -> int:
    """Register a checkpoint and return its id."""
    of = Registration(root="main", key=key)
    database = app.service.database
    caller, allowances = Principal("test", ALL_SCOPES), app.service.allowances
    write = observe(database, app.service.roots, of, caller=caller, allowances=allowances)
    found = database.transact(write)
    assert found.id is not None
    return int(found.id)


def posted_paths(app: App) -> set[str]:
    """Return the paths of all routes with forms that change data."""
    routes = [route for route in walk_routes(app.app) if "POST" in (getattr(route, "methods", None) or ())]
    return {str(route.path) for route in routes if not str(route.path).startswith("/api")}


def set_provenance(folder: Path, provenance: dict[str, Any]) -> None:
    """Write a provenance into a saved checkpoint."""
    index = replace(open_index(folder), provenance=provenance)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(index))
