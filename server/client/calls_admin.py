"""What can be asked of the service about keys, webhooks, rules and retention; see `calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from dcp.server.client.calls import Call, PagedCall, if_match, many, nothing, one, params
from dcp.server.records.administration import (
    CreatedKey,
    Delivery,
    Key,
    RetentionPolicy,
    RetentionPreview,
    RetentionTotals,
    Rule,
    Webhook,
    WebhookSecret,
)

__all__ = ["PolicyChanges", "RuleChanges", "WebhookChanges"]


class WebhookChanges(TypedDict, total=False):
    """What is to change of a webhook; ``roots`` None: all."""

    url: str
    events: Sequence[str]
    roots: Sequence[str] | None
    description: str
    is_enabled: bool


class RuleChanges(TypedDict, total=False):
    """What is to change of a rule."""

    name: str
    event: str
    condition: Mapping[str, Any]
    actions: Sequence[Mapping[str, Any]]
    is_enabled: bool


class PolicyChanges(TypedDict, total=False):
    """What is to change of a retention policy."""

    name: str
    run_glob: str
    keep: Mapping[str, Any]
    grace_seconds: float
    interval_seconds: float
    is_enabled: bool


def _given(**values: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """Any sequence and mapping as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


# -- keys ----------------------------------------------------------------------------------------------------


def keys() -> Call[list[Key]]:
    return Call("GET", "/keys", many(Key))


def key(key_id: int) -> Call[Key]:
    return Call("GET", f"/keys/{key_id}", one(Key))


def create_key(
    name: str, scopes: Sequence[str], roots: Sequence[str] | None, expires_in_seconds: float | None
) -> Call[CreatedKey]:
    body = _given(name=name, scopes=scopes, roots=roots, expires_in_seconds=expires_in_seconds)
    return Call("POST", "/keys", one(CreatedKey), body=body, has_secret=True)


def revoke_key(key_id: int) -> Call[Key]:
    return Call("DELETE", f"/keys/{key_id}", one(Key))


# -- webhooks ------------------------------------------------------------------------------------------------

_WEBHOOK = one(Webhook)
_SECRET = one(WebhookSecret)
_DELIVERY = one(Delivery)


def webhooks() -> PagedCall[Webhook]:
    return PagedCall("/webhooks", _WEBHOOK)


def webhook(webhook_id: int) -> Call[Webhook]:
    return Call("GET", f"/webhooks/{webhook_id}", _WEBHOOK)


def create_webhook(**values: Any) -> Call[WebhookSecret]:
    return Call("POST", "/webhooks", _SECRET, body=_given(**values), has_secret=True)


def change_webhook(webhook_id: int, changes: WebhookChanges, etag: str | None) -> Call[Webhook]:
    return Call("PATCH", f"/webhooks/{webhook_id}", _WEBHOOK, body=_plain(changes), headers=if_match(etag))


def delete_webhook(webhook_id: int, etag: str | None) -> Call[None]:
    return Call("DELETE", f"/webhooks/{webhook_id}", nothing, headers=if_match(etag))


def rotate_webhook_secret(
    webhook_id: int, secret: str | None, overlap_seconds: float | None, etag: str | None
) -> Call[WebhookSecret]:
    path, body = (
        f"/webhooks/{webhook_id}/rotate-secret",
        _given(secret=secret, overlap_seconds=overlap_seconds),
    )
    return Call("POST", path, _SECRET, body=body, headers=if_match(etag), has_secret=True)


def test_webhook(webhook_id: int) -> Call[Delivery]:
    return Call("POST", f"/webhooks/{webhook_id}/test", _DELIVERY)


def deliveries(webhook_id: int, state: str | None) -> PagedCall[Delivery]:
    return PagedCall(f"/webhooks/{webhook_id}/deliveries", _DELIVERY, params(state=state))


def redeliver(webhook_id: int, delivery_id: int) -> Call[Delivery]:
    return Call("POST", f"/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", _DELIVERY)


# -- rules ---------------------------------------------------------------------------------------------------

_RULE = one(Rule)


def rules() -> PagedCall[Rule]:
    return PagedCall("/rules", _RULE)


def rule(rule_id: int) -> Call[Rule]:
    return Call("GET", f"/rules/{rule_id}", _RULE)


def create_rule(**values: Any) -> Call[Rule]:
    return Call("POST", "/rules", _RULE, body=_given(**values))


def change_rule(rule_id: int, changes: RuleChanges, etag: str | None) -> Call[Rule]:
    return Call("PATCH", f"/rules/{rule_id}", _RULE, body=_plain(changes), headers=if_match(etag))


def delete_rule(rule_id: int, etag: str | None) -> Call[None]:
    return Call("DELETE", f"/rules/{rule_id}", nothing, headers=if_match(etag))


# -- retention -----------------------------------------------------------------------------------------------

_POLICIES = "/retention/policies"
_POLICY = one(RetentionPolicy)
_PREVIEW = one(RetentionPreview)


def retention_policies() -> PagedCall[RetentionPolicy]:
    return PagedCall(_POLICIES, _POLICY)


def retention_policy(policy_id: int) -> Call[RetentionPolicy]:
    return Call("GET", f"{_POLICIES}/{policy_id}", _POLICY)


def create_retention_policy(**values: Any) -> Call[RetentionPolicy]:
    return Call("POST", _POLICIES, _POLICY, body=_given(**values))


def change_retention_policy(
    policy_id: int, changes: PolicyChanges, etag: str | None
) -> Call[RetentionPolicy]:
    path = f"{_POLICIES}/{policy_id}"
    return Call("PATCH", path, _POLICY, body=_plain(changes), headers=if_match(etag))


def delete_retention_policy(policy_id: int, etag: str | None) -> Call[None]:
    return Call("DELETE", f"{_POLICIES}/{policy_id}", nothing, headers=if_match(etag))


def preview_retention(root: str, keep: Mapping[str, Any], run_glob: str) -> PagedCall[RetentionPreview]:
    body = _given(root=root, keep=keep, run_glob=run_glob)
    return PagedCall("/retention/preview", _PREVIEW, body=body)


def preview_retention_policy(policy_id: int) -> PagedCall[RetentionPreview]:
    return PagedCall(f"{_POLICIES}/{policy_id}/preview", _PREVIEW)


def retention_totals(root: str, keep: Mapping[str, Any], run_glob: str) -> Call[RetentionTotals]:
    body = _given(root=root, keep=keep, run_glob=run_glob)
    return Call("POST", "/retention/preview/totals", one(RetentionTotals), body=body, only_reads=True)


def retention_policy_totals(policy_id: int) -> Call[RetentionTotals]:
    return Call("GET", f"{_POLICIES}/{policy_id}/preview/totals", one(RetentionTotals))
