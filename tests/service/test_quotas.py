"""Quotas of accounts, keys and roots: administration, enforcement in all processes, forms and metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.app import running_app
from tests.support.catalog import API, Catalog, pages
from tests.support.databases import MakeDatabase
from tests.support.job_workers import served_by, until
from tests.support.pages import Browser

BYTES = 192
"""Size of a checkpoint saved by `Catalog.save`."""


@pytest.fixture
def sites(make_database: MakeDatabase, tmp_path: Path) -> Iterator[list[Catalog]]:
    """Start two applications over one database and the same roots, as two processes of the service."""
    url = make_database()
    quotas = {"account": {"jobs_queued": 100, "requests": "100000/minute"}, "key": {"jobs_queued": 50}}
    settings: dict[str, Any] = {"rate_limit": "100000/minute", "features": {"quotas": quotas}}
    with ExitStack() as stack:
        one = Catalog(stack.enter_context(running_app(url, tmp_path, **settings)), tmp_path)
        with_key = {"Authorization": one.http.headers["Authorization"]}
        other = stack.enter_context(running_app(url, tmp_path, **settings))
        yield [one, _joined(other, tmp_path, with_key)]


def _joined(app: Any, folder: Path, headers: dict[str, str]) -> Catalog:
    made = object.__new__(Catalog)
    made.app, made.folder, made.http = app, folder, app.client()
    made.http.headers.update(headers)
    return made


def limit(site: Catalog, kind: str, subject: str, **limits: Any) -> Any:
    """Create a quota, and return it."""
    body = {"kind": kind, "subject": subject, "limits": limits}
    answer = site.http.post(f"{API}/quotas", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def person(site: Catalog, name: str) -> tuple[TestClient, str]:
    """Return a client with a new key, and the subject of its account."""
    client = site.app.client("read", "write", "convert", name=name)
    return client, site.get("/usage", client)["account"]["subject"]


def together(calls: Sequence[Callable[[], Any]]) -> Counter[int]:
    """Send requests concurrently, and count the statuses."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return Counter(done.status_code for done in [*pool.map(lambda call: call(), calls)])


def used(site: Catalog, limit: str, client: TestClient, kind: str = "account") -> tuple[Any, Any]:
    """Return the used and the allowed amount of a limit."""
    limits = site.get("/usage", client)[kind]["limits"]
    return next((one["used"], one["allowed"]) for one in limits if one["limit"] == limit)


@pytest.mark.each_database
def test_quotas_are_created_changed_and_deleted(catalog: Catalog) -> None:
    """A subject has one quota, with ETags and audit entries; only admins of all roots see and change it."""
    _, account = person(catalog, "ada")
    made = limit(catalog, "account", account, jobs_queued=2, requests=None)
    url, tag = f"{API}/quotas/{made['id']}", {"If-Match": made["etag"]}
    assert (made["limits"], made["note"]) == ({"jobs_queued": 2, "requests": None}, "")
    assert [one["id"] for one in catalog.get("/quotas")["items"]] == [made["id"]]
    body = {"kind": "account", "subject": account, "limits": {}}
    assert catalog.http.post(f"{API}/quotas", json=body).status_code == 409
    changed = catalog.http.patch(url, json={"limits": {"downloads": 0}, "note": "abc"}, headers=tag)
    assert (changed.json()["limits"], changed.json()["note"]) == ({"downloads": 0}, "abc")
    assert catalog.http.patch(url, json={"note": "x"}, headers=tag).status_code == 412
    (row,) = (one for one in catalog.get("/quotas/usage", q="ADA")["items"])
    assert (row["subject"], row["label"], row["quota_id"]) == (account, "key:ada", made["id"])
    assert {one["kind"] for one in catalog.get("/quotas/usage", kind="root")["items"]} == {"root"}
    for client in (catalog.app.client("delete"), catalog.app.client("admin", roots=["main"])):
        for method, path in (("GET", ""), ("GET", "/usage"), ("GET", f"/{made['id']}"), ("POST", "")):
            assert catalog.status(method, f"/quotas{path}", client, json=body) == 403
        assert client.get("/quotas").status_code == client.get("/quotas/edit").status_code == 403
    assert catalog.http.delete(url).status_code == 204 and catalog.http.get(url).status_code == 404
    actions = [one["action"] for one in catalog.get("/audit", target=f"quota:{made['id']}")["items"]]
    assert actions == ["quota.delete", "quota.change", "quota.create"]


