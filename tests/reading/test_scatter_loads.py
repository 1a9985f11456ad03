"""`dcp.load` and `dcp.save` where requests are dear: how many there are, and what is told of them."""

from __future__ import annotations

import argparse
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.inspection.checkpoints import header_of
from dcp.inspection.entries import object_rows
from dcp.storage.engine.reading.requests import ReadColumns, Verify
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.stores import PosixStore
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter
from tests.dcp.cli_support import run
from tests.support.recording import RecordingStore


class Opened:
    """Opens one store for all, and keeps it."""

    def __init__(self) -> None:
        self.store = RecordingStore(f"loads-{uuid.uuid4().hex}")

    def __call__(self, path: object) -> RecordingStore:
        """The store, whatever the path."""
        return self.store

    def take(self, folder: Path) -> None:
        """Put a checkpoint from a disk into the store."""
        source = PosixStore(folder)
        for info in source.list():
            with self.store.create(info.name, durable=False) as handle:
                handle.write(source.read(info.name, limit_bytes=1 << 30))


def a_state() -> dict[str, object]:
    """Tensors of several kinds and sizes, plain values, and values that only a pickle holds."""
    return {
        "large": torch.randn(1500, 1000),
        **{f"small.{number}": torch.full((11,), float(number)) for number in range(300)},
        **{f"odd.{number}": slice(number) for number in range(200)},
        "step": 7,
        "channels": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    }


def empty_like(state: dict[str, object]) -> dict[str, object]:
    """The same names and shapes with nothing in them."""
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


def same(first: object, second: object) -> bool:
    """Equal values; NaN is none here."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return first == second


def test_a_load_costs_a_request_for_each_thing_and_tells_what_it_asked() -> None:
    """Manifest, `.metadata`, tensors and objects: nothing is looked at twice, and the report says so. What
    the writing ranks asked is in the manifest."""
    opened, state = Opened(), a_state()
    dcp.save(state, storage_writer=FileSystemWriter("x", open_store=opened), no_dist=True)
    header = header_of(opened.store, open_index(opened.store))
    assert len(header.rank_traffic) == len(header.rank_seconds) == 1
    assert header.rank_traffic[0]["requests"] >= 1
    before = opened.store.traffic()
    wanted = empty_like(state)
    reader = FileSystemReader("x", open_store=opened)
    report = dcp.load(wanted, storage_reader=reader, weights_only=False, no_dist=True)
    assert all(same(wanted[name], state[name]) for name in state)
    asked = {name: value - before.get(name, 0) for name, value in opened.store.traffic().items()}
    assert report.storage == asked
    assert (asked["requests"], asked["get"], asked["head"], asked["list"]) == (5, 5, 0, 0)
    assert report.blocks_unverified == 0
    assert report.blocks_verified == 303


def test_a_disk_reports_no_traffic(tmp_path: Path) -> None:
    """There is no service to ask, and the manifest has no figures of one."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    report = dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert report.storage == {}
    store = PosixStore(tmp_path)
    assert header_of(store, open_index(store)).rank_traffic == ()


def test_show_tells_what_a_save_asked(tmp_path: Path) -> None:
    """The command line has the figures of all ranks, as text and as JSON."""
    opened = Opened()
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter("x", open_store=opened), no_dist=True)
    for info in opened.store.list():
        (tmp_path / info.name).write_bytes(opened.store.read(info.name, limit_bytes=1 << 20))
    assert "requests" in run("show", str(tmp_path)).out
    assert run("show", str(tmp_path), "--json").json["checkpoint"]["rank_traffic"][0]["requests"] >= 1


@pytest.mark.parametrize("verify", ["blocks", "full", "none"])
def test_stock_checkpoints_are_opened_by_few_requests(tmp_path: Path, verify: Verify) -> None:
    """Records whose payload only their own header tells, permuted ones too, are not opened one by one."""
    state = a_state()
    stock.save(state, checkpoint_id=tmp_path, no_dist=True)
    opened = Opened()
    opened.take(tmp_path)
    wanted = empty_like(state)
    wanted["large"] = torch.zeros(1000, 1500).T
    reader = FileSystemReader("x", open_store=opened, verify=verify)
    report = dcp.load(wanted, storage_reader=reader, weights_only=False, no_dist=True)
    assert all(same(wanted[name], state[name]) for name in state)
    assert report.storage["requests"] <= 14
    if verify != "none":
        assert (report.blocks_verified, report.blocks_unverified) == (303, 0)


