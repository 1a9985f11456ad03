"""Checkpoints with a million tensors, or a tensor of gigabytes: no limit of a format is exceeded."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp

_BYTES = (4 << 30) + (3 << 20) + 5


@pytest.mark.exhaustive
def test_a_tensor_above_4_gib_round_trips(tmp_path: Path) -> None:
    """A payload that needs zip64 is saved, loaded, verified, and read by stock torch."""
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


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_million_tensors_with_long_names(tmp_path: Path) -> None:
    """A manifest above 64 MiB is committed, loaded and replaced, and the checkpoint also loads without it."""
    values = torch.arange(1_000_000, dtype=torch.float32)
    names = (blake2b(str(row).encode()).hexdigest() for row in range(1_000_000))  # hashes do not compress
    state = {name: values[row : row + 1].clone() for row, name in enumerate(names)}
    for _ in range(2):
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    manifest = tmp_path / "manifest.msgpack"
    assert manifest.stat().st_size > 64 << 20
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    for has_manifest in (True, False):
        for tensor in state.values():
            tensor.zero_()
        if not has_manifest:
            manifest.unlink()
        dcp.load(dict(state), checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(torch.cat(list(state.values())), values)
