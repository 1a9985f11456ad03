"""Common behavior of all pages: sign-in, sessions, security headers, static files and errors."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.support.app import App, running_app
from tests.support.catalog_rows import add_checkpoint
from tests.support.page_rows import end_sessions, posted_paths
from tests.support.pages import Browser, PageText, faults_of

STATIC = Path(__file__).parents[3] / "server/core/pages/static"
API = "/api/v1"
SESSION_COOKIE = "dcphub_session"
HTML = {"accept": "text/html"}
VENDORED = {
    "d3-hierarchy-3.1.3.min.js": "971f374ce9fdbec711eb2358003e2bb755bff22ec6852dc5ebd59f987270db64",
    "d3-hierarchy.LICENSE": "2a6d2d5f32ba0b755ddbc1c833f766e30cdbe6ebe9a6d4e3e24427721f0b63d3",
    "htmx-2.0.11.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "htmx-ext-sse-2.2.4.min.js": "98a46496de0c3605fbffdce9167ba427bdd9553184f83f149c261891a92c0136",
    "htmx-ext-sse.LICENSE": "a17d224ce9afdc21ec9491b76a2f5d036d19aa641ac4f85ca29c21f9f7e54fdf",
    "htmx.LICENSE": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files as released by their authors on npm."""


def test_vendored_files_equal_the_released_files() -> None:
    """Vendored files equal the released files, each with a licence; an additional file is noticed."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()
    }
    assert found == VENDORED
    for name in found:
        package = re.split(r"-\d|\.LICENSE", name)[0]
        assert f"{package}.LICENSE" in found


def test_static_files_are_cached_forever(keyed: App) -> None:
    """Static files are cached forever by a URL with their digest, and need no key."""
    browser = Browser(keyed.client())
    page = browser.page("/sign-in")
    files = [given.get("src") or given["href"] for name, given in page.elements if name in ("script", "link")]
    assert len(files) >= 4
    for path in files:
        answer = browser.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert hashlib.sha256(answer.content).hexdigest()[:16] == path.split("/")[2]
    name = files[-1].split("/", 3)[3]
    assert browser.get(f"/static/0000000000000000/{name}").headers["cache-control"] == "no-cache"
    for path in ("0/vendor/htmx.LICENSE", "0/../keyed.py", "0/%2e%2e/keyed.py", "0/nothing.js"):
        assert browser.get(f"/static/{path}").status_code == 404


def test_the_root_is_a_page_for_browsers_alone(app: App) -> None:
    """Only clients that accept HTML get a page at /; others get JSON."""
    client = app.client()
    for accept in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        assert client.get("/", headers=accept).json()["service"] == "dcphub"
    assert "<h1>Runs</h1>" in client.get("/", headers=HTML).text


@pytest.mark.parametrize("path", ["/", "/roots", "/jobs", "/jobs/1", "/nowhere", "/sign-in"])
def test_every_page_is_guarded(app: App, keyed: App, path: str) -> None:
    """Pages and error pages have no inline or foreign content, and the headers that forbid both."""
    for client in (app.client(), keyed.client()):
        answer = client.get(path, headers=HTML)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert faults_of(PageText(answer.text)) == []
        directives = answer.headers["content-security-policy"].split(";")
        policy = dict(part.strip().split(" ", 1) for part in directives)
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self'",
            "connect-src": "'self'",
            "form-action": "'self'",
            "frame-ancestors": "'none'",
            "base-uri": "'none'",
        }
        assert answer.headers["cache-control"] == "private, no-cache"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_pages_need_a_sign_in(keyed: App) -> None:
    """Without a session a page leads to the form and back; a request of htmx redirects the whole page."""
    client = keyed.client()
    answer = client.get("/jobs?state=failed", headers=HTML, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in?next=%2Fjobs%3Fstate%3Dfailed")
    part = client.get("/jobs", headers=HTML | {"hx-request": "true"}, follow_redirects=False)
    assert (part.status_code, part.headers["hx-redirect"]) == (401, "/sign-in?next=%2Fjobs")
    assert client.get("/jobs").status_code == 401
    assert client.get("/jobs").headers["content-type"] == "application/problem+json"


def test_signing_in_and_out(keyed: App) -> None:
    """The session cookie is HttpOnly and SameSite, does not contain the key, and ends on signing out."""
    browser = Browser(keyed.client())
    key = keyed.key("read")
    answer = browser.sign_in(key, "/jobs?state=failed")
    assert str(answer.url) == "http://localhost/jobs?state=failed"
    (cookie,) = [line for line in answer.history[0].headers.get_list("set-cookie") if SESSION_COOKIE in line]
    assert {"HttpOnly", "Path=/", "SameSite=lax", "Max-Age=43200"} <= set(cookie.split("; "))
    assert "Secure" not in cookie  # a browser would refuse it over plain HTTP
    assert key not in cookie
    token = browser.client.cookies[SESSION_COOKIE]
    assert browser.get(f"{API}/runs").status_code == 200
    assert browser.submit(browser.page("/").form("/sign-out")).url.path == "/sign-in"
    assert SESSION_COOKIE not in browser.client.cookies
    browser.client.cookies.set(SESSION_COOKIE, token)
    assert browser.get(f"{API}/runs").status_code == 401


def test_cookies_set_over_https_are_secure(keyed: App) -> None:
    """Cookies set over HTTPS are sent over HTTPS only."""
    client = keyed.client()
    answer = client.get("https://localhost/sign-in", headers=HTML)
    assert all("Secure" in line for line in answer.headers.get_list("set-cookie"))


def test_a_session_ends_with_its_key_and_its_time(keyed: App) -> None:
    """A session ends at once when its key is revoked, and at its expiry."""
    for end in ("revoked", "over"):
        browser = Browser(keyed.client())
        browser.sign_in(keyed.key("read", name=end))
        assert browser.get(f"{API}/runs").status_code == 200
        if end == "revoked":
            assert keyed.client("admin").delete(f"{API}/keys/1").is_success
        else:
            end_sessions(keyed)
        assert browser.get(f"{API}/runs").status_code == 401
        assert browser.get("/jobs").url.path == "/sign-in"


def test_sessions_may_only_get_in_the_api(keyed: App) -> None:
    """In the API a session may only GET, and not from pages of other sites, whatever its key may."""
    browser = Browser(keyed.client())
    browser.sign_in(keyed.key("admin"))
    assert (
        browser.client.post(f"{API}/jobs", json={"kind": "scan", "params": {"root": "main"}}).status_code
        == 401
    )
    assert browser.client.delete(f"{API}/keys/1").status_code == 401
    for site in ("cross-site", "same-site"):
        assert browser.get(f"{API}/runs", headers={"sec-fetch-site": site}).status_code == 401


def test_refused_keys_are_counted(tmp_path: Path) -> None:
    """Refused keys on the form count as in the API; the page shows the reason."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, login_limit="2/hour") as keyed:
        browser = Browser(keyed.client())
        for _ in range(2):
            answer = browser.sign_in(f"dcp_abcdefgh_{'x' * 43}")
            assert answer.status_code == 403
            assert "unknown, has been revoked or has expired" in PageText(answer.text).text
        assert browser.sign_in(f"dcp_abcdefgh_{'x' * 43}").status_code == 429
        assert browser.sign_in(keyed.key("read")).status_code == 200


