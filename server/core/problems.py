"""Errors as problem documents (RFC 9457, ``application/problem+json``) with cause and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class ProblemError(Exception):
    """Ends a request with ``status`` and a problem document.

    ``type`` is ``/problems/{slug}``; ``extra`` are further members; ``headers`` join the answer. ``detail``
    is for the caller and contains no path outside of the roots and no secret.
    """

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra

    def document(self, instance: str | None = None) -> dict[str, Any]:
        """Return the body."""
        body: dict[str, Any] = {
            "type": f"/problems/{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if instance is not None:
            body["instance"] = instance
        return self.extra | body


class BrokenBodyError(Exception):
    """Aborts a started answer after the reason was logged: closing the connection tells clients that the
    body is incomplete."""


class BadRequestError(ProblemError):
    """400: the request is malformed."""

    status, slug, title = 400, "bad-request", "Bad request"


class UnauthorizedError(ProblemError):
    """401: no valid key."""

    status, slug, title = 401, "unauthorized", "A valid key is needed"

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": 'Bearer realm="dcp"'}, **extra)


class ForbiddenError(ProblemError):
    """403: the key lacks the scope."""

    status, slug, title = 403, "forbidden", "Not allowed with this key"


class NotFoundError(ProblemError):
    """404: the object does not exist or is not visible to the key."""

    status, slug, title = 404, "not-found", "Not found"


class ConflictError(ProblemError):
    """409: the current state does not allow the operation."""

    status, slug, title = 409, "conflict", "Conflict"


class GoneError(ProblemError):
    """410: the files no longer exist."""

    status, slug, title = 410, "gone", "Gone"


class PreconditionFailedError(ProblemError):
    """412: another request changed the object."""

    status, slug, title = 412, "precondition-failed", "Changed since"


class TooLargeError(ProblemError):
    """413: the body is too large."""

    status, slug, title = 413, "too-large", "Too large"


class UnsupportedMediaTypeError(ProblemError):
    """415: the body is not JSON."""

    status, slug, title = 415, "unsupported-media-type", "Unsupported media type"


class RangeError(ProblemError):
    """416: the range is outside of the content."""

    status, slug, title = 416, "range", "Range not satisfiable"


class UnprocessableError(ProblemError):
    """422: well-formed but invalid."""

    status, slug, title = 422, "unprocessable", "Unprocessable"


class PreconditionRequiredError(ProblemError):
    """428: the request needs ``If-Match``."""

    status, slug, title = 428, "precondition-required", "If-Match is needed"


class TooManyRequestsError(ProblemError):
    """429: a limit is reached; retry later."""

    status, slug, title = 429, "too-many-requests", "Too many requests"


class UnavailableError(ProblemError):
    """503: the database or storage is unreachable, full or locked; retry later."""

    status, slug, title = 503, "unavailable", "Unavailable for now"

    def __init__(self, detail: str, *, retry_seconds: int = 5, **extra: Any) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_seconds)}, **extra)
