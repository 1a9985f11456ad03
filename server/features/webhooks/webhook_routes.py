"""``/webhooks``: operations for admins, since webhooks send requests in the name of the service."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import Query as InQuery
from prometheus_client.core import Metric
from pydantic import AfterValidator, Field, StringConstraints
from pydantic.json_schema import SkipJsonSchema
from sqlalchemy import Connection, Row, func, select

from dcp.server.catalog.inputs import Request, Text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import IfMatch, PageQuery
from dcp.server.core.problems import ConflictError, ForbiddenError, UnprocessableError
from dcp.server.core.samples import age, counts, gauge
from dcp.server.features import event_kinds
from dcp.server.features.webhooks import deliveries, deliveries_table, feature, webhooks
from dcp.server.features.webhooks.addresses import MAX_URL_LENGTH, Allowed, RefusedUrlError, parse_url
from dcp.server.features.webhooks.deliveries import Delivery, DeliveryState, delivery_of
from dcp.server.features.webhooks.hooks import (
    HOOKS,
    EventKind,
    Sealer,
    Webhook,
    WebhookSecret,
    check_secret,
    new_secret,
)
from dcp.server.records.lists import Page

_ADMIN: Final[dict[str, Any]] = {"tag": "webhooks", "scope": "admin"}
_WEBHOOK: Final = "/webhooks/{webhook_id}"

Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH, pattern=r"^[!-~]+$")]
RootNames = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=64)]], Field(max_length=256)
]
Events = Annotated[list[EventKind], Field(min_length=1, max_length=100)]
Secret = Annotated[
    str,
    StringConstraints(min_length=30, max_length=128, pattern=r"^whsec_[A-Za-z0-9+/=]+$"),
    AfterValidator(check_secret),
    Field(description="`whsec_` and 24 to 64 bytes in base64; default: a random one."),
]


class WebhookRequest(Request):
    """A new webhook."""

    url: Url = Field(
        description="https and a public address; http and private addresses only if allowed by the operator."
    )
    events: Events = Field(
        default_factory=lambda: list(event_kinds()), description="Kinds of events to post; default: all."
    )
    roots: RootNames | None = Field(default=None, description="Names of roots; null: all.")
    description: Text = Field(default="", description="Text for admins.")
    is_enabled: bool = Field(default=True, description="False: events are not posted.")
    secret: Secret | None = Field(
        default=None, repr=False, description="Secret for signatures: whsec_ and base64; default: a new one."
    )


class WebhookChange(Request):
    """The fields to change. Only `roots` may be null."""

    url: Url | SkipJsonSchema[None] = None
    events: Events | SkipJsonSchema[None] = Field(default=None, description="Kinds of events to post.")
    roots: RootNames | None = Field(default=None, description="Names of roots; null: all.")
    description: Text | SkipJsonSchema[None] = None
    is_enabled: bool | SkipJsonSchema[None] = Field(default=None, description="False: events are not posted.")


class RotateSecret(Request):
    """Rotation of the secret; deliveries carry signatures of both secrets for a while."""

    secret: Secret | None = Field(
        default=None, repr=False, description="Secret for signatures: whsec_ and base64; default: a new one."
    )
    overlap_seconds: float = Field(
        default=86_400.0,
        ge=0,
        le=30 * 86_400,
        description="Time in which deliveries also carry a signature of the old secret.",
    )


# -- webhooks ------------------------------------------------------------------------------------------------


@feature.post("/webhooks", **_ADMIN, status=201, errors=(409,))
def create_webhook(body: WebhookRequest, ask: Ask) -> WebhookSecret:
    """Create a webhook. Only this answer shows its secret; an Idempotency-Key does not store it."""
    values = _checked(body.model_dump(exclude={"secret"}), ask)
    secret = body.secret or new_secret()
    values["secret"] = Sealer.from_settings(ask.settings).seal(secret)
    values["maker"] = ask.caller.answerable

    def act(connection: Connection) -> Row[Any]:
        return HOOKS.insert(connection, ask, values, {"events": values["events"]})

    return _with_secret(HOOKS.answer(ask, ask.transact_secretly(act), is_new=True), secret)


@feature.get("/webhooks", **_ADMIN, errors=())
def list_webhooks(ask: Ask, page: PageQuery) -> Page[Webhook]:
    """List the visible webhooks by id."""
    return HOOKS.page(ask, page)


@feature.get(_WEBHOOK, **_ADMIN)
def get_webhook(webhook_id: IdPath, ask: Ask) -> Webhook:
    """Get a webhook."""
    return HOOKS.read(ask, webhook_id)


@feature.patch(_WEBHOOK, **_ADMIN, errors=(404, 412))
def change_webhook(webhook_id: IdPath, body: WebhookChange, ask: Ask, match: IfMatch) -> Webhook:
    """Change the given fields. Waiting deliveries of a disabled webhook are sent after it is enabled."""
    values = _checked(body.model_dump(exclude_unset=True), ask)

    def act(connection: Connection) -> Row[Any]:
        hook = HOOKS.lock(connection, ask, webhook_id, match)
        is_back = values.get("is_enabled") and not hook.is_enabled
        reset: dict[str, Any] = {"disabled_reason": None, "failing_since_seconds": None} if is_back else {}
        reset["maker"] = ask.caller.answerable
        return HOOKS.update(connection, ask, hook, values | reset, detail={"changed": sorted(values)})

    return HOOKS.answer(ask, ask.transact(act))


@feature.delete(_WEBHOOK, **_ADMIN, status=204, errors=(404, 412))
def delete_webhook(webhook_id: IdPath, ask: Ask, match: IfMatch) -> None:
    """Delete a webhook and its deliveries."""
    HOOKS.delete(ask, webhook_id, match)


@feature.post(_WEBHOOK + "/rotate-secret", **_ADMIN, errors=(404, 409, 412))
def rotate_webhook_secret(webhook_id: IdPath, body: RotateSecret, ask: Ask, match: IfMatch) -> WebhookSecret:
    """Replace the secret. During the overlap, deliveries carry signatures of both secrets."""
    secret = body.secret or new_secret()
    has_overlap = body.overlap_seconds > 0
    values = {
        "secret": Sealer.from_settings(ask.settings).seal(secret),
        "previous_secret": webhooks.c.secret if has_overlap else None,
        "previous_until_seconds": ask.now + body.overlap_seconds if has_overlap else None,
    }

    def act(connection: Connection) -> Row[Any]:
        hook = HOOKS.lock(connection, ask, webhook_id, match)
        return HOOKS.update(
            connection, ask, hook, values, "rotate", {"overlap_seconds": body.overlap_seconds}
        )

    return _with_secret(HOOKS.answer(ask, ask.transact_secretly(act)), secret)


def _with_secret(hook: Webhook, secret: str) -> WebhookSecret:
    shown = {field.name: getattr(hook, field.name) for field in dataclasses.fields(hook)}
    return WebhookSecret(**shown, secret=secret)


def _checked(values: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Check the given fields, and return their columns."""
    if "roots" in values:
        _check_roots(values["roots"], ask)
        values["roots"] = values["roots"] and sorted(set(values["roots"]))
    empty = [name for name, value in values.items() if value is None and name != "roots"]
    if empty:
        raise UnprocessableError(f"{empty[0]} cannot be null")
    if "url" in values:
        try:
            parse_url(values["url"], Allowed.parse(ask.settings.webhook_allow_private))
        except RefusedUrlError as error:
            raise UnprocessableError(f"url: {error}") from error
    if "events" in values:
        values["events"] = sorted(set(values["events"]))
    return values


