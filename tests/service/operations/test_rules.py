"""Automation rules: conditions, actions once for each event, and refused actions."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from sqlalchemy import event

import dcp
from tests.support.catalog import API, Catalog, pages

VERIFY = {"kind": "verify"}
CONVERT = {
    "kind": "convert",
    "to": "safetensors",
    "target_root": "other",
    "target_key": "{run}/{name}.safetensors",
}


def rule(catalog: Catalog, *actions: Any, name: str = "r", **more: Any) -> None:
    """Create a rule."""
    body = {"name": name, "actions": list(actions), **more}
    answer = catalog.http.post(f"{API}/rules", json=body)
    assert answer.status_code == 201, answer.text


def save(catalog: Catalog, key: str, value: float = 1.0) -> None:
    """Save a checkpoint with data."""
    dcp.save({"w": torch.full((10,), value)}, checkpoint_id=catalog.place(key), no_dist=True)


def made(catalog: Catalog) -> list[tuple[str, str]]:
    """Return kind and creator of all jobs except scans, in order."""
    jobs = [job for job in pages(catalog.http, "/jobs") if job["kind"] != "scan"]
    return [(job["kind"], job["created_by"]) for job in reversed(jobs)]


def test_commits_are_verified_and_converted(catalog: Catalog) -> None:
    """A commit is verified and converted; the target is verified too, and not converted again."""
    rule(catalog, VERIFY, CONVERT)
    save(catalog, "llama/step-10", 3.0)
    catalog.scan()
    assert catalog.regular_work() == 2
    assert made(catalog) == [("verify", "rule:r"), ("convert", "rule:r")]
    catalog.work()
    target = load_file(catalog.place("llama/step-10.safetensors", "other"))
    assert torch.equal(target["w"], torch.full((10,), 3.0))
    assert catalog.regular_work() == 1
    catalog.work()
    assert catalog.regular_work() == 0
    assert [kind for kind, _ in made(catalog)] == ["verify", "convert", "verify"]
    assert {row["verification"] for row in catalog.rows().values()} == {"good"}


def test_rules_and_webhooks_end_with_the_role(catalog: Catalog) -> None:
    """A rule, a webhook and a retention policy end with the role of their account, until another admin
    enables them."""
    account = catalog.http.post(f"{API}/accounts", json={"name": "lead"}).json()["id"]
    role = {"account_id": account, "role": "admin", "root": "main"}
    grant = catalog.http.post(f"{API}/grants", json=role).json()["id"]
    body = {"name": "lead", "account_id": account, "scopes": ["admin"]}
    lead = catalog.app.client()
    lead.headers["authorization"] = f"Bearer {catalog.http.post(f'{API}/keys', json=body).json()['key']}"
    body = {"name": "r", "actions": [VERIFY], "condition": {"root": "main"}}
    assert catalog.status("POST", "/rules", lead, json=body) == 201
    body = {"url": "https://hooks.example.com/x", "roots": ["main"], "events": ["checkpoint.committed"]}
    assert catalog.status("POST", "/webhooks", lead, json=body) == 201
    body = {"name": "p", "root": "main", "keep": {"last": 5}, "interval_seconds": 60}
    assert catalog.status("POST", "/retention/policies", lead, json=body) == 201
    jobs = []
    for step in range(3):
        save(catalog, f"a/step-{step}")
        catalog.scan()
        catalog.app.work(catalog.app.service.clock(), "events:automation", "events:webhooks", "retention")
        jobs.append(len(made(catalog)))
        hook, *found = map(catalog.get, ("/webhooks/1", "/rules/1", "/retention/policies/1"))
        assert hook["is_enabled"] is found[0]["is_enabled"] is found[1]["is_enabled"] is (step != 1)
        if step == 0:
            assert catalog.status("DELETE", f"/grants/{grant}") == 204
        elif step == 1:
            assert "no longer an admin" in hook["disabled_reason"]
            for path in ("/webhooks/1", "/rules/1", "/retention/policies/1"):
                assert catalog.status("PATCH", path, json={"is_enabled": True}) == 200
    assert jobs == [2, 2, 3]
    assert len(catalog.get("/webhooks/1/deliveries")["items"]) == 2
    actions = [one["action"] for one in catalog.get("/audit")["items"]]
    for noun in ("rule", "webhook", "retention"):
        assert actions.count(f"{noun}.disable") == 1


CONDITIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["a/step-10", "a/step-15", "b/c/step-10"]),
    ({"run": "a"}, ["a/step-10", "a/step-15"]),
    ({"run": "b*"}, ["b/c/step-10"]),
    ({"every_steps": 10}, ["a/step-10", "b/c/step-10"]),
    ({"formats": ["torch_save"]}, []),
    ({"formats": ["dcp", "torch_dcp"], "every_steps": 15}, ["a/step-15"]),
    ({"root": "other"}, []),
    ({"root": "main", "run": "a", "every_steps": 5}, ["a/step-10", "a/step-15"]),
    ({"tag": "keep"}, []),
]


def test_all_conditions_of_a_rule_must_hold(catalog: Catalog) -> None:
    """All conditions of a rule must hold: run, root, steps, format and tag."""
    for number, (condition, _) in enumerate(CONDITIONS):
        action = CONVERT | {"target_key": f"r{number}/{{run}}/{{name}}.safetensors"}
        rule(catalog, action, name=f"r{number}", condition=condition)
    ids = {catalog.add(key): key for key in ("a/step-10", "a/step-15", "b/c/step-10")}
    catalog.regular_work()
    jobs = pages(catalog.http, "/jobs", kind="convert")
    for number, (condition, keys) in enumerate(CONDITIONS):
        mine = [job for job in jobs if job["created_by"] == f"rule:r{number}"]
        assert sorted(ids[job["checkpoint_id"]] for job in mine) == keys, condition


def test_rules_start_on_verification_and_tags(catalog: Catalog) -> None:
    """Rules start on verification and on a tag too."""
    rule(catalog, VERIFY, name="first")
    rule(catalog, CONVERT, event="checkpoint.verified", name="second")
    rule(catalog, {"kind": "stats"}, event="checkpoint.tagged", condition={"tag": "look"}, name="third")
    save(catalog, "a/step-1")
    number = catalog.register("a/step-1")
    assert catalog.regular_work() == 1
    catalog.work()
    assert catalog.regular_work() == 1
    catalog.status("PUT", f"/checkpoints/{number}/tags/look")
    assert catalog.regular_work() == 1
    assert made(catalog) == [("verify", "rule:first"), ("convert", "rule:second"), ("stats", "rule:third")]


def test_rules_ignore_earlier_commits(catalog: Catalog) -> None:
    """A rule ignores earlier commits, and makes one job for each later one, despite concurrent processes."""
    catalog.add("a/step-0")
    rule(catalog, VERIFY)
    assert catalog.regular_work() == 0
    for step in range(1, 21):
        catalog.save(f"a/step-{step}", save_id=f"{step:08x}")
    slow = Random(1)
    event.listen(catalog.app.service.database.writer, "commit", lambda _: time.sleep(slow.random() / 30))
    with ThreadPoolExecutor(6) as pool:
        registered = [pool.submit(catalog.register, f"a/step-{step}") for step in range(1, 21)]
        while not all(one.done() for one in registered):
            list(pool.map(lambda _: catalog.regular_work(), range(2)))
    catalog.regular_work()
    assert sorted(made(catalog)) == [("verify", "rule:r")] * 20


def test_refused_actions_are_in_the_audit_log(catalog: Catalog) -> None:
    """A refused action is in the audit log, and stops neither other actions nor other events."""
    rule(catalog, CONVERT | {"target_key": "same.safetensors"}, VERIFY)
    rule(
        catalog,
        CONVERT | {"target_key": "{step}.safetensors"},
        name="s",
        condition={"formats": ["torch_save"]},
    )
    save(catalog, "a/step-1")
    catalog.scan()
    catalog.regular_work()
    catalog.work()
    save(catalog, "a/step-2")
    torch.save({"w": torch.ones(2)}, catalog.place("a/best.pt"))
    catalog.scan()
    catalog.regular_work()
    refused = pages(catalog.http, "/audit", action="rule.refused")
    seen = {(one["actor"], one["detail"]["problem"]) for one in refused}
    assert any(actor == "rule:r" and "same.safetensors is already a checkpoint" in why for actor, why in seen)
    assert ("rule:s", "target_key: the checkpoint has no step") in seen
    verified = {job["checkpoint_id"] for job in pages(catalog.http, "/jobs", kind="verify")}
    assert catalog.rows()["a/step-2"]["id"] in verified
