"""People: sign-in with OpenID Connect, roles for roots, accounts, keys and admins of single roots."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import oidc_provider_mock
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

import dcp
from tests.support.app import App, running_app
from tests.support.catalog import API, Catalog
from tests.support.pages import Browser, PageText
from tests.support.provider import CLIENT, SECRET, Provider

ROLES = {
    "vision": {"main": "contributor"},
    "vision-admins": {"main": "admin"},
    "all-readers": {"*": "viewer"},
}
ALICE = {
    "sub": "a1",
    "email": "Alice@example.org",
    "email_verified": True,
    "name": "Alice A",
    "groups": ["vision"],
}


@pytest.fixture
def provider() -> Iterator[Provider]:
    """Start a provider on loopback, with Alice signed in."""
    later[0] = 0.0
    with Provider() as made:
        made.person = dict(ALICE)
        yield made


@contextmanager
def site(url: str, folder: Path, issuer: str, **people: Any) -> Iterator[Catalog]:
    """Start the service with this provider, and return its catalog."""
    with served(url, folder, issuer, **people) as app:
        yield Catalog(app, folder)


def served(url: str, folder: Path, issuer: str, **people: Any) -> AbstractContextManager[App]:
    """Start a process of the service."""
    given = {"issuer": issuer, "client_id": CLIENT, "client_secret": SECRET, "roles": ROLES, **people}
    return running_app(url, folder, features={"people": given}, clock=lambda: time.time() + later[0])


later = [0.0]
"""Seconds by which the clock of the service is ahead."""


@pytest.fixture
def catalog(tmp_path: Path, provider: Provider) -> Iterator[Catalog]:
    """Start the service on SQLite, with a checkpoint in "main" and one in "other"."""
    with site(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, provider.url) as made:
        made.add("run/step-1")
        made.add("run/step-2", "other")
        yield made


def sign_in(browser: Browser, start: str = "/sign-in/provider", **change: str) -> Any:
    """Sign in at the provider, and return with its parameters, overridden by ``change``."""
    client = browser.client
    begun = client.get(start, follow_redirects=False)
    assert begun.status_code == 303, begun.text
    back = urlsplit(httpx.get(begun.headers["location"]).headers["location"])
    query = {name: values[0] for name, values in parse_qs(back.query).items()} | change
    return client.get(back.path, params=query, follow_redirects=False)


def person(app: App) -> Browser:
    """Return a browser in which the provider's person is signed in."""
    browser = Browser(app.client())
    assert sign_in(browser).status_code == 303
    return browser


def own_key(browser: Browser, name: str = "laptop", **fields: Any) -> str:
    """Create a key of the person on the account page, and return the secret."""
    form = browser.page("/account").form("/account/keys")
    answer = browser.client.post("/account/keys", data={**form.fields, "name": name, **fields})
    assert answer.status_code == 201, answer.text
    page = PageText(answer.text)
    return next(text for text in page.texts if text.startswith("dcp_") and len(text) > 50)


def with_key(app: App, key: str) -> Any:
    """Return a client with this key."""
    client = app.client()
    client.headers["authorization"] = f"Bearer {key}"
    return client


def grant(catalog: Catalog, role: str, root: str | None, client: Any = None, **grantee: Any) -> Any:
    """Grant a role."""
    body = {"role": role, "root": root, **grantee}
    return (client or catalog.http).post(f"{API}/grants", json=body)


def account_of(catalog: Catalog, name: str) -> Any:
    """Return the account with this name."""
    return next(one for one in catalog.get("/accounts")["items"] if one["name"] == name)


def seen(catalog: Catalog, client: Any) -> set[str]:
    """Return the keys of the checkpoints that a client lists."""
    return {one["key"] for one in catalog.get("/checkpoints", client)["items"]}


