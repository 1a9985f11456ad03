"""Retention policies of the catalog: kept checkpoints with reasons, deletions, and due times."""

from __future__ import annotations

from typing import Any

from tests.support.catalog import API, Catalog, pages

POLICIES = "/retention/policies"


def fill(catalog: Catalog, run: str = "run", steps: int = 6, root: str = "main") -> dict[int, int]:
    """Add steps 1 to ``steps``, a second apart, and return ids by step; the loss falls, then rises."""
    return {
        step: catalog.add(
            f"{run}/step-{step}", root, {"loss": abs(step - 3.0)}, provenance={"time": 1_700_000_000.0 + step}
        )
        for step in range(1, steps + 1)
    }


def kept(catalog: Catalog, **keep: Any) -> dict[str, list[str]]:
    """Preview a policy, and return the reasons of each kept checkpoint of the only run, by name."""
    body = {"root": "main", "run_glob": "*", "keep": keep}
    (run,) = catalog.http.post(f"{API}/retention/preview", json=body).json()["items"]
    return {one["key"].rpartition("/")[2]: one["reasons"] for one in run["checkpoints"] if one["reasons"]}


def policy(catalog: Catalog, **changes: Any) -> int:
    """Create a policy that keeps the last two of each run, and return its id."""
    body = {"name": "p", "root": "main", "run_glob": "*", "keep": {"last": 2}, "grace_seconds": 50.0}
    answer = catalog.http.post(f"{API}{POLICIES}", json=body | changes)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def test_previews_show_all_reasons_to_keep(catalog: Catalog) -> None:
    """A preview shows all reasons to keep a checkpoint, and totals of kept and deleted bytes."""
    fill(catalog)
    keep = {"last": 1, "every_steps": 4, "best": [{"metric": "loss"}]}
    assert kept(catalog, **keep) == {
        "step-3": ["best loss (min)"],
        "step-4": ["every 4 steps"],
        "step-6": ["newest", "last 1"],
    }
    body = {"root": "main", "run_glob": "*", "keep": keep}
    totals = catalog.http.post(f"{API}/retention/preview/totals", json=body).json()
    assert (totals["runs"], totals["kept"], totals["deleted"]) == (1, 3, 3)
    assert (totals["kept_bytes"], totals["deleted_bytes"]) == (3 * 192, 3 * 192)
    assert set(catalog.states().values()) == {"committed"}


def test_held_checkpoints_and_the_newest_good_are_kept(catalog: Catalog) -> None:
    """Pinned, aliased and stepless checkpoints are kept, and a good checkpoint in place of a damaged one."""
    numbers = fill(catalog)
    catalog.add("run/final")
    run = catalog.get(f"/checkpoints/{numbers[1]}")["run_id"]
    assert catalog.status("PUT", f"/checkpoints/{numbers[1]}/pin") == 200
    body = {"checkpoint_id": numbers[2]}
    assert catalog.status("PUT", f"/runs/{run}/aliases/best", json=body) == 200
    catalog.do("verify", checkpoint_id=numbers[6])  # without data: damaged
    assert catalog.get(f"/checkpoints/{numbers[6]}")["verification"] == "damaged"
    assert kept(catalog, last=1) == {
        "final": ["no step"],
        "step-1": ["pinned"],
        "step-2": ["alias best"],
        "step-5": ["newest", "last 1"],
        "step-6": ["damaged, without enough good checkpoints after it"],
    }


def test_a_metric_without_values_deletes_nothing(catalog: Catalog) -> None:
    """A metric that no checkpoint of a run has keeps the whole run, and the job reports this."""
    fill(catalog)
    number = policy(catalog, keep={"last": 1, "best": [{"metric": "los"}]})
    result = catalog.do("retention", policy_id=number)["result"]
    assert (result["kept"], result["deleted"]) == (6, 0)
    assert len(result["unjudged"]) == 1 and "did you mean 'loss'" in result["unjudged"][0]


def test_the_job_deletes_with_grace_and_a_dry_run_does_not(catalog: Catalog) -> None:
    """The job deletes in all matching runs of one root, with a grace period; a dry run deletes nothing."""
    for run in ("a/x", "a/y", "b"):
        fill(catalog, run, 3)
    fill(catalog, "a/x", 3, root="other")
    number = policy(catalog, run_glob="a/*", keep={"last": 1})
    dry = catalog.do("retention", policy_id=number, dry_run=True)["result"]
    assert (dry["runs"], dry["kept"], dry["deleted"]) == (2, 2, 4)
    assert set(catalog.states().values()) == {"committed"}
    real = catalog.do("retention", policy_id=number)["result"]
    assert {**real, "dry_run": True} == dry
    gone = pages(catalog.http, "/checkpoints", state="deleted")
    assert sorted(one["key"] for one in gone) == sorted(real["keys"])
    assert {one["root"] for one in gone} == {"main"}
    assert catalog.do("retention", policy_id=number)["result"]["deleted"] == 0
    assert catalog.status("POST", f"/checkpoints/{gone[0]['id']}/restore") == 200


def test_policies_and_purges_run_when_due(catalog: Catalog) -> None:
    """A policy runs once in each interval, and a purge runs once after the grace period."""
    fill(catalog, steps=3)
    policy(catalog, keep={"last": 1}, interval_seconds=600)
    policy(catalog, name="off", is_enabled=False)
    assert [catalog.regular_work() for _ in range(2)] == [1, 0]
    catalog.work()
    assert catalog.states()["run/step-1"] == "deleted"
    assert catalog.regular_work(10) == 0
    assert [catalog.regular_work(100) for _ in range(2)] == [2, 0]
    purges = catalog.get("/jobs", kind="purge")["items"]
    assert [job["created_by"] for job in purges] == ["system"] * 2
    assert catalog.regular_work(601) == 1
