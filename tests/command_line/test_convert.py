"""``dcp convert``: conversions between the formats, options, output and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line.cli_support import run, save_dcp


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "module.a.weight": torch.randn(40, 30, generator=generator),
        "module.b.weight": torch.randn(50, 30, generator=generator),
        "module.count": torch.arange(4),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with dcp."""
    return save_dcp(tmp_path_factory.mktemp("source") / "step-1", _model())


def test_options_reach_the_conversion(source: Path, tmp_path: Path) -> None:
    """Filters, renames, casts, sizes of shards and JSON work as options."""
    shown = run(
        *("convert", source, tmp_path / "hf", "--to", "safetensors", "--executor", "inline", "--json"),
        *("--exclude", "*.count", "--rename", r"^module\.=>", "--dtype", "*.a.*=bfloat16"),
        *("--shard-size", "4KB"),
    )
    assert shown.status == 0, shown.err
    assert shown.json["tensor_count"] == 2
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) == 2
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert torch.equal(tensors["a.weight"], _model()["module.a.weight"].bfloat16())
    assert torch.equal(tensors["b.weight"], _model()["module.b.weight"])


def test_existing_targets_need_overwrite(source: Path, tmp_path: Path) -> None:
    """An existing target is refused in one line, and replaced with --overwrite."""
    target = tmp_path / "model.pt"
    target.write_bytes(b"precious")
    refused = run("convert", source, target, "--to", "torch", "--executor", "inline")
    assert refused.status == 3
    assert str(target) in refused.err and refused.err.count("\n") == 1
    assert target.read_bytes() == b"precious"
    assert run("convert", source, target, "--to", "torch", "--executor", "inline", "--overwrite").status == 0
    assert torch.load(target, weights_only=True).keys() == _model().keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "pickle"), "pickle"),
        ((), "--to"),
        (("--to", "dcp", "--shard-size", "many"), "is not a size"),
        (("--to", "dcp", "--shard-size", "9" * 400), "is not a size"),
        (("--to", "dcp", "--rename", "abc"), "REGEX=>NEW"),
        (("--to", "dcp", "--files", "0"), "--files"),
    ],
)
def test_usage_errors(source: Path, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """A usage error has exit status 2 and a message, and no file is written."""
    shown = run("convert", source, tmp_path / "out", *arguments)
    assert shown.status == 2
    assert words in shown.err
    assert not (tmp_path / "out").exists()
