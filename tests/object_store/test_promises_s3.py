"""Guarantees on S3: damage is found, reads are consistent, and neighbouring checkpoints stay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.storage.stores import Store
from dcp.storage.stores import open_store as open_at
from tests.support.fault_doors import MANIFEST_NAME, Fault, FaultInjectingStore, verified
from tests.support.s3 import S3Server
from tests.support.s3_versions import CLEAN, Place
from tests.support.versions import save_version, seen_by_dcp, version_of, version_state

OLD, NEW = 1, 2
MIB = 1 << 18
"""Number of 4-byte elements."""


@pytest.fixture
def place(s3_server: S3Server, s3_root: str) -> Place:
    """Return a place for one test."""
    return Place(s3_root, s3_server.storage_options)


# -- damage --------------------------------------------------------------------------------------------------


def damages(folder: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield (name, damaged contents) for flipped bits in payloads, a value and the manifest; for truncated,
    empty and extended files; and None for a missing file."""
    index, (data,) = dcp.open_index(folder), folder.glob("*.distcp")
    row = next(row for row, plain in enumerate(index.objects.plain) if int(plain) < 0)
    payloads = [int(place) for place, size in zip(index.payload_offsets, index.payload_lengths) if size]  # noqa: B905
    for name, places in (
        (data.name, (payloads[0], payloads[-1], int(index.objects.offsets[row]) + 3)),
        (MANIFEST_NAME, (0, 100)),
    ):
        whole = (folder / name).read_bytes()
        for place in places:
            yield name, whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        yield from ((name, changed) for changed in (whole[: len(whole) // 2], whole[:-1], b"", whole + b"x"))
    yield data.name, None


def test_damage_is_found_as_on_a_disk(place: Place, tmp_path: Path) -> None:
    """Loads raise the error, and ``dcp verify`` has the findings, of the same damage on disk."""
    folder = tmp_path / "x"
    save_version(folder, OLD)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    place.raw.write_many([(f"{place.url}/{name}", data) for name, data in whole.items()])
    for name, changed in damages(folder):
        if changed is None:
            (folder / name).unlink()
            place.raw.delete(f"{place.url}/{name}")
        else:
            (folder / name).write_bytes(changed)
            place.raw.write(f"{place.url}/{name}", changed)
        assert place.seen() == seen_by_dcp(folder) == "CorruptCheckpointError", name
        on_s3, on_disk = (
            [(one["kind"], Path(one["file"]).name) for one in report["findings"]]
            for report in (place.report(), verified(folder))
        )
        assert on_s3 == on_disk != [], name
        (folder / name).write_bytes(whole[name])
        place.raw.write(f"{place.url}/{name}", whole[name])
    assert (place.seen(), place.findings()) == (OLD, set())


# -- readers that are overtaken ------------------------------------------------------------------------------


def load_overtaken(
    place: Place, at: int, overtake: Callable[[], object], op: str = "preadv", name: str = "*.distcp"
) -> tuple[Any, int]:
    """Load while the checkpoint is replaced before the ``at``-th read. Return version and attempts."""
    left = [1]

    def hook(_: object) -> None:
        if left[0]:
            left[0] -= 1
            overtake()

    def open_store(path: str | os.PathLike[str]) -> Store:
        return FaultInjectingStore(
            open_at(path, place.storage_options), Fault(op, at=at, name=name, hook=hook)
        )

    reader = dcp.FileSystemReader(place.url, open_store=open_store)
    state = version_state(0, large=place.large)
    report = dcp.load(state, storage_reader=reader, no_dist=True)
    assert left == [0]
    return version_of(state, large=place.large), report.attempts


def test_an_object_replaced_during_a_read(s3_server: S3Server, s3_root: str) -> None:
    """A load does not mix old and new bytes of an object that stock overwrites in place."""
    place = Place(s3_root, s3_server.storage_options, large=20 * MIB)
    place.stock_save(OLD)
    assert load_overtaken(place, 2, lambda: place.stock_save(NEW)) == (NEW, 2)


# -- neighbours ----------------------------------------------------------------------------------------------


def test_a_folder_whose_name_begins_like_another_is_kept(place: Place) -> None:
    """Saving, failing and cleaning up in ``step-1`` do not affect ``step-10``."""
    short, long = place.at("step-1"), place.at("step-10")
    long.save(OLD)
    short.raw.begin_upload(f"{long.url}/__0_0.0a1b2c3d.distcp")
    for version in (1, 2):
        short.save(version)
    with pytest.raises(dcp.errors.StorageError):
        short.save(3, Fault("finish", error=dcp.errors.StorageError("injected")))
    assert (short.seen(), short.listing(), short.uploads()) == (2, CLEAN, 0)
    assert (long.seen(), long.listing(), long.uploads()) == (OLD, CLEAN, 1)
