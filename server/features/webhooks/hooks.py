"""Who is told of what: the table of webhooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from dcp.server.catalog.errors import ChangedError, MissingError
from dcp.server.database.tables import deliveries, webhooks
from dcp.server.features.webhooks.sealing import Sealer
from dcp.server.features.webhooks.signing import new_secret

__all__ = [
    "ALL_EVENTS",
    "EventKind",
    "Hook",
    "HookChange",
    "NewHook",
    "create_hook",
    "delete_hook",
    "disable_hook",
    "forget_previous_secrets",
    "get_hook",
    "is_visible",
    "list_hooks",
    "reseal_secrets",
    "rotate_secret",
    "update_hook",
]

EventKind = Literal[
    "checkpoint.committed",
    "checkpoint.verified",
    "checkpoint.damaged",
    "checkpoint.converted",
    "checkpoint.deleted",
    "checkpoint.tagged",
]
ALL_EVENTS: Final[tuple[EventKind, ...]] = get_args(EventKind)

Visible = frozenset[str] | None

_IN_CLEAR: Final = Sealer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One webhook. ``roots`` None is all of them.

    ``secrets`` sign, the current one first, once a `Sealer` has opened them: they are as they are stored.
    """

    id: int
    url: str
    secrets: tuple[str, ...]
    previous_until_seconds: float | None
    description: str
    events: tuple[str, ...]
    roots: frozenset[str] | None
    is_enabled: bool
    disabled_reason: str | None
    failing_since_seconds: float | None
    version: int
    created_seconds: float
    updated_seconds: float

    @property
    def etag(self) -> str:
        """Changes with every change."""
        return f'"w{self.id}-{self.version}"'

    def __repr__(self) -> str:
        return f"Hook(id={self.id}, url={self.url!r})"  # without the secrets

    def wants(self, kind: str, root: str | None, at_seconds: float) -> bool:
        """Whether it is told of an event; of nothing from before it was made."""
        return (
            self.is_enabled
            and kind in self.events
            and (self.roots is None or root in self.roots)
            and at_seconds >= self.created_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHook:
    """What there is to say about a new one."""

    url: str
    events: tuple[str, ...]
    roots: frozenset[str] | None
    description: str = ""
    is_enabled: bool = True
    secret: str | None = None

    def __repr__(self) -> str:
        return f"NewHook(url={self.url!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookChange:
    """``values`` by column; what is not in it stays. Enabling takes back why it was disabled."""

    values: dict[str, Any]
    expected_version: int | None = None


def is_visible(hook: Hook, visible: Visible) -> bool:
    """Whether a key that is for ``visible`` roots may know of it: only if it tells of no other root."""
    return visible is None or (hook.roots is not None and hook.roots <= visible)


def create_hook(
    connection: Connection, new: NewHook, now: float, sealer: Sealer = _IN_CLEAR
) -> tuple[Hook, str]:
    """The hook and its secret, which is not shown again."""
    secret = new.secret or new_secret()
    hook_id = connection.execute(
        insert(webhooks)
        .values(
            url=new.url,
            secret=sealer.seal(secret),
            description=new.description,
            events=sorted(new.events),
            roots=None if new.roots is None else sorted(new.roots),
            is_enabled=new.is_enabled,
            created_seconds=now,
            updated_seconds=now,
        )
        .returning(webhooks.c.id)
    ).scalar_one()
    return get_hook(connection, hook_id, None), secret


def get_hook(connection: Connection, hook_id: int, visible: Visible) -> Hook:
    """One of them, or `MissingError`."""
    row = connection.execute(select(webhooks).where(webhooks.c.id == hook_id)).first()
    hook = None if row is None else _hook(row)
    if hook is None or not is_visible(hook, visible):
        raise MissingError("webhook", hook_id)
    return hook


def list_hooks(connection: Connection, visible: Visible, after_id: int = 0, limit: int = 1000) -> list[Hook]:
    """The next ones by id that may be seen; there are few of them."""
    found: list[Hook] = []
    while len(found) < limit:
        query = select(webhooks).where(webhooks.c.id > after_id).order_by(webhooks.c.id).limit(limit)
        hooks = [_hook(row) for row in connection.execute(query)]
        found += [hook for hook in hooks if is_visible(hook, visible)]
        if len(hooks) < limit:
            break
        after_id = hooks[-1].id
    return found[:limit]


def update_hook(
    connection: Connection, hook_id: int, change: HookChange, visible: Visible, now: float
) -> Hook:
    """Change it. `ChangedError` if it is not in the expected version any more."""
    hook = _locked(connection, hook_id, visible)
    _expect(hook, change.expected_version)
    values = dict(change.values)
    if values.get("is_enabled") and not hook.is_enabled:
        values |= {"disabled_reason": None, "failing_since_seconds": None}
    return _store(connection, hook, values, now)


def rotate_secret(
    connection: Connection,
    hook_id: int,
    secret: str | None,
    overlap_seconds: float,
    expected_version: int | None,
    visible: Visible,
    now: float,
    sealer: Sealer = _IN_CLEAR,
) -> tuple[Hook, str]:
    """Give it a new secret; the old one signs as well for ``overlap_seconds``."""
    hook = _locked(connection, hook_id, visible)
    _expect(hook, expected_version)
    new = secret or new_secret()
    values = {
        "secret": sealer.seal(new),
        "previous_secret": hook.secrets[0] if overlap_seconds > 0 else None,
        "previous_until_seconds": now + overlap_seconds if overlap_seconds > 0 else None,
    }
    return _store(connection, hook, values, now), new


def forget_previous_secrets(connection: Connection, now: float) -> None:
    """Secrets that were rotated, and do not sign any more, are not kept."""
    connection.execute(
        update(webhooks)
        .where(webhooks.c.previous_until_seconds < now)
        .values(previous_secret=None, previous_until_seconds=None)
    )


def reseal_secrets(connection: Connection, sealer: Sealer) -> int:
    """Seal what is stored in clear text, or with the key before; how many secrets that were.

    In a writing transaction. What a webhook says of itself stays, its version included.
    """
    rows = connection.execute(
        select(webhooks.c.id, webhooks.c.secret, webhooks.c.previous_secret)
        .order_by(webhooks.c.id)
        .with_for_update()
    ).all()
    count = 0
    for hook_id, *stored in rows:
        columns = zip(("secret", "previous_secret"), stored, strict=True)
        renewed = {name: sealer.renewed(text) for name, text in columns if text is not None}
        values = {name: text for name, text in renewed.items() if text is not None}
        if values:
            connection.execute(update(webhooks).where(webhooks.c.id == hook_id).values(**values))
            count += len(values)
    return count


def disable_hook(connection: Connection, hook_id: int, reason: str, now: float) -> bool:
    """The service gives up on it; False if it was disabled already, or is gone."""
    changed = connection.execute(
        update(webhooks)
        .where(webhooks.c.id == hook_id, webhooks.c.is_enabled)
        .values(
            is_enabled=False,
            disabled_reason=reason,
            updated_seconds=now,
            version=webhooks.c.version + 1,
        )
    )
    return changed.rowcount == 1


def delete_hook(connection: Connection, hook_id: int, expected_version: int | None, visible: Visible) -> Hook:
    """Remove it with all that is remembered of its deliveries."""
    hook = _locked(connection, hook_id, visible)
    _expect(hook, expected_version)
    connection.execute(delete(deliveries).where(deliveries.c.webhook_id == hook_id))
    connection.execute(delete(webhooks).where(webhooks.c.id == hook_id))
    return hook


def enabled_hooks(connection: Connection) -> Sequence[Hook]:
    """All that are enabled, kept from being removed until the transaction ends."""
    query = select(webhooks).where(webhooks.c.is_enabled).order_by(webhooks.c.id)
    return [_hook(row) for row in connection.execute(query.with_for_update(read=True))]


def count_enabled(connection: Connection) -> int:
    """How many are enabled."""
    return connection.execute(select(func.count(webhooks.c.id)).where(webhooks.c.is_enabled)).scalar_one()


def _locked(connection: Connection, hook_id: int, visible: Visible) -> Hook:
    row = connection.execute(select(webhooks).where(webhooks.c.id == hook_id).with_for_update()).first()
    hook = None if row is None else _hook(row)
    if hook is None or not is_visible(hook, visible):
        raise MissingError("webhook", hook_id)
    return hook


def _expect(hook: Hook, version: int | None) -> None:
    if version is not None and version != hook.version:
        raise ChangedError("webhook", hook.id, expected=version, version=hook.version)


def _store(connection: Connection, hook: Hook, values: dict[str, Any], now: float) -> Hook:
    connection.execute(
        update(webhooks)
        .where(webhooks.c.id == hook.id)
        .values(**values, updated_seconds=now, version=hook.version + 1)
    )
    return get_hook(connection, hook.id, None)


def _hook(row: Row[Any]) -> Hook:
    previous = () if row.previous_secret is None else (row.previous_secret,)
    return Hook(
        id=row.id,
        url=row.url,
        secrets=(row.secret, *previous),
        previous_until_seconds=row.previous_until_seconds,
        description=row.description,
        events=tuple(row.events),
        roots=None if row.roots is None else frozenset(row.roots),
        is_enabled=row.is_enabled,
        disabled_reason=row.disabled_reason,
        failing_since_seconds=row.failing_since_seconds,
        version=row.version,
        created_seconds=row.created_seconds,
        updated_seconds=row.updated_seconds,
    )
