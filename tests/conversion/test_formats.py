"""Conversions between all formats: values survive, and files equal those of the other libraries."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch.distributed.checkpoint import format_utils as stock

import dcp
from dcp import format_utils
from dcp.errors import CheckpointConflictError, PlanError
from tests.support.conversion import (
    assert_same,
    command,
    flip,
    folder_of,
    many_kinds,
    names_in,
    save_sharded,
    sharded_tensors,
    training_state,
)
from tests.support.ranks import run_ranks

_NAMES = {"dcp": "checkpoint", "torch": "model.pt", "safetensors": "model.safetensors"}
_WAYS = [way for length in (1, 2) for way in itertools.product(_NAMES, repeat=length)]
_convert = partial(dcp.convert, executor="inline")


def _torch(path: Path, **options: Any) -> Any:
    return torch.load(path, weights_only=True, **options)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a torch.save file with int keys, tuples, lists, views, an OrderedDict with metadata and {}."""
    state = training_state()
    state["kinds"]["view"] = state["kinds"]["large"][3:90, 5:60].t()
    state["kinds"]["expanded"] = torch.arange(4.0).expand(3, 4)
    state["pair"] = (torch.ones(2), {"inner": torch.zeros(1)}, 5)
    state["layers"] = [torch.full((2,), 1.0), {"deep": [torch.full((1,), 2.0)]}]
    state |= {"nothing": {}, "size": torch.Size((3, 4))}
    state["model"]._metadata = OrderedDict({"": {"version": 1}})
    path = tmp_path_factory.mktemp("original") / "model.pt"
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a training state with one process, by dcp and by stock torch."""
    folder = tmp_path_factory.mktemp("training")
    dcp.save(training_state(), checkpoint_id=folder / "dcp", no_dist=True)
    torch.distributed.checkpoint.save(training_state(), checkpoint_id=folder / "stock", no_dist=True)
    return {name: folder / name for name in ("dcp", "stock")}


@pytest.fixture(scope="module", params=["dcp", "stock"])
def sharded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Save four ranks' shards, split on all dimensions."""
    path = tmp_path_factory.mktemp("sharded") / "checkpoint"
    run_ranks(4, save_sharded, str(path), request.param)
    return path


# -- there and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", _WAYS, ids="-".join)
def test_a_torch_file_round_trips(way: tuple[str, ...], original: Path, tmp_path: Path) -> None:
    """Types of containers and keys, order, values, bytes, ties and metadata survive each way around."""
    source = original
    for number, to in enumerate(way):
        target = tmp_path / str(number) / _NAMES[to]
        _convert(source, target, to=to)
        source = target
    _convert(source, tmp_path / "back.pt", to="torch")
    got = _torch(tmp_path / "back.pt")
    assert_same(got, _torch(original))
    assert got["kinds"]["large"].data_ptr() == got["kinds"]["tied"].data_ptr()
    assert got["model"]._metadata == OrderedDict({"": {"version": 1}})


def test_a_filtered_conversion_keeps_containers(original: Path, tmp_path: Path) -> None:
    """A filtered conversion keeps the containers of selected entries; a renamed entry moves."""
    expected = _torch(original)
    _convert(original, tmp_path / "part.pt", to="torch", only=["optimizer", "layers"])
    assert_same(_torch(tmp_path / "part.pt"), {key: expected[key] for key in ("optimizer", "layers")})
    rename = {r"^optimizer\.state\.0\.exp_avg$": "first", r"^layers\.": "parts."}
    _convert(original, tmp_path / "other.pt", to="torch", rename=rename)
    got = _torch(tmp_path / "other.pt")
    assert torch.equal(got["first"], expected["optimizer"]["state"][0]["exp_avg"])
    assert {str(key) for key in got["optimizer"]["state"][0]} == {"step", "exp_avg_sq"}
    assert torch.equal(got["parts.0"], expected["layers"][0])


# -- torch.save ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dcp", "stock"])
def test_a_torch_file_equals_stocks(kind: str, training: dict[str, Path], tmp_path: Path) -> None:
    """Nesting, values and bytes equal those of dcp_to_torch_save, loaded or mapped. The zip is valid, with
    storages at the offsets that torch computes."""
    source, target = training[kind], tmp_path / "model.pt"
    dcp.convert(source, target, to="torch")
    stock.dcp_to_torch_save(source, tmp_path / "stock.pt")
    expected = torch.load(tmp_path / "stock.pt", weights_only=False)
    if kind == "dcp":  # stock converts an optimizer's keys to strings; dcp stores their type
        state = expected["optimizer"]["state"]
        expected["optimizer"]["state"] = {int(key): value for key, value in state.items()}
    assert_same(_torch(target), expected)
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        names = [name.removeprefix("archive/") for name in archive.namelist()]
    reader: Any = torch._C.PyTorchFileReader(str(target))
    assert {reader.get_record_offset(name) % 64 for name in names if "data/" in name} == {0}
    config: Any = importlib.import_module("torch.utils.serialization.config")
    with config.patch("load.calculate_storage_offsets", True):
        assert_same(_torch(target, mmap=True), expected)
    assert folder_of(target) == ["model.pt", "stock.pt"]


