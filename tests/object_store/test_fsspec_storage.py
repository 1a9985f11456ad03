"""`FsspecReader` and `FsspecWriter`: used with dcp and with stock torch, in all combinations with stock's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as StockReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter as StockWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from dcp.errors import PlanError
from dcp.storage.stores import PosixStore
from tests.support.s3 import S3Server
from tests.support.versions import version_of, version_state


@pytest.fixture
def memory_url() -> Iterator[str]:
    """Yield a URL in fsspec's memory file system."""
    url = f"memory://{uuid.uuid4().hex}/step-1"
    yield url
    files = fsspec.filesystem("memory")
    if files.exists(url):
        files.rm(url, recursive=True)


def _loaded(reader: Any, load: Any = dcp.load) -> int | str:
    state = version_state(0)
    load(state, storage_reader=reader, no_dist=True)
    return version_of(state)


# -- combinations with stock ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["s3", "memory"])
def test_dcp_and_stock_read_each_other(
    where: str, s3_server: S3Server, s3_root: str, memory_url: str
) -> None:
    """Readers of dcp and stock read files of both writers, also within the other package's save and load."""
    place = s3_root if where == "s3" else memory_url
    options = s3_server.storage_options if where == "s3" else {}
    savers: dict[str, tuple[Any, type]] = {
        "dcp": (dcp.save, dcp.FsspecWriter),
        "stock": (stock_save, StockWriter),
        "dcp in stock": (stock_save, dcp.FsspecWriter),
        "stock in dcp": (dcp.save, StockWriter),
    }
    for version, (name, (save, writer)) in enumerate(savers.items(), start=1):
        url = f"{place}/{name.replace(' ', '-')}"
        save(version_state(version), storage_writer=writer(url, **options), no_dist=True)
        assert _loaded(dcp.FsspecReader(url, **options)) == version, name
        assert _loaded(dcp.FsspecReader(url, **options), stock_load) == version, name
        assert _loaded(StockReader(url, **options), stock_load) == version, name
        assert _loaded(StockReader(url, **options)) == version, name
        names = [path.rpartition("/")[2] for path in fsspec.open_files(f"{url}/*", **options).fs.find(url)]
        assert ("manifest.msgpack" in names) == (writer is dcp.FsspecWriter), name


# -- paths and options ---------------------------------------------------------------------------------------


def test_local_paths_and_memory_urls(tmp_path: Path, memory_url: str) -> None:
    """Local paths use the local store. memory:// is fsspec's memory, as in torch, not that of `dcp.load`."""
    for path in (tmp_path / "a", str(tmp_path / "b"), (tmp_path / "c").as_uri()):
        writer = dcp.FsspecWriter(path, auto_mkdir=True)  # users of torch pass it for local paths
        assert isinstance(writer.store, PosixStore)
        dcp.save(version_state(1), storage_writer=writer, no_dist=True)
        assert _loaded(dcp.FsspecReader(path)) == 1
    writer = dcp.FsspecWriter(memory_url)
    assert not isinstance(writer.store, PosixStore)
    dcp.save(version_state(1), storage_writer=writer, no_dist=True)
    assert fsspec.filesystem("memory").exists(f"{memory_url}/manifest.msgpack")
    with pytest.raises(dcp.CheckpointNotFoundError):
        dcp.load(version_state(0), checkpoint_id=memory_url, no_dist=True)


def test_valid_ids_equal_torchs() -> None:
    """Ids are valid as in torch: a scheme that fsspec knows, installed or not, and no Path."""
    for kind, stock in ((dcp.FsspecReader, StockReader), (dcp.FsspecWriter, StockWriter)):
        for checkpoint_id in ("s3://b/x", "memory://x", "/tmp/x", "file:///x", "nope://x", Path("/tmp/x")):
            wanted = stock.validate_checkpoint_id(checkpoint_id)
            assert kind.validate_checkpoint_id(checkpoint_id) is wanted, checkpoint_id
        assert kind.validate_checkpoint_id("abfs://container/x")  # adlfs is not installed


def test_unsupported_options_are_refused(tmp_path: Path) -> None:
    """torch's experimental options, and options that the local file system lacks, are refused."""
    with pytest.raises(PlanError, match="stream extensions"):
        dcp.FsspecWriter(tmp_path, _extensions=[object()])
    with pytest.raises(PlanError, match="dcp format"):
        dcp.FsspecWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    writer = dcp.FsspecWriter(tmp_path, key="k")
    with pytest.raises(dcp.errors.StorageError, match="takes no storage options: remove key"):
        dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
