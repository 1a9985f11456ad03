"""Types of what comes in: in bodies, in queries, in parameters of jobs."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

__all__ = [
    "MAX_ID",
    "NAME_PATTERN",
    "Finite",
    "Name",
    "OneLine",
    "Plain",
    "Query",
    "Request",
    "Text",
    "Time",
    "is_clean",
]

MAX_ID: Final = 2**53 - 1
"""Larger identifiers do not survive in JavaScript, and are none of ours."""

_MAX_DEPTH: Final = 16
NAME_PATTERN: Final = r"^[A-Za-z0-9_][A-Za-z0-9_./:@+=-]*$"
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)")

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Request(BaseModel):
    """A body that comes in. Unknown members and numbers in quotes are refused, since they are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Query(BaseModel):
    """A query of an address. Unknown names are refused, since they are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def is_clean(text: str) -> bool:
    """Whether databases and logs take it: no control characters, no halves of surrogate pairs."""
    return not any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in text)


def _clean(text: str) -> str:
    if not is_clean(text):
        raise ValueError("control characters are not allowed")
    return text


OneLine = Annotated[str, AfterValidator(_clean)]
Text = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_clean)]
"""Free text of one line."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=NAME_PATTERN)]
"""Of tags, aliases, metrics, keys, rules: letters, digits and ``_./:@+=-``."""


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
