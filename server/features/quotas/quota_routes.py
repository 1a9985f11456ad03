"""Quotas: API and pages for admins, and a page of the own use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, cast, get_args

from fastapi import Query as InQuery
from fastapi import Response
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from sqlalchemy import Connection, Row

from dcp.server.catalog.inputs import Query, Request, Text
from dcp.server.catalog.runs import kept_by_account, kept_by_root
from dcp.server.core.allowances import (
    Allowance,
    LimitName,
    LimitSubject,
    SubjectKind,
    bytes_kept,
    bytes_warning,
    subjects_of,
)
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import IfMatch, PageQuery
from dcp.server.core.pages.formatting import bytes_text, count_text
from dcp.server.core.problems import ConflictError, UnprocessableError
from dcp.server.core.resource import Resource
from dcp.server.database.mapping import record_of_row
from dcp.server.features.quotas import (
    LIMITS_OF,
    MOST,
    QuotaAllowances,
    RateText,
    feature,
    given_size,
    quotas,
    size_of,
)
from dcp.server.features.quotas.usage import (
    TITLES,
    SubjectUse,
    Usage,
    bytes_level,
    foremost,
    known_subjects,
    labels_of,
    use_of,
)
from dcp.server.records.checkpoints import Root, Run
from dcp.server.records.declaring import OneOf, Shown
from dcp.server.records.lists import Items, Page

_ADMIN: Final[dict[str, Any]] = {"tag": "quotas", "scope": "admin", "all_roots": True}
_QUOTA: Final = "/quotas/{quota_id}"

_Jobs = Annotated[int, Field(ge=1, le=1_000_000)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_SLOWEST: Final = 16 << 10


def _size_schema(least: int) -> WithJsonSchema:
    number = {"type": "integer", "minimum": least, "maximum": MOST}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "maxLength": 64}, {"type": "null"}]})


_Bytes = Annotated[Annotated[int, Field(ge=0, le=MOST)] | None, BeforeValidator(given_size), _size_schema(0)]
_Speed = Annotated[
    Annotated[int, Field(ge=_SLOWEST, le=MOST)] | None, BeforeValidator(given_size), _size_schema(_SLOWEST)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Stored limits for an account, key, or root, in place of the defaults."""

    id: int
    kind: Annotated[str, OneOf(SubjectKind)]
    subject: Annotated[
        str,
        Shown(
            "Account: account#3, or key#3 for a key without an account. Key: id. Root: name.",
            examples=("account#3", "main"),
        ),
    ]
    limits: Annotated[Mapping[str, Any], Shown("By name; null: no limit; absent: the default.")]
    note: Annotated[str, Shown("Text for admins.")]
    created_at: datetime
    updated_at: datetime
    etag: Annotated[str, Shown("For If-Match.")]


QUOTAS: Final = Resource(
    quotas,
    what="quota",
    noun="quota",
    tag="q{id}",
    record=lambda row, etag: record_of_row(Quota, row, etag=etag),
    detail=lambda row: {"kind": row.kind, "subject": row.subject, "limits": row.limits},
    root=lambda row: row.subject if row.kind == "root" else None,
)


class QuotaLimits(Request):
    """Limits by name: null removes a limit, and absent limits follow the defaults.

    Sizes are bytes, or texts such as "20 TB".
    """

    jobs_running: _Jobs | None = Field(default=None, description="Jobs at work at a time, of all workers.")
    jobs_queued: _Count | None = Field(default=None, description="Jobs in the queue.")
    downloads: _Count | None = Field(default=None, description="At a time, in each process of the API.")
    download_bytes_per_second: _Speed = Field(
        default=None, description="Bytes per second of all downloads in a process."
    )
    requests: RateText | None = Field(
        default=None,
        description="For example 600/minute, in each process of the API.",
        examples=["600/minute"],
    )
    bytes_kept_warning: _Bytes = Field(default=None, description="Registrations warn above this limit.")
    bytes_kept: _Bytes = Field(
        default=None,
        description="Bytes of committed checkpoints: registrations above are refused.",
        examples=["20 TB", 500_000_000_000],
    )

    def given(self) -> dict[str, Any]:
        """Return the given limits by name."""
        return self.model_dump(exclude_unset=True)


