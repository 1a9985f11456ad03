"""Pictures of a checkpoint over HTTP: matrices as grids of cells, statistics, and the map of shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tests.service.data.conftest import DataSite, data_site
from tests.support.catalog_roots import age
from tests.support.sharded import grid, save_sharded


def matrix() -> torch.Tensor:
    """Return a matrix with more elements than are read at a time."""
    made = torch.arange(3_000_000.0).reshape(2000, 1500)
    made[7, 9], made[1500, 0] = float("nan"), -5.0
    return made


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataSite]:
    """Start a service with this matrix, a tensor that is only sampled, and shards."""
    with ExitStack() as stack:
        made = data_site(stack, tmp_path_factory.mktemp("drawn"))
        state = {"w": matrix(), "b": torch.ones(700, dtype=torch.bfloat16), "deep": torch.ones(2, 3, 4)}
        age(made.save("run/step-1", state | {"step": 1}))
        made.save("large", {"w": torch.full((8200, 8200), 3, dtype=torch.uint8)})
        tensors = {"layers.2.w": torch.ones(64, 64), "b": torch.ones(500), "empty": torch.ones(0)}
        tensors |= {"one": torch.tensor(1.0), "twice": torch.ones(100)}
        cuts: dict[str, Any] = {"layers.2.w": grid((64, 64), (8, 2)), "b": grid((500,), (7,))}
        cuts["twice"] = [((0,), (100,))] * 5
        save_sharded(made.folder / "main/sharded", tensors, cuts, files=5)
        yield made


def get(site: DataSite, key: str, path: str, **params: Any) -> Any:
    """Return the JSON of a response."""
    return site.http.get(f"{site.known(key)}/{path}", params=params).raise_for_status().json()


def test_cells_have_numpys_statistics(drawn: DataSite) -> None:
    """Each cell has numpy's mean, minimum and maximum, and counts its NaNs; slices and vectors work too."""
    url = f"{drawn.known('run/step-1')}/tensors/grid"
    answer = drawn.http.get(url, params={"fqn": "w", "rows": 7, "columns": 5})
    found, values = answer.json(), matrix().numpy()
    assert (found["shape"], found["rows"], found["columns"]) == ([2000, 1500], 7, 5)
    assert (found["is_sampled"], found["read_elements"]) == (False, 3_000_000)
    rows = [*(np.arange(7) * 2000 // 7), 2000]
    for place in range(35):
        i, j = divmod(place, 5)
        cell = values[rows[i] : rows[i + 1], j * 300 : (j + 1) * 300].astype(np.float64)
        assert found["nonfinite"][place] == int(np.isnan(cell).sum())
        for name, by in (("mean", np.nanmean), ("min", np.nanmin), ("max", np.nanmax)):
            assert found[name][place] == pytest.approx(float(by(cell)), rel=1e-6), (name, place)
    known = {"If-None-Match": answer.headers["etag"]}
    assert drawn.http.get(str(answer.url), headers=known).status_code == 304
    vector = get(drawn, "run/step-1", "tensors/grid", fqn="b", rows=9, columns=8, value="max")
    assert (vector["rows"], vector["columns"], vector["max"], vector["mean"]) == (1, 8, [1.0] * 8, [])
    part = get(drawn, "run/step-1", "tensors/grid", fqn="w", slice="1500,::-500", value="min")
    assert part["min"] == values[1500, ::-500].tolist()


def test_large_matrices_are_sampled(drawn: DataSite) -> None:
    """A large matrix is sampled in each cell; a tensor of three dimensions gets an error with the remedy."""
    found = get(drawn, "large", "tensors/grid", fqn="w", rows=4, columns=2)
    assert found["is_sampled"] and 0 < found["read_elements"] <= 1 << 26 and found["mean"] == [3.0] * 8
    for fqn, status, says in (
        ("deep", 422, "slice with two dimensions"),
        ("none", 404, "not in the checkpoint"),
        ("step", 404, "a value"),
    ):
        refused = drawn.http.get(f"{drawn.known('run/step-1')}/tensors/grid", params={"fqn": fqn})
        assert refused.status_code == status and says in refused.json()["detail"]


def test_statistics_of_one_tensor(drawn: DataSite) -> None:
    """Statistics are computed on request if none are stored, but not for a large tensor."""
    found = get(drawn, "run/step-1", "tensors/statistics", fqn="w")
    assert (found["is_kept"], found["statistics"]["nans"], found["statistics"]["min"]) == (False, 1, -5.0)
    url = f"{drawn.known('large')}/tensors/statistics"
    assert drawn.http.get(url, params={"fqn": "w"}).status_code == 422


# -- shards --------------------------------------------------------------------------------------------------


def test_the_map_of_shards(drawn: DataSite) -> None:
    """The map has each byte of a chunk in one cell, in the row of its rank, and marks replicated chunks."""
    found = get(drawn, "sharded", "shards/map", rows=64, bins=8)
    total = (64 * 64 + 500 + 1 + 5 * 100) * 4
    assert sum(found["cell_bytes"]) == sum(row["tensor_bytes"] for row in found["rows"]) == total
    assert len(found["rows"]) == found["rank_count"] == 5
    names = dict(zip(found["names"], found["name_layers"], strict=True))
    assert names == {"layers.2.w": 2, "b": None, "twice": None}
    again = dict(zip(found["names"], found["is_replicated"], strict=True))
    assert [name for name, is_again in again.items() if is_again] == ["twice"]
    assert dict(zip(found["names"], found["name_bytes"], strict=True))["twice"] == 5 * 400
    by_rank = [row["tensor_bytes"] for row in found["rows"]]
    assert (found["largest_rank"], found["largest_rank_bytes"]) == (by_rank.index(max(by_rank)), max(by_rank))
    assert found["mean_rank_bytes"] == pytest.approx(total / 5)
    together = get(drawn, "sharded", "shards/map", rows=2)
    assert sum(row["replicated_bytes"] for row in together["rows"]) == 5 * 400
    assert max(row["largest_rank_bytes"] for row in together["rows"]) == max(by_rank)
    assert get(drawn, "sharded", "shards/map", glob="nothing*")["cell_rows"] == []


def test_replaced_checkpoints_are_read_again(own: DataSite) -> None:
    """A checkpoint saved again is read again, although the first reading was cached."""
    for size in (3, 4):
        own.save("s", {"w": torch.ones(size)})
        (chunk,) = get(own, "s", "shards/chunks")["items"]
        assert chunk["sizes"] == [size]
