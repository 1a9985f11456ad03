"""Routes: prefixes, names, access, methods, threads for large bodies, and the OpenAPI document.

The documentation pages load nothing from other hosts.

Routers carry their full prefix, and `dcp.server.app` takes their routes unchanged: FastAPI's
``include_router`` would duplicate each route and search routers twice per request.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

import fastapi_offline
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.core.answers import Problem, problems
from dcp.server.core.http.dependencies import Public, Requires, public
from dcp.server.core.http.handlers import method_problem, problem_response
from dcp.server.core.problems import NotFoundError, TooManyRequestsError
from dcp.server.core.security.principal import Principal

API: Final = "/api/v1"


def operation_id(route: APIRoute) -> str:
    """Return the unique name of the function (`check_routes`)."""
    return route.name


def api_router(
    prefix: str = "", *, tags: Sequence[str | Enum] = (), dependencies: Sequence[Any] = ()
) -> APIRouter:
    """Return a router below `API` and ``prefix``."""
    return APIRouter(
        prefix=API + prefix,
        tags=[*tags],
        dependencies=dependencies,
        generate_unique_id_function=operation_id,
        route_class=LargeBodyRoute,
    )


def walk_routes(app: FastAPI) -> Iterator[RouteContext]:
    """Yield all routes, including nested routers."""
    yield from iter_route_contexts(app.routes)


def access_of(route: RouteContext) -> Requires | Public | None:
    """Return the declared access of the route; None without exactly one declaration."""
    dependant = getattr(route, "dependant", None)
    found = [
        dependency.call
        for dependency in getattr(dependant, "dependencies", ())
        if isinstance(dependency.call, Requires | Public)
    ]
    return found[0] if len(found) == 1 else None


def check_routes(app: FastAPI) -> None:
    """Raise ValueError for a route without declared access or with a duplicate name."""
    names: set[str] = set()
    for route in walk_routes(app):
        if access_of(route) is None:
            raise ValueError(
                f'{route.path}: pass dependencies=[requires("read")], another scope, or [public]'
            )
        name = str(getattr(route, "name", ""))
        if name in names:
            raise ValueError(f"{route.path}: another route has the function name and operation id {name}")
        names.add(name)


class Paths:
    """The paths of all ``routes``. Of several matching templates the most literal one applies.

    The framework would fall back to another template if the method is missing, and treat a literal part as a
    value: the resource would depend on the method.
    """

    def __init__(self, routes: Iterable[RouteContext]) -> None:
        self._methods: Final[defaultdict[str, set[str]]] = defaultdict(set)
        for route in routes:
            self._methods[str(route.path)] |= route.methods or set()
        self._patterns: Final = {template: compile_path(template)[0] for template in self._methods}
        self._spelled: Final = [
            pattern
            for template, pattern in self._patterns.items()
            if any(self._spells_more(template, other) for other in self._patterns)
        ]

    def methods(self, path: str) -> frozenset[str]:
        """Return the methods of ``path``; empty for an unknown path."""
        fit = [template for template, pattern in self._patterns.items() if pattern.fullmatch(path)]
        own = [template for template in fit if not any(self._spells_more(other, template) for other in fit)]
        return frozenset().union(*(self._methods[template] for template in own))

    def is_refused(self, method: str, path: str) -> bool:
        """Return True if the framework would match ``path`` with another template because ``method`` is
        missing."""
        return any(pattern.fullmatch(path) for pattern in self._spelled) and method not in self.methods(path)

    def _spells_more(self, template: str, other: str) -> bool:
        # a template such as "/a/{b}" matches "/a/{c}" and "/{d}/{e}"
        return bool(self._patterns[other].fullmatch(template)) and not self._patterns[template].fullmatch(
            other
        )


class MethodMiddleware:
    """Answers 405 instead of matching a literal path as a value of another template."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the method (ASGI)."""
        if scope["type"] == "http" and scope["app"].state.paths.is_refused(scope["method"], scope["path"]):
            await problem_response(method_problem(scope), scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)


