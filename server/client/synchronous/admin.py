# Made of asynchronous/admin.py by `make sync-client`: edit that one.
"""What admins do with the service: keys, webhooks, rules, retention; the part of `Client` for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from dcp.server.client import calls, calls_admin
from dcp.server.client.calls_admin import PolicyChanges, RuleChanges, WebhookChanges
from dcp.server.client.synchronous.connection import HttpConnection, Pages
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
from dcp.server.records.jobs import Job

__all__ = ["Administration"]


class Administration(HttpConnection):
    """Methods of `Client`. Changes with an ``etag`` are made only if it is still in that version.

    What answers with a secret is not tried again once it was sent, since its answer is given only once.
    """

    # -- keys ------------------------------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        """All keys, revoked and expired ones too."""
        return self._send(calls_admin.keys())

    def key(self, key_id: int) -> Key:
        """One key."""
        return self._send(calls_admin.key(key_id))

    def create_key(
        self,
        name: str,
        *,
        scopes: Sequence[str] = ("read",),
        roots: Sequence[str] | None = None,
        expires_in_seconds: float | None = None,
    ) -> CreatedKey:
        """Make a key, for some ``roots`` or for all; ``key`` of the answer is it, for the only time."""
        return self._send(calls_admin.create_key(name, scopes, roots, expires_in_seconds))

    def revoke_key(self, key_id: int) -> Key:
        """End a key at once and for ever; again is fine."""
        return self._send(calls_admin.revoke_key(key_id))

    # -- webhooks --------------------------------------------------------------------------------------------

    def webhooks(self, *, page_size: int = 100) -> Pages[Webhook]:
        """Webhooks by id."""
        return Pages(self._send, calls_admin.webhooks(), page_size)

    def webhook(self, webhook_id: int) -> Webhook:
        """One webhook."""
        return self._send(calls_admin.webhook(webhook_id))

    def create_webhook(
        self,
        url: str,
        *,
        events: Sequence[str] | None = None,
        roots: Sequence[str] | None = None,
        description: str = "",
        is_enabled: bool = True,
        secret: str | None = None,
    ) -> WebhookSecret:
        """Have ``url`` told of ``events`` (all of them) in ``roots`` (all); ``secret`` of the answer verifies
        deliveries, and is shown for the only time."""
        return self._send(
            calls_admin.create_webhook(
                url=url,
                events=events,
                roots=roots,
                description=description,
                is_enabled=is_enabled,
                secret=secret,
            )
        )

    def change_webhook(
        self, webhook_id: int, *, etag: str | None = None, **changes: Unpack[WebhookChanges]
    ) -> Webhook:
        """Change what is given, disable it, enable it again."""
        return self._send(calls_admin.change_webhook(webhook_id, changes, etag))

    def delete_webhook(self, webhook_id: int, *, etag: str | None = None) -> None:
        """Remove it, with what is remembered of its deliveries."""
        self._send(calls_admin.delete_webhook(webhook_id, etag))

    def rotate_webhook_secret(
        self,
        webhook_id: int,
        *,
        secret: str | None = None,
        overlap_seconds: float | None = None,
        etag: str | None = None,
    ) -> WebhookSecret:
        """A new secret; for ``overlap_seconds`` (a day) deliveries carry signatures of both."""
        return self._send(calls_admin.rotate_webhook_secret(webhook_id, secret, overlap_seconds, etag))

    def test_webhook(self, webhook_id: int) -> Delivery:
        """Send it a "webhook.test"."""
        return self._send(calls_admin.test_webhook(webhook_id))

    def deliveries(
        self, webhook_id: int, *, state: str | None = None, page_size: int = 100
    ) -> Pages[Delivery]:
        """Its deliveries, newest event first; ``state``: "waiting", "delivered" or "failed"."""
        return Pages(self._send, calls_admin.deliveries(webhook_id, state), page_size)

    def redeliver(self, webhook_id: int, delivery_id: int) -> Delivery:
        """Send one again, whatever became of it."""
        return self._send(calls_admin.redeliver(webhook_id, delivery_id))

    # -- rules -----------------------------------------------------------------------------------------------

    def rules(self, *, page_size: int = 100) -> Pages[Rule]:
        """Automation rules by id."""
        return Pages(self._send, calls_admin.rules(), page_size)

    def rule(self, rule_id: int) -> Rule:
        """One rule."""
        return self._send(calls_admin.rule(rule_id))

    def create_rule(
        self,
        name: str,
        actions: Sequence[Mapping[str, Any]],
        *,
        event: str = "checkpoint.committed",
        condition: Mapping[str, Any] | None = None,
        is_enabled: bool = True,
    ) -> Rule:
        """Make a rule, for what happens from then on."""
        return self._send(
            calls_admin.create_rule(
                name=name, actions=actions, event=event, condition=condition, is_enabled=is_enabled
            )
        )

    def change_rule(self, rule_id: int, *, etag: str | None = None, **changes: Unpack[RuleChanges]) -> Rule:
        """Change what is given."""
        return self._send(calls_admin.change_rule(rule_id, changes, etag))

    def delete_rule(self, rule_id: int, *, etag: str | None = None) -> None:
        """Remove it; jobs that it has made go on."""
        self._send(calls_admin.delete_rule(rule_id, etag))

    # -- retention -------------------------------------------------------------------------------------------

    def retention_policies(self, *, page_size: int = 100) -> Pages[RetentionPolicy]:
        """Retention policies by id."""
        return Pages(self._send, calls_admin.retention_policies(), page_size)

    def retention_policy(self, policy_id: int) -> RetentionPolicy:
        """One policy."""
        return self._send(calls_admin.retention_policy(policy_id))

    def create_retention_policy(
        self,
        name: str,
        root: str,
        keep: Mapping[str, Any],
        *,
        run_glob: str = "*",
        grace_seconds: float | None = None,
        interval_seconds: float | None = None,
        is_enabled: bool = True,
    ) -> RetentionPolicy:
        """Make a policy, which is applied at once: look at `preview_retention` before. ``keep`` as
        `dcp.Retention.to_dict` gives it."""
        return self._send(
            calls_admin.create_retention_policy(
                name=name,
                root=root,
                keep=keep,
                run_glob=run_glob,
                grace_seconds=grace_seconds,
                interval_seconds=interval_seconds,
                is_enabled=is_enabled,
            )
        )

    def change_retention_policy(
        self, policy_id: int, *, etag: str | None = None, **changes: Unpack[PolicyChanges]
    ) -> RetentionPolicy:
        """Change what is given."""
        return self._send(calls_admin.change_retention_policy(policy_id, changes, etag))

    def delete_retention_policy(self, policy_id: int, *, etag: str | None = None) -> None:
        """Remove it; what it has deleted stays deleted."""
        self._send(calls_admin.delete_retention_policy(policy_id, etag))

    def preview_retention(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str = "*", page_size: int = 50
    ) -> Pages[RetentionPreview]:
        """What a policy would do, run by run, with the reasons; nothing is changed."""
        return Pages(self._send, calls_admin.preview_retention(root, keep, run_glob), page_size)

    def preview_retention_policy(self, policy_id: int, *, page_size: int = 50) -> Pages[RetentionPreview]:
        """What a policy would do now, run by run, with the reasons; nothing is changed."""
        return Pages(self._send, calls_admin.preview_retention_policy(policy_id), page_size)

    def retention_totals(self, root: str, keep: Mapping[str, Any], *, run_glob: str = "*") -> RetentionTotals:
        """What a policy would keep, delete and free, in all; nothing is changed."""
        return self._send(calls_admin.retention_totals(root, keep, run_glob))

    def retention_policy_totals(self, policy_id: int) -> RetentionTotals:
        """What a policy would keep, delete and free now, in all; nothing is changed."""
        return self._send(calls_admin.retention_policy_totals(policy_id))

    def run_retention_policy(self, policy_id: int, *, dry_run: bool = False) -> Job:
        """Apply it now, by a job; ``dry_run``: its result says what would go, and nothing does."""
        return self._send(calls.submit("retention", {"policy_id": policy_id, "dry_run": dry_run}, 0))
