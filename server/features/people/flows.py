"""Pending sign-ins: state between the redirect to the provider and the return.

Stored as rows: any process can complete a sign-in, also after a restart, and each completes once.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Final

from sqlalchemy import (
    Column,
    Connection,
    Float,
    LargeBinary,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
)

from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.problems import UnavailableError
from dcp.server.database.tables import metadata

FLOW_SECONDS: Final = 600.0
_MAX_FLOWS: Final = 20_000

sign_ins: Final = Table(
    "sign_ins",
    metadata,
    Column("state", LargeBinary(32), primary_key=True),  # SHA-256 of the provider's returned value
    Column("browser", LargeBinary(32), nullable=False),  # SHA-256 of the cookie of the browser
    Column("nonce", String(64), nullable=False),
    Column("verifier", String(64), nullable=False),
    Column("redirect_url", Text, nullable=False),
    Column("target", Text, nullable=False),  # page to show after the sign-in
    Column("created_seconds", Float, nullable=False, index=True),
)


@dataclass(frozen=True, slots=True)
class Flow:
    """Pending sign-in; ``state`` and ``nonce`` go to the provider, ``verifier`` proves ownership."""

    state: str
    nonce: str
    verifier: str
    redirect_url: str
    target: str


class ProviderError(Exception):
    """The provider does not answer, or answers incorrectly; neither the person nor the browser can fix
    this."""


class RefusedError(Exception):
    """The provider refuses the code, or the claims are not to be trusted."""


def begin_flow(connection: Connection, browser: str, redirect_url: str, target: str, now: float) -> Flow:
    """Begin a sign-in of the browser with this cookie. Raises UnavailableError if too many are under way."""
    connection.execute(delete(sign_ins).where(sign_ins.c.created_seconds < now - FLOW_SECONDS))
    if connection.execute(select(func.count()).select_from(sign_ins)).scalar_one() >= _MAX_FLOWS:
        raise UnavailableError("too many sign-ins are in progress; try again in a few minutes")
    state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
    flow = Flow(state, nonce, verifier, redirect_url, target)
    values = {
        "state": _digest(flow.state),
        "browser": _digest(browser),
        "nonce": flow.nonce,
        "verifier": flow.verifier,
        "redirect_url": redirect_url,
        "target": target,
        "created_seconds": now,
    }
    connection.execute(insert(sign_ins).values(values))
    return flow


def end_flow(connection: Connection, state: str, browser: str, now: float) -> Flow | None:
    """Take the sign-in with this state once, from the same browser within ten minutes; None otherwise."""
    row = connection.execute(
        delete(sign_ins)
        .where(sign_ins.c.state == _digest(state), sign_ins.c.browser == _digest(browser))
        .returning(*sign_ins.c)
    ).one_or_none()
    if row is None or row.created_seconds < now - FLOW_SECONDS:
        return None
    return Flow(state, row.nonce, row.verifier, row.redirect_url, row.target)


def forget_old(context: ScheduleContext) -> None:
    """Delete expired sign-ins."""
    old = sign_ins.c.created_seconds < context.now - FLOW_SECONDS
    with context.database.read() as connection:
        has_old = connection.execute(select(sign_ins.c.state).where(old).limit(1)).first() is not None
    if has_old:
        context.database.transact(lambda connection: connection.execute(delete(sign_ins).where(old)))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
