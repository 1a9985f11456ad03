"""Whether the service lives, and whether it is ready: for load balancers, supervisors and monitoring."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.http.dependencies import public
from dcp.server.core.http.readiness import OK, ReadinessDep
from dcp.server.core.http.routers import operation_id
from dcp.version import __version__

__all__ = ["router"]

router = APIRouter(tags=["health"], dependencies=[public], generate_unique_id_function=operation_id)
"""For those who are shown no pages."""


class Health(Answer):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str = Field(description="Of dcphub.")


class Ready(Answer):
    """`checks` names what is looked at, and "ok" or what is wrong."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str]


class Welcome(Answer):
    """Where to go from here: paths of this service."""

    service: Literal["dcphub"] = "dcphub"
    version: str
    api: str
    docs: str = Field(description="Pages about the API, to try it.")
    openapi: str
    ready: str


@router.get("/")
async def get_welcome() -> Welcome:
    """What this is, and where its pages and its API are."""
    return Welcome(version=__version__, api="/api/v1", docs="/docs", openapi="/openapi.json", ready="/readyz")


@router.get("/healthz")
async def get_health() -> Health:
    """The process lives. Looks at nothing else, so that no restart follows from a database's."""
    return Health(version=__version__)


@router.get("/readyz", responses={503: {"model": Ready, "description": "Not ready; `checks` says why."}})
async def get_readiness(readiness: ReadinessDep, response: Response) -> Ready:
    """The database can be read and written and has the schema of this version.

    Roots are not looked at, since the catalog of all others answers while one is away: see `/root-checks` of
    the API.
    """
    checks = await readiness.check()
    is_ready = all(found == OK for found in checks.values())
    if not is_ready:
        response.status_code = 503
        response.headers["Retry-After"] = "5"
    return Ready(status="ok" if is_ready else "unavailable", checks=checks)
