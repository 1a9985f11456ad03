"""Placements: each saved world size and placement loads into any other, between dcp and stock torch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

import dcp
from tests.support.examples import examples
from tests.support.ranks import run_ranks
from tests.support.values import differences, fill, scrub

SAVE = {"dcp": dcp.save, "stock": stock.save}
LOAD = {"dcp": dcp.load, "stock": stock.load}

MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (4, 1), (1, 4)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn", "uint16", "float64")

Meshes = dict[tuple[int, ...], DeviceMesh]


@dataclass(frozen=True)
class Sharding:
    """Shape of a mesh, and a placement for each mesh dimension: -1 replicates, n shards dimension n."""

    mesh: tuple[int, ...]
    dims: tuple[int, ...]

    def tensor(self, shape: tuple[int, ...], dtype: str, meshes: Meshes) -> DTensor:
        """Return a DTensor of zeros. ``meshes`` caches meshes, because making a mesh is a collective."""
        if self.mesh not in meshes:
            meshes[self.mesh] = init_device_mesh("cpu", self.mesh)
        placements: list[Placement] = [Replicate() if dim < 0 else Shard(dim) for dim in self.dims]
        kind = getattr(torch, dtype)
        return zeros(shape, dtype=kind, device_mesh=meshes[self.mesh], placements=placements)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a case: its sharding in the save, and its sharding in the load."""

    shape: tuple[int, ...]
    dtype: str
    saved: Sharding
    loaded: Sharding


@st.composite
def tensors(draw: st.DrawFn, saving: int, loading: int) -> Tensor:
    """Draw a tensor with any shardings over two worlds."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))

    def sharding(world: int) -> Sharding:
        mesh = draw(st.sampled_from(MESHES[world]))
        return Sharding(mesh, tuple(draw(st.integers(-1, len(shape) - 1)) for _ in mesh))

    return Tensor(shape, draw(st.sampled_from(DTYPES)), sharding(saving), sharding(loading))


BOUNDED = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # no shrinking: a case has many tensors, and the failure names one
    derandomize=True,
)


def _save_case(rank: int, world: int, root: str, case: list[Tensor]) -> None:
    meshes: Meshes = {}
    state = {
        f"t{number}": tensor.saved.tensor(tensor.shape, tensor.dtype, meshes)
        for number, tensor in enumerate(case)
    }
    for saver, save in SAVE.items():
        save(fill(state), checkpoint_id=f"{root}/{saver}")


def load_case(rank: int, world: int, root: str, case: list[Tensor]) -> list[str]:
    """Load into the other sharding, dcp's by both and stock's by dcp. Return the differences."""
    meshes: Meshes = {}
    found = []
    for saver, loader in (("dcp", "dcp"), ("stock", "dcp"), ("dcp", "stock")):
        target = {
            f"t{number}": tensor.loaded.tensor(tensor.shape, tensor.dtype, meshes)
            for number, tensor in enumerate(case)
        }
        LOAD[loader](scrub(target), checkpoint_id=f"{root}/{saver}")
        found += [f"{case[int(name[1:])]} {saver}->{loader}" for name in differences(target)]
    return found


def _check(saving: int, loading: int, case: list[Tensor]) -> None:
    with tempfile.TemporaryDirectory(prefix="dcp-case-") as root:
        run_ranks(saving, _save_case, root, case)
        assert run_ranks(loading, load_case, root, case) == [[]] * loading


_ALL = [*((2, 3), (4, 1), (1, 4), (3, 2), (2, 2), (4, 4)), *((8, 4), (3, 8), (8, 8))]


@pytest.mark.parametrize(
    ("saving", "loading", "count"),
    [(2, 3, 2), *(pytest.param(*pair, 4, marks=pytest.mark.exhaustive) for pair in _ALL)],
)
def test_any_placement_loads_into_any_other(saving: int, loading: int, count: int) -> None:
    """Tensors of random shapes, dtypes, meshes and placements load correctly, forty at a time; eight ranks
    have meshes of three dimensions."""

    @examples(count, quick=2, parent=BOUNDED)
    @given(st.lists(tensors(saving, loading), min_size=40, max_size=60))
    def run(case: list[Tensor]) -> None:
        _check(saving, loading, case)

    run()
