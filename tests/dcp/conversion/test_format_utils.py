"""torch's names for conversions, beside torch's own functions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import format_utils as stock

import dcp
from dcp import format_utils
from dcp.conversion.run import convert
from dcp.storage.errors import CheckpointNotFoundError, PlanError
from tests.support.conversion import assert_same, training_state


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.save file."""
    path = tmp_path_factory.mktemp("original") / "model.pt"
    torch.save(training_state(), path)
    return path


@pytest.mark.parametrize("name", ["dcp_to_torch_save", "torch_save_to_dcp"])
def test_signatures_are_torchs(name: str) -> None:
    """Parameters are called as torch calls them, so that keywords work."""
    ours, theirs = getattr(format_utils, name), getattr(stock, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_either_reads_what_the_other_wrote(original: Path, tmp_path: Path) -> None:
    """All four combinations give the state dict that stock alone gives; ours keeps int keys as well."""
    makers: list[Any] = [format_utils, stock]
    for number, maker in enumerate(makers):
        maker.torch_save_to_dcp(original, tmp_path / f"folder{number}")
    stock.dcp_to_torch_save(tmp_path / "folder1", tmp_path / "expected.pt")
    expected = torch.load(tmp_path / "expected.pt", weights_only=False)
    for number, reader in ((0, stock), (1, format_utils)):
        reader.dcp_to_torch_save(tmp_path / f"folder{number}", tmp_path / "got.pt")
        assert_same(torch.load(tmp_path / "got.pt", weights_only=False), expected)
    format_utils.dcp_to_torch_save(tmp_path / "folder0", tmp_path / "got.pt")
    assert_same(torch.load(tmp_path / "got.pt", weights_only=True), torch.load(original, weights_only=True))


def test_what_is_there_is_replaced(original: Path, tmp_path: Path) -> None:
    """As torch's functions do it."""
    torch.save({"w": torch.ones(2)}, tmp_path / "small.pt")
    for source in (original, tmp_path / "small.pt"):
        format_utils.torch_save_to_dcp(source, tmp_path / "folder")
        format_utils.dcp_to_torch_save(tmp_path / "folder", tmp_path / "back.pt")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), {"w": torch.ones(2)})


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_folder_keeps_what_is_not_the_checkpoints(tmp_path: Path, to: str) -> None:
    """The source among it: as torch's own tests do it. A folder within stays where a checkpoint of ours comes
    into being; a source that the target would replace is refused."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "log.txt").write_text("log")
    (folder / "readme.txt").write_text("mine")
    if to != "dcp":
        (folder / "logs" / "log.txt").unlink()
        (folder / "logs").rmdir()
    others = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    for number in (1.0, 2.0):  # and again, over the checkpoint
        torch.save({"model": {"w": torch.full((3,), number)}}, folder / "model.pt")
        inode = (folder / "model.pt").stat().st_ino
        if to == "dcp":
            format_utils.torch_save_to_dcp(folder / "model.pt", folder)
        else:
            convert(folder / "model.pt", folder, to=to, overwrite=True, executor="inline")
        assert (folder / "model.pt").stat().st_ino == inode
        assert set(others) < {path.relative_to(folder) for path in folder.rglob("*")}
        assert (folder / "readme.txt").read_text() == "mine"
        assert torch.load(folder / "model.pt")["model"]["w"].tolist() == [number] * 3
        flat = dcp.read(folder)
        assert (flat["model"]["w"] if to == "dcp" else flat["model.w"]).tolist() == [number] * 3
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    convert(folder / "model.pt", folder / "model.safetensors", to="safetensors", overwrite=True)
    with pytest.raises(PlanError, match="is a file that"):
        convert(folder / "model.safetensors", folder, to="dcp", overwrite=True)
    assert (folder / "model.safetensors").exists()


class Custom:
    """Needs more than plain data."""


def test_no_pickle_is_run(tmp_path: Path) -> None:
    """A class in the file is named, and the rest is not converted behind one's back."""
    torch.save({"w": torch.ones(2), "custom": Custom()}, tmp_path / "model.pt")
    with pytest.raises(PlanError, match="'custom'"):
        format_utils.torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "folder")
    convert(tmp_path / "model.pt", tmp_path / "rest", to="dcp", exclude="custom", executor="inline")
    report = convert(tmp_path / "model.pt", tmp_path / "rest.pt", to="torch", drop_objects=True)
    assert report.dropped_objects == ("custom",)
    with pytest.raises(CheckpointNotFoundError):
        format_utils.dcp_to_torch_save(tmp_path / "nothing", tmp_path / "back.pt")
    assert not (tmp_path / "folder").exists()
