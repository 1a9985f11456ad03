"""To what one looks for: runs as bins, counts beside filters, one by its name, search. On both databases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dcp.server.catalog.checkpoints import CheckpointFacts, set_state, upsert_checkpoints
from dcp.server.catalog.contents import patterns
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor, prepare_structures
from dcp.server.catalog.errors import InvalidQueryError, MissingError
from dcp.server.catalog.labelling.aliases import set_alias
from dcp.server.catalog.labelling.labels import Change
from dcp.server.catalog.queries.facets import checkpoint_facets
from dcp.server.catalog.queries.filters import CheckpointFilter
from dcp.server.catalog.queries.listing import list_checkpoints
from dcp.server.catalog.queries.lookup import CheckpointName, find_checkpoint
from dcp.server.catalog.queries.search import search
from dcp.server.catalog.queries.timeline import run_timeline
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.records.search import SearchHit

pytestmark = pytest.mark.each_database  # their SQL differs

MAIN = frozenset({"main"})
CHANGE = Change(actor="test", now=1.0)


def structure(*names: str) -> StructureFacts:
    """Of tensors with these names."""
    return StructureFacts.of([StructureTensor(name, "tensor", "bfloat16", (2,), 4) for name in names])


LAYERS = structure(*(f"Model.layers.{n}.attn.Q_proj.weight" for n in range(12)), "head.weight")
SECRET = structure("hidden.layers.7.attn.q_proj.weight", "mask")


def facts(key: str, **given: Any) -> CheckpointFacts:
    """Of a committed checkpoint; its step is the number at the end of its key."""
    step = int(key.rpartition("-")[2])
    known = {"format": "dcp", "committed_seconds": 100.0 + step, "step": step, "bytes": 10 * step}
    return CheckpointFacts(**{"root": "main", "key": key, "observed_seconds": 1.0, **known, **given})


@pytest.fixture
def catalog(database: Database) -> Database:
    """Ten steps of a run, one of them incomplete and one deleted; another format; another root."""
    seconds = {"slowest_rank_seconds": {"plan": 0.5, "write": 1.0, "local_plan": 0.4}}
    mine = [
        facts(
            f"Team/llama/step-{n}",
            structure=LAYERS,
            metrics={"loss": 1 / n},
            provenance=seconds if n % 2 else None,
            tags=frozenset({"Nightly"} if n < 4 else ()),
        )
        for n in range(1, 11)
    ]
    mine[4] = replace(mine[4], state="incomplete", metrics={})
    others = [
        facts("Team/llama/model-3", format="safetensors"),
        facts("secret/llama/step-3", root="other", structure=SECRET, tags=frozenset({"nightly-secret"})),
    ]
    with database.write() as connection:
        sync_roots(connection, {"main": "/main", "other": "/other"})
        ids = [one.id for one in upsert_checkpoints(connection, [*mine, *others])]
        set_alias(connection, 1, "best", ids[6], CHANGE)
        set_state(connection, ids[7], "deleted", actor="test", now=5.0)
    return database


def test_a_run_in_bins(catalog: Database) -> None:
    """Each checkpoint counts once; extremes, last values, states and aliases stay right."""
    with catalog.read() as connection:
        found = run_timeline(connection, 1, names=["loss"], points=4)
        assert (found.count, found.metric_names) == (11, ("loss",))
        assert [(one.first_step, one.last_step, one.count) for one in found.bins] == [
            (1, 3, 3),
            (3, 5, 3),
            (6, 8, 3),
            (9, 10, 2),
        ]
        first, second, third, _ = found.bins
        assert first.bytes is not None and first.save_seconds is not None
        assert (first.bytes.min, first.bytes.max, first.bytes.mean, first.bytes.last) == (10, 30, 20, 30)
        assert (first.save_seconds.count, first.save_seconds.max) == (1, 1.5)
        assert [(one.name, one.last, one.max) for one in first.metrics] == [("loss", 1 / 2, 1.0)]
        assert second.states == {"committed": 2, "incomplete": 1}
        assert (third.states, third.aliases) == ({"committed": 2, "deleted": 1}, ("best",))
        assert [one.count for one in run_timeline(connection, 1, min_step=9).bins] == [1, 1]
        assert run_timeline(connection, 1, min_step=99).bins == ()
        with pytest.raises(MissingError):
            run_timeline(connection, 1, frozenset({"other"}))


def test_counts_are_those_of_the_lists(catalog: Database) -> None:
    """Each value counts what the list has with it; of other roots nothing is counted."""
    wanted = CheckpointFilter(run="Team/llama", formats=frozenset({"dcp"}))
    with catalog.read() as connection:
        found = {one.name: one for one in checkpoint_facets(connection, wanted, MAIN).facets}
        for name, field in (("state", "states"), ("format", "formats")):
            for value in found[name].values:
                only: dict[str, Any] = {field: frozenset({value.value})}
                narrowed = replace(wanted, **only)
                assert value.count == len(list_checkpoints(connection, narrowed, visible=MAIN).checkpoints)
        assert {one.value for one in found["state"].values} == {"committed", "incomplete", "deleted"}
        assert [(one.value, one.count) for one in found["tag"].values] == [("Nightly", 3)]
        assert [(one.value, one.count) for one in found["dtype"].values] == [("bfloat16", 8)]
        assert [(one.value, one.root) for one in found["run"].values] == [("Team/llama", "main")]
        everything = checkpoint_facets(connection, CheckpointFilter(states=frozenset()), MAIN)
        assert "secret" not in repr(everything)
        assert [one.value for one in checkpoint_facets(connection, wanted).facets[4].values] == ["main"]
        assert everything.count == 11 and not everything.is_cut


def test_one_by_its_name(catalog: Database) -> None:
    """By key, step, alias or as the latest; a committed one first; nothing of a root that is not visible."""
    with catalog.read() as connection:

        def key(visible: frozenset[str] | None = None, **name: Any) -> str:
            return find_checkpoint(connection, CheckpointName(**name), visible).key

        assert key(key="Team/llama/step-2") == "Team/llama/step-2"
        assert key(run="Team/llama", step=3) == "Team/llama/step-3"
        assert key(run="Team/llama", step=5) == "Team/llama/step-5"
        assert key(run="Team/llama", alias="best") == "Team/llama/step-7"
        assert key(run="Team/llama") == "Team/llama/step-10"
        assert key(run="secret/llama", step=3, root="other") == "secret/llama/step-3"
        hidden: list[tuple[str, dict[str, Any]]] = [
            ("main", {"key": "secret/llama/step-3"}),
            ("main", {"run": "secret/llama"}),
            ("other", {"run": "Team/llama", "step": 4}),
        ]
        for root, name in hidden:
            with pytest.raises(MissingError):
                key(frozenset({root}), **name)
    wrongs: list[dict[str, Any]] = [
        {},
        {"key": "a", "run": "b"},
        {"key": "a", "step": 1},
        {"run": "a", "step": 1, "alias": "b"},
    ]
    for wrong in wrongs:
        with pytest.raises(InvalidQueryError):
            CheckpointName(**wrong)


def test_search_finds_each_kind(catalog: Database) -> None:
    """Whatever letters are large: names, parts, steps and paths, the best first."""
    with catalog.read() as connection:

        def hits(text: str, visible: frozenset[str] | None = MAIN, **options: Any) -> list[SearchHit]:
            return list(search(connection, text, visible, **options).items)

        def told(text: str, **options: Any) -> list[tuple[str, str, int]]:
            return [(hit.kind, hit.text, hit.rank) for hit in hits(text, **options)]

        assert told("LLAMA") == [("run", "Team/llama", 2)]
        assert told("team/LLAMA") == [("run", "Team/llama", 0)]
        assert told("nightly") == [("tag", "Nightly", 0)]
        assert [hit.count for hit in hits("nightly")] == [3]
        assert told("es", kinds=["alias"]) == [("alias", "best", 3)]
        assert told("7", kinds=["checkpoint"]) == [
            ("checkpoint", "Team/llama/step-7", 0),
        ]
        assert told("step-1", limit=2) == [
            ("checkpoint", "Team/llama/step-1", 0),
            ("checkpoint", "Team/llama/step-10", 1),
        ]
        assert told("llama/Step-9")[0] == ("checkpoint", "Team/llama/step-9", 0)
        (weight,) = hits("q_PROJ")
        assert (weight.text, weight.count) == ("Model.layers.0.attn.Q_proj.weight", 12)
        assert (weight.checkpoint_id, weight.rank) == (hits("step-9")[0].checkpoint_id, 2)
        assert told("layers.11") == [("tensor", "Model.layers.11.attn.Q_proj.weight", 2)]
        assert told("Model.layers.3.") == [("tensor", "Model.layers.3.attn.Q_proj.weight", 1)]
        assert told("layers.12") == told("%") == told("nothing") == []
        with pytest.raises(InvalidQueryError):
            hits(" ")


def test_search_tells_nothing_of_other_roots(catalog: Database) -> None:
    """Neither names nor that there are any; with the key for them all of it."""
    with catalog.read() as connection:
        for text in ("secret", "hidden", "mask", "layers.7.attn", "step-3", "3", "llama/step-3"):
            seen = search(connection, text, MAIN).items
            assert all(hit.root in (None, "main") and "secret" not in hit.text for hit in seen), text
            assert "other" in {hit.root for hit in search(connection, text).items}, text
        assert search(connection, "nightly", frozenset()).items == ()


def test_patterns_of_large_structures(catalog: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure that is written as a draft is found as well; of one with very many patterns some are."""
    monkeypatch.setattr(patterns, "_MAX_PATTERNS", 5)
    large = structure(*(f"block.{n}.weight" for n in range(2_500)), *(f"odd{'x' * n}" for n in range(1, 9)))
    prepare_structures(catalog, [large])
    with catalog.write() as connection:
        upsert_checkpoints(connection, [facts("big/step-1", structure=large)])
    with catalog.read() as connection:
        found = Counter({hit.text: hit.count for hit in search(connection, "BLOCK").items})
        assert found == {"block.0.weight": 2_500}
        assert search(connection, "block.2499").items[0].text == "block.2499.weight"
        assert len(search(connection, "odd").items) == 4
