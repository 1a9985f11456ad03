"""Bodies. Internal: damage between two reads is reached by no request.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

import dcp
from dcp.inspection.values.elements import Array
from dcp.server.data.downloads import DownloadOptions, download_etag, download_name, plan_download
from dcp.server.data.opening import OpenCheckpoint, OpenCheckpoints
from dcp.server.data.sending import bodies, planned
from dcp.server.data.sending.bodies import Body, FileBody
from dcp.server.data.slices import parse_slices
from dcp.server.data.tensors import plan_tensor
from dcp.server.problems import GoneError, NotFoundError, UnprocessableError
from dcp.server.roots import StorageRoot
from dcp.server.settings import RootSettings
from dcp.storage.errors import CorruptCheckpointError, PlanError
from tests.support.conversion import many_kinds, sharded_tensors, training_state
from tests.support.processes import open_files
from tests.support.s3 import S3Server
from tests.support.sharded import grid, save_sharded
from tests.support.values import raw


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of an odd, small size, so that small tensors have many."""
    for name in ("PART_BYTES", "_REMOTE_PART_BYTES"):
        monkeypatch.setattr(bodies, name, 300_001)
    for name in ("_ARRAY_PART_BYTES", "_TURNED_PART_BYTES"):
        monkeypatch.setattr(planned, name, 900_001)


def read(body: Body, begin: int = 0, end: int | None = None) -> bytes:
    """The bytes as a client would have them."""
    return b"".join(body.parts(begin, body.size_bytes if end is None else end))


def opened_at(path: Path) -> OpenCheckpoint:
    """The checkpoint ``path``, whose parent is taken for a root."""
    return OpenCheckpoints().open(StorageRoot("prod", RootSettings(url=str(path.parent))), path.name)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tensor of each kind, of stock DCP's and our own making alike."""
    path = tmp_path_factory.mktemp("kinds") / "step-1"
    dcp.save(many_kinds(), checkpoint_id=path)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four files, with tensors cut along rows, columns and both."""
    path = tmp_path_factory.mktemp("sharded") / "step-1"
    cuts = {"rows": (4, 1), "columns": (1, 4), "deep": (1, 2, 4), "both": (2, 2), "wide": (1, 4)}
    tensors = sharded_tensors()
    save_sharded(path, tensors, {name: grid(tensors[name].shape, cut) for name, cut in cuts.items()})
    return path


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("source", ["kinds", "sharded", "training", "stock", "torch_save"])
def test_a_download_is_what_a_conversion_writes(
    source: str, to: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Byte for byte, of its announced size, from every kind of source."""
    if source in ("kinds", "sharded"):
        path = request.getfixturevalue(source)
    else:
        path = tmp_path / "source"
        state = training_state()
        if source == "training":
            dcp.save(state, checkpoint_id=path)
        elif source == "stock":
            torch.distributed.checkpoint.save({"a": {"b": torch.arange(50_000.0)}}, checkpoint_id=path)
        else:
            path = tmp_path / "source.pt"
            torch.save({"t": torch.arange(60_000.0).reshape(200, 300).t(), "n": 3}, path)
    target = tmp_path / ("out.safetensors" if to == "safetensors" else "out.pt")
    dcp.convert(path, target, to=to, executor="inline")
    planned = plan_download(opened_at(path), DownloadOptions(to))
    data = read(planned.body)
    assert len(data) == planned.body.size_bytes
    assert data == target.read_bytes()
    assert planned.dropped == ()


