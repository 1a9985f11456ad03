"""Tests of what every request goes through. Internal: routes and roots made for the test.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.testclient import TestClient
from pydantic import SecretStr

from dcp.server.app import API, create_app
from dcp.server.database.engine import Database
from dcp.server.http.access import access_of, check_routes, walk_routes
from dcp.server.http.dependencies import Public, Requires, public, requires
from dcp.server.http.paths import Paths
from dcp.server.problems import NotFoundError
from dcp.server.roots import StorageRoot
from dcp.server.security import keys
from dcp.server.settings import Settings
from tests.support.app import App, running_app
from tests.support.asgi_server import served
from tests.support.databases import MakeDatabase

PUBLIC_PATHS = {
    "/",
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/docs/static/{name}",
    "/sign-in",
    "/sign-out",
    "/static/{digest}/{name:path}",
    "/theme",
}


@pytest.fixture
def sqlite_app(tmp_path: Path) -> Iterator[App]:
    """The application on SQLite: what is tested here does not differ between the databases."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as app:
        yield app


def test_every_route_says_who_may_use_it(sqlite_app: App) -> None:
    """Below the API each has a scope; what is public is a short list; the names are unique."""
    check_routes(sqlite_app.app)
    found = {route.path: access_of(route) for route in walk_routes(sqlite_app.app)}
    assert {path for path, access in found.items() if isinstance(access, Public)} == PUBLIC_PATHS
    below = {path: access for path, access in found.items() if str(path).startswith(API)}
    assert below
    assert all(isinstance(access, Requires) for access in below.values())


def test_routes_are_looked_through_once_and_pages_last(sqlite_app: App) -> None:
    """Every request goes through them in order: what machines ask comes before the many pages."""
    routes = sqlite_app.app.router.routes
    assert all(isinstance(route, APIRoute) for route in routes)  # none in another router
    paths = [route.path for route in routes if isinstance(route, APIRoute)]
    below = [number for number, path in enumerate(paths) if path.startswith(API)]
    pages = [number for number, path in enumerate(paths) if path.startswith(("/jobs", "/runs", "/static"))]
    assert paths.index("/healthz") < below[0] <= below[-1] < pages[0]


def test_a_route_without_scope_is_refused(tmp_path: Path) -> None:
    """Neither one that says nothing, nor one that says two things, nor one of another's name passes."""
    for dependencies in ([], [public, requires("read")]):
        app = create_app(Settings(database_url=SecretStr(f"sqlite:///{tmp_path / 'a.sqlite'}")))
        router = APIRouter()
        router.add_api_route("/somewhere", lambda: None, name="somewhere", dependencies=dependencies)
        app.include_router(router)
        with pytest.raises(ValueError, match="/somewhere"):
            check_routes(app)
    app = create_app(Settings(database_url=SecretStr(f"sqlite:///{tmp_path / 'a.sqlite'}")))
    app.add_api_route("/again", lambda: None, name="get_health", dependencies=[public])
    with pytest.raises(ValueError, match="get_health"):
        check_routes(app)


def test_nobody_without_a_key(sqlite_app: App) -> None:
    """Every route of the API, and every path that is none, answers 401 without a key and with a wrong one."""
    client = sqlite_app.client()
    wrong = {"Authorization": f"Bearer dcp_abcdefgh_{'x' * 43}"}
    sqlite_app.service.rates._refused.amount = 10_000
    for route in walk_routes(sqlite_app.app):
        path = str(route.path).replace("{", "").replace("}", "")
        if not path.startswith(API):
            continue
        for method in getattr(route, "methods", None) or ():
            for headers in ({}, wrong):
                answer = client.request(method, path, headers=headers, json={})
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == 'Bearer realm="dcp"'
    assert client.get(f"{API}/no/such/thing").status_code == 401


@pytest.mark.parametrize("value", ["Basic YTpi", "Bearer", "bearer  ", "dcp_x", "Bearer a, Bearer b"])
def test_authorization_of_another_kind(sqlite_app: App, value: str) -> None:
    """What is no bearer key is refused, wherever it is sent."""
    assert sqlite_app.client().get("/healthz", headers={"Authorization": value}).status_code == 401


