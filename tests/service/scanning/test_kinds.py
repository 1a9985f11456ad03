"""Checkpoints of all formats and libraries are found on disk and on S3, and no other files."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import fsspec
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import dcp
from tests.support.app import running_app
from tests.support.catalog import Catalog
from tests.support.catalog_roots import age
from tests.support.databases import MakeDatabase
from tests.support.s3 import S3Server

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

FOUND = {
    "dcp/step-00000003": ("committed", "dcp", 3),
    "dcp/started": ("incomplete", "dcp", None),
    "stock/global_step7": ("committed", "torch_dcp", 7),
    "files/epoch-2.pt": ("committed", "torch_save", 2),
    "files/weights.safetensors": ("committed", "safetensors", None),
    "files/broken.ckpt": ("unreadable", "torch_save", None),
    "hub": ("committed", "safetensors", None),
    "hub/checkpoint-500": ("committed", "safetensors", 500),
    "lone.safetensors": ("committed", "safetensors", None),
}


def fill(root: Path) -> None:
    """Write checkpoints of all kinds, and other files."""
    dcp.save({"model": WEIGHTS, "lr": 0.1}, checkpoint_id=root / "dcp" / "step-00000003", no_dist=True)
    (root / "dcp" / "started").mkdir()
    (root / "dcp" / "started" / "__0_0.0000abcd.distcp").write_bytes(b"data")
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


def found_in(catalog: Catalog) -> dict[str, tuple[str, str, int | None]]:
    """Return state, format and step of each checkpoint, by key."""
    return {key: (row["state"], row["format"], row["step"]) for key, row in catalog.rows().items()}


def test_scans_find_all_kinds_on_a_disk(catalog: Catalog) -> None:
    """A scan finds dcp, stock torch, single files and model hubs; equal names give equal structures."""
    fill(catalog.place(""))
    assert catalog.scan()["trouble"] == []
    assert found_in(catalog) == FOUND
    found = catalog.rows()
    assert found["hub"]["structure_id"] == found["files/weights.safetensors"]["structure_id"]
    assert found["hub"]["structure_id"] != found["stock/global_step7"]["structure_id"]
    assert found["stock/global_step7"]["bytes"] > 0
    assert found["hub"]["file_count"] == 2
    assert catalog.scan()["opened"] == 0


def test_scans_find_all_kinds_on_s3(
    make_database: MakeDatabase, tmp_path: Path, s3_server: S3Server, s3_root: str
) -> None:
    """A scan of S3 lists the objects; deleted checkpoints vanish."""
    fill(tmp_path / "source")
    files = fsspec.filesystem("s3", **s3_server.storage_options)
    files.put(f"{tmp_path / 'source'}/", f"{s3_root}/", recursive=True)
    names = ("run/step-1", "run/step-1.b", "run/step-10", "run/step-1/deep")  # sorted before and behind "/"
    for key in names:
        files.put(f"{tmp_path / 'source/lone.safetensors'}", f"{s3_root}/{key}/model.safetensors")
    roots = {"main": {"url": s3_root, "storage_options": s3_server.storage_options}}
    with running_app(make_database(), tmp_path, roots=roots) as app:
        catalog = Catalog(app, tmp_path)
        assert catalog.scan()["trouble"] == []
        # An unreadable file written a moment ago may be incomplete.
        found = found_in(catalog)
        assert {found.pop(key)[:2] for key in names} == {("committed", "safetensors")}
        assert found == FOUND | {"files/broken.ckpt": ("incomplete", "torch_save", None)}
        files.rm(f"{s3_root}/hub/", recursive=True)
        assert catalog.scan()["vanished"] == 2
        assert found_in(catalog)["hub/checkpoint-500"] == ("vanished", "safetensors", 500)


def test_independent_commits_of_ranks(catalog: Catalog) -> None:
    """Independent commits of ranks are one checkpoint."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=catalog.place("whole"), no_dist=True)
    folder = catalog.place("run/step-4")
    folder.mkdir(parents=True)
    for path in (catalog.place("whole")).iterdir():
        name = "__0.manifest.msgpack" if path.name == "manifest.msgpack" else path.name
        if path.name != ".metadata":
            shutil.copy(path, folder / name)
    shutil.rmtree(catalog.place("whole"))
    age(catalog.place(""))
    catalog.scan()
    assert found_in(catalog) == {"run/step-4": ("committed", "dcp", 4)}
    assert catalog.scan()["opened"] == 0


STEPS: dict[str, int | None] = {
    "run/step-00000100": 100,
    "checkpoint-7": 7,
    "epoch-3.pt": 3,
    "run-5/last": None,
    "global_step100": 100,
    "Epoch=1-step=0200.ckpt": 200,
    "run/1200": 1200,
    "model_1000.pt": 1000,
    "last-v1.ckpt": None,
    "exports/seed-1.safetensors": None,
    "model-00001-of-00002.safetensors": None,
    "2026-11-23": None,
    "9" * 30: None,
    f"snapshots/{'a1' * 20}": None,
}


def test_steps_are_read_from_names(catalog: Catalog) -> None:
    """The step is the last number of a name, alone or behind a word for steps, and no seed or date."""
    weights = catalog.folder / "weights.safetensors"
    save_file(WEIGHTS, weights)
    for key in STEPS:
        if key.endswith((".ckpt", ".pt")):
            catalog.place(key).parent.mkdir(parents=True, exist_ok=True)
            torch.save(WEIGHTS, catalog.place(key))
        elif key.endswith(".safetensors"):
            catalog.place(key).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(weights, catalog.place(key))
        else:
            catalog.save(key)
    age(catalog.place(""))
    catalog.scan()
    assert {key: row["step"] for key, row in catalog.rows().items()} == STEPS