def test_readers_of_others_accept_the_files(sharded: Path) -> None:
    """`safetensors` and `torch.load(weights_only=True)` give the saved values; so does zipfile."""
    opened = opened_at(sharded)
    expected = sharded_tensors()
    flat = load_safetensors(read(plan_download(opened, DownloadOptions("safetensors")).body))
    file = io.BytesIO(read(plan_download(opened, DownloadOptions("torch")).body))
    loaded = torch.load(file, weights_only=True)
    for name, tensor in expected.items():
        assert raw(flat[name]) == raw(tensor), name
        assert raw(loaded[name]) == raw(tensor), name
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_any_range_is_that_of_the_whole(sharded: Path, to: str) -> None:
    """Resuming anywhere gives the same bytes, also where checksums of what came before are needed."""
    body = plan_download(opened_at(sharded), DownloadOptions(to)).body
    whole = read(body)
    rng = np.random.default_rng(3)
    cuts = [(0, 1), (len(whole) - 1, len(whole)), (len(whole) - 200, len(whole)), (0, 0)]
    cuts += [tuple(sorted(rng.integers(0, len(whole), 2).tolist())) for _ in range(5)]
    for begin, end in cuts:
        assert read(body, begin, end) == whole[begin:end]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_range_of_a_zip_reads_nothing_before_it(tmp_path: Path, dtype: str | None) -> None:
    """Its checksums are combined from the manifest's; only what is cast has to be read from the start, and
    then damage there is noticed."""
    path = tmp_path / "s"
    state = {"a": torch.arange(3_000_000.0), "b": torch.arange(9), "c": torch.ones(0), "d": torch.tensor(3.0)}
    dcp.save(state, checkpoint_id=path)
    body = plan_download(opened_at(path), DownloadOptions("torch", dtype=dtype)).body
    data = read(body)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    first = path / "__0_0.distcp"
    first = first if first.exists() else next(path.glob("*.distcp"))
    with first.open("r+b") as file:
        file.seek(first.stat().st_size // 3)
        file.write(b"damaged!")
    begin = len(data) - 300
    if dtype is None:
        assert read(body, begin) == data[begin:]
    else:
        with pytest.raises(CorruptCheckpointError):
            read(body, begin)
    with pytest.raises(CorruptCheckpointError):
        read(body)


def test_a_range_of_a_transposed_payload(tmp_path: Path) -> None:
    """Stored turned, it is read from its beginning, and comes out right."""
    torch.save({"t": torch.arange(90_000.0).reshape(300, 300).t()}, tmp_path / "t.pt")
    body = plan_download(opened_at(tmp_path / "t.pt"), DownloadOptions("safetensors")).body
    whole = read(body)
    assert read(body, 100_001, 300_000) == whole[100_001:300_000]


def test_options_of_a_download(kinds: Path) -> None:
    """Selection and casts, refused if they match nothing; each has an entity tag of its own."""
    opened = opened_at(kinds)
    options = DownloadOptions("safetensors", only=("large", "scalar"), dtype="bfloat16")
    found = load_safetensors(read(plan_download(opened, options).body))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "large": torch.bfloat16,
        "scalar": torch.bfloat16,
    }
    assert torch.equal(found["large"].nan_to_num(), many_kinds()["large"].bfloat16().nan_to_num())
    with pytest.raises(PlanError):
        plan_download(opened, DownloadOptions("safetensors", only=("nothing.*",)))
    tags = {download_etag(opened, DownloadOptions(to)) for to in ("torch", "safetensors")}
    assert len(tags | {download_etag(opened, options)}) == 3
    assert download_etag(opened, options) == download_etag(opened_at(kinds), options)
    assert download_name(opened, options) == "step-1.safetensors"


