"""Records that we write: torch, zipfile and our own reader agree about them."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.native import record
from dcp.storage.formats.native.record import (
    ALIGNED_PAYLOAD_BYTES,
    ALIGNMENT_BYTES,
    begin_record,
    locate_payload,
    object_record,
)

GOLDEN = Path(__file__).parent / "golden" / "record-bfloat16-2x3.zip"
GIB = 1 << 30

codes = st.sampled_from(sorted(dtypes.BY_CODE))
shapes = st.lists(st.integers(0, 7), max_size=5).map(tuple)


def whole_record(code: int, sizes: tuple[int, ...], payload: bytes, file_offset: int = 0) -> bytes:
    """A record as the writer streams it."""
    opened = begin_record(code, sizes, len(payload), file_offset)
    data = opened.prefix + payload + opened.suffix(crc32(payload))
    assert len(data) == opened.record_bytes
    return data


def some_payload(code: int, sizes: tuple[int, ...]) -> bytes:
    """Bytes for a tensor: valid for bool, and different at neighbouring places."""
    count = math.prod(sizes) * dtypes.BY_CODE[code].itemsize
    limit = 2 if dtypes.BY_CODE[code].name == "bool" else 251
    return (np.arange(count) % limit).astype(np.uint8).tobytes()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a contiguous tensor, whatever its dtype."""
    if tensor.numel() == 0:
        return b""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("code", sorted(dtypes.BY_CODE))
@pytest.mark.parametrize("sizes", [(), (0,), (3, 0), (5,), (300, 70), (2, 1, 3, 1, 2)])
def test_every_dtype_from_a_file_and_mapped(code: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Every dtype of the format, read from a file with and without mmap, and its CRC checked by zipfile."""
    payload = some_payload(code, sizes)
    path = tmp_path / "record"
    path.write_bytes(whole_record(code, sizes, payload))
    assert zipfile.ZipFile(path).testzip() is None
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert (str(loaded.dtype), tuple(loaded.shape)) == (f"torch.{dtypes.BY_CODE[code].name}", sizes)
        assert tensor_bytes(loaded) == payload


def test_large_payloads_are_aligned_and_small_ones_are_not_padded() -> None:
    """From 4 KiB on the payload begins at a multiple of 64 in the file; shorter ones are not moved."""
    large = ALIGNED_PAYLOAD_BYTES
    for file_offset in [*range(130), 1 << 40]:
        opened = begin_record(5, (large,), large, file_offset)
        assert (file_offset + len(opened.prefix)) % ALIGNMENT_BYTES == 0
    small = {len(begin_record(5, (large - 1,), large - 1, file_offset).prefix) for file_offset in range(130)}
    assert len(small) == 1


def test_golden_bytes() -> None:
    """A record of version 1.0, committed once, is loaded by torch and still written byte by byte."""
    golden = GOLDEN.read_bytes()
    loaded = torch.load(io.BytesIO(golden), weights_only=True)
    assert torch.equal(loaded, torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    assert whole_record(4, (2, 3), tensor_bytes(loaded), 17) == golden


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 2**40, 0.5, "é", [1, "a"], {"lr": 0.001, "betas": (0.9, 0.999)}, list(range(3000))],
    ids=lambda value: type(value).__name__,
)
def test_torch_loads_objects(value: Any, tmp_path: Path) -> None:
    """A plain value pickled with protocol 2 comes back from torch.load, from memory and from a file."""
    data = object_record(pickle.dumps(value, protocol=2))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert torch.load(io.BytesIO(data), weights_only=True) == value
    (tmp_path / "object").write_bytes(data)
    assert torch.load(tmp_path / "object", weights_only=True, mmap=True) == value


def sparse_record(path: Path, payload_bytes: int, crc: int) -> record.OpenRecord:
    """A record of zeros as a sparse file; the payload takes no space."""
    opened = begin_record(5, (payload_bytes,), payload_bytes, 0)
    with path.open("wb") as file:
        file.write(opened.prefix)
        file.seek(payload_bytes, os.SEEK_CUR)
        file.write(opened.suffix(crc))
    assert path.stat().st_size == opened.record_bytes
    return opened


def pread(path: Path) -> Any:
    """A ``read(offset, length)`` for `locate_payload`."""

    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return read


@pytest.mark.parametrize(
    "payload_bytes", [5 * GIB, 4 * GIB - 1, 4 * GIB - (1 << 16), 4 * GIB - (1 << 16) - 1]
)
def test_records_beyond_4_gib_are_zip64(payload_bytes: int, tmp_path: Path) -> None:
    """Sizes and positions around and beyond 32 bits are read back by zipfile, torch (mapped) and by us."""
    path = tmp_path / "record"
    opened = sparse_record(path, payload_bytes, 0xDEADBEEF)
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("r/data/0")
        assert (entry.file_size, entry.compress_size, entry.CRC) == (payload_bytes, payload_bytes, 0xDEADBEEF)
        assert archive.read("r/version") == b"3\n"
        assert archive.open(entry).read(3) == b"\0\0\0"
    assert torch.load(path, weights_only=True, mmap=True).shape == (payload_bytes,)
    stored = locate_payload(pread(path), 0, opened.record_bytes, fqn="t")
    assert (stored.payload_offset, stored.payload_bytes) == (len(opened.prefix), payload_bytes)
