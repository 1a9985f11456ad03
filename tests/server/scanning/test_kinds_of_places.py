"""Everything that is a checkpoint is found, on a disk and on S3, as libraries write it; nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import dcp
from dcp.demo.s3_server import S3Server
from dcp.server.database.engine import Database
from dcp.server.roots import StorageRoot
from dcp.server.scanning.facts import step_of_name
from dcp.server.scanning.walk import Candidate, Left, walk
from dcp.server.settings import RootSettings
from dcp.storage.stores.memory import MemoryStore
from tests.support.catalog_roots import age, roots_of, rows, scan

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

FOUND = {
    "ours/step-00000003": ("committed", "dcp", 3),
    "ours/started": ("incomplete", "dcp", None),
    "stock/global_step7": ("committed", "torch_dcp", 7),
    "files/epoch-2.pt": ("committed", "torch_save", 2),
    "files/weights.safetensors": ("committed", "safetensors", None),
    "files/broken.ckpt": ("unreadable", "torch_save", None),
    "hub": ("committed", "safetensors", None),
    "hub/checkpoint-500": ("committed", "safetensors", 500),
    "lone.safetensors": ("committed", "safetensors", None),
}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with checkpoints of all kinds, and other things."""
    root = tmp_path / "root"
    dcp.save({"model": WEIGHTS, "lr": 0.1}, checkpoint_id=root / "ours" / "step-00000003", no_dist=True)
    (root / "ours" / "started").mkdir()
    (root / "ours" / "started" / "__0_0.0000abcd.distcp").write_bytes(b"data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save({"model": WEIGHTS}, checkpoint_id=root / "stock" / "global_step7", no_dist=True)
    (root / "files").mkdir()
    torch.save(WEIGHTS, root / "files" / "epoch-2.pt")
    save_file(WEIGHTS, root / "files" / "weights.safetensors")
    save_file(WEIGHTS, root / "lone.safetensors")
    (root / "files" / "broken.ckpt").write_bytes(b"no checkpoint")
    for name in ("notes.txt", "train.bin", "config.json"):
        (root / "files" / name).write_bytes(b"{}")
    for folder in (root / "hub", root / "hub" / "checkpoint-500"):
        folder.mkdir()
        for number, (name, tensor) in enumerate(WEIGHTS.items(), 1):
            save_file({name: tensor}, folder / f"model-{number:05}-of-00002.safetensors")
        weights = {name: f"model-{number:05}-of-00002.safetensors" for number, name in enumerate(WEIGHTS, 1)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        torch.save({"state": {}}, folder / "optimizer.pt")
        (folder / "training_args.bin").write_bytes(b"args")
    (root / "empty" / "folder").mkdir(parents=True)
    age(root)
    return root


def found_in(database: Database) -> dict[str, tuple[str, str, int | None]]:
    """State, format and step of each checkpoint, by key."""
    return {key: (row["state"], row["format"], row["step"]) for key, row in rows(database).items()}


def test_on_a_disk(database: Database, checkpoints: Path) -> None:
    """Of our saves, stock's, files and model hubs' folders; the same names have the same structure."""
    report = scan(database, roots_of(checkpoints))
    assert found_in(database) == FOUND
    assert report.trouble == []
    found = rows(database)
    assert found["hub"]["structure_id"] == found["files/weights.safetensors"]["structure_id"]
    assert found["hub"]["structure_id"] != found["stock/global_step7"]["structure_id"]
    assert found["stock/global_step7"]["bytes"] > 0
    assert found["hub"]["file_count"] == 2
    assert scan(database, roots_of(checkpoints)).opened == 0


def test_on_s3(database: Database, checkpoints: Path, s3_server: S3Server, s3_root: str) -> None:
    """The same by listings of objects; what is deleted there has vanished."""
    files = fsspec.filesystem("s3", **s3_server.storage_options)
    files.put(f"{checkpoints}/", f"{s3_root}/", recursive=True)
    roots = roots_of(s3_root, storage_options=s3_server.storage_options)
    assert scan(database, roots).trouble == []
    # A file that was written a moment ago and cannot be read may be half of one.
    assert found_in(database) == FOUND | {"files/broken.ckpt": ("incomplete", "torch_save", None)}
    files.rm(f"{s3_root}/hub/", recursive=True)
    assert scan(database, roots).vanished == 2
    assert found_in(database)["hub/checkpoint-500"] == ("vanished", "safetensors", 500)


def test_in_memory(database: Database, tmp_path: Path) -> None:
    """Folders whose names begin alike are told apart, and left once."""
    place = f"memory://scan-{tmp_path.name}"
    source = tmp_path / "step-1"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=source, no_dist=True)
    for key in ("run/step-1", "run/inner/step-1", "run-b/step-1"):
        store = MemoryStore(f"{place.removeprefix('memory://')}/{key}")
        for path in source.iterdir():
            with store.create(path.name, durable=False) as file:
                file.write(path.read_bytes())
    scan(database, roots_of(place))
    scan(database, roots_of(place))
    assert found_in(database) == dict.fromkeys(
        ("run-b/step-1", "run/inner/step-1", "run/step-1"), ("committed", "dcp", 1)
    )


def test_stock_saved_over_ours(database: Database, tmp_path: Path) -> None:
    """Then stock's metadata is the truth about the folder, though our manifest is still there."""
    folder = tmp_path / "run" / "step-1"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    age(tmp_path)
    scan(database, roots_of(tmp_path))
    assert found_in(database) == {"run/step-1": ("committed", "dcp", 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save({"w": torch.ones(2), "v": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    scan(database, roots_of(tmp_path))
    assert found_in(database) == {"run/step-1": ("committed", "torch_dcp", 1)}


def test_steps_in_the_folder_of_a_checkpoint(database: Database, tmp_path: Path) -> None:
    """A commit that somebody has once made in the folder of a run does not hide the run's steps."""
    for key in ("run", "run/step-1", "run/step-2"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / key, no_dist=True)
    scan(database, roots_of(tmp_path))
    assert sorted(found_in(database)) == ["run", "run/step-1", "run/step-2"]


def test_ranks_that_saved_on_their_own(database: Database, tmp_path: Path) -> None:
    """What ranks committed without each other is one checkpoint."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "whole", no_dist=True)
    folder = tmp_path / "run" / "step-4"
    folder.mkdir(parents=True)
    for path in (tmp_path / "whole").iterdir():
        name = "__0.manifest.msgpack" if path.name == "manifest.msgpack" else path.name
        if path.name != ".metadata":
            shutil.copy(path, folder / name)
    shutil.rmtree(tmp_path / "whole")
    age(tmp_path)
    scan(database, roots_of(tmp_path))
    assert found_in(database) == {"run/step-4": ("committed", "dcp", 4)}
    assert scan(database, roots_of(tmp_path)).opened == 0


def test_a_folder_that_may_not_be_listed(tmp_path: Path) -> None:
    """It is left with the reason, and the others are found."""
    for name in ("closed", "open"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / name / "step-1", no_dist=True)
    (tmp_path / "closed").chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        found = list(walk(StorageRoot("main", RootSettings(url=str(tmp_path)))))
    finally:
        os.seteuid(user)
        (tmp_path / "closed").chmod(0o755)
    assert [each.key for each in found if isinstance(each, Candidate)] == ["open/step-1"]
    left = {each.run_key: each.problem for each in found if isinstance(each, Left)}
    assert left.pop("closed") == "PermissionError: Permission denied"
    assert set(left.values()) == {None} and {"", "open"} <= left.keys()


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ("run/step-00000100", 100),
        ("checkpoint-7", 7),
        ("epoch-3.pt", 3),
        ("run-5/last", None),
        ("global_step100", 100),
        ("Epoch=1-step=0200.ckpt", 200),
        ("run/1200", 1200),
        ("model_1000.pt", 1000),
        ("exports/seed-1.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("last-v1.ckpt", None),
        ("2026-11-23", None),
        ("9" * 30, None),
        (f"snapshots/{'a1' * 20}", None),
    ],
)
def test_step_of_a_name(key: str, step: int | None) -> None:
    """The number at the end, before a suffix, after a word for steps or by itself; no seed or date."""
    assert step_of_name(key) == step