def test_values_that_cannot_travel(tmp_path: Path) -> None:
    """What only a pickle can hold refuses the download, or is left out and named."""
    dcp.save({"w": torch.ones(3), "odd": io.StringIO}, checkpoint_id=tmp_path / "s")
    opened = opened_at(tmp_path / "s")
    with pytest.raises(PlanError, match="odd"):
        plan_download(opened, DownloadOptions("torch"))
    planned = plan_download(opened, DownloadOptions("torch", drop_objects=True))
    assert planned.dropped == ("odd",)
    assert set(torch.load(io.BytesIO(read(planned.body)), weights_only=True)) == {"w"}


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_damaged_source_never_gives_all_bytes(tmp_path: Path, to: str) -> None:
    """One flipped bit, wherever it is: reading fails before the last part has been handed out."""
    path = tmp_path / "s"
    dcp.save({"a": torch.arange(300_000.0), "b": torch.arange(9.0)}, checkpoint_id=path)
    (data,) = path.glob("*.distcp")
    size = data.stat().st_size
    for at in (size // 3, size // 2):
        _flip(data, at)
        body = plan_download(opened_at(path), DownloadOptions(to)).body
        got = 0
        with pytest.raises(CorruptCheckpointError), closing(body.parts(0, body.size_bytes)) as parts:
            for part in parts:
                got += len(part)
        assert got < body.size_bytes
        _flip(data, at)
    assert len(read(body)) == body.size_bytes


def test_a_damaged_source_in_a_range(tmp_path: Path) -> None:
    """A range whose blocks are damaged fails, even where the damage is beside it; others do not."""
    path = tmp_path / "s"
    dcp.save({"a": torch.arange(3_000_000.0)}, checkpoint_id=path)  # three blocks
    (data,) = path.glob("*.distcp")
    _flip(data, data.stat().st_size // 2)
    body = plan_download(opened_at(path), DownloadOptions("safetensors")).body
    assert len(read(body, 0, 1000)) == 1000
    with pytest.raises(CorruptCheckpointError):
        read(body, body.size_bytes // 2 - 500_000, body.size_bytes // 2 - 400_000)


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    """Raw files break off as well, instead of ending early."""
    from dcp.storage.stores import PosixStore

    (tmp_path / "f").write_bytes(bytes(200_000))
    body = FileBody(PosixStore(tmp_path), "f", 200_000)
    assert read(body, 5, 150_000) == bytes(149_995)
    (tmp_path / "f").write_bytes(bytes(100_000))
    with pytest.raises(CorruptCheckpointError):
        read(body)


# -- tensors -------------------------------------------------------------------------------------------------


def _npy(data: bytes) -> Array:
    array: Array = np.load(io.BytesIO(data), allow_pickle=False)
    return array


@pytest.mark.parametrize("name", sorted(many_kinds()))
def test_each_kind_of_tensor(kinds: Path, name: str) -> None:
    """Whole ones as .npy, with float32 for what numpy has not, and as .safetensors with their own type."""
    opened, tensor = opened_at(kinds), many_kinds()[name]
    stored = plan_tensor(opened, name, None, "safetensors")
    got = load_safetensors(read(stored.body))[name]
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert raw(got) == raw(tensor)
    plain = plan_tensor(opened, name, None, "npy")
    array = _npy(read(plain.body))
    assert array.shape == tuple(tensor.shape)
    wanted = tensor.float() if plain.dtype != plain.stored_dtype else tensor
    assert np.array_equal(array, wanted.numpy(), equal_nan=array.dtype.kind in "fc")
    assert plain.body.size_bytes == len(read(plain.body))


@pytest.mark.parametrize(
    "text", ["0", "3:9", "::-7", "-5:,2:8", "...,1", ":,::3", "5,6", "100:50", "::-1,::-1", "1200:,4"]
)
@pytest.mark.parametrize("name", ["large", "kind.bfloat16"])
def test_slices_are_numpys(kinds: Path, name: str, text: str) -> None:
    """A slice is what numpy takes of the whole, and so is every range of its file."""
    opened = opened_at(kinds)
    slices = parse_slices(text)
    array = many_kinds()[name].float().numpy()
    try:
        wanted = array[slices]
    except IndexError:
        with pytest.raises(PlanError):
            plan_tensor(opened, name, slices, "npy")
        return
    planned = plan_tensor(opened, name, slices, "npy")
    data = read(planned.body)
    assert len(data) == planned.body.size_bytes
    assert np.array_equal(_npy(data), wanted, equal_nan=True)
    middle = len(data) // 2 + 1
    assert read(planned.body, 7, middle) + read(planned.body, middle, len(data)) == data[7:]
    stored = load_safetensors(read(plan_tensor(opened, name, slices, "safetensors").body))[name]
    assert np.array_equal(stored.float().numpy(), wanted, equal_nan=True)


def test_sharded_slices(sharded: Path) -> None:
    """How ranks have cut a tensor is not seen."""
    opened = opened_at(sharded)
    for name, tensor in sharded_tensors().items():
        got = load_safetensors(read(plan_tensor(opened, name, parse_slices("1:,2:-1"), "safetensors").body))
        assert raw(got[name]) == raw(tensor[1:, 2:-1]), name


def test_no_such_tensor(kinds: Path) -> None:
    """Names and slices that cannot be meant."""
    opened = opened_at(kinds)
    with pytest.raises(NotFoundError):
        plan_tensor(opened, "none", None, "npy")
    with pytest.raises(PlanError):
        plan_tensor(opened, "large", parse_slices("1,2,3"), "npy")
    for text in ("a", "1:2:0", "1,,2", ":" * 5, "9" * 30):
        with pytest.raises(UnprocessableError):
            parse_slices(text)
    assert parse_slices("") is None


# -- opening -------------------------------------------------------------------------------------------------


def test_indexes_are_kept_until_files_change(tmp_path: Path) -> None:
    """The same object while nothing changes, a new one when a checkpoint is replaced, gone when it is."""
    root = StorageRoot("prod", RootSettings(url=str(tmp_path)))
    checkpoints = OpenCheckpoints()
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "s")
    first = checkpoints.open(root, "s")
    assert checkpoints.open(root, "s") is first
    assert OpenCheckpoints(kept_bytes=10).open(root, "s").stamp == first.stamp
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "s")
    second = checkpoints.open(root, "s")
    assert second.index.shape(0) == (4,)
    assert second.stamp != first.stamp
    assert second.etag("x") != first.etag("x")
    for file in (tmp_path / "s").iterdir():
        file.unlink()
    with pytest.raises(GoneError):
        checkpoints.open(root, "s")


def test_from_s3(s3_server: S3Server, s3_root: str) -> None:
    """The same from an object store, in parts fetched together."""
    state: dict[str, Any] = {"a": torch.arange(100_000.0), "b": {"c": torch.ones(3, dtype=torch.int8)}}
    dcp.save(state, checkpoint_id=f"{s3_root}/step-1", storage_options=s3_server.storage_options)
    root = StorageRoot("s3", RootSettings(url=s3_root, storage_options=s3_server.storage_options))
    opened = OpenCheckpoints().open(root, "step-1")
    data = read(plan_download(opened, DownloadOptions("torch")).body)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"]["c"], state["b"]["c"])
    body = plan_download(opened, DownloadOptions("safetensors")).body
    assert read(body, 100, 50_000) == read(body)[100:50_000]


def test_parts_stop_when_they_are_closed(kinds: Path) -> None:
    """Closing after the first part closes files: nothing is left open."""
    body = plan_download(opened_at(kinds), DownloadOptions("safetensors")).body
    before = _open_below(kinds)
    parts: Iterator[memoryview] = body.parts(0, body.size_bytes)
    next(parts)
    assert _open_below(kinds) > before
    parts.close()  # type: ignore[attr-defined]
    assert _open_below(kinds) == before


def _open_below(folder: Path) -> int:
    return sum(path.startswith(str(folder)) for path in open_files())