def test_scopes(sqlite_app: App) -> None:
    """A key does what its scopes say; admin implies the others; one for some roots does not administrate."""
    assert sqlite_app.client("read").get(f"{API}/roots").status_code == 200
    refused = sqlite_app.client("write").get(f"{API}/roots")
    assert (refused.status_code, refused.json()["scope"]) == (403, "read")
    assert sqlite_app.client("admin").get(f"{API}/roots").status_code == 200
    assert sqlite_app.client("read", name="reader").get(f"{API}/keys").status_code == 403
    assert sqlite_app.client("admin", roots=["main"]).get(f"{API}/keys").status_code == 403


@pytest.mark.parametrize("twice", [{"scopes": ["read", "read"]}, {"roots": ["main", "main"]}])
def test_a_key_names_each_scope_and_root_once(sqlite_app: App, twice: dict[str, list[str]]) -> None:
    """As the documentation of the API says."""
    made = sqlite_app.client("admin", name="root").post(f"{API}/keys", json={"name": "twice"} | twice)
    assert made.status_code == 422
    assert "there twice" in made.json()["detail"]


def test_a_key_for_some_roots_sees_no_others(sqlite_app: App) -> None:
    """Not in the list, not by name; a root that there is not looks the same."""
    client = sqlite_app.client("read", roots=["main"])
    assert [root["name"] for root in client.get(f"{API}/roots").json()["items"]] == ["main"]
    hidden, missing = client.get(f"{API}/roots/other"), client.get(f"{API}/roots/nowhere")
    assert hidden.status_code == missing.status_code == 404
    assert hidden.json()["detail"].replace("other", "nowhere") == missing.json()["detail"]


def test_hosts(sqlite_app: App) -> None:
    """Only by the names of the settings, with or without a port, of which there is exactly one."""
    client = sqlite_app.client()
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1:8470", "[::1]:8470"):
        assert client.get("/healthz", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "", "127.0.0.2", "[::2]"):
        answer = client.get("/healthz", headers={"Host": host})
        assert answer.status_code == 421, host
        assert answer.headers["content-type"] == "application/problem+json"
    for host in ("x@evil.example", "127.0.0.1:80@evil.example", "localhost:x", "localhost/", "[::1]x"):
        assert client.get("/healthz", headers={"Host": host}).status_code == 400, host


def test_a_parameter_that_is_no_list_is_given_once(sqlite_app: App) -> None:
    """Two limits are refused, by name, on every way that parameters are declared; lists may be repeated."""
    client = sqlite_app.client("read")
    for path, name in (("jobs", "limit"), ("checkpoints", "limit"), ("runs", "cursor"), ("jobs", "root")):
        answer = client.get(f"{API}/{path}?{name}=5&{name}=5")
        assert answer.status_code == 422, path
        assert answer.json()["errors"][0]["location"] == ["query", name]
    assert client.get(f"{API}/jobs?state=queued&state=running").status_code == 200
    assert client.get(f"{API}/checkpoints?format=dcp&format=torch_dcp").status_code == 200
    download = client.get(f"{API}/checkpoints/1/download?only=a.*&only=b.*&format=torch&format=torch")
    assert download.json()["errors"][0]["location"] == ["query", "format"]


def test_two_lengths_of_one_body(sqlite_app: App) -> None:
    """A request that is chunked and has a Content-Length is refused, and its connection closed."""
    with served(sqlite_app.app) as port, socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {sqlite_app.key('read')}\r\n".encode()
            + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"exclude each other" in answer