def test_sizes_are_given_as_in_the_settings(catalog: Catalog) -> None:
    """Quotas take bytes, or a size with a unit; the error for other text has an example."""
    made = limit(catalog, "root", "main", bytes_kept="400 MB", bytes_kept_warning="1KiB")
    assert made["limits"] == {"bytes_kept": 400_000_000, "bytes_kept_warning": 1024}
    url = f"{API}/quotas/{made['id']}"
    changed = catalog.http.patch(url, json={"limits": {"download_bytes_per_second": "1.5 MB"}})
    assert changed.json()["limits"] == {"download_bytes_per_second": 1_500_000}
    for wrong in ("1 KB", "400 XB", "many", "20,5 MB", "1.5.5 MB", f"{'9' * 400} TB", True):
        refused = catalog.http.patch(url, json={"limits": {"download_bytes_per_second": wrong}})
        assert refused.status_code == 422
    assert "20 TB" in catalog.http.patch(url, json={"limits": {"bytes_kept": "many"}}).json()["detail"]


@pytest.mark.parametrize(
    ("kind", "subject", "limits"),
    [
        ("account", "key#999", {}),
        ("account", "boss", {}),
        ("account", "key#1", {"jobs_running": 0}),
        ("account", "key#1", {"jobs_queued": -1}),
        ("account", "key#1", {"jobs_queued": True}),
        ("account", "key#1", {"requests": "0/minute"}),
        ("account", "key#1", {"requests": "9" * 60 + "/minute"}),
        ("account", "key#1", {"download_bytes_per_second": 1}),
        ("account", "key#1", {"bytes_kept": 1 << 60}),
        ("account", "key#1", {"bytes_kept": 5, "bytes_kept_warning": 6}),
        ("account", "key#1", {"speed": 5}),
        ("key", "1", {"bytes_kept": 5}),
        ("key", "1' OR 1=1", {}),
        ("root", "main", {"requests": "5/minute"}),
        ("root", "../main", {}),
        ("team", "main", {}),
    ],
)
def test_invalid_limits_are_refused(catalog: Catalog, kind: str, subject: str, limits: Any) -> None:
    """Invalid limits get 422 and are not stored."""
    body = {"kind": kind, "subject": subject, "limits": limits}
    assert catalog.status("POST", "/quotas", json=body) == 422
    assert catalog.get("/quotas")["items"] == []


@pytest.mark.each_database
def test_stored_bytes_are_warned_of_then_refused(sites: list[Catalog]) -> None:
    """Registrations over the limit are warned of, then refused; scans still add checkpoints. Deleted ones do
    not count; accounts have own limits, and a root's limit holds for all."""
    site, other = sites
    (ada, account), (bob, _) = person(site, "ada"), person(site, "bob")
    limit(site, "account", account, bytes_kept=2 * BYTES, bytes_kept_warning=BYTES)

    def register(number: int, client: TestClient, at: Catalog = site) -> Any:
        site.save(f"run/step-{number}", save_id=f"{number:08x}")
        given = {"root": "main", "key": f"run/step-{number}"}
        client = at.app.client() if at is other else client
        client.headers.update(ada.headers if at is other else {})
        return client.post(f"{API}/checkpoints", json=given)

    assert register(1, ada).json()["warnings"] == []
    (warning,) = register(2, ada, other).json()["warnings"]
    assert "more than 192" in warning and "384" in warning
    refused = register(3, ada)
    problem = refused.json()
    assert (refused.status_code, problem["limit"], problem["allowed"], problem["used"]) == (
        409,
        "bytes_kept",
        384,
        384,
    )
    assert problem["subject"] == {"kind": "account", "name": account} and "delete" in problem["detail"]
    assert register(1, ada).status_code == 200  # a repeated registration adds nothing
    assert register(4, bob).status_code == 201
    site.scan()
    assert site.states()["run/step-3"] == "committed" and site.rows()["run/step-3"]["registered_by"] is None
    assert site.rows()["run/step-1"]["registered_by"] == "key:ada"
    assert register(3, ada).status_code == 409 and register(1, bob).status_code == 200
    assert {row["key"] for row in site.get("/checkpoints", registered_by="key:ada")["items"]} == {
        "run/step-1",
        "run/step-2",
    }
    assert used(site, "bytes_kept", ada) == (384, 384) and used(site, "bytes_kept", bob) == (192, None)
    number = site.rows()["run/step-1"]["id"]
    assert site.status("DELETE", f"/checkpoints/{number}") == 200
    assert used(site, "bytes_kept", ada) == (192, 384) and register(3, ada).status_code == 200
    eve = site.app.client("delete", "write", name="eve")
    refused = eve.post(f"{API}/checkpoints/{number}/restore")
    assert (refused.status_code, refused.json()["limit"]) == (409, "bytes_kept")
    assert site.states()["run/step-1"] == "deleted" and used(site, "bytes_kept", ada) == (384, 384)
    assert site.status("POST", f"/checkpoints/{number}/restore") == 200  # allowed to admins of all roots
    assert used(site, "bytes_kept", ada) == (576, 384)
    root = limit(site, "root", "main", bytes_kept=700)
    assert register(5, bob).json()["subject"] == {"kind": "root", "name": "main"}
    convert = {"checkpoint_id": number, "to": "safetensors", "target_key": "x.safetensors"}
    answer = bob.post(f"{API}/jobs", json={"kind": "convert", "params": convert})
    assert (answer.status_code, answer.json()["limit"]) == (409, "bytes_kept")
    run = site.rows()["run/step-1"]["run_id"]
    for path in ("/roots", f"/runs/{run}"):
        page = bob.get(path, headers={"Accept": "text/html"}).text
        assert "has 768 B of checkpoints, more than the limit of 700 B" in page
    site.http.delete(f"{API}/quotas/{root['id']}")
    assert register(5, bob).status_code == 201


