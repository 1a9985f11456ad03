"""Records of tensors and values: torch, zipfile and dcp read the records of dcp and of stock torch alike."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import CheckpointError, CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from tests.support.values import raw

GOLDEN = Path(__file__).parent / "golden" / "record-bfloat16-2x3.zip"
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0), (5,), (300, 70), (2, 1, 3, 1, 2)]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.complex128,
]


@pytest.fixture(autouse=True)
def _torch_options() -> Iterator[None]:
    """Reset torch.save's checksum option after a test."""
    yield
    torch.serialization.set_crc32_options(True)


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with different neighbouring bytes, valid for bool."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return (torch.arange(count) % (2 if dtype is torch.bool else 251)).to(torch.uint8).view(dtype).view(shape)


def records(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor's record, by name."""
    index = dcp.open_index(folder)
    data = {name: (folder / name).read_bytes() for name in index.files}
    found = {}
    for row, fqn in enumerate(index.fqns):
        chunk = int(index.chunk_start[row])
        begin = int(index.record_offsets[chunk])
        end = begin + int(index.record_lengths[chunk])
        found[fqn] = data[index.files[index.chunk_files[chunk]]][begin:end]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_each_record_by_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch.load, also with mmap, reads a record of any dtype and shape; zipfile confirms the CRC."""
    state = {f"{shape}.{n}": made(dtype, shape) for shape in SHAPES for n in range(3)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for fqn, data in records(tmp_path / "c").items():
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert (loaded.dtype, loaded.shape) == (dtype, state[fqn].shape)
        assert loaded.stride() == state[fqn].stride() and raw(loaded) == raw(state[fqn])
        (tmp_path / "record").write_bytes(data)
        assert zipfile.ZipFile(tmp_path / "record").testzip() is None
        assert raw(torch.load(tmp_path / "record", weights_only=True, mmap=True)) == raw(state[fqn])


def test_golden_bytes(tmp_path: Path) -> None:
    """torch loads a committed record of version 1.0, and dcp still writes it byte by byte."""
    golden = GOLDEN.read_bytes()
    loaded = torch.load(io.BytesIO(golden), weights_only=True)
    assert torch.equal(loaded, torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    dcp.save({"t": loaded}, checkpoint_id=tmp_path, no_dist=True)
    assert records(tmp_path)["t"] == golden


# -- records of stock torch ----------------------------------------------------------------------------------

BASE = torch.arange(24.0).reshape(2, 3, 4)
TENSORS: dict[str, torch.Tensor] = {
    "large": torch.arange(20_000).reshape(100, 200),
    "scalar": torch.tensor(3, dtype=torch.uint16),
    "empty": torch.zeros(0, 3),
    "transposed": BASE.transpose(0, 2),
    "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "buffer": torch.nn.Buffer(torch.ones(2)),
    "grad": torch.ones(3, requires_grad=True),
    "float8": torch.arange(8.0).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize(("crc", "alignment"), [(True, 1), (False, 65536)])
def test_stock_records_of_any_layout_are_read(tmp_path: Path, crc: bool, alignment: int) -> None:
    """A load reads permuted layouts, parameters and any dtype, with any padding, also without checksums."""
    torch.serialization.set_crc32_options(crc)
    torch.utils.serialization.config.save.storage_alignment = alignment
    try:
        stock.save(dict(TENSORS), checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.utils.serialization.config.save.storage_alignment = 64
    state = {name: torch.zeros_like(tensor.detach()) for name, tensor in TENSORS.items()}
    report = dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(raw(state[name]) == raw(tensor.detach()) for name, tensor in TENSORS.items())
    assert (report.blocks_verified > 0) == crc


def changed(
    folder: Path, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED
) -> Path:
    """Return a stock checkpoint of one tensor, with the entries of the record changed (None: removed)."""
    stock.save({"t": torch.arange(5)}, checkpoint_id=folder, no_dist=True)
    record, stream = folder / "__0_0.distcp", io.BytesIO()
    with zipfile.ZipFile(record) as source, zipfile.ZipFile(stream, "w", method) as target:
        for name in source.namelist():
            content = change(name, source.read(name))
            if content is not None:
                target.writestr(name, content)
    record.write_bytes(stream.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def load(folder: Path) -> list[int]:
    """Load and return the tensor."""
    state = {"t": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return list(state["t"].tolist())


def test_zips_of_other_writers_are_read_or_refused(tmp_path: Path) -> None:
    """Zip files with another layout than torch's are read; compressed and big-endian records are refused."""
    assert load(changed(tmp_path / "plain", lambda name, content: content)) == [0, 1, 2, 3, 4]
    with pytest.raises(UnsupportedFormatError, match=r"'t'.*compressed"):
        load(changed(tmp_path / "deflated", lambda name, content: content, zipfile.ZIP_DEFLATED))
    with pytest.raises(UnsupportedFormatError, match="big-endian"):
        load(
            changed(tmp_path / "big", lambda name, content: b"big" if name.endswith("byteorder") else content)
        )


class Evil:
    """Object that runs code when unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("owned",))


@pytest.mark.parametrize(
    ("suffix", "content", "error"),
    [
        ("data.pkl", None, CorruptCheckpointError),
        ("data/0", None, CorruptCheckpointError),
        ("data/0", b"short", CorruptCheckpointError),
        ("data/0", bytes(41), CorruptCheckpointError),
        ("data.pkl", b"", CorruptCheckpointError),
        ("data.pkl", pickle.dumps([1, 2]), CorruptCheckpointError),
        ("data.pkl", b"\x80\x02" + b"(" * 2_000_000, CorruptCheckpointError),
        ("data.pkl", pickle.dumps(Evil(), protocol=2), UnsafeObjectError),
        ("byteorder", b"middle", CorruptCheckpointError),
    ],
)
def test_inconsistent_records_are_refused(
    tmp_path: Path, suffix: str, content: bytes | None, error: type[CheckpointError], capsys: Any
) -> None:
    """A record with missing entries, wrong sizes, no tensor, or code is refused with the tensor's name."""
    folder = changed(tmp_path, lambda name, old: content if name.endswith(suffix) else old)
    with pytest.raises(error, match=r"'t'|print"):
        load(folder)
    assert "owned" not in capsys.readouterr().out
