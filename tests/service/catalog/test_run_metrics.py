"""Runs by their metrics: lists, sorting, filters and comparison, in the API and on pages without scripts."""

from __future__ import annotations

import operator
import time
from itertools import count
from typing import Any

import pytest

from tests.support.catalog import Catalog, pages
from tests.support.catalog_rows import T0, add_checkpoint
from tests.support.pages import HOSTILE, Browser

RUNS: dict[str, tuple[str, dict[str, Any], dict[int, float]]] = {  # root, metadata, losses by step
    "team/a": ("main", {"lr": 0.1, "model": {"name": "7b", "heads": [2, 4]}}, {1: 3.0, 2: 0.5, 3: 2.0}),
    "team/b": ("main", {"lr": 0.01, "model": {"name": "7b"}}, {1: 4.0, 2: 1.0}),
    "team/c": ("other", {"lr": 1e-3, "note": HOSTILE[1]}, {5: 0.25, 6: 9.0}),
    "solo": ("main", {"lr": "0.10"}, {}),
}
_LATER = count(1)
VALUES = {"last": max, "min": min, "max": max}


@pytest.fixture
def found(catalog: Catalog) -> Catalog:
    """Add four runs in two roots, three of them with a loss."""
    for run, (root, metadata, losses) in RUNS.items():
        for step in losses or {7: 0}:
            add_checkpoint(
                catalog.app.service.database,
                f"{run}/step-{step}",
                root=root,
                user_metadata=metadata,
                metrics={"loss": losses[step], "lr": 1.0 / step} if losses else {},
            )
    summed(catalog)
    return catalog


def summed(catalog: Catalog) -> None:
    """Have a worker summarize changed runs, after the pause that follows a run of many checkpoints."""
    catalog.app.work(time.time() + 60 * next(_LATER), "run-metrics", "run-metrics-all")


def keys(catalog: Catalog, client: Any = None, **query: Any) -> list[str]:
    """Return the keys of the listed runs, read in pages of two."""
    items = pages(client or catalog.http, "/runs/summaries", limit=2, **query)
    return [one["run"]["key"] for one in items]


@pytest.mark.each_database  # their SQL differs
def test_runs_are_sorted_and_filtered_by_metric(found: Catalog) -> None:
    """Runs are sorted and filtered as in Python; only sorting by a metric leaves out runs without it."""
    assert sorted(keys(found)) == sorted(RUNS)
    for of, pick in VALUES.items():
        losses = {run: values for run, (_, _, values) in RUNS.items() if values}
        value = {
            run: values[max(values)] if of == "last" else pick(values.values())
            for run, values in losses.items()
        }
        ascending = sorted(value, key=lambda run: value[run])
        assert keys(found, sort="metric", metric="loss", of=of) == ascending
        assert keys(found, sort="-metric", metric="loss", of=of) == ascending[::-1]
        rows = found.get("/runs/summaries", sort="metric", metric="loss", of=of)["items"]
        for one in rows:
            place = one["metric"][of]
            assert place["value"] == value[one["run"]["key"]]
            checkpoint = found.get(f"/checkpoints/{place['checkpoint_id']}")
            assert (checkpoint["step"], checkpoint["metrics"]["loss"]) == (place["step"], place["value"])
    for sign, holds in {"<": operator.lt, ">=": operator.ge, "=": operator.eq, "!=": operator.ne}.items():
        wanted = {run for run, (_, given, _) in RUNS.items() if holds(float(given["lr"]), 0.1)}
        assert set(keys(found, metadata=f"lr{sign}0.1")) == wanted, sign
    assert keys(found, metadata=["model.name=7b", "lr<0.05"]) == ["team/b"]
    assert set(keys(found, has_metric="loss", contains="team")) == {"team/a", "team/b", "team/c"}
    assert keys(found, root="other") == keys(found, glob="*/c") == ["team/c"]
    (row,) = found.get("/runs/summaries", metadata="model.heads=[2, 4]", show=["lr", "none"])["items"]
    assert (row["run"]["key"], row["metric"], row["metadata"]) == ("team/a", None, {"lr": "0.1"})
    for query in (
        {"sort": "metric"},
        {"metadata": "lr"},
        {"metadata": "lr<high"},
        {"root": "none"},
        {"of": "mean"},
        {"run": 1},
    ):
        assert found.status("GET", "/runs/summaries", params=query) == 422, query
    page = found.get("/runs/summaries", limit=1)
    other = {"cursor": page["next_cursor"], "contains": "team"}
    assert found.status("GET", "/runs/summaries", params=other) == 422


@pytest.mark.each_database
def test_summaries_follow_changed_metrics(found: Catalog) -> None:
    """Summaries follow a metric set or removed, a deleted checkpoint and a new checkpoint."""
    (best,) = [one["id"] for one in pages(found.http, "/checkpoints", run="team/a", min_step=2, max_step=2)]

    def least() -> dict[str, float]:
        summed(found)
        items = found.get("/runs/summaries", sort="metric", metric="loss", of="min")["items"]
        return {one["run"]["key"]: one["metric"]["min"]["value"] for one in items}

    assert least() == {"team/c": 0.25, "team/a": 0.5, "team/b": 1.0}
    path = f"/checkpoints/{best}/metrics"
    assert found.status("PATCH", path, json={"metrics": {"loss": 0.1}}) == 200
    assert least()["team/a"] == 0.1
    assert found.status("DELETE", f"/checkpoints/{best}") == 200
    assert least()["team/a"] == 2.0
    found.add("solo/step-8", metrics={"loss": -1.0})
    assert next(iter(least())) == "solo"
    number = pages(found.http, "/checkpoints", run="solo", min_step=8)[0]["id"]
    assert found.status("PATCH", f"/checkpoints/{number}/metrics", json={"metrics": {"loss": None}}) == 200
    assert "solo" not in least()