def test_names_and_dtypes_are_selected(training: dict[str, Path], tmp_path: Path) -> None:
    """Globs select, regular expressions rename, and the first glob that matches a name casts."""
    source = training_state()
    given: dict[str, Any] = {"only": ["model.*", "epoch"], "exclude": "*.bias", "dtype": "bfloat16"}
    _convert(
        training["dcp"], tmp_path / "a.pt", to="torch", rename={r"^model\.(\d)": r"net.layer\1"}, **given
    )
    loaded = _torch(tmp_path / "a.pt")
    assert list(loaded) == ["net.layer0.weight", "net.layer1.weight", "net.layer2.weight", "epoch"]
    stored = dcp.read(training["dcp"])["model"]
    for number in range(3):
        assert_same(loaded[f"net.layer{number}.weight"], stored[f"{number}.weight"].to(torch.bfloat16))
    dtypes = {"kinds.kind.float64": "float16", "kinds.*": "torch.float32"}
    _convert(training["dcp"], tmp_path / "b.pt", to="torch", only="kinds", dtype=dtypes)
    loaded = _torch(tmp_path / "b.pt")["kinds"]
    for name, tensor in source["kinds"].items():
        wanted = torch.float16 if name == "kind.float64" else torch.float32
        expected = tensor.to(wanted) if tensor.is_floating_point() else tensor
        assert loaded[name].dtype == expected.dtype, name
        assert torch.equal(loaded[name].nan_to_num(), expected.nan_to_num()), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": "modle.*"}, "did you mean"),
        ({"rename": {".*": "same"}}, "rename maps both"),
        ({"rename": {"^model": "m", "^modle": "n"}}, "'.modle' change no name"),
        ({"to": "safetensors"}, r"pass to='torch' .*, or a target that ends with \.safetensors"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"dtype": {"nothing.*": "float16"}}, r"'nothing\.\*' match no tensor"),
    ],
)
def test_invalid_options_write_no_files(
    options: dict[str, Any], words: str, training: dict[str, Path], tmp_path: Path
) -> None:
    """Each invalid option raises an error with the reason, and no file is written."""
    with pytest.raises(PlanError, match=words):
        dcp.convert(training["dcp"], tmp_path / "model.pt", **{"to": "torch"} | options)
    assert names_in(tmp_path) == []


class Custom:
    """Class outside of each allow-list."""


def test_no_pickle_is_run(tmp_path: Path) -> None:
    """A value that needs a class stops the conversion with the entry's name, whichever package saved it, or
    is left out with drop_objects=True."""
    state = {"w": torch.ones(3), "custom": Custom()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "file.pt")
    with pytest.raises(PlanError, match=r"'custom' .*Custom.*drop_objects") as caught:
        _convert(tmp_path / "dcp", tmp_path / "model.pt", to="torch")
    assert caught.value.fqns == ["custom"]
    with pytest.raises(PlanError, match="'custom'"):
        format_utils.torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "folder")
    _convert(tmp_path / "file.pt", tmp_path / "rest", to="dcp", exclude="custom")
    for source in ("dcp", "file.pt"):
        target = tmp_path / f"{source}-rest.pt"
        assert _convert(tmp_path / source, target, to="torch", drop_objects=True).dropped_objects == (
            "custom",
        )
        assert_same(_torch(target), {"w": torch.ones(3)})
    assert not (tmp_path / "folder").exists() and not (tmp_path / "model.pt").exists()


# -- torch's own names ---------------------------------------------------------------------------------------


