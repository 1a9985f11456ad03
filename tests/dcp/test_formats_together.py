"""Statistics, differences and slices of one model in every format: the same figures, nothing differs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dcp.inspection.values.difference import diff
from dcp.inspection.values.statistics import statistics
from dcp.inspection.values.tensor_reading import open_tensors
from dcp.storage.errors import CorruptCheckpointError
from tests.dcp.cli_support import flip, run, save_ours, save_stock
from tests.support.sharded import grid, save_sharded, tensor_bytes

FORMATS = ["ours", "stock", "sharded", "torch", "safetensors", "huggingface"]


def tensors() -> dict[str, torch.Tensor]:
    """Views, ties, expanded, turned, empty and scalar tensors, of several types."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(120, 100, generator=generator)
    return {
        "a": weight,
        "tied": weight,
        "view": weight[10:20, ::2],
        "turned": torch.randn(60, 40, generator=generator).t(),
        "channels": torch.randn(2, 6, 5, 4, generator=generator).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 5, generator=generator).expand(4, 5),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "eighth": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
    }


def write(root: Path, kind: str, state: dict[str, torch.Tensor]) -> Path:
    """``state`` in a format; returns its checkpoint id."""
    plain = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    if kind == "ours":
        return save_ours(root / "ours", dict(state))
    if kind == "stock":
        return save_stock(root / "stock", dict(state))
    if kind == "sharded":
        return save_sharded(
            root / "sharded", state, {"a": grid((120, 100), (3, 2)), "view": grid((10, 50), (4, 1))}
        )
    if kind == "torch":
        torch.save(state, root / "model.pt")
        return root / "model.pt"
    if kind == "safetensors":
        save_file(plain, root / "model.safetensors")
        return root / "model.safetensors"
    folder = root / "hf"
    folder.mkdir()
    names = sorted(plain)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: plain[name] for name in part}, folder / file)
    where: dict[str, Any] = {
        "metadata": {},
        "weight_map": {n: file for file, part in shards.items() for n in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(where))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in every format."""
    root = tmp_path_factory.mktemp("formats")
    return {kind: write(root, kind, tensors()) for kind in FORMATS}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_tensor_is_read_from_every_format(places: dict[str, Path], kind: str) -> None:
    """Whole, in blocks and in slices: the bytes that torch had."""
    with open_tensors(places[kind]) as reader:
        for name, tensor in tensors().items():
            row = reader.index.position[name]
            assert reader.read(row).tobytes() == tensor_bytes(tensor), name
            part = reader.read(row, (slice(None, None, -2),) if tensor.ndim else ())
            assert np.array_equal(part, reader.read(row)[::-2] if tensor.ndim else reader.read(row))
            tiles = [tile.array for tile in reader.tiles(row, 100)]
            assert sum(tile.size for tile in tiles) == tensor.numel()
            assert sorted(b"".join(tile.tobytes() for tile in tiles)) == sorted(tensor_bytes(tensor))


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_statistics_do_not_depend_on_the_format(places: dict[str, Path], kind: str) -> None:
    """Counts and bounds are the same, sums up to the order in which they were added up."""
    ours = {tensor.fqn: tensor for tensor in statistics(places["ours"]).tensors}
    found = statistics(places[kind])
    assert {tensor.fqn for tensor in found.tensors} == ours.keys()
    for tensor in found.tensors:
        mine, other = ours[tensor.fqn].statistics, tensor.statistics
        assert (tensor.dtype, tensor.shape) == (ours[tensor.fqn].dtype, ours[tensor.fqn].shape)
        assert mine is not None and other is not None
        assert (mine.count, mine.zeros, mine.min, mine.max) == (
            other.count,
            other.zeros,
            other.min,
            other.max,
        )
        assert mine.histogram == other.histogram
        assert mine.norm == (None if other.norm is None else pytest.approx(other.norm, rel=1e-12))


@pytest.mark.parametrize("first", FORMATS)
def test_one_model_is_equal_in_all_formats(places: dict[str, Path], first: str) -> None:
    """All pairs: nothing differs, whatever has to be read for that."""
    for second in FORMATS:
        found = diff(places[first], places[second])
        assert found.is_empty, (second, found.tensors)
        assert len(found.equal) == len(tensors())


@pytest.mark.parametrize("kind", FORMATS)
def test_one_changed_element_is_found_in_every_format(
    places: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Where one element was changed exactly that is told, against ours and against the same format."""
    state = {name: tensor.clone() for name, tensor in tensors().items()}
    state["a"][119, 99] += 2.0
    state["turned"][39, 59] -= 1.0
    changed = write(tmp_path, kind, state)
    for before in (places["ours"], places[kind]):
        found = {tensor.fqn: tensor for tensor in diff(before, changed).tensors}
        assert set(found) == {"a", "turned"}
        for name, size in (("a", 2.0), ("turned", 1.0)):
            values = found[name].values
            assert values is not None
            assert values.differing == 1
            assert values.max_abs == pytest.approx(size, rel=1e-6)


def test_torch_files_are_compared_by_their_checksums(tmp_path: Path) -> None:
    """Two torch.save files of one state, and ours beside them, are equal without a payload read."""
    state = {"w": torch.randn(300_000), "turned": torch.randn(300, 400).t()}
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").bytes_read == 0
    ours = save_ours(tmp_path / "ours", {"w": state["w"]})
    found = diff(tmp_path / "a.pt", ours, only="w")
    assert (found.is_empty, found.bytes_read) == (True, 0)


def test_damage_in_a_torch_file_is_found(tmp_path: Path) -> None:
    """A large storage, read in several blocks, is compared with the checksum of the zip."""
    tensor = torch.arange(3_000_000, dtype=torch.int32)
    torch.save({"w": tensor}, tmp_path / "m.pt")
    begin = (tmp_path / "m.pt").read_bytes().find(tensor_bytes(tensor)[:400])
    flip(tmp_path / "m.pt", begin + 9_000_000)
    with (
        open_tensors(tmp_path / "m.pt") as reader,
        pytest.raises(CorruptCheckpointError, match="'w' is damaged"),
    ):
        list(reader.tiles(0, 5_000_000))
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        statistics(tmp_path / "m.pt")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_command_line_takes_every_format(places: dict[str, Path], kind: str) -> None:
    """cat, stats and diff, by a path to a folder or a file."""
    place = places[kind]
    assert run("cat", place, "scalar").out == "3\nint64 scalar\n"
    assert run("stats", place, "--only", "a", "--json").json["tensors"][0]["statistics"]["count"] == 12_000
    same = run("diff", place, places["ours"])
    assert (same.status, same.err) == (0, "")
    assert same.out.startswith(f"{place} and ")
