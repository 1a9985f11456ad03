"""Finding things: search, lookup by name, timelines and series of runs, lineage, and lists of tensors."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.catalog import Catalog, pages
from tests.support.pages import Browser

LAYERS = [*(f"Model.layers.{n}.attn.Q_proj.weight" for n in range(12)), "head.weight"]


@pytest.fixture
def searched(catalog: Catalog) -> Catalog:
    """Save ten steps of a run, one incomplete and one deleted, and another root with secret names."""
    for step in range(1, 11):
        seconds = {"slowest_rank_seconds": {"plan": 0.5, "write": 1.0, "local_plan": 0.4}} if step % 2 else {}
        key = f"Team/llama/step-{step}"
        tags = ("Nightly",) if step < 4 else ()
        metrics = {"loss": 1 / step}
        catalog.add(
            key,
            metrics=metrics,
            tags=tags,
            tensors=13,
            fqns=LAYERS,
            seconds=1_700_000_000.0 + step,
            provenance=seconds,
        )
    manifest = catalog.place("Team/llama/step-5/manifest.msgpack")
    manifest.rename(manifest.with_name("__0_0.0000abcd.distcp"))
    hidden = ["hidden.layers.7.attn.q_proj.weight", "mask"]
    catalog.add("secret/llama/step-3", "other", tags=("nightly-secret",), tensors=2, fqns=hidden)
    for root in ("main", "other"):
        catalog.scan(root)
    assert catalog.status("DELETE", "/checkpoints/8") == 200
    assert catalog.status("PUT", "/runs/1/aliases/best", json={"checkpoint_id": 7}) == 200
    return catalog


@pytest.fixture
def of_main(searched: Catalog) -> TestClient:
    """Return a client with a key for the root main alone."""
    return searched.app.client("read", roots=["main"])


def hits(searched: Catalog, text: str, client: TestClient | None = None, **query: Any) -> list[Any]:
    """Return kind, text and rank of all hits."""
    items = searched.get("/search", client, q=text, **query)["items"]
    return [(hit["kind"], hit["text"], hit["rank"]) for hit in items]


@pytest.mark.each_database  # their SQL differs
def test_search_finds_each_kind(searched: Catalog, of_main: TestClient) -> None:
    """Search ignores case and finds names, substrings, steps and paths, the best match first."""
    assert hits(searched, "LLAMA", of_main) == [("run", "Team/llama", 2)]
    assert hits(searched, "team/LLAMA", of_main) == [("run", "Team/llama", 0)]
    (tag,) = searched.get("/search", of_main, q="nightly")["items"]
    assert (tag["kind"], tag["text"], tag["rank"], tag["count"]) == ("tag", "Nightly", 0, 3)
    assert hits(searched, "es", of_main, kind="alias") == [("alias", "best", 3)]
    assert hits(searched, "7", of_main, kind="checkpoint") == [("checkpoint", "Team/llama/step-7", 0)]
    assert hits(searched, "step-1", of_main, limit=2) == [
        ("checkpoint", "Team/llama/step-1", 0),
        ("checkpoint", "Team/llama/step-10", 1),
    ]
    assert hits(searched, "llama/Step-9", of_main)[0] == ("checkpoint", "Team/llama/step-9", 0)
    (weight,) = searched.get("/search", of_main, q="q_PROJ")["items"]
    assert (weight["text"], weight["count"]) == ("Model.layers.0.attn.Q_proj.weight", 12)
    assert hits(searched, "layers.11", of_main) == [("tensor", "Model.layers.11.attn.Q_proj.weight", 2)]
    for nothing in ("layers.12", "%", "nothing"):
        assert hits(searched, nothing, of_main) == []
    assert searched.status("GET", "/search", params={"q": " "}) == 422


def test_search_reveals_nothing_of_hidden_roots(searched: Catalog, of_main: TestClient) -> None:
    """Search reveals no names and no counts of hidden roots; a key for all roots finds them."""
    for text in ("secret", "hidden", "mask", "layers.7.attn", "step-3", "3", "llama/step-3"):
        seen = searched.get("/search", of_main, q=text)["items"]
        assert all(hit["root"] in (None, "main") and "secret" not in hit["text"] for hit in seen), text
        everything = searched.get("/search", q=text)["items"]
        assert any(hit["root"] == "other" or "secret" in hit["text"] for hit in everything), text


def test_checkpoints_are_looked_up_by_key_step_or_alias(searched: Catalog, of_main: TestClient) -> None:
    """A checkpoint is looked up by key, step or alias, or as the latest of a run; hidden roots get 404."""

    def key(**name: Any) -> str:
        return str(searched.get("/checkpoints/lookup", **name)["key"])

    assert key(key="Team/llama/step-2") == "Team/llama/step-2"
    assert key(run="Team/llama", step=3) == "Team/llama/step-3"
    assert key(run="Team/llama", alias="best") == "Team/llama/step-7"
    assert key(run="Team/llama") == "Team/llama/step-10"
    assert key(run="secret/llama", step=3, root="other") == "secret/llama/step-3"
    for name in ({"key": "secret/llama/step-3"}, {"run": "secret/llama"}):
        assert searched.status("GET", "/checkpoints/lookup", of_main, params=name) == 404
    wrongs: list[dict[str, Any]] = [{}, {"key": "a", "run": "b"}, {"key": "a", "step": 1}]
    for wrong in (*wrongs, {"run": "a", "step": 1, "alias": "b"}):
        assert searched.status("GET", "/checkpoints/lookup", params=wrong) == 422, wrong


def test_timelines_and_series_keep_their_extremes(searched: Catalog, of_main: TestClient) -> None:
    """Each checkpoint counts once in a timeline; extremes, last values and aliases survive few bins."""
    found = searched.get("/runs/1/timeline", of_main, metric="loss", points=4)
    assert (found["count"], found["metric_names"]) == (10, ["loss"])
    assert sum(one["count"] for one in found["bins"]) == 10
    states: dict[str, int] = {}
    for one in found["bins"]:
        for state, count in one["states"].items():
            states[state] = states.get(state, 0) + count
    assert states == {"committed": 8, "incomplete": 1, "deleted": 1}
    first = found["bins"][0]
    losses = [1 / step for step in range(first["first_step"], first["last_step"] + 1)]
    (loss,) = first["metrics"]
    assert (loss["max"], loss["min"], loss["last"]) == (losses[0], losses[-1], losses[-1])
    assert loss["mean"] == pytest.approx(sum(losses) / len(losses))
    assert [one["aliases"] for one in found["bins"] if one["aliases"]] == [["best"]]
    assert searched.get("/runs/1/timeline", min_step=99)["bins"] == []
    series = searched.get("/runs/1/series", metric="loss", points=100)
    assert [point["mean"] for point in series["points"]] == [1 / n for n in (1, 2, 3, 4, 6, 7, 9, 10)]
    few = searched.get("/runs/1/series", metric="loss", points=3)
    assert (few["count"], sum(point["count"] for point in few["points"])) == (8, 8)
    stranger = searched.app.client("read", roots=["other"])
    for path in ("timeline", "series?metric=loss"):
        assert searched.status("GET", f"/runs/1/{path}", stranger) == 404
    assert searched.status("GET", "/runs/1/series?metric=los") == 422


def lineage(catalog: Catalog, number: int, client: TestClient | None = None) -> Any:
    """Return the distance of each relative, and the edges between relatives."""
    found = catalog.get(f"/checkpoints/{number}/lineage", client)
    edges = {(edge["child_id"], edge["parent_id"], edge["kind"]) for edge in found["edges"]}
    return {node["id"]: node["distance"] for node in found["nodes"]}, edges


def test_lineage_shows_visible_ancestors_and_descendants(catalog: Catalog) -> None:
    """Lineage has ancestors and descendants, ends at cycles, and leaves out hidden roots."""
    base = catalog.add("run/a", save_id="base", provenance={"resumed_from": {"save_id": "ring"}})
    fine = catalog.add("run/b", save_id="fine", provenance={"resumed_from": {"save_id": "base"}})
    other = catalog.add("run/e", save_id="other", provenance={"resumed_from": {"save_id": "base"}})
    hidden = catalog.add("far/f", "other", save_id="far", provenance={"resumed_from": {"save_id": "fine"}})
    behind = catalog.add("run/g", save_id="ring", provenance={"resumed_from": {"save_id": "far"}})
    nodes, edges = lineage(catalog, fine)
    assert nodes.keys() == {base, fine, hidden, behind}
    assert {(fine, base, "resumed_from"), (hidden, fine, "resumed_from")} <= edges
    nodes, edges = lineage(catalog, fine, catalog.app.client("read", roots=["main"]))
    assert hidden not in nodes and all(hidden not in edge for edge in edges)
    assert nodes[fine] == 0 and nodes[base] == -1
    assert other not in nodes
    stranger = catalog.app.client("read", roots=["other"])
    assert catalog.status("GET", f"/checkpoints/{fine}/lineage", stranger) == 404


def test_tensors_are_listed_filtered_and_summed_in_trees(catalog: Catalog) -> None:
    """Tensors come from the catalog alone, in natural order, filtered by glob and dtype; trees have sums."""
    names = [f"layers.{n}.{part}" for n in range(12) for part in ("w", "b")]
    names += ["a.b", "a.b-x", "a.b.c", "50%_a.x"]
    number = catalog.add("run/step-1", tensors=len(names), fqns=names)
    path = f"/checkpoints/{number}/tensors"
    catalog.place("run/step-1/manifest.msgpack").unlink()
    found = [one["fqn"] for one in pages(catalog.http, path, limit=7)]
    assert sorted(found) == sorted(names)
    assert found.index("layers.2.b") < found.index("layers.10.b")
    page = catalog.get(path, glob="layers.*.w", limit=3)
    assert [one["fqn"] for one in page["items"]] == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert (page["items"][0]["dtype"], page["items"][0]["shape"]) == ("bfloat16", [4, 8])
    assert catalog.get(path, dtype="int8")["items"] == catalog.get(path, kind="object")["items"] == []
    for wrong in ({"cursor": page["next_cursor"]}, {"glob": "*" * 300}):
        assert catalog.status("GET", path, params=wrong) == 422
    tree = {one["name"]: (one["tensors"], one["bytes"]) for one in pages(catalog.http, f"{path}/tree")}
    assert tree == {"50%_a": (1, 64), "a": (3, 192), "layers": (24, 24 * 64)}
    below = catalog.get(f"{path}/tree", prefix="a")["items"]
    assert [(one["name"], one["tensors"], one["entry"] is not None) for one in below] == [
        ("b", 2, True),
        ("b-x", 1, True),
    ]
    assert [one["name"] for one in pages(catalog.http, f"{path}/tree", prefix="layers", limit=5)] == [
        str(n) for n in range(12)
    ]
    assert catalog.get(f"{path}/tree", prefix="nothing")["items"] == []
    top = pages(catalog.http, f"{path}/tree", collapsed=True, limit=2)
    assert [(one["name"], one["tensors"], one["entry"] is not None) for one in top] == [
        ("50%_a.x", 1, True),
        ("a", 3, False),
        ("layers", 24, False),
    ]
    deep = catalog.add("run/step-2", tensors=3, fqns=["m.d.l.0.w", "m.d.l.0.b", "m.d.l.1.attn.w"])
    levels = f"/checkpoints/{deep}/tensors/tree"
    assert [one["name"] for one in catalog.get(levels, collapsed=True)["items"]] == ["m.d.l"]
    (_, last) = catalog.get(levels, prefix="m.d.l", collapsed=True)["items"]
    assert (last["name"], last["entry"]["fqn"]) == ("1.attn.w", "m.d.l.1.attn.w")
    browser = Browser(catalog.app.client())
    browser.sign_in(catalog.app.key("read", name="looks"))
    page = browser.page(f"/checkpoints/{deep}?prefix=m.d.l.0")
    assert "Place in the tree" not in page.text and "top m.d.l 0" in page.text
