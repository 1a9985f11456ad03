"""Merges as jobs: of several roots and formats, registered with all their sources as parents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from sqlalchemy import select, update

import dcp
from dcp.demo.s3_server import S3Server
from dcp.server.catalog.errors import MissingError, StateError
from dcp.server.catalog.labelling.lineage import lineage_of
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, checkpoints, events
from dcp.server.jobs.kinds.merge import MergeParams
from dcp.server.problems import ProblemError
from dcp.server.security.principal import Principal
from tests.support.kind_runs import KindRuns

_SHAPE = (20, 30)


def weight(number: int) -> torch.Tensor:
    """Of the source of that number."""
    torch.manual_seed(number)
    return torch.randn(_SHAPE)


def summed(weights: list[float]) -> torch.Tensor:
    """In float32, in order."""
    total = None
    for number, factor in enumerate(weights):
        term = weight(number).numpy() * np.float32(factor)
        total = term if total is None else total + term
    assert total is not None
    return torch.from_numpy(total)


def save_sources(root: str, other: str, **options: Any) -> None:
    """Two steps of a run under one root, and one under another."""
    for number in range(2):
        state = {"weight": weight(number), "step": number}
        place = f"{root}/run/step-{number}"
        dcp.save(state, checkpoint_id=place, no_dist=True, user_metadata={"step": number}, **options)
    dcp.save({"weight": weight(2)}, checkpoint_id=f"{other}/third", no_dist=True, **options)


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """Three checkpoints in two local roots."""
    save_sources(str(tmp_path / "main"), str(tmp_path / "export"))
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "export")}
    made = KindRuns(database, tmp_path / "work", roots)
    made.scan("main")
    made.scan("export")
    return made


def ids(runs: KindRuns) -> list[int]:
    """Of the three."""
    return [runs.id("main", "run/step-0"), runs.id("main", "run/step-1"), runs.id("export", "third")]


def check(runs: KindRuns, key: str, sources: list[int], root: str = "export") -> None:
    """It is in the catalog, with all sources as its parents; so the audit log calls it."""
    row = runs.row(root, key)
    assert row.state == "committed" and row.structure_id is not None
    with runs.database.read() as connection:
        edges = lineage_of(connection, row.id).edges
    assert [(edge.child_id, edge.parent_id, edge.kind) for edge in edges] == [
        (row.id, source, "merged_from") for source in sorted(sources)
    ]
    told = runs.all(select(events).where(events.c.checkpoint_id == row.id).order_by(events.c.id))
    assert [one.kind for one in told] == ["checkpoint.committed", "checkpoint.converted"]
    log = runs.all(select(audit.c.action).where(audit.c.target == f"checkpoint:{row.id}"))
    assert {one.action for one in log} == {"checkpoint.register", "checkpoint.merge"}


@pytest.mark.parametrize(
    ("to", "key", "options", "weights"),
    [
        ("safetensors", "a/soup.safetensors", {"weights": [0.5, 0.3, 0.2]}, [0.5, 0.3, 0.2]),
        ("dcp", "a/arithmetic", {"formula": "A + 0.4*(B - C)"}, [1.0, 0.4, -0.4]),
        ("torch", "average.pt", {"decay": 0.5}, [4 / 7, 2 / 7, 1 / 7]),
    ],
)
def test_from_two_roots(
    runs: KindRuns, tmp_path: Path, to: str, key: str, options: Any, weights: list[float]
) -> None:
    """Each format, each way to say the weights: the sum, and where it comes from."""
    sources = ids(runs)
    job = runs.do(
        "merge", sources=sources, to=to, target_root="export", target_key=key, only=["weight"], **options
    )
    assert job.state == "succeeded" and job.result is not None, job.error
    assert torch.equal(dcp.read(tmp_path / "export" / key)["weight"], summed(weights))
    check(runs, key, sources)
    assert [(one["id"], one["weight"]) for one in job.result["sources"]] == list(
        zip(sources, weights, strict=True)
    )
    assert str(tmp_path) not in json.dumps(job.result)


def test_under_another_definition(runs: KindRuns, tmp_path: Path) -> None:
    """The map is of all sources."""
    rules = [{"from": {"weight": "rows columns"}, "to": {"turned": "columns rows"}}]
    job = runs.do(
        "merge",
        sources=ids(runs),
        to="dcp",
        target_root="export",
        target_key="turned",
        only=["weight"],
        map={"name": "turn", "rules": rules},
    )
    assert job.state == "succeeded" and job.result is not None, job.error
    assert job.result["map"] == "turn"
    assert torch.equal(dcp.read(tmp_path / "export/turned")["turned"], summed([1 / 3] * 3).T)


def test_adapters(runs: KindRuns, tmp_path: Path) -> None:
    """A checkpoint of the catalog like any other, and a parent."""
    folder = tmp_path / "main/lora"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 3}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {"lora_A.weight": torch.ones(1, _SHAPE[1]), "lora_B.weight": torch.full((_SHAPE[0], 1), 2.0)}
    save_file(
        {f"base_model.model.m.{name}": value for name, value in factors.items()},
        folder / "adapter_model.safetensors",
    )
    dcp.save({"m.weight": torch.ones(_SHAPE)}, checkpoint_id=tmp_path / "main/base", no_dist=True)
    runs.scan("main")
    base, lora = runs.id("main", "base"), runs.id("main", "lora/adapter_model.safetensors")
    target = {"to": "dcp", "target_root": "export", "target_key": "tuned"}
    job = runs.do("merge", sources=[base], adapters=[lora], adapter_weights=[0.5], **target)
    assert job.state == "succeeded", job.error
    assert torch.equal(dcp.read(tmp_path / "export/tuned")["m.weight"], torch.full(_SHAPE, 1 + 0.5 * 3 * 2.0))
    check(runs, "tuned", [base, lora])


def test_on_s3(database: Database, tmp_path: Path, s3_server: S3Server, s3_root: str) -> None:
    """Sources and target behind a store."""
    options = s3_server.storage_options
    save_sources(f"{s3_root}/main", f"{s3_root}/export", storage_options=options)
    roots = {name: {"url": f"{s3_root}/{name}", "storage_options": options} for name in ("main", "export")}
    runs = KindRuns(database, tmp_path / "work", roots)
    runs.scan("main")
    runs.scan("export")
    target = {"to": "safetensors", "target_root": "export", "target_key": "soup.safetensors"}
    job = runs.do("merge", sources=ids(runs), only=["weight"], **target)
    assert job.state == "succeeded", job.error
    made = dcp.read(f"{s3_root}/export/soup.safetensors", storage_options=options)
    assert torch.equal(made["weight"], summed([1 / 3] * 3))
    check(runs, "soup.safetensors", ids(runs))


def test_what_does_not_go_together_fails_for_good(runs: KindRuns, tmp_path: Path) -> None:
    """With the names of the tensors and the roots', and no path; so do sums that are no numbers."""
    target = {"to": "dcp", "target_root": "export", "target_key": "out"}
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "main/other", no_dist=True)
    dcp.save({"weight": torch.full(_SHAPE, torch.inf)}, checkpoint_id=tmp_path / "main/inf", no_dist=True)
    runs.scan("main")
    for name, words in (("other", "'weight' has the shapes"), ("inf", "'weight' (600 NaN or infinite)")):
        sources = [ids(runs)[0], runs.id("main", name)]
        job = runs.do("merge", sources=sources, **target)
        assert job.state == "failed" and words in str(job.error)
        assert str(tmp_path) not in str(job.error)
        assert [path.name for path in (tmp_path / "export").iterdir()] == ["third"]


