"""``QuantizedHuggingFaceStorageReader``: block-quantized weights load into a state dict of another dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks

BLOCK = 4


def write_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A folder with an fp8 weight in blocks, an MXFP4 weight and a plain one; what they stand for."""
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


def load_sharded(rank: int, world: int, folder: str, expected: dict[str, torch.Tensor]) -> None:
    """Load shards along each dimension."""
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
def test_weights_arrive_dequantized(world: int, tmp_path: Path) -> None:
    """fp8 in blocks and MXFP4, into float32 by default, whatever the sharding."""
    expected = write_folder(tmp_path)
    run_ranks(world, load_sharded, str(tmp_path), expected)


def test_another_dtype_than_the_readers_is_an_error(tmp_path: Path) -> None:
    """``target_dtype`` is the dtype that is stored, as far as a load can see."""
    expected = write_folder(tmp_path)
    state = {"a.weight": torch.zeros(6, 9, dtype=torch.bfloat16)}
    with pytest.raises(dcp.errors.DtypeMismatchError, match="stored is float32"):
        dcp.load(state, storage_reader=dcp.QuantizedHuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    reader = dcp.QuantizedHuggingFaceStorageReader(
        str(tmp_path), target_dtype=torch.bfloat16, block_size=BLOCK
    )
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.allclose(state["a.weight"].float(), expected["a.weight"], rtol=0.01)
