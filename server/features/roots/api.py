"""``/roots``: where checkpoints are found. They come from the settings; nothing here changes them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from dcp.server.catalog.roots import RootRow, list_roots, root_row
from dcp.server.core.answers import problems
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Caller, ServiceDep, check_visible, requires
from dcp.server.core.http.readiness import OK, ReadinessDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.security.principal import Principal
from dcp.server.core.security.redaction import redact
from dcp.server.features.roots.answers import RootAnswer, RootCheck, RootCheckList, RootList

__all__ = ["RootName", "router"]

router = api_router(tags=["roots"])

RootName = Annotated[str, Path(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]


@router.get("/roots", dependencies=[requires("read")], name="list_roots")
def list_all(service: ServiceDep, caller: Caller) -> RootList:
    """All roots."""
    with service.database.read() as connection:
        rows = list_roots(connection, caller.roots)
    return RootList(items=[_answer(row, service, caller) for row in rows])


@router.get("/roots/{root}", dependencies=[requires("read")], responses=problems(404))
def get_root(root: RootName, service: ServiceDep, caller: Caller) -> RootAnswer:
    """One root."""
    check_visible(caller, root)
    with service.database.read() as connection:
        row = root_row(connection, root)
    return _answer(row, service, caller)


@router.get("/root-checks", dependencies=[requires("read")])
async def check_roots(readiness: ReadinessDep, caller: Caller) -> RootCheckList:
    """Whether the storage of each root answers: looked at now, or within the last two seconds."""
    found = await readiness.check_roots()
    return RootCheckList(
        items=[
            RootCheck(root=name, is_ok=result == OK, detail=None if result == OK else result)
            for name, result in sorted(found.items())
            if caller.may_see(name)
        ]
    )


def _answer(row: RootRow, service: Service, caller: Principal) -> RootAnswer:
    settings = service.settings.roots.get(row.name)
    return RootAnswer.of(
        row,
        description="" if settings is None else settings.description,
        url=redact(row.url) if caller.may("admin") else None,
        readonly=settings is None or settings.readonly,
        scan_every_seconds=(settings.scan_seconds or None) if settings is not None else None,
        scan_error=None if row.scan_error is None else redact(row.scan_error),
        last_scan=row.scan_state,
    )
