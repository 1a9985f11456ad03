"""Checkpoint ids as places: valid ids, and a typed error for an invalid id before any access."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import StorageError
from dcp.storage.stores import MemoryStore, PosixStore, open_store


def test_paths_are_resolved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A str or PathLike is a folder; a relative path is resolved at once, not at its use."""
    monkeypatch.chdir(tmp_path)
    stores = [open_store("a b"), open_store(Path("a b")), open_store((tmp_path / "a b").as_uri())]
    monkeypatch.chdir("/")
    assert {store.url for store in stores} == {str(tmp_path / "a b")}
    assert all(isinstance(store, PosixStore) for store in stores)
    assert not (tmp_path / "a b").exists()


@pytest.mark.parametrize("text", ["weird:name", "c:/x", "run:", "//x"])
def test_a_colon_alone_makes_no_url(text: str) -> None:
    """A colon alone does not make a URL."""
    assert isinstance(open_store(text), PosixStore)


def test_memory_is_shared_by_name() -> None:
    """Two stores of one name share files; stores of other names do not."""
    open_store("memory://shared").publish("m", b"1", durable=False)
    assert isinstance(open_store("memory://shared"), MemoryStore)
    assert open_store("MEMORY://shared").read("m", limit_bytes=1) == b"1"
    assert open_store("memory://other").list() == []


@pytest.mark.parametrize("text", ["nosuch://bucket/key", "file://host/x", "file://"])
def test_unsupported_urls_are_errors(text: str) -> None:
    """An unknown scheme, and a file on another host, are an error with the URL."""
    with pytest.raises(StorageError) as caught:
        open_store(text)
    assert caught.value.path == text
    assert text in str(caught.value)


def test_an_empty_path_is_refused() -> None:
    """An empty id is probably an unset variable, and must not mean the current folder."""
    with pytest.raises(StorageError, match="checkpoint id is empty"):
        open_store("")


NO_PLACES: dict[str, Any] = {
    "bytes": b"/tmp/x",
    "bytearray": bytearray(b"x"),
    "number": 5,
    "NUL": "/tmp/a\0b",
    "NUL in a path": Path("/tmp/a\0b"),
    "no character": "/tmp/\ud800",
    "NUL in a URL": "s3://bucket/a\0b",
}

USES: dict[str, Callable[[Any], Any]] = {
    "save": lambda place: dcp.save({"a": torch.ones(1)}, checkpoint_id=place, no_dist=True),
    "load": lambda place: dcp.load({"a": torch.ones(1)}, checkpoint_id=place, no_dist=True),
    "async": lambda place: dcp.async_save({"a": torch.ones(1)}, checkpoint_id=place, no_dist=True),
    "writer": lambda place: dcp.FileSystemWriter(place).prepare(),
    "reader": lambda place: dcp.FileSystemReader(place).read_metadata(),
    "manager": lambda place: dcp.CheckpointManager(place),
    "index": dcp.open_index,
    "source": lambda place: dcp.convert(place, "/nowhere/t.pt", to="torch"),
    "target": lambda place: dcp.convert("/nowhere", place, to="torch"),
}


@pytest.mark.parametrize("kind", NO_PLACES)
@pytest.mark.parametrize("use", USES)
def test_invalid_ids_are_refused_at_once(use: str, kind: str) -> None:
    """An id of a wrong type, or with NUL or unencodable characters, is a StorageError that quotes it."""
    with pytest.raises(StorageError) as caught:
        USES[use](NO_PLACES[kind])
    assert any(word in str(caught.value) for word in ("must be a str", "NUL", "encoding"))
    assert len(str(caught.value)) < 300


LONG = [(use, "x" * 300, "too long") for use in ("save", "load", "index", "target")]
UNUSABLE = [("save", "/proc/x", "/proc/x cannot be created"), ("manager", __file__, "is not a folder")]


@pytest.mark.parametrize(("use", "name", "words"), LONG + UNUSABLE)
def test_a_name_refused_by_the_file_system(use: str, name: str, words: str, tmp_path: Path) -> None:
    """A name that only the file system can refuse is a StorageError too."""
    with pytest.raises(StorageError, match=words):
        USES[use](tmp_path / name)


@pytest.mark.parametrize("leads_to", ["nowhere", "link"])
def test_a_dangling_link_is_named(leads_to: str, tmp_path: Path) -> None:
    """The error of a dangling link names the link, instead of "File exists" or a missing checkpoint."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / leads_to)
    for place in (link, link / "step-1"):
        with pytest.raises(StorageError, match=f"{link} is a symbolic link to {tmp_path / leads_to}"):
            USES["save"](place)
        with pytest.raises(dcp.CheckpointError, match="symbolic link"):
            USES["load"](place)
    if leads_to == "nowhere":
        with pytest.raises(dcp.CheckpointNotFoundError, match="is a symbolic link"):
            USES["load"](link)


@pytest.mark.parametrize("place", [Path("s3://bucket/run"), "gs:/bucket", "simplecache::s3://bucket/run"])
def test_urls_that_lost_a_slash_are_refused(place: Any) -> None:
    """pathlib reduces two slashes of a URL to one; it must not make a folder of that name."""
    for act in (open_store, USES["save"], USES["manager"]):
        with pytest.raises(StorageError, match=r"lost a slash|chained"):
            act(place)
