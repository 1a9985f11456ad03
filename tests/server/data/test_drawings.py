"""What is drawn of a checkpoint: phases, the map of shards, cells and statistics of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp
from dcp.inspection.checkpoints import open_index
from dcp.server.catalog.contents.verifications import set_statistics
from dcp.server.data.drawings import grids
from dcp.server.data.drawings.phases import save_phases
from dcp.server.data.drawings.shard_map import shard_map
from dcp.server.scanning.registering import Registration, register
from dcp.storage.formats.index import CheckpointIndex
from tests.support.app import App, running_app
from tests.support.catalog_roots import age
from tests.support.sharded import grid, save_sharded

API = "/api/v1/checkpoints"
MATRIX = torch.arange(60_000.0).reshape(200, 300)
MATRIX[7, 9], MATRIX[150, 0] = float("nan"), -5.0


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """The application with a checkpoint in the root "main"; what is asked for here are no queries."""
    state = {"w": MATRIX, "b": torch.ones(700, dtype=torch.bfloat16), "deep": torch.ones(2, 3, 4), "step": 1}
    dcp.save(state, checkpoint_id=tmp_path / "main" / "run" / "step-1")
    age(tmp_path / "main" / "run" / "step-1")  # what was just written has no fingerprint yet
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as running:
        service = running.service
        wanted = Registration(root="main", key="run/step-1")
        register(service.database, service.roots, wanted, actor="test")
        yield running


def test_a_matrix_in_cells(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell is what numpy says of it, however the reading is divided; NaN counts by itself."""
    monkeypatch.setattr(grids, "_BLOCK", 1_000)
    client = app.client("read")
    query = "fqn=w&rows=7&columns=5"
    answer = client.get(f"{API}/1/tensors/grid?{query}")
    found = answer.json()
    assert (found["shape"], found["rows"], found["columns"]) == ([200, 300], 7, 5)
    assert (found["is_sampled"], found["read_elements"]) == (False, 60_000)
    values = MATRIX.numpy()
    rows = [*(np.arange(7) * 200 // 7), 200]
    for place in range(35):
        i, j = divmod(place, 5)
        cell = values[rows[i] : rows[i + 1], j * 60 : (j + 1) * 60]
        assert found["nonfinite"][place] == int(np.isnan(cell).sum())
        for name, by in (("mean", np.nanmean), ("min", np.nanmin), ("max", np.nanmax)):
            assert found[name][place] == pytest.approx(float(by(cell)), rel=1e-6), (name, place)
    known = {"If-None-Match": answer.headers["etag"]}
    assert client.get(f"{API}/1/tensors/grid?{query}", headers=known).status_code == 304
    vector = client.get(f"{API}/1/tensors/grid?fqn=b&rows=9&columns=8&value=max").json()
    assert (vector["rows"], vector["columns"], vector["max"], vector["mean"]) == (1, 8, [1.0] * 8, [])
    part = client.get(f"{API}/1/tensors/grid?fqn=w&slice=150,::-100&value=min").json()
    assert part["min"] == values[150, ::-100].tolist()


def test_of_a_large_matrix_a_part_is_read(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of each cell; and what cannot be drawn is an error that says what to ask for."""
    monkeypatch.setattr(grids, "_READ", 6_000)
    client = app.client("read")
    found = client.get(f"{API}/1/tensors/grid?fqn=w&rows=4&columns=2").json()
    assert found["is_sampled"] and 0 < found["read_elements"] <= 6_000 and None not in found["mean"]
    for query, status, says in (
        ("fqn=deep", 422, "slice that leaves two"),
        ("fqn=none", 404, "not in the checkpoint"),
        ("fqn=step", 404, "a value"),
    ):
        refused = client.get(f"{API}/1/tensors/grid?{query}")
        assert refused.status_code == status and says in refused.json()["detail"]


def test_statistics_of_one_tensor(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are kept; else they are computed, unless it is large."""
    client = app.client("read")
    found = client.get(f"{API}/1/tensors/statistics?fqn=w").json()
    assert (found["is_kept"], found["statistics"]["nans"], found["statistics"]["min"]) == (False, 1, -5.0)
    monkeypatch.setattr(grids, "_MAX_BYTES", 100)
    assert client.get(f"{API}/1/tensors/statistics?fqn=w").status_code == 422
    kept = {"fqn": "w", "dtype": "float32", "shape": [200, 300], "statistics": {"nans": 1}}
    with app.service.database.write() as connection:
        fingerprint = client.get(f"{API}/1").json()["fingerprint"]
        set_statistics(connection, 1, fingerprint=fingerprint, result={"tensors": [kept]})
    again = client.get(f"{API}/1/tensors/statistics?fqn=w").json()
    assert again["is_kept"] and again["statistics"] == {"nans": 1} and again["computed_at"]


def test_drawings_are_of_roots_that_may_be_seen(app: App) -> None:
    """Others' are not there."""
    client = app.client("read", roots=["other"])
    for path in ("phases", "shards/map", "tensors/grid?fqn=w", "tensors/statistics?fqn=w"):
        assert client.get(f"{API}/1/{path}").status_code == 404, path
        assert app.base.get(f"{API}/1/{path}").status_code == 401


def test_phases_by_rank() -> None:
    """Parts of phases do not count twice; the slowest is named; what training waited for is told apart."""
    ranks: list[Any] = [
        {"blocked": 1.0, "staging": 0.9, "plan": 0.5, "local_plan": 0.2, "write": 2.0 + (rank == 5)}
        for rank in range(8)
    ]
    ranks[2] = "nonsense"
    index = CheckpointIndex("dcp", provenance={"rank_seconds": ranks, "assemble_seconds": 0.25})
    found = save_phases(index, rows=4)
    assert (found.rank_count, found.blocking_seconds, found.background_seconds) == (8, 1.0, 3.5)
    phases = {phase.name: phase for phase in found.phases}
    assert (phases["staging"].within, phases["staging"].is_blocking) == ("blocked", True)
    write = phases["write"]
    assert (write.slowest_rank, write.ranks, write.median_seconds) == (5, 7, 2.0)
    assert [(row.first_rank, row.last_rank) for row in found.rows] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert (found.rows[2].slowest_rank, found.rows[2].total_seconds) == (5, 4.5)
    nothing = save_phases(CheckpointIndex("safetensors"))
    assert (nothing.rank_count, nothing.phases, nothing.rows) == (0, (), ())


def test_the_map_of_shards(tmp_path: Path) -> None:
    """Every byte of every chunk is in one cell, in the row of its rank; ranks, bytes, names can be chosen."""
    tensors = {"w": torch.ones(64, 64), "b": torch.ones(500)}
    save_sharded(tmp_path / "s", tensors, {"w": grid((64, 64), (4, 1))})
    index = open_index(tmp_path / "s")
    total = int(index.payload_lengths.sum())
    found = shard_map(index, rows=64, bins=8)
    assert sum(found.cell_bytes) == sum(row.tensor_bytes for row in found.rows) == total
    assert len(found.rows) == len(index.files) == found.rank_count == 4
    assert max(found.cell_bins) < found.bins and max(found.cell_bytes) <= found.bin_bytes
    assert set(found.names) == {"w", "b"} and found.end >= int(index.file_sizes.max())
    one = shard_map(index, first_rank=0, last_rank=0)
    assert {row.first_rank for row in one.rows} == {0}
    together = shard_map(index, rows=1, bins=1)
    assert (len(together.rows), together.cell_bytes) == (1, (total,))
    half = shard_map(index, begin=0, end=found.bin_bytes, bins=1, rows=64)
    first = [size for at, size in zip(found.cell_bins, found.cell_bytes, strict=True) if at == 0]
    assert sum(half.cell_bytes) == sum(first)
    assert shard_map(index, glob="nothing*").cell_rows == ()
