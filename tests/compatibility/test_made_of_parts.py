"""Tensors composed of other tensors: subclasses such as torchao's, and block-quantized weights in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from dcp.errors import PlanError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = 7


class Quantised(torch.Tensor):
    """Rows of bytes with a scale each, as in torchao."""

    data_: torch.Tensor
    scale: torch.Tensor
    settings: Any

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, settings: Any = None) -> Quantised:
        """Make a tensor without memory of its own."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Quantised = make(cls, data.shape, dtype=torch.float32, device=data.device)
        made.data_, made.scale, made.settings = data, scale, settings
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], (self.settings, tuple(self.shape))

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Any], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # a view of equal shape
            return cls(args[0].data_, args[0].scale, args[0].settings)
        raise NotImplementedError(func)


def _weight(rows: slice = slice(None), *, filled: bool = True, settings: Any = "int8") -> Quantised:
    data, scale = (
        torch.arange(ROWS * 2, dtype=torch.int8).view(ROWS, 2),
        torch.arange(ROWS * 1.0).view(ROWS, 1),
    )
    parts = [part[rows] if filled else torch.zeros_like(part[rows]) for part in (data, scale)]
    return Quantised(parts[0], parts[1], settings)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one.data_, other.data_) and torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("how", ["save", "thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_tensor_subclasses_round_trip(tmp_path: Path, how: str) -> None:
    """A load fills the existing tensor; stock torch and `dcp.read` see the parts."""
    state: dict[str, Any] = {"model": {"w": _weight()}, "n": 1}
    if how == "save":
        dcp.save(state, checkpoint_id=tmp_path / "c")
    else:
        with dcp.CheckpointManager(tmp_path, mode=how, name="c{step}", handle_sigterm=False) as manager:  # type: ignore[arg-type]
            manager.save(0, state)
        (tmp_path / "c0").rename(tmp_path / "c")
    target = _weight(filled=False)
    report = dcp.load({"model": {"w": target}, "n": 0}, checkpoint_id=tmp_path / "c")
    assert _equal(target, _weight()) and not report.unexpected
    seen = dcp.read(tmp_path / "c")["model"]["w"]
    assert torch.equal(seen["scale"], _weight().scale) and seen["subclass"]["shape"] == [ROWS, 2]
    parts: dict[str, Any] = {"model": {"w": {"data_": torch.zeros(ROWS, 2, dtype=torch.int8)}}}
    stock.load(parts, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(parts["model"]["w"]["data_"], _weight().data_)


@pytest.mark.parametrize("planner", [None, "protocol"])
def test_a_target_with_other_settings_is_an_error(tmp_path: Path, planner: str | None) -> None:
    """A target with other settings is an error, and so is a plain tensor for a subclass or the reverse."""
    dcp.save({"w": _weight(), "v": torch.ones(ROWS, 2)}, checkpoint_id=tmp_path)

    class Own(dcp.DefaultLoadPlanner):
        def finish_plan(self, central_plan: Any) -> Any:
            return super().finish_plan(central_plan)

    options: dict[str, Any] = {} if planner is None else {"planner": Own()}
    with pytest.raises(PlanError, match=r"'w'.*context \['int8'.*not \['int4'"):
        dcp.load({"w": _weight(settings="int4")}, checkpoint_id=tmp_path, **options)
    with pytest.raises(dcp.MissingKeyError, match=r"v\.data_"):
        dcp.load({"v": _weight()}, checkpoint_id=tmp_path, **options)
    with pytest.raises(dcp.MissingKeyError, match="w"):
        dcp.load({"w": torch.ones(ROWS, 2)}, checkpoint_id=tmp_path, **options)


def _sharded(world_size: int, rank: int, *, filled: bool) -> DTensor:
    mesh = init_device_mesh("cpu", (world_size,))
    each = -(-ROWS // world_size)
    local = _weight(slice(rank * each, (rank + 1) * each), filled=filled)
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size([ROWS, 2]), stride=(2, 1)
    )


def _save_sharded(rank: int, world_size: int, path: str) -> None:
    dcp.save({"model": {"w": _sharded(world_size, rank, filled=True)}}, checkpoint_id=path)


def _load_sharded(rank: int, world_size: int, path: str) -> list[Any]:
    target = _sharded(world_size, rank, filled=False)
    dcp.load({"model": {"w": target}}, checkpoint_id=path)
    local: Any = target.to_local()
    return [local.data_.tolist(), local.scale.tolist()]


def test_subclasses_in_dtensors_are_resharded(tmp_path: Path) -> None:
    """2 ranks save; 3 ranks load unevenly; a single process loads the whole tensor."""
    run_ranks(2, _save_sharded, str(tmp_path))
    whole = _weight()
    for at, rows in ((0, whole.data_), (1, whole.scale)):
        parts = [part[at] for part in run_ranks(3, _load_sharded, str(tmp_path))]
        assert [row for part in parts for row in part] == rows.tolist()
    target = _weight(filled=False)
    dcp.load({"model": {"w": target}}, checkpoint_id=tmp_path)
    assert _equal(target, whole)


def test_quantized_weights_of_torchao(tmp_path: Path) -> None:
    """A quantized model, as a `Stateful` of the user, has bit for bit the same outputs after a load."""
    quantization = pytest.importorskip("torchao.quantization")

    def model(seed: int, config: Any) -> torch.nn.Module:
        torch.manual_seed(seed)
        made = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        quantization.quantize_(made, config)
        return made

    int8 = quantization.Int8WeightOnlyConfig
    saved, inputs = model(0, int8()), torch.randn(3, 64)
    dcp.save({"model": saved}, checkpoint_id=tmp_path)
    loaded = model(1, int8())
    assert not torch.equal(loaded(inputs), saved(inputs))
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    assert torch.equal(loaded(inputs), saved(inputs))
    with pytest.raises(dcp.CheckpointError):
        dcp.load({"model": torch.nn.Linear(64, 32)}, checkpoint_id=tmp_path)


# -- block-quantized weights of files -----------------------------------------------------------------------

BLOCK = 4


def write_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder with an fp8 weight in blocks, an MXFP4 and a plain weight. Return their values."""
    generator = torch.Generator().manual_seed(1)
    quantized = torch.randn(6, 9, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator) + 0.5
    codes = torch.randint(0, 256, (2, 3, 5, 4), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 134, (2, 3, 5), generator=generator, dtype=torch.uint8)
    plain = torch.randn(7, generator=generator)
    tensors = {
        "a.weight": quantized,
        "a.weight_scale_inv": scales,
        "b_blocks": codes,
        "b_scales": exponents,
        "plain": plain,
    }
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    large = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:6, :9]
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(-2)
    blocks = pairs * torch.exp2(exponents.float() - 127)[..., None]
    return {"a.weight": quantized.float() * large, "b_blocks": blocks.flatten(-2), "plain": plain}


def _load_dequantized(rank: int, world: int, folder: str, expected: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for dim in range(3):
        state = {
            name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(min(dim, value.dim() - 1))])
            for name, value in expected.items()
        }
        reader = dcp.QuantizedHuggingFaceStorageReader(folder, block_size=BLOCK)
        dcp.load(state, storage_reader=reader)
        for name, value in expected.items():
            assert torch.equal(state[name].full_tensor(), value), (dim, name)


@pytest.mark.parametrize("world", [1, 2])
def test_quantized_weights_load_dequantized(world: int, tmp_path: Path) -> None:
    """fp8 in blocks and MXFP4 are loaded as float32 by default, with any sharding."""
    expected = write_folder(tmp_path)
    run_ranks(world, _load_dequantized, str(tmp_path), expected)
