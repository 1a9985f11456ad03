"""Health, readiness, metrics and the caller: routes for load balancers, supervisors and monitoring."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from anyio import from_thread
from fastapi import APIRouter, Response
from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.feature import Feature
from dcp.server.core.http.dependencies import public
from dcp.server.core.http.metrics import CONTENT_TYPE, Monitoring
from dcp.server.core.http.readiness import OK, ReadinessDep
from dcp.server.core.http.routes import operation_id
from dcp.server.core.problems import ForbiddenError, UnauthorizedError
from dcp.server.core.security.keys import whoami
from dcp.server.core.security.principal import Principal
from dcp.server.records.administration import Whoami
from dcp.version import __version__

feature: Final = Feature("operations", __name__)

router = APIRouter(dependencies=[public], generate_unique_id_function=operation_id)
"""Routes outside of the API, without pages for browsers."""


class Health(Answer):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str = Field(description="Of dcphub.")


class Ready(Answer):
    """Readiness. `checks` maps each check to "ok" or its problem."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = Field(description="Result by check: ok, or the problem.")


class Welcome(Answer):
    """Paths of this service, to begin with."""

    service: Literal["dcphub"] = "dcphub"
    version: str
    api: str = Field(description="Path of the API.")
    docs: Annotated[str, Field(description="Interactive API documentation.")]
    openapi: str = Field(description="Path of the OpenAPI document.")
    ready: str = Field(description="Path of the readiness check.")


@router.get("/", tags=["health"])
async def get_welcome() -> Welcome:
    """Return the name of the service, and the paths of pages and API."""
    return Welcome(version=__version__, api="/api/v1", docs="/docs", openapi="/openapi.json", ready="/readyz")


@router.get("/healthz", tags=["health"])
async def get_health() -> Health:
    """Report a live process, without checking the database, so a database failure causes no restart."""
    return Health(version=__version__)


@router.get(
    "/readyz",
    tags=["health"],
    responses={503: {"model": Ready, "description": "Not ready; `checks` says why."}},
)
async def get_readiness(readiness: ReadinessDep, response: Response) -> Ready:
    """Report a readable and writable database with the schema of this version.

    Roots are not checked, because the catalog answers without them: see `/root-checks` of the API.
    """
    checks = await readiness.check()
    is_ready = all(found == OK for found in checks.values())
    if not is_ready:
        response.status_code = 503
        response.headers["Retry-After"] = "5"
    return Ready(status="ok" if is_ready else "unavailable", checks=checks)


_METRICS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


@router.get("/metrics", tags=["monitoring"], response_class=Response, responses=_METRICS)
def get_metrics(ask: AskDep, readiness: ReadinessDep) -> Response:
    """Return the metrics of all roots; requires a key for all roots."""
    if ask.settings.metrics_need_key:  # public to the walk over all routes, because a setting decides
        _check(getattr(ask.request.state, "principal", None))
    monitoring = cast(Monitoring, ask.request.app.state.monitoring)
    checks = from_thread.run(readiness.check_roots)
    roots = {name: found == OK for name, found in checks.items()}
    return Response(monitoring.text(roots), media_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})


def _check(principal: Principal | None) -> None:
    if principal is None:
        raise UnauthorizedError("send a key: Authorization: Bearer dcp_... (or set metrics_need_key=false)")
    if not principal.may_everywhere("read"):
        raise ForbiddenError("metrics need a key with the scope 'read' for all roots", scope="read")


@feature.get("/whoami", tag="keys", scope="any", errors=())
def get_whoami(ask: Ask) -> Whoami:
    """Return name, scopes and roots of the key. Without keys, every caller is `local` and has all rights."""
    return ask.find(whoami, ask.caller)
