"""Errors of the client, all below `ClientError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dcp.server.client.generated.models import Job


class ClientError(Exception):
    """Base of all errors of the client."""


class TransportError(ClientError):
    """No answer: the service is unreachable or too slow, or the connection broke."""


class AnswerError(ClientError):
    """An unexpected answer, such as the answer of a proxy."""


class ProblemError(ClientError):
    """A problem document (RFC 9457) of the service. ``extra`` has its further members."""

    status_code: ClassVar[int | None] = None

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        *,
        type: str = "about:blank",
        extra: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{status} {title}: {detail}" if detail else f"{status} {title}")
        self.status = status
        self.title = title
        self.detail = detail
        self.type = type
        self.extra = dict(extra or {})
        self.retry_after_seconds = retry_after_seconds

    @property
    def request_id(self) -> str | None:
        """The id of the request in the log of the service."""
        found = self.extra.get("request_id")
        return found if isinstance(found, str) else None


class BadRequestError(ProblemError):
    """The request is malformed."""

    status_code = 400


class UnauthorizedError(ProblemError):
    """No key, or an invalid one."""

    status_code = 401


class ForbiddenError(ProblemError):
    """The key lacks the scope."""

    status_code = 403


class NotFoundError(ProblemError):
    """The object does not exist or is not visible to the key."""

    status_code = 404


class ConflictError(ProblemError):
    """The current state does not allow the operation."""

    status_code = 409


class GoneError(ProblemError):
    """The files no longer exist."""

    status_code = 410


class PreconditionFailedError(ProblemError):
    """The object was changed concurrently: get it again."""

    status_code = 412


class RangeError(ProblemError):
    """The range is outside of the content."""

    status_code = 416


class UnprocessableError(ProblemError):
    """The request is well-formed, but invalid."""

    status_code = 422


class PreconditionRequiredError(ProblemError):
    """The change needs an ``etag``."""

    status_code = 428


class TooManyRequestsError(ProblemError):
    """Too many requests: try again after ``retry_after_seconds``."""

    status_code = 429


class UnavailableError(ProblemError):
    """Database or storage are unreachable, full or locked: try again after ``retry_after_seconds``."""

    status_code = 503


class DownloadError(ClientError):
    """An incomplete download. The partial file is kept for resumption."""


class JobError(ClientError):
    """Base of the errors of `wait`; ``job`` is the last known state."""

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


class JobFailedError(JobError):
    """The job failed; ``job.error`` is the reason."""


class JobCancelledError(JobError):
    """The job was cancelled."""


class WaitTimeoutError(JobError):
    """The job did not end in time; it continues."""


_BY_STATUS: dict[int, type[ProblemError]] = {
    kind.status_code: kind for kind in ProblemError.__subclasses__() if kind.status_code is not None
}


def problem_error(
    status: int, reason: str, document: Any, retry_after_seconds: float | None = None
) -> ProblemError:
    """Return the error of an answer with ``status`` and the JSON body ``document``."""
    members = dict(document) if isinstance(document, Mapping) else {}
    title, detail, type_ = (members.pop(name, None) for name in ("title", "detail", "type"))
    members.pop("status", None)
    return _BY_STATUS.get(status, ProblemError)(
        status,
        title if isinstance(title, str) else reason,
        detail if isinstance(detail, str) else "",
        type=type_ if isinstance(type_, str) else "about:blank",
        extra=members,
        retry_after_seconds=retry_after_seconds,
    )
