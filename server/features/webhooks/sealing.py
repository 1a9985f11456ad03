"""How secrets of webhooks lie in the database: sealed with the operator's key, or in clear text without one.

By Fernet (AES-128 in CBC mode and HMAC-SHA256) of the package cryptography. Whoever has the database, or a
backup, and not the settings, can neither read a secret nor put another one in its place.
"""

from __future__ import annotations

import base64
import functools
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr

from dcp.server.core.settings import Settings

__all__ = ["SEALED_PREFIX", "SealError", "Sealer"]

SEALED_PREFIX: Final = "sealed1:"


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
        return SEALED_PREFIX + _fernet(self.keys[0]).encrypt(secret.encode()).decode()

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
        return _fernet(key).decrypt(stored.removeprefix(SEALED_PREFIX)).decode()
    except InvalidToken:
        return None


@functools.lru_cache(maxsize=8)
def _fernet(key: bytes) -> Fernet:
    derived = HKDF(SHA256(), length=32, salt=None, info=b"dcphub webhook secrets").derive(key)
    return Fernet(base64.urlsafe_b64encode(derived))