@pytest.mark.each_database
def test_parallel_requests_do_not_exceed_a_limit(sites: list[Catalog]) -> None:
    """Concurrent registrations and jobs in two processes do not exceed a limit; refusals leave no trace."""
    site, other = sites
    ada, account = person(site, "ada")
    clients = [ada, _joined(other.app, site.folder, dict(ada.headers)).http]
    limit(site, "account", account, bytes_kept=3 * BYTES, jobs_queued=3)
    for number in range(8):
        site.save(f"run/step-{number}", save_id=f"{number:08x}")

    def register(number: int) -> Any:
        given = {"root": "main", "key": f"run/step-{number}"}
        return clients[number % 2].post(f"{API}/checkpoints", json=given)

    def scan(number: int) -> Any:
        params = {"root": "main", "below": f"run-{number}"}
        return clients[number % 2].post(f"{API}/jobs", json={"kind": "scan", "params": params})

    assert together([lambda n=n: register(n) for n in range(8)]) == {201: 3, 409: 5}  # type: ignore[misc]
    assert len(site.states()) == 3 and used(site, "bytes_kept", ada) == (576, 576)
    assert together([lambda n=n: scan(n) for n in range(8)]) == {202: 3, 429: 5}  # type: ignore[misc]
    assert used(other, "jobs_queued", clients[1]) == (3, 3)
    assert used(other, "jobs_queued", clients[1], "key") == (3, 50)
    limit(site, "root", "main", jobs_queued=4)
    (bob, _) = person(site, "bob")
    body = {"kind": "scan", "params": {"root": "main"}}
    assert bob.post(f"{API}/jobs", json=body).status_code == 202
    refused = bob.post(f"{API}/jobs", json={**body, "params": {"root": "main", "below": "x"}})
    assert (refused.status_code, refused.json()["subject"]["name"]) == (429, "main")
    assert int(refused.headers["Retry-After"]) > 0
    elsewhere = bob.post(f"{API}/jobs", json={**body, "params": {"root": "other"}})
    assert elsewhere.status_code == 202


def test_request_rates_are_limited_in_all_processes(sites: list[Catalog]) -> None:
    """A rate limit takes effect within a second in each process, with a count of its own."""
    site, other = sites
    ada, account = person(site, "ada")
    there = _joined(other.app, site.folder, dict(ada.headers)).http
    made = limit(site, "account", account, requests="3/hour")
    time.sleep(1.1)
    for client in (ada, there):
        statuses = [client.get(f"{API}/whoami").status_code for _ in range(6)]
        assert statuses[-1] == 429 and statuses.count(200) <= 3, statuses
    assert site.status("GET", "/whoami") == 200
    assert site.status("DELETE", f"/quotas/{made['id']}") == 204
    time.sleep(1.1)
    assert {client.get(f"{API}/whoami").status_code for client in (ada, there)} == {200}


