"""Only the methods that a path has."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.core.http.handlers import method_problem, problem_response

__all__ = ["MethodMiddleware"]


class MethodMiddleware:
    """Answers 405 where the framework would take a path that is spelled out for a value of another one's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["app"].state.paths.is_refused(scope["method"], scope["path"]):
            await problem_response(method_problem(scope), scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)