def test_format_utils_match_torchs(tmp_path: Path) -> None:
    """The functions have torch's parameter names and replace existing targets. All four combinations of dcp
    and stock torch give one state dict."""
    original = tmp_path / "model.pt"
    torch.save(training_state(), original)
    for name in ("dcp_to_torch_save", "torch_save_to_dcp"):
        own, torchs = (inspect.signature(getattr(one, name)) for one in (format_utils, stock))
        assert list(own.parameters) == list(torchs.parameters)
    makers: list[Any] = [format_utils, stock]
    for number, maker in enumerate(makers):
        maker.torch_save_to_dcp(original, tmp_path / f"folder{number}")
    stock.dcp_to_torch_save(tmp_path / "folder1", tmp_path / "expected.pt")
    expected = torch.load(tmp_path / "expected.pt", weights_only=False)
    for number, reader in ((0, stock), (1, format_utils)):
        reader.dcp_to_torch_save(tmp_path / f"folder{number}", tmp_path / "got.pt")
        assert_same(torch.load(tmp_path / "got.pt", weights_only=False), expected)
    format_utils.dcp_to_torch_save(tmp_path / "folder0", tmp_path / "got.pt")
    assert_same(_torch(tmp_path / "got.pt"), _torch(original))
    with pytest.raises(dcp.CheckpointNotFoundError):
        format_utils.dcp_to_torch_save(tmp_path / "nothing", tmp_path / "back.pt")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_conversion_keeps_unrelated_files(tmp_path: Path, to: str) -> None:
    """A conversion keeps other files of the folder, also the source, but replaces no source file."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "readme.txt").write_text("mine")
    if to == "dcp":  # a folder within is kept
        (folder / "logs").mkdir()
        (folder / "logs" / "log.txt").write_text("log")
    others = {path.relative_to(folder) for path in folder.rglob("*")}
    for number in (1.0, 2.0):  # the second conversion overwrites the checkpoint
        torch.save({"model": {"w": torch.full((3,), number)}}, folder / "model.pt")
        inode = (folder / "model.pt").stat().st_ino
        if to == "dcp":
            format_utils.torch_save_to_dcp(folder / "model.pt", folder)
        else:
            _convert(folder / "model.pt", folder, to=to, overwrite=True)
        assert (folder / "model.pt").stat().st_ino == inode
        assert others < {path.relative_to(folder) for path in folder.rglob("*")}
        flat = dcp.read(folder)
        assert (flat["model"]["w"] if to == "dcp" else flat["model.w"]).tolist() == [number] * 3
        assert names_in(tmp_path) == ["run"]
    _convert(folder / "model.pt", folder / "model.safetensors", to="safetensors", overwrite=True)
    with pytest.raises(PlanError, match="would replace the source file"):
        _convert(folder / "model.safetensors", folder, to="dcp", overwrite=True)
    assert (folder / "model.safetensors").exists()


# -- safetensors ---------------------------------------------------------------------------------------------


def test_a_safetensors_file_equals_the_librarys(tmp_path: Path) -> None:
    """Header, order, padding and payload of all dtypes equal the library's; an unsupported one is named."""
    kinds = many_kinds()
    dcp.save(kinds, checkpoint_id=tmp_path / "flat", no_dist=True)
    _convert(tmp_path / "flat", tmp_path / "m.safetensors", to="safetensors", exclude="tied")
    expected = save({name: tensor for name, tensor in kinds.items() if name != "tied"}, {"format": "pt"})
    assert (tmp_path / "m.safetensors").read_bytes() == expected
    _convert(tmp_path / "flat", tmp_path / "tied.safetensors", to="safetensors")
    loaded = load_file(tmp_path / "tied.safetensors")
    assert_same({name: loaded[name] for name in kinds}, kinds)
    state = {"z": torch.ones(2, dtype=torch.complex128), "w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "complex", no_dist=True)
    with pytest.raises(PlanError, match=r"'z' \(complex128\)"):
        _convert(tmp_path / "complex", tmp_path / "n.safetensors", to="safetensors")


def test_shards_have_hugging_faces_layout(training: dict[str, Path], tmp_path: Path) -> None:
    """Only shards of a single tensor exceed shard_bytes; the index names the shard of each tensor."""
    target = tmp_path / "model"
    report = _convert(training["dcp"], target, to="safetensors", only="model", shard_bytes=1000)
    document = json.loads((target / "model.safetensors.index.json").read_text())
    source = dcp.read(training["dcp"], only="model")["model"]
    assert document["metadata"]["total_size"] == sum(tensor.nbytes for tensor in source.values())
    names = sorted(path.name for path in target.glob("*.safetensors"))
    assert [f"model-{n + 1:05}-of-{len(names):05}.safetensors" for n in range(len(names))] == names
    assert len(names) > 1 and {*report.files} == {*names, "model.safetensors.index.json"}
    found: dict[str, torch.Tensor] = {}
    for name in names:
        tensors = load_file(target / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000 or len(tensors) == 1
        assert {document["weight_map"][key] for key in tensors} == {name}
        found |= tensors
    assert_same({name: found[f"model.{name}"] for name in source}, dict(source))


# -- dcp -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "chunks"), [(1, "keep"), (3, "keep"), (3, "split")])
def test_a_converted_checkpoint_verifies(files: int, chunks: Any, sharded: Path, tmp_path: Path) -> None:
    """Both packages load the same from any number of files, with the source's chunks or new ones. The
    conversion reads no byte twice."""
    target, expected = tmp_path / "copy", {**sharded_tensors(), "step": 12}
    report = _convert(sharded, target, to="dcp", files=files, chunks=chunks)
    assert len(report.files) == files and report.blocks_unverified == 0
    nbytes = sum(tensor.nbytes for tensor in sharded_tensors().values())
    assert 1.0 <= report.bytes_read / nbytes < 1.01
    (verified,) = command("verify", target, "--json").json
    assert verified["findings"] == []
    loads: list[Any] = [dcp.load, torch.distributed.checkpoint.load]
    for load in loads:
        state = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in expected.items()}
        load(state, checkpoint_id=target, no_dist=True)
        assert_same(state, expected)
    index, source = dcp.open_index(target), dcp.open_index(sharded)
    if chunks == "keep":
        for fqn, row in source.position.items():
            boxes = sorted(map(index.box, index.chunks(index.position[fqn])))
            assert boxes == sorted(map(source.box, source.chunks(row))), fqn
    else:
        assert [len(index.chunks(index.position[fqn])) for fqn in ("wide", "both")] == [3, 1]


def test_a_converted_training_state_is_complete(training: dict[str, Path], tmp_path: Path) -> None:
    """Values, paths and ties are kept, and the provenance of the copy names the source."""
    _convert(training["dcp"], tmp_path / "copy", to="dcp", files=2)
    source, copy = dcp.open_index(training["dcp"]), dcp.open_index(tmp_path / "copy")
    assert copy.planner_data == source.planner_data
    assert (list(copy.fqns), list(copy.objects.fqns)) == (list(source.fqns), list(source.objects.fqns))
    large, tied = (copy.chunks(copy.position[f"kinds.{name}"])[0] for name in ("large", "tied"))
    assert copy.payload_offsets[large] == copy.payload_offsets[tied]
    assert copy.provenance["converted_from"]["save_id"] == source.provenance["save_id"]
    _convert(training["dcp"], tmp_path / "one.pt", to="torch")
    _convert(tmp_path / "copy", tmp_path / "two.pt", to="torch")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_a_replaced_checkpoint_leaves_no_files(training: dict[str, Path], tmp_path: Path) -> None:
    """The old files are deleted after the new manifest is published, and kept without overwrite."""
    target = tmp_path / "copy"
    _convert(training["dcp"], target, to="dcp", only="model")
    old = {*dcp.open_index(target).files}
    with pytest.raises(CheckpointConflictError):
        _convert(training["dcp"], target, to="dcp")
    _convert(training["dcp"], target, to="dcp", overwrite=True)
    files = {*dcp.open_index(target).files}
    assert {*names_in(target)} == {*files, "manifest.msgpack", ".metadata"} and not files & old
    assert command("verify", target).status == 0 and names_in(tmp_path) == ["copy"]


def test_the_source_is_refused_as_target(training: dict[str, Path], tmp_path: Path) -> None:
    """A conversion does not replace the source, a file of the source, or a path other than a regular file."""
    source = training["dcp"]
    with pytest.raises(PlanError, match="both"):
        _convert(source, source, to="dcp", overwrite=True)
    os.mkfifo(tmp_path / "pipe.pt")
    own = [(path, "is a file of the source") for path in source.iterdir()]
    for target, words in [*own, (tmp_path / "pipe.pt", "is not a regular file")]:
        with pytest.raises(PlanError, match=words):
            _convert(source, target, to="torch", overwrite=True)
    assert command("verify", source).status == 0 and (tmp_path / "pipe.pt").is_fifo()


@pytest.mark.parametrize(("to", "name"), list(_NAMES.items()))
def test_a_damaged_source_is_an_error(to: str, name: str, tmp_path: Path) -> None:
    """A flipped bit is an error with the tensor's name, without a target. verify="none" converts it."""
    dcp.save({"w": torch.ones(5000)}, checkpoint_id=tmp_path / "damaged", no_dist=True)
    flip(tmp_path / "damaged")
    with pytest.raises(dcp.CorruptCheckpointError, match="'w' is damaged"):
        dcp.convert(tmp_path / "damaged", tmp_path / name, to=to)
    assert names_in(tmp_path) == ["damaged"]
    _convert(tmp_path / "damaged", tmp_path / name, to=to, verify="none")
    assert (tmp_path / name).exists()
