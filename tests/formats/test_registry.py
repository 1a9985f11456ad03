"""Formats of others: what they may be called, and what one that is broken leaves of ours."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dcp.cli.app import app
from dcp.cli.subcommands.conversion.options import target_format
from dcp.storage import extensions
from dcp.storage.errors import UnsupportedFormatError
from dcp.storage.formats import registry
from dcp.storage.formats.format import Format
from dcp.storage.formats.registry import file_names, formats, register_format, target_named


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The formats of the others are as before."""
    before = dict(registry._FORMATS)
    yield
    monkeypatch.undo()
    registry._FORMATS.clear()
    registry._FORMATS.update(before)
    registry._load_extensions.cache_clear()
    file_names.cache_clear()


@pytest.mark.parametrize(
    "fault", ["raise RuntimeError('no licence')", "FORMAT = 1 /", "import nothing_such", ""]
)
def test_a_package_that_is_broken_is_named_and_ours_are_written(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its module fails: whoever asks for all formats is told, and nobody else is in its way."""
    (tmp_path / "broken_format.py").write_text(fault)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_format", raising=False)
    found = {"odd": [EntryPoint("odd", "broken_format:FORMAT", registry.GROUP)]}
    monkeypatch.setattr(extensions, "_entry_points", lambda group: found)
    registry._load_extensions.cache_clear()
    for name in ("dcp", "torch", "safetensors"):
        assert target_named(name)[1].name == name
        assert target_format(name) == name
    with pytest.raises(UnsupportedFormatError, match="the entry point odd of the group"):
        formats()
    with pytest.raises(typer.BadParameter, match="the entry point odd of the group"):
        target_format("odd")
    assert "--drop-objects" in CliRunner().invoke(app, ["convert", "--help"]).output


def test_patterns_mean_the_same_among_others() -> None:
    """With their flags, and whatever the others are."""
    pattern = re.compile(r"w[0-9]\.odd|v\.odd", re.IGNORECASE)
    register_format(Format(name="odd", folder_files=pattern))
    names = file_names()
    for name in ("W1.ODD", "v.odd", "model.safetensors", "MODEL.SAFETENSORS", "w1.odd.distcp"):
        assert bool(names.in_folders.fullmatch(name)) == any(one.is_in_folder(name) for one in formats())


@pytest.mark.parametrize(
    "odd",
    [
        Format(name="odd", folder_files=re.compile("(?i)a")),
        Format(name="odd", folder_marks=re.compile("a # b", re.VERBOSE)),
        Format(name="odd", suffixes=("",)),
        Format(name="odd", suffixes=(".ODD",)),
        Format(name="dcp"),
        Format(name="Odd"),
    ],
)
def test_what_could_not_be_meant_is_refused(odd: Format) -> None:
    """Before it makes every file a checkpoint, or none."""
    with pytest.raises(UnsupportedFormatError):
        register_format(odd)
    assert "odd" not in {one.name for one in formats()}