def test_large_bodies_hold_up_nobody(sqlite_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are parsed others are answered; one key has two at a time, and others have their own."""
    begun, go_on, real = threading.Semaphore(0), threading.Event(), json.loads

    def slow(text: Any, **options: Any) -> Any:
        if len(text) > 1 << 18:
            begun.release()
            assert go_on.wait(60)
        return real(text, **options)

    monkeypatch.setattr("starlette.requests.json.loads", slow)
    one, other = (
        {"Authorization": f"Bearer {sqlite_app.key('read', name=name)}"} for name in ("one", "other")
    )
    statuses: list[int] = []
    with (
        served(sqlite_app.app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
    ):

        def post(headers: dict[str, str]) -> httpx.Response:
            return http.post(f"{API}/jobs", json={"kind": "x" * (1 << 18)}, headers=headers)

        threads = [
            threading.Thread(target=lambda headers=headers: statuses.append(post(headers).status_code))
            for headers in (one, one, other)
        ]
        try:
            for thread in threads:
                thread.start()
                assert begun.acquire(timeout=10)
            assert http.get("/healthz").status_code == 200
            refused = post(one)
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        finally:
            go_on.set()
            for thread in threads:
                thread.join()
        assert statuses == [422] * 3
        assert post(one).status_code == 422


def test_pages_of_other_sites_read_nothing_without_keys(tmp_path: Path) -> None:
    """An image on another site's page has no download made; links lead to pages, and other clients ask."""
    url = f"{API}/checkpoints/1/download"
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, auth="off") as app:
        client = app.client()
        for site in ("cross-site", "same-site"):
            image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
            link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
            frame = link | {"Sec-Fetch-Dest": "iframe"}
            assert client.get(url, headers=image).status_code == 403
            assert client.get(url, headers=link).status_code == 403
            assert client.get("/docs", headers=frame).status_code == 403
            assert client.get("/docs", headers=link).status_code == 200
        for own in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
            assert client.get(url, headers=own).status_code == 404