@pytest.mark.parametrize(
    "address",
    [
        "/?root=<x",
        "/checkpoints?sort=foo",
        "/checkpoints?dtype=<x",
        "/checkpoints?root=<x",
        "/checkpoints?run=a%7F",
        f"/checkpoints?name_contains={'x' * 300}",
        "/runs/{run}?sort=foo",
        "/runs/{run}?dtype=<x",
        f"/runs/{{run}}?tensor={'x' * 300}",
        "/search?q=a%7F",
    ],
)
def test_invalid_parameters_of_urls_get_422(app: App, address: str) -> None:
    """An invalid parameter in the URL of a page gets 422 with its name."""
    add_checkpoint(app.service.database, "run/step-1")
    browser = app.client()
    answer = browser.get(address.format(run=1), headers={"Accept": "text/html"})
    assert answer.status_code == 422
    name = address.partition("?")[2].partition("=")[0]
    assert f"query.{name}" in PageText(answer.text).text


@pytest.mark.parametrize(
    "next",
    [
        "http://[",
        "//evil.example/",
        "https://evil.example/",
        "/\\evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "",
    ],
)
def test_signing_in_redirects_to_no_other_site(keyed: App, next: str) -> None:
    """Signing in does not redirect to other sites."""
    browser = Browser(keyed.client())
    answer = browser.sign_in(keyed.key("read"), next)
    assert (answer.url.host, answer.url.path) == ("localhost", "/")