class NewQuota(Request):
    """Limits of an account, key, or root."""

    kind: SubjectKind
    subject: Annotated[Text, Field(min_length=1, max_length=192, examples=["main"])] = Field(
        description="Account: account#3, or key#3 for a key without an account. Key: id. Root: name."
    )
    limits: QuotaLimits
    note: Text = Field(default="", description="Text for admins.")


class QuotaChange(Request):
    """Fields to change; ``limits`` replaces all stored limits."""

    limits: QuotaLimits = Field(
        default=QuotaLimits(), description="All limits to store; absent limits follow the defaults."
    )
    note: Text = Field(default="", description="Text for admins.")


# -- the resource --------------------------------------------------------------------------------------------


@feature.post("/quotas", **_ADMIN, status=201, errors=(409,))
def create_quota(body: NewQuota, ask: Ask) -> Quota:
    """Store limits for an account, a key or a root. They apply immediately, in all processes."""
    subject = LimitSubject(body.kind, body.subject)
    limits = _checked(subject.kind, body.limits.given())

    def act(connection: Connection) -> Quota:
        _check_exists(connection, subject)
        row = QUOTAS.insert(connection, ask, _columns(subject, limits, body.note))
        return QUOTAS.answer(ask, row, is_new=True)

    found = ask.transact(act)
    _expire(ask)
    return found


@feature.get("/quotas", **_ADMIN, errors=())
def list_quotas(ask: Ask, page: PageQuery) -> Page[Quota]:
    """List the stored quotas by id. Other subjects have the defaults of the settings."""
    return QUOTAS.page(ask, page)


class UseQuery(Query):
    """Subjects of one kind with names that contain ``q``."""

    kind: Annotated[SubjectKind, Field(description="Kind of the subjects.")] = "account"
    q: Annotated[Text, Field(max_length=128, description="Part of the name.")] = ""
    limit: Annotated[int, Field(ge=1, le=1000, description="Rows at most.")] = 200


@feature.get("/quotas/usage", **_ADMIN, errors=())
def list_quota_usage(query: Annotated[UseQuery, InQuery()], ask: Ask) -> Items[SubjectUse]:
    """List use and limits of accounts, keys, or roots: nearest to a limit first, then by bytes."""
    return Items(tuple(_found(query, ask)[0]))


def _found(query: UseQuery, ask: Ask) -> tuple[list[SubjectUse], int]:
    """Find the use of the displayed subjects, and count all matches."""
    with ask.reading() as connection:
        subjects = known_subjects(connection, query.kind)
        if query.q:
            labels = labels_of(connection, subjects)
            wanted = query.q.lower()
            subjects = [one for one in subjects if wanted in labels.get(one, one.name).lower()]
        chosen = foremost(connection, ask.service, subjects, query.limit)
        found = use_of(connection, ask.service, chosen)
    return sorted(found, key=_rank)[: query.limit], len(subjects)


def _rank(one: SubjectUse) -> tuple[Any, ...]:
    levels = {"full": 0, "warning": 1, "ok": 2}
    size = next((-(limit.used or 0) for limit in one.limits if limit.limit == "bytes_kept"), 0)
    nearest = max(limit.share for limit in one.limits)
    return (min(levels[limit.level] for limit in one.limits), -nearest, size, one.label)


@feature.get(_QUOTA, **_ADMIN)
def get_quota(quota_id: IdPath, ask: Ask) -> Quota:
    """Get a quota."""
    return QUOTAS.read(ask, quota_id)


