"""safetensors files and Hugging Face folders, compared with the library safetensors and with torch."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.stores import MemoryStore, PosixStore
from tests.support.torch_files import as_bytes, tensor_at

MAX_HEADER_BYTES = 100_000_000


def opened(data: bytes) -> CheckpointIndex:
    """Return the index of a file."""
    store = MemoryStore("tests/formats-safetensors")
    store.publish("m.safetensors", data, durable=False)
    return dcp.open_index(f"{store.url}/m.safetensors")


def blob(header: Any, data: bytes = b"") -> bytes:
    """Return a file with ``header`` (text, or a value for json) and ``data``."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    """Return one entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (1 << 63).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        blob(""),
        blob("{} x"),
        blob("{" * 50_000),
        blob('{"a":' + "[" * 50_000),
        blob('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}', b"x"),
        blob('{"a": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
        blob('{"a": NaN}'),
        blob('{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
        (3).to_bytes(8, "little") + b'{"\xff',
        blob({"__metadata__": {"a": 1}}),
        blob({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
        blob({"a": tensor(0, 2, [1])}, b"xy"),
        blob({"a": tensor(1, 2, [1])}, b"xy"),
        blob({"a": tensor(0, 2, [2]), "b": tensor(1, 3, [2])}, b"xyz"),
        blob({"a": tensor(0, 1, [1]), "b": tensor(2, 3, [1])}, b"xyz"),
        blob({"a": tensor(0, 1, [1])}, b""),
        blob({"a": tensor(0, 1, [1])}, b"xy"),
        blob({"a": tensor(1, 0, [1])}, b"x"),
        blob({"a": tensor(0, 1, [-1])}, b"x"),
        blob({"a": tensor(0, 1, [1.0])}, b"x"),  # type: ignore[list-item]
        blob({"a": tensor(0, 1, [1] * 65)}, b"x"),
        blob({"a": tensor(0, 0, [1 << 32, 1 << 32])}),
        blob('{"a": {"dtype": "U8", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 1]}}', b"x"),
        blob({"a": tensor(0, 1, [1], ["U8"])}, b"x"),  # type: ignore[arg-type]
    ],
    ids=lambda data: repr(data[8:40]),
)
def test_files_against_the_specification_are_refused(data: bytes) -> None:
    """Holes, overlaps, wrong sizes, doubled keys and broken JSON raise the typed error, quickly."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            opened(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_unknown_element_type_is_named() -> None:
    """A dtype of a newer specification is unsupported, not corrupt, and the error names it."""
    with pytest.raises(UnsupportedFormatError, match=r"F6_E2M3.*newer safetensors"):
        opened(blob({"a": tensor(0, 3, [4], "F6_E2M3")}, b"abc"))


def test_empty_files_and_trailing_spaces() -> None:
    """A file without tensors, and a header padded with spaces to align the data, are valid."""
    assert opened(blob("{}")).tensor_count == 0
    padded = blob('{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}   ', b"x")
    assert opened(padded).shape(0) == ()


def _weights(count: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    weights = {f"layers.{n}.weight": torch.randn(n + 1, 3, generator=generator) for n in range(count)}
    weights["scale"] = torch.tensor(2.0, dtype=torch.bfloat16)
    weights["empty"] = torch.zeros(0, 3)
    weights["fp8"] = torch.ones(5).to(torch.float8_e4m3fn)
    return weights


def _sharded(folder: Path, weights: dict[str, torch.Tensor], files: int = 3) -> dict[str, str]:
    """Write a sharded folder as Hugging Face does, and return the weight map."""
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


def test_a_single_file_is_read(tmp_path: Path) -> None:
    """A file is read by path, by folder, and under another name; its metadata becomes user metadata."""
    weights = _weights()
    path = tmp_path / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt", "note": "x"})
    for index in (dcp.open_index(path), dcp.open_index(tmp_path)):
        _assert_holds(index, tmp_path, load_file(path))
        assert index.user == {"format": "pt", "note": "x"} and index.format == "safetensors"
    path.rename(tmp_path / "blob")
    _assert_holds(dcp.open_index(tmp_path / "blob"), tmp_path, weights)


def test_a_sharded_folder(tmp_path: Path) -> None:
    """Each tensor is read from the file in the map; other files of the folder are ignored."""
    weights = _weights(7)
    _sharded(tmp_path, weights)
    index = dcp.open_index(tmp_path)
    _assert_holds(index, tmp_path, weights)
    assert len(index.files) == 3 and index.user == {"format": "pt"}
    assert index.planner_data["scale"] == ("scale",)


def test_torch_files_with_a_map(tmp_path: Path) -> None:
    """A pytorch_model.bin.index.json names torch.save files; ties in a file, strides and values are kept."""
    first = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2), "note": "text"}
    first["tied"] = first["b"]
    second = {"c": torch.arange(3.0)}
    torch.save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(second, tmp_path / "pytorch_model-00002-of-00002.bin")
    mapped = {
        fqn: f"pytorch_model-0000{n}-of-00002.bin" for n, part in ((1, first), (2, second)) for fqn in part
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": mapped}))
    index = dcp.open_index(tmp_path)
    every = (first | second).items()
    tensors = {fqn: value for fqn, value in every if isinstance(value, torch.Tensor)}
    _assert_holds(index, tmp_path, tensors)
    assert index.format == "torch_save" and index.objects.fqns == ["note"]
    row = index.position["a"]
    assert index.payload_strides == {int(index.chunk_start[row]): (1, 3)}
    assert len(index.record_crcs) == 4
    assert index.payload_offsets[index.position["b"]] == index.payload_offsets[index.position["tied"]]


def test_shards_of_stocks_hugging_face_writer(tmp_path: Path) -> None:
    """Files with offsets by stock's HuggingFaceStorageWriter are shards of one tensor."""
    whole = torch.arange(30.0).view(6, 5)
    for number, rows in enumerate((slice(0, 2), slice(2, 6)), start=1):
        noted = {"w": {"saved_offsets": [rows.start, 0]}}
        save_file(
            {"w": whole[rows].contiguous(), f"own{number}": torch.ones(number)},
            tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(noted), "DCP_VERSION": "1.0", "format": "pt"},
        )
    index = dcp.open_index(tmp_path)
    row = index.position["w"]
    assert index.shape(row) == (6, 5) and [index.box(chunk)[0] for chunk in index.chunks(row)] == [
        (0, 0),
        (2, 0),
    ]
    assert "DCP_SHARDING_INFO" not in index.user
    target = torch.zeros(6, 5)
    dcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, whole)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="files are missing"):
        dcp.open_index(tmp_path)


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
        "not valid JSON",
    ),
    "duplicate names": (_duplicate, CheckpointFormatError, "without an index that selects one"),
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
def test_damaged_folders_are_refused(tmp_path: Path, name: str) -> None:
    """An error names the file that is missing or inconsistent."""
    damage, error, text = DAMAGES[name]
    _sharded(tmp_path, _weights(7))
    damage(tmp_path)
    with pytest.raises(error, match=text):
        dcp.open_index(tmp_path)


def test_links_are_followed_only_on_request(tmp_path: Path) -> None:
    """A model hub's cache, a folder of links, is refused with an error that says how to read it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    weights = _weights()
    save_file(weights, tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    with pytest.raises(CheckpointNotFoundError, match="follow_links"):
        dcp.open_index(tmp_path / "snapshot")
    reader = dcp.FileSystemReader(tmp_path / "snapshot", open_store=partial(PosixStore, follow_links=True))
    state = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(as_bytes(state[name]) == as_bytes(tensor) for name, tensor in weights.items())
