"""Object stores beyond the contract: options, ignored conditions, forks and listings."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

import dcp
from dcp.errors import CheckpointError, CorruptCheckpointError, StorageError
from dcp.storage.stores import Store, open_store
from dcp.storage.stores.contract import pattern_bytes
from tests.support.command import run
from tests.support.s3 import RawS3, raw_s3

_MIB = 1 << 20


@pytest.fixture
def store(s3_server: Any, s3_root: str) -> Store:
    """Return a store with a prefix of its own on the real server."""
    return open_store(s3_root, s3_server.storage_options | {"part_bytes": 5 * _MIB})


@pytest.fixture
def raw(s3_server: Any) -> Iterator[RawS3]:
    """Yield a client for plain requests to the same server."""
    with raw_s3(s3_server) as client:
        yield client


# -- conditions ----------------------------------------------------------------------------------------------


class _IgnoresMode(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that accepts mode="create" and ignores it."""

    protocol = "obliging"
    inner = MemoryFileSystem()
    root_marker = "/"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        self.inner.pipe_file(f"/obliging/{path}", value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> Any:
        return self.inner.cat_file(f"/obliging/{path}", start=start, end=end)

    def info(self, path: str, **_: object) -> Any:
        return self.inner.info(f"/obliging/{path}") | {"name": path}

    def ls(self, path: str, detail: bool = True, **_: object) -> Any:
        found = self.inner.ls(f"/obliging/{path}", detail=True)
        return [one | {"name": one["name"].removeprefix("/obliging/")} for one in found]

    def rm_file(self, path: str) -> None:
        self.inner.rm_file(f"/obliging/{path}")


fsspec.register_implementation("obliging", _IgnoresMode, clobber=True)


def test_a_service_that_ignores_conditions_is_refused() -> None:
    """Conditions are tried, because accepting one proves nothing; the trial leaves nothing behind."""
    store = open_store(f"obliging://{uuid.uuid4().hex}")
    with pytest.raises(StorageError, match="conditional_writes") as caught:
        store.publish("m", b"1", durable=True, expected=None)
    assert caught.value.path == store.url
    assert _IgnoresMode.inner.find("/obliging") == []
    store.publish("m", b"2", durable=True)  # without a condition
    assert store.read("m", limit_bytes=9) == b"2"


# -- files and listings --------------------------------------------------------------------------------------


def test_files_of_many_parts_have_their_bytes_in_order(store: Store, raw: RawS3) -> None:
    """All parts, a short last one too, are in order; a file replaced during a read is an error."""
    data = pattern_bytes(23 * _MIB + 7)
    with store.create("data", durable=True, expected_bytes=len(data)) as handle:
        handle.write(data)
    assert raw.read(f"{store.url}/data") == data
    with store.open_read("data", expected_bytes=len(data)) as opened:
        assert opened.pread(5, 0) == data[:5]
        raw.write(f"{store.url}/data", bytes(len(data)))
        with pytest.raises(CorruptCheckpointError, match="was replaced while it was read"):
            opened.pread(5, 10)
    assert store.abort_uploads(lambda name: True) == 0


def test_folders_and_their_files_by_one_listing(store: Store, raw: RawS3) -> None:
    """Only files exactly one folder deep are listed."""
    keys = ("a/m", "a/deep/m", "b/m", "b/n", "top", "d/", "f/.lock")
    raw.write_many([(f"{store.url}/{key}", b"12") for key in keys])
    before = store.traffic().get("requests", 0)
    found = sorted((folder, info.name, info.size_bytes) for folder, info in store.walk())
    assert found == [("a", "m", 2), ("b", "m", 2), ("b", "n", 2)]
    assert store.traffic()["requests"] == before + 1
    assert [info.name for info in store.list()] == ["top"]
    assert {"a", "b"} <= set(store.folders()) and "" not in store.folders()


class _Roots(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's memory under an unknown scheme."""

    protocol = "rootcloud"


fsspec.register_implementation("rootcloud", _Roots, clobber=True)


@pytest.mark.parametrize("kind", ["{}", "file://{}", "memory://{}", "rootcloud://bucket{}"])
def test_a_run_in_any_root(kind: str, tmp_path: Path) -> None:
    """Steps are saved, listed, pinned and retained in a path, its URL, memory, and any fsspec file system.
    Files of the root and in deeper folders are not steps."""
    url = kind.format(tmp_path / "a run")
    neighbours = (url, f"{url}/step-00000001/deeper", f"{url}/step-00000009")
    options = {"conditional_writes": "off"} if "cloud" in kind else None
    keep = dcp.Retention(last=1)
    with dcp.CheckpointManager(url, keep=keep, storage_options=options, no_dist=True) as manager:
        manager.save(1, {"n": 1}, force=True)
        manager.wait(60)
        manager.pin(1)
        for place in neighbours:
            store = open_store(place)
            store.make_root()
            store.publish("other", b"1", durable=False)
        for step in (2, 3):
            manager.save(step, {"n": step}, force=True)
        manager.wait(60)
        assert (manager.all_steps(), manager.pinned(), manager.latest()) == ([1, 3], [1], 3)
    listed = run("ls", url, "--json").json
    assert [row["step"] for row in listed if row["state"] == "committed"] == [1, 3]


# -- options -------------------------------------------------------------------------------------------------


_WRONG: dict[str, list[object]] = {
    "conditional_writes": ["maybe"],
    "part_bytes": [1 << 20, (5 << 20) + 1],
    **{
        name: [value]
        for name, value in (("concurrency", 0), ("retry_seconds", -1), ("request_timeout_seconds", 0))
    },
}


@pytest.mark.parametrize(
    ("url", "options"),
    [("s3://bucket/run", {name: value}) for name, values in _WRONG.items() for value in values]
    + [("/tmp/run", {"key": "1"}), *((url, None) for url in ("s3://", "s3:///run", "s3a:///run"))],
)
def test_invalid_options_and_urls_are_refused(url: str, options: dict[str, object] | None) -> None:
    """Invalid options and URLs are refused before any request."""
    with pytest.raises(CheckpointError):
        open_store(url, options)
