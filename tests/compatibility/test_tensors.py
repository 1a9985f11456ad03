"""Tensors of each dtype and layout, between dcp and stock torch."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp
from tests.support.rank_acts import ObjectLoadPlanner
from tests.support.ranks import run_ranks
from tests.support.values import differences, fill, full_tensor, raw, scrub

SAVE = {"dcp": dcp.save, "stock": stock.save}
LOAD = {"dcp": dcp.load, "stock": stock.load}
ROUTES = (("dcp", "dcp"), ("dcp", "stock"), ("stock", "dcp"))

State = dict[str, torch.Tensor]


STOCK_CANNOT_SAVE = {"bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"}
"""dtypes of unknown size for stock's planner; stock loads them from dcp checkpoints."""
NOT_KEPT = re.compile(r"u?int[1-7]|q.*")
"""Names of dtypes that neither package can save."""
DTYPES = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}


def every_dtype(saver: str = "dcp") -> State:
    """Return a tensor of each dtype: large enough for an aligned payload, small, 0-d, empty."""
    shapes: dict[str, tuple[int, ...]] = {
        "large": (5, 1024),
        "small": (3, 2),
        "scalar": (),
        "empty": (2, 0, 3),
    }
    kept = {name for name in DTYPES if not NOT_KEPT.fullmatch(name)}
    return {
        f"{label}.{name}": torch.empty(shape, dtype=DTYPES[name])
        for name in kept - (STOCK_CANNOT_SAVE if saver == "stock" else set())
        for label, shape in shapes.items()
    }


