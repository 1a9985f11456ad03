"""The OpenAPI document, and pages that show it without a request to another host."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any, Final

import fastapi_offline
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from dcp.server.core.answers import Problem, problems
from dcp.server.core.http.dependencies import Public, Requires, public
from dcp.server.core.http.routers import access_of, walk_routes
from dcp.server.core.problems import NotFoundError

__all__ = ["OPENAPI_PATH", "install", "router"]

OPENAPI_PATH: Final = "/openapi.json"
_STATIC: Final = Path(fastapi_offline.__file__).parent / "static"
_TYPES: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "redoc.standalone.js": "text/javascript",
    "favicon.png": "image/png",
}
_SCRIPT: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_ALWAYS: Final = (400, 401, 403, 408, 413, 415, 421, 429, 500, 503)

router = APIRouter(dependencies=[public], include_in_schema=False)


@router.get(OPENAPI_PATH)
async def get_openapi_document(request: Request) -> JSONResponse:
    """The description of the interface."""
    return JSONResponse(request.app.openapi())


@router.get("/docs")
async def get_docs() -> HTMLResponse:
    """The interface, to try it."""
    page = get_swagger_ui_html(
        openapi_url=OPENAPI_PATH,
        title="dcphub",
        swagger_js_url="/docs/static/swagger-ui-bundle.js",
        swagger_css_url="/docs/static/swagger-ui.css",
        swagger_favicon_url="/docs/static/favicon.png",
    )
    return _guarded(page)


@router.get("/redoc")
async def get_redoc() -> HTMLResponse:
    """The interface, to read it."""
    page = get_redoc_html(
        openapi_url=OPENAPI_PATH,
        title="dcphub",
        redoc_js_url="/docs/static/redoc.standalone.js",
        redoc_favicon_url="/docs/static/favicon.png",
        with_google_fonts=False,
    )
    return _guarded(page)


@router.get("/docs/static/{name}")
async def get_docs_file(name: str) -> FileResponse:
    """Scripts and styles of these pages."""
    if name not in _TYPES:
        raise NotFoundError("there is nothing at this path")
    return FileResponse(
        _STATIC / name, media_type=_TYPES[name], headers={"Cache-Control": "public, max-age=86400"}
    )


def _guarded(page: HTMLResponse) -> HTMLResponse:
    # inline scripts by their hash, so that what is smuggled into the page still does not run
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
        for script in _SCRIPT.findall(bytes(page.body))
    )
    page.headers["Content-Security-Policy"] = (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; worker-src blob:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return page


def install(app: FastAPI) -> None:
    """Let ``app.openapi()`` say who may and how a request can fail, which is the same nearly everywhere."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "An API key: dcp_..."}
    }
    for route in walk_routes(app):
        if not getattr(route, "include_in_schema", True):
            continue  # a page, which may have the path of an operation that others may use
        for method in getattr(route, "methods", None) or ():
            operation = (
                document["paths"].get(getattr(route, "path_format", route.path), {}).get(method.lower())
            )
            if operation is not None:
                _complete(operation, access_of(route))
    return document


def _complete(operation: dict[str, Any], access: Requires | Public | None) -> None:
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    statuses = list(_ALWAYS)
    if isinstance(access, Requires):
        operation["security"] = [{"key": []}]
        operation["x-required-scope"] = access.scope
    if "requestBody" in operation or operation.get("parameters"):
        statuses.append(422)
    for status, answer in problems(*statuses).items():
        responses.setdefault(str(status), answer)
