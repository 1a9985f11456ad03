"""HTTP for S3: one attempt is one request."""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

__all__ = ["OneAttemptSession"]


class OneAttemptSession(AIOHTTPSession):  # type: ignore[misc]  # it comes without types
    """aiobotocore's session, which sends nothing twice on its own.

    Where a kept connection breaks, aiohttp sends GET, HEAD, PUT and DELETE again and says nothing. That is
    harmless only for requests without conditions. A commit whose answer was lost is answered with 412 when it
    is repeated, and whoever does not know of the repetition takes the own commit for somebody else's.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # there is no public way
        return session
