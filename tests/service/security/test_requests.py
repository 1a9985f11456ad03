"""Requests: keys, hosts, origins, limits and headers; documentation and readiness of the service."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.app import App, running_app
from tests.support.catalog import API
from tests.support.databases import MakeDatabase
from tests.support.openapi import document
from tests.support.sockets import listening

PUBLIC_PATHS = {"/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/redoc"} | {
    "/docs/static/{name}",
    "/sign-in",
    "/sign-in/callback",
    "/sign-in/provider",
    "/sign-out",
    "/static/{digest}/{name:path}",
    "/theme",
}
MANY: dict[str, Any] = {"rate_limit": "1000000/minute", "login_limit": "1000000/minute"}
JSON = {"Content-Type": "application/json"}
WRONG = f"dcp_abcdefgh_{'x' * 43}"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Start a shared application for tests that change nothing and do not depend on the database."""
    folder = tmp_path_factory.mktemp("requests")
    with running_app(f"sqlite:///{folder / 'catalog.sqlite'}", folder, **MANY) as running:
        yield running


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a database for an application with other settings."""
    return f"sqlite:///{tmp_path / 'catalog.sqlite'}"


def bearer(key: str) -> dict[str, str]:
    """Return the header with a key."""
    return {"Authorization": f"Bearer {key}"}


def routes(app: App) -> dict[str, set[str]]:
    """Return the methods of each path."""
    found: dict[str, set[str]] = {}
    for route in app.app.routes:
        found.setdefault(route.path, set()).update(route.methods)  # type: ignore[attr-defined]
    return found


def test_routes_need_a_key(app: App) -> None:
    """Except for public paths, each route and unknown path gets 401 or leads to the sign-in."""
    client, public = app.client(), set()
    for path, methods in routes(app).items():
        place = re.sub(r"{.*?}", "1", path)
        for method in methods - {"HEAD"}:
            options: Any = {"json": {}} if path.startswith(API) else {}
            answer = client.request(method, place, follow_redirects=False, **options)
            if answer.status_code != 401 and "/sign-in?next=" not in answer.headers.get("location", ""):
                public.add(path)
            elif path.startswith(API):
                assert answer.headers["www-authenticate"] == 'Bearer realm="dcp"'
                assert client.request(method, place, headers=bearer(WRONG), json={}).status_code == 401
    assert public <= PUBLIC_PATHS
    assert client.get(f"{API}/no/such/thing").status_code == 401


@pytest.mark.parametrize("value", ["Basic YTpi", "Bearer", "bearer  ", "dcp_x", "Bearer a, Bearer b"])
def test_authorization_of_another_kind(app: App, value: str) -> None:
    """An Authorization header without a bearer key is refused on each path."""
    assert app.client().get("/healthz", headers={"Authorization": value}).status_code == 401


HOSTS = {
    200: ("localhost", "LOCALHOST:1234", "127.0.0.1:8470", "[::1]:8470"),
    421: ("evil.example", "localhost.evil.example", "", "127.0.0.2", "[::2]"),
    400: ("x@evil.example", "127.0.0.1:80@evil.example", "localhost:x", "localhost/", "[::1]x"),
}


def test_only_configured_hosts_are_accepted(app: App) -> None:
    """Only hosts of the settings are accepted, with or without a port."""
    for status, hosts in HOSTS.items():
        for host in hosts:
            answer = app.client().get("/healthz", headers={"Host": host})
            assert answer.status_code == status, host
            assert status == 200 or answer.headers["content-type"] == "application/problem+json"


def test_chunked_bodies_with_a_length_get_400(app: App) -> None:
    """A chunked request with a Content-Length gets 400, and its connection is closed."""
    with (
        listening(app.app) as place,
        socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), 30) as connection,
    ):
        connection.sendall(
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {app.key('read', name='lengths')}\r\n".encode()
            + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400") and b"exclude each other" in answer


def test_concurrent_large_bodies_are_limited(tmp_path: Path, url: str) -> None:
    """A key may send two large bodies at a time, more get 429; other keys and requests are not affected."""
    with (
        running_app(url, tmp_path, **MANY) as app,
        listening(app.app) as place,
        httpx.Client(verify=False, trust_env=False, timeout=120) as http,
        ThreadPoolExecutor(9) as pool,
        closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as writer,
    ):
        one, other = (bearer(app.key("admin", name=name)) for name in ("one", "two"))

        def post(name: str, headers: dict[str, str]) -> httpx.Response:
            body = json.dumps({"name": name, "scopes": ["read"]}).ljust(300_000)
            return http.post(f"{place}{API}/keys", content=body, headers=headers | JSON)

        writer.execute("BEGIN IMMEDIATE")  # accepted requests wait for the database
        sent = [pool.submit(post, f"one-{number}", one) for number in range(8)]
        mine = pool.submit(post, "two-0", other)
        refused = [each.result() for _, each in zip(range(6), as_completed(sent), strict=False)]
        assert http.get(f"{place}/healthz").status_code == 200
        writer.execute("ROLLBACK")
        assert [(each.status_code, "retry-after" in each.headers) for each in refused] == [(429, True)] * 6
        assert sorted(each.result().status_code for each in sent) == [201] * 2 + [429] * 6
        assert mine.result().status_code == post("again", one).status_code == 201


def test_pages_of_other_sites_read_nothing_without_keys(tmp_path: Path, url: str) -> None:
    """Without keys, pages of other sites cannot start downloads; links to pages and other clients work."""
    place = f"{API}/checkpoints/1/download"
    with running_app(url, tmp_path, auth="off") as app:
        client = app.client()
        for site in ("cross-site", "same-site"):
            image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
            link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
            assert client.get(place, headers=image).status_code == 403
            assert client.get(place, headers=link).status_code == 403
            assert client.get("/docs", headers=link | {"Sec-Fetch-Dest": "iframe"}).status_code == 403
            assert client.get("/docs", headers=link).status_code == 200
        for own in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
            assert client.get(place, headers=own).status_code == 404


def test_requests_of_other_sites_change_nothing(app: App) -> None:
    """Requests from pages of other sites change nothing, and CORS allows nothing."""
    client, body = app.client("admin", name="sites"), {"name": "new"}
    for origin in ("http://evil.example", "null", "http://["):
        assert client.post(f"{API}/keys", json=body, headers={"Origin": origin}).status_code == 403
    assert client.post(f"{API}/keys", json=body, headers={"Origin": "http://localhost"}).status_code == 201
    other = {"Origin": "http://evil.example"}
    preflight = client.options(f"{API}/keys", headers={**other, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 405
    for answer in (preflight, client.get(f"{API}/roots", headers=other)):
        assert "access-control-allow-origin" not in answer.headers


def test_headers_of_every_response(app: App) -> None:
    """Each response has the security headers; a well-formed request id of the caller is kept."""
    client = app.client("admin", name="headers")
    for path in ("/healthz", f"{API}/roots", f"{API}/nowhere", "/docs", "/metrics"):
        headers = client.get(path, headers={"X-Request-ID": "a b\tc"}).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "DENY", path
        assert headers["content-security-policy"].startswith("default-src 'none'"), path
        assert headers["cache-control"] == "no-store", path
        assert headers["x-request-id"] not in ("", "a b\tc"), path
        assert "server" not in headers, path
    answer = client.get(f"{API}/roots/nowhere", headers={"X-Request-ID": "trace-1"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "trace-1"


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"name": "x"', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"1" * 5_000, "application/json", 400),
        (b'"text"', "application/json", 422),
        (b'{"name": "x", "more": 1}', "application/json", 422),
        (b'{"name": "x\\u0000"}', "application/json", 422),
        (b'{"name": "\\ud800"}', "application/json", 422),
        (b'{"\\ud800": 1, "name": "x"}', "application/json", 422),
        (b'{"name": "x"}', "text/plain", 415),
        (b'{"name": "x"}', "", 415),
        (b"name=x", "application/x-www-form-urlencoded", 415),
    ],
)
def test_malformed_bodies_never_get_5xx(app: App, content: bytes, content_type: str, status: int) -> None:
    """Malformed bodies get problem documents, and never 5xx."""
    headers = bearer(app.key("admin", name=f"b{time.time_ns()}"))
    headers |= {"Content-Type": content_type} if content_type else {}
    answer = app.base.post(f"{API}/keys", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert {*answer.json()} >= {"type", "title", "status", "detail", "instance"}


def test_large_bodies_get_413(tmp_path: Path, url: str) -> None:
    """A body over the limit gets 413, with and without a Content-Length."""
    with running_app(url, tmp_path, max_body_bytes=2048) as app:
        body, headers = b'{"name": "x", "scopes": ["read"]}', {"Content-Type": "application/json"}
        client = app.client("admin")
        parts = iter([body, b" " * 1024, b" " * 1024])
        for content, status in ((body.ljust(2048), 201), (body.ljust(2049), 413), (parts, 413)):
            assert client.post(f"{API}/keys", content=content, headers=headers).status_code == status
        assert client.get(f"/healthz?{'x' * 20_000}").status_code == 400


def test_slow_responses_get_503(tmp_path: Path, url: str) -> None:
    """A response that does not begin in time gets 503; the next request is answered."""
    with running_app(url, tmp_path, request_seconds=0.3) as app:
        client = app.client("admin")
        other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        answer = client.post(f"{API}/keys", json={"name": "late"})
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert time.monotonic() - begun < 4
        assert client.get("/healthz").status_code == 200
        other.close()


# -- rate limits ---------------------------------------------------------------------------------------------


def test_requests_of_a_key_are_limited(tmp_path: Path, url: str) -> None:
    """A key has a number of requests in a window, which begins with the first; /healthz does not count."""
    with running_app(url, tmp_path, rate_limit="5 per 2seconds") as app:
        client = app.client("read", name="a")
        assert [client.get(f"{API}/roots").status_code for _ in range(6)] == [200] * 5 + [429]
        assert client.get(f"{API}/roots").headers["retry-after"] in ("1", "2")
        assert app.client("read", name="b").get(f"{API}/roots").status_code == 200
        assert [app.client().get("/healthz").status_code for _ in range(20)] == [200] * 20
        time.sleep(2)
        assert client.get(f"{API}/roots").status_code == 200


def test_refused_keys_lock_no_valid_key_out(tmp_path: Path, url: str) -> None:
    """Refused keys count by prefix and network, /64 in IPv6, and lock no valid key out, also one with the
    same prefix. Many prefixes from one address count as requests without a key."""
    limits: dict[str, Any] = {
        "rate_limit": "8/hour",
        "login_limit": "3/hour",
        "trusted_proxies": ("testclient",),
    }
    with running_app(url, tmp_path, **limits) as app:

        def status(key: str, address: str = "10.0.0.1") -> int:
            headers = bearer(key) | {"X-Forwarded-For": address}
            return app.base.get(f"{API}/roots", headers=headers).status_code

        valid = app.key("read")
        wrong = f"{valid[:13]}{'x' * 43}"
        assert [status(wrong) for _ in range(5)] == [401, 401, 401, 429, 429]
        assert status(valid) == 200
        assert [status(f"dcp_abcdefg{n}_{'x' * 43}") for n in range(6)] == [401] * 5 + [429]
        assert status(valid) == 200
        assert [status(wrong, f"2001:db8::{n}") for n in range(1, 5)] == [401, 401, 401, 429]
        assert [status(wrong, place) for place in ("2001:db8:0:1::1", "10.0.0.2")] == [401, 401]


def test_addresses_behind_a_proxy(tmp_path: Path, url: str) -> None:
    """X-Forwarded-For counts only from a trusted proxy."""
    for trusted, expected in (((), [200, 200, 429]), (("testclient",), [200, 200, 200])):
        with running_app(url, tmp_path, auth="off", rate_limit="2/hour", trusted_proxies=trusted) as app:
            headers = [{"X-Forwarded-For": f"10.0.0.{number}"} for number in (1, 2, 3)]
            assert [app.base.get(f"{API}/roots", headers=one).status_code for one in headers] == expected


# -- documentation and readiness -----------------------------------------------------------------------------


def test_openapi_is_complete() -> None:
    """OpenAPI has each operation once, with its scope and error statuses."""
    operations = [operation for path in document()["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len({*names}) == len(names)
    for operation in operations:
        statuses = {*operation["responses"]}
        assert statuses >= {"400", "401", "403", "408", "413", "415", "421", "429", "500", "503"}
        assert "x-required-scope" not in operation or operation["security"] == [{"key": []}]
    assert "HTTPValidationError" not in str(document)


def test_documentation_is_offline(app: App) -> None:
    """Documentation pages use no other host, and their policy allows only their own scripts."""
    client = app.client()
    for path in ("/docs", "/redoc"):
        page = client.get(path)
        assert page.status_code == 200
        assert "http://" not in page.text.replace("http://www.w3.org", "") and "https://" not in page.text
        policy = page.headers["content-security-policy"]
        assert "sha256-" in policy or "<script>" not in page.text
        assert "unsafe-eval" not in policy
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png"):
        assert len(client.get(f"/docs/static/{name}").content) > 1000
    for name in ("nothing.js", "..%2Fcore.py", "%2e%2e%2fcore.py"):
        assert client.get(f"/docs/static/{name}").status_code == 404


def test_readiness_depends_on_the_database(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Readiness depends on the database alone; checks of roots are shown to keys for these roots."""
    with running_app(make_database(), tmp_path) as app:
        (tmp_path / "main").rmdir()
        answer = app.client().get("/readyz")
        assert (answer.status_code, answer.json()["checks"]) == (200, {"database": "ok"})
        away = {
            "root": "main",
            "is_ok": False,
            "detail": "the folder of root main does not exist; is the disk mounted?",
        }
        other, checks = {"root": "other", "is_ok": True, "detail": None}, f"{API}/root-checks"
        assert app.client("read").get(checks).json() == {"items": [away, other]}
        assert app.client("read", roots=["other"]).get(checks).json() == {"items": [other]}
        assert app.client("write").get(checks).status_code == 403


