"""`verify` where requests are dear: few and large ones, the same findings as on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.inspection.verification import VerifyReport, verify_store
from dcp.storage.errors import StorageError
from dcp.storage.stores import PosixStore
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from tests.support.recording import RecordingStore


def a_state() -> dict[str, object]:
    """Small tensors, large ones, and values that only a pickle holds."""
    return {
        **{f"small.{number}": torch.full((9,), float(number)) for number in range(500)},
        "large": torch.randn(3_000_000),
        **{f"odd.{number}": slice(number) for number in range(100)},
    }


def copied(folder: Path) -> RecordingStore:
    """The files of a folder in a store where requests are dear."""
    store, source = RecordingStore(f"verify{folder}"), PosixStore(folder)
    for info in store.list():
        store.delete(info.name)
    for info in source.list():
        with store.create(info.name, durable=False) as handle:
            handle.write(source.read(info.name, limit_bytes=1 << 30))
    return store


def facts(report: VerifyReport) -> list[tuple[object, ...]]:
    """What was found and counted, without the place in messages."""
    found = [(f.kind, f.file, f.fqn, f.offset, f.length) for f in report.findings]
    return [*found, (report.files, report.tensors, report.blocks, report.bytes, report.unchecked_bytes)]


def both(folder: Path) -> tuple[VerifyReport, RecordingStore]:
    """The report of a store where requests are dear, which must be that of the disk."""
    store = copied(folder)
    report = verify_store(store)
    assert facts(report) == facts(verify_store(PosixStore(folder)))
    return report, store


@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_everything_is_read_by_few_requests(tmp_path: Path, saver: str) -> None:
    """Hundreds of records and values, with their surroundings, cost as many requests as their bytes need."""
    if saver == "ours":
        dcp.save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    else:
        stock.save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    report, store = both(tmp_path)
    assert report.ok
    assert report.unchecked_bytes == 0
    size = sum(info.size_bytes for info in store.list())
    assert store.traffic()["bytes_received"] <= 1.1 * size + 20_000
    assert store.traffic()["requests"] <= 14
    assert store.traffic().get("head", 0) == 0


def test_damage_is_found_as_on_a_disk(tmp_path: Path) -> None:
    """A flipped byte in a small tensor, a large one, a header, a value; a file cut short, and one missing."""
    dcp.save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    index = dcp.open_index(tmp_path)
    path = tmp_path / index.files[0]
    whole = path.read_bytes()
    large = index.chunks(index.position["large"])[0]
    places = [
        int(index.payload_offsets[3]) + 1,
        int(index.payload_offsets[large]) + (5 << 20),
        int(index.record_offsets[5]) + 40,
        int(index.record_offsets[large] + index.record_lengths[large]) - 10,
        int(index.objects.offsets[7]) + 3,
    ]
    kinds = ["checksum", "checksum", "record", "record", "checksum"]
    for place, kind in zip(places, kinds, strict=True):
        damaged = bytearray(whole)
        damaged[place] ^= 0x08
        path.write_bytes(damaged)
        report, _ = both(tmp_path)
        assert [found.kind for found in report.findings] == [kind]
    path.write_bytes(whole[: places[1]])
    report, _ = both(tmp_path)
    assert {found.kind for found in report.findings} == {"file-size", "unreadable"}
    path.unlink()
    report, _ = both(tmp_path)
    assert [found.kind for found in report.findings] == ["missing-file"]


def test_a_service_that_does_not_answer_ends_the_check(tmp_path: Path) -> None:
    """It has been asked again and again: to ask for each tensor alone would take days. A bad sector of a
    disk, by contrast, is found part by part."""
    dcp.save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    error = StorageError("no answer", path="x", op="get")

    def failing(store: Store) -> FaultInjectingStore:
        return FaultInjectingStore(store, Fault("preadv", at=2, onwards=True, error=error))

    with pytest.raises(StorageError, match="no answer"):
        verify_store(failing(copied(tmp_path)))
    report = verify_store(failing(PosixStore(tmp_path)))
    assert {found.kind for found in report.findings} == {"unreadable"}
