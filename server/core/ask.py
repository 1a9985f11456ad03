"""`Ask`: a request with caller, catalog, data and jobs for the functions of features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel
from sqlalchemy import Connection

from dcp.server.catalog.labels import Change
from dcp.server.core.allowances import check_room, subjects_of
from dcp.server.core.data.access import Data
from dcp.server.core.data.responses import CACHE, NotModifiedError, is_unchanged
from dcp.server.core.http.admission import SESSION_COOKIE
from dcp.server.core.http.context import Service
from dcp.server.core.http.idempotency import transact
from dcp.server.core.jobs.kind import Kind, Parameters
from dcp.server.core.jobs.ledger.claims import check_queue
from dcp.server.core.jobs.ledger.reading import get_job, last_job, with_offers
from dcp.server.core.jobs.ledger.rows import progress_of
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.logs import redact
from dcp.server.core.pages import rendering
from dcp.server.core.pages.requests import Form, own_path, query_of, set_cookie
from dcp.server.core.problems import ForbiddenError, UnauthorizedError
from dcp.server.core.roots import Roots
from dcp.server.core.security.callers import begin_session, end_session
from dcp.server.core.security.principal import Principal
from dcp.server.core.settings import Settings
from dcp.server.records.checkpoints import Checkpoint
from dcp.server.records.jobs import Job


class Tagged(Protocol):
    """Protocol of records with an ETag."""

    @property
    def etag(self) -> str:
        """The tag for If-Match."""


E = TypeVar("E", bound=Tagged)
P = ParamSpec("P")
Q = TypeVar("Q", bound=BaseModel)
M = TypeVar("M", bound=Parameters)
T = TypeVar("T")


class Ask:
    """A request: the caller and its visible roots, with the database, roots and jobs of the service.

    A function of a feature takes a parameter of this type. ``response`` carries headers of the answer.
    """

    def __init__(self, request: Request, response: Response) -> None:
        self.request = request
        self.response = response
        self.service = cast(Service, request.app.state.service)

    @property
    def caller(self) -> Principal:
        """The calling key. Raises UnauthorizedError on a public route without a key."""
        principal = getattr(self.request.state, "principal", None)
        if not isinstance(principal, Principal):
            raise UnauthorizedError("send a key: Authorization: Bearer dcp_...")
        return principal

    @property
    def visible(self) -> frozenset[str] | None:
        """The names of the roots visible to the caller; None for all."""
        return self.caller.roots

    @property
    def settings(self) -> Settings:
        """The settings of the service."""
        return self.service.settings

    @property
    def roots(self) -> Roots:
        """All configured roots, independent of the caller."""
        return self.service.roots

    @property
    def data(self) -> Data:
        """The bytes of the checkpoints visible to the caller."""
        return Data(self.service, self.caller)

    @property
    def now(self) -> float:
        """The time in seconds since the epoch."""
        return self.service.clock()

    @property
    def address(self) -> str | None:
        """The address of the client, if known."""
        return None if self.request.client is None else self.request.client.host

    @property
    def request_id(self) -> str | None:
        """The id of the request in logs."""
        return getattr(self.request.state, "request_id", None)

    @property
    def form(self) -> Form:
        """The fields of the submitted form."""
        return Form(self.request.state.sent_form)

    def query(self, kind: type[Q]) -> Q:
        """Return the query parameters declared by ``kind``."""
        given = self.request.query_params
        return query_of(kind, **{name: given[name] for name in kind.model_fields if name in given})

    def page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return another page than the declared one, such as a form with error messages."""
        return rendering.page(self.request, template, status, **values)

    def tagged(self, found: E) -> E:
        """Return the record ``found`` and set its ``etag`` as header."""
        self.response.headers["ETag"] = found.etag
        return found

    def place_of(self, checkpoint: Checkpoint) -> str:
        """Return the URL of a checkpoint, with a placeholder for the root unless the caller may see it."""
        root = checkpoint.root
        url = (
            redact(self.settings.roots[root].url)
            if self.caller.may("admin", root)
            else f"<URL of root {root}>"
        )
        return f"{url.rstrip('/')}/{checkpoint.key}"

    def tag(self, etag: str) -> None:
        """Set the ETag of the answer in advance. Raises NotModifiedError for a current client, and
        PreconditionFailedError."""
        self.response.headers.update({"ETag": etag, "Cache-Control": CACHE})
        if is_unchanged(self.request.headers, etag):
            raise NotModifiedError(etag)

    def change(self, expected_version: int | None = None) -> Change:
        """Return the caller's change for catalog and audit log; ``expected_version`` None accepts any."""
        return Change(
            actor=self.caller.name,
            now=self.now,
            expected_version=expected_version,
            visible=self.visible,
            request_id=self.request_id,
            address=self.address,
        )

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a read-only connection for several consistent queries."""
        return self.service.database.read()

    def find(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one query of the catalog: a function with a connection as first argument."""
        with self.reading() as connection:
            return query(connection, *args, **kwargs)

    def transact(self, act: Callable[[Connection], T]) -> T:
        """Run ``act``, which writes and returns the answer, in one transaction, repeated on conflicts.

        With an ``Idempotency-Key`` the same transaction stores the answer.
        """
        return transact(self.service.database, self.request, self.response, act)

    def transact_secretly(self, act: Callable[[Connection], T]) -> T:
        """Run `transact` for an answer with a secret, which no ``Idempotency-Key`` stores."""
        self.request.state.is_secret = True
        return self.service.database.transact(act)

    def submit(self, kind: type[Kind[M]] | Kind[M], params: M, priority: int | None = None) -> Job:
        """Submit a job, or return the unfinished job with the same work.

        Raises the refusals of the kind. Objects invisible to the caller, or outside of the roots with the
        scope, are not found.
        """

        def submit(connection: Connection) -> Job:
            job_kind = self.service.kinds[kind.name]
            if not self.caller.may(job_kind.scope):
                raise ForbiddenError(
                    f"the job {job_kind.name} needs the scope {job_kind.scope!r}", scope=job_kind.scope
                )
            caller = self.caller.having(job_kind.scope)
            spec = job_kind.specify(connection, params, caller, self.settings)
            if job_kind.scope == "convert":  # the job writes checkpoints
                subjects = subjects_of(caller.owner, caller.key_id, spec.root)
                check_room(connection, self.service.allowances, subjects)
            spec = replace(spec, owner=caller.owner, key_id=caller.key_id)
            if priority is not None:
                if priority > 0 and not caller.may("admin", spec.root):
                    raise ForbiddenError("a priority above 0 needs the scope 'admin'", scope="admin")
                spec = replace(spec, priority=priority)
            job_id, is_new = submit_or_join(connection, spec, self.now)
            if is_new:
                self.check_queue(connection, job_id)
                detail = {"kind": spec.kind, "params": dict(spec.params)}
                self.change().record(connection, "job.submit", f"job:{job_id}", detail)
            self.response.headers["Location"] = f"/api/v1/jobs/{job_id}"
            return get_job(connection, job_id)

        return self.transact(submit)

    def sign_in(self, caller: Principal, target: str) -> Response:
        """Start a browser session of ``caller``, a key or person, and show the page ``target``. Ends the
        previous session."""
        before = self.request.cookies.get(SESSION_COOKIE)
        subject = f"account:{caller.account_id}" if caller.key_id is None else f"key:{caller.key_id}"

        def act(connection: Connection) -> str:
            address = self.address or "unknown"
            change = Change(actor=caller.name, now=self.now, request_id=self.request_id, address=address)
            change.record(connection, "session.begin", subject, None)
            if before is not None:
                end_session(connection, before)
            return begin_session(connection, caller, self.now, self.settings.session_seconds)

        answer = RedirectResponse(own_path(target), 303)
        token = self.service.database.transact(act)
        set_cookie(self.request, answer, SESSION_COOKIE, token, self.settings.session_seconds)
        return answer

    def check_queue(self, connection: Connection, job_id: int) -> None:
        """Refuse a job queued in this transaction above the limits of its account, key or root.

        Raises TooManyRequestsError, after which the transaction must roll back.
        """
        check_queue(connection, self.service.allowances, job_id)

    def job(self, job_id: int) -> Job:
        """Return a job with its progress. Raises MissingError."""
        with self.reading() as connection:
            job = get_job(connection, job_id, self.visible)
            progress = {} if job.is_final else progress_of(connection, [job_id])
            (job,) = with_offers(connection, [job], self.now)
        return replace(job, progress=progress.get(job_id, job.progress))

    def last_result(self, kind: type[Kind[M]], params: M) -> Job | None:
        """Return the newest successful job with the result key of ``params`` and its whole ``result``."""
        return self.find(last_job, kind.result_key(params), self.visible, succeeded=True, whole=True)

    def last_job(self, kind: type[Kind[M]], params: M, after: int = 0) -> Job | None:
        """Return the newest job with the result key of ``params`` and a number above ``after``, for a
        waiting page."""
        job = self.find(last_job, kind.result_key(params), self.visible)
        return None if job is None or job.id <= after else self.job(job.id)


async def _ask(request: Request, response: Response) -> Ask:
    return Ask(request, response)


AskDep = Annotated[Ask, Depends(_ask)]
"""Parameter type for functions of routers; functions of features use `Ask` directly."""