def test_a_hanging_root_is_waited_for_once(tmp_path: Path, url: str) -> None:
    """A hanging root is waited for once; later checks and metrics answer at once, without its address."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        roots = {"main": {"url": "s3://bucket/x", "storage_options": options}}
        with running_app(url, tmp_path, auth="off", request_seconds=2.0, roots=roots) as app:
            for _ in range(2):
                begun = time.monotonic()
                (found,) = app.base.get(f"{API}/root-checks").json()["items"]
                assert (found["is_ok"], found["detail"]) == (False, "does not respond")
            assert 'dcp_root_up{root="main"} 0.0' in app.base.get("/metrics").text
            assert time.monotonic() - begun < 0.9


def test_not_ready_without_the_schema(tmp_path: Path, url: str) -> None:
    """Without migrations the service is not ready, and names `dcp db upgrade`."""
    with running_app(url, tmp_path, auth="off", migrate=False) as app:
        answer = app.base.get("/readyz")
        assert answer.status_code == 503
        assert "dcp db upgrade" in answer.json()["checks"]["database"]


def test_fixed_paths_have_only_their_own_methods(app: App) -> None:
    """A fixed path that also fits a template has only its own methods; other words there are ids."""
    client, methods = app.client("admin", name="paths"), routes(app)
    assert methods[f"{API}/checkpoints/facets"] == {"GET"} < methods[f"{API}/checkpoints/{{checkpoint_id}}"]
    for path, own in methods.items():
        if "{" in path or not path.startswith(API):
            continue
        for method in {"DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT"} - own:
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers.get("allow")) == (405, ", ".join(sorted(own))), path
            assert answer.json()["type"] == "/problems/method-not-allowed"
    assert client.post(f"{API}/checkpoints/1/tags/a/b").headers["allow"] == "DELETE, PUT"
    assert client.delete(f"{API}/checkpoints/facet").status_code == 422
    assert app.client().delete(f"{API}/checkpoints/facets").status_code == 401


def test_keys_end_at_their_expiry(tmp_path: Path, url: str) -> None:
    """A key with an expiry ends on time; its last use is recorded to the minute."""
    now = [time.time()]
    with running_app(url, tmp_path, clock=lambda: now[0]) as app:
        client = app.client("admin", name="boss")
        secret = client.post(f"{API}/keys", json={"name": "ci", "expires_in_seconds": 3600}).json()["key"]
        for seconds, status in ((0, 200), (3590, 200), (20, 401)):
            now[0] += seconds
            assert app.base.get(f"{API}/whoami", headers=bearer(secret)).status_code == status, seconds
    with running_app(url, tmp_path) as app:
        (ci,) = [one for one in app.client("admin").get(f"{API}/keys").json()["items"] if one["name"] == "ci"]
        assert ci["used_at"] > ci["created_at"]
