"""How the layers of a run change from step to step: the job, and what is shown of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.server.catalog.errors import MissingError, StateError
from dcp.server.database.engine import Database
from dcp.server.jobs.ledger import latest_success
from dcp.server.pages.drawings.drift import drift_picture
from dcp.server.schemas.contents.drawings import DriftAnswer
from dcp.server.security.principal import LOCAL, Principal
from tests.support.app import running_app
from tests.support.kind_runs import KindRuns


def state(step: int) -> dict[str, Any]:
    """Layer 2 does not change, layer 10 does at each step. At step 3 the head gets a NaN, and layer
    11 becomes NaN: both stay so."""
    head = torch.ones(4)
    if step >= 3:
        head[1] = float("nan")
    scale = 1.0 + step / 10
    tensors = {
        "m.layers.10.w": torch.full((8,), scale),
        "m.layers.10.b": torch.zeros(8),
        "m.layers.11.w": torch.full((6,), float("nan") if step >= 3 else 1.0),
        "m.layers.2.w": torch.ones(5),
        "m.head": head,
    }
    return tensors | ({"m.extra": torch.ones(1)} if step == 3 else {})


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """A run of four steps."""
    for step in range(1, 5):
        dcp.save(state(step), checkpoint_id=tmp_path / f"main/run/step-{step}", no_dist=True)
    (tmp_path / "other").mkdir()
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "other")}
    made = KindRuns(database, tmp_path / "work", roots)
    made.scan("main")
    return made


def test_a_run_layer_by_layer(runs: KindRuns, tmp_path: Path) -> None:
    """Distances, shares and NaNs by step; a step that cannot be read is told, and hides no other one."""
    job = runs.do("drift", run_id=1)
    assert job.state == "succeeded", job.error
    with runs.database.read() as connection:
        found = latest_success(connection, "drift", "run_id", 1, frozenset({"main"}))
        assert found is not None and found.id == job.id
        assert latest_success(connection, "drift", "run_id", 1, frozenset({"other"})) is None
        assert latest_success(connection, "drift", "run_id", 2) is None
    shown = DriftAnswer.of(found.result, job_id=found.id, created_at=found.created_seconds)
    assert [(step.from_step, step.step, step.added, step.removed) for step in shown.steps] == [
        (1, 2, 0, 0),
        (2, 3, 1, 0),
        (3, 4, 0, 1),
    ]
    layers = {layer.name: layer for layer in shown.layers}
    assert list(layers) == ["m", "m.layers.2", "m.layers.10", "m.layers.11"]  # as people count
    assert layers["m.layers.2"].relative_l2 == [0.0, 0.0, 0.0]
    assert layers["m.layers.11"].relative_l2 == [0.0, None, None], "NaN is not unchanged"
    ten = layers["m.layers.10"]
    assert ten.changed == [0.5, 0.5, 0.5]
    assert ten.relative_l2[0] == pytest.approx(0.1 / 1.1 / 2**0.5, rel=1e-5)
    assert (layers["m"].nonfinite, layers["m.layers.11"].nonfinite) == ([0, 1, 1], [0, 6, 6])
    picture = drift_picture([layers["m.layers.11"]], 3, "relative_l2")
    assert {kind: path.count("M") for kind, path in picture.paths.items()} == {"l0": 1, "nan": 2}
    (data,) = (tmp_path / "main/run/step-2").glob("*.distcp")
    data.write_bytes(b"x" * data.stat().st_size)
    again = runs.do("drift", run_id=1, max_step=4, only=["m.layers.*"])
    after_lost = runs.do("drift", run_id=1, min_step=2).result
    assert after_lost is not None
    by_name = {layer["name"]: layer for layer in after_lost["layers"]}
    assert by_name["m.layers.11"]["nonfinite"] == [None, 6], "nobody could see it become NaN"
    assert by_name["m.layers.11"]["relative_l2"] == [None, None]
    last = runs.do("drift", run_id=1, min_step=3).result
    assert last is not None
    by_name = {layer["name"]: layer for layer in last["layers"]}
    assert by_name["m.layers.11"]["nonfinite"] == [6], "it was NaN before, and did not change"
    assert by_name["m.layers.11"]["relative_l2"] == [None]
    problems = [step["problem"] is None for step in again.result["steps"]] if again.result else []
    assert (again.state, problems) == ("succeeded", [False, False, True])


def test_which_steps_are_compared(runs: KindRuns) -> None:
    """The first, the last and some between; of a run that may be seen and has two."""
    assert runs.do("drift", run_id=1, points=2).result["steps"][0]["step"] == 4  # type: ignore[index]
    with pytest.raises(StateError):
        runs.submit("drift", run_id=1, min_step=4)
    with pytest.raises(MissingError):
        runs.submit("drift", caller=Principal("x", LOCAL.scopes, frozenset({"other"})), run_id=1)


def test_who_asks(tmp_path: Path) -> None:
    """The key's name, scopes and roots; and drift that nobody has computed."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as app:
        shown = app.client("read", "write", roots=["main"], name="ci").get("/api/v1/whoami").json()
        assert (shown["name"], shown["scopes"], shown["roots"]) == ("key:ci", ["read", "write"], ["main"])
        assert len(app.client("admin").get("/api/v1/whoami").json()["scopes"]) == 5
        assert app.base.get("/api/v1/whoami").status_code == 401
        assert app.client("read", name="r").get("/api/v1/runs/1/drift").status_code == 404