def test_settings_of_quotas_are_checked(tmp_path: Path) -> None:
    """Settings accept sizes with units; a mistake stops the start and names the setting."""
    quotas: Any = {"account": {"bytes_kept": "20 TB"}, "root": {"download_bytes_per_second": "1 GiB"}}
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, features={"quotas": quotas}) as app:
        ada = app.client("read", name="ada")
        found = ada.get(f"{API}/usage").json()
        allowed = {one["limit"]: one["allowed"] for one in found["account"]["limits"]}
        assert (allowed["bytes_kept"], allowed["jobs_queued"]) == (20 * 10**12, 1000)
        assert found["roots"][0]["limits"][3]["allowed"] == 1 << 30
        assert "of 18.2 TiB" in ada.get("/usage", headers={"Accept": "text/html"}).text
        metrics = app.client("read", name="prometheus").get("/metrics").text
        assert 'dcp_quota_subjects{kind="account",level="full"} 0.0' in metrics
    mistakes: list[Any] = [{"account": {"requests": "many"}}, {"key": {"bytes_kept": 5}}, {"team": {}}]
    mistakes.append({"root": {"bytes_kept": "20,5 TB"}})
    for wrong in mistakes:
        with pytest.raises(Exception, match=r"features\.quotas"):
            running_app(url, tmp_path, features={"quotas": wrong}).__enter__()


@pytest.mark.each_database
def test_keys_of_one_account_share_its_limits(catalog: Catalog) -> None:
    """Keys of an account share its allowance, and have limits of their own too."""
    made = catalog.http.post(f"{API}/accounts", json={"name": "robots"}).json()
    grant = {"account_id": made["id"], "role": "contributor", "root": None}
    assert catalog.http.post(f"{API}/grants", json=grant).status_code == 201
    keys = [
        catalog.http.post(
            f"{API}/keys", json={"name": name, "scopes": ["read", "write"], "account_id": made["id"]}
        ).json()
        for name in ("one", "two")
    ]
    clients = [catalog.app.client() for _ in keys]
    for client, key in zip(clients, keys, strict=True):
        client.headers["Authorization"] = f"Bearer {key['key']}"
    account = f"account#{made['id']}"
    limit(catalog, "account", account, bytes_kept=BYTES, jobs_queued=2)
    limit(catalog, "key", str(keys[0]["id"]), jobs_queued=1)
    for name in ("a", "b"):
        catalog.save(f"run/{name}", save_id=name * 8)
    given = [{"root": "main", "key": f"run/{name}"} for name in ("a", "b")]
    answers = [c.post(f"{API}/checkpoints", json=one) for c, one in zip(clients, given, strict=True)]
    assert [answer.status_code for answer in answers] == [201, 409]
    jobs = [{"kind": "scan", "params": {"root": "main", "below": f"run-{n}"}} for n in range(4)]
    order = [clients[0], clients[0], clients[1], clients[1]]
    statuses = [c.post(f"{API}/jobs", json=job).status_code for c, job in zip(order, jobs, strict=True)]
    assert statuses == [202, 429, 202, 429]
    assert used(catalog, "jobs_queued", clients[1]) == (2, 2)
    row = catalog.get("/quotas/usage", q="robots")["items"][0]
    assert (row["subject"], row["label"]) == (account, "service-account:robots")


def test_very_many_accounts(catalog: Catalog) -> None:
    """Accounts near a limit are found among very many, lists have pages, and metrics count full accounts."""
    for number in range(510):
        assert catalog.status("POST", "/accounts", json={"name": f"robot-{number}"}) == 201
    client, account = person(catalog, "zoe")
    catalog.save("run/a", save_id="a" * 8)
    assert catalog.status("POST", "/checkpoints", client, json={"root": "main", "key": "run/a"}) == 201
    limit(catalog, "account", "account#300", jobs_queued=0)
    limit(catalog, "account", account, bytes_kept=BYTES)
    found = catalog.get("/quotas/usage", limit=2)["items"]
    assert {one["subject"] for one in found} == {account, "account#300"}
    assert [one["label"] for one in catalog.get("/quotas/usage", q="Bot-509")["items"]] == [
        "service-account:robot-509"
    ]
    assert len(pages(catalog.http, "/accounts", limit=200)) == 510
    assert [one["name"] for one in catalog.get("/accounts", q="509", limit=1)["items"]] == ["robot-509"]
    assert 'dcp_quota_subjects{kind="account",level="full"} 1.0' in catalog.http.get("/metrics").text