def test_sign_in_at_another_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With oidc-provider-mock a person signs in from the page, arrives at the next page, and signs out."""
    monkeypatch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with oidc_provider_mock.run_server_in_thread() as server:
        issuer = f"http://localhost:{server.server_port}"
        httpx.put(
            f"{issuer}/users/bob", json={"email": "bob@x.org", "email_verified": True, "groups": ["vision"]}
        )
        with site(url, tmp_path, issuer, provider_name="Example SSO") as catalog:
            browser = Browser(catalog.app.client())
            page = browser.page("/sign-in?next=/jobs")
            assert "Sign in with Example SSO" in page.text
            (start,) = [link for link in page.links if link.startswith("/sign-in/provider")]
            begun = browser.client.get(start, follow_redirects=False)
            back = httpx.post(begun.headers["location"], data={"sub": "bob"}).headers["location"]
            assert back.startswith("http://localhost/sign-in/callback?")
            done = browser.client.get(back, follow_redirects=False)
            assert (done.status_code, done.headers["location"]) == (303, "/jobs")
            assert "person:bob@x.org" in browser.page("/account").text
            browser.submit(browser.page("/account").form("/sign-out"))
            assert urlsplit(str(browser.get("/account").url)).path == "/sign-in"


@pytest.mark.each_database
def test_rights_come_from_groups_and_bound_keys(database: Any, tmp_path: Path, provider: Provider) -> None:
    """Rights come from groups and grants; a key has no more rights than its owner and ends with the owner."""
    url = database.url.render_as_string(hide_password=False)
    with site(url, tmp_path, provider.url) as catalog:
        mine, other = catalog.add("run/step-1"), catalog.add("run/step-2", "other")
        browser = person(catalog.app)
        client = with_key(catalog.app, own_key(browser, scope=["read", "write", "admin"][:2]))
        caller = catalog.get("/whoami", client)
        assert caller["name"] == "person:alice@example.org/key:laptop"
        assert caller["rights"] == {"main": ["read", "write"]}
        assert seen(catalog, client) == seen(catalog, browser.client) == {"run/step-1"}
        assert client.put(f"{API}/checkpoints/{mine}/tags/good").status_code == 200
        for method, path in (("GET", ""), ("PUT", "/tags/good")):
            assert client.request(method, f"{API}/checkpoints/{other}{path}").status_code == 404
        last = catalog.get("/audit", action="checkpoint.tag", target=f"checkpoint:{mine}")["items"][0]
        assert (last["actor"], last["root"]) == ("person:alice@example.org/key:laptop", "main")

        alice = account_of(catalog, "alice@example.org")
        elsewhere = grant(catalog, "contributor", "other", account_id=alice["id"]).json()
        noted: dict[str, Any] = {"json": {"text": "secret"}, "headers": {"Idempotency-Key": "once"}}
        notes = f"/checkpoints/{other}/notes"
        assert [catalog.status("POST", notes, client, **noted) for _ in range(2)] == [201, 201]
        change = {"role": "viewer"}
        assert catalog.status("PATCH", f"/grants/{elsewhere['id']}", json=change) == 200
        replayed = client.post(f"{API}{notes}", **noted)  # stored with other rights
        assert replayed.status_code == 422 and "secret" not in replayed.text
        assert len(catalog.get(notes)["items"]) == 1
        assert seen(catalog, client) == {"run/step-1", "run/step-2"}
        refused = client.put(f"{API}/checkpoints/{other}/tags/good")  # may be read, not changed
        assert refused.status_code == 404 and "your role" in refused.json()["detail"]
        provider.person["groups"] = []  # removed from the group: takes effect at the next sign-in
        person(catalog.app)
        assert seen(catalog, client) == seen(catalog, browser.client) == {"run/step-2"}
        (own,) = catalog.get("/grants", account_id=alice["id"])["items"]
        assert catalog.status("DELETE", f"/grants/{own['id']}") == 204
        assert catalog.status("GET", "/checkpoints", client) == 403

        place = f"/accounts/{alice['id']}"
        assert grant(catalog, "viewer", None, account_id=alice["id"]).status_code == 201
        assert catalog.status("PATCH", place, json={"is_disabled": True}) == 200
        assert catalog.status("GET", "/whoami", client) == 401
        assert browser.client.get("/account", follow_redirects=False).status_code == 303
        refused = sign_in(Browser(catalog.app.client()))
        assert refused.status_code == 403 and "disabled" in refused.text
        assert catalog.status("PATCH", place, json={"is_disabled": False}) == 200
        assert catalog.status("GET", "/checkpoints", client) == 200
        assert catalog.status("GET", "/checkpoints", browser.client) == 401  # the sessions have ended
        actions = [one["action"] for one in catalog.get("/audit", target=f"account:{alice['id']}")["items"]]
        assert {"account.create", "session.begin", "session.refuse", "account.disable"} <= set(actions)


def _signed_none(header: dict[str, Any], claims: dict[str, Any]) -> str:
    parts = ({"alg": "none"}, claims)
    return (
        ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in parts)
        + "."
    )


def _changed(**change: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, claims: claims.update(change)


FORGED: dict[str, Callable[[dict[str, Any], dict[str, Any]], str | None]] = {
    "nonce": _changed(nonce="another"),
    "issuer": _changed(iss="https://elsewhere.example"),
    "audience": _changed(aud="another-client"),
    "audiences": _changed(aud=[CLIENT, "another-client"], azp="another-client"),
    "expired": _changed(exp=int(time.time()) - 600, iat=int(time.time()) - 900),
    "subject": _changed(sub=""),
    "subject-with-nul": _changed(sub="a\0b"),
    "no-signature": _signed_none,
    "signed-with-our-secret": lambda header, claims: jwt.encode(
        {**header, "alg": "HS256"}, claims, OctKey.import_key(SECRET), algorithms=["HS256"]
    ),
    "signed-by-another": lambda header, claims: jwt.encode(header, claims, RSAKey.generate_key(2048)),
    "no-token": lambda header, claims: "x.y.z",
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_tokens_are_refused(catalog: Catalog, provider: Provider, forgery: str) -> None:
    """A forged token gets 403, without session and account; a valid token is accepted afterwards."""
    provider.forge = FORGED[forgery]
    browser = Browser(catalog.app.client())
    answer = sign_in(browser)
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert "Sign-in failed" in PageText(answer.text).text
    assert catalog.get("/accounts")["items"] == []
    provider.forge = lambda header, claims: None
    assert sign_in(browser).status_code == 303


def test_sign_ins_end_once_and_in_one_browser(catalog: Catalog, tmp_path: Path, provider: Provider) -> None:
    """A forged state, another browser, a replay and a refusal fail; another process may end a sign-in."""
    mine, other = Browser(catalog.app.client()), Browser(catalog.app.client())
    other.page("/sign-in")
    begun = mine.client.get("/sign-in/provider?next=/jobs", follow_redirects=False)
    back = urlsplit(httpx.get(begun.headers["location"]).headers["location"])
    there = f"{back.path}?{back.query}"
    assert other.client.get(there, follow_redirects=False).status_code == 400
    assert sign_in(mine, state="x" * 43).status_code == 400
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with served(url, tmp_path, provider.url) as second:  # a restart, or another process
        late = Browser(second.client())
        late.client.cookies = mine.client.cookies
        assert late.client.get(there, follow_redirects=False).headers["location"] == "/jobs"
        assert late.client.get(there, follow_redirects=False).status_code == 400
    assert sign_in(mine, code="made-up").status_code == 403
    assert sign_in(mine, error="access_denied").status_code == 403
    assert sign_in(mine, iss="https://elsewhere.example").status_code == 403
    for target in ("//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"):
        assert sign_in(mine, f"/sign-in/provider?next={target}").headers["location"] == "/"
    before = mine.client.cookies["dcphub_session"]
    assert sign_in(mine).status_code == 303 and mine.client.cookies["dcphub_session"] != before


def test_rotated_keys_and_an_outage_of_a_provider(catalog: Catalog, provider: Provider) -> None:
    """Rotated keys are read again; during an outage a page says so, and keys of the service work."""
    provider.replies["/jwks"] = (503, "")
    assert sign_in(Browser(catalog.app.client())).status_code == 503
    del provider.replies["/jwks"]
    browser = person(catalog.app)
    key = own_key(browser)
    provider.rotate()
    later[0] += 11  # keys are read every ten seconds at most
    person(catalog.app)
    for path, reply in {
        "/token": (200, "x" * (2 << 20)),
        "/userinfo": {"sub": "another"},
        "/jwks": {"keys": [{"kty": "oct", "k": "c2VjcmV0"}]},
    }.items():
        provider.replies = {path: reply}
        provider.person.pop("groups", None)  # so that the service asks userinfo
        provider.rotate()
        later[0] += 11
        assert sign_in(Browser(catalog.app.client())).status_code in (403, 503), path
    provider.replies, provider.person = {}, dict(ALICE)
    later[0] += 11
    provider.userinfo = {"groups": ["all-readers"], "email": "x@y.z"}
    provider.person = {"sub": "a1"}
    person(catalog.app)
    assert account_of(catalog, "alice@example.org")["groups"] == ["all-readers"]
    later[0] += 4000  # the cached configuration has expired, and the provider is down
    provider.replies = dict.fromkeys(("/.well-known/openid-configuration", "/token"), (500, ""))
    failed = sign_in(Browser(catalog.app.client()))
    assert failed.status_code == 503 and "does not answer" in PageText(failed.text).text
    assert seen(catalog, with_key(catalog.app, key)) == {"run/step-1", "run/step-2"}
    later[0] += 91 * 86_400  # a person without sign-in for long
    assert catalog.status("GET", "/whoami", with_key(catalog.app, key)) == 401


@pytest.mark.parametrize("change", [{"groups_claim": "realm.roles"}, {"allowed_groups": ["vision"]}, {}])
def test_account_names_are_unique(tmp_path: Path, provider: Provider, change: dict[str, Any]) -> None:
    """A second person with the same address gets another name; an unverified address names no account."""
    people = [
        ALICE | {"realm": {"roles": ["vision"]}},
        ALICE | {"sub": "a2", "name": "<script>alert(1)</script>"},
        ALICE | {"sub": "a3", "email_verified": False, "groups": "other", "name": 7},
        ALICE | {"sub": "x/../key:boss", "email": "a/key:boss@example.org", "groups": ["vision", 7, ""]},
    ]
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with site(url, tmp_path, provider.url, **change) as catalog:
        catalog.add("run/step-1")
        answers = []
        for one in people:
            provider.person = one
            answers.append(sign_in(Browser(catalog.app.client())).status_code)
        found = {one["name"]: one for one in catalog.get("/accounts")["items"]}
        names = ["alice@example.org", "alice@example.org=2", "a3", "a_key_boss@example.org"]
        if change.get("allowed_groups"):
            assert answers == [303, 303, 403, 303] and names.pop(2) not in found
        assert list(found) == names
        if change.get("groups_claim"):
            assert found["alice@example.org"]["groups"] == ["vision"]
            assert found["alice@example.org=2"]["groups"] == []
        else:
            assert found["a_key_boss@example.org"]["groups"] == ["vision"]
        assert {one["email"] for one in found.values()} <= {
            "Alice@example.org",
            "a/key:boss@example.org",
            None,
        }
        boss = Browser(catalog.app.client())
        boss.sign_in(catalog.app.key("admin", name="shown"))
        for page in (
            "/people",
            "/people?q=ALICE&kind=person",
            *(f"/people/{one['id']}" for one in found.values()),
        ):
            boss.page(page)
        assert "No matches" in boss.page("/people?q=zzz").text


def test_addresses_are_verified_by_their_own_document(catalog: Catalog, provider: Provider) -> None:
    """An address counts as verified only by its own document; thousands of groups keep a person's rights."""
    provider.person = {"sub": "a9", "email": "boss@example.org"}
    groups = ["vision", *(f"z{number}" for number in range(3000))]
    provider.userinfo = {"email": "own@example.org", "email_verified": True, "groups": groups}
    assert seen(catalog, person(catalog.app).client) == {"run/step-1"}
    found = account_of(catalog, "a9")
    assert (found["email"], len(found["groups"])) == (None, 2000)
    provider.person = {"sub": "a9", "email_verified": True}
    provider.userinfo |= {"email_verified": False}
    person(catalog.app)
    assert account_of(catalog, "a9")["email"] is None