@feature.patch(_QUOTA, **_ADMIN, errors=(404, 412))
def change_quota(quota_id: IdPath, body: QuotaChange, ask: Ask, match: IfMatch) -> Quota:
    """Change the given fields; given limits replace all stored limits."""
    values = body.model_dump(exclude_unset=True)

    def act(connection: Connection) -> Quota:
        row = QUOTAS.lock(connection, ask, quota_id, match)
        if "limits" in values:
            values["limits"] = _checked(row.kind, body.limits.given())
        return QUOTAS.answer(ask, QUOTAS.update(connection, ask, row, values))

    found = ask.transact(act)
    _expire(ask)
    return found


@feature.delete(_QUOTA, **_ADMIN, status=204, errors=(404, 412))
def delete_quota(quota_id: IdPath, ask: Ask, match: IfMatch) -> None:
    """Delete a quota: the defaults apply again."""
    QUOTAS.delete(ask, quota_id, match)
    _expire(ask)


def _columns(subject: LimitSubject, limits: Mapping[str, Any], note: str) -> dict[str, Any]:
    return {
        "name": subject.text,
        "kind": subject.kind,
        "subject": subject.name,
        "limits": dict(limits),
        "note": note,
    }


def _checked(kind: SubjectKind, limits: dict[str, Any]) -> dict[str, Any]:
    """Check the limits of a subject of this kind. Raises UnprocessableError."""
    for name in limits:
        if name not in LIMITS_OF[kind]:
            where = "its account" if kind == "key" else "an account or a key"
            raise UnprocessableError(
                f"limits.{name}: not available for a {kind}; set this limit for {where}", field=name
            )
    most, warned = limits.get("bytes_kept"), limits.get("bytes_kept_warning")
    if most is not None and warned is not None and warned > most:
        raise UnprocessableError(
            "limits.bytes_kept_warning: must be at most bytes_kept",
            field="bytes_kept_warning",
        )
    return limits


def _check_exists(connection: Connection, subject: LimitSubject) -> None:
    if subject not in labels_of(connection, [subject]):
        known = {"account": "account, such as account#3 or key#3", "key": "key of this id", "root": "root"}
        raise UnprocessableError(f"subject: no such {known[subject.kind]}", field="subject")


def _expire(ask: Ask) -> None:
    cast(QuotaAllowances, ask.service.allowances).expire()


# -- pages ---------------------------------------------------------------------------------------------------

_BYTES: Final = ("download_bytes_per_second", "bytes_kept_warning", "bytes_kept")
_KINDS: Final[Mapping[SubjectKind, str]] = {"account": "Accounts", "key": "Keys", "root": "Roots"}
_SHOWN: Final = 200
_NO_LIMIT: Final = "none"


@feature.page("/usage", "usage.html", scope="any", tag="quotas", errors=())
def get_usage(ask: Ask) -> Usage:
    """Return use and limits of the caller's account and key, and of visible roots."""
    own = subjects_of(ask.caller.owner, ask.caller.key_id)
    visible = [root.name for root in ask.roots if ask.caller.may_see(root.name)]
    with ask.reading() as connection:
        found = use_of(connection, ask.service, [*own, *(LimitSubject("root", name) for name in visible)])
    account, *others = found
    key = others.pop(0) if len(own) > 1 else None
    return Usage(account=account, key=key, roots=tuple(others))


class QuotasView(Query):
    """Query of the page: one kind of subjects with names that contain ``q``."""

    kind: SubjectKind = "account"
    q: Annotated[Text, Field(max_length=128)] = ""
    done: Annotated[str, Field(max_length=16)] = ""


@feature.page("/quotas", "quotas.html", scope="admin", all_roots=True)
def quotas_page(view: Annotated[QuotasView, InQuery()], ask: Ask) -> dict[str, Any]:
    """Show the use of accounts, keys, or roots, nearest to a limit first."""
    found, count = _found(UseQuery(kind=view.kind, q=view.q, limit=_SHOWN), ask)
    return {
        "twin": f"/api/v1/quotas/usage?kind={view.kind}",
        "view": view,
        "kinds": _KINDS,
        "rows": found,
        "count": count,
        "titles": {name: TITLES[name] for name in _SHOWN_LIMITS if name in LIMITS_OF[view.kind]},
        "narrow": {"downloads": "mid", "requests": "wide"},
    }