def test_values_are_shown_by_few_requests(tmp_path: Path) -> None:
    """Hundreds of values of a stock checkpoint, which only their pickles tell, are not fetched one by one."""
    state = {f"number.{number}": number for number in range(500)}
    stock.save(state | {"options": argparse.Namespace(lr=1)}, checkpoint_id=tmp_path, no_dist=True)
    opened = Opened()
    opened.take(tmp_path)
    rows = object_rows(opened.store, open_index(opened.store))
    assert {row.fqn: row.value for row in rows if row.is_plain} == state
    assert [row.fqn for row in rows if not row.is_plain] == ["options"]
    assert opened.store.traffic()["requests"] <= 5


def test_a_converted_load_is_compared_and_joined() -> None:
    """Another dtype, and strided memory: every block that was read is compared, and small tensors share
    requests."""
    opened = Opened()
    state = {"wide": torch.randn(300, 9000), **{f"t{n}": torch.full((40, 5), n / 4) for n in range(400)}}
    dcp.save(state, storage_writer=FileSystemWriter("x", open_store=opened), no_dist=True)
    opened.store.reads.clear()
    wanted = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
    wanted["wide"] = torch.zeros(9000, 300, dtype=torch.float64).T
    reader = FileSystemReader("x", open_store=opened)
    report = dcp.load(wanted, storage_reader=reader, dtype="cast", no_dist=True)
    assert all(torch.equal(wanted[name], state[name].double()) for name in state)
    assert report.blocks_unverified == 0
    assert report.bytes_needed == sum(value.nbytes for value in state.values())
    assert len(opened.store.reads) <= 5


@pytest.mark.parametrize("scatter", [False, True], ids=["disk", "objects"])
def test_a_converted_load_verifies_every_block(scatter: bool, tmp_path: Path) -> None:
    """Staging memory holds no whole block of a tensor whose rows do not divide one; all are compared anyway,
    and damage within is found."""
    opened = Opened()
    make = opened if scatter else partial(PosixStore, direct_io=False)
    state = {"w": torch.randn(700, 3001)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, open_store=make), no_dist=True)
    reader = FileSystemReader(tmp_path, open_store=make)
    target = {"w": torch.zeros(700, 3001, dtype=torch.float64)}
    report = dcp.load(target, storage_reader=reader, dtype="cast", no_dist=True)
    assert torch.equal(target["w"], state["w"].double())
    assert (report.blocks_verified, report.blocks_unverified) == (3, 0)
    index = open_index(reader.store)
    for place in (0, 5_000_000, state["w"].nbytes - 1):
        position = int(index.payload_offsets[0]) + place
        flip(opened, tmp_path, index.files[0], position, scatter=scatter)
        with pytest.raises(dcp.errors.CorruptCheckpointError, match="'w'"):
            dcp.load(target, storage_reader=reader, dtype="cast", no_dist=True)
        flip(opened, tmp_path, index.files[0], position, scatter=scatter)


def flip(opened: Opened, folder: Path, name: str, position: int, *, scatter: bool) -> None:
    """Invert a byte of a data file, wherever it is."""
    if scatter:
        opened.store._file(name).data[position] ^= 0xFF
        return
    with (folder / name).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def test_parts_of_one_chunk_for_several_tensors_are_compared_together() -> None:
    """A custom plan that reads a chunk piece by piece still has its blocks compared: the pieces' checksums
    are combined."""
    opened, stored = Opened(), torch.randn(3000, 1000)
    dcp.save({"w": stored}, storage_writer=FileSystemWriter("x", open_store=opened), no_dist=True)
    reader = FileSystemReader("x", open_store=opened)
    index = reader.read_index()
    parts = [torch.zeros(n, 1000) for n in (701, 1299, 1000)]
    offsets = [(0, 0), (701, 0), (2000, 0)]
    with reader.engine(index) as engine:
        columns = ReadColumns.of_rows([0] * 3, offsets, [(0, 0)] * 3, [tuple(p.shape) for p in parts])
        stats = reader.read_columns(engine, columns, LocalMemory.of(parts))
    assert torch.equal(torch.cat(parts), stored)
    assert (stats.blocks_verified, stats.blocks_unverified) == (3, 0)
    assert stats.bytes_read == stored.nbytes
