"""Allowances: how much an account, a key or a root may use, by the settings or by a feature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from pydantic import ByteSize
from sqlalchemy import Connection

from dcp.server.catalog.runs import bytes_kept_of
from dcp.server.core.problems import ConflictError, ProblemError, TooManyRequestsError
from dcp.server.core.security.principal import LOCAL
from dcp.server.core.security.rates import Rate
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database, lock_names

SubjectKind = Literal["account", "key", "root"]
LimitName = Literal[
    "jobs_running",
    "jobs_queued",
    "downloads",
    "download_bytes_per_second",
    "requests",
    "bytes_kept_warning",
    "bytes_kept",
]

SERVICE: Final = "service:"
"""Begins the owner of jobs of the service itself (scans, rules, retention), which have no limits."""


@dataclass(frozen=True, slots=True, order=True)
class LimitSubject:
    """An account (by `Principal.owner`), a key (by its id) or a root (by its name)."""

    kind: SubjectKind
    name: str

    @property
    def text(self) -> str:
        """The subject in messages."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The limits of one subject; None is no limit.

    ``jobs_running``: jobs at work at a time, of all workers. ``jobs_queued``: jobs in the queue.
    ``downloads`` at a time, their bytes a second together, and ``requests``: each process of the API counts
    its own. ``bytes_kept``: of committed checkpoints; more are refused at registration, and above
    ``bytes_kept_warning`` answers warn.
    """

    jobs_running: int | None = None
    jobs_queued: int | None = None
    downloads: int | None = None
    download_bytes_per_second: int | None = None
    requests: Rate | None = None
    bytes_kept_warning: int | None = None
    bytes_kept: int | None = None


class Allowances:
    """Allowances of the settings: one for each account. A feature has a subclass in ``allowances``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.of_account = Allowance(
            jobs_queued=settings.max_queued_jobs,
            downloads=-(-settings.max_downloads // 2),  # so that some are left for others
            requests=Rate.parse(settings.rate_limit),
        )

    def of(
        self, subjects: Iterable[LimitSubject], connection: Connection | None = None
    ) -> Mapping[LimitSubject, Allowance]:
        """Return the allowance of each subject: as the database has it now by ``connection``, else as it was
        at the last `refresh`."""
        return {subject: self.default(subject) for subject in subjects}

    def default(self, subject: LimitSubject) -> Allowance:
        """Return the allowance of a subject for which nothing else is declared."""
        is_limited = subject.kind == "account" and subject.name != LOCAL.owner
        return self.of_account if is_limited and not subject.name.startswith(SERVICE) else Allowance()

    def refresh(self, database: Database) -> None:
        """Read the database again, if that was more than a second ago. Called for each request with a key."""


def subjects_of(owner: str, key_id: int | None, root: str | None = None) -> tuple[LimitSubject, ...]:
    """Return the subjects that a request or a job of an account and a key counts for; with one for the
    ``root`` that it is for."""
    found = [LimitSubject("account", owner)]
    if key_id is not None:
        found.append(LimitSubject("key", str(key_id)))
    if root is not None:
        found.append(LimitSubject("root", root))
    return tuple(found)


_REMEDIES: Final[Mapping[str, str]] = {
    "jobs_queued": "wait until some of them have begun",
    "downloads": "wait until one has ended",
    "bytes_kept": "delete checkpoints",
}
_UNITS: Final[Mapping[str, str]] = {
    "jobs_queued": "jobs in the queue",
    "downloads": "downloads under way",
    "bytes_kept": "of checkpoints",
}


def refusal(
    subject: LimitSubject,
    limit: LimitName,
    allowed: int,
    used: int,
    *,
    wait_seconds: int | None = None,
    **extra: Any,
) -> ProblemError:
    """Return the problem of a request that a limit refuses: names the limit, the use and the remedy."""
    detail = (
        f"{limit}: {_named(subject)} may have {_amount(limit, allowed)} {_UNITS[limit]} and has "
        f"{_amount(limit, used)}; "
        f"{_REMEDIES[limit]}, or ask an admin for a higher limit"
    )
    extra |= {
        "limit": limit,
        "subject": {"kind": subject.kind, "name": subject.name},
        "allowed": allowed,
        "used": used,
    }
    if wait_seconds is None:
        return ConflictError(detail, **extra)
    return TooManyRequestsError(detail, headers={"Retry-After": str(wait_seconds)}, **extra)


def _amount(limit: LimitName, value: int) -> str:
    """Return a number, or bytes in the units of the settings, such as 1.5 TB."""
    is_size = limit.startswith("bytes")
    return ByteSize(value).human_readable(decimal=True, separator=" ") if is_size else f"{value:,}"


def _named(subject: LimitSubject) -> str:
    return subject.text if subject.kind == "root" else f"this {subject.kind}"


# -- bytes of checkpoints ------------------------------------------------------------------------------------


@contextmanager
def keeping(
    connection: Connection, allowances: Allowances, subjects: Iterable[LimitSubject]
) -> Iterator[list[str]]:
    """Keep the limits of bytes in a block that registers checkpoints: at its end the list has the warnings.

    Raises ConflictError for more bytes than one of ``subjects`` may keep, after which the transaction must
    not be committed; what adds no bytes passes. Others that register for the same ones wait for the end of
    this transaction.
    """
    found = allowances.of(subjects, connection)
    limited = {subject: found[subject] for subject in sorted(found) if _limits_bytes(found[subject])}
    lock_names(connection, [f"bytes_kept {subject.text}" for subject in limited])
    before = {subject: bytes_kept(connection, subject) for subject in limited}
    warnings: list[str] = []
    yield warnings
    for subject, allowance in limited.items():
        used, most = bytes_kept(connection, subject), allowance.bytes_kept
        if most is not None and used > max(most, before[subject]):
            more = used - before[subject]
            raise refusal(subject, "bytes_kept", most, before[subject], requested=more)
        if (warning := bytes_warning(subject, allowance, used)) is not None:
            warnings.append(warning)


def check_room(connection: Connection, allowances: Allowances, subjects: Iterable[LimitSubject]) -> None:
    """Raise ConflictError where one of ``subjects`` keeps as many bytes as it may, before more come."""
    for subject, allowance in sorted(allowances.of(subjects, connection).items(), key=lambda one: one[0]):
        if allowance.bytes_kept is not None:
            used = bytes_kept(connection, subject)
            if used >= allowance.bytes_kept:
                raise refusal(subject, "bytes_kept", allowance.bytes_kept, used)


def bytes_kept(connection: Connection, subject: LimitSubject) -> int:
    """Return the bytes of the committed checkpoints of an account or a root. Keys keep none of their own."""
    if subject.kind == "key":
        return 0
    if subject.kind == "account":
        return bytes_kept_of(connection, owner=subject.name)
    return bytes_kept_of(connection, root=subject.name)


def bytes_warning(subject: LimitSubject, allowance: Allowance, used: int) -> str | None:
    """Return the warning for an account or a root that keeps more than it should, or None."""
    size = partial(_amount, "bytes_kept")
    most, warned = allowance.bytes_kept, allowance.bytes_kept_warning
    if most is not None and used > most:
        said = f"more than the {size(most)} that it may have: registrations that add to them are refused"
    elif warned is not None and used > warned:
        said = f"more than {size(warned)}" + ("" if most is None else f"; it may have {size(most)}")
    else:
        return None
    return f"bytes_kept: {_named(subject)} has {size(used)} of checkpoints, {said}"


def _limits_bytes(allowance: Allowance) -> bool:
    return allowance.bytes_kept is not None or allowance.bytes_kept_warning is not None
