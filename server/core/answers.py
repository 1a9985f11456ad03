"""What several resources share: identifiers in paths, answers, times, problem documents."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.inputs import MAX_ID, NAME_PATTERN
from dcp.server.records.declaring import moment

__all__ = [
    "PROBLEM_MEDIA_TYPE",
    "Answer",
    "IdPath",
    "NamePath",
    "Problem",
    "problems",
    "rfc3339",
    "rfc3339_of",
]

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

IdPath = Annotated[int, Field(ge=1, le=MAX_ID)]


class Answer(BaseModel):
    """A body that goes out."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Problem(BaseModel):
    """An error (RFC 9457). `detail` says what to do; some kinds have further members."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["/problems/not-found"])
    title: str
    status: int
    detail: str
    instance: str | None = Field(default=None, description="The path that was asked for.")
    request_id: str | None = Field(default=None, description="Names the request in the log of the service.")


_TITLES: Final = {
    400: "The request is not one.",
    401: "No key, or one that is not valid.",
    403: "The key has not the scope that this needs.",
    404: "There is none, or none that this key may see.",
    405: "Not with this method.",
    408: "The request did not arrive in time.",
    409: "Not in this state.",
    410: "It was there; its bytes are not any more.",
    412: "It changed since (If-Match).",
    413: "The body is too large.",
    415: "The body is not JSON.",
    416: "The range is not in it.",
    421: "Not a name of this host.",
    422: "Well-formed, but it cannot be meant.",
    428: "If-Match is needed.",
    429: "Too many requests.",
    500: "A bug; the log has more under the request's id.",
    503: "Database or storage are away, full or locked; ask again later.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route: these errors, as problem documents."""
    return {
        status: {
            "description": _TITLES[status],
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


NamePath = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME_PATTERN)]


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as ``2026-01-31T12:00:00.250Z``."""
    return rfc3339_of(moment(seconds))


def rfc3339_of(time: datetime) -> str:
    """The same, of a time in UTC."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
