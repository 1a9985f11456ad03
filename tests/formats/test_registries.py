"""Formats and stores of other packages: errors name broken packages, and the other formats still work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointError
from dcp.storage.formats.format import Format
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.registry import file_names, formats, register_format, target_named
from dcp.storage.stores import open_store
from tests.support.crashes import in_lab


def error_of(act: Callable[[], Any]) -> str:
    """Return the class and the message of the error of ``act``, or ""."""
    try:
        act()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def install(folder: Path, package: str, group: str, name: str, code: str) -> None:
    """Install a package as pip does, with an entry point to OBJECT, on the import path."""
    module, site = f"plugin_{package}", folder / package
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{module}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:OBJECT\n")
    sys.path.insert(0, str(site))


def with_broken_packages(folder: Path, code: str) -> tuple[str, str, bool]:
    """Return the errors of opening an index and a store, and whether the built-in formats can be written."""
    install(folder, "bad", "dcphub.formats", "bad", code)
    install(folder, "worse", "dcphub.stores", "bad", code)
    errors = error_of(lambda: dcp.open_index(folder)), error_of(lambda: open_store("bad://x"))
    return *errors, all(target_named(name)[1].name == name for name in ("dcp", "torch", "safetensors"))


@pytest.mark.parametrize("code", ["raise RuntimeError('no')", "import sys; sys.exit(3)", "x =", "OBJECT = 5"])
def test_a_package_that_cannot_be_imported_is_named(code: str, tmp_path: Path) -> None:
    """A failed import is named, also after sys.exit(), which would otherwise end the program silently."""
    index, store, can_write = in_lab(with_broken_packages, tmp_path, code)
    assert "UnsupportedFormatError" in index and "entry point bad of the group dcphub.formats" in index
    assert "bad of the group dcphub.stores" in store
    assert can_write


def with_faulty_readers(folder: Path) -> list[str]:
    """Return the errors of three formats: a reader that raises, returns no index, or gives bad names."""

    def raising(*_: object) -> Any:
        raise KeyError("a fault")

    def lying(_: object) -> CheckpointIndex:
        return CheckpointIndex.of_whole_tensors("lying", [], {"../outside": 4})

    nonsense: Any = lambda *_: 17  # noqa: E731 - short
    register_format(Format(name="faulty", suffixes=(".faulty",), read_file=raising))
    register_format(Format(name="odd", suffixes=(".odd",), read_file=nonsense))
    register_format(Format(name="lying", folder_files=re.compile(r"[^.].*\.part"), read_folder=lying))
    (folder / "c").mkdir()
    places = [folder / "a.faulty", folder / "b.odd", folder / "c"]
    for place in (*places[:2], folder / "c" / "x.part"):
        place.write_bytes(b"data")
    (folder / "ours.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    assert dcp.open_index(folder / "ours.safetensors").format == "safetensors"
    names = file_names()
    for name in ("x.part", "model.safetensors", "MODEL.SAFETENSORS", "w1.distcp"):
        assert bool(names.in_folders.fullmatch(name)) == any(one.is_in_folder(name) for one in formats())
    return [error_of(partial(dcp.open_index, place)) for place in places]


def test_a_faulty_reader_affects_only_its_own_format(tmp_path: Path) -> None:
    """The error of a faulty reader is typed with path and format; other formats can still be read."""
    faulty, odd, lying = in_lab(with_faulty_readers, tmp_path)
    assert "UnsupportedFormatError" in faulty and str(tmp_path / "a.faulty") in faulty
    assert "UnsupportedFormatError" in odd and str(tmp_path / "b.odd") in odd
    assert "CheckpointFormatError" in lying and "path separator" in lying and str(tmp_path) in lying