def run_id(runs: KindRuns) -> int:
    """Of the run in the root "main"."""
    return int(runs.row("main", "run/step-0").run_id)


_EMA: dict[str, Any] = {"to": "dcp", "target_root": "main", "only": ["weight"], "decay": 0.5}


def test_the_newest_steps_of_a_run(runs: KindRuns, tmp_path: Path) -> None:
    """As they are when the job is planned; the result and the lineage say which these were. What a job has
    made of the run is none of its steps, though it is in its folder and has the step of the newest."""
    number = runs.submit("merge", run_id=run_id(runs), last=2, target_key="run/ema", **_EMA)
    place = tmp_path / "main/run/step-2"
    dcp.save({"weight": weight(2)}, checkpoint_id=place, no_dist=True, user_metadata={"step": 2})
    runs.scan("main")
    runs.drain()
    job = runs.job(number)
    assert job.state == "succeeded" and job.result is not None, job.error
    newest = [runs.id("main", f"run/step-{step}") for step in (2, 1)]
    assert [(one["id"], one["step"]) for one in job.result["sources"]] == list(
        zip(newest, [2, 1], strict=True)
    )
    assert [one["weight"] for one in job.result["sources"]] == [2 / 3, 1 / 3]
    total = weight(2).numpy() * np.float32(2 / 3) + weight(1).numpy() * np.float32(1 / 3)
    assert np.array_equal(dcp.read(tmp_path / "main/run/ema")["weight"].numpy(), total)
    check(runs, "run/ema", newest, root="main")
    assert runs.row("main", "run/ema").step == 2
    again = runs.do("merge", run_id=run_id(runs), last=3, target_key="run/more", **_EMA)
    assert again.state == "succeeded" and again.result is not None, again.error
    assert [one["step"] for one in again.result["sources"]] == [2, 1, 0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "there are 2 committed steps, and 3 are asked for"),
        ({"verification": "damaged"}, "step 0 was found damaged when it was verified"),
        ({"state": "unreadable"}, "step 0 is damaged"),
        ({"user_metadata": {"partial": ["model"]}}, "step 0 has only model"),
        ({"step": 1}, "step 1 is there 2 times"),
        ({"state": "deleted"}, "there are 1 committed steps"),
    ],
)
def test_steps_that_cannot_be_counted_on(runs: KindRuns, values: dict[str, Any], words: str) -> None:
    """Named before there is a job; one that comes to be so later fails for good."""
    given = {"run_id": run_id(runs), "last": 2 if values else 3, "target_key": "run/ema", **_EMA}
    number = runs.submit("merge", **given) if values else None
    runs.database.transact(
        lambda connection: (
            connection.execute(
                update(checkpoints).where(checkpoints.c.id == runs.id("main", "run/step-0")).values(**values)
            )
            if values
            else None
        )
    )
    with pytest.raises(StateError, match=words):
        runs.submit("merge", **given | {"target_key": "run/other"})
    if number is not None:
        made = runs.claim()
        assert made is not None
        answer = runs.carry_out(made)
        assert isinstance(answer, StateError) and words in str(answer)


