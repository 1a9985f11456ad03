"""Merge jobs: sources of several roots and formats, registered as parents of the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dcp
from tests.support.catalog_rows import add_checkpoint
from tests.support.databases import MakeDatabase
from tests.support.job_site import JobSite, RefusedError, running_jobs

_SHAPE = (20, 30)
_EMA: dict[str, Any] = {"to": "dcp", "target_root": "main", "only": ["weight"], "decay": 0.5}


def weight(number: int) -> torch.Tensor:
    """Return the weight of the source with this number."""
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(number))


def summed(factors: list[float]) -> torch.Tensor:
    """Return the weighted sum in float32, added in order."""
    terms = [weight(number).numpy() * np.float32(factor) for number, factor in enumerate(factors)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return torch.from_numpy(total)


@pytest.fixture
def site(make_database: MakeDatabase, tmp_path: Path) -> Iterator[JobSite]:
    """Start a catalog with two steps of a run in one root, and a checkpoint in another root."""
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "export")}
    for number in range(2):
        values = {"weight": weight(number), "step": number}
        place = tmp_path / f"main/run/step-{number}"
        dcp.save(values, checkpoint_id=place, no_dist=True, user_metadata={"step": number})
    dcp.save({"weight": weight(2)}, checkpoint_id=tmp_path / "export/third", no_dist=True)
    with running_jobs(make_database(), tmp_path, roots) as made:
        made.scan("main", "export")
        yield made


def ids(site: JobSite) -> list[int]:
    """Return the ids of the three checkpoints."""
    return [site.id("main", "run/step-0"), site.id("main", "run/step-1"), site.id("export", "third")]


def run_id(site: JobSite) -> int:
    """Return the id of the run in the root "main"."""
    return int(site.found("main", "run/step-0").run_id)


def check(site: JobSite, key: str, sources: list[int], root: str = "export") -> None:
    """Check that the target is in the catalog, with all sources as parents and a single audit entry."""
    row = site.found(root, key)
    assert row.state == "committed" and row.tensor_count
    assert site.edges(row.id) == [(row.id, source, "merged_from") for source in sorted(sources)]
    assert len(site.audited("checkpoint.merge", row.id)) == 1


@pytest.mark.parametrize(
    ("to", "key", "options", "weights"),
    [
        ("safetensors", "a/soup.safetensors", {"weights": [0.5, 0.3, 0.2]}, [0.5, 0.3, 0.2]),
        ("dcp", "a/arithmetic", {"formula": "A + 0.4*(B - C)"}, [1.0, 0.4, -0.4]),
        pytest.param(
            *("torch", "average.pt", {"decay": 0.5}, [4 / 7, 2 / 7, 1 / 7]), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_merges_from_two_roots(
    site: JobSite, tmp_path: Path, to: str, key: str, options: Any, weights: list[float]
) -> None:
    """A merge sums in each format and for each form of weights, and records its sources."""
    target = {"to": to, "target_root": "export", "target_key": key}
    result = site.result("merge", sources=ids(site), only=["weight"], **target, **options)
    assert torch.equal(dcp.read(tmp_path / "export" / key)["weight"], summed(weights))
    check(site, key, ids(site))
    shown = [(one["id"], one["weight"]) for one in result["sources"]]
    assert shown == list(zip(ids(site), weights, strict=True))
    assert str(tmp_path) not in json.dumps(result)


def test_adapters_are_merged(site: JobSite, tmp_path: Path) -> None:
    """An adapter of the catalog is merged like a checkpoint, and becomes a parent."""
    folder = tmp_path / "main/lora"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 3}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {"lora_A.weight": torch.ones(1, _SHAPE[1]), "lora_B.weight": torch.full((_SHAPE[0], 1), 2.0)}
    named = {f"base_model.model.m.{name}": value for name, value in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    dcp.save({"m.weight": torch.ones(_SHAPE)}, checkpoint_id=tmp_path / "main/base", no_dist=True)
    site.scan("main")
    base, lora = site.id("main", "base"), site.id("main", "lora/adapter_model.safetensors")
    target = {"to": "dcp", "target_root": "export", "target_key": "tuned"}
    site.result("merge", sources=[base], adapters=[lora], adapter_weights=[0.5], **target)
    assert torch.equal(dcp.read(tmp_path / "export/tuned")["m.weight"], torch.full(_SHAPE, 1 + 0.5 * 3 * 2.0))
    check(site, "tuned", [base, lora])


def test_incompatible_sources_fail_for_good(site: JobSite, tmp_path: Path) -> None:
    """Different shapes and sums that are not finite fail for good; the error names tensors and no path."""
    target = {"to": "dcp", "target_root": "export", "target_key": "out"}
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "main/other", no_dist=True)
    dcp.save({"weight": torch.full(_SHAPE, torch.inf)}, checkpoint_id=tmp_path / "main/inf", no_dist=True)
    site.scan("main")
    for name, words in (
        ("other", "'weight' has different shapes"),
        ("inf", "'weight' (600 NaN or infinite)"),
    ):
        job = site.do("merge", sources=[ids(site)[0], site.id("main", name)], **target)
        assert job.state == "failed" and words in str(job.error)
        assert str(tmp_path) not in str(job.error)
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["third"]


def test_merges_of_the_newest_steps(site: JobSite, tmp_path: Path) -> None:
    """A merge of the newest steps takes the steps at the time of its plan, without earlier targets."""
    number = site.submit("merge", run_id=run_id(site), last=2, target_key="run/ema", **_EMA)
    place = tmp_path / "main/run/step-2"
    dcp.save({"weight": weight(2)}, checkpoint_id=place, no_dist=True, user_metadata={"step": 2})
    site.scan("main")
    site.worker.drain()
    sources = site.job(number).result["sources"]
    newest = [site.id("main", f"run/step-{step}") for step in (2, 1)]
    assert [(one["id"], one["step"], one["weight"]) for one in sources] == [
        (newest[0], 2, 2 / 3),
        (newest[1], 1, 1 / 3),
    ]
    total = weight(2).numpy() * np.float32(2 / 3) + weight(1).numpy() * np.float32(1 / 3)
    assert np.array_equal(dcp.read(tmp_path / "main/run/ema")["weight"].numpy(), total)
    check(site, "run/ema", newest, root="main")
    assert site.found("main", "run/ema").step == 2
    more = site.result("merge", run_id=run_id(site), last=3, target_key="run/more", **_EMA)
    assert [one["step"] for one in more["sources"]] == [2, 1, 0]


def test_unusable_steps_are_refused(site: JobSite, tmp_path: Path) -> None:
    """Missing, damaged, partial and duplicate steps are refused before a job exists."""
    run, database = run_id(site), site.app.service.database
    given = {"run_id": run, "target_key": "run/ema", **_EMA}

    def refused(last: int, words: str) -> None:
        with pytest.raises(RefusedError, match=words):
            site.submit("merge", last=last, **given | {"target_key": "run/other"})

    refused(3, "3 committed steps are required, but only 2 exist")
    (data,) = (tmp_path / "main/run/step-0").glob("*.distcp")
    data.write_bytes(b"x" * data.stat().st_size)
    site.result("verify", checkpoint_id=site.id("main", "run/step-0"))
    refused(2, "step 0 was found damaged by a verification")
    add_checkpoint(database, "run/step-7", user_metadata={"partial": ["model"]})
    refused(1, "step 7 has only model")
    add_checkpoint(database, "run/again-7")
    refused(1, "step 7 exists 2 times")


def test_a_step_deleted_while_the_job_waits(site: JobSite, tmp_path: Path) -> None:
    """A step deleted after the submission fails the job for good, with the number of steps left."""
    number = site.submit("merge", run_id=run_id(site), last=2, target_key="run/ema", **_EMA)
    site.http.delete(f"/api/v1/checkpoints/{site.id('main', 'run/step-1')}").raise_for_status()
    site.worker.drain()
    job = site.job(number)
    assert job.state == "failed" and "2 committed steps are required, but only 1 exist" in job.error["detail"]
    assert not job.error["is_retryable"]


@pytest.mark.parametrize("param", ["sources", "adapters"])
def test_merges_are_visible_with_all_source_roots(param: str, site: JobSite) -> None:
    """A merge, whose result and errors name its sources, is visible only to keys for all of their roots."""
    here, _, there = ids(site)
    own = site.submit("merge", sources=[here], to="dcp", target_root="main", target_key="own")
    given: dict[str, Any] = {"sources": [here], param: [here, there] if param == "sources" else [there]}
    across = site.submit("merge", to="dcp", target_root="main", target_key="across", **given)
    for roots, expected in ((["main"], {own}), (["export"], set()), (["main", "export"], {own, across})):
        client = site.app.client("read", roots=roots)
        assert {one["id"] for one in client.get("/api/v1/jobs").json()["items"]} == expected, roots
        for number in (own, across):
            assert (client.get(f"/api/v1/jobs/{number}").status_code == 200) == (number in expected), roots


def test_invalid_parameters_are_refused(site: JobSite) -> None:
    """Invalid parameters are refused at submission."""
    last = {"sources": [], "run_id": 1}
    parameters: tuple[dict[str, Any], ...] = (
        *({"weights": [1.0]}, {"weights": [1.0, 1.0], "formula": "A+B"}, {"weights": [1.0, "NaN"]}),
        *({"formula": "A"}, {"formula": "A*B"}, {"decay": 1.0}, {"adapter_weights": [1.0]}),
        *({"sources": []}, {"sources": [1, 1]}, {"accumulate": "float16"}, {"run_id": 1}, {"last": 2}),
        *({"run_id": 1, "last": 2}, last | {"last": 2, "weights": [1, 1]}, last | {"last": 0}),
        {"map": "llama:hf-to-titan", "adapters": [3]},
    )
    for wrong in parameters:
        with pytest.raises(RefusedError) as refused:
            site.submit("merge", None, **{"sources": [1, 2], "to": "dcp", "target_key": "x", **wrong})
        assert refused.value.status == 422, wrong
