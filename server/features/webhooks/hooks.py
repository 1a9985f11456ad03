"""Webhooks: the resource, and secrets: creation, validation, encryption at rest, and signatures.

Signatures follow Standard Webhooks. Secrets are encrypted with the operator's key by Fernet (AES-128 in CBC
mode and HMAC-SHA256) of the package cryptography: the database or a backup, without the settings, allows
neither reading nor replacing a secret. Without a key, secrets are stored in clear text.
"""

from __future__ import annotations

import base64
import binascii
import functools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Final, Self

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr
from sqlalchemy import Connection, delete, select, update
from standardwebhooks import Webhook as Signer

from dcp.server.catalog.inputs import LateChoice
from dcp.server.core.resource import Resource
from dcp.server.core.settings import Settings
from dcp.server.database.mapping import record_of_row
from dcp.server.features import event_kinds
from dcp.server.features.webhooks import deliveries_table as deliveries
from dcp.server.features.webhooks import webhooks
from dcp.server.records.declaring import Shown, moment


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL to which events are posted; ``roots`` None: events of all roots."""

    id: int
    url: str
    events: tuple[str, ...]
    roots: Annotated[tuple[str, ...] | None, Shown("null: all.")]
    description: str
    is_enabled: bool
    disabled_reason: Annotated[str | None, Shown("Reason why the service disabled the webhook.")]
    failing_since: Annotated[datetime | None, Shown("No delivery has succeeded since.")]
    previous_secret_until: Annotated[datetime | None, Shown("Until then the previous secret signs as well.")]
    created_at: datetime
    updated_at: datetime
    etag: Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True)
class WebhookSecret(Webhook):
    """Webhook and its new secret, shown only once, and in no repr."""

    secret: str = field(repr=False)


SEALED_PREFIX: Final = "sealed1:"
_PREFIX: Final = "whsec_"


def new_secret() -> str:
    """Make a random secret."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> str:
    """Return the secret. Raises ValueError unless the secret is ``whsec_`` and 24 to 64 bytes in base64."""
    if not secret.startswith(_PREFIX):
        raise ValueError(f"a secret must begin with {_PREFIX}")
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a secret must be base64 after its prefix") from None
    if not 24 <= len(key) <= 64:
        raise ValueError("a secret must have 24 to 64 bytes")
    return secret


def headers_for(signing: Iterable[str], message_id: str, now: float, body: bytes) -> dict[str, str]:
    """Make the headers of a delivery sent at ``now``, with a signature per secret."""
    at = datetime.fromtimestamp(int(now), UTC)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(
            Signer(secret).sign(message_id, at, body.decode()) for secret in signing
        ),
    }


class SealError(ValueError):
    """Secret that cannot be decrypted; the message has the remedy for the operator."""


@dataclass(frozen=True, slots=True)
class Sealer:
    """A box for secrets: sealed with the first of ``keys``, opened with any, in clear without keys."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Make a sealer with `webhook_key`, and `webhook_key_before` for secrets encrypted earlier."""
        given = (settings.webhook_key, settings.webhook_key_before)
        return cls(tuple(key.get_secret_value().encode() for key in given if isinstance(key, SecretStr)))

    def seal(self, secret: str) -> str:
        """Encrypt a secret for storage."""
        if not self.keys:
            return secret
        return SEALED_PREFIX + _fernet(self.keys[0]).encrypt(secret.encode()).decode()

    def open(self, stored: str) -> str:
        """Decrypt a stored secret; returns clear-text secrets unchanged. Raises `SealError`."""
        if not stored.startswith(SEALED_PREFIX):
            return stored
        for key in self.keys:
            secret = _opened(stored, key)
            if secret is not None:
                return secret
        raise SealError(
            "the secret was encrypted with another key: set `webhook_key_before` in the service's settings"
        )

    def renewed(self, stored: str) -> str | None:
        """Encrypt a stored secret with the first key. None if already encrypted with this key, or if no key
        decrypts the secret, which then stays unchanged."""
        if not self.keys or _opened(stored, self.keys[0]) is not None:
            return None
        try:
            return self.seal(self.open(stored))
        except SealError:
            return None


def _opened(stored: str, key: bytes) -> str | None:
    if not stored.startswith(SEALED_PREFIX):
        return None
    try:
        return _fernet(key).decrypt(stored.removeprefix(SEALED_PREFIX)).decode()
    except InvalidToken:
        return None


@functools.lru_cache(maxsize=8)
def _fernet(key: bytes) -> Fernet:
    derived = HKDF(SHA256(), length=32, salt=None, info=b"dcphub webhook secrets").derive(key)
    return Fernet(base64.urlsafe_b64encode(derived))


EventKind = Annotated[str, LateChoice(event_kinds)]

HOOKS: Final = Resource(
    webhooks,
    what="webhook",
    noun="webhook",
    tag="w{id}",
    record=lambda row, etag: record_of_row(
        Webhook,
        row,
        previous_secret_until=moment(row.previous_until_seconds) if row.previous_until_seconds else None,
        etag=etag,
    ),
    # without the secrets, which must not reach a log
    query=select(*(column for column in webhooks.c if column.name not in ("secret", "previous_secret"))),
    # a key for some roots may see a webhook limited to these roots
    is_visible=lambda row, visible: (
        visible is None or (row.roots is not None and visible.issuperset(row.roots))
    ),
    root=lambda row: row.roots[0] if row.roots is not None and len(row.roots) == 1 else None,
    forget=lambda connection, number: connection.execute(
        delete(deliveries).where(deliveries.c.webhook_id == number)
    ),
)


def forget_previous_secrets(connection: Connection, now: float) -> None:
    """Delete rotated secrets that no longer sign."""
    connection.execute(
        update(webhooks)
        .where(webhooks.c.previous_until_seconds < now)
        .values(previous_secret=None, previous_until_seconds=None)
    )


def reseal_secrets(connection: Connection, sealer: Sealer) -> None:
    """Encrypt secrets stored in clear text, or with the previous key. Versions of webhooks do not change."""
    names = ("secret", "previous_secret")
    query = select(webhooks.c.id, *(webhooks.c[name] for name in names)).order_by(webhooks.c.id)
    for number, *stored in connection.execute(query.with_for_update()).all():
        renewed = {name: text and sealer.renewed(text) for name, text in zip(names, stored, strict=True)}
        values = {name: text for name, text in renewed.items() if text is not None}
        if values:
            connection.execute(update(webhooks).where(webhooks.c.id == number).values(**values))
