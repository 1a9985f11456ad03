"""Formats and stores of other packages that are broken: a typed error says which, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.inspection.checkpoints import list_checkpoints
from dcp.storage import extensions
from dcp.storage.errors import OptionError, StorageError, UnsupportedFormatError
from dcp.storage.formats import registry
from dcp.storage.formats.format import Format
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.stores import StoreType, open_store, register_store


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    caches: list[Any] = [extensions._entry_points, registry._load_extensions, registry.file_names]
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def install(folder: Path, package: str, group: str, name: str, code: str) -> str:
    """A package as `pip install` leaves it, with an entry point to OBJECT; the folder for `sys.path`."""
    module = f"plugin_{package}"
    site = folder / package
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{module}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:OBJECT\n")
    return str(site)


@pytest.mark.parametrize("code", ["raise RuntimeError('no')", "import sys; sys.exit(3)", "x =", "OBJECT = 5"])
def test_a_package_that_cannot_be_imported_is_named(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its import ends: an exit would be the end of the program, without a word."""
    monkeypatch.syspath_prepend(install(tmp_path, f"bad{len(code)}", "dcphub.formats", "bad", code))
    monkeypatch.syspath_prepend(install(tmp_path, f"worse{len(code)}", "dcphub.stores", "bad", code))
    with pytest.raises(UnsupportedFormatError, match=r"entry point bad of the group dcphub\.formats"):
        dcp.open_index(tmp_path)
    with pytest.raises(
        (UnsupportedFormatError, StorageError), match=r"bad of the group dcphub\.stores"
    ) as info:
        open_store("bad://x")
    assert code == "OBJECT = 5" or f"worse{len(code)}" in str(info.value)


def test_two_packages_of_one_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them would be taken would be chance."""
    for package in ("first", "second"):
        monkeypatch.syspath_prepend(install(tmp_path, package, "dcphub.formats", "two", "OBJECT = 1"))
    with pytest.raises(UnsupportedFormatError, match=r"packages? first and second.*uninstall all but one"):
        dcp.open_index(tmp_path)


def raising(*_: object) -> Any:
    """A reader with a fault."""
    raise KeyError("a fault")


@pytest.mark.parametrize("read", [raising, lambda *_: 17])
def test_a_reader_with_a_fault_costs_its_own_checkpoints(read: Callable[..., Any], tmp_path: Path) -> None:
    """The error is typed, names the place and the format, and other checkpoints are listed."""
    parts = re.compile(r"[^.].*\.part")
    registry.register_format(Format(name="faulty", suffixes=(".faulty",), read_file=read))
    registry.register_format(Format(name="faulty_too", folder_files=parts, read_folder=read))
    (tmp_path / "folder").mkdir()
    places = [tmp_path / "single.faulty", tmp_path / "folder" / "a.part"]
    for place in places:
        place.write_bytes(b"data")
    for place in (tmp_path / "single.faulty", tmp_path / "folder"):
        with pytest.raises(UnsupportedFormatError, match=re.escape(str(place))) as info:
            dcp.open_index(place)
        assert info.value.path == str(place)
    assert {row.name: row.problem is None for row in list_checkpoints(tmp_path)} == {
        "folder": False,
        "single.faulty": False,
    }


def test_a_format_that_fails_to_tell_costs_no_file_of_others(tmp_path: Path) -> None:
    """Files whose names suffice are read; where only the begin could tell, the error names the format."""
    registry.register_format(
        Format(name="faulty", suffixes=(".odd",), names_suffice=False, begins=raising, read_file=raising)
    )
    (tmp_path / "a.odd").write_bytes(b"data")
    (tmp_path / "b.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    rows = {row.name: row.problem for row in list_checkpoints(tmp_path)}
    assert "the format 'faulty' cannot tell" in (rows["a.odd"] or "")
    assert dcp.open_index(tmp_path / "b.safetensors").format == "safetensors"


def test_an_index_that_lies_is_refused_with_its_place(tmp_path: Path) -> None:
    """A folder's as a file's."""

    def read(store: Any) -> CheckpointIndex:
        return CheckpointIndex.of_whole_tensors("lying", [], {"../outside": 4})

    registry.register_format(Format(name="lying", folder_files=re.compile(r".*\.part"), read_folder=read))
    with pytest.raises(
        dcp.errors.CheckpointFormatError, match=f"{re.escape(str(tmp_path))}.*no.* plain name"
    ):
        dcp.open_index(tmp_path)


@pytest.mark.parametrize("wrong", [".npy", [".npy"]])
def test_suffixes_that_are_no_tuple_are_refused(wrong: Any) -> None:
    """Of a string each letter would be one."""
    with pytest.raises(OptionError, match="suffixes of the format 'npy' must be tuples"):
        registry.register_format(Format(name="npy", suffixes=wrong))


@pytest.mark.parametrize("wrong", ["zip", (), ("ZIP",), ("s3",), (5,)])
def test_schemes_that_cannot_be_are_refused(wrong: Any) -> None:
    """None of them is registered."""
    with pytest.raises(StorageError, match="scheme"):
        register_store(StoreType(schemes=wrong, open=raising))


def test_what_is_no_format_and_no_store_is_refused() -> None:
    """At once, and not when it is used."""
    wrong: Any = 5
    with pytest.raises(OptionError, match="is no Format"):
        registry.register_format(wrong)
    with pytest.raises(OptionError, match="is no StoreType"):
        register_store(wrong)