_SHOWN_LIMITS: Final = ("bytes_kept", "jobs_running", "jobs_queued", "downloads", "requests")


class SubjectView(Query):
    """The address of the form: an account, a key or a root."""

    kind: SubjectKind
    subject: Annotated[Text, Field(min_length=1, max_length=192)]


@feature.page("/quotas/edit", "quota.html", scope="admin", all_roots=True)
def quota_page(view: Annotated[SubjectView, InQuery()], ask: Ask) -> dict[str, Any]:
    """Show the form with the limits of a subject."""
    return _form_values(LimitSubject(view.kind, view.subject), ask)


def _form_values(subject: LimitSubject, ask: Ask, fault: str | None = None) -> dict[str, Any]:
    with ask.reading() as connection:
        _check_exists(connection, subject)
        (use,) = use_of(connection, ask.service, [subject])
        row = next(iter(QUOTAS.rows(connection, name=subject.text)), None)
        allowance = ask.service.allowances.default(subject)
    limits = {} if row is None else row.limits
    shown = {name: _NO_LIMIT if value is None else str(value) for name, value in limits.items()}
    if fault:
        shown = {name: ask.form.text(name) for name in LIMITS_OF[subject.kind]}
    return {
        "twin": "/api/v1/quotas" if row is None else f"/api/v1/quotas/{row.id}",
        "use": use,
        "note": ask.form.text("note") if fault else "" if row is None else row.note,
        "version": 0 if row is None else row.version,
        "fields": [
            (name, TITLES[name], shown.get(name, ""), _default_text(name, allowance))
            for name in LIMITS_OF[subject.kind]
        ],
        "fault": fault,
    }


def _default_text(name: str, allowance: Allowance) -> str:
    value = getattr(allowance, name)
    if value is None:
        return "no limit"
    if name == "requests":
        return f"{count_text(value.count)} in {value.seconds:g} s"
    if name not in _BYTES:
        return count_text(value)
    return f"{bytes_text(value)}/s" if name == "download_bytes_per_second" else bytes_text(value)


@feature.form("/quotas/edit", scope="admin", all_roots=True)
def quota_form(ask: Ask) -> str | Response:
    """Store the limits of a subject; delete the quota if no limit is given."""
    kind, name = ask.form.text("kind"), ask.form.text("subject")
    if kind not in get_args(SubjectKind):
        raise UnprocessableError("kind: must be account, key or root", field="kind")
    subject = LimitSubject(cast(SubjectKind, kind), name)
    try:
        limits = _checked(subject.kind, _typed(subject.kind, ask))
        ask.transact(lambda connection: _store(connection, subject, limits, ask))
    except (UnprocessableError, ConflictError) as error:
        values = _form_values(subject, ask, error.detail)
        return ask.page("quotas/quota.html", error.status, **values)
    _expire(ask)
    return f"/quotas?kind={subject.kind}&done=saved"


def _typed(kind: SubjectKind, ask: Ask) -> dict[str, Any]:
    """Read the limits of the form: numbers, sizes such as 20 TB, rates. Raises UnprocessableError."""
    found: dict[str, Any] = {}
    for name in LIMITS_OF[kind]:
        text = ask.form.text(name)
        if text.lower() == _NO_LIMIT:
            found[name] = None
        elif text:
            found[name] = _value(name, text)
    try:
        return QuotaLimits.model_validate(found).given()
    except ValidationError as error:
        field, said = str(error.errors()[0]["loc"][0]), str(error.errors()[0]["msg"])
        raise UnprocessableError(f"{TITLES[cast(LimitName, field)]}: {said}", field=field) from None