def layouts(*, lazy: bool = True) -> State:
    """Return views with strides, with contents by name; ``lazy``: also conjugated and negated views."""

    def full(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return full_tensor(name, shape, dtype)

    state = {
        "every_second_column": torch.empty(6, 10)[:, ::2],
        "inner_box": torch.empty(9, 9, 9)[2:5, 1:7, 3:4],
        "transposed": torch.empty(7, 5).t(),
        "permuted": torch.empty(3, 4, 5).permute(2, 0, 1),
        "large_transposed": torch.empty(300, 200).t(),
        "channels_last": torch.empty(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "channels_last_3d": torch.empty(2, 3, 2, 5, 7).to(memory_format=torch.channels_last_3d),
        "offset_view": torch.empty(40)[7:31],
        "storage_of_more": torch.empty(1000, 10)[500],
    }
    for name, value in state.items():
        value.copy_(full(name, *value.shape))
    state["parameter"] = nn.Parameter(full("parameter", 4, 4))
    state["computed"] = full("computed", 4, 4).requires_grad_() * 1.0
    if not lazy:
        return state
    conjugate = full("conj", 6, 7, dtype=torch.complex64)
    state["conj"] = conjugate.conj().resolve_conj().conj()
    negative = full("negative", 6, 7)
    state["negative"] = torch._neg_view(negative.neg())
    return state


def test_every_dtype_round_trips_with_stock(tmp_path: Path) -> None:
    """Tensors of each dtype, large, small, 0-d and empty, have equal bytes on each route."""
    for saver, loader in ROUTES:
        folder = str(tmp_path / f"{saver}-{loader}")
        SAVE[saver](fill(every_dtype(saver)), checkpoint_id=folder)
        target = scrub(every_dtype(saver))
        assert len(differences(target)) > len(target) / 2
        LOAD[loader](target, checkpoint_id=folder)
        assert differences(target) == [], (saver, loader)


def test_views_of_any_strides_are_saved_by_value(tmp_path: Path) -> None:
    """Strided, channels-last, conjugate and negative views are saved by value, and load into C order."""
    for saver, loader in ROUTES:
        folder = str(tmp_path / f"{saver}-{loader}")
        state = layouts(lazy=saver == "dcp")
        SAVE[saver](state, checkpoint_id=folder)
        target = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
        LOAD[loader](target, checkpoint_id=folder)
        assert [n for n, v in target.items() if raw(v) != raw(state[n])] == [], (saver, loader)


def test_lazily_conjugated_records_of_stock_are_refused(tmp_path: Path) -> None:
    """A lazily conjugated tensor of stock, stored as its base and a flag, is refused."""
    stock.save({"x": layouts()["conj"]}, checkpoint_id=str(tmp_path))
    with pytest.raises(dcp.errors.UnsupportedFormatError, match=r"'x'.*resolve_conj"):
        dcp.load({"x": torch.zeros(6, 7, dtype=torch.complex64)}, checkpoint_id=str(tmp_path))


def test_loads_fill_views_of_any_strides(tmp_path: Path) -> None:
    """Strided, channels-last, conjugate and negative views are filled in place, without other changes."""
    for saver, loader in ROUTES:
        folder = str(tmp_path / f"{saver}-{loader}")
        wanted = layouts()
        plain = {name: value.detach().resolve_conj().resolve_neg() for name, value in wanted.items()}
        SAVE[saver]({**plain, "around": torch.ones(2, 2)}, checkpoint_id=folder)
        target = layouts()
        bases = {name: value.detach() for name, value in target.items()}
        for value in bases.values():
            value.zero_()
        around = torch.full((9, 9), 7.0)
        target["around"] = around[2:4, 3:5]
        LOAD[loader](target, checkpoint_id=folder)
        assert [n for n in wanted if raw(target[n]) != raw(wanted[n])] == [], (saver, loader)
        assert all(value.data_ptr() == target[name].data_ptr() for name, value in bases.items())
        assert around.sum() == 77 * 7 + 4


class Tied(nn.Module):
    """Module with one parameter as input and output embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_loaded_to_both(tmp_path: Path) -> None:
    """The file holds one copy; dcp and stock load both names, into tied or separate tensors."""
    state = Tied().state_dict()
    dcp.save(state, checkpoint_id=str(tmp_path))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert stored < 1.1 * state["embed.weight"].nbytes
    for load in LOAD.values():
        separate = {name: torch.zeros_like(value) for name, value in state.items()}
        load(separate, checkpoint_id=str(tmp_path))
        assert all(raw(separate[name]) == raw(value) for name, value in state.items())
        model = Tied()
        tied = scrub(model.state_dict())
        load(tied, checkpoint_id=str(tmp_path))
        assert raw(model.head.weight) == raw(state["embed.weight"])


def into_meta(rank: int, world: int, root: str) -> list[str]:
    """Load into a model on the meta device, plain and sharded. Return differences and meta tensors."""
    mesh = init_device_mesh("cpu", (world,))
    found = []

    def state(device: str, sharded: bool) -> State:
        with torch.device(device):
            made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        if sharded:
            fully_shard(made, mesh=mesh)
        return dict(made.state_dict())

    for (saver, loader), sharded in product(ROUTES, (False, True)):
        SAVE[saver](fill(state("cpu", sharded)), checkpoint_id=f"{root}/{saver}-{sharded}")
        for other in (False, True):
            target = state("meta", other)
            LOAD[loader](target, checkpoint_id=f"{root}/{saver}-{sharded}")
            found += [f"{name} is meta" for name, value in target.items() if value.is_meta]
            found += differences({n: v for n, v in target.items() if not v.is_meta})
    return found


def test_meta_tensors_of_the_target_are_materialised(tmp_path: Path) -> None:
    """Tensors on the meta device, plain and DTensors with empty shards, are replaced by filled tensors."""
    assert run_ranks(3, into_meta, str(tmp_path)) == [[]] * 3


# -- quantized ----------------------------------------------------------------------------------------------

QUANTIZED = [torch.qint8, torch.quint8, torch.qint32]


def _quantized(dtype: torch.dtype, scale: float = 0.1) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(4.0), scale, 3, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_saves_of_quantized_tensors_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """The error says how to keep the values, and no file is written."""
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 0])
    message = r"'q'.*scale and a zero point.*int_repr\(\).*dequantize"
    for one in (_quantized(dtype), torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, dtype)):
        with pytest.raises(dcp.errors.PlanError, match=message):
            dcp.save({"q": one}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(dcp.CheckpointNotFoundError):
        dcp.load({}, checkpoint_id=tmp_path / "c", no_dist=True)
    kept = {"ints": _quantized(dtype).int_repr(), "scale": _quantized(dtype).q_scale()}
    dcp.save(kept, checkpoint_id=tmp_path / "c", no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_stocks_saves_of_quantized_tensors_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Stock drops the scale, so a load into another scale gives other numbers; dcp refuses."""
    stock.save({"q": _quantized(dtype)}, checkpoint_id=tmp_path, no_dist=True)
    target = {"q": _quantized(dtype, scale=0.5)}
    stock.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert not torch.allclose(target["q"].dequantize(), torch.arange(4.0), atol=0.3)
    with pytest.raises(
        dcp.errors.UnsupportedFormatError, match=r"'q' is quantized \(torch\.q.*scale and zero point"
    ):
        dcp.load({"q": _quantized(dtype)}, checkpoint_id=tmp_path, no_dist=True)


# -- autograd -----------------------------------------------------------------------------------------------

CHANGED = "modified by an inplace operation"


LOADS: dict[str, Any] = {
    "columns": lambda state, path: dcp.load(state, checkpoint_id=path),
    "objects": lambda state, path: dcp.load(state, checkpoint_id=path, planner=ObjectLoadPlanner()),
    "stock": lambda state, path: stock.load(state, storage_reader=dcp.FileSystemReader(path)),
}


@pytest.mark.parametrize("loader", LOADS)
@pytest.mark.parametrize("strided", [False, True])
def test_backward_detects_a_load_after_forward(tmp_path: Path, loader: str, strided: bool) -> None:
    """After a load between forward and backward, backward raises, since gradients would be wrong."""
    dcp.save({"w": torch.full((4, 3), 5.0)}, checkpoint_id=tmp_path)
    weight = torch.ones(3, 4).T if strided else torch.ones(4, 3)
    weight = torch.nn.Parameter(weight)
    loss = weight.square().sum()
    LOADS[loader]({"w": weight.detach()}, tmp_path)
    assert weight[0, 0] == 5
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.backward(loss)


def _dtensors(rank: int, world_size: int, path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.full((4, 2), 5.0)
    dcp.save({"s": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=path)
    caught = []
    for placement in (Shard(0), Replicate()):
        for load in (LOADS["columns"], LOADS["objects"]):
            weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [placement]))
            loss = (weight * weight).sum()
            load({"s": weight.detach()}, Path(path))
            try:
                torch.autograd.backward(loss)
            except RuntimeError as error:
                caught.append(str(error))
    return caught


def test_backward_detects_loads_into_dtensors(tmp_path: Path) -> None:
    """Backward detects a load into a DTensor's local tensor; stock's load gives a wrong gradient."""
    for caught in run_ranks(2, _dtensors, str(tmp_path)):
        assert [CHANGED in text for text in caught] == [True] * 4
