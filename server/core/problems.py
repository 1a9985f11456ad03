"""Errors as problem documents (RFC 9457, ``application/problem+json``): what went wrong, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class ProblemError(Exception):
    """Ends a request with ``status`` and a problem document.

    ``type`` is ``/problems/{slug}``, ``extra`` are further members, ``headers`` go with the answer.
    ``detail`` is for whoever made the request: it holds no path outside the roots, and no secret.
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
    """Ends a request whose answer has begun and cannot be completed, once the reason is in the log: the
    server closes the connection, so that no client takes a part for the whole."""


class BadRequestError(ProblemError):
    """The request is not one."""

    status, slug, title = 400, "bad-request", "Bad request"


class UnauthorizedError(ProblemError):
    """No key, or one that is not valid any more."""

    status, slug, title = 401, "unauthorized", "A valid key is needed"

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": 'Bearer realm="dcp"'}, **extra)


class ForbiddenError(ProblemError):
    """The key has no such scope."""

    status, slug, title = 403, "forbidden", "Not allowed with this key"


class NotFoundError(ProblemError):
    """There is none, or none that this key may see."""

    status, slug, title = 404, "not-found", "Not found"


class ConflictError(ProblemError):
    """Not in this state."""

    status, slug, title = 409, "conflict", "Conflict"


class GoneError(ProblemError):
    """It was there; its bytes are not any more."""

    status, slug, title = 410, "gone", "Gone"


class PreconditionFailedError(ProblemError):
    """Another request changed it since."""

    status, slug, title = 412, "precondition-failed", "Changed since"


class TooLargeError(ProblemError):
    """The body is larger than is taken."""

    status, slug, title = 413, "too-large", "Too large"


class UnsupportedMediaTypeError(ProblemError):
    """The body is not JSON."""

    status, slug, title = 415, "unsupported-media-type", "Unsupported media type"


class RangeError(ProblemError):
    """The range is not in it."""

    status, slug, title = 416, "range", "Range not satisfiable"


class UnprocessableError(ProblemError):
    """Well-formed, but it cannot be meant."""

    status, slug, title = 422, "unprocessable", "Unprocessable"


class PreconditionRequiredError(ProblemError):
    """Say which state you have seen."""

    status, slug, title = 428, "precondition-required", "If-Match is needed"


class TooManyRequestsError(ProblemError):
    """Later."""

    status, slug, title = 429, "too-many-requests", "Too many requests"


class UnavailableError(ProblemError):
    """The database or the storage is away, full or locked; it may be asked again."""

    status, slug, title = 503, "unavailable", "Unavailable for now"

    def __init__(self, detail: str, *, retry_seconds: int = 5, **extra: Any) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_seconds)}, **extra)
