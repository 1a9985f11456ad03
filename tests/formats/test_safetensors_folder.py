"""safetensors files and Hugging Face folders, with safetensors' own library and torch's as the oracles."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file, save_file

from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening.sources import index_at, index_of_file, index_of_folder, locate, open_source
from dcp.storage.stores import MemoryStore, PosixStore
from tests.support.torch_files import as_bytes, tensor_at


def _weights(count: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    weights = {f"layers.{n}.weight": torch.randn(n + 1, 3, generator=generator) for n in range(count)}
    weights["scale"] = torch.tensor(2.0, dtype=torch.bfloat16)
    weights["empty"] = torch.zeros(0, 3)
    weights["fp8"] = torch.ones(5).to(torch.float8_e4m3fn)
    return weights


def _sharded(folder: Path, weights: dict[str, torch.Tensor], files: int = 3) -> dict[str, str]:
    """As Hugging Face writes them; the weight map."""
    folder.mkdir(exist_ok=True)
    mapped = {fqn: f"model-{n % files + 1:05}-of-{files:05}.safetensors" for n, fqn in enumerate(weights)}
    for name in set(mapped.values()):
        part = {fqn: weights[fqn] for fqn, file in mapped.items() if file == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    document = {"metadata": {"total_size": 5}, "weight_map": mapped}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    (folder / "config.json").write_text("{}")
    return mapped


def _assert_holds(index: CheckpointIndex, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    assert set(index.fqns) == set(weights)
    data = {name: (folder / name).read_bytes() for name in index.files}
    for row, fqn in enumerate(index.fqns):
        name = index.files[int(index.chunk_files[index.chunk_start[row]])]
        got = tensor_at(index, data[name], row)
        assert got.dtype == weights[fqn].dtype and got.shape == weights[fqn].shape
        assert as_bytes(got) == as_bytes(weights[fqn])


def test_one_file(tmp_path: Path) -> None:
    """A file by itself, in its folder, and under another name; metadata is user metadata."""
    weights = _weights()
    path = tmp_path / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt", "note": "x"})
    for index in (open_source(path).index, open_source(tmp_path).index):
        _assert_holds(index, tmp_path, load_file(path))
        assert index.user == {"format": "pt", "note": "x"} and index.format == "safetensors"
    path.rename(tmp_path / "blob")
    _assert_holds(open_source(tmp_path / "blob").index, tmp_path, weights)


def test_a_sharded_folder(tmp_path: Path) -> None:
    """Every tensor is found where the map says; other files of the folder do not matter."""
    weights = _weights(7)
    _sharded(tmp_path, weights)
    index = open_source(tmp_path).index
    _assert_holds(index, tmp_path, weights)
    assert len(index.files) == 3 and index.user == {"format": "pt"}
    assert index.planner_data["scale"] == ("scale",)


def test_a_sharded_folder_without_its_map(tmp_path: Path) -> None:
    """The numbers in the names tell whether all files are there."""
    weights = _weights(7)
    _sharded(tmp_path, weights)
    (tmp_path / "model.safetensors.index.json").unlink()
    _assert_holds(open_source(tmp_path).index, tmp_path, weights)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="1 of the 3 files"):
        open_source(tmp_path)


def test_torch_files_with_a_map(tmp_path: Path) -> None:
    """pytorch_model.bin.index.json names torch.save files; ties within a file, strides and values survive."""
    first = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2), "note": "text"}
    first["tied"] = first["b"]
    second = {"c": torch.arange(3.0)}
    torch.save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(second, tmp_path / "pytorch_model-00002-of-00002.bin")
    mapped = {
        fqn: f"pytorch_model-0000{n}-of-00002.bin" for n, part in ((1, first), (2, second)) for fqn in part
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": mapped}))
    index = open_source(tmp_path).index
    every = (first | second).items()
    tensors = {fqn: value for fqn, value in every if isinstance(value, torch.Tensor)}
    _assert_holds(index, tmp_path, tensors)
    assert index.format == "torch_save" and index.objects.fqns == ["note"]
    row = index.position["a"]
    assert index.payload_strides == {int(index.chunk_start[row]): (1, 3)}
    assert len(index.record_crcs) == 4
    assert index.payload_offsets[index.position["b"]] == index.payload_offsets[index.position["tied"]]


def test_shards_that_stock_dcp_notes(tmp_path: Path) -> None:
    """Files in which stock's HuggingFaceStorageWriter noted offsets are shards of one tensor."""
    whole = torch.arange(30.0).view(6, 5)
    for number, rows in enumerate((slice(0, 2), slice(2, 6)), start=1):
        noted = {"w": {"saved_offsets": [rows.start, 0]}}
        save_file(
            {"w": whole[rows].contiguous(), f"own{number}": torch.ones(number)},
            tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(noted), "DCP_VERSION": "1.0", "format": "pt"},
        )
    index = open_source(tmp_path).index
    row = index.position["w"]
    assert index.shape(row) == (6, 5) and [index.box(chunk)[0] for chunk in index.chunks(row)] == [
        (0, 0),
        (2, 0),
    ]
    assert "DCP_SHARDING_INFO" not in index.user
    target = torch.zeros(6, 5)
    import dcp

    dcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, whole)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="files are missing"):
        open_source(tmp_path)


def test_what_stock_torch_writes(tmp_path: Path) -> None:
    """A folder of torch.distributed.checkpoint.HuggingFaceStorageWriter."""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    writer = stock.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 2})
    stock.save(dict(weights), storage_writer=writer, no_dist=True)
    _assert_holds(open_source(tmp_path).index, tmp_path, weights)


