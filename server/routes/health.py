"""Whether the service lives, and whether it is ready: for load balancers, supervisors and monitoring."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from dcp.server.database.engine import DatabaseUnavailableError
from dcp.server.dependencies import ServiceDep, public
from dcp.server.schemas.common import Answer
from dcp.server.startup import Readiness
from dcp.version import __version__

__all__ = ["router"]

router = APIRouter(tags=["health"], dependencies=[public])


class Health(Answer):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str = Field(description="Of dcphub.")


class Ready(Answer):
    """`checks` names what is looked at, and "ok" or what is wrong."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str]


async def _readiness(request: Request) -> Readiness:
    readiness: Readiness = request.app.state.readiness
    return readiness


@router.get("/healthz")
async def get_health() -> Health:
    """The process lives. Looks at nothing else, so that no restart follows from a database's."""
    return Health(version=__version__)


@router.get("/readyz", responses={503: {"model": Ready, "description": "Not ready; `checks` says why."}})
def get_readiness(
    service: ServiceDep, readiness: Annotated[Readiness, Depends(_readiness)], response: Response
) -> Ready:
    """The database can be read and written and has the schema of this version."""
    try:
        service.database.ping()
        problem = readiness.prepare(service)
    except DatabaseUnavailableError:
        problem = "unavailable"
    if problem is not None:
        response.status_code = 503
        response.headers["Retry-After"] = "5"
    return Ready(status="ok" if problem is None else "unavailable", checks={"database": problem or "ok"})
