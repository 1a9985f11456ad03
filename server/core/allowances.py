"""Allowances: usage limits of accounts, keys and roots, from the settings or a feature."""

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
"""Owner prefix of the service's own jobs (scans, rules, retention), which have no limits."""


@dataclass(frozen=True, slots=True, order=True)
class LimitSubject:
    """An account (`Principal.owner`), a key (id) or a root (name)."""

    kind: SubjectKind
    name: str

    @property
    def text(self) -> str:
        """The subject in messages."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The limits of one subject; None means no limit.

    ``jobs_running``: concurrent jobs over all workers. ``jobs_queued``: queued jobs. ``downloads``
    (concurrent), their total bytes per second, and ``requests`` are counted by each API process.
    ``bytes_kept``: bytes of committed checkpoints; registrations above are refused, and above
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
    """Allowances from the settings, equal for all accounts. A feature passes a subclass as ``allowances``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.of_account = Allowance(
            jobs_queued=settings.max_queued_jobs,
            downloads=-(-settings.max_downloads // 2),  # leaves threads for other accounts
            requests=Rate.parse(settings.rate_limit),
        )

    def of(
        self, subjects: Iterable[LimitSubject], connection: Connection | None = None
    ) -> Mapping[LimitSubject, Allowance]:
        """Return the allowance of each subject: current with a ``connection``, else as of the last
        `refresh`."""
        return {subject: self.default(subject) for subject in subjects}

    def default(self, subject: LimitSubject) -> Allowance:
        """Return the allowance of a subject without its own limits."""
        is_limited = subject.kind == "account" and subject.name != LOCAL.owner
        return self.of_account if is_limited and not subject.name.startswith(SERVICE) else Allowance()

    def refresh(self, database: Database) -> None:
        """Read the database again after a second. Called for each request with a key."""


def subjects_of(owner: str, key_id: int | None, root: str | None = None) -> tuple[LimitSubject, ...]:
    """Return the subjects of a request or job: account, key, and ``root`` if given."""
    found = [LimitSubject("account", owner)]
    if key_id is not None:
        found.append(LimitSubject("key", str(key_id)))
    if root is not None:
        found.append(LimitSubject("root", root))
    return tuple(found)


_REMEDIES: Final[Mapping[str, str]] = {
    "jobs_queued": "wait until some jobs have started",
    "downloads": "wait until a download has ended",
    "bytes_kept": "delete checkpoints",
}
_UNITS: Final[Mapping[str, str]] = {
    "jobs_queued": "jobs in the queue",
    "downloads": "running downloads",
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
    """Return the problem of a request above a limit, with the limit, the use and the remedy."""
    detail = (
        f"{limit}: the limit of {_named(subject)} is {_amount(limit, allowed)} {_UNITS[limit]}, and "
        f"{_amount(limit, used)} are in use; "
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
    """Format a number, or bytes in the units of the settings, such as 1.5 TB."""
    is_size = limit.startswith("bytes")
    return ByteSize(value).human_readable(decimal=True, separator=" ") if is_size else f"{value:,}"


def _named(subject: LimitSubject) -> str:
    return subject.text if subject.kind == "root" else f"this {subject.kind}"


# -- bytes of checkpoints ------------------------------------------------------------------------------------


@contextmanager
def keeping(
    connection: Connection, allowances: Allowances, subjects: Iterable[LimitSubject]
) -> Iterator[list[str]]:
    """Enforce byte limits around a block that registers checkpoints; the yielded list receives warnings.

    Raises ConflictError above the limit of one of ``subjects``, after which the transaction must roll back;
    changes without additional bytes pass. Concurrent registrations for the same subjects wait for the end of
    the transaction.
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
    """Raise ConflictError if one of ``subjects`` already keeps its maximum of bytes."""
    for subject, allowance in sorted(allowances.of(subjects, connection).items(), key=lambda one: one[0]):
        if allowance.bytes_kept is not None:
            used = bytes_kept(connection, subject)
            if used >= allowance.bytes_kept:
                raise refusal(subject, "bytes_kept", allowance.bytes_kept, used)


def bytes_kept(connection: Connection, subject: LimitSubject) -> int:
    """Return the bytes of committed checkpoints of an account or root; keys keep none."""
    if subject.kind == "key":
        return 0
    if subject.kind == "account":
        return bytes_kept_of(connection, owner=subject.name)
    return bytes_kept_of(connection, root=subject.name)


def bytes_warning(subject: LimitSubject, allowance: Allowance, used: int) -> str | None:
    """Return the warning for an account or root above its warning limit, or None."""
    size = partial(_amount, "bytes_kept")
    most, warned = allowance.bytes_kept, allowance.bytes_kept_warning
    if most is not None and used > most:
        said = f"more than the limit of {size(most)}: further registrations are refused"
    elif warned is not None and used > warned:
        said = f"more than {size(warned)}" + ("" if most is None else f"; the limit is {size(most)}")
    else:
        return None
    return f"bytes_kept: {_named(subject)} has {size(used)} of checkpoints, {said}"


def _limits_bytes(allowance: Allowance) -> bool:
    return allowance.bytes_kept is not None or allowance.bytes_kept_warning is not None
