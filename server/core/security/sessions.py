"""Sessions: a browser that somebody has signed in with a key, told by 256 random bits in a cookie.

As of keys only the SHA-256 is kept. A session may what its key may; it ends with the key, when its time is
over, or when somebody signs out.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

from sqlalchemy import Connection, delete, insert, select

from dcp.server.core.security.keys import get_key, is_valid
from dcp.server.database.tables import sessions
from dcp.server.records.administration import Key

__all__ = ["begin_session", "end_session", "find_session"]

_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def begin_session(connection: Connection, key_id: int, now_seconds: float, lasts_seconds: float) -> str:
    """A new session of this key: what its cookie has, which cannot be had again. Drops old ones."""
    connection.execute(delete(sessions).where(sessions.c.expires_seconds <= now_seconds))
    token = secrets.token_urlsafe(32)
    values = {
        "key_id": key_id,
        "created_seconds": now_seconds,
        "expires_seconds": now_seconds + lasts_seconds,
    }
    connection.execute(insert(sessions).values(hash=_digest(token), **values))
    return token


def find_session(connection: Connection, token: str, now_seconds: float) -> Key | None:
    """The valid key of a session that lasts; None if there is none."""
    if _TOKEN.fullmatch(token) is None:
        return None
    query = select(sessions.c.key_id).where(
        sessions.c.hash == _digest(token), sessions.c.expires_seconds > now_seconds
    )
    key_id = connection.execute(query).scalar_one_or_none()
    key = None if key_id is None else get_key(connection, key_id)
    return key if key is not None and is_valid(key, now_seconds) else None


def end_session(connection: Connection, token: str) -> None:
    """Sign out; what is no session is none afterwards, either."""
    connection.execute(delete(sessions).where(sessions.c.hash == _digest(token)))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
