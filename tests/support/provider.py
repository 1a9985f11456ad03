"""An OpenID Connect provider on loopback: signs ``person`` in at once, with valid or forged tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

__all__ = ["CLIENT", "SECRET", "Provider"]

CLIENT: Final = "dcphub"
SECRET: Final = "a client's secret, which is long enough"
Forge = Callable[[dict[str, Any], dict[str, Any]], str | None]


class Provider:
    """A provider; ``forge`` receives header and claims of an ID token, and changes or replaces them."""

    def __init__(self) -> None:
        self.person: dict[str, Any] = {"sub": "1"}
        self.userinfo: dict[str, Any] = {}
        self.forge: Forge = lambda header, claims: None
        self.replies: dict[str, Any] = {}  # replies by path, instead of the default ones
        self.codes: dict[str, dict[str, str]] = {}
        self.paths: list[str] = []
        self.rotate()

    def rotate(self) -> None:
        """Sign with a new key from now on."""
        self.key = RSAKey.generate_key(2048, {"kid": secrets.token_hex(4)})

    def __enter__(self) -> Provider:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                length = int(self.headers.get("content-length", "0"))
                sent = parse_qs(parts.query or self.rfile.read(length).decode())
                query = {name: values[0] for name, values in sent.items()}
                provider.paths.append(parts.path)
                found = provider.replies.get(parts.path) or provider.reply(
                    parts.path, query, str(self.headers.get("authorization"))
                )
                status, body = found if isinstance(found, tuple) else (200, found)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body)
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, path: str, query: dict[str, str], authorization: str) -> Any:
        """Return the answer of an honest provider, changed by ``forge``."""
        if path == "/.well-known/openid-configuration":
            paths = ("authorization_endpoint", "token_endpoint", "userinfo_endpoint")
            return {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"} | {
                name: f"{self.url}/{name.partition('_')[0]}" for name in paths
            }
        if path == "/jwks":
            return KeySet([self.key]).as_dict(private=False)
        if path == "/authorization":
            code = secrets.token_hex(8)
            self.codes[code] = query
            return 302, f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"
        if path == "/userinfo":
            return {"sub": self.person["sub"], **self.userinfo}
        return self._token(self.codes.pop(query["code"], None), query, authorization)

    def _token(self, params: dict[str, str] | None, query: dict[str, str], authorization: str) -> Any:
        digest = hashlib.sha256(query["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        basic = base64.b64encode(f"{CLIENT}:{SECRET.replace(' ', '%20')}".encode()).decode()
        if params is None or params["code_challenge"] != challenge or authorization[:5] != "Basic":
            return 400, {"error": "invalid_grant"}
        if params["redirect_uri"] != query["redirect_uri"] or basic[:16] not in authorization:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": params["nonce"]}
        header = {"alg": "RS256", "kid": self.key.kid}
        claims |= self.person
        token = self.forge(header, claims) or jwt.encode(header, claims, self.key)
        return {"access_token": "opaque", "token_type": "Bearer", "id_token": token}
