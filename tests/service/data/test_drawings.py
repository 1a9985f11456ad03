"""What is drawn of a checkpoint. Internal: block sizes far below those of real checkpoints.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp
from dcp.inspection.checkpoints import open_index
from dcp.server.catalog.contents.verifications import set_statistics
from dcp.server.data.chunk_columns import ChunkColumns
from dcp.server.data.drawings import grids
from dcp.server.data.drawings import shard_map as shard_maps
from dcp.server.data.drawings.phases import save_phases
from dcp.server.data.drawings.shard_map import shard_map
from dcp.server.data.opening import OpenCheckpoints
from dcp.server.records.drawings import ShardMap
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
    found = save_phases(index.provenance, rows=4)
    assert (found.rank_count, found.blocking_seconds, found.background_seconds) == (8, 1.0, 3.5)
    phases = {phase.name: phase for phase in found.phases}
    assert (phases["staging"].within, phases["staging"].is_blocking) == ("blocked", True)
    write = phases["write"]
    assert (write.slowest_rank, write.ranks, write.median_seconds) == (5, 7, 2.0)
    assert [(row.first_rank, row.last_rank) for row in found.rows] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert (found.rows[2].slowest_rank, found.rows[2].total_seconds) == (5, 4.5)
    nothing = save_phases({})
    assert (nothing.rank_count, nothing.phases, nothing.rows) == (0, (), ())


def test_the_map_of_shards(tmp_path: Path) -> None:
    """Every byte of every chunk is in one cell, in the row of its rank; ranks, bytes, names can be chosen."""
    tensors = {"layers.2.w": torch.ones(64, 64), "b": torch.ones(500)}
    save_sharded(tmp_path / "s", tensors, {"layers.2.w": grid((64, 64), (4, 1))})
    index = open_index(tmp_path / "s")
    columns = ChunkColumns.of(index)
    total = int(index.payload_lengths.sum())
    found = shard_map(columns, rows=64, bins=8)
    assert sum(found.cell_bytes) == sum(row.tensor_bytes for row in found.rows) == total
    assert len(found.rows) == len(index.files) == found.rank_count == 4
    assert max(found.cell_bins) < found.bins and max(found.cell_bytes) <= found.bin_bytes
    assert dict(zip(found.names, found.name_layers, strict=True)) == {"layers.2.w": 2, "b": None}
    assert found.end >= int(index.file_sizes.max())
    one = shard_map(columns, first_rank=0, last_rank=0)
    assert {row.first_rank for row in one.rows} == {0}
    together = shard_map(columns, rows=1, bins=1)
    assert (len(together.rows), together.cell_bytes) == (1, (total,))
    half = shard_map(columns, begin=0, end=found.bin_bytes, bins=1, rows=64)
    first = [size for at, size in zip(found.cell_bins, found.cell_bytes, strict=True) if at == 0]
    assert sum(half.cell_bytes) == sum(first)
    assert shard_map(columns, glob="nothing*").cell_rows == ()


def test_cells_are_what_adding_up_each_chunk_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever part, bins and blocks; also where chunks share bytes, are empty, or larger than bins."""
    monkeypatch.setattr(shard_maps, "_BLOCK", 5)
    tensors = {
        "w": torch.ones(64, 64),
        "b": torch.ones(500),
        "empty": torch.ones(0),
        "one": torch.tensor(1.0),
    }
    save_sharded(tmp_path / "s", tensors, {"w": grid((64, 64), (8, 2)), "b": grid((500,), (7,))}, files=5)
    index = open_index(tmp_path / "s")
    shared = index.payload_offsets.copy()
    shared[5] = shared[0]
    columns = ChunkColumns.of(replace(index, payload_offsets=shared))
    whole = shard_map(columns)
    parts: tuple[dict[str, Any], ...] = (
        {"bins": 7, "rows": 2},
        {"begin": 100, "end": 3_001, "bins": 13},
        {"begin": 2_900, "end": 2_901},
        {"glob": "[be]*", "bins": 300, "begin": 7},
        {"first_rank": 1, "last_rank": 3, "rows": 2, "end": whole.end * 3},
        {"first_rank": 9},
    )
    for part in parts:
        found = shard_map(columns, **part)
        expected = _added_up(columns, found, part.get("first_rank"), part.get("last_rank"), part.get("glob"))
        cells = zip(found.cell_rows, found.cell_bins, found.cell_bytes, found.cell_chunks, strict=True)
        assert {cell[:2]: cell[2:] for cell in cells} == expected, part


