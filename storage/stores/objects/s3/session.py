"""Sessions of S3: what all clients share, and HTTP that sends nothing twice."""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any, Final

from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader

from dcp.storage.stores.objects.s3.http_bodies import BodyTransport

__all__ = ["OneAttemptSession", "read_descriptions", "session_of"]

_SECONDS: Final = 60.0
_CONNECTIONS: Final = 10
_KEPT_SECONDS: Final = 12.0
_KEPT: Final = "keepalive_timeout"


def session_of(**options: Any) -> AioSession:
    """aiobotocore's session with these options. All sessions share the descriptions of services, which
    take a tenth of a second to parse, and megabytes."""
    session = AioSession(**options)
    session.lazy_register_component("data_loader", lambda: _loader(session.get_config_variable("data_path")))
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    return create_loader(data_path)


def read_descriptions() -> None:
    """Read what the first client of a process needs, for those that are forked from this one."""
    for description in ("service-2", "endpoint-rule-set-1"):
        _loader(None).load_service_model("s3", description)


class OneAttemptSession(AIOHTTPSession):  # type: ignore[misc]  # it comes without types
    """aiobotocore's session, which sends nothing twice on its own.

    Where a kept connection breaks, aiohttp sends GET, HEAD, PUT and DELETE again and says nothing. That is
    harmless only for requests without conditions. A commit that is sent again because its answer was lost is
    answered with 412; who does not know that takes its own commit for somebody else's.

    `bodies` is made here, of the settings that botocore has found for its connections; None where they ask
    for what it cannot do.
    """

    def __init__(
        self,
        verify: Any = True,
        proxies: Any = None,
        timeout: Any = None,
        max_pool_connections: int = _CONNECTIONS,
        socket_options: Any = None,
        client_cert: Any = None,
        proxies_config: Any = None,
        connector_args: Any = None,
    ) -> None:
        super().__init__(
            verify=verify,
            proxies=proxies,
            timeout=timeout,
            max_pool_connections=max_pool_connections,
            socket_options=socket_options,
            client_cert=client_cert,
            proxies_config=proxies_config,
            connector_args=connector_args,
        )
        self.bodies: BodyTransport | None = None
        if not (connector_args or {}).keys() - {_KEPT}:
            connect, read = timeout if isinstance(timeout, list | tuple) else (timeout, timeout)
            self.bodies = BodyTransport(
                threads=max_pool_connections,
                connect_seconds=_SECONDS if connect is None else connect,
                read_seconds=_SECONDS if read is None else read,
                kept_seconds=(connector_args or {}).get(_KEPT, _KEPT_SECONDS),
                tls=lambda: _tls(verify, client_cert),
            )

    def uses_proxy(self, url: str) -> bool:
        """Whether requests to ``url`` go through a proxy."""
        return self._proxy_config.proxy_url_for(url) is not None

    async def __aexit__(self, *exc: Any) -> None:
        if self.bodies is not None:
            self.bodies.close()
        await super().__aexit__(*exc)

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # there is no public way
        return session


def _tls(verify: Any, client_cert: Any) -> ssl.SSLContext:
    """The TLS context that botocore makes of the same settings."""
    if verify:
        context = ssl.create_default_context(cafile=get_cert_path(verify) or None)
    else:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if client_cert:
        context.load_cert_chain(*((client_cert,) if isinstance(client_cert, str) else client_cert))
    return context