def test_a_provider_that_hangs_holds_few_threads(catalog: Catalog, provider: Provider) -> None:
    """Sign-ins beyond a limit are refused while the provider hangs; the others succeed later."""
    person(catalog.app)
    has_answer = threading.Event()
    provider.forge = lambda header, claims: None if has_answer.wait(30) else "x.y.z"
    browsers = [Browser(catalog.app.client()) for _ in range(20)]
    with ThreadPoolExecutor(len(browsers)) as pool:
        signing_in = [pool.submit(sign_in, browser) for browser in browsers]
        refused = [done.result().status_code for done in itertools.islice(as_completed(signing_in), 8)]
        assert refused == [503] * 8 and not has_answer.is_set()
        assert seen(catalog, catalog.http) == {"run/step-1", "run/step-2"}
        has_answer.set()
        assert sum(done.result().status_code == 303 for done in signing_in) == 12


def test_admins_of_a_root_manage_this_root_only(catalog: Catalog, provider: Provider) -> None:
    """An admin of a root manages grants, keys, rules and the log of this root, and nothing else."""
    provider.person = ALICE | {"sub": "r1", "email": "root@example.org", "groups": ["vision-admins"]}
    browser = person(catalog.app)
    client = with_key(catalog.app, own_key(browser, scope=["admin"]))
    assert catalog.get("/whoami", client)["rights"].keys() == {"main"}
    bob = catalog.http.post(f"{API}/accounts", json={"name": "ci", "title": "nightly"}).json()
    everywhere = grant(catalog, "viewer", None, account_id=bob["id"]).json()
    elsewhere = grant(catalog, "admin", "other", group="x").json()
    assert [one["status"] for one in (grant(catalog, "admin", "nowhere", group="x").json(),)] == [404]

    assert grant(catalog, "admin", "main", client, group="helpers").status_code == 201
    assert grant(catalog, "admin", "main", client, group="helpers").status_code == 409
    for root, status in (("other", 404), (None, 403), ("nowhere", 404)):
        assert grant(catalog, "viewer", root, client, group="y").status_code == status
    assert [one["root"] for one in catalog.get("/grants", client)["items"]] == ["main"]
    for one in (everywhere, elsewhere):
        assert catalog.status("GET", f"/grants/{one['id']}", client) == 404
        assert catalog.status("DELETE", f"/grants/{one['id']}", client) == 404
        assert catalog.status("PATCH", f"/grants/{one['id']}", client, json={"role": "viewer"}) == 404
    forbidden = (
        ("POST", "/accounts", {"name": "mine"}),
        ("PATCH", f"/accounts/{bob['id']}", {"is_disabled": True}),
        ("POST", f"/accounts/{bob['id']}/sign-out", None),
        ("POST", "/keys", {"name": "all"}),
        ("POST", "/keys", {"name": "as-ci", "roots": ["main"], "account_id": bob["id"]}),
        ("POST", "/rules", {"name": "r", "actions": [{"kind": "verify"}]}),
        ("POST", "/webhooks", {"url": "https://example.com/"}),
    )
    for method, path, body in forbidden:
        assert catalog.status(method, path, client, json=body) == 403, path
    assert catalog.status("POST", "/keys", client, json={"name": "o", "roots": ["other"]}) == 422
    made = client.post(f"{API}/keys", json={"name": "bot", "scopes": ["admin"], "roots": ["main"]})
    assert made.status_code == 201
    names = [one["name"] for one in catalog.get("/keys", client)["items"]]
    assert names == ["bot"]  # no keys for all roots, and none of persons
    boss = catalog.get("/keys")["items"][0]
    assert catalog.status("DELETE", f"/keys/{boss['id']}", client) == 404
    convert = {"kind": "convert", "to": "safetensors", "target_key": "x.safetensors", "target_root": "other"}
    rules = [
        ({"root": "main"}, [{"kind": "verify"}], 201),
        ({"root": "other"}, [{"kind": "verify"}], 403),
        ({"root": "main"}, [convert], 403),
        ({"root": "main"}, [{**convert, "target_root": "main", "hf_key": "x", "hf_root": "other"}], 403),
    ]
    for number, (condition, actions, status) in enumerate(rules):
        body = {"name": f"r{number}", "condition": condition, "actions": actions}
        assert catalog.status("POST", "/rules", client, json=body) == status, body
    (rule,) = catalog.get("/rules", client)["items"]
    change = {"condition": {"root": "other"}}
    assert catalog.status("PATCH", f"/rules/{rule['id']}", client, json=change) == 403
    catalog.http.put(f"{API}/checkpoints/2/tags/x")
    catalog.http.put(f"{API}/checkpoints/1/tags/x")
    params = {"checkpoint_id": 2, "to": "torch", "target_root": "main", "target_key": "copy.pt"}
    made = catalog.http.post(f"{API}/jobs", json={"kind": "convert", "params": params})
    assert made.status_code == 202, made.text
    catalog.http.post(f"{API}/jobs", json={"kind": "verify", "params": {"checkpoint_id": 1}})
    seen_jobs = catalog.get("/audit", client, action="job.submit")["items"]
    jobs = {one["target"]: one["detail"] for one in seen_jobs}
    # details are shown for jobs of this root alone: parameters may name other roots
    assert [job for job, detail in jobs.items() if detail is None] == [f"job:{made.json()['id']}"]
    (entry,) = catalog.get("/audit", action="job.submit", target=f"job:{made.json()['id']}")["items"]
    assert entry["detail"]["params"]["checkpoint_id"] == 2
    log = catalog.get("/audit", client)["items"]
    assert {one["root"] for one in log} == {"main"}
    assert {"grant.create", "key.create", "rule.create", "checkpoint.tag"} <= {one["action"] for one in log}
    for path in ("/people", f"/people/{bob['id']}", "/keys", "/audit", "/account"):
        page = browser.page(path)
        assert "other" not in page.text.split(), path


