"""Webhooks: the resource, and its secrets, which are made, checked, sealed in the database, and used to sign.

Signatures are those of Standard Webhooks. Secrets are sealed with the operator's key, by Fernet (AES-128 in
CBC mode and HMAC-SHA256) of the package cryptography: with the database or a backup of it, and without the
settings, a secret can be neither read nor replaced. Without such a key they are stored in clear text.
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
    disabled_reason: Annotated[str | None, Shown("The reason why the service disabled it.")]
    failing_since: Annotated[datetime | None, Shown("No delivery has succeeded since.")]
    previous_secret_until: Annotated[datetime | None, Shown("Until then the previous secret signs as well.")]
    created_at: datetime
    updated_at: datetime
    etag: Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True)
class WebhookSecret(Webhook):
    """A webhook and its new secret, which is shown this once, and in no repr."""

    secret: str = field(repr=False)


SEALED_PREFIX: Final = "sealed1:"
_PREFIX: Final = "whsec_"


def new_secret() -> str:
    """Make a random secret."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> str:
    """Return the secret. Raises ValueError unless it is ``whsec_`` and 24 to 64 bytes in base64."""
    if not secret.startswith(_PREFIX):
        raise ValueError(f"a secret begins with {_PREFIX}")
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a secret is base64 after its prefix") from None
    if not 24 <= len(key) <= 64:
        raise ValueError("a secret has 24 to 64 bytes")
    return secret


def headers_for(signing: Iterable[str], message_id: str, now: float, body: bytes) -> dict[str, str]:
    """Make the headers of a delivery that is sent at ``now``, with a signature of each secret."""
    at = datetime.fromtimestamp(int(now), UTC)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(
            Signer(secret).sign(message_id, at, body.decode()) for secret in signing
        ),
    }


class SealError(ValueError):
    """A secret that cannot be opened; the message says what the operator has to do."""


@dataclass(frozen=True, slots=True)
class Sealer:
    """A box for secrets: sealed with the first of ``keys``, opened with any, in clear without keys."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Make one with `webhook_key`, and `webhook_key_before` for secrets that are not sealed anew yet."""
        given = (settings.webhook_key, settings.webhook_key_before)
        return cls(tuple(key.get_secret_value().encode() for key in given if isinstance(key, SecretStr)))

    def seal(self, secret: str) -> str:
        """Return the secret as it is stored."""
        if not self.keys:
            return secret
        return SEALED_PREFIX + _fernet(self.keys[0]).encrypt(secret.encode()).decode()

    def open(self, stored: str) -> str:
        """Return a stored secret, which may be from before there was a key. Raises `SealError`."""
        if not stored.startswith(SEALED_PREFIX):
            return stored
        for key in self.keys:
            secret = _opened(stored, key)
            if secret is not None:
                return secret
        raise SealError("the secret is sealed with another key: see `webhook_key` in the service's settings")

    def renewed(self, stored: str) -> str | None:
        """Seal a stored secret anew. Returns None if it is sealed with the first key already, or if no key
        opens it: then it stays as it is."""
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
    # without the secrets, so that no log can have them
    query=select(*(column for column in webhooks.c if column.name not in ("secret", "previous_secret"))),
    # a key for some roots may see a webhook that is for no other roots
    is_visible=lambda row, visible: (
        visible is None or (row.roots is not None and visible.issuperset(row.roots))
    ),
    root=lambda row: row.roots[0] if row.roots is not None and len(row.roots) == 1 else None,
    forget=lambda connection, number: connection.execute(
        delete(deliveries).where(deliveries.c.webhook_id == number)
    ),
)


def forget_previous_secrets(connection: Connection, now: float) -> None:
    """Delete secrets that were rotated and do not sign any more."""
    connection.execute(
        update(webhooks)
        .where(webhooks.c.previous_until_seconds < now)
        .values(previous_secret=None, previous_until_seconds=None)
    )


def reseal_secrets(connection: Connection, sealer: Sealer) -> None:
    """Seal secrets that are stored in clear text, or with the previous key. Versions of webhooks stay."""
    names = ("secret", "previous_secret")
    query = select(webhooks.c.id, *(webhooks.c[name] for name in names)).order_by(webhooks.c.id)
    for number, *stored in connection.execute(query.with_for_update()).all():
        renewed = {name: text and sealer.renewed(text) for name, text in zip(names, stored, strict=True)}
        values = {name: text for name, text in renewed.items() if text is not None}
        if values:
            connection.execute(update(webhooks).where(webhooks.c.id == number).values(**values))
