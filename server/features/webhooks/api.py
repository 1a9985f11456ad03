"""Webhooks: who is told of what, and what became of it. Only for admins: they make the service speak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.cursors import decode_cursor, encode_cursor
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Author, Caller, IfMatch, Page, ServiceDep, Writer, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.problems import ConflictError, ForbiddenError, UnprocessableError
from dcp.server.core.security.principal import Principal
from dcp.server.features.webhooks import hooks, ledger
from dcp.server.features.webhooks.addresses import Allowed, RefusedUrlError, parse_url
from dcp.server.features.webhooks.answers import (
    DeliveryAnswer,
    DeliveryList,
    RotateSecret,
    SecretAnswer,
    WebhookAnswer,
    WebhookChange,
    WebhookList,
    WebhookRequest,
)
from dcp.server.features.webhooks.hooks import Hook, HookChange, NewHook
from dcp.server.features.webhooks.ledger import DeliveryState
from dcp.server.features.webhooks.sealing import Sealer

__all__ = ["router"]

router = api_router("/webhooks", tags=["webhooks"], dependencies=[requires("admin")])

_USUAL = (400, 401, 403, 421, 422, 429, 503)
_CURSOR = "webhooks"


@router.post(
    "",
    status_code=201,
    responses=problems(408, 413, 415, 409, *_USUAL),
)
def create_webhook(
    body: WebhookRequest, service: ServiceDep, author: Author, request: Request, response: Response
) -> SecretAnswer:
    """Make one. The answer has its secret, for the only time, so that no Idempotency-Key keeps it."""
    _check_url(service, body.url)
    roots = _check_roots(service, author.principal, body.roots)
    new = NewHook(
        url=body.url,
        events=tuple(set(body.events)),
        roots=roots,
        description=body.description,
        is_enabled=body.is_enabled,
        secret=body.secret,
    )
    now = author.now_seconds
    sealer = Sealer.from_settings(service.settings)

    def act(connection: Connection) -> tuple[Hook, str]:
        hook, secret = hooks.create_hook(connection, new, now, sealer)
        _note(connection, author, "webhook.create", hook, {"events": list(hook.events)})
        return hook, secret

    hook, secret = service.database.transact(act)
    request.state.is_secret = True
    response.headers["Location"] = f"{request.url.path}/{hook.id}"
    response.headers["ETag"] = hook.etag
    return SecretAnswer.of(hook, secret=secret)


@router.get("", responses=problems(*_USUAL))
def list_webhooks(service: ServiceDep, caller: Caller, page: Page) -> WebhookList:
    """Those that this key may see, by id."""
    after = decode_cursor(page.cursor, _CURSOR, int)[0] if page.cursor is not None else 0
    with service.database.read() as connection:
        found = hooks.list_hooks(connection, caller.roots, after, page.limit + 1)
    shown = found[: page.limit]
    cursor = encode_cursor(_CURSOR, shown[-1].id) if len(found) > page.limit else None
    return WebhookList(items=[WebhookAnswer.of(hook) for hook in shown], next_cursor=cursor)


@router.get("/{webhook_id}", responses=problems(404, *_USUAL))
def get_webhook(webhook_id: IdPath, service: ServiceDep, caller: Caller, response: Response) -> WebhookAnswer:
    """One of them."""
    with service.database.read() as connection:
        hook = hooks.get_hook(connection, webhook_id, caller.roots)
    response.headers["ETag"] = hook.etag
    return WebhookAnswer.of(hook)


@router.patch("/{webhook_id}", responses=problems(404, 408, 412, 413, 415, *_USUAL))
def change_webhook(
    webhook_id: IdPath,
    body: WebhookChange,
    service: ServiceDep,
    author: Author,
    match: IfMatch,
    response: Response,
) -> WebhookAnswer:
    """Change what is given. What waits for a disabled one is delivered when it is enabled again."""
    values: dict[str, Any] = body.model_dump(exclude_unset=True)
    if "roots" in values:
        roots = _check_roots(service, author.principal, values["roots"])
        values["roots"] = None if roots is None else sorted(roots)
    empty = [name for name, value in values.items() if value is None and name != "roots"]
    if empty:
        raise UnprocessableError(f"{empty[0]} cannot be null")
    if "url" in values:
        _check_url(service, values["url"])
    if "events" in values:
        values["events"] = sorted(set(values["events"]))
    change = HookChange(values=values, expected_version=match.version(f"w{webhook_id}"))
    now = author.now_seconds

    def act(connection: Connection) -> Hook:
        hook = hooks.update_hook(connection, webhook_id, change, author.principal.roots, now)
        _note(connection, author, "webhook.change", hook, {"changed": sorted(values)})
        return hook

    hook = service.database.transact(act)
    response.headers["ETag"] = hook.etag
    return WebhookAnswer.of(hook)


@router.delete("/{webhook_id}", status_code=204, responses=problems(404, 412, *_USUAL))
def delete_webhook(webhook_id: IdPath, service: ServiceDep, author: Author, match: IfMatch) -> None:
    """Remove it, with what is remembered of its deliveries."""
    expected = match.version(f"w{webhook_id}")

    def act(connection: Connection) -> None:
        hook = hooks.delete_hook(connection, webhook_id, expected, author.principal.roots)
        _note(connection, author, "webhook.delete", hook, {})

    service.database.transact(act)


@router.post(
    "/{webhook_id}/rotate-secret",
    responses=problems(404, 408, 409, 412, 413, 415, *_USUAL),
)
def rotate_webhook_secret(
    webhook_id: IdPath,
    body: RotateSecret,
    service: ServiceDep,
    author: Author,
    match: IfMatch,
    request: Request,
    response: Response,
) -> SecretAnswer:
    """Give it a new secret. Until the overlap has passed, deliveries carry signatures of both."""
    expected = match.version(f"w{webhook_id}")
    now = author.now_seconds
    sealer = Sealer.from_settings(service.settings)

    def act(connection: Connection) -> tuple[Hook, str]:
        hook, secret = hooks.rotate_secret(
            connection,
            webhook_id,
            body.secret,
            body.overlap_seconds,
            expected,
            author.principal.roots,
            now,
            sealer,
        )
        _note(connection, author, "webhook.rotate", hook, {"overlap_seconds": body.overlap_seconds})
        return hook, secret

    hook, secret = service.database.transact(act)
    request.state.is_secret = True
    response.headers["ETag"] = hook.etag
    return SecretAnswer.of(hook, secret=secret)


@router.post("/{webhook_id}/test", status_code=202, responses=problems(404, 408, 409, 413, *_USUAL))
def test_webhook(webhook_id: IdPath, author: Author, transact: IdempotentDep) -> DeliveryAnswer:
    """Send it an event of the type `webhook.test`; the worker does so within seconds."""
    now = author.now_seconds

    def act(connection: Connection) -> DeliveryAnswer:
        hook = hooks.get_hook(connection, webhook_id, author.principal.roots)
        if not hook.is_enabled:
            raise ConflictError("the webhook is disabled; enable it first", state="disabled")
        _note(connection, author, "webhook.test", hook, {})
        return DeliveryAnswer.of(ledger.send_test(connection, hook, now))

    return transact(act)


@router.get("/{webhook_id}/deliveries", responses=problems(404, *_USUAL))
def list_webhook_deliveries(
    webhook_id: IdPath,
    service: ServiceDep,
    caller: Caller,
    page: Page,
    state: DeliveryState | None = None,
) -> DeliveryList:
    """What was delivered, what waits, what failed: newest event first. Old ones are forgotten."""
    mark = f"deliveries-{webhook_id}-{state}"
    before = decode_cursor(page.cursor, mark, int)[0] if page.cursor is not None else None
    with service.database.read() as connection:
        hooks.get_hook(connection, webhook_id, caller.roots)
        found = ledger.list_deliveries(connection, webhook_id, state, before, page.limit + 1)
    shown = found[: page.limit]
    cursor = encode_cursor(mark, shown[-1].event_id) if len(found) > page.limit else None
    return DeliveryList(items=[DeliveryAnswer.of(one) for one in shown], next_cursor=cursor)


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}/redeliver",
    status_code=202,
    responses=problems(404, 408, 409, 413, *_USUAL),
)
def redeliver_webhook_delivery(
    webhook_id: IdPath, delivery_id: IdPath, author: Author, transact: IdempotentDep
) -> DeliveryAnswer:
    """Deliver one again, whatever became of it, with the attempts counted anew."""
    now = author.now_seconds

    def act(connection: Connection) -> DeliveryAnswer:
        hook = hooks.get_hook(connection, webhook_id, author.principal.roots)
        delivery = ledger.redeliver(connection, webhook_id, delivery_id, now)
        _note(connection, author, "webhook.redeliver", hook, {"event_id": delivery.event_id})
        return DeliveryAnswer.of(delivery)

    return transact(act)


def _note(connection: Connection, author: Writer, action: str, hook: Hook, detail: dict[str, Any]) -> None:
    # Not the URL: those of chat services are secrets themselves.
    audit.record(
        connection,
        author.principal.name,
        action,
        f"webhook:{hook.id}",
        detail,
        now=author.now_seconds,
        request_id=author.request_id,
        address=author.address,
    )


def _check_url(service: Service, url: str) -> None:
    try:
        parse_url(url, Allowed.parse(service.settings.webhook_allow_private))
    except RefusedUrlError as error:
        raise UnprocessableError(f"url: {error}") from error


def _check_roots(service: Service, caller: Principal, names: Sequence[str] | None) -> frozenset[str] | None:
    if names is None:
        if caller.roots is not None:
            raise ForbiddenError(
                "this key is for some roots only, so name the webhook's roots", scope="admin"
            )
        return None
    for name in names:
        if not caller.may_see(name) or name not in service.roots.names():
            raise UnprocessableError("roots: there is no such root, or none that this key may see")
    return frozenset(names)
