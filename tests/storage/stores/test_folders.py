from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from dcp.inspection.checkpoints import list_checkpoints
from dcp.storage.errors import CheckpointFormatError, CheckpointNotFoundError, StorageError
from dcp.storage.stores import MemoryStore, PosixStore, open_store
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import FaultInjectingStore
from dcp.storage.stores.folders import ParentFolder, open_parent_folder


def put(root: ParentFolder, folder: str, *names: str) -> None:
    """Small files in a folder of the root."""
    store = root.store(folder)
    store.make_root()
    for name in names:
        store.publish(name, name.encode(), durable=False)


@pytest.fixture(params=["posix", "file url", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> ParentFolder:
    """A root of each kind, not made yet."""
    place = tmp_path / "run 1"
    urls: dict[str, str | Path] = {
        "posix": place,
        "file url": place.as_uri(),
        "memory": f"memory://{uuid.uuid4().hex}/run 1",
    }
    return open_parent_folder(urls[request.param])


def test_names_are_the_folders_directly_below(root: ParentFolder) -> None:
    """Sorted; files of the root and folders further down are none; a root that is not there has none."""
    assert root.names() == []
    root.make()
    root.make()
    assert root.exists()
    assert root.names() == []
    put(root, "b", "x")
    put(root, "a", ".metadata")
    open_store(root.url).publish("file", b"1", durable=False)
    open_store(f"{root.url}/a/deeper").make_root()
    open_store(f"{root.url}/a/deeper").publish("x", b"1", durable=False)
    assert root.names() == ["a", "b"]
    assert root.store("b").read("x", limit_bytes=1) == b"x"
    assert root.store("b").url == f"{root.url}/b"


def test_committed_folders_and_what_is_in_them(root: ParentFolder) -> None:
    """A manifest, `.metadata` or a rank's part commits; data alone does not; asked for files are reported."""
    put(root, "both", "manifest.msgpack", ".metadata", "notes", "__0_0.0a.distcp")
    put(root, "manifest", "manifest.msgpack")
    put(root, "stock", ".metadata", "__0_0.distcp")
    put(root, "ranks", "__0.manifest.msgpack", "__0.metadata", "__17.metadata", "notes", "other")
    put(root, "unfinished", "__0_0.0a.distcp", "notes")
    found = root.committed(("notes",))
    assert {name: sorted(files) for name, files in found.items()} == {
        "both": [".metadata", "manifest.msgpack", "notes"],
        "manifest": ["manifest.msgpack"],
        "ranks": ["__0.manifest.msgpack", "__0.metadata", "__17.metadata", "notes"],
        "stock": [".metadata"],
    }
    assert found["both"]["notes"].size_bytes == 5
    assert sorted(root.look()) == ["both", "manifest", "ranks", "stock", "unfinished"]
    assert root.look_into("unfinished", ("notes",)).keys() == {"notes"}
    assert root.look_into("absent", ("notes",)) == {}


def test_looking_costs_few_requests_and_reads_nothing(tmp_path: Path) -> None:
    """For a committed folder a request for each file asked for, and none that grows with its data files."""
    stores: list[FaultInjectingStore] = []

    def watched(url: str | os.PathLike[str]) -> Store:
        stores.append(FaultInjectingStore(PosixStore(url)))
        return stores[-1]

    root = open_parent_folder(tmp_path, open_store=watched)
    put(root, "step-1", "manifest.msgpack", *(f"__{rank}_0.0a.distcp" for rank in range(40)))
    stores.clear()
    assert list(root.committed(("notes",))) == ["step-1"]
    assert [(operation.op, operation.name) for operation in stores[0].log] == [
        ("stat", "manifest.msgpack"),
        ("stat", ".metadata"),
        ("stat", "notes"),
    ]


def test_folders_that_no_checkpoint_can_be(tmp_path: Path) -> None:
    """A name that no file of a checkpoint may have is left out; folders behind links count."""
    for name in ("good", "back\\slash", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nothing")
    assert open_parent_folder(tmp_path).names() == ["elsewhere", "good", "link"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".lock"])
def test_a_folder_is_one_plain_name(root: ParentFolder, name: str) -> None:
    """Nothing reaches outside of the root."""
    with pytest.raises(CheckpointFormatError):
        root.store(name)


def test_places_that_cannot_be_roots(tmp_path: Path) -> None:
    """An unknown scheme, and a file in the place of the root, are errors when they are listed; a URL that
    lost a slash is one at once."""
    with pytest.raises(StorageError, match="gopher://"):
        open_parent_folder("gopher://host/run").names()
    for mangled in (Path("s3://bucket/run"), tmp_path / "s3://bucket/run", "gs:/bucket"):
        with pytest.raises(StorageError, match="a URL that lost a slash"):
            open_parent_folder(mangled)
    with pytest.raises(StorageError, match="chained"):
        open_parent_folder("simplecache::s3://bucket/run")
    (tmp_path / "file").write_bytes(b"")
    assert not open_parent_folder(tmp_path / "file").exists()
    with pytest.raises(StorageError) as caught:
        open_parent_folder(tmp_path / "file").names()
    assert caught.value.path == str(tmp_path / "file")


def test_list_checkpoints_of_any_root(root: ParentFolder) -> None:
    """The inspection lists what is below a root of each kind, and says where there is no such folder."""
    url = root.url
    if not root.exists():
        with pytest.raises(CheckpointNotFoundError, match=r"no such folder|does not exist"):
            list_checkpoints(url)
    put(root, "step-10", "__0_0.0a.distcp")
    put(root, "step-9", "manifest.msgpack")
    put(root, "other", "readme")
    assert [(row.name, row.state) for row in list_checkpoints(url)] == [
        ("step-9", "unreadable"),
        ("step-10", "incomplete"),
    ]


def test_memory_folders_without_files_are_not_listed() -> None:
    """Looking at a name in memory does not make a folder of it."""
    root = open_parent_folder("memory://looked-at")
    assert root.store("x").list() == []
    assert isinstance(root.store("x"), MemoryStore)
    assert root.names() == []