def test_keys_of_accounts(catalog: Catalog, provider: Provider) -> None:
    """Admins of all roots create keys of service accounts; a person creates own keys, with a session."""
    ci = catalog.http.post(f"{API}/accounts", json={"name": "ci"}).json()
    assert catalog.status("POST", "/accounts", json={"name": "ci"}) == 409
    body = {"name": "k", "scopes": ["admin"], "account_id": ci["id"]}
    made = catalog.http.post(f"{API}/keys", json=body).json()
    client = with_key(catalog.app, made["key"])
    assert (made["account"], catalog.status("GET", "/roots", client)) == ("service-account:ci", 403)
    new = {"root": "main", "key": "run/step-1"}
    refused = client.post(f"{API}/checkpoints", json=new).json()["detail"]
    assert "service-account:ci needs a role with the scope 'write' in root 'main'" in refused
    assert "An admin" in refused and f"/people/{ci['id']}" in refused
    everywhere = client.post(f"{API}/quotas", json={"root": "main"}).json()["detail"]
    assert "the scope 'admin' for all roots" in everywhere and "An admin of all roots" in everywhere
    role = grant(catalog, "viewer", "main", account_id=ci["id"])
    assert seen(catalog, client) == {"run/step-1"}
    assert "read in main" in client.post(f"{API}/checkpoints", json=new).json()["detail"]
    place = f"/grants/{role.json()['id']}"
    assert catalog.status("PATCH", place, json={"role": "operator"}, headers={"If-Match": '"g9-1"'}) == 412
    assert catalog.status("PATCH", place, json={"role": "operator"}) == 200
    job = {"kind": "convert", "params": {"checkpoint_id": 1, "to": "dcp", "target_key": "new"}}
    assert catalog.status("POST", "/jobs", client, json=job) == 202
    away = {**job, "params": {**job["params"], "target_root": "other"}}  # type: ignore[dict-item]
    assert catalog.status("POST", "/jobs", client, json=away) == 404
    grant(catalog, "viewer", "other", account_id=ci["id"])
    assert catalog.status("POST", "/jobs", client, json=away) == 403
    verify = {"kind": "verify", "params": {"checkpoint_id": 2}}
    assert catalog.status("POST", "/jobs", client, json=verify) == 404
    urgent = {**verify, "params": {"checkpoint_id": 1}, "priority": 1}
    assert catalog.status("POST", "/jobs", client, json=urgent) == 403
    for method, path in (("POST", "/accounts"), ("GET", "/accounts"), ("GET", "/grants"), ("GET", "/keys")):
        assert catalog.status(method, path, client, json={"name": "x"}) == 403
    assert catalog.get("/account", client)["actor"] == "service-account:ci"

    browser = person(catalog.app)
    alice = account_of(catalog, "alice@example.org")
    assert catalog.status("POST", "/keys", json={**body, "account_id": alice["id"]}) == 422
    form = browser.page("/account").form("/account/keys")
    for fields, status in (
        ({"name": "a", "scope": "admin"}, 403),
        ({"name": "a", "root": "other"}, 422),
        ({"name": "a", "token": "0" * 128}, 403),
        ({"name": "a b"}, 422),
    ):
        sent = browser.client.post("/account/keys", data={**form.fields, **fields})
        assert sent.status_code == status, fields
    key = own_key(browser, "once")
    with_session = Browser(catalog.app.client())
    with_session.sign_in(key)  # a key creates no keys, because it may have fewer rights than its owner
    token = with_session.page("/account").form("/theme").fields["token"]
    assert with_session.client.post("/account/keys", data={"token": token, "name": "b"}).status_code == 403
    (mine,) = catalog.get("/account/keys", with_key(catalog.app, key))["items"]
    others = browser.page("/account").form(f"/account/keys/{mine['id']}/revoke").fields
    assert browser.client.post(f"/account/keys/{made['id']}/revoke", data=others).status_code == 404
    assert browser.client.post(f"/account/keys/{mine['id']}/revoke", data={}).status_code == 403
    assert "Key revoked" in browser.client.post(f"/account/keys/{mine['id']}/revoke", data=others).text
    assert catalog.status("GET", "/whoami", with_key(catalog.app, key)) == 401