def _value(name: LimitName, text: str) -> Any:
    if name == "requests":
        return text
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 1,000, but not 20,5
    try:
        return size_of(plain) if name in _BYTES else int(plain)
    except ValueError:
        example = "20 TB or 500 GiB" if name in _BYTES else "4"
        raise UnprocessableError(
            f"{TITLES[name]}: must be a number such as {example}, or none for no limit", field=name
        ) from None


def _store(connection: Connection, subject: LimitSubject, limits: dict[str, Any], ask: Ask) -> None:
    _check_exists(connection, subject)
    note = ask.form.text("note")
    row: Row[Any] | None = next(iter(QUOTAS.rows(connection, name=subject.text)), None)
    version = 0 if row is None else row.version
    if ask.form.text("version") != str(version):
        raise ConflictError("the limits were changed in the meantime; reload the page")
    if row is None:
        if limits:
            QUOTAS.insert(connection, ask, _columns(subject, limits, note[:2048]))
    elif limits:
        QUOTAS.update(connection, ask, row, {"limits": limits, "note": note[:2048]})
    else:
        QUOTAS.remove(connection, ask, row)


# -- on other pages ------------------------------------------------------------------------------------------


@feature.panel("run.notices", "notice.html", order=1)
def run_notice(ask: Ask, found: Run) -> dict[str, Any] | None:
    """Warn on the page of a run if its root exceeds the limit of bytes."""
    return _notice(found.root, ask)


@feature.panel("root", "notice.html", order=1)
def root_notice(ask: Ask, found: Root) -> dict[str, Any] | None:
    """Warn in the card of a root above the limit of bytes."""
    return _notice(found.name, ask)


def _notice(root: str, ask: Ask) -> dict[str, Any] | None:
    subject = LimitSubject("root", root)
    with ask.reading() as connection:
        allowance = ask.service.allowances.of([subject], connection)[subject]
        warning = bytes_warning(subject, allowance, bytes_kept(connection, subject))
    return None if warning is None else {"warning": warning}


# -- metrics -------------------------------------------------------------------------------------------------

_ACCOUNTS: Final = 20
"""Number of accounts with a metric of their bytes; a series for each person would be too many."""


@feature.samples
def read_samples(connection: Connection, service: Service) -> Iterator[Metric]:
    """Read the use of byte limits, and the largest users."""
    kept = kept_by_account(connection)
    most = sorted(kept, key=lambda name: kept[name], reverse=True)[:_ACCOUNTS]
    labels = labels_of(connection, [LimitSubject("account", name) for name in most])
    family = GaugeMetricFamily(
        "dcp_account_bytes", "Bytes kept for the accounts with the most bytes", labels=["account"]
    )
    for name in most:
        family.add_metric([labels.get(LimitSubject("account", name), name)], kept[name])
    yield family
    limits = GaugeMetricFamily("dcp_root_bytes_limit", "Limit of bytes of a root", labels=["root"])
    levels = Counter({(kind, level): 0 for kind in ("account", "root") for level in ("warning", "full")})
    by_root = kept_by_root(connection)
    subjects = {LimitSubject("account", name): size for name, size in kept.items()}
    subjects |= {one: by_root.get(one.name, 0) for one in known_subjects(connection, "root")}
    for subject, allowance in service.allowances.of(subjects, connection).items():
        level = bytes_level(subjects[subject], allowance)
        if (subject.kind, level) in levels:
            levels[subject.kind, level] += 1
        if subject.kind == "root" and allowance.bytes_kept is not None:
            limits.add_metric([subject.name], allowance.bytes_kept)
    yield limits
    near = GaugeMetricFamily(
        "dcp_quota_subjects", "Accounts and roots near to their bytes or beyond", labels=["kind", "level"]
    )
    for labelled, count in levels.items():
        near.add_metric([*labelled], count)
    yield near
