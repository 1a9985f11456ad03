# Generated from asynchronous/admin.py by `make client`.
"""Administration of the service: keys, webhooks, rules, retention; a part of `Client`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from dcp.server.client.generated import models, operations
from dcp.server.client.synchronous.connection import HttpConnection, Pages

__all__ = ["Administration"]


class Administration(HttpConnection):
    """Methods of `Client`. Those that return a secret are not repeated once they were sent, because the
    answer is given only once."""

    # -- keys ------------------------------------------------------------------------------------------------

    def keys(self) -> list[models.Key]:
        """List all keys, including revoked and expired ones."""
        return self._send(operations.list_keys())

    def key(self, key_id: int) -> models.Key:
        """Get one key."""
        return self._send(operations.get_key(key_id))

    def create_key(
        self,
        name: str,
        *,
        scopes: Sequence[str] = ("read",),
        roots: Sequence[str] | None = None,
        expires_in_seconds: float | None = None,
    ) -> models.CreatedKey:
        """Create a key for some ``roots`` or for all; only this answer contains it, as ``key``."""
        options = {"scopes": scopes, "roots": roots, "expires_in_seconds": expires_in_seconds}
        return self._send(operations.create_key({"name": name, **options}))

    def revoke_key(self, key_id: int) -> models.Key:
        """Revoke a key, at once and for ever."""
        return self._send(operations.revoke_key(key_id))

    # -- webhooks --------------------------------------------------------------------------------------------

    def webhooks(self, *, page_size: int = 100) -> Pages[models.Webhook]:
        """List webhooks by id."""
        return Pages(self._send, operations.list_webhooks(), page_size)

    def webhook(self, webhook_id: int) -> models.Webhook:
        """Get one webhook."""
        return self._send(operations.get_webhook(webhook_id))

    def create_webhook(self, url: str, **options: Unpack[models.WebhookOptions]) -> models.WebhookSecret:
        """Create a webhook, for all ``events`` in all ``roots`` unless they are given. ``secret`` verifies
        deliveries; only this answer contains it."""
        return self._send(operations.create_webhook({"url": url, **options}))

    def change_webhook(
        self, webhook_id: int, *, etag: str | None = None, **changes: Unpack[models.WebhookChanges]
    ) -> models.Webhook:
        """Change the given members; disable or enable a webhook."""
        return self._send(operations.change_webhook(webhook_id, changes, etag=etag))

    def delete_webhook(self, webhook_id: int, *, etag: str | None = None) -> None:
        """Delete a webhook with its deliveries."""
        self._send(operations.delete_webhook(webhook_id, etag=etag))

    def rotate_webhook_secret(
        self,
        webhook_id: int,
        *,
        secret: str | None = None,
        overlap_seconds: float | None = None,
        etag: str | None = None,
    ) -> models.WebhookSecret:
        """Set a new secret; for ``overlap_seconds`` (a day) deliveries carry signatures of both."""
        body = {"secret": secret, "overlap_seconds": overlap_seconds}
        return self._send(operations.rotate_webhook_secret(webhook_id, body, etag=etag))

    def test_webhook(self, webhook_id: int) -> models.Delivery:
        """Send an event "webhook.test"."""
        return self._send(operations.test_webhook(webhook_id))

    def deliveries(
        self, webhook_id: int, *, state: str | None = None, page_size: int = 100
    ) -> Pages[models.Delivery]:
        """List deliveries, newest event first; ``state``: "waiting", "delivered" or "failed"."""
        call = operations.list_webhook_deliveries(webhook_id, state=state)
        return Pages(self._send, call, page_size)

    def redeliver(self, webhook_id: int, delivery_id: int) -> models.Delivery:
        """Send a delivery again, in whatever state it is."""
        return self._send(operations.redeliver_webhook_delivery(webhook_id, delivery_id))

    # -- rules -----------------------------------------------------------------------------------------------

    def rules(self, *, page_size: int = 100) -> Pages[models.Rule]:
        """List automation rules by id."""
        return Pages(self._send, operations.list_rules(), page_size)

    def rule(self, rule_id: int) -> models.Rule:
        """Get one rule."""
        return self._send(operations.get_rule(rule_id))

    def create_rule(
        self, name: str, actions: Sequence[Mapping[str, Any]], **options: Unpack[models.RuleOptions]
    ) -> models.Rule:
        """Create a rule for events from now on."""
        return self._send(operations.create_rule({"name": name, "actions": actions, **options}))

    def change_rule(
        self, rule_id: int, *, etag: str | None = None, **changes: Unpack[models.RuleChanges]
    ) -> models.Rule:
        """Change the given members."""
        return self._send(operations.change_rule(rule_id, changes, etag=etag))

    def delete_rule(self, rule_id: int, *, etag: str | None = None) -> None:
        """Delete a rule; its jobs continue."""
        self._send(operations.delete_rule(rule_id, etag=etag))

    # -- retention -------------------------------------------------------------------------------------------

    def retention_policies(self, *, page_size: int = 100) -> Pages[models.RetentionPolicy]:
        """List retention policies by id."""
        return Pages(self._send, operations.list_retention_policies(), page_size)

    def retention_policy(self, policy_id: int) -> models.RetentionPolicy:
        """Get one policy."""
        return self._send(operations.get_retention_policy(policy_id))

    def create_retention_policy(
        self, name: str, root: str, keep: Mapping[str, Any], **options: Unpack[models.PolicyOptions]
    ) -> models.RetentionPolicy:
        """Create a policy, which is applied at once: use `preview_retention` before. ``keep`` is what
        `dcp.Retention.to_dict` returns."""
        body = {"name": name, "root": root, "keep": keep, **options}
        return self._send(operations.create_retention_policy(body))

    def change_retention_policy(
        self, policy_id: int, *, etag: str | None = None, **changes: Unpack[models.PolicyChanges]
    ) -> models.RetentionPolicy:
        """Change the given members."""
        return self._send(operations.change_retention_policy(policy_id, changes, etag=etag))

    def delete_retention_policy(self, policy_id: int, *, etag: str | None = None) -> None:
        """Delete a policy; deleted checkpoints stay deleted."""
        self._send(operations.delete_retention_policy(policy_id, etag=etag))

    def preview_retention(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str = "*", page_size: int = 50
    ) -> Pages[models.RetentionPreview]:
        """List the decisions of a policy with their reasons, by run; nothing is changed."""
        call = operations.preview_retention({"root": root, "keep": keep, "run_glob": run_glob})
        return Pages(self._send, call, page_size)

    def preview_retention_policy(
        self, policy_id: int, *, page_size: int = 50
    ) -> Pages[models.RetentionPreview]:
        """List the decisions of an existing policy with their reasons, by run; nothing is changed."""
        return Pages(self._send, operations.preview_retention_policy(policy_id), page_size)

    def retention_totals(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str = "*"
    ) -> models.RetentionTotals:
        """Count all that a policy would keep, delete and free; nothing is changed."""
        body = {"root": root, "keep": keep, "run_glob": run_glob}
        return self._send(operations.preview_retention_totals(body))

    def retention_policy_totals(self, policy_id: int) -> models.RetentionTotals:
        """Count all that an existing policy would keep, delete and free; nothing is changed."""
        return self._send(operations.preview_retention_policy_totals(policy_id))

    def run_retention_policy(self, policy_id: int, *, dry_run: bool = False) -> models.Job:
        """Apply a policy now, by a job; with ``dry_run`` its result says what would be deleted."""
        params = {"policy_id": policy_id, "dry_run": dry_run}
        return self._send(operations.submit_job({"kind": "retention", "params": params}))
