"""``/whoami``: who asks, and what that one may."""

from __future__ import annotations

from dcp.server.core.http.dependencies import Caller, Db, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.security.keys import whoami
from dcp.server.features.keys.answers import WhoamiAnswer

__all__ = ["router"]

router = api_router(tags=["keys"], dependencies=[requires("read")])


@router.get("/whoami")
def get_whoami(database: Db, caller: Caller) -> WhoamiAnswer:
    """The name, the scopes and the roots of the key; without keys everybody is `local`, and may all."""
    with database.read() as connection:
        return WhoamiAnswer.of(whoami(connection, caller))
