"""Input types of bodies, queries and parameters, format names, and cleaning of foreign data.

Cleaned values fit both databases: PostgreSQL stores no NUL, no database a lone surrogate, JSON no NaN;
integers have 63 bits, and index rows of PostgreSQL 2,704 bytes. One hostile name must not fail a whole scan.

Formats include formats registered at run time.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from dcp.server.catalog.errors import InvalidQueryError
from dcp.storage.formats.format import Format
from dcp.storage.formats.registry import file_suffixes, format_names, format_of, formats, target_names

MAX_ID: Final = 2**53 - 1
"""Largest exact integer of JavaScript; the service assigns no larger identifiers."""

MAX_PAGE: Final = 500
"""Maximum rows of a page."""

_MAX_PLAIN_DEPTH: Final = 16
NAME_PATTERN: Final = r"^[A-Za-z0-9_][A-Za-z0-9_./:@+=-]*$"
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)")

Finite = Annotated[float, Field(allow_inf_nan=False)]
Id = Annotated[int, Field(ge=1, le=MAX_ID)]
Step = Annotated[int, Field(ge=0, le=MAX_ID)]


class Request(BaseModel):
    """Base of request bodies. Unknown members and quoted numbers are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Query(BaseModel):
    """Base of URL queries. Unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Paged(Query):
    """Page size and cursor."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="Maximum rows of a page.")] = 50
    cursor: Annotated[
        Annotated[str, Field(min_length=1, max_length=4096)] | None,
        Field(description="The next_cursor of the previous page."),
    ] = None


def is_clean(text: str) -> bool:
    """Return True if databases and logs accept the text: no control characters, no lone surrogates."""
    return not any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in text)


def _clean(text: str) -> str:
    if not is_clean(text):
        raise ValueError("control characters are not allowed")
    return text


OneLine = Annotated[str, AfterValidator(_clean)]
Text = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_clean)]
"""Free text of one line."""


class LateChoice:
    """Marker in ``Annotated``: text from ``values()``, evaluated late because features add values."""

    def __init__(self, values: Callable[[], Collection[str]]) -> None:
        self._values = values

    def _check(self, value: str) -> str:
        if value not in self._values():
            raise ValueError(f"must be one of {', '.join(self._values())}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), "enum": list(self._values())}


Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=NAME_PATTERN)]
"""Name of a tag, alias, metric, key or rule: letters, digits and ``_./:@+=-``."""


def _plain(value: Any) -> Any:
    _check_plain(value, 0)
    return value


def _check_plain(value: Any, depth: int) -> None:
    if depth > _MAX_PLAIN_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        if UNSTORABLE.search(value):
            raise ValueError("text with NUL or a lone surrogate")
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
"""JSON that both databases store without loss."""


def _seconds(text: Any) -> float:
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise ValueError("expected a time such as 2026-01-31T12:00:00Z")
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("the time does not exist") from None


Time = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-01-31T12:00:00Z"]}),
]
"""Input time: RFC 3339 with an offset; seconds since the epoch in Python."""


MAX_KEY_BYTES: Final = 1024
NONFINITE: Final = ("nan", "inf", "-inf")
"""Non-finite numbers as written by `clean_json`."""
_MAX_NAME_BYTES: Final = 1024
_MAX_INTEGER: Final = (1 << 63) - 1
_MAX_DEPTH: Final = 32
_MAX_JSON_ITEMS: Final = 10_000
_LABEL: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@+=-]{0,127}")
UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""NUL and lone surrogates."""


def clean_text(text: str) -> str:
    r"""Return ``text`` with NUL and lone surrogates escaped (``\x00``, ``\udc80``)."""
    if not UNSTORABLE.search(text):
        return text
    return UNSTORABLE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def short_name(text: str) -> str:
    """Return clean ``text``, cut and followed by a hash if too long for an index."""
    text = clean_text(text)
    encoded = text.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return text
    mark = f"...{hashlib.sha256(encoded).hexdigest()[:16]}"
    return encoded[: _MAX_NAME_BYTES - len(mark)].decode(errors="ignore") + mark


def clean_integer(value: int) -> int:
    """Return ``value``, clamped to the range of a column."""
    return max(-_MAX_INTEGER - 1, min(_MAX_INTEGER, value))


def clean_json(value: Any) -> Any:
    """Return ``value`` as JSON with bounded depth and size; unknown objects and non-finite numbers become
    text."""
    return _cleaned(value, _MAX_DEPTH, [_MAX_JSON_ITEMS])


def _cleaned(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        return "..."
    match value:
        case None | bool():
            return value
        case int():
            return value if -_MAX_INTEGER <= value <= _MAX_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return clean_text(value)
        case Mapping():
            return {clean_text(str(name)): _cleaned(item, depth - 1, left) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_cleaned(item, depth - 1, left) for item in value]
        case _:
            from dcp.storage.formats.torch.python_values import (
                value_text,
            )  # imported late: numpy is slow to import

            return clean_text(value_text(value)[:1000])


def check_key(key: str) -> str:
    """Return ``key`` if it is a clean relative key. Raises `InvalidQueryError`, also for ""."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\\" in key or UNSTORABLE.search(key):
        raise InvalidQueryError("key", "expected a relative path of non-empty parts, without . and ..")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidQueryError("key", f"longer than {MAX_KEY_BYTES} bytes")
    return key


def check_label(field: str, name: str) -> str:
    """Return ``name`` if it is a valid tag, alias or metric. Raises `InvalidQueryError`."""
    if not _LABEL.fullmatch(name):
        raise InvalidQueryError(
            field,
            "expected 1 to 128 letters, digits and _ . / : @ + = -, the first a letter, digit or _",
        )
    return name


UNKNOWN: Final = "unknown"
"""Format of checkpoints that no installed format recognizes."""


def catalog_formats() -> list[str]:
    """Return the formats of checkpoints in the catalog."""
    return [*format_names(), UNKNOWN]


def format_in_catalog(name: str) -> str:
    """Return ``name`` if the format is known, else `UNKNOWN`."""
    return UNKNOWN if format_of(name) is None else name


def _download_names() -> list[str]:
    return sorted(one.target.name for one in formats() if one.target and one.target.as_file != "never")


@dataclass(frozen=True, slots=True)
class OneOfNames:
    """Marker for ``str`` in ``Annotated``: one of ``names()``, like a ``Literal`` evaluated late."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a validator that checks values on arrival."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return an enum of the names known now."""
        return {**handler(schema), "enum": list(self.names())}

    def _checked(self, value: str) -> str:
        names = self.names()
        if value not in names:
            *first, last = map(repr, names)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
        return value


FormatName = Annotated[str, OneOfNames(catalog_formats)]
SourceFormat = Annotated[str, OneOfNames(format_names)]
TargetFormat = Annotated[str, OneOfNames(target_names)]
DownloadFormat = Annotated[str, OneOfNames(_download_names)]
"""Formats of single-file downloads."""


def fault_of_target_name(one: Format, key: str) -> str | None:
    """Return the reason why a scan would not recognize a target ``key`` (lower case) as this format."""
    as_file = one.target.as_file if one.target is not None else "never"
    if as_file != "never" and one.has_suffix(key):
        return None
    if as_file == "always":
        return f"for {one.target.name if one.target else one.name} it ends in {', '.join(one.suffixes)}"
    suffixes = file_suffixes()
    return f"a folder must not end in {', '.join(suffixes)}" if key.endswith(suffixes) else None