def test_only_what_may_be_seen_is_merged(runs: KindRuns) -> None:
    """All sources must be in roots of the key; the target is in none of them."""
    caller = Principal(name="ann", scopes=frozenset({"read", "write", "convert"}), roots=frozenset({"main"}))
    with pytest.raises(MissingError):
        runs.submit("merge", caller, sources=ids(runs), to="dcp", target_key="x")
    other = Principal(name="bob", scopes=frozenset({"convert"}), roots=frozenset({"export"}))
    with pytest.raises(MissingError, match="there is no run"):
        runs.submit("merge", other, run_id=run_id(runs), last=1, to="dcp", target_key="x")
    with pytest.raises(ProblemError, match="in the source itself"):
        runs.submit("merge", sources=ids(runs), to="dcp", target_root="export", target_key="third")


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": [1.0]},
        {"weights": [1.0, 1.0], "formula": "A+B"},
        {"weights": [1.0, float("nan")]},
        {"formula": "A"},
        {"formula": "A*B"},
        {"decay": 1.0},
        {"adapter_weights": [1.0]},
        {"sources": []},
        {"sources": [1, 1]},
        {"accumulate": "float16"},
        {"run_id": 1},
        {"last": 2},
        {"run_id": 1, "last": 2},
        {"sources": [], "run_id": 1, "last": 2, "weights": [1, 1]},
        {"sources": [], "run_id": 1, "last": 0},
        {"map": "llama:hf-to-titan", "adapters": [3]},
    ],
)
def test_parameters_that_cannot_be(wrong: dict[str, Any]) -> None:
    """Told at once, and not by a job that fails."""
    with pytest.raises(ValidationError):
        MergeParams.model_validate({"sources": [1, 2], "to": "dcp", "target_key": "x", **wrong})