def _check_roots(names: list[str] | None, ask: Ask) -> None:
    if names is None and ask.visible is not None:
        raise ForbiddenError("roots is required, because the key is restricted to roots", scope="admin")
    for name in names or ():
        if not ask.caller.may_see(name) or name not in ask.roots.names():
            raise UnprocessableError("roots: not found, or not visible to the key")


# -- deliveries ----------------------------------------------------------------------------------------------


@feature.post(_WEBHOOK + "/test", **_ADMIN, status=202, errors=(404, 409))
def test_webhook(webhook_id: IdPath, ask: Ask) -> Delivery:
    """Send an event of the type `webhook.test`; a worker sends within seconds."""

    def act(connection: Connection) -> Delivery:
        hook = HOOKS.find(connection, webhook_id, ask.visible)
        if not hook.is_enabled:
            raise ConflictError("the webhook is disabled; enable the webhook first", state="disabled")
        HOOKS.audit(connection, ask, "test", hook, {})
        return delivery_of(deliveries.send_test(connection, hook, ask.now))

    return ask.transact(act)


@feature.get(_WEBHOOK + "/deliveries", **_ADMIN)
def list_webhook_deliveries(
    webhook_id: IdPath,
    ask: Ask,
    page: PageQuery,
    state: Annotated[DeliveryState | None, InQuery(description="State of the delivery.")] = None,
) -> Page[Delivery]:
    """List deliveries, newest event first. Old deliveries are deleted."""
    with ask.reading() as connection:
        HOOKS.find(connection, webhook_id, ask.visible)
        return deliveries.list_deliveries(connection, webhook_id, state, cursor=page.cursor, limit=page.limit)


@feature.post(_WEBHOOK + "/deliveries/{delivery_id}/redeliver", **_ADMIN, status=202, errors=(404, 409))
def redeliver_webhook_delivery(webhook_id: IdPath, delivery_id: IdPath, ask: Ask) -> Delivery:
    """Repeat a delivery from its first attempt."""

    def act(connection: Connection) -> Delivery:
        hook = HOOKS.find(connection, webhook_id, ask.visible)
        delivery = deliveries.redeliver(connection, webhook_id, delivery_id, ask.now)
        HOOKS.audit(connection, ask, "redeliver", hook, {"event_id": delivery.event_id})
        return delivery_of(delivery)

    return ask.transact(act)


@feature.samples
def read_samples(connection: Connection, service: Service) -> Iterator[Metric]:
    """Read the metrics of webhooks and their deliveries."""
    by_state = {"enabled": 0, "disabled": 0}
    for is_enabled, count in connection.execute(
        select(webhooks.c.is_enabled, func.count()).group_by(webhooks.c.is_enabled)
    ):
        by_state["enabled" if is_enabled else "disabled"] = count
    yield gauge("dcp_webhooks", "Webhooks", ["state"], [((state,), n) for state, n in by_state.items()])
    states = select(deliveries_table.c.state, func.count()).group_by(deliveries_table.c.state)
    rows = counts(connection, ("waiting", "delivered", "failed"), states)
    yield gauge("dcp_webhook_deliveries", "Stored deliveries by state", ["state"], rows)
    oldest = connection.execute(
        select(func.min(deliveries_table.c.created_seconds))
        .select_from(deliveries_table.join(webhooks, deliveries_table.c.webhook_id == webhooks.c.id))
        .where(deliveries_table.c.state == "waiting", webhooks.c.is_enabled)
    ).scalar()
    help_text = "Seconds since the oldest undelivered delivery was due"
    yield age("dcp_webhook_oldest_waiting_seconds", help_text, oldest, service.clock())
