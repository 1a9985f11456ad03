"""Conversion of errors to problem documents: service, framework, database and unexpected errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, cast

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dcp.server.catalog.errors import (
    CatalogError,
    ChangedError,
    InvalidQueryError,
    MissingError,
    ProtectedError,
    StateError,
)
from dcp.server.catalog.inputs import is_clean
from dcp.server.core.answers import PROBLEM_MEDIA_TYPE
from dcp.server.core.problems import (
    BadRequestError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    PreconditionFailedError,
    ProblemError,
    UnavailableError,
    UnprocessableError,
)
from dcp.server.core.roots import storage_problem
from dcp.server.core.security.principal import Principal
from dcp.server.database.engine import DatabaseUnavailableError
from dcp.storage.errors import CheckpointError

_MAX_ERRORS: Final = 20
_log = structlog.get_logger(__name__)


def install_handlers(app: FastAPI) -> None:
    """Install the error handlers of ``app``. The outermost middleware handles escaped errors."""
    of_routes = (ProblemError, RequestValidationError, HTTPException, CatalogError)
    for kind in (*of_routes, DatabaseUnavailableError, CheckpointError, OSError):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    # the framework names only the methods of the first route
    is_method = isinstance(error, HTTPException) and error.status_code == 405
    problem = method_problem(request.scope) if is_method else problem_of(error)
    return problem_response(_of_role(problem, request), request.scope)


def _of_role(problem: ProblemError, request: Request) -> ProblemError:
    """Add to a not-found error that the role may lack the scope in the root."""
    caller = getattr(request.state, "principal", None)
    is_narrow = isinstance(caller, Principal) and caller.rights is not None and caller.roots is not None
    if isinstance(problem, NotFoundError) and is_narrow:
        problem.detail += "; or your role does not allow this operation in its root"
    return problem


def method_problem(scope: Any) -> ProblemError:
    """Return the 405 problem with the allowed methods of the path."""
    allowed = scope["app"].state.paths.methods(scope["path"])
    return problem_of(HTTPException(405, headers={"Allow": ", ".join(sorted(allowed))}))


def problem_of(error: Exception) -> ProblemError:
    """Return the problem document for ``error``."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_problem(error)
    if isinstance(error, HTTPException):
        return _http_problem(error)
    if isinstance(error, CatalogError):
        return _catalog_problem(error)
    if isinstance(error, DatabaseUnavailableError):
        _log.warning("database unavailable", error=str(error))
        return UnavailableError("the database is unreachable, full or locked; retry later")
    if isinstance(error, CheckpointError | OSError):
        _log.warning("storage failed", error=repr(error))
        return storage_problem(error)
    return ProblemError("internal error; find the request id in the log of the service")


def _catalog_problem(error: CatalogError) -> ProblemError:
    detail = str(error)
    if isinstance(error, MissingError):
        return NotFoundError(detail)
    if isinstance(error, ChangedError):
        return PreconditionFailedError(detail)
    if isinstance(error, StateError):
        return ConflictError(detail, state=error.state)
    if isinstance(error, ProtectedError):
        return ForbiddenError(detail, scope="admin")
    if isinstance(error, InvalidQueryError):
        found = {"location": [error.field], "message": _shown(detail)}
        return UnprocessableError(_shown(detail), errors=[found])
    return UnprocessableError(_shown(detail))


def problem_response(problem: ProblemError, scope: Any) -> Response:
    """Return the answer: a document, or for a browser the page made by ``app.state.problem_page``."""
    as_page = getattr(getattr(scope.get("app"), "state", None), "problem_page", None)
    if as_page is not None and wants_page(scope):
        return cast(Response, as_page(problem, scope))
    path = str(scope.get("path", ""))
    body = problem.document(path if is_clean(path) else None)
    request_id = scope.get("state", {}).get("request_id")
    if request_id is not None:
        body["request_id"] = request_id
    return JSONResponse(body, problem.status, problem.headers, PROBLEM_MEDIA_TYPE)


def wants_page(scope: Any) -> bool:
    """Return True if a browser requests a page: HTML by name, while programs accept anything."""
    return not scope["path"].startswith("/api/") and "text/html" in Headers(scope=scope).get("accept", "")


def _validation_problem(error: RequestValidationError) -> ProblemError:
    errors = error.errors()
    found = [
        {"location": [_place(part) for part in item["loc"]], "message": str(item["msg"])}
        for item in errors[:_MAX_ERRORS]
    ]
    where = ".".join(str(part) for part in found[0]["location"])
    detail = f"{where}: {found[0]['message']}"
    if any(item["type"] == "json_invalid" for item in errors):
        return BadRequestError(f"the body is not JSON ({detail})")
    if len(errors) > 1:
        detail += f" (and {len(errors) - 1} more)"
    return UnprocessableError(_shown(detail), errors=found)


def _place(part: Any) -> str | int:
    return part if isinstance(part, int) else _shown(str(part))


def _shown(text: str) -> str:
    # member names come from the client; a lone surrogate cannot be encoded
    return text[:500].encode("utf-8", "replace").decode()


class _FrameworkProblem(ProblemError):
    def __init__(self, error: HTTPException) -> None:
        phrase = HTTPStatus(error.status_code).phrase
        super().__init__(str(error.detail or phrase), headers=error.headers)
        self._values = {
            "type": f"/problems/{phrase.lower().replace(' ', '-')}",
            "title": phrase,
            "status": error.status_code,
        }

    def document(self, instance: str | None = None) -> dict[str, Any]:
        return super().document(instance) | self._values


def _http_problem(error: HTTPException) -> ProblemError:
    if error.status_code == 400:
        return BadRequestError(str(error.detail))
    if error.status_code == 404:
        return NotFoundError("no page or resource at this path")
    problem = _FrameworkProblem(error)
    problem.status = error.status_code  # type: ignore[misc]
    return problem
