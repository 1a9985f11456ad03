"""The demo on an S3 server. Internal: its parts are tried one by one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import dcp
from dcp.demo.places import BucketPlace, FolderPlace, Place
from dcp.demo.s3_server import S3Server
from dcp.demo.training.stock import load_damaged, load_with_stock_torch

ROOT = Path(__file__).parents[2]
PART_BYTES = 8 << 20


def state(mebibytes: int = 20) -> dict[str, torch.Tensor]:
    """More than two parts of an upload, in tensors of a MiB."""
    tensors = torch.arange(mebibytes << 18, dtype=torch.float32).chunk(mebibytes)
    return {f"layer.{number}": tensor.clone() for number, tensor in enumerate(tensors)}


def damage_a_copy(place: Place, job: str) -> None:
    """Copy a checkpoint, flip a bit of the copy; only the copy is damaged, and verification finds it."""
    place.copy(job, 2, f"{job}-copy")
    assert place.findings(f"{job}-copy", 2) == []
    fqn = place.flip_bit(f"{job}-copy", 2)
    (finding,) = place.findings(f"{job}-copy", 2)
    assert fqn in finding
    assert place.findings(job, 2) == []
    assert place.newest(f"{job}-copy") is None and place.newest(job) == "step-00000002"
    with pytest.raises(dcp.CorruptCheckpointError):
        dcp.load(
            state(2),
            checkpoint_id=place.checkpoint(f"{job}-copy", 2),
            storage_options=place.storage_options,
            no_dist=True,
        )


def test_copies_and_damage_are_the_same_in_folders_and_on_s3(s3_server: S3Server, tmp_path: Path) -> None:
    """Copying and damaging goes through the stores, and has the same effect on both."""
    for place in (FolderPlace(tmp_path), BucketPlace(s3_server)):
        job = f"demo-{tmp_path.name}-whole"
        url = place.checkpoint(job, 2)
        dcp.save(state(2), checkpoint_id=url, storage_options=place.storage_options, no_dist=True)
        damage_a_copy(place, job)


def test_stock_torch_reads_from_s3_by_environment_variables(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's last chapter: stock loads the very bytes, and a flipped bit without a word."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    place, job = BucketPlace(s3_server), f"demo-{tmp_path.name}-stock"
    whole = place.checkpoint(job, 2)
    dcp.save(state(2), checkpoint_id=whole, no_dist=True)
    place.copy(job, 2, f"{job}-damaged")
    place.flip_bit(f"{job}-damaged", 2)
    wanted = load_with_stock_torch(whole)
    assert len(wanted) == 2
    by_stock, by_ours = load_damaged(place.checkpoint(f"{job}-damaged", 2))
    assert isinstance(by_stock, dict) and len(wanted.items() - by_stock.items()) == 1
    assert by_ours.startswith("CorruptCheckpointError")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_demo_on_s3_from_end_to_end(tmp_path: Path) -> None:
    """It passes its own checks; the killed save left half of each rank's upload, and no object."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "dcp.demo", "--s3", "--root", str(tmp_path), "--save-every", "2"]
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=880)
        output.seek(0)
        text = output.read()
    assert done.returncode == 0, text
    assert "FAILED" not in text and re.search(r"All ([0-9]+) checks passed", text), text
    halves = re.findall(r"^ +(__[01]_0\.[0-9a-f]+\.distcp) +([0-9,]+) +([0-9,]+)$", text, re.MULTILINE)
    assert len(halves) == 2
    for _, size, full in halves:
        assert int(size.replace(",", "")) == PART_BYTES < int(full.replace(",", ""))
    assert "step-00000006 is not there" in text
    assert not (tmp_path / "s3").exists() and not (tmp_path / "checkpoints").exists()
