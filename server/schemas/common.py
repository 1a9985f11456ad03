"""Types that several resources share: identifiers, names, times, problem documents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from dcp.server.records.declaring import moment

__all__ = [
    "MAX_ID",
    "PROBLEM_MEDIA_TYPE",
    "Answer",
    "Finite",
    "IdPath",
    "Name",
    "NamePath",
    "Plain",
    "Problem",
    "Request",
    "Text",
    "Time",
    "is_clean",
    "optional_rfc3339",
    "problems",
    "rfc3339",
    "rfc3339_of",
    "sorted_names",
]

MAX_ID: Final = 2**53 - 1
"""Larger identifiers do not survive in JavaScript, and are none of ours."""

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
_MAX_DEPTH: Final = 16
_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_./:@+=-]*$"
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)")

Finite = Annotated[float, Field(allow_inf_nan=False)]
IdPath = Annotated[int, Path(ge=1, le=MAX_ID)]


class Request(BaseModel):
    """A body that comes in. Unknown members and numbers in quotes are refused, since they are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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


def is_clean(text: str) -> bool:
    """Whether databases and logs take it: no control characters, no halves of surrogate pairs."""
    return not any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in text)


def _clean(text: str) -> str:
    if not is_clean(text):
        raise ValueError("control characters are not allowed")
    return text


Text = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_clean)]
"""Free text of one line."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=_NAME)]
"""Of tags, aliases, metrics, keys, rules: letters, digits and ``_./:@+=-``."""

NamePath = Annotated[str, Path(min_length=1, max_length=128, pattern=_NAME)]


def _plain(value: Any) -> Any:
    _check_plain(value, 0)
    return value


def _check_plain(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        if "\0" in value or any(0xD800 <= ord(char) < 0xE000 for char in value):
            raise ValueError("text with a NUL or half a surrogate pair")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("numbers are finite")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError("integers have 64 bits")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, depth + 1)
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)


Plain = Annotated[Any, AfterValidator(_plain)]
"""Any JSON that both databases store and give back."""


def _seconds(text: Any) -> float:
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise ValueError("a time is such as 2026-01-31T12:00:00Z")
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("there is no such time") from None


Time = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-01-31T12:00:00Z"]}),
]
"""A time that comes in: RFC 3339 with its offset; in Python seconds since the epoch."""


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as ``2026-01-31T12:00:00.250Z``."""
    return rfc3339_of(moment(seconds))


def rfc3339_of(time: datetime) -> str:
    """The same, of a time in UTC."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def optional_rfc3339(seconds: float | None) -> str | None:
    """The same, where there may be none."""
    return None if seconds is None else rfc3339(seconds)


def sorted_names(names: Iterable[str] | None) -> list[str] | None:
    """As a list in order; None stays."""
    return None if names is None else sorted(names)
