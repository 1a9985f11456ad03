from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp

_BYTES = (4 << 30) + (3 << 20) + 5


@pytest.mark.exhaustive
def test_a_tensor_above_4_gib_goes_both_ways(tmp_path: Path) -> None:
    """Payloads that need zip64 are saved, loaded, verified, and read by stock torch."""
    tensor = torch.arange(_BYTES, dtype=torch.uint8)
    dcp.save({"small": torch.ones(3), "w": tensor}, checkpoint_id=tmp_path / "c")
    target = {"small": torch.zeros(3), "w": torch.zeros(_BYTES, dtype=torch.uint8)}
    report = dcp.load(target, checkpoint_id=tmp_path / "c")
    assert torch.equal(target["w"], tensor)
    assert torch.equal(target["small"], torch.ones(3))
    assert report.blocks_unverified == 0
    target["w"].zero_()
    stock.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(target["w"], tensor)
