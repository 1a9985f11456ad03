"""Conversions to safetensors and to our own format, and round trips over all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

import dcp
from dcp.conversion.layouts.layout import Copies, Literals, TargetLayout
from dcp.conversion.run import convert
from dcp.conversion.targets import safetensors, torch_save
from dcp.conversion.targets.job import LayoutJob, Planned
from dcp.inspection.checkpoints import open_index
from dcp.inspection.verification import verify
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.errors import CheckpointConflictError, CheckpointError, CorruptCheckpointError, PlanError
from dcp.storage.formats import dtypes, registry
from dcp.storage.formats.format import Format, Target
from dcp.storage.formats.registry import register_format
from dcp.storage.formats.safetensors.writer import EXTRAS_KEY, decode_extras
from tests.support.conversion import (
    assert_same,
    folder_of,
    many_kinds,
    save_sharded,
    sharded_tensors,
    training_state,
)
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def kinds() -> dict[str, torch.Tensor]:
    """One for all."""
    return many_kinds()


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, torch.Tensor]) -> Path:
    """A flat model of tensors of all kinds."""
    path = tmp_path_factory.mktemp("flat") / "checkpoint"
    dcp.save(kinds, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its optimizer and values."""
    path = tmp_path_factory.mktemp("training") / "checkpoint"
    dcp.save(training_state(), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks' shards on all dimensions."""
    path = tmp_path_factory.mktemp("sharded") / "checkpoint"
    run_ranks(4, save_sharded, str(path))
    return path


def _load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What `dcp.load` makes of tensors that are like these."""
    state = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in like.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


# -- safetensors ---------------------------------------------------------------------------------------------


def test_one_file_is_byte_for_byte_what_the_library_writes(
    flat: Path, kinds: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Header, order, padding and payload, for all element types."""
    convert(flat, tmp_path / "model.safetensors", to="safetensors", exclude="tied")
    expected = save({name: tensor for name, tensor in kinds.items() if name != "tied"}, {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == expected


def test_tied_names_are_all_readable_and_noted(
    flat: Path, kinds: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Each name of a tied tensor has its bytes; the metadata says which are tied, and keeps the order."""
    convert(flat, tmp_path / "model.safetensors", to="safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert_same({name: loaded[name] for name in kinds}, dict(kinds))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    extras = decode_extras(metadata[EXTRAS_KEY])
    assert extras["ties"] == {"tied": "large"}
    assert extras["order"] == list(kinds)


def test_shards_are_as_hugging_face_has_them(training: Path, tmp_path: Path) -> None:
    """No shard is larger than asked unless one tensor is, and the index names the shard of each tensor."""
    target = tmp_path / "model"
    report = convert(training, target, to="safetensors", only="model", shard_bytes=1000, drop_objects=True)
    document = json.loads((target / "model.safetensors.index.json").read_text())
    source = training_state()["model"]
    total = sum(tensor.nbytes for tensor in source.values())
    assert document["metadata"]["total_size"] == total
    names = sorted(path.name for path in target.glob("*.safetensors"))
    assert [f"model-{n + 1:05}-of-{len(names):05}.safetensors" for n in range(len(names))] == names
    assert len(names) > 1
    assert set(report.files) == {*names, "model.safetensors.index.json"}
    found: dict[str, torch.Tensor] = {}
    for name in names:
        tensors = load_file(target / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000 or len(tensors) == 1
        for key in tensors:
            assert document["weight_map"][key] == name
        found |= tensors
    assert {name: tensor.shape for name, tensor in found.items()} == {
        f"model.{name}": tensor.shape for name, tensor in source.items()
    }
    assert folder_of(target) == ["model"]


def test_what_readers_would_refuse_is_not_written(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tensors than readers take from one file are an error of the plan; shards end before that."""
    monkeypatch.setattr(torch_save, "MAX_FILE_ENTRIES", 7)
    with pytest.raises(PlanError, match="in parts"):
        convert(flat, tmp_path / "model.pt", to="torch")
    monkeypatch.setattr(safetensors, "_SHARD_TENSORS", 2)
    report = convert(flat, tmp_path / "model", to="safetensors")
    shards = [load_file(path) for path in (tmp_path / "model").glob("*.safetensors")]
    assert len(shards) > 1 and max(map(len, shards)) == 2
    assert len(report.files) == len(shards) + 1
    monkeypatch.setattr(safetensors, "MAX_WEIGHT_MAP_BYTES", 100)
    with pytest.raises(PlanError, match="in parts"):
        convert(flat, tmp_path / "other", to="safetensors")
    assert not (tmp_path / "model.pt").exists() and not (tmp_path / "other").exists()


def test_values_and_nesting_go_into_the_metadata(training: Path, tmp_path: Path) -> None:
    """What the format has no place for is kept in one string that others pass over."""
    convert(training, tmp_path / "all.safetensors", to="safetensors")
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        extras = decode_extras(file.metadata()[EXTRAS_KEY])
    assert extras["values"]["epoch"] == 7
    assert extras["values"]["history"] == training_state()["history"]
    assert extras["paths"]["optimizer.state.0.exp_avg"] == ("optimizer", "state", "0", "exp_avg")


def test_types_that_the_format_lacks_are_listed(tmp_path: Path) -> None:
    """complex128 has no place in a safetensors file; a cast does not apply; excluding it helps."""
    state = {"z": torch.ones(2, dtype=torch.complex128), "w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    with pytest.raises(PlanError, match=r"'z' \(complex128\)"):
        convert(tmp_path / "source", tmp_path / "m.safetensors", to="safetensors")
    convert(tmp_path / "source", tmp_path / "m.safetensors", to="safetensors", exclude="z")
    assert load_file(tmp_path / "m.safetensors").keys() == {"w"}


def test_overwriting_a_folder_keeps_what_is_not_the_models(training: Path, tmp_path: Path) -> None:
    """A model's folder is exchanged as a whole: old shards go, config.json stays."""
    target = tmp_path / "model"
    convert(training, target, to="safetensors", only="model", shard_bytes=500)
    (target / "config.json").write_text("{}")
    with pytest.raises(CheckpointConflictError, match="overwrite"):
        convert(training, target, to="safetensors", only="model")
    convert(training, target, to="safetensors", only="model", overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert folder_of(target) == ["model"]


# -- our own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "chunks"), [(1, "keep"), (3, "keep"), (3, "split")])
def test_our_format_loads_and_verifies(files: int, chunks: Any, sharded: Path, tmp_path: Path) -> None:
    """Any number of files, the source's chunks or new ones: dcp.load and stock's load get the same."""
    target = tmp_path / "copy"
    report = convert(sharded, target, to="dcp", files=files, chunks=chunks)
    assert len(report.files) == files
    found = verify(target)
    assert found.findings == []
    assert found.unchecked_bytes == 0
    expected = {**sharded_tensors(), "step": 12}
    assert_same(_load(target, expected), expected)
    stock = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in expected.items()}
    torch.distributed.checkpoint.load(stock, checkpoint_id=target, no_dist=True)
    assert_same(stock, expected)
    index, source = open_index(target), open_index(sharded)
    if chunks == "keep":
        boxes = {fqn: sorted(map(source.box, source.chunks(row))) for fqn, row in source.position.items()}
        assert boxes == {
            fqn: sorted(map(index.box, index.chunks(row))) for fqn, row in index.position.items()
        }
    else:
        assert {len(index.chunks(index.position["wide"])), len(index.chunks(index.position["both"]))} == {
            3,
            1,
        }


def test_a_copy_of_a_training_state_has_all_of_it(training: Path, tmp_path: Path) -> None:
    """Objects keep their blobs and values, paths stay, ties share one payload, user metadata travels."""
    convert(training, tmp_path / "copy", to="dcp", files=2)
    source, copy = open_index(training), open_index(tmp_path / "copy")
    assert copy.planner_data == source.planner_data
    assert list(copy.fqns) == list(source.fqns)
    assert list(copy.objects.fqns) == list(source.objects.fqns)
    large, tied = (copy.chunks(copy.position[f"kinds.{name}"])[0] for name in ("large", "tied"))
    assert copy.payload_offsets[large] == copy.payload_offsets[tied]
    assert copy.provenance["converted_from"]["save_id"] == source.provenance["save_id"]
    convert(training, tmp_path / "one.pt", to="torch")
    convert(tmp_path / "copy", tmp_path / "two.pt", to="torch")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_replacing_a_checkpoint_goes_through_its_commit(flat: Path, training: Path, tmp_path: Path) -> None:
    """The old checkpoint's files go after the new manifest is there, and nothing else is left."""
    target = tmp_path / "copy"
    convert(flat, target, to="dcp")
    old = set(open_index(target).files)
    with pytest.raises(CheckpointConflictError):
        convert(training, target, to="dcp")
    convert(training, target, to="dcp", overwrite=True)
    names = {path.name for path in target.iterdir()}
    assert names == {*open_index(target).files, MANIFEST_NAME, ".metadata"}
    assert not names & old
    assert verify(target).findings == []
    assert folder_of(target) == ["copy"]


def test_a_checkpoint_is_not_converted_onto_itself(flat: Path, tmp_path: Path) -> None:
    """Even with overwrite; nor is a file of it, or what is no file at all, replaced by one."""
    with pytest.raises(PlanError, match="both"):
        convert(flat, flat, to="dcp", overwrite=True)
    os.mkfifo(tmp_path / "pipe.pt")
    own = [(path, "is a file of the source") for path in flat.iterdir()]
    for target, words in [*own, (tmp_path / "pipe.pt", "is no regular file")]:
        with pytest.raises(PlanError, match=words):
            convert(flat, target, to="torch", overwrite=True)
    assert verify(flat).ok and (tmp_path / "pipe.pt").is_fifo()


def test_two_files_of_one_name_are_no_layout(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a format of somebody's that makes its files' names of tensors', and loses what tells them apart; or
    leads out of the target by them."""
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    for name, words in (("one", "would be two files"), ("../out", "path separator")):

        def lay_out(job: LayoutJob, name: str = name) -> Planned:
            tensors = job.entries.tensors[:2]
            rows, codes = [one.tensor for one in tensors], [one.dtype_code for one in tensors]
            sizes = [dtypes.BY_CODE[one.dtype_code].itemsize for one in tensors]
            index = job.entries.index
            copies = Copies.of_tensors(index, rows, codes, range(2), [0, 0], sizes)
            return Planned(TargetLayout([name, name], sizes, Literals.of([]), copies), ())

        register_format(Format(name="odd", target=Target(name="odd", layout=lay_out)))
        with pytest.raises(CheckpointError, match=words):
            convert(flat, tmp_path / "target", to="odd")
    assert folder_of(tmp_path / "target") == []


def test_damage_of_the_source_stops_it(sharded: Path, tmp_path: Path) -> None:
    """One flipped bit: the error names tensor and file, no target appears, and nothing stays behind."""
    source = tmp_path / "damaged"
    source.mkdir()
    for path in sharded.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    index = open_index(source)
    chunk = index.chunks(index.position["wide"])[1]
    file = source / index.files[int(index.chunk_files[chunk])]
    data = bytearray(file.read_bytes())
    data[int(index.payload_offsets[chunk]) + 12345] ^= 4
    file.write_bytes(data)
    for target, to in (("m.pt", "torch"), ("copy", "dcp"), ("m.safetensors", "safetensors")):
        with pytest.raises(CorruptCheckpointError, match="'wide' is damaged"):
            convert(source, tmp_path / target, to=to)
    assert folder_of(source) == ["damaged"]
    convert(source, tmp_path / "m.pt", to="torch", verify="none", executor="inline")
    assert (tmp_path / "m.pt").exists()