def test_the_form_of_a_quota(catalog: Catalog) -> None:
    """The form stores sizes with units, and shows refused values; a missing token or a stale version is
    refused, and empty fields restore the defaults."""
    name = "<img src=x onerror=alert(1)>"
    _, account = person(catalog, name)
    browser = Browser(catalog.app.client())
    secret = catalog.http.headers["Authorization"].removeprefix("Bearer ")
    assert browser.sign_in(secret).status_code == 200
    assert name in browser.page("/quotas").text and browser.page("/usage").text
    path = f"/quotas/edit?kind=account&subject={account.replace('#', '%23')}"
    form = browser.page(path).form("/quotas/edit")
    wrong = browser.submit(form, bytes_kept="20 elephants", note=name)
    assert wrong.status_code == 422 and "20 elephants" in wrong.text and name not in wrong.text
    typed = {"bytes_kept": "20 TB", "jobs_queued": "none", "requests": "5/hour", "jobs_running": "1,000"}
    assert browser.submit(form, **typed).status_code == 200
    (made,) = catalog.get("/quotas")["items"]
    assert made["limits"] == {
        "bytes_kept": 20 * 10**12,
        "jobs_queued": None,
        "requests": "5/hour",
        "jobs_running": 1000,
    }
    assert browser.submit(form, jobs_queued="1").status_code == 409
    assert browser.client.post("/quotas/edit", data={**form.fields, "token": ""}).status_code == 403
    again = browser.page(path).form("/quotas/edit")
    assert again.fields["jobs_queued"] == "none" and again.fields["bytes_kept"] == "20000000000000"
    assert browser.submit(again, **dict.fromkeys(typed, "")).status_code == 200
    assert catalog.get("/quotas")["items"] == []
    assert browser.get("/quotas/edit?kind=account&subject=key%23999").status_code == 422


@pytest.mark.parametrize("change", ["revoked", "role", "room", "template"])
def test_queued_jobs_need_rights_and_room_at_their_start(catalog: Catalog, change: str) -> None:
    """A queued job fails at its start if its key was revoked, its account lost the role or its template's
    root, or has no room."""
    catalog.add("run/step-1")
    account = catalog.http.post(f"{API}/accounts", json={"name": "robots"}).json()["id"]
    grant = {"role": "operator", "root": "main", "account_id": account}
    role = catalog.http.post(f"{API}/grants", json=grant).json()["id"]
    scopes = ["read", "write", "convert"]
    key = {"name": "one", "scopes": scopes, "account_id": account}
    made = catalog.http.post(f"{API}/keys", json=key).json()
    client = catalog.app.client()
    client.headers["Authorization"] = f"Bearer {made['key']}"
    job: dict[str, Any] = {"checkpoint_id": 1, "to": "torch", "target_key": "out.pt"}
    if change == "template":
        grant |= {"role": "viewer", "root": "other"}
        role = catalog.http.post(f"{API}/grants", json=grant).json()["id"]
        job |= {"to": "safetensors", "target_key": "out", "hf_key": "model", "hf_root": "other"}
    number = client.post(f"{API}/jobs", json={"kind": "convert", "params": job}).json()["id"]
    if change == "revoked":
        assert catalog.status("DELETE", f"/keys/{made['id']}") == 200
        expected = ("ForbiddenError", "service-account:robots/key:one, who submitted the job, is now revoked")
    elif change == "role":
        tag = {"If-Match": catalog.http.get(f"{API}/grants/{role}").headers["ETag"]}
        less = {"role": "contributor"}
        assert catalog.status("PATCH", f"/grants/{role}", json=less, headers=tag) == 200
        expected = ("ForbiddenError", "no longer has the scope 'convert' in root main")
    elif change == "template":
        assert catalog.status("DELETE", f"/grants/{role}") == 204
        assert catalog.status("GET", f"/jobs/{number}", client) == 404
        expected = ("ForbiddenError", "may no longer read root other")
    else:
        limit(catalog, "account", f"account#{account}", bytes_kept=0)
        expected = (
            "ConflictError",
            "bytes_kept: the limit of this account is 0 B of checkpoints, and 0 B are in use",
        )
    with served_by(catalog.app.service.settings):
        until(lambda: catalog.get(f"/jobs/{number}")["finished_at"], "its end")
    ended = catalog.get(f"/jobs/{number}")
    assert (ended["state"], ended["error"]["type"]) == ("failed", expected[0])
    assert expected[1] in ended["error"]["detail"] and not catalog.place("out.pt").exists()
