"""A catalog with webhooks, and rounds of their deliveries at any time, as a worker does them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Table, delete, select, update

from dcp.server.catalog.audit import audit_page
from dcp.server.catalog.events import emit
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.database.tables import deliveries, events, metadata, roots, webhooks
from dcp.server.features.webhooks import hooks, ledger
from dcp.server.features.webhooks.delivering import Deliverer, deliver_due
from dcp.server.features.webhooks.hooks import ALL_EVENTS, Hook, HookChange, NewHook
from dcp.server.features.webhooks.ledger import MAX_ATTEMPTS, RETRY_SECONDS, DeliveryRow
from dcp.server.features.webhooks.signing import SignatureError, verify
from dcp.server.process.schedules import built_in_schedules
from tests.support.app import App
from tests.support.catalog_rows import add_checkpoint

__all__ = [
    "ALL_EVENTS",
    "MAX_ATTEMPTS",
    "NOW",
    "RETRY_SECONDS",
    "Bench",
    "Hook",
    "SignatureError",
    "clean",
    "deliver",
    "emit_events",
    "rows",
    "stored_secrets",
    "verify",
]

NOW: Final = 1_790_000_000.0


class Bench:
    """A catalog with the roots "main" and "other" and one checkpoint in each."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.settings = Settings(webhook_allow_private=("127.0.0.0/8",), webhook_seconds=20.0)
        self.checkpoint_ids = {
            root: add_checkpoint(database, "first/step-7", root=root) for root in ("main", "other")
        }
        with database.write() as connection:
            connection.execute(delete(events))
            found = connection.execute(select(roots.c.name, roots.c.id)).all()
        self.root_ids = {name: int(number) for name, number in found}

    def hook(self, url: str, events: tuple[str, ...] = ALL_EVENTS, root: str | None = None) -> Hook:
        """A webhook made at `NOW`."""
        new = NewHook(url=url, events=events, roots=None if root is None else frozenset({root}))
        return self.database.transact(lambda connection: hooks.create_hook(connection, new, NOW))[0]

    def emit(
        self, kind: str = "checkpoint.committed", root: str = "main", at: float = NOW, **data: Any
    ) -> None:
        """An event of the root's checkpoint."""
        root_id, checkpoint_id = self.root_ids[root], self.checkpoint_ids[root]
        with self.database.write() as connection:
            emit(connection, kind, root_id=root_id, checkpoint_id=checkpoint_id, data=data, now=at)

    def emit_rootless(self, kind: str) -> None:
        """An event of no root."""
        with self.database.write() as connection:
            emit(connection, kind, now=NOW)

    def round(self, now: float = NOW, resolve: Callable[[str, int], list[str]] | None = None) -> int:
        """One round of deliveries; how many were tried."""
        found: dict[str, Any] = {} if resolve is None else {"resolve": resolve}
        return Deliverer(self.settings, self.database, **found).round(now)

    def allow(self, *addresses: str, seconds: float = 20.0) -> None:
        """Settings that change."""
        changes = {"webhook_allow_private": addresses, "webhook_seconds": seconds}
        self.settings = self.settings.model_copy(update=changes)

    def claim(self, hook: Hook, lease_seconds: float) -> Callable[[int, float], None]:
        """A sender that takes the next delivery and dies; what records its outcome later all the same."""
        self.database.transact(lambda connection: ledger.queue_events(connection, NOW))
        taken = self.database.transact(
            lambda connection: ledger.claim_next(connection, hook.id, NOW, lease_seconds)
        )
        assert taken is not None

        def record(status: int, now: float) -> None:
            late = ledger.DeliveryOutcome(status, "too late")
            self.database.transact(lambda connection: ledger.record(connection, taken, late, now))

        return record

    def attempts_are(self, count: int) -> None:
        """Of all deliveries."""
        with self.database.write() as connection:
            connection.execute(update(deliveries).values(attempt=count))

    def rotate(self, hook: Hook, overlap_seconds: float) -> str:
        """The new secret."""
        return self.database.transact(
            lambda connection: hooks.rotate_secret(
                connection, hook.id, None, overlap_seconds, None, None, NOW
            )
        )[1]

    def audited(self, action: str) -> list[str]:
        """What the audit log has of it, by target, the newest first."""
        with self.database.read() as connection:
            return [entry.target for entry in audit_page(connection, action=action).items]

    def deliveries(self, hook: Hook) -> list[DeliveryRow]:
        """All of a webhook, oldest event first."""
        with self.database.read() as connection:
            return ledger.list_deliveries(connection, hook.id, None, None, 1000)[::-1]

    def state(self, hook: Hook) -> Hook:
        """The webhook as it is now."""
        with self.database.read() as connection:
            return hooks.get_hook(connection, hook.id, None)

    def change(self, hook: Hook, **values: Any) -> Hook:
        """Change some columns."""
        change = HookChange(values=values)
        return self.database.transact(
            lambda connection: hooks.update_hook(connection, hook.id, change, None, NOW)
        )


def deliver(app: App, later_seconds: float = 0.0) -> int:
    """One round of an application's deliveries; how many were tried."""
    return deliver_due(app.service, app.service.clock() + later_seconds)


def clean(app: App, later_seconds: float = 0.0) -> None:
    """What the worker does every ten minutes."""
    (schedule,) = (one for one in built_in_schedules(app.service.settings) if one.name == "clean-up")
    now = app.service.clock() + later_seconds
    schedule.act(ScheduleContext(app.service.settings, app.service.database, now, threading.Event()))


def emit_events(app: App, count: int) -> None:
    """Commits of no root."""
    with app.service.database.write() as connection:
        for _ in range(count):
            emit(connection, "checkpoint.committed")


def stored_secrets(app: App) -> list[str]:
    """All, as the database has them."""
    with app.service.database.read() as connection:
        found = connection.execute(select(webhooks.c.secret, webhooks.c.previous_secret)).all()
    return [text for row in found for text in row if text is not None]


def rows(app: App) -> dict[str, str]:
    """All that is in the database, by table."""
    with app.service.database.read() as connection:
        return {
            name: repr([tuple(row) for row in connection.execute(select(table))])
            for name, table in metadata.tables.items()
            if isinstance(table, Table)
        }
