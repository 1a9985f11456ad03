"""Allowances: how much an account, a key or a root may use, by the settings or by a feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection

from dcp.server.core.problems import ConflictError, ProblemError, TooManyRequestsError
from dcp.server.core.security.principal import LOCAL, Principal
from dcp.server.core.security.rates import Rate
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database

__all__ = [
    "SERVICE",
    "Allowance",
    "Allowances",
    "LimitName",
    "Subject",
    "SubjectKind",
    "refusal",
    "subjects_of",
]

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
class Subject:
    """An account (`Principal.owner`), a key (by its id) or a root (by its name)."""

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
        self, subjects: Iterable[Subject], connection: Connection | None = None
    ) -> Mapping[Subject, Allowance]:
        """Return the allowance of each subject: as the database has it now by ``connection``, else as it was
        at the last `refresh`."""
        return {subject: self.default(subject) for subject in subjects}

    def default(self, subject: Subject) -> Allowance:
        """Return the allowance of a subject for which nothing else is declared."""
        is_limited = subject.kind == "account" and subject.name != LOCAL.owner
        return self.of_account if is_limited and not subject.name.startswith(SERVICE) else Allowance()

    def refresh(self, database: Database) -> None:
        """Read the database again, if that was more than a second ago. Called for each request with a key."""


def subjects_of(caller: Principal, root: str | None = None) -> tuple[Subject, ...]:
    """Return the subjects that a request of ``caller`` counts for; with one for the ``root`` that it is
    for."""
    found = [Subject("account", caller.owner)]
    if caller.key_id is not None:
        found.append(Subject("key", str(caller.key_id)))
    if root is not None:
        found.append(Subject("root", root))
    return tuple(found)


_REMEDIES: Final[Mapping[str, str]] = {
    "jobs_queued": "wait until some of them have begun",
    "downloads": "wait until one has ended",
    "bytes_kept": "delete checkpoints",
}
_UNITS: Final[Mapping[str, str]] = {
    "jobs_queued": "jobs in the queue",
    "downloads": "downloads under way",
    "bytes_kept": "bytes of checkpoints",
}


def refusal(
    subject: Subject, limit: LimitName, allowed: int, used: int, *, wait_seconds: int | None = None
) -> ProblemError:
    """Return the problem of a request that a limit refuses: names the limit, the use and the remedy."""
    detail = (
        f"{limit}: {subject.text} may have {allowed:,} {_UNITS[limit]} and has {used:,}; "
        f"{_REMEDIES[limit]}, or ask an admin for a higher limit"
    )
    extra: dict[str, Any] = {
        "limit": limit,
        "subject": {"kind": subject.kind, "name": subject.name},
        "allowed": allowed,
        "used": used,
    }
    if wait_seconds is None:
        return ConflictError(detail, **extra)
    return TooManyRequestsError(detail, headers={"Retry-After": str(wait_seconds)}, **extra)