def test_pages_of_other_sites(sqlite_app: App) -> None:
    """A browser that comes from elsewhere changes nothing; CORS allows nothing."""
    client = sqlite_app.client("admin")
    own, other = {"Origin": "http://localhost"}, {"Origin": "http://evil.example"}
    body = {"name": "new"}
    assert client.post(f"{API}/keys", json=body, headers=other).status_code == 403
    for origin in ("null", "http://["):
        assert client.post(f"{API}/keys", json=body, headers={"Origin": origin}).status_code == 403
    assert client.post(f"{API}/keys", json=body, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.post(f"{API}/keys", json=body, headers=own).status_code == 201
    preflight = client.options(f"{API}/keys", headers={**other, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in client.get(f"{API}/roots", headers=other).headers


def test_headers_of_every_answer(sqlite_app: App) -> None:
    """Fine answers, errors and pages have the same guards; nothing of the API is kept in caches."""
    client = sqlite_app.client("admin")
    for path in ("/healthz", f"{API}/roots", f"{API}/nowhere", "/docs", "/metrics"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "DENY", path
        assert headers["content-security-policy"].startswith("default-src 'none'"), path
        assert headers["cache-control"] == "no-store", path
        assert headers["x-request-id"], path
        assert "server" not in headers, path


def test_request_ids(sqlite_app: App) -> None:
    """The caller's goes on if it is a tame one; errors name it."""
    client = sqlite_app.client("read")
    answer = client.get(f"{API}/roots/nowhere", headers={"X-Request-ID": "trace-1"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "trace-1"
    answer = client.get("/healthz", headers={"X-Request-ID": "a b\tc"})
    assert answer.headers["x-request-id"] != "a b\tc"


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
def test_bodies_that_are_none(sqlite_app: App, content: bytes, content_type: str, status: int) -> None:
    """Each is refused with a problem document, none is an error of the service."""
    client = sqlite_app.client("admin")
    headers = {"Content-Type": content_type} if content_type else {}
    answer = client.post(f"{API}/keys", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(answer.json()) >= {"type", "title", "status", "detail", "instance"}


def test_large_bodies(tmp_path: Path) -> None:
    """One byte too many is 413, whether the length is told beforehand or not."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, max_body_bytes=2048) as app:
        client = app.client("admin")
        body = b'{"name": "x", "scopes": ["read"]}'
        assert client.post(f"{API}/keys", content=body.ljust(2048)).status_code == 415
        headers = {"Content-Type": "application/json"}
        assert client.post(f"{API}/keys", content=body.ljust(2048), headers=headers).status_code == 201
        assert client.post(f"{API}/keys", content=body.ljust(2049), headers=headers).status_code == 413
        parts = iter([body, b" " * 1024, b" " * 1024])
        assert client.post(f"{API}/keys", content=parts, headers=headers).status_code == 413
        assert client.get(f"/healthz?{'x' * 20_000}").status_code == 400


def test_slow_routes_are_given_up(tmp_path: Path) -> None:
    """An answer that does not begin in time is 503, while the next request is answered as ever."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    answered = threading.Event()
    with running_app(url, tmp_path, request_seconds=0.2) as app:
        app.app.add_api_route("/slow", lambda: answered.wait(60), name="slow", dependencies=[public])
        answer = app.client().get("/slow")
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert app.client().get("/healthz").status_code == 200
        answered.set()


def test_unexpected_errors(sqlite_app: App, caplog: pytest.LogCaptureFixture) -> None:
    """What nobody caught is a 500 that tells nothing of itself; the log has the cause."""

    def fail() -> None:
        raise RuntimeError("secret cause")

    sqlite_app.app.add_api_route("/fail", fail, name="fail", dependencies=[public])
    answer = sqlite_app.client().get("/fail")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_rates(tmp_path: Path) -> None:
    """So many requests of a key, so many refused keys of an address; health is not counted."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, rate_limit="5/hour", login_limit="3/hour") as app:
        client = app.client("read", name="a")
        assert [client.get(f"{API}/roots").status_code for _ in range(6)] == [200] * 5 + [429]
        refused = client.get(f"{API}/roots")
        assert 3500 <= int(refused.headers["retry-after"]) <= 3600
        assert app.client("read", name="b").get(f"{API}/roots").status_code == 200
        assert [app.client().get("/healthz").status_code for _ in range(20)] == [200] * 20


def test_a_wrong_key_locks_nobody_out(tmp_path: Path) -> None:
    """Refused keys are counted by prefix and address: others of the same address pass, be it with a key of
    the same prefix; whoever tries many prefixes is stopped as one who asks without a key."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"

    def status(app: App, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return app.client().get(f"{API}/roots", headers=headers).status_code

    with running_app(url, tmp_path, rate_limit="8/hour", login_limit="3/hour") as app:
        valid = app.key("read")
        wrong = f"{valid[:13]}{'x' * 43}"
        assert [status(app, wrong) for _ in range(5)] == [401, 401, 401, 429, 429]
        assert status(app, valid) == 200
        assert [status(app, f"dcp_abcdefg{n}_{'x' * 43}") for n in range(6)] == [401] * 5 + [429]
        assert status(app, valid) == 200


def test_addresses_behind_a_proxy(tmp_path: Path) -> None:
    """Only a trusted proxy says for whom it asks."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    settings = {"auth": "off", "rate_limit": "2/hour"}

    def statuses(app: App) -> list[int]:
        paths = [f"10.0.0.{number}" for number in (1, 2, 3)]
        return [
            app.base.get(f"{API}/roots", headers={"X-Forwarded-For": address}).status_code
            for address in paths
        ]

    with running_app(url, tmp_path, **settings) as app:
        assert statuses(app) == [200, 200, 429]
    with running_app(url, tmp_path, **settings, trusted_proxies=("testclient",)) as app:
        assert statuses(app) == [200, 200, 200]


def test_the_description_is_complete(sqlite_app: App) -> None:
    """OpenAPI names each operation as its function, with the scope it needs and how it can fail."""
    document = sqlite_app.client().get("/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for operation in operations:
        assert {"400", "401", "403", "408", "413", "415", "421", "429", "500", "503"} <= set(
            operation["responses"]
        )
        if "x-required-scope" in operation:
            assert {"401", "403"} <= set(operation["responses"])
            assert operation["security"] == [{"key": []}]
    assert "HTTPValidationError" not in str(document)


def test_documentation_is_offline(sqlite_app: App) -> None:
    """The pages name no other host, their scripts are ours, and the policy lets no other one run."""
    client = sqlite_app.client()
    for path in ("/docs", "/redoc"):
        page = client.get(path)
        assert page.status_code == 200
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert "https://" not in page.text
        assert "sha256-" in page.headers["content-security-policy"] or "<script>" not in page.text
        assert "unsafe-eval" not in page.headers["content-security-policy"]
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png"):
        assert len(client.get(f"/docs/static/{name}").content) > 1000
    for name in ("nothing.js", "..%2Fcore.py", "%2e%2e%2fcore.py"):
        assert client.get(f"/docs/static/{name}").status_code == 404


@pytest.mark.exhaustive  # a whole service has no torch: test_serving.py
def test_no_torch(tmp_path: Path) -> None:
    """A process that has made the application and its description has not imported torch."""
    program = (
        "import sys; from dcp.server.app import create_app; from dcp.server.settings import Settings\n"
        f"create_app(Settings(database_url='sqlite:///{tmp_path / 'a.sqlite'}')).openapi()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_ready(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Ready with the database, whatever roots do; a key sees the checks of its roots."""
    with running_app(make_database(), tmp_path) as app:
        (tmp_path / "main").rmdir()
        answer = app.client().get("/readyz")
        assert (answer.status_code, answer.json()["checks"]) == (200, {"database": "ok"})
        away = {"root": "main", "is_ok": False, "detail": "the folder of root main is not there"}
        other = {"root": "other", "is_ok": True, "detail": None}
        checks = f"{API}/root-checks"
        assert app.client("read").get(checks).json() == {"items": [away, other]}
        assert app.client("read", roots=["other"]).get(checks).json() == {"items": [other]}
        assert app.client("write").get(checks).status_code == 403


def test_a_root_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks later is answered at once, metrics as well, until it answers again."""
    go_on = threading.Event()
    real = StorageRoot.is_empty

    def hang(root: StorageRoot) -> bool:
        if root.name == "main":
            go_on.wait(60)
        return real(root)

    monkeypatch.setattr(StorageRoot, "is_empty", hang)
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, auth="off", request_seconds=2.0) as app:
        try:
            for _ in range(2):
                begun = time.monotonic()
                found = app.base.get(f"{API}/root-checks").json()["items"][0]
                assert (found["is_ok"], found["detail"]) == (False, "does not answer")
            assert 'dcp_root_up{root="main"} 0.0' in app.base.get("/metrics").text
            assert time.monotonic() - begun < 0.9
        finally:
            go_on.set()
        give_up = time.monotonic() + 60
        while not app.base.get(f"{API}/root-checks").json()["items"][0]["is_ok"]:
            assert time.monotonic() < give_up
            time.sleep(0.05)


def test_not_ready_without_the_schema(tmp_path: Path) -> None:
    """Without migrations an empty database is told of, and `dcp db upgrade` named."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, auth="off", migrate=False) as app:
        answer = app.base.get("/readyz")
        assert answer.status_code == 503
        assert "dcp db upgrade" in answer.json()["checks"]["database"]


def test_a_root_that_cannot_be_used(tmp_path: Path) -> None:
    """A root that is no folder is not well; it is well again once that is put right."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    roots = {"main": {"url": str(tmp_path / "file")}}
    (tmp_path / "file").write_text("no folder")
    with running_app(url, tmp_path, auth="off", roots=roots) as app:
        assert not app.base.get(f"{API}/root-checks").json()["items"][0]["is_ok"]
        (tmp_path / "file").unlink()
        (tmp_path / "file").mkdir()
        give_up = time.monotonic() + 60
        while not app.base.get(f"{API}/root-checks").json()["items"][0]["is_ok"]:
            assert time.monotonic() < give_up
            time.sleep(0.1)


def test_the_client_is_not_needed(sqlite_app: App) -> None:
    """The fixture's own client has no key: it is nobody."""
    assert isinstance(sqlite_app.base, TestClient)
    assert sqlite_app.base.get(f"{API}/roots").status_code == 401


def test_methods_that_there_are_not(sqlite_app: App) -> None:
    """405 names all methods of the path, also where they are routes of their own."""
    client = sqlite_app.client("admin")
    answer = client.put(f"{API}/checkpoints")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    answer = client.post(f"{API}/checkpoints/1/tags/a/b")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, PUT")


def test_a_path_that_is_spelled_out_has_its_own_methods_alone(sqlite_app: App) -> None:
    """Of paths that other templates fit as well: what is no method of theirs is 405, and never an id that is
    wrong; what is no path of its own stays an id."""
    client = sqlite_app.client("admin")
    methods: dict[str, set[str]] = {}
    for route in walk_routes(sqlite_app.app):
        methods.setdefault(str(route.path), set()).update(route.methods or ())
    assert methods[f"{API}/checkpoints/facets"] == {"GET"} < methods[f"{API}/checkpoints/{{checkpoint_id}}"]
    for path, own in methods.items():
        if "{" in path or not path.startswith(API):
            continue
        for method in {"DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT"} - own:
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers.get("allow")) == (405, ", ".join(sorted(own))), path
            assert answer.json()["type"] == "/problems/method-not-allowed"
    assert client.delete(f"{API}/checkpoints/facet").status_code == 422
    assert sqlite_app.client().delete(f"{API}/checkpoints/facets").status_code == 401


def test_of_two_templates_counts_the_one_that_spells_more() -> None:
    """Also with parameters in both, whichever comes first; where neither spells more, both count."""
    made = [("/a/{b}/{c}", ["GET", "PUT"]), ("/a/{x}/words", ["GET"]), ("/{y}/b/words", ["POST"])]
    router = APIRouter()
    for n, (path, methods) in enumerate(made):
        router.add_api_route(path, lambda: None, methods=methods, name=str(n))
    paths = Paths(iter_route_contexts(router.routes))
    assert paths.methods("/a/1/2") == {"GET", "PUT"}
    assert paths.methods("/a/1/words") == {"GET"}
    assert paths.methods("/a/b/words") == {"GET", "POST"}
    assert paths.methods("/nothing") == set()
    assert paths.is_refused("PUT", "/a/1/words")
    assert not paths.is_refused("GET", "/a/1/words")
    assert not paths.is_refused("PUT", "/a/1/2")


NOW = 1_700_000_000.0


def _make(database: Database, name: str = "ci", **given: object) -> tuple[keys.KeyRecord, str]:
    values = {"scopes": ["read"], "roots": None, "expires_seconds": None, "now_seconds": NOW, **given}
    with database.write() as connection:
        return keys.create_key(connection, name=name, **values)  # type: ignore[arg-type]


def test_keys_end(database: Database) -> None:
    """At their time, or when they are revoked; revoking again changes nothing."""
    record, secret = _make(database, expires_seconds=NOW + 10)
    with database.write() as connection:
        assert keys.find_key(connection, secret, NOW + 9.9) is not None
        assert keys.find_key(connection, secret, NOW + 10) is None
        assert keys.revoke_key(connection, record.id, NOW + 5).revoked_seconds == NOW + 5
        assert keys.find_key(connection, secret, NOW + 6) is None
        assert keys.revoke_key(connection, record.id, NOW + 7).revoked_seconds == NOW + 5
        with pytest.raises(NotFoundError):
            keys.revoke_key(connection, record.id + 1, NOW)


def test_when_a_key_was_used(database: Database) -> None:
    """It is written by `flush`, and not more often than once a minute."""
    now = [NOW]
    ring = keys.KeyRing(database, lambda: now[0])
    record, secret = _make(database)

    def used() -> float | None:
        ring.flush()
        with database.read() as connection:
            found = keys.get_key(connection, record.id)
        assert found is not None
        return found.used_seconds

    assert used() is None
    ring.find(secret)
    assert used() == NOW
    now[0] += 59
    ring.find(secret)
    assert used() == NOW
    now[0] += 2
    ring.find(secret)
    assert used() == NOW + 61
