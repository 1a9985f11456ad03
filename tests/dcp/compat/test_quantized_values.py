"""Quantized tensors: refused with the reason, where stock torch saves them and loads other values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = [torch.qint8, torch.quint8, torch.qint32]


def quantized(dtype: torch.dtype, scale: float = 0.1) -> torch.Tensor:
    """Numbers from 0 to 3 in units of ``scale``."""
    return torch.quantize_per_tensor(torch.arange(4.0), scale, 3, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_save_says_why_it_cannot_keep_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nothing is written; the error names what would keep the values."""
    for state in (
        {"q": quantized(dtype)},
        {
            "q": torch.quantize_per_channel(
                torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, dtype
            )
        },
    ):
        with pytest.raises(
            dcp.errors.PlanError, match=r"'q'.*scale and a zero point.*int_repr\(\).*dequantize"
        ):
            dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(dcp.CheckpointNotFoundError):
        dcp.load({}, checkpoint_id=tmp_path / "c", no_dist=True)
    kept = {"ints": quantized(dtype).int_repr(), "scale": quantized(dtype).q_scale()}
    dcp.save(kept, checkpoint_id=tmp_path / "c", no_dist=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_stock_torch_saved_is_not_loaded_as_other_values(dtype: torch.dtype, tmp_path: Path) -> None:
    """It forgets the scale, so that loading into another one gives other numbers; here it is refused."""
    stock.save({"q": quantized(dtype)}, checkpoint_id=tmp_path, no_dist=True)
    target = {"q": quantized(dtype, scale=0.5)}
    stock.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert not torch.allclose(target["q"].dequantize(), torch.arange(4.0), atol=0.3)
    with pytest.raises(
        dcp.errors.UnsupportedFormatError, match=r"'q' is quantized \(torch\.q.*scale and zero point"
    ):
        dcp.load({"q": quantized(dtype)}, checkpoint_id=tmp_path, no_dist=True)