_LARGE_BYTES: Final = 256 << 10
_OF_KEY: Final = 2
_THREADS: Final = 4
_RETRY_SECONDS: Final = 5

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LargeBodies:
    """Threads for large bodies, with the number of requests of each account; for one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dcp-large-body")
        self._of: Counter[str] = Counter()

    async def handle(self, request: Request, handler: Handler) -> Response:
        """Handle the request in a thread. Raises TooManyRequestsError above the limit of the account."""
        principal = getattr(request.state, "principal", None)
        who = principal.owner if isinstance(principal, Principal) else ""
        if self._of[who] >= _OF_KEY:
            raise TooManyRequestsError(
                f"{_OF_KEY} large bodies of this account are being read, the maximum; retry later",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )
        self._of[who] += 1
        context = contextvars.copy_context()
        done = self._pool.submit(context.run, lambda: asyncio.run(handler(request)))
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: _call(loop, self._leave, who))
        return await asyncio.wrap_future(done)

    def _leave(self, who: str) -> None:
        self._of[who] -= 1
        if not self._of[who]:
            del self._of[who]


def _call(loop: asyncio.AbstractEventLoop, act: Callable[[str], None], who: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(act, who)


class LargeBodyRoute(APIRoute):
    """A route whose large bodies run in the `LargeBodies` of ``app.state.large_bodies``."""

    def get_route_handler(self) -> Handler:
        """Return the handler of FastAPI, which reads and validates the body, in a thread for large bodies."""
        handler: Handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            if len(await request.body()) < _LARGE_BYTES:
                return await handler(request)
            bodies: LargeBodies = request.app.state.large_bodies
            return await bodies.handle(request, handler)

        return handle


# -- the OpenAPI document ------------------------------------------------------------------------------------


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
async def get_openapi_document(request: Request) -> Response:
    """Return the OpenAPI document; it is kept as bytes, which take less memory than its objects."""
    kept = request.app.state
    if not hasattr(kept, "openapi"):
        kept.openapi = bytes(JSONResponse(request.app.openapi()).body)
    return Response(kept.openapi, media_type="application/json")


@router.get("/docs")
async def get_docs() -> HTMLResponse:
    """Return the interactive documentation."""
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
    """Return the documentation for reading."""
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
    """Return a script or style of the documentation pages."""
    if name not in _TYPES:
        raise NotFoundError("no page or resource at this path")
    return FileResponse(
        _STATIC / name, media_type=_TYPES[name], headers={"Cache-Control": "public, max-age=86400"}
    )


def _guarded(page: HTMLResponse) -> HTMLResponse:
    # inline scripts by hash, so injected scripts do not run
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


def install_documentation(app: FastAPI) -> None:
    """Extend ``app.openapi()`` with access and common errors."""

    app.openapi = partial(_document, app)  # type: ignore[method-assign]


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
            continue  # a page, which may share the path with an operation
        for method in getattr(route, "methods", None) or ():
            operation = (
                document["paths"].get(getattr(route, "path_format", route.path), {}).get(method.lower())
            )
            if operation is not None:
                _complete(operation, access_of(route))
    return document


def _complete(operation: dict[str, Any], access: Requires | Public | None) -> None:
    for parameter in operation.get("parameters", ()):
        kind = parameter["name"].removesuffix("_id").replace("_", " ")
        if parameter["in"] == "path" and parameter["name"].endswith("_id"):
            parameter.setdefault("description", f"The `id` of the {kind}.")
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    statuses = list(_ALWAYS)
    if isinstance(access, Requires):
        operation["security"] = [{"key": []}]
        if access.scope is not None:
            operation["x-required-scope"] = access.scope
    if "requestBody" in operation or operation.get("parameters"):
        statuses.append(422)
    for status, answer in problems(*statuses).items():
        responses.setdefault(str(status), answer)
