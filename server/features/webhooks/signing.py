"""Signatures by which a receiver knows that a delivery is ours, and new: those of Standard Webhooks.

The headers ``webhook-id``, ``webhook-timestamp`` (seconds since the epoch) and ``webhook-signature``: one
``v1,BASE64`` or several with spaces between, while a rotated secret is still valid. Signed is
``ID.TIMESTAMP.BODY`` by HMAC-SHA256, with the bytes of the secret behind ``whsec_``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = [
    "SECRET_PREFIX",
    "TOLERANCE_SECONDS",
    "SignatureError",
    "check_secret",
    "headers_for",
    "key_of",
    "new_secret",
    "verify",
]

SECRET_PREFIX: Final = "whsec_"
TOLERANCE_SECONDS: Final = 300.0
"""How far a receiver's clock, and a delivery under way, may be from the timestamp."""

_SECRET_BYTES: Final = 32
_SHORTEST_BYTES: Final = 24
_LONGEST_BYTES: Final = 64


class SignatureError(ValueError):
    """Not ours, changed on the way, or old."""


def new_secret() -> str:
    """One that nobody can guess."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def check_secret(secret: str) -> None:
    """Raises ValueError for what is no secret of the standard's: ``whsec_`` and 24 to 64 bytes in base64."""
    if not _SHORTEST_BYTES <= len(key_of(secret)) <= _LONGEST_BYTES:
        raise ValueError(f"a secret has {_SHORTEST_BYTES} to {_LONGEST_BYTES} bytes")


def headers_for(signing_secrets: Sequence[str], message_id: str, now: float, body: bytes) -> dict[str, str]:
    """The three headers of a delivery that is sent at ``now``."""
    timestamp = str(int(now))
    signatures = [_signature(secret, message_id, timestamp, body) for secret in signing_secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures),
    }


def verify(
    signing_secrets: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    now: float,
    *,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> str:
    """What a receiver does: the message's id, by which repetitions are told, or `SignatureError`.

    ``headers`` with names in lower case, or of a mapping that does not mind.
    """
    try:
        message_id = headers["webhook-id"]
        timestamp = headers["webhook-timestamp"]
        given = headers["webhook-signature"].split()
        sent = int(timestamp)
    except (KeyError, ValueError) as error:
        raise SignatureError(f"not a signed delivery: {error}") from error
    if abs(now - sent) > tolerance_seconds:
        raise SignatureError(f"sent {now - sent:.0f} s ago; {tolerance_seconds:.0f} at most")
    wanted = [_signature(secret, message_id, timestamp, body) for secret in signing_secrets]
    # Compared with all, without stopping at the first: how long it takes tells nothing.
    matches = [hmac.compare_digest(one.encode(), other.encode()) for one in wanted for other in given]
    if not any(matches):
        raise SignatureError("no signature matches")
    return message_id


def _signature(secret: str, message_id: str, timestamp: str, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key_of(secret), signed, hashlib.sha256)).decode()


def key_of(secret: str) -> bytes:
    """The bytes that sign. Raises ValueError for what is no secret."""
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError(f"a secret begins with {SECRET_PREFIX}")
    try:
        return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a secret is base64 after its prefix") from None
