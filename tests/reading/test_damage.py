"""Damaged data: every way of reading raises an error with the tensor and the file."""

from __future__ import annotations

import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import CorruptCheckpointError
from dcp.storage.stores import MemoryStore
from tests.support.reading_places import Place, boxed, flipped

BLOCK_BYTES = 4 << 20


def places() -> list[Any]:
    """Return parameters for a disk and for an object store."""
    return [pytest.param(MemoryStore, id="disk"), pytest.param(None, id="objects")]


def place_of(make: Any) -> Place:
    """Return a place of a kind."""
    return Place(make) if make is not None else Place()


def state() -> dict[str, torch.Tensor]:
    """Return small tensors, a tensor of several blocks, and one to read a column of."""
    small = {f"s{n}": torch.full((size,), n + 0.5) for n, size in enumerate([1, 2, 3, 8, 9, 20, 100] * 6)}
    return {**small, "large": torch.randn(BLOCK_BYTES // 4 + 99), "wide": torch.randn(500, 1000)}


def wanted() -> dict[str, torch.Tensor]:
    """Return targets for all tensors, with a few columns of ``wide``."""
    found = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    return found | {"wide": boxed(torch.zeros(500, 10), (500, 1000), (0, 5), (500, 10))}


@pytest.mark.parametrize("make", places())
@pytest.mark.parametrize("saver", ["dcp", "stock"])
def test_a_flipped_byte_anywhere_in_a_payload_is_found(saver: str, make: Any, tmp_path: Path) -> None:
    """A flipped byte is found in small tensors, in blocks, and in a column of a tensor. The error names that
    tensor alone; `verify="none"` loads the data as stored."""
    if saver == "dcp":
        dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    else:
        stock.save(state(), checkpoint_id=tmp_path, no_dist=True)
    place, index = place_of(make).take(tmp_path), dcp.open_index(tmp_path)
    place.load(wanted())
    for name, share in itertools.product(("s0", "s41", "large", "wide"), (0.0, 0.999)):
        data = state()[name].numpy().tobytes() if name.startswith("s") else None
        chunk = int(index.chunk_start[index.position[name]])
        file, length = index.files[index.chunk_files[chunk]], int(index.payload_lengths[chunk])
        whole = place.store.read(file, limit_bytes=1 << 30)
        begin = int(index.payload_offsets[chunk])
        if begin < 0:  # only the record of stock torch has the offset
            begin = whole.index(b"data/0FB", int(index.record_offsets[chunk])) + 6
            begin = whole.index(data, begin) if data else (begin + 200)
        with flipped(
            place.store, file, begin + int(share * (length - 300 * (saver == "stock" and data is None)))
        ):
            with pytest.raises(CorruptCheckpointError) as caught:
                place.load(wanted())
            assert f"'{name}'" in str(caught.value) and file in str(caught.value.path)
            place.load(wanted(), "none")
    place.forget()


@pytest.mark.parametrize(("verify", "is_found"), [("blocks", False), ("full", True), ("none", False)])
@pytest.mark.parametrize("make", places())
def test_partly_needed_blocks_are_verified_on_request(make: Any, verify: str, is_found: bool) -> None:
    """`verify="full"` reads and checks a partly needed block; the default reads only the needed bytes."""
    place, stored = place_of(make), torch.arange(BLOCK_BYTES // 8 + 1000)
    place.save({"t": stored})
    part = {"t": boxed(torch.zeros(1000, dtype=torch.int64), stored.shape, (1000,), (1000,))}
    index = dcp.FileSystemReader("x", open_store=place).read_index()
    with flipped(place.store, index.files[0], int(index.payload_offsets[0]) + 10):
        if is_found:
            with pytest.raises(CorruptCheckpointError, match="'t'"):
                place.load(part, verify)
        else:
            report = place.load(part, verify)
            assert torch.equal(part["t"], stored[1000:2000]) and report.bytes_read < 100_000
    place.forget()


CUTS = [(0, 701), (701, 799), (1500, 500)]
WAYS: dict[str, Any] = {  # parts of a tensor of 2000 x 1000 to load, and options
    "pieces of a block that are put together": (
        lambda: {f"p{a}": boxed(torch.zeros(n, 1000), (2000, 1000), (a, 0), (n, 1000)) for a, n in CUTS},
        {"rename": lambda name: "w", "unexpected": "ignore"},
    ),
    "rows that do not divide a block, converted": (
        lambda: {"w": torch.zeros(2000, 1000, dtype=torch.float64)},
        {"dtype": "cast"},
    ),
}


@pytest.mark.parametrize("make", [MemoryStore, pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("way", WAYS)
def test_checksums_of_pieces_are_combined(way: str, make: Any) -> None:
    """Checksums of pieces are combined without a staged copy of the block: any damage is found."""
    place, stored, (wanted, options) = place_of(make), torch.randn(2000, 1000), WAYS[way]
    place.save({"w": stored})
    parts = wanted()
    report = place.load(parts, **options)
    assert torch.equal(torch.cat([*parts.values()]), stored.to(next(iter(parts.values())).dtype))
    assert (report.blocks_verified, report.blocks_unverified) == (2, 0)
    index = dcp.FileSystemReader("x", open_store=place).read_index()
    for at in (0, 701 * 4000 + 5, BLOCK_BYTES + 1, stored.nbytes - 1):
        with (
            flipped(place.store, index.files[0], int(index.payload_offsets[0]) + at),
            pytest.raises(CorruptCheckpointError),
        ):
            place.load(parts, **options)
    place.forget()


@pytest.mark.parametrize("damage", ["truncate", "extend", "remove"])
@pytest.mark.parametrize("make", places())
def test_a_changed_data_file_is_named(make: Any, damage: str) -> None:
    """A file of another size, or a missing file, is named, also if the wanted part of it is intact."""
    place = place_of(make).save({"a": torch.ones(10), "z": torch.ones(2000)})
    file = dcp.FileSystemReader("x", open_store=place).read_index().files[0]
    data = place.store.read(file, limit_bytes=1 << 20)
    place.store.delete(file)
    if damage != "remove":
        with place.store.create(file, durable=False) as handle:
            handle.write(data[:-1] if damage == "truncate" else data + b"x")
    with pytest.raises(CorruptCheckpointError, match=file.replace(".", r"\.")):
        place.load({"a": torch.zeros(10)}, unexpected="ignore")
    place.forget()


def test_records_of_many_blocks_have_the_zip_crc(tmp_path: Path) -> None:
    """Stock torch checks the zip CRC of a record, which is combined from those of its blocks."""
    dcp.save({"w": torch.randn(2 * BLOCK_BYTES // 4 + 777)}, checkpoint_id=tmp_path, no_dist=True)
    index = dcp.open_index(tmp_path)
    begin, length = int(index.record_offsets[0]), int(index.record_lengths[0])
    data = (tmp_path / index.files[0]).read_bytes()[begin : begin + length]
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None


def test_a_large_transposed_tensor_is_verified(tmp_path: Path) -> None:
    """Rows across all blocks are loaded with each block read once; a flipped bit in any block is found."""
    path, stored = tmp_path / "m.pt", torch.randn(1000, 1200, dtype=torch.float64).t()
    torch.save({"t": stored}, path)
    state = {"t": torch.zeros(1200, 1000, dtype=torch.float64)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["t"], stored)
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + 5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="'t' is damaged"):
        dcp.load(state, checkpoint_id=path, no_dist=True)