@pytest.mark.each_database
def test_runs_are_compared(found: Catalog) -> None:
    """Compared runs have the requested order and their differences; a run of a hidden root gets 404."""
    ids = {one["run"]["key"]: one["run"]["id"] for one in found.get("/runs/summaries")["items"]}
    got = found.get("/runs/compare", run=[ids["team/b"], ids["team/c"], ids["team/a"], ids["team/b"]])
    assert [one["run"]["key"] for one in got["runs"]] == ["team/b", "team/c", "team/a"]
    assert (got["metric"], got["metric_names"]) == ("loss", ["loss", "lr"])
    assert [one["metric"]["min"]["value"] for one in got["runs"]] == [1.0, 0.25, 0.5]
    assert [len(one["series"]["points"]) for one in got["runs"]] == [2, 2, 3]
    facts = {one["name"]: one for one in got["facts"]}
    assert facts["lr"] == {
        "name": "lr",
        "is_metadata": True,
        "values": ["0.01", "0.001", "0.1"],
        "differs": True,
    }
    assert facts["model.name"]["values"] == ["7b", None, "7b"] and facts["model.name"]["differs"]
    assert not facts["Format"]["differs"] and facts["Root"]["differs"]
    alone = found.get("/runs/compare", run=ids["solo"], metric="loss")["runs"][0]
    assert (alone["metric"], alone["series"]) == (None, None)
    of_main = found.app.client("read", roots=["main"])
    assert set(keys(found, of_main)) == {"team/a", "team/b", "solo"}
    assert found.status("GET", "/runs/compare", of_main, params={"run": ids["team/c"]}) == 404
    assert found.status("GET", "/runs/compare", params={"run": [*range(1, 12)]}) == 422
    assert found.status("GET", "/runs/compare") == 422
    reader = Browser(found.app.client())
    reader.sign_in(found.app.key("read", roots=["main"], name="looks"))
    assert "note" not in reader.page("/runs").text
    assert reader.get(f"/runs?run={ids['team/c']}").status_code == 404


def test_pages_compare_runs_without_script(found: Catalog) -> None:
    """Runs selected in a form are compared on linear and logarithmic axes; the selection is kept."""
    browser = Browser(found.app.client())
    browser.sign_in(found.app.key("read", name="looks"))
    listed = browser.page("/runs?sort=metric&of=min&show=note&metadata=lr<0.5")
    assert listed.text.index("team/c") < listed.text.index("team/a") < listed.text.index("team/b")
    assert HOSTILE[1][:20] in listed.text and listed.form("/runs/compare").fields["metric"] == "loss"
    ticks = [given["value"] for name, given in listed.elements if given.get("type") == "checkbox"]
    assert len(ticks) == 3
    query = "&".join(f"run={number}" for number in ticks)
    for chosen in ("", "&scale=log", "&by=elapsed", "&by=date&scale=log", "&metric=lr", "&facts=differences"):
        page = browser.page(f"/runs/compare?{query}{chosen}")
        lines = [given["points"] for name, given in page.elements if name == "polyline"]
        assert len(lines) == 3 and "nan" not in "".join(lines) and "differs" in page.text, chosen
        assert ("Format" in page.text) == (chosen != "&facts=differences")
    again = browser.page(next(link for link in page.links if link.startswith("/runs?run=")))
    checked = [given["value"] for _, given in again.elements if "checked" in given]
    assert sorted(checked) == sorted(ticks)
    elsewhere = browser.page(f"/runs?contains=solo&{query}")
    assert "Also selected" in elsewhere.text and "solo" in elsewhere.text
    number = add_checkpoint(
        found.app.service.database, "solo/step-9", metrics={"loss": -2.0}, committed_seconds=T0
    )
    run_id = found.get(f"/checkpoints/{number}")["run_id"]
    page = browser.page(f"/runs/compare?run={run_id}&scale=log")
    assert "1 point at or below 0 is not on the logarithmic axis" in page.text
    assert "No runs are selected" in browser.page("/runs/compare").text
    assert "No matches" in browser.page("/runs?contains=nothing").text
    assert browser.get("/runs/compare?run=999").status_code == 404


@pytest.mark.each_database
def test_activity_of_a_run(catalog: Catalog) -> None:
    """A run is training until its next checkpoint is late, then stalled, then ended; unknown if too young."""
    now = time.time()
    ages = {
        "new": (5, 10),
        "train": (700, 100, 1300),
        "stall": (4000, 4600, 5200),
        "end": (4e6, 4.1e6, 4.2e6),
    }
    found = {}
    for run, seconds in ages.items():
        for number, age in enumerate(seconds):
            place = f"{run}/step-{number}"
            checkpoint = add_checkpoint(catalog.app.service.database, place, committed_seconds=now - age)
        run_id = catalog.get(f"/checkpoints/{checkpoint}")["run_id"]
        found[run] = catalog.get(f"/runs/{run_id}/activity")
    assert [one["state"] for one in found.values()] == ["unknown", "training", "stalled", "ended"]
    assert abs(found["train"]["interval_seconds"] - 600) < 1 and found["train"]["expected_at"]
    assert found["new"]["interval_seconds"] is None and found["stall"]["expected_at"] is None
    page = Browser(catalog.app.client())
    page.sign_in(catalog.app.key("read", name="looks"))
    text = page.page(f"/runs/{found['stall']['run_id']}").text
    assert "Stalled? The last checkpoint was saved 1 h ago ; one was expected every 10 min" in text
    other = catalog.app.client("read", roots=["other"])
    for path in ("activity", "events"):
        assert catalog.status("GET", f"/runs/{run_id}/{path}", other) == 404
