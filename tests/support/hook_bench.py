"""A catalog with webhooks, and rounds of deliveries at any time, like those of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import Table, delete, select, update
from standardwebhooks import Webhook

from dcp.server.catalog.events import CHECKPOINT_EVENTS as ALL_EVENTS
from dcp.server.catalog.events import emit
from dcp.server.database.tables import events, metadata, roots
from dcp.server.features.webhooks import deliveries_table as deliveries
from dcp.server.features.webhooks import webhooks
from dcp.server.features.webhooks.deliveries import (
    MAX_ATTEMPTS,
    RETRY_SECONDS,
    DeliveryOutcome,
    claim_next,
    record,
)
from dcp.server.features.webhooks.sending import Deliverer
from tests.support.app import App
from tests.support.catalog_rows import add_checkpoint

__all__ = [
    "ALL_EVENTS",
    "MAX_ATTEMPTS",
    "NOW",
    "RETRY_SECONDS",
    "Bench",
    "deliver",
    "emit_events",
    "rows",
    "stored_secrets",
    "verify",
]

NOW: Final = 1_790_000_000.0


class Bench:
    """A catalog with the roots "main" and "other" and one checkpoint in each, at the time `NOW`."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.database = app.service.database
        self.settings = app.service.settings
        self.checkpoint_ids = {
            root: add_checkpoint(self.database, "first/step-7", root=root) for root in ("main", "other")
        }
        with self.database.write() as connection:
            connection.execute(delete(events))
            found = connection.execute(select(roots.c.name, roots.c.id)).all()
        self.root_ids = {name: int(number) for name, number in found}

    def hook(self, url: str, events: tuple[str, ...] = ALL_EVENTS, root: str | None = None) -> Any:
        """Create a webhook at `NOW`."""
        return self._ask("POST", "", url=url, events=events, roots=None if root is None else [root])

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        answer = self.app.base.request(method, f"/api/v1/webhooks{path}", json=body or None)
        assert answer.is_success, answer.text
        return SimpleNamespace(**answer.json())

    def emit(
        self, kind: str = "checkpoint.committed", root: str = "main", at: float = NOW, **data: Any
    ) -> None:
        """Emit an event for the checkpoint of a root; the root "" has no checkpoint."""
        root_id, checkpoint_id = self.root_ids.get(root), self.checkpoint_ids.get(root)
        with self.database.write() as connection:
            emit(connection, kind, root_id=root_id, checkpoint_id=checkpoint_id, data=data, now=at)

    def round(self, now: float = NOW, resolve: Callable[[str, int], list[str]] | None = None) -> int:
        """Make deliveries of events, and send one round; return the number of attempts."""
        found: dict[str, Any] = {} if resolve is None else {"resolve": resolve}
        self.app.work(now, "events:webhooks")
        return Deliverer(self.settings, self.database, **found).round(now)

    def allow(self, *addresses: str, seconds: float = 20.0) -> None:
        """Change the settings of webhooks."""
        changes = {"webhook_allow_private": addresses, "webhook_seconds": seconds}
        self.settings = self.settings.model_copy(update=changes)

    def claim(self, hook: Any, lease_seconds: float) -> Callable[[float], None]:
        """Claim the next delivery for a sender that dies; return a function to record its outcome later."""
        self.app.work(NOW, "events:webhooks")
        claim = partial(claim_next, hook_id=hook.id, now=NOW, lease_seconds=lease_seconds)
        taken = self.database.transact(claim)
        assert taken is not None
        write = partial(record, claim=taken, outcome=DeliveryOutcome(500, "too late"))
        return lambda now: self.database.transact(partial(write, now=now))

    def attempts_are(self, count: int) -> None:
        """Set the number of attempts of all deliveries."""
        with self.database.write() as connection:
            connection.execute(update(deliveries).values(attempt=count))

    def rotate(self, hook: Any, overlap_seconds: float) -> str:
        """Rotate the secret of a webhook and return the new one."""
        return str(self._ask("POST", f"/{hook.id}/rotate-secret", overlap_seconds=overlap_seconds).secret)

    def audited(self, action: str) -> list[str]:
        """Return the targets of an action in the audit log, newest first."""
        found = self.app.base.get("/api/v1/audit", params={"action": action}).json()["items"]
        return [entry["target"] for entry in found]

    def deliveries(self, hook: Any) -> Any:
        """Return all deliveries of a webhook, oldest event first."""
        query = select(deliveries).where(deliveries.c.webhook_id == hook.id).order_by(deliveries.c.event_id)
        with self.database.read() as connection:
            return connection.execute(query).all()

    def state(self, hook: Any) -> Any:
        """Return the webhook in its current state."""
        return self._ask("GET", f"/{hook.id}")

    def change(self, hook: Any, **values: Any) -> Any:
        """Change some fields of a webhook."""
        return self._ask("PATCH", f"/{hook.id}", **values)


def deliver(app: App, later_seconds: float = 0.0) -> int:
    """Run one round of an application's deliveries; return the number of attempts."""
    return int(app.work(app.service.clock() + later_seconds, "events:webhooks", "webhooks")[1])


def verify(secrets: Iterable[str], headers: Mapping[str, str], body: bytes, now: float) -> bool:
    """Check for a signature by one of the secrets, at most five minutes old. Also checks with the library of
    Standard Webhooks, which uses the system clock."""
    sent = int(headers["webhook-timestamp"])
    signed = headers["webhook-id"], datetime.fromtimestamp(sent, UTC), body.decode()
    wanted = {Webhook(secret).sign(*signed) for secret in secrets}
    return abs(now - sent) <= 300 and not wanted.isdisjoint(headers["webhook-signature"].split())


def emit_events(app: App, count: int) -> None:
    """Emit ``count`` commits without a root."""
    with app.service.database.write() as connection:
        for _ in range(count):
            emit(connection, "checkpoint.committed")


def stored_secrets(app: App) -> list[str]:
    """Return all secrets as stored in the database."""
    with app.service.database.read() as connection:
        found = connection.execute(select(webhooks.c.secret, webhooks.c.previous_secret)).all()
    return [text for row in found for text in row if text is not None]


def rows(app: App) -> dict[str, str]:
    """Return the rows of the database as text, by table."""
    with app.service.database.read() as connection:
        return {
            name: repr([tuple(row) for row in connection.execute(select(table))])
            for name, table in metadata.tables.items()
            if isinstance(table, Table)
        }
