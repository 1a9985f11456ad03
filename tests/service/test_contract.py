"""Contract of all resources that the API creates, reads, changes and deletes, on both databases."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.app import App, running_app
from tests.support.catalog import API, Catalog, pages
from tests.support.openapi import document
from tests.support.service_resources import RESOURCES, Resource

SCOPES: tuple[Any, ...] = ("read", "write", "convert", "delete", "admin")


@pytest.fixture(params=RESOURCES)
def resource(request: pytest.FixtureRequest) -> Resource:
    """Return each resource in turn."""
    return RESOURCES[request.param]


def make(client: TestClient, resource: Resource, number: int = 0, key: str | None = None) -> Any:
    """Create a resource with a name of its own, and return the response."""
    body = dict(resource.body)
    if resource.named is not None and number:
        body[resource.named] = f"{body[resource.named]}-{number}"
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"{API}{resource.path}", json=body, headers=headers)


def test_resources_are_shown_listed_changed_and_deleted(catalog: Catalog, resource: Resource) -> None:
    """A created resource is shown and listed as given; a change or deletion with a stale ETag gets 412."""
    client, path = catalog.http, f"{API}{resource.path}"
    made = make(client, resource)
    assert made.status_code == 201, made.text
    place = made.headers["Location"]
    shown = client.get(place)
    secrets = {"key", "secret"} if resource.has_secret else set()
    assert shown.json() == {name: value for name, value in made.json().items() if name not in secrets}
    assert {name: shown.json()[name] for name in resource.body} == resource.body
    listed = client.get(path).json()["items"]
    assert shown.json() in listed and not any(secrets & one.keys() for one in listed)
    if resource.change is not None:
        seen = {"If-Match": shown.headers["ETag"]}
        changed = client.patch(place, json=resource.change, headers=seen)
        assert changed.status_code == 200, changed.text
        assert changed.json().items() >= resource.change.items()
        assert client.get(place).json() == changed.json()
        assert changed.headers["ETag"] == client.get(place).headers["ETag"] != shown.headers["ETag"]
        assert client.patch(place, json=resource.change, headers=seen).status_code == 412
        assert client.delete(place, headers=seen).status_code == 412
    assert client.delete(place).status_code in (200, 204)
    if resource.path != "/keys":  # revoked keys stay in the list
        assert client.get(place).status_code == client.delete(place).status_code == 404
    assert client.get(f"{path}/1000000").status_code == 404


def test_invalid_bodies_are_refused_and_not_stored(catalog: Catalog, resource: Resource) -> None:
    """Invalid bodies get 422, also in changes, and a duplicate name gets 409; nothing is stored."""
    client, path = catalog.http, f"{API}{resource.path}"
    before = client.get(path).json()["items"]
    for change in (*resource.wrong, {"unknown": 1}):
        answer = client.post(path, json=resource.body | change)
        assert answer.status_code == 422, (change, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert client.get(path).json()["items"] == before
    place = make(client, resource).headers["Location"]
    if resource.change is not None:
        for change in resource.wrong:
            assert client.patch(place, json=change).status_code == 422, change
    if resource.named is not None:
        assert make(client, resource).status_code == 409


def test_each_scope_allows_only_its_operations(catalog: Catalog, resource: Resource) -> None:
    """A missing scope gets 403 with its name, a missing key 401, and a key for other roots 404."""
    place = make(catalog.http, resource).headers["Location"]
    below = place.removeprefix(API)
    for scope in SCOPES:
        client = catalog.app.client(scope, name=f"only-{scope}")
        for method, path, needed in (
            ("GET", resource.path, resource.read_scope),
            ("GET", below, resource.read_scope),
            ("POST", resource.path, resource.scope),
            ("PATCH", below, resource.scope),
            ("DELETE", below, resource.scope),
        ):
            if scope in (needed, "admin") or (method == "PATCH" and resource.change is None):
                continue
            answer = client.request(method, f"{API}{path}", json=resource.body)
            assert (answer.status_code, answer.json()["scope"]) == (403, needed), (scope, method)
    assert catalog.app.client().get(place).status_code == 401
    stranger = catalog.app.client("admin", roots=["other"])
    change = resource.change or {}
    assert catalog.status("GET", below, stranger) == 404
    assert catalog.status("POST", resource.path, stranger, json=resource.body) in (403, 404, 422)
    if resource.change is not None:
        assert catalog.status("PATCH", below, stranger, json=change) == 404
    assert catalog.status("DELETE", below, stranger) == 404
    assert catalog.http.get(place).status_code == 200


def test_a_repeated_post_takes_effect_once(catalog: Catalog, resource: Resource) -> None:
    """A repeated POST of the same key, body and caller gets the first response, except one with a secret."""
    client, path = catalog.http, f"{API}{resource.path}"
    count = len(client.get(path).json()["items"])
    first = make(client, resource, key="k")
    again = make(client, resource, key="k")
    if resource.has_secret:
        assert "Idempotency-Replayed" not in again.headers
        return
    assert (first.status_code, "Idempotency-Replayed" in first.headers) == (201, False)
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (201, "true")
    assert again.json() == first.json()
    for header in ("content-type", "location", "etag"):
        assert again.headers.get(header) == first.headers.get(header)
    assert make(client, resource, 1, key="k").status_code == 422
    other = catalog.app.client("admin", name="other")
    assert make(other, resource, 2, key="k").status_code == 201
    assert make(other, resource, key="k2").status_code == 409
    for wrong in ("", "x" * 129, "a b"):
        assert make(client, resource, 3, key=wrong).status_code == 400, wrong
    assert len(client.get(path).json()["items"]) == count + 2


def test_concurrent_posts_with_one_key_take_effect_once(catalog: Catalog) -> None:
    """Of concurrent requests with one key one takes effect; the others get its response, or 409."""
    rule = RESOURCES["rule"]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: make(catalog.http, rule, key="k"), range(12)))
    first = [one for one in answers if one.status_code == 201 and "Idempotency-Replayed" not in one.headers]
    assert len(first) == 1
    for one in answers:
        if one.status_code == 409:
            assert (one.json()["state"], one.headers["Retry-After"]) == ("working", "1")
        else:
            assert one.json() == first[0].json()
    assert len(catalog.get("/rules")["items"]) == 1


def test_pages_have_each_item_once(catalog: Catalog, resource: Resource) -> None:
    """Pages have each item once; invalid limits and cursors get 422."""
    if not resource.is_paged:
        return
    made = [make(catalog.http, resource, number).json()["id"] for number in range(1, 8)]
    found = [one["id"] for one in pages(catalog.http, resource.path, limit=3)]
    assert sorted(found) == made and found in (made, made[::-1])
    for query in ("limit=0", "limit=501", "limit=x", "cursor=x"):
        assert catalog.status("GET", f"{resource.path}?{query}") == 422, query


def test_routes_refuse_unknown_parameters(catalog: Catalog) -> None:
    """Each route of the API refuses an unknown parameter with 422 and its name, before any other check."""
    described = document()["paths"]
    routes = [(method, path) for path, methods in described.items() for method in methods if API in path]
    assert len(routes) > 60
    for method, path in routes:
        answer = catalog.http.request(method, f"{re.sub('{.*?}', '1', path)}?unknown=1")
        assert answer.status_code == 422, (method, path, answer.text)
        assert {"location": ["query", "unknown"], "message": "unknown parameter"} in answer.json()[
            "errors"
        ], (method, path)


def test_repeated_parameters_are_refused(catalog: Catalog) -> None:
    """Each parameter that is not a list is refused by name if given twice."""
    described = document()["paths"]
    tried = 0
    for path, methods in described.items():
        for method, operation in methods.items():
            for one in operation.get("parameters", ()) if API in path else ():
                if one["in"] != "query" or '"array"' in json.dumps(one["schema"]):
                    continue
                name, place = one["name"], re.sub("{.*?}", "1", path)
                answer = catalog.http.request(method, f"{place}?{name}=5&{name}=5")
                assert answer.status_code == 422, (method, path, name, answer.text)
                assert ["query", name] in [error["location"] for error in answer.json()["errors"]]
                tried += 1
    assert tried > 60


JOBS: list[tuple[Any, int]] = [
    ({"kind": "verify", "params": {"checkpoint_id": 10**6}}, 404),
    ({"kind": "verify", "params": {"checkpoint_id": "one"}}, 422),
    ({"kind": "verify", "params": {}}, 422),
    ({"kind": "verify"}, 422),
    ({"kind": "make-coffee", "params": {}}, 422),
    ({"kind": "scan", "params": {"root": "nowhere"}}, 404),
    ({"kind": "scan", "params": {"root": "main"}, "priority": 101}, 422),
    ({"kind": "scan", "params": {"root": "main"}, "shell": "rm"}, 422),
    ([], 422),
]


def test_invalid_jobs_are_refused(catalog: Catalog) -> None:
    """Invalid jobs get problem documents, and none is queued."""
    for body, status in JOBS:
        answer = catalog.http.post(f"{API}/jobs", json=body)
        assert answer.status_code == status, (body, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
    assert catalog.get("/jobs") == {"items": [], "next_cursor": None}


def test_equal_submissions_return_one_job(catalog: Catalog) -> None:
    """Submitting a job twice returns one job and audits once; only an admin may raise the priority."""
    body = {"kind": "verify", "params": {"checkpoint_id": catalog.add("run/step-1")}}
    ci = catalog.app.client("read", "write", name="ci")
    refused = ci.post(f"{API}/jobs", json=body | {"priority": 1})
    assert (refused.status_code, refused.json()["scope"]) == (403, "admin")
    first, again = (ci.post(f"{API}/jobs", json=body) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    job = ci.get(first.headers["Location"]).json()
    assert job["id"] == again.json()["id"]
    assert (job["state"], job["root"], job["created_by"]) == ("queued", "main", "key:ci")
    (entry,) = pages(catalog.http, "/audit", action="job.submit")
    assert (entry["actor"], entry["target"]) == ("key:ci", f"job:{job['id']}")
    reader = catalog.app.client("read")
    for path in ("", f"/{job['id']}/cancel", f"/{job['id']}/retry"):
        assert reader.post(f"{API}/jobs{path}", json=body).status_code == 403


def test_a_key_sees_the_jobs_of_its_roots(catalog: Catalog) -> None:
    """Jobs of hidden roots, also differences to them, are neither listed, shown, cancelled nor retried."""
    visible, hidden = catalog.add("run/step-1"), catalog.add("run/step-1", "other")
    more = catalog.add("run/step-2")
    orders = [
        ("scan", {"root": "other"}),
        ("diff", {"a": hidden, "b": visible}),
        ("diff", {"a": visible, "b": hidden}),
    ]
    orders += [("verify", {"checkpoint_id": hidden}), ("diff", {"a": more, "b": visible})]
    bodies = [{"kind": kind, "params": params} for kind, params in orders]
    made = [catalog.http.post(f"{API}/jobs", json=body).json()["id"] for body in bodies]
    client = catalog.app.client("read", "write", roots=["main"])
    assert [job["id"] for job in catalog.get("/jobs", client)["items"]] == [made[-1]]
    for number in (*made[:-1], 10**6):
        for method, below in (("GET", ""), ("GET", "/tasks"), ("GET", "/events"), ("GET", "/log")):
            assert catalog.status(method, f"/jobs/{number}{below}", client) == 404
        for below in ("/cancel", "/retry"):
            assert catalog.status("POST", f"/jobs/{number}{below}", client) == 404
    assert catalog.status("POST", "/jobs", client, json=bodies[3]) == 404


@pytest.fixture
def limited(make_database: Any, tmp_path: Any) -> Iterator[App]:
    """Start an application that allows two queued jobs for each key."""
    with running_app(make_database(), tmp_path, max_queued_jobs=2) as app:
        yield app


def test_queued_jobs_of_a_key_are_limited(limited: App) -> None:
    """The third queued job of a key gets 429; other keys have their own limits, and joining a job is free."""
    one, other = (limited.client("read", "write", name=name) for name in ("one", "other"))
    orders = [{"kind": "scan", "params": {"root": "main", "below": f"run-{n}"}} for n in range(4)]
    assert [one.post(f"{API}/jobs", json=order).status_code for order in orders[:3]] == [202, 202, 429]
    assert "Retry-After" in one.post(f"{API}/jobs", json=orders[2]).headers
    assert one.post(f"{API}/jobs", json=orders[1]).status_code == 202
    assert other.post(f"{API}/jobs", json=orders[2]).status_code == 202
    first = one.get(f"{API}/jobs").json()["items"][-1]["id"]
    assert one.post(f"{API}/jobs/{first}/cancel").json()["state"] == "cancelled"
    assert one.post(f"{API}/jobs", json=orders[3]).status_code == 202
    assert one.post(f"{API}/jobs/{first}/retry").status_code == 429


def test_keys_are_valid_until_revoked(catalog: Catalog) -> None:
    """Only the exact key is accepted; once revoked it is refused, and its name is free again."""
    made = catalog.http.post(f"{API}/keys", json={"name": "ci", "scopes": ["read"]}).json()
    key, number = made["key"], made["id"]
    assert re.fullmatch(r"dcp_[a-z0-9]{8}_[\w-]{43}", key)

    def status(secret: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        return catalog.app.client().get(f"{API}/whoami", headers=headers).status_code

    assert status(key) == 200
    for wrong in (key[:-1] + ("A" if key[-1] != "A" else "B"), key[:-1], f"{key}a", key.upper(), "dcp__"):
        assert status(wrong) == 401, wrong
    assert catalog.status("POST", "/keys", json={"name": "ci", "scopes": ["read"]}) == 409
    ended = catalog.http.delete(f"{API}/keys/{number}").json()
    assert status(key) == 401
    assert catalog.http.delete(f"{API}/keys/{number}").json() == ended
    assert catalog.status("POST", "/keys", json={"name": "ci", "scopes": ["read"]}) == 201
    assert key[13:] not in catalog.http.get(f"{API}/keys").text
