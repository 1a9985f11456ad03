"""Errors as pages: what went wrong, and what to do. Who is not signed in is sent to where that is done."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from dcp.server.core.pages.rendering import page
from dcp.server.core.problems import ProblemError

__all__ = ["MovedError", "problem_page"]

_ADVICE: Final = {
    401: "Sign in with an API key.",
    403: "An administrator can create a key with the scope: dcp keys create NAME --scope SCOPE.",
    404: "It may have been renamed, or your key may not see its root.",
    409: "Its state has changed. Reload its page.",
    410: "The page of the checkpoint still has its entry in the catalog.",
    412: "It was changed in the meantime. Reload its page.",
    429: "Wait a moment.",
    500: "See the log of the service for the id of the request.",
    503: "The page reloads in a moment.",
}

_MAX_FIELDS: Final = 50
_MAX_NAME: Final = 128
_UNSEEN: Final = frozenset(
    {"etag", "alias_etag", "prefix", "fqn", "next", "cursor", "done", "remove", "pinned"}
)
_LABELS: Final = {
    "target_root": "Target root",
    "target_key": "Target key",
    "dtype": "Cast to",
    "map": "Weight map",
    "inverse": "Reverse mapping (true or empty)",
    "below": "Prefix of the map's model",
    "drop_objects": "Drop values that the format cannot hold (true or empty)",
    "exclude": "Exclude",
    "leave_out": "Exclude",
    "formula": "Or a formula",
    "last": "Number of steps",
    "decay": "Decay",
    "keep_last": "Newest",
    "keep_every": "Every N steps",
    "keep_days": "Younger than days",
}

_BELOW: Final = re.compile(r"(/(checkpoint|job|run)s/[1-9][0-9]{0,17})/.")
"""The path of what is below the page of something, and of forms that change it."""


class MovedError(ProblemError):
    """Not an error: the page is at another address."""

    status, slug, title = 303, "see-other", "See other"

    def __init__(self, url: str) -> None:
        super().__init__("it is at another address", headers={"Location": url})


def problem_page(problem: ProblemError, scope: Any) -> Response:
    """The page of a problem."""
    request = Request(scope)
    if problem.status == MovedError.status:
        return RedirectResponse(problem.headers["Location"], problem.status)
    if problem.status == 401 and request.method == "GET":
        return _to_sign_in(request)
    answer = page(
        request,
        "problem.html",
        problem.status,
        problem=problem.document(),
        advice=_ADVICE.get(problem.status, ""),
        **_above(request, problem),
        sent=_sent(request, problem),
        request_id=scope.get("state", {}).get("request_id"),
        retry_seconds=problem.headers.get("Retry-After") if request.method == "GET" else None,
    )
    answer.headers.update(problem.headers)
    return answer


def _sent(request: Request, problem: ProblemError) -> list[tuple[str, str, str]]:
    """The fields of the form that was refused, so that nothing is to be typed again: names, labels ("" of
    those that are not shown) and values."""
    if request.method == "POST" and problem.status in (409, 422):
        form = getattr(request.state, "sent_form", None) or {}
        found = [(name, value) for name, values in form.items() for value in values if name != "token"]
    elif request.method == "GET" and problem.status == 422:
        given = request.query_params.multi_items()
        found = [pair for pair in given if pair[0] not in ("cursor", "done")]
    else:
        return []
    return [(name[:_MAX_NAME], _label(name), value) for name, value in found[:_MAX_FIELDS]]


def _label(name: str) -> str:
    return "" if name in _UNSEEN else _LABELS.get(name, name.replace("_", " ").capitalize())


def _above(request: Request, problem: ProblemError) -> dict[str, str | None]:
    """The page that has what the catalog knows, where one below it cannot be made or a form of it fails."""
    found = None if problem.status in (401, 404) else _BELOW.match(request.url.path)
    return (
        {"above": None, "above_kind": None} if found is None else {"above": found[1], "above_kind": found[2]}
    )


def _to_sign_in(request: Request) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    url = "/sign-in" if path == "/" else f"/sign-in?{urlencode({'next': path})}"
    if request.headers.get("hx-request"):  # a part of a page: the whole of it goes there
        return Response(status_code=401, headers={"HX-Redirect": url})
    return RedirectResponse(url, 303)