def _added_up(
    columns: ChunkColumns, found: ShardMap, first: int | None, last: int | None, glob: str | None
) -> dict[tuple[int, int], tuple[int, int]]:
    files = columns.files_of(first, last)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for file in files:
        for at in range(columns.starts[file], columns.starts[file + 1]):
            low, length = int(columns.begins[at]), int(columns.lengths[at])
            if glob is not None and not fnmatchcase(columns.fqns[int(columns.tensors[at])], glob):
                continue
            for bin in range(found.bins):
                begin = found.begin + bin * found.bin_bytes
                end = min(found.end, begin + found.bin_bytes)
                held = min(end, low + length) - max(begin, low)
                if held > 0:
                    cell = ((file - files.start) * len(found.rows) // len(files), bin)
                    before = cells.get(cell, (0, 0))
                    cells[cell] = (before[0] + held, before[1] + 1)
    return cells


def test_what_ranks_have_and_what_is_stored_again(tmp_path: Path) -> None:
    """The rank with the most, the mean of all, and tensors of which more is stored than there is."""
    tensors = {"w": torch.ones(64, 64), "b": torch.ones(100)}
    save_sharded(tmp_path / "s", tensors, {"b": [((0,), (100,))] * 5}, files=4)
    columns = ChunkColumns.of(open_index(tmp_path / "s"))
    found = shard_map(columns, rows=2)
    assert (found.largest_rank, found.largest_rank_bytes) == (0, 64 * 64 * 4 + 400 * 2)
    assert found.mean_rank_bytes == (64 * 64 * 4 + 5 * 400) / 4
    assert dict(zip(found.names, found.is_replicated, strict=True)) == {"w": False, "b": True}
    assert dict(zip(found.names, found.name_bytes, strict=True)) == {"w": 64 * 64 * 4, "b": 5 * 400}
    assert [row.replicated_bytes for row in found.rows] == [3 * 400, 2 * 400]
    assert [row.largest_rank_bytes for row in found.rows] == [found.largest_rank_bytes, 400]


def test_chunks_one_by_one(app: App) -> None:
    """By file and place, each once over pages; of a part those that reach into it; in how many copies."""
    client = app.client("read")
    path = f"{API}/1/shards/chunks"
    first = client.get(path, params={"limit": 2}).json()
    second = client.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    items = first["items"] + second["items"]
    assert {one["fqn"] for one in items} == {"w", "b", "deep"} and second["next_cursor"] is None
    places = [one["file_offset"] for one in items]
    assert places == sorted(places)
    (w,) = client.get(path, params={"glob": "w"}).json()["items"]
    assert (w["rank"], w["offsets"], w["sizes"], w["copies"], w["dtype"]) == (
        0,
        [0, 0],
        [200, 300],
        1,
        "float32",
    )
    end = w["file_offset"] + w["bytes"]
    inside = client.get(path, params={"begin": end - 1, "end": end}).json()["items"]
    assert [one["fqn"] for one in inside] == ["w"]
    assert client.get(path, params={"first_rank": 1}).json()["items"] == []
    for wrong in ({"begin": 5, "end": 5}, {"cursor": first["next_cursor"], "glob": "w"}, {"x": 1}):
        assert client.get(path, params=wrong).status_code == 422, wrong
    assert app.client("read", roots=["other"]).get(path).status_code == 404


def test_phases_of_some_ranks() -> None:
    """Rows are of those that were asked for; all else stays over all ranks."""
    index = CheckpointIndex("dcp", provenance={"rank_seconds": [{"write": float(n)} for n in range(10)]})
    found = save_phases(index.provenance, rows=2, wanted=range(3, 7))
    assert [(row.first_rank, row.last_rank) for row in found.rows] == [(3, 4), (5, 6)]
    assert (found.rank_count, found.phases[0].max_seconds) == (10, 9.0)
    assert save_phases(index.provenance, wanted=range(10, 1 << 31)).rows == ()


def test_chunks_are_kept_without_their_index(app: App) -> None:
    """Somebody who looks around in a large checkpoint reads its index once; a replaced one is read anew."""
    checkpoints = OpenCheckpoints(kept_bytes=0)
    root = app.service.roots.get("main")
    assert not checkpoints.has_chunks(root, "run/step-1")
    found = checkpoints.chunks(root, "run/step-1")
    assert checkpoints.has_chunks(root, "run/step-1")
    assert checkpoints.chunks(root, "run/step-1") is found
    place = root.place("run/step-1")
    (manifest,) = [info for info in place.store.list() if info.name == "manifest.msgpack"]
    path = Path(root.url) / "run/step-1" / manifest.name
    os.utime(path, (1, 1))
    assert not checkpoints.has_chunks(root, "run/step-1")
    assert checkpoints.chunks(root, "run/step-1") is not found