def test_every_form_needs_its_token(keyed: App) -> None:
    """Each form needs the token of its browser."""
    browser, other = Browser(keyed.client()), Browser(keyed.client())
    browser.sign_in(keyed.key("admin"))
    token = other.page("/sign-in").form("/sign-in").fields["token"]
    paths = posted_paths(keyed)
    assert {"/sign-in", "/sign-out", "/theme", "/jobs/{job_id}/cancel", "/roots/{root}/scan"} <= paths
    for path in paths:
        for fields in ({}, {"token": token}, {"token": "é"}):
            place = re.sub(r"\{root\}", "main", re.sub(r"\{\w+_id\}", "1", path))
            answer = browser.client.post(place, data={"x": "1", **fields})
            assert answer.status_code == 403, path
            assert "reload the page" in PageText(answer.text).text


def test_forms_of_other_sites(app: App, browser: Browser) -> None:
    """Forms from other sites are refused first, also without sign-in."""
    form = browser.page("/roots").form("/roots/main/scan")
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        browser.client.headers.update(headers)
        assert browser.submit(form).status_code == 403
        browser.client.headers = Browser(app.client()).client.headers
    assert browser.submit(form).url.path == "/jobs/1"


@pytest.mark.parametrize("body", [b"\xff", b"a=%ff", b"&".join(b"a=1" for _ in range(300))])
def test_malformed_forms_are_refused(app: App, body: bytes) -> None:
    """Malformed forms get 400 or 415."""
    client = app.client()
    form = {"content-type": "application/x-www-form-urlencoded", **HTML}
    assert client.post("/theme", content=body, headers=form).status_code == 400
    assert client.post("/theme", content=body, headers={"content-type": "text/plain"}).status_code == 415
    assert client.post(f"{API}/jobs", content=b"a=1", headers=form).status_code == 415


def test_the_color_scheme_is_kept(app: App, browser: Browser) -> None:
    """The color scheme is kept in a cookie, without scripts; an invalid cookie is ignored."""
    assert '<html lang="en" data-theme="system">' in browser.get("/jobs?state=failed").text
    for expected in ("light", "dark", "system"):
        form = browser.page("/jobs?state=failed").form("/theme")
        (button,) = [given for name, given in browser.page("/").elements if given.get("name") == "theme"]
        answer = browser.submit(form, theme=button["value"])
        assert str(answer.url) == "http://localhost/jobs?state=failed"
        assert f'data-theme="{expected}"' in answer.text
    browser.client.cookies.set("dcphub_theme", '"><script>')
    assert 'data-theme="system"' in browser.get("/").text


def test_empty_fields_are_removed_from_urls(app: App) -> None:
    """Empty fields of a form without scripts are removed from the URL."""
    answer = app.client().get("/jobs?state=&kind=scan&scans=", headers=HTML)
    assert str(answer.url) == "http://localhost/jobs?kind=scan"


def test_errors_are_pages(app: App, tmp_path: Path) -> None:
    """Browsers get 404, 422 and 503 as pages with the request id; other clients get problem documents."""
    client = app.client()
    missing = client.get("/jobs/7", headers=HTML)
    assert missing.status_code == 404
    assert missing.headers["x-request-id"] in missing.text
    assert client.get("/jobs?state=nonsense", headers=HTML).status_code == 422
    assert client.get("/jobs/7").headers["content-type"] == "application/problem+json"
    app.service.database.close()
    for path in tmp_path.glob("catalog*"):
        path.unlink()
    away = client.get("/jobs", headers=HTML)
    assert away.status_code == 503
    assert 'http-equiv="refresh"' in away.text
