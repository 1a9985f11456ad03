"""OpenID Connect provider: discovery, exchange of a code, and signed claims.

Answers have limits of size and time. Public keys of the provider check signatures, with asymmetric algorithms
only. Rotated keys are read again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
import structlog
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from dcp.server.catalog.inputs import clean_text
from dcp.server.features.people.flows import Flow, ProviderError, RefusedError
from dcp.server.features.people.settings import PeopleSettings, is_safe_url

_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Never "none", and never an algorithm with the client's secret as key."""
_MAX_BYTES: Final = 1 << 20
_DISCOVERY_SECONDS: Final = 3600.0
_KEYS_SECONDS: Final = 3600.0
_KEYS_AGAIN_SECONDS: Final = 10.0
"""Minimum time between reads of the keys, whatever key tokens name."""
_LEEWAY_SECONDS: Final = 60
_AT_ONCE: Final = 4
_WAITING: Final = 8
"""Limit of running and waiting requests: a hanging provider holds no more threads."""
_log = structlog.get_logger(__name__)


class Provider:
    """Configured provider; safe for use from many threads."""

    def __init__(self, options: PeopleSettings, clock: Callable[[], float] = time.time) -> None:
        self._options = options
        self._clock = clock
        self._metadata: tuple[float, Mapping[str, Any]] | None = None
        self._keys: tuple[float, KeySet] | None = None
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._queue = threading.BoundedSemaphore(_AT_ONCE + _WAITING)

    def prepare(self) -> None:
        """Read the configuration of the provider if unknown. Raises ProviderError."""
        self._discovered()

    def address_of(self, flow: Flow) -> str:
        """Return the address at which the person signs in. Raises ProviderError."""
        endpoint = str(self._discovered()["authorization_endpoint"])
        query = {
            "response_type": "code",
            "client_id": self._options.client_id,
            "redirect_uri": flow.redirect_url,
            "scope": " ".join(self._options.scopes),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": create_s256_code_challenge(flow.verifier),
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    def claims_of(self, code: str, flow: Flow) -> dict[str, Any]:
        """Exchange the code for the claims of the person. Raises ProviderError, RefusedError."""
        token = self._exchange(code, flow)
        claims = self._checked(token, flow.nonce)
        missing = {self._options.groups_claim.partition(".")[0], "email"} - claims.keys()
        endpoint = self._discovered().get("userinfo_endpoint")
        if missing and endpoint is not None and isinstance(token.get("access_token"), str):
            more = self._request(
                "GET", str(endpoint), headers={"Authorization": f"Bearer {token['access_token']}"}
            )
            if more.get("sub") != claims["sub"]:
                raise RefusedError("the provider's userinfo has another subject than the ID token")
            if "email" not in claims:  # the address is verified by the document that contains it
                claims.pop("email_verified", None)
            else:
                more.pop("email_verified", None)
            claims = {**more, **claims}
        return claims

    def _exchange(self, code: str, flow: Flow) -> dict[str, Any]:
        metadata = self._discovered()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": flow.redirect_url,
            "code_verifier": flow.verifier,
        }
        secret = self._options.client_secret
        methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        auth = None
        if secret is not None and "client_secret_basic" in methods:
            auth = (quote(self._options.client_id, safe=""), quote(secret.get_secret_value(), safe=""))
        else:
            form["client_id"] = self._options.client_id
            if secret is not None:
                form["client_secret"] = secret.get_secret_value()
        return self._request("POST", str(metadata["token_endpoint"]), data=form, auth=auth, may_refuse=True)

    def _checked(self, token: Mapping[str, Any], nonce: str) -> dict[str, Any]:
        """Return the claims of the ID token: signed by the provider, for this service and sign-in."""
        found = token.get("id_token")
        if not isinstance(found, str):
            raise ProviderError("the provider's answer has no id_token")
        try:
            try:
                decoded = jwt.decode(found, self._key_set(0.0), algorithms=_ALGORITHMS)
            except (JoseError, ValueError):  # possibly signed with a new key
                decoded = jwt.decode(found, self._key_set(self._clock()), algorithms=_ALGORITHMS)
            claims = CodeIDToken(
                decoded.claims,
                decoded.header,
                {
                    "iss": {"essential": True, "value": self._options.issuer},
                    "aud": {"essential": True, "value": self._options.client_id},
                },
                {
                    "nonce": nonce,
                    "client_id": self._options.client_id,
                    "access_token": token.get("access_token"),
                },
            )
            claims.validate(now=int(self._clock()), leeway=_LEEWAY_SECONDS)
        except (JoseError, ValueError, TypeError) as error:
            raise RefusedError(f"the provider's ID token is refused: {error}") from error
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= 255 or clean_text(subject) != subject:
            raise RefusedError("the provider's ID token has no subject")
        return dict(claims)

    def _key_set(self, wanted_since: float) -> KeySet:
        """Return the keys, read again (at limited intervals) if older than ``wanted_since``."""
        with self._lock:
            known, now = self._keys, self._clock()
        if known is not None:
            age = now - known[0]
            if age < _KEYS_AGAIN_SECONDS or (age < _KEYS_SECONDS and known[0] >= wanted_since):
                return known[1]
        document = self._request("GET", str(self._discovered()["jwks_uri"]))
        try:
            keys = KeySet.import_key_set(document)  # type: ignore[arg-type]
        except (JoseError, KeyError, TypeError, ValueError) as error:
            raise ProviderError(f"the provider's keys cannot be read: {error}") from error
        with self._lock:
            self._keys = (now, keys)
        return keys

    def _discovered(self) -> Mapping[str, Any]:
        with self._lock:
            known, now = self._metadata, self._clock()
        if known is not None and now - known[0] < _DISCOVERY_SECONDS:
            return known[1]
        try:
            found = self._discover()
        except ProviderError:
            if known is None:
                raise
            _log.warning("the provider's configuration cannot be read; using the previous configuration")
            return known[1]
        with self._lock:
            self._metadata = (now, found)
        return found

    def _discover(self) -> dict[str, Any]:
        issuer = str(self._options.issuer)
        found = self._request("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != issuer:
            raise ProviderError(
                f"the provider's issuer is {str(found.get('issuer'))[:200]!r}, but the settings have "
                f"{issuer!r}: issuer must match exactly"
            )
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint"):
            url = found.get(name)
            if url is None and name == "userinfo_endpoint":
                continue
            if not isinstance(url, str) or not is_safe_url(url, with_query=True):
                raise ProviderError(f"the provider's {name} must be an https URL")
        return found

    def _request(
        self,
        method: str,
        url: str,
        *,
        may_refuse: bool = False,
        auth: tuple[str, str] | None = None,
        **sent: Any,
    ) -> dict[str, Any]:
        """Return the JSON object of the answer. Raises ProviderError, and RefusedError if allowed by
        ``may_refuse``."""
        try:
            with self._place():
                status, body = self._answer(method, url, auth, sent)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProviderError(f"{url} does not respond: {error!r}") from error
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if may_refuse and status in (400, 401) and isinstance(found, dict):
            raise RefusedError(f"the provider rejected the code: {str(found.get('error'))[:100]}")
        if status != 200 or not isinstance(found, dict):
            raise ProviderError(f"{url} responded with status {status} and without a usable JSON object")
        return found

    @contextmanager
    def _place(self) -> Iterator[None]:
        problem = ProviderError("too many requests to the provider are in progress")
        if not self._queue.acquire(blocking=False):
            raise problem
        try:
            if not self._places.acquire(timeout=self._options.provider_seconds):
                raise problem
            try:
                yield
            finally:
                self._places.release()
        finally:
            self._queue.release()

    def _answer(
        self, method: str, url: str, auth: tuple[str, str] | None, sent: dict[str, Any]
    ) -> tuple[int, bytes]:
        seconds = self._options.provider_seconds
        until = time.monotonic() + seconds
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **sent.pop("headers", {})}
        with (
            httpx.Client(timeout=seconds, follow_redirects=False) as client,
            client.stream(method, url, headers=headers, auth=auth, **sent) as answer,
        ):
            body = b""
            for part in answer.iter_raw():
                body += part
                if len(body) > _MAX_BYTES or time.monotonic() > until:
                    raise ProviderError(f"the response of {url} is too large or too slow")
            return answer.status_code, body