def test_a_commit_comes_before_weights(tmp_path: Path) -> None:
    """In a folder with both, what was committed is the checkpoint."""
    stock.save({"committed": torch.ones(1)}, checkpoint_id=str(tmp_path), no_dist=True)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_source(tmp_path).index.fqns) == ["committed"]


def test_where_things_are(tmp_path: Path) -> None:
    """Local files are files, whatever their names; URLs only with a known suffix, and if they are there."""
    torch.save({"a": torch.ones(1)}, tmp_path / "checkpoint")
    (tmp_path / "link.pt").symlink_to(tmp_path / "checkpoint")
    for name in ("checkpoint", "link.pt"):
        place = locate(tmp_path / name)
        assert (place.store.url, place.file) == (str(tmp_path), "checkpoint")
    assert locate((tmp_path / "checkpoint").as_uri()).file == "checkpoint"
    assert locate(tmp_path).file is None and locate(tmp_path / "absent.pt").file is None
    name = f"memory://place-{uuid.uuid4().hex}"
    store = MemoryStore(name.removeprefix("memory://"))
    with store.create("m.PT", durable=False) as handle:
        handle.write((tmp_path / "checkpoint").read_bytes())
    assert locate(f"{name}/m.PT").file == "m.PT" and locate(f"{name}/m").file is None
    assert locate(f"{name}/n.pt").file is None
    assert list(index_at(locate(f"{name}/m.PT")).fqns) == ["a"]


def _break_map(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return damage


def _duplicate(folder: Path) -> None:
    for name in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"):
        part = load_file(folder / name) | {"scale": torch.ones(1)}
        save_file(part, folder / name)


DAMAGES: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "traversal": (
        _break_map(lambda d: d["weight_map"].update(scale="../x.safetensors")),
        CheckpointFormatError,
        "not allowed",
    ),
    "absolute": (
        _break_map(lambda d: d["weight_map"].update(scale="/etc/x.safetensors")),
        CheckpointFormatError,
        "not allowed",
    ),
    "other suffix": (
        _break_map(lambda d: d["weight_map"].update(scale="x.bin")),
        CheckpointFormatError,
        "no \\*.safetensors file",
    ),
    "no map": (_break_map(lambda d: d.pop("weight_map")), CheckpointFormatError, "no weight_map"),
    "map of lists": (
        _break_map(lambda d: d["weight_map"].update(scale=["x"])),
        CheckpointFormatError,
        "scale",
    ),
    "unknown tensor": (
        _break_map(lambda d: d["weight_map"].update(ghost="model-00001-of-00003.safetensors")),
        CorruptCheckpointError,
        "ghost",
    ),
    "missing file": (
        lambda folder: (folder / "model-00003-of-00003.safetensors").unlink(),
        CorruptCheckpointError,
        "1 of 3 weight files",
    ),
    "no JSON": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        CheckpointFormatError,
        "not JSON",
    ),
    "key twice": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"a": 1, "a": 1}'),
        CheckpointFormatError,
        "twice",
    ),
    "two of one name": (_duplicate, CheckpointFormatError, "nothing says which"),
    "two models": (
        lambda folder: (
            (folder / "model.safetensors.index.json").rename(folder / "a.safetensors.index.json"),
            (folder / "b.safetensors.index.json").write_text("{}"),
        ),
        CheckpointFormatError,
        "several models",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(tmp_path: Path, name: str) -> None:
    """What is missing or contradicts itself is told, with the file's name."""
    damage, error, text = DAMAGES[name]
    _sharded(tmp_path, _weights(7))
    damage(tmp_path)
    with pytest.raises(error, match=text):
        open_source(tmp_path)


@pytest.mark.parametrize("info", ["[]", "{}", '{"w": {}}', '{"w": {"saved_offsets": [-1]}}', '{"w": 5}', "{"])
def test_malformed_sharding_notes(tmp_path: Path, info: str) -> None:
    """Offsets that do not fit are refused; a tensor without any begins at 0."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"DCP_SHARDING_INFO": info})
    if info == "{}":
        assert open_source(path).index.shape(0) == (2,)
        return
    with pytest.raises(CheckpointFormatError):
        index_of_file(PosixStore(tmp_path), "model.safetensors")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """It has no index, and no error of its own."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".tmp-x.safetensors").write_bytes(b"")
    assert index_of_folder(PosixStore(tmp_path)) is None


def test_links_are_followed_only_if_asked(tmp_path: Path) -> None:
    """The cache of a model hub is a folder of links; the error tells how to read it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    weights = _weights()
    save_file(weights, tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    with pytest.raises(CheckpointNotFoundError, match="follow_links"):
        open_source(tmp_path / "snapshot")
    followed = open_source(tmp_path / "snapshot", open_store=partial(PosixStore, follow_links=True))
    _assert_holds(followed.index, tmp_path / "snapshot", weights)


def test_many_tensors(tmp_path: Path) -> None:
    """20,000 tensors are one header."""
    weights = {f"layers.{n}.weight": np.full(3, n, np.float32) for n in range(20_000)}
    from safetensors.numpy import save_file as save_arrays

    save_arrays(weights, tmp_path / "model.safetensors")
    index = open_source(tmp_path).index
    assert index.tensor_count == 20_000
    row = index.position["layers.777.weight"]
    data = (tmp_path / "model.safetensors").read_bytes()
    assert tensor_at(index, data, row).tolist() == [777.0] * 3
