"""Which store a checkpoint id means."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dcp.errors import StorageError
from dcp.storage.stores import MemoryStore, PosixStore, open_store


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A str or PathLike is a folder; a relative one is resolved at once, not when it is used."""
    monkeypatch.chdir(tmp_path)
    stores = [open_store("a b"), open_store(Path("a b")), open_store((tmp_path / "a b").as_uri())]
    monkeypatch.chdir("/")
    assert {store.url for store in stores} == {str(tmp_path / "a b")}
    assert all(isinstance(store, PosixStore) for store in stores)
    assert not (tmp_path / "a b").exists()


@pytest.mark.parametrize("text", ["weird:name", "c:/x", "run:", "//x"])
def test_what_only_looks_like_a_url(text: str) -> None:
    """A colon does not make a URL."""
    assert isinstance(open_store(text), PosixStore)


def test_memory_is_shared_by_name() -> None:
    """Two stores of one name have the same files, those of another name have not."""
    open_store("memory://shared").publish("m", b"1", durable=False)
    assert isinstance(open_store("memory://shared"), MemoryStore)
    assert open_store("MEMORY://shared").read("m", limit_bytes=1) == b"1"
    assert open_store("memory://other").list() == []


@pytest.mark.parametrize("text", ["nosuch://bucket/key", "file://host/x", "file://"])
def test_unsupported_urls(text: str) -> None:
    """Any other scheme, and a file on another host, is an error which names the URL."""
    with pytest.raises(StorageError) as caught:
        open_store(text)
    assert caught.value.path == text
    assert text in str(caught.value)


def test_empty_path() -> None:
    """An empty id is most likely an unset variable: it must not mean the current folder."""
    with pytest.raises(StorageError, match="empty path"):
        open_store("")


def test_posix_store_travels_to_other_processes(tmp_path: Path) -> None:
    """A pickled store opens the same folder with the same options, and holds no lock there."""
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to("target")
    store = PosixStore(tmp_path, follow_links=True)
    with store.lock(timeout_seconds=1):
        copy = pickle.loads(pickle.dumps(store))
        with pytest.raises(StorageError), copy.lock(timeout_seconds=0):
            pass
    assert copy.url == store.url
    assert copy.read("link", limit_bytes=1) == b"x"
