"""What a client raises.

::

    ClientError
        TransportError              the service cannot be reached, or the connection broke
        AnswerError                 an answer that this client does not understand
        ProblemError                the service refused: status, detail and what else its document says
            BadRequestError             400
            UnauthorizedError           401    no key, or one that is not valid any more
            ForbiddenError              403    the key has not the scope
            NotFoundError               404
            ConflictError               409    not in this state
            GoneError                   410    it was there; its bytes are not any more
            PreconditionFailedError     412    somebody else changed it since
            RangeError                  416
            UnprocessableError          422    well-formed, but it cannot be meant
            PreconditionRequiredError   428    give the etag of what you have seen
            TooManyRequestsError        429
            UnavailableError            503    database or storage are away; later it may work
        DownloadError               a download that is not complete, or not what was announced
        JobError                    a job that was waited for
            JobFailedError
            JobCancelledError
            WaitTimeoutError            it has not ended in time, and goes on

"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dcp.server.client.generated.models import Job

__all__ = [
    "AnswerError",
    "BadRequestError",
    "ClientError",
    "ConflictError",
    "DownloadError",
    "ForbiddenError",
    "GoneError",
    "JobCancelledError",
    "JobError",
    "JobFailedError",
    "NotFoundError",
    "PreconditionFailedError",
    "PreconditionRequiredError",
    "ProblemError",
    "RangeError",
    "TooManyRequestsError",
    "TransportError",
    "UnauthorizedError",
    "UnavailableError",
    "UnprocessableError",
    "WaitTimeoutError",
    "problem_error",
]


class ClientError(Exception):
    """Base of all."""


class TransportError(ClientError):
    """No answer: the service cannot be reached, took too long, or the connection broke."""


class AnswerError(ClientError):
    """An answer that is none of this service, or of a version that this client does not understand."""


class ProblemError(ClientError):
    """A problem document (RFC 9457). ``extra`` are its further members; the service's log has the
    ``request_id``."""

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
        """Names the request in the log of the service."""
        found = self.extra.get("request_id")
        return found if isinstance(found, str) else None


class BadRequestError(ProblemError):
    """The request is not one."""

    status_code = 400


class UnauthorizedError(ProblemError):
    """No key, or one that is not valid any more."""

    status_code = 401


class ForbiddenError(ProblemError):
    """The key has not the scope."""

    status_code = 403


class NotFoundError(ProblemError):
    """There is none, or none that this key may see."""

    status_code = 404


class ConflictError(ProblemError):
    """Not in this state."""

    status_code = 409


class GoneError(ProblemError):
    """It was there; its bytes are not any more."""

    status_code = 410


class PreconditionFailedError(ProblemError):
    """Somebody else changed it since: get it again, and decide anew."""

    status_code = 412


class RangeError(ProblemError):
    """The range is not in it."""

    status_code = 416


class UnprocessableError(ProblemError):
    """Well-formed, but it cannot be meant."""

    status_code = 422


class PreconditionRequiredError(ProblemError):
    """Give the etag of what you have seen."""

    status_code = 428


class TooManyRequestsError(ProblemError):
    """Later: ``retry_after_seconds``."""

    status_code = 429


class UnavailableError(ProblemError):
    """Database or storage are away, full or locked; later it may work: ``retry_after_seconds``."""

    status_code = 503


class DownloadError(ClientError):
    """A download is not complete, or not what was announced. What is there is kept, to go on from."""


class JobError(ClientError):
    """A job that was waited for; ``job`` is what it was last."""

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


class JobFailedError(JobError):
    """It failed: ``job.error`` says why."""


class JobCancelledError(JobError):
    """Somebody cancelled it."""


class WaitTimeoutError(JobError):
    """It has not ended in the time that it was waited for; it goes on."""


_BY_STATUS: dict[int, type[ProblemError]] = {
    kind.status_code: kind for kind in ProblemError.__subclasses__() if kind.status_code is not None
}


def problem_error(
    status: int, reason: str, document: Any, retry_after_seconds: float | None = None
) -> ProblemError:
    """The error of an answer with ``status``; ``document`` is its body if that was JSON."""
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
