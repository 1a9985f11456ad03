"""How secrets of webhooks lie in the database: sealed with the operator's key, or in clear text without one.

A secret has 64 bytes at most. Sealed, it is masked with as many bytes of HMAC-SHA512 of a nonce that is used
once, and nonce and masked bytes carry an HMAC-SHA256: encrypt, then authenticate, from one pseudorandom
function, with a key of its own for each of the two. So whoever has the database, or a backup, and not the
settings, can neither read a secret nor put another one in its place.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final, Self

from pydantic import SecretStr

from dcp.server.settings import Settings
from dcp.server.webhooks.signing import SECRET_PREFIX, key_of

__all__ = ["SEALED_PREFIX", "SealError", "Sealer"]

SEALED_PREFIX: Final = "sealed1:"
_NONCE_BYTES: Final = 32
_TAG_BYTES: Final = 32


class SealError(ValueError):
    """A secret that cannot be opened; the message says what the operator has to do."""


@dataclass(frozen=True, slots=True)
class Sealer:
    """Seals with the first of ``keys``, opens with any; without keys secrets stay as they are."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """With `webhook_key`, and `webhook_key_before` for what is not sealed anew yet."""
        given = (settings.webhook_key, settings.webhook_key_before)
        return cls(tuple(key.get_secret_value().encode() for key in given if isinstance(key, SecretStr)))

    def seal(self, secret: str) -> str:
        """As the database is to have it."""
        if not self.keys:
            return secret
        masking, authenticating = _subkeys(self.keys[0])
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + _masked(key_of(secret), masking, nonce)
        return SEALED_PREFIX + base64.b64encode(sealed + _tag(authenticating, sealed)).decode()

    def open(self, stored: str) -> str:
        """The secret; also of one that was stored before there was a key. Raises `SealError`."""
        if not stored.startswith(SEALED_PREFIX):
            return stored
        for key in self.keys:
            secret = _opened(stored, key)
            if secret is not None:
                return secret
        raise SealError("the secret is sealed with another key: see `webhook_key` in the service's settings")

    def renewed(self, stored: str) -> str | None:
        """Sealed anew, where it lies otherwise than `seal` has it now; None where it is right already.

        None as well for what no key opens, which stays as it is.
        """
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
        data = base64.b64decode(stored.removeprefix(SEALED_PREFIX), validate=True)
    except binascii.Error:
        return None
    sealed, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
    masking, authenticating = _subkeys(key)
    if not hmac.compare_digest(tag, _tag(authenticating, sealed)):
        return None
    secret = _masked(sealed[_NONCE_BYTES:], masking, sealed[:_NONCE_BYTES])
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def _subkeys(key: bytes) -> tuple[bytes, bytes]:
    masking = hmac.digest(key, b"dcphub webhook secrets: mask", hashlib.sha256)
    return masking, hmac.digest(key, b"dcphub webhook secrets: tag", hashlib.sha256)


def _masked(data: bytes, key: bytes, nonce: bytes) -> bytes:
    # No longer than the mask: else its end would be lost, and it is 64 bytes, as the longest secret.
    mask = hmac.digest(key, nonce, hashlib.sha512)
    return bytes(one ^ other for one, other in zip(data, mask[: len(data)], strict=True))


def _tag(key: bytes, sealed: bytes) -> bytes:
    return hmac.digest(key, sealed, hashlib.sha256)
