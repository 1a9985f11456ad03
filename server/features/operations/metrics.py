"""`GET /metrics`: for Prometheus, outside the API, with a key unless the settings say otherwise."""

from __future__ import annotations

from typing import cast

from anyio import from_thread
from fastapi import APIRouter, Request, Response

from dcp.server.core.http.dependencies import ServiceDep, public
from dcp.server.core.http.readiness import OK, ReadinessDep
from dcp.server.core.http.routers import operation_id
from dcp.server.core.monitoring import CONTENT_TYPE, Monitoring
from dcp.server.core.problems import ForbiddenError, UnauthorizedError
from dcp.server.core.security.principal import Principal

__all__ = ["router"]

router = APIRouter(tags=["monitoring"], generate_unique_id_function=operation_id)


# Public to the walk over all routes, because a setting decides: the check is the first thing it does.
@router.get(
    "/metrics",
    dependencies=[public],
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
)
def get_metrics(request: Request, service: ServiceDep, readiness: ReadinessDep) -> Response:
    """All metrics. They tell of all roots, so a key has to be for all of them."""
    if service.settings.metrics_need_key:
        _check(getattr(request.state, "principal", None))
    monitoring = cast(Monitoring, request.app.state.monitoring)
    checks = from_thread.run(readiness.check_roots)
    roots = {name: found == OK for name, found in checks.items()}
    return Response(monitoring.text(roots), media_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})


def _check(principal: Principal | None) -> None:
    if principal is None:
        raise UnauthorizedError("send a key: Authorization: Bearer dcp_... (or set metrics_need_key=false)")
    if not principal.may("read") or principal.roots is not None:
        raise ForbiddenError("metrics need a key with the scope 'read' for all roots", scope="read")
