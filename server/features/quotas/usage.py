"""Use and limits of accounts, keys, and roots."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import nlargest
from itertools import islice
from typing import Annotated, Final, Literal

from sqlalchemy import Connection, func, select

from dcp.server.catalog.runs import kept_by_account, kept_by_root
from dcp.server.core.allowances import (
    SERVICE,
    Allowance,
    LimitName,
    LimitSubject,
    SubjectKind,
    bytes_kept,
    bytes_warning,
    subjects_of,
)
from dcp.server.core.data.access import streams_of
from dcp.server.core.http.context import Service
from dcp.server.core.jobs.ledger.claims import jobs_at_work
from dcp.server.core.security.accounts import actor_of
from dcp.server.core.security.principal import LOCAL
from dcp.server.database.tables import accounts, api_keys, jobs, roots
from dcp.server.features.quotas import LIMITS_OF, quotas
from dcp.server.records.declaring import OneOf, Shown

Level = Literal["ok", "warning", "full"]
"""full: at the limit or above. warning: at nine tenths, or above the warning."""
_NEAR: Final = 0.9
_FEW: Final = 20
"""Subjects summed individually; a page of the own use reads no others."""
TITLES: Final[Mapping[str, str]] = {
    "jobs_running": "Jobs running",
    "jobs_queued": "Jobs queued",
    "downloads": "Downloads at a time",
    "download_bytes_per_second": "Download rate",
    "requests": "Requests",
    "bytes_kept_warning": "Bytes kept: warning",
    "bytes_kept": "Bytes kept",
}
"""The limits on pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """Limit of a subject, and its use."""

    limit: Annotated[str, OneOf(LimitName)]
    used: Annotated[int | None, Shown("null for a rate of bytes, which is not measured.")]
    allowed: Annotated[int | None, Shown("null: no limit.")]
    window_seconds: Annotated[float | None, Shown("Requests: `allowed` per this number of seconds.")] = None
    is_of_process: Annotated[
        bool,
        Shown(
            "Each process of the API counts its own requests; `used` is the count of the answering process."
        ),
    ] = False
    level: Annotated[
        str, OneOf(Level), Shown("State of the use: within the limit, near it, or above it.")
    ] = "ok"

    @property
    def title(self) -> str:
        """The limit on pages."""
        return TITLES[self.limit]

    @property
    def share(self) -> float:
        """Used part from 0 to 1."""
        if not self.allowed:
            return 1.0 if self.allowed == 0 else 0.0
        return min(1.0, (self.used or 0) / self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectUse:
    """Limits and use of an account, key, or root. ``quota_id``: stored limits, in place of the defaults."""

    kind: Annotated[str, OneOf(SubjectKind)]
    subject: Annotated[str, Shown("As in a quota: account#3 or key#3; the id of a key; the name of a root.")]
    label: Annotated[str, Shown("The name of the account or key.")]
    quota_id: Annotated[int | None, Shown("Stored limits, in place of the defaults; null: none.")]
    limits: tuple[LimitUse, ...]
    warnings: Annotated[tuple[str, ...], Shown("Sentences about limits that are nearly or fully used.")] = ()

    def of(self, limit: str) -> LimitUse:
        """Return the use of a limit."""
        return next(one for one in self.limits if one.limit == limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use of the caller's account and key, and of visible roots."""

    account: SubjectUse
    key: Annotated[SubjectUse | None, Shown("null: the caller has no key.")]
    roots: tuple[SubjectUse, ...]


def known_subjects(connection: Connection, kind: SubjectKind) -> list[LimitSubject]:
    """Return all known subjects of a kind, including unused subjects."""
    stored = select(quotas.c.subject).where(quotas.c.kind == kind)
    names = set(connection.execute(stored).scalars())
    if kind == "root":
        names |= set(connection.execute(select(roots.c.name).where(roots.c.is_configured)).scalars())
        return [LimitSubject(kind, name) for name in sorted(names)]
    valid = select(api_keys.c.id).where(api_keys.c.revoked_seconds.is_(None))
    if kind == "key":
        names |= {str(number) for number in connection.execute(valid).scalars()}
    else:
        alone = valid.where(api_keys.c.account_id.is_(None))
        present = select(accounts.c.id).where(accounts.c.disabled_seconds.is_(None))
        names |= {f"key#{number}" for number in connection.execute(alone).scalars()}
        names |= {f"account#{number}" for number in connection.execute(present).scalars()}
        owners = select(jobs.c.owner).where(jobs.c.finished_seconds.is_(None)).distinct()
        names |= set(connection.execute(owners).scalars()) | set(kept_by_account(connection))
        names = {name for name in names if not name.startswith(SERVICE)}
    return [LimitSubject(kind, name) for name in sorted(names)]


def labels_of(connection: Connection, subjects: Iterable[LimitSubject]) -> dict[LimitSubject, str]:
    """Return the names of existing subjects."""
    wanted = set(subjects)
    of_accounts = select(accounts.c.id, accounts.c.kind, accounts.c.name)
    owner = (accounts.c.kind.label("account_kind"), accounts.c.name.label("account_name"))
    of_keys = select(api_keys.c.id, api_keys.c.name, api_keys.c.account_id, *owner).outerjoin(accounts)
    if len(wanted) <= _MAX_NAMED:
        of_accounts = of_accounts.where(accounts.c.id.in_(_numbers(wanted, "account#")))
        numbers = _numbers(wanted, "key#") | _numbers((one for one in wanted if one.kind == "key"), "")
        of_keys = of_keys.where(api_keys.c.id.in_(numbers))
    known: dict[LimitSubject, str] = {}
    for row in connection.execute(of_accounts):
        known[LimitSubject("account", f"account#{row.id}")] = actor_of(row.kind, row.name)
    for key in connection.execute(of_keys):
        is_alone = key.account_id is None
        name = (
            f"key:{key.name}"
            if is_alone
            else f"{actor_of(key.account_kind, key.account_name)}/key:{key.name}"
        )
        known[LimitSubject("key", str(key.id))] = name
        if is_alone:
            known[LimitSubject("account", f"key#{key.id}")] = name
    known[LimitSubject("account", LOCAL.owner)] = LOCAL.name
    known |= {LimitSubject("root", name): name for name in connection.execute(select(roots.c.name)).scalars()}
    return {subject: known[subject] for subject in wanted if subject in known}


_MAX_NAMED: Final = 500
"""Subjects named by one statement; above this, all known subjects are read."""


def _numbers(subjects: Iterable[LimitSubject], prefix: str) -> set[int]:
    """Return the numbers of subjects with names made of ``prefix`` and a valid id."""
    texts = (one.name.removeprefix(prefix) for one in subjects if one.name.startswith(prefix))
    return {int(text) for text in texts if text.isdecimal() and text.isascii() and len(text) <= 15}


def foremost(
    connection: Connection, service: Service, subjects: Sequence[LimitSubject], most: int
) -> list[LimitSubject]:
    """Choose subjects of one kind that can be among the ``most`` nearest to a limit: subjects with own
    limits, with jobs, downloads, or requests, and with the most bytes.

    All other subjects have equal limits and no use, and follow by name.
    """
    if len(subjects) <= 2 * most + _MAX_NAMED:
        return list(subjects)
    streams, rates = streams_of(service), service.rates
    stored = set(connection.execute(select(quotas.c.name)).scalars())
    busy = {*_running(connection), *_queued(connection)}
    kept = kept_by_account(connection)
    large = set(nlargest(most, kept, key=lambda name: kept[name]))

    def is_used(one: LimitSubject) -> bool:
        if one in busy or one.text in stored or (one.kind == "account" and one.name in large):
            return True
        return bool(streams.running_of(one) or rates.counted(one.text))

    used = [one for one in subjects if is_used(one)]
    chosen = set(used)
    return [*used, *islice((one for one in subjects if one not in chosen), most)]


def use_of(connection: Connection, service: Service, subjects: Sequence[LimitSubject]) -> list[SubjectUse]:
    """Return the use of each of ``subjects``, in order."""
    allowances = service.allowances.of(subjects, connection)
    running, queued = _running(connection), _queued(connection)
    if len(subjects) <= _FEW:
        kept = {subject: bytes_kept(connection, subject) for subject in subjects}
    else:
        kept = {LimitSubject("account", name): size for name, size in kept_by_account(connection).items()}
        kept |= {LimitSubject("root", name): size for name, size in kept_by_root(connection).items()}
    streams = streams_of(service)
    stored = {row.name: row.id for row in connection.execute(select(quotas.c.name, quotas.c.id))}
    labels = labels_of(connection, subjects)
    found = []
    for subject in subjects:
        allowance = allowances[subject]
        used = {
            "jobs_running": len(running[subject]),
            "jobs_queued": queued[subject],
            "downloads": streams.running_of(subject),
            "requests": service.rates.counted(subject.text),
            "bytes_kept": kept.get(subject, 0),
        }
        warning = bytes_warning(subject, allowance, used["bytes_kept"])
        found.append(
            SubjectUse(
                kind=subject.kind,
                subject=subject.name,
                label=labels.get(subject, subject.name),
                quota_id=stored.get(subject.text),
                limits=tuple(_limits(subject.kind, allowance, used)),
                warnings=() if warning is None else (warning,),
            )
        )
    return found


def _limits(kind: SubjectKind, allowance: Allowance, used: Mapping[str, int]) -> Iterable[LimitUse]:
    values = {field.name: getattr(allowance, field.name) for field in fields(allowance)}
    rate = allowance.requests
    for name in LIMITS_OF[kind]:
        if name == "bytes_kept_warning":
            continue
        allowed = values[name] if name != "requests" else None if rate is None else rate.count
        yield LimitUse(
            limit=name,
            used=used.get(name),
            allowed=allowed,
            window_seconds=None if name != "requests" or rate is None else rate.seconds,
            is_of_process=name in ("downloads", "download_bytes_per_second", "requests"),
            level=_level(name, used.get(name, 0), allowed, allowance),
        )


def bytes_level(used: int, allowance: Allowance) -> Level:
    """Return how near the bytes of an account or a root are to their limit."""
    return _level("bytes_kept", used, allowance.bytes_kept, allowance)


def _level(name: str, used: int, allowed: int | None, allowance: Allowance) -> Level:
    if name == "download_bytes_per_second":
        return "ok"
    if allowed is not None and used >= allowed:
        return "full"
    warned = allowance.bytes_kept_warning if name == "bytes_kept" else None
    if warned is None:
        return "warning" if allowed is not None and used >= _NEAR * allowed else "ok"
    return "warning" if used > warned else "ok"


def _running(connection: Connection) -> Mapping[LimitSubject, set[int]]:
    """Return the jobs at work, by subject."""
    names = {row.id: row.name for row in connection.execute(select(roots.c.id, roots.c.name))}
    found: defaultdict[LimitSubject, set[int]] = defaultdict(set)
    for one in jobs_at_work(connection):
        if not one.owner.startswith(SERVICE):
            root = None if one.root_id is None else names[one.root_id]
            for subject in subjects_of(one.owner, one.key_id, root):
                found[subject].add(one.job_id)
    return found


def _queued(connection: Connection) -> Counter[LimitSubject]:
    """Return the number of queued jobs, by subject."""
    query = (
        select(jobs.c.owner, jobs.c.key_id, roots.c.name, func.count())
        .outerjoin_from(jobs, roots)
        .where(jobs.c.state == "queued", ~jobs.c.owner.startswith(SERVICE))
        .group_by(jobs.c.owner, jobs.c.key_id, roots.c.name)
    )
    found: Counter[LimitSubject] = Counter()
    for owner, key_id, root, count in connection.execute(query):
        for subject in subjects_of(owner, key_id, root):
            found[subject] += count
    return found