def test_admins_manage_accounts_by_pages(catalog: Catalog, provider: Provider) -> None:
    """Admins manage accounts, keys and roles with forms: create, grant, disable, enable, sign out, revoke."""
    browser = person(catalog.app)
    boss = Browser(catalog.app.client())
    boss.sign_in(catalog.app.key("admin", name="page"))
    made = boss.submit(boss.page("/people").form("/people"), name="nightly", title="runs at night")
    place = urlsplit(str(made.url)).path
    assert "Service account created" in PageText(made.text).text
    assert (
        "Role granted" in boss.submit(boss.page(place).form(f"{place}/grants"), role="viewer", root="*").text
    )
    shown = boss.client.post(
        f"{place}/keys", data={**boss.page(place).form(f"{place}/keys").fields, "name": "n"}
    )
    assert shown.status_code == 201 and shown.headers["cache-control"] == "no-store"
    group = boss.submit(
        boss.page("/people").form("/people/groups"), group="vision", role="operator", root="other"
    )
    assert "Role granted" in group.text and seen(catalog, browser.client) == {"run/step-1", "run/step-2"}
    assert "convert" in browser.page("/account").text
    number = account_of(catalog, "alice@example.org")["id"]
    for action, message in (
        ("sign-out", "Signed out"),
        ("state", "Account disabled"),
        ("state", "Account enabled"),
    ):
        form = boss.page(f"/people/{number}").form(f"/people/{number}/{action}")
        fields = {"disable": "1"} if message == "Account disabled" else {}
        assert message in boss.submit(form, **fields).text
    revoke = next(one for one in boss.page("/people").forms if "grants" in one.action)
    assert "Role revoked" in boss.submit(revoke).text
    assert (
        boss.client.post("/people/groups", data={"group": "x", "role": "admin", "root": "*"}).status_code
        == 403
    )


