"""Conversions to torch.save files, against torch.load and stock dcp_to_torch_save."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import format_utils

import dcp
from dcp.conversion.run import convert
from dcp.storage.errors import CheckpointConflictError, PlanError
from tests.support.conversion import assert_same, folder_of, save_sharded, sharded_tensors, training_state
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """One for all."""
    return training_state()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    """The training state as one process saves it."""
    path = tmp_path_factory.mktemp("ours") / "checkpoint"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    """The same, as stock torch saves it."""
    path = tmp_path_factory.mktemp("stock") / "checkpoint"
    torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module", params=["ours", "stock"])
def sharded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Four ranks' shards on all dimensions."""
    path = tmp_path_factory.mktemp("sharded") / "checkpoint"
    run_ranks(4, save_sharded, str(path), request.param)
    return path


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_the_file_is_what_stock_makes(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nesting, values and bytes are those of dcp_to_torch_save, read with weights_only and mapped.

    So are the keys, but that stock makes strings of an optimizer's, which ours notes when it saves.
    """
    source = request.getfixturevalue(kind)
    convert(source, tmp_path / "model.pt", to="torch")
    format_utils.dcp_to_torch_save(source, tmp_path / "stock.pt")
    expected = torch.load(tmp_path / "stock.pt", weights_only=False)
    if kind == "ours":
        state = expected["optimizer"]["state"]
        expected["optimizer"]["state"] = {int(key): value for key, value in state.items()}
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), expected)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=True), expected)
    assert folder_of(tmp_path / "model.pt") == ["model.pt", "stock.pt"]


def test_tied_tensors_share_one_storage(ours: Path, tmp_path: Path) -> None:
    """What was tied when it was saved is tied again, and stored once."""
    convert(ours, tmp_path / "model.pt", to="torch")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)["kinds"]
    assert loaded["large"].data_ptr() == loaded["tied"].data_ptr()
    loaded["large"][0, 0] = 42.0
    assert loaded["tied"][0, 0] == 42.0


def test_the_zip_is_sound(ours: Path, tmp_path: Path) -> None:
    """Checksums of all entries are right, storages are aligned, and torch can compute the offsets."""
    convert(ours, tmp_path / "model.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert names[:4] == [
        f"archive/{n}" for n in ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
    ]
    reader: Any = torch._C.PyTorchFileReader(str(tmp_path / "model.pt"))
    for name in names:
        if "/data/" in name:
            assert reader.get_record_offset(name.removeprefix("archive/")) % 64 == 0
    config: Any = importlib.import_module("torch.utils.serialization.config")
    with config.patch("load.calculate_storage_offsets", True):
        calculated = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)
    assert_same(calculated, torch.load(tmp_path / "model.pt", weights_only=True))


def test_shards_on_any_dimension_are_assembled(sharded: Path, tmp_path: Path) -> None:
    """Rows, columns, inner dimensions and a grid of four ranks become whole tensors, all verified."""
    report = convert(sharded, tmp_path / "model.pt", to="torch", executor="inline")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded.pop("step") == 12
    expected = sharded_tensors()
    assert_same(dict(sorted(loaded.items())), dict(sorted(expected.items())))
    assert report.blocks_unverified == 0
    assert report.blocks_verified >= 4 * len(expected) - 3
    # Headers between small neighbours are read along; no tensor is read twice.
    assert 1.0 <= report.bytes_read / sum(tensor.nbytes for tensor in expected.values()) < 1.01


def test_names_and_types_are_chosen(ours: Path, tmp_path: Path) -> None:
    """Globs select, regular expressions rename, and a dtype casts what is floating-point."""
    convert(
        ours,
        tmp_path / "model.pt",
        to="torch",
        only=["model.*", "epoch"],
        exclude="*.bias",
        rename={r"^model\.(\d)": r"net.layer\1"},
        dtype="bfloat16",
    )
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    source = torch.load(_as_stock(ours, tmp_path), weights_only=False)["model"]
    assert list(loaded) == ["net.layer0.weight", "net.layer1.weight", "net.layer2.weight", "epoch"]
    for number in range(3):
        expected = source[f"{number}.weight"].to(torch.bfloat16)
        assert_same(loaded[f"net.layer{number}.weight"], expected)


def test_casts_by_name(ours: Path, tmp_path: Path) -> None:
    """The first matching glob decides; integers stay what they are, whatever matches them."""
    dtypes = {"kinds.kind.float64": "float16", "kinds.*": "torch.float32"}
    convert(ours, tmp_path / "model.pt", to="torch", only="kinds", dtype=dtypes)
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)["kinds"]
    source = torch.load(_as_stock(ours, tmp_path), weights_only=False)["kinds"]
    for name, tensor in source.items():
        wanted = torch.float16 if name == "kind.float64" else torch.float32
        expected = tensor.to(wanted) if tensor.is_floating_point() else tensor
        assert loaded[name].dtype == expected.dtype
        assert (
            torch.equal(loaded[name].nan_to_num(), expected.nan_to_num())
            if tensor.is_floating_point()
            else True
        )
    with pytest.raises(PlanError, match=r"'nothing\.\*' match no tensor"):
        convert(ours, tmp_path / "other.pt", to="torch", dtype={"nothing.*": "float16"})


def _as_stock(source: Path, folder: Path) -> Path:
    path = folder / "as_stock.pt"
    if not path.exists():
        format_utils.dcp_to_torch_save(source, path)
    return path


def test_what_cannot_be_is_refused_before_anything_is_written(ours: Path, tmp_path: Path) -> None:
    """Patterns without a match, names that collide, unknown options, an existing target."""
    target = tmp_path / "model.pt"
    with pytest.raises(PlanError, match="did you mean"):
        convert(ours, target, to="torch", only="modle.*")
    with pytest.raises(PlanError, match="one name"):
        convert(ours, target, to="torch", rename={".*": "same"})
    with pytest.raises(PlanError, match="to must be one of"):
        convert(ours, target, to="gguf")
    with pytest.raises(PlanError, match="dtype must be one of"):
        convert(ours, target, to="torch", dtype="int4")
    with pytest.raises(PlanError, match="executor must be"):
        convert(ours, target, to="torch", executor="threads")
    target.write_text("mine")
    with pytest.raises(CheckpointConflictError, match="overwrite=True"):
        convert(ours, target, to="torch")
    assert target.read_text() == "mine"


def test_overwriting_replaces_the_file(ours: Path, tmp_path: Path) -> None:
    """With overwrite the old file goes, in one step."""
    target = tmp_path / "model.pt"
    target.write_text("mine")
    convert(ours, target, to="torch", overwrite=True, only="epoch")
    assert torch.load(target, weights_only=True) == {"epoch": 7}
    assert folder_of(target) == ["model.pt"]


class Custom:
    """A class that no allow-list knows."""


def test_values_that_need_a_class_are_listed_or_dropped(tmp_path: Path) -> None:
    """Nothing is unpickled: such a value stops the conversion with its name, or is left out if asked so."""
    source = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(3), "custom": Custom()}, checkpoint_id=source, no_dist=True)
    with pytest.raises(PlanError, match=r"'custom' .*Custom.*drop_objects") as caught:
        convert(source, tmp_path / "model.pt", to="torch")
    assert caught.value.fqns == ["custom"]
    report = convert(source, tmp_path / "model.pt", to="torch", drop_objects=True)
    assert report.dropped_objects == ("custom",)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), {"w": torch.ones(3)})


def test_empty_containers_stay_where_others_are_left_out_or_renamed(tmp_path: Path) -> None:
    """An optimizer that has no state yet is still one; a container that is not chosen goes with its name."""
    state = {
        "module.w": torch.ones(2),
        "ema": {"w": torch.ones(3), "extra": {}},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    torch.save(state, tmp_path / "a.pt")
    target = tmp_path / "b.pt"
    convert(
        tmp_path / "a.pt", target, to="torch", exclude="ema", rename={r"^module\.": ""}, executor="inline"
    )
    found = torch.load(target, weights_only=True)
    assert found.pop("w").tolist() == [1, 1]
    assert found == {"optimizer": state["optimizer"]}
    assert list(found["optimizer"]) == ["state", "param_groups"]


@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_thousands_of_keys(tmp_path: Path, count: int) -> None:
    """Many small tensors, and back."""
    state = {f"layer.{number}.weight": torch.full((3,), float(number)) for number in range(count)}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    report = convert(tmp_path / "source", tmp_path / "model.pt", to="torch")
    assert report.tensor_count == count
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=True), state)
