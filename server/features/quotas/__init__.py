"""Quotas: limits for accounts, keys and roots, by the settings and by admins, and how much is used."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError
from sqlalchemy import Column, Connection, String, Text, select

from dcp.server.core.allowances import Allowance, Allowances, LimitName, LimitSubject, SubjectKind
from dcp.server.core.feature import Feature, Link
from dcp.server.core.security.rates import Rate
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.database.mapping import JSON_DOCUMENT
from dcp.server.database.tables import resource_table

__all__ = [
    "LIMITS",
    "LIMITS_OF",
    "MOST",
    "QuotaAllowances",
    "RateText",
    "feature",
    "given_size",
    "quotas",
    "size_of",
]

MOST: Final = 2**53 - 1
"""Largest integer that every JSON parser reads exactly."""
LIMITS: Final[tuple[LimitName, ...]] = get_args(LimitName)
LIMITS_OF: Final[Mapping[SubjectKind, tuple[LimitName, ...]]] = {
    "account": LIMITS,
    "key": tuple(name for name in LIMITS if not name.startswith("bytes_kept")),
    "root": tuple(name for name in LIMITS if name != "requests"),
}
"""Limits by kind of subject: accounts limit stored bytes, roots have no limit of requests."""

quotas: Final = resource_table(
    "quotas",
    Column("name", String(320), nullable=False, unique=True),  # `LimitSubject.text`: kind and subject
    Column("kind", String(16), nullable=False),
    Column("subject", String(192), nullable=False),
    Column("limits", JSON_DOCUMENT, nullable=False),  # by name; null: no limit; absent: the default
    Column("note", Text, nullable=False, server_default=""),
)


def _checked_rate(text: str) -> str:
    Rate.parse(text)
    return text


RateText = Annotated[str, Field(max_length=64), AfterValidator(_checked_rate)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_SIZE: Final[TypeAdapter[ByteSize]] = TypeAdapter(ByteSize)
_SIZE_TEXT: Final = re.compile(r"\s*(\d{1,20}|\d{0,20}\.\d{1,20})\s*[A-Za-z]*\s*", re.ASCII)
"""The whole text, because pydantic ignores the rest of ``20,5 TB`` behind the first number."""


def size_of(text: str) -> int:
    """Parse a size as in the settings: ``20 TB``, ``500 GiB``, or a number of bytes. Raises ValueError."""
    try:
        if _SIZE_TEXT.fullmatch(text):
            return int(_SIZE.validate_python(text))
    except ValidationError:  # an unknown unit
        pass
    problem = "Input should be a size such as 20 TB or 500 GiB, or a number of bytes"
    raise PydanticCustomError("size", problem)


def given_size(value: object) -> object:
    """Return a text as bytes by `size_of`, and any other value as it is."""
    return size_of(value) if isinstance(value, str) else value


_Bytes = Annotated[ByteSize, BeforeValidator(given_size), Field(ge=0, le=MOST)]
_Speed = Annotated[ByteSize, BeforeValidator(given_size), Field(ge=16 << 10, le=MOST)]

_REQUESTS: Final = "Rate of requests in each API process, such as `1200/minute`."
_WARNING: Final = "Bytes of committed checkpoints above which registrations return a warning."
_KEPT: Final = "Bytes of committed checkpoints above which registrations are refused."


class _Limits(BaseModel):
    """Limits set by an operator. Absent limits are unlimited or follow the service's settings.

    Sizes can be texts such as "20TB".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs_running: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="Jobs that all workers together run at a time."
    )
    jobs_queued: _Count | None = Field(default=None, description="Jobs that wait in the queue.")
    downloads: _Count | None = Field(default=None, description="Downloads at a time, in each API process.")
    download_bytes_per_second: _Speed | None = Field(
        default=None, description="Rate of all downloads together, in each API process."
    )


class _AccountLimits(_Limits):
    requests: RateText | None = Field(default=None, description=_REQUESTS)
    bytes_kept_warning: _Bytes | None = Field(default=None, description=_WARNING)
    bytes_kept: _Bytes | None = Field(default=None, description=_KEPT)


class _KeyLimits(_Limits):
    requests: RateText | None = Field(default=None, description=_REQUESTS)


class _RootLimits(_Limits):
    bytes_kept_warning: _Bytes | None = Field(default=None, description=_WARNING)
    bytes_kept: _Bytes | None = Field(default=None, description=_KEPT)


class QuotaSettings(BaseModel):
    """Default limits of accounts, keys, and roots. Limits in the catalog override them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: _AccountLimits = Field(
        default=_AccountLimits(),
        description="Limits of each person, service account, or key without an account.",
    )
    key: _KeyLimits = Field(default=_KeyLimits(), description="Limits of each key.")
    root: _RootLimits = Field(default=_RootLimits(), description="Limits of each root.")


class QuotaAllowances(Allowances):
    """Allowances from the table `quotas`, with the settings as defaults."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        options: QuotaSettings = feature.options(settings)
        self._defaults: dict[SubjectKind, dict[str, Any]] = {
            "account": options.account.model_dump(exclude_unset=True),
            "key": options.key.model_dump(exclude_unset=True),
            "root": options.root.model_dump(exclude_unset=True),
        }
        self._stored: Mapping[str, Mapping[str, Any]] = {}
        self._fresh_until = 0.0
        self._lock = threading.Lock()

    def of(
        self, subjects: Iterable[LimitSubject], connection: Connection | None = None
    ) -> Mapping[LimitSubject, Allowance]:
        """As `Allowances.of`."""
        wanted = list(subjects)
        stored = self._stored
        if connection is not None:
            stored = _stored(connection, [subject.text for subject in wanted])
        return {subject: _changed(self.default(subject), stored.get(subject.text, {})) for subject in wanted}

    def default(self, subject: LimitSubject) -> Allowance:
        """As `Allowances.default`."""
        found = super().default(subject)
        if subject.kind == "account" and found == Allowance():  # the service itself, or keys are not needed
            return found
        return _changed(found, self._defaults[subject.kind])

    def refresh(self, database: Database) -> None:
        """As `Allowances.refresh`. One thread reads; other threads use the previous values."""
        if time.monotonic() < self._fresh_until or not self._lock.acquire(blocking=False):
            return
        try:
            with database.read() as connection:
                self._stored = _stored(connection)
            self._fresh_until = time.monotonic() + _FRESH_SECONDS
        finally:
            self._lock.release()

    def expire(self) -> None:
        """Make the next `refresh` read the database, after a change by this process."""
        self._fresh_until = 0.0


_FRESH_SECONDS: Final = 1.0
_MAX_NAMED: Final = 500
"""Subjects named by one statement; above this, all stored subjects are read."""


def _stored(connection: Connection, names: list[str] | None = None) -> dict[str, Mapping[str, Any]]:
    query = select(quotas.c.name, quotas.c.limits)
    if names is not None and len(names) <= _MAX_NAMED:
        query = query.where(quotas.c.name.in_(names))
    return {row.name: row.limits for row in connection.execute(query)}


def _changed(allowance: Allowance, limits: Mapping[str, Any]) -> Allowance:
    if not limits:
        return allowance
    values = dict(limits)
    if values.get("requests") is not None:
        values["requests"] = Rate.parse(values["requests"])
    return replace(allowance, **values)


feature: Final = Feature(
    "quotas",
    __name__,
    web=["quota_routes"],
    settings=QuotaSettings,
    allowances=QuotaAllowances,
    links=[Link("menu", "Usage", "/usage"), Link("administration", "Quotas", "/quotas")],
)