def test_missing_and_unsafe_settings_of_a_provider(tmp_path: Path) -> None:
    """Without a provider there is no button and no route; unsafe settings stop the start with the reason."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path) as app:
        browser = Browser(app.client())
        assert "/sign-in/provider" not in "".join(browser.page("/sign-in").links)
        assert [browser.get(path).status_code for path in ("/sign-in/provider", "/sign-in/callback")] == [
            404
        ] * 2
    good = {"issuer": "https://sso.example", "client_id": "x"}
    for wrong, why in (
        ({"issuer": "http://sso.example", "client_id": "x"}, "https"),
        ({"issuer": "https://sso.example"}, "client_id"),
        ({**good, "roles": {"g": {"nowhere": "viewer"}}}, "not configured"),
        ({**good, "roles": {"g": {"*": "king"}}}, "king|viewer"),
        ({**good, "redirect_url": "https://x.example/elsewhere"}, "callback"),
        ({**good, "scopes": ["email"]}, "openid"),
    ):
        with (
            pytest.raises(dcp.CheckpointError, match=why),
            running_app(url, tmp_path, features={"people": wrong}),
        ):
            pass
    with (
        pytest.raises(dcp.CheckpointError, match="auth"),
        running_app(url, tmp_path, auth="off", features={"people": good}),
    ):
        pass
