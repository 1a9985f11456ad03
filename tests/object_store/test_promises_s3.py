"""What is promised of checkpoints, on S3: damage is found, reads are whole, ranks that fail leave nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from botocore.exceptions import ClientError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp
from dcp.errors import CorruptCheckpointError, ReplicaMismatchError
from dcp.storage.stores import Store
from dcp.storage.stores import open_store as open_at
from tests.support.crashes import Ending, Group, in_lab, kill_rank, run_groups
from tests.support.fault_doors import MANIFEST_NAME, METADATA_NAME, Fault, FaultInjectingStore, given, run
from tests.support.ranks import RankRaised, run_ranks
from tests.support.s3 import S3Server
from tests.support.s3_versions import CLEAN, Place
from tests.support.versions import ABSENT, version_of, version_state

OLD, NEW = 1, 2
MIB = 1 << 18
"""Elements of four bytes."""


@pytest.fixture
def place(s3_server: S3Server, s3_root: str) -> Place:
    """A place of one test alone."""
    return Place(s3_root, s3_server.storage_options)


def data_of(place: Place) -> str:
    """The URL of the one data file."""
    (name,) = [name for name in place.raw.list(f"{place.url}/") if name.endswith(".distcp")]
    return f"{place.url}/{name}"


# -- damage --------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found(place: Place) -> None:
    """In a payload, in a value, and in the manifest: an error of the load, and a finding of verify."""
    place.save(OLD)
    index = dcp.open_index(place.url, storage_options=place.storage_options)
    objects = [row for row in range(len(index.objects.fqns)) if int(index.objects.plain[row]) < 0]
    filled = [chunk for chunk in range(index.chunk_count) if index.payload_lengths[chunk]]
    places = [
        *((data_of(place), int(index.payload_offsets[chunk])) for chunk in filled[:: len(filled) - 1]),
        *((data_of(place), int(index.objects.offsets[row]) + 3) for row in objects[:1]),
        *((f"{place.url}/{MANIFEST_NAME}", offset) for offset in (0, 100)),
    ]
    assert len(places) == 5
    for url, offset in places:
        whole = place.raw.read(url)
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        place.raw.write(url, bytes(damaged))
        assert place.seen() == "CorruptCheckpointError", (url, offset)
        assert place.findings() & {"checksum", "index"}, (url, offset)
        place.raw.write(url, whole)
    assert (place.seen(), place.findings()) == (OLD, set())


def test_an_object_of_another_size_is_found(place: Place) -> None:
    """Cut short, emptied or extended."""
    place.save(OLD)
    for url in (data_of(place), f"{place.url}/{MANIFEST_NAME}"):
        whole = place.raw.read(url)
        for changed in (whole[: len(whole) // 2], whole[:-1], b"", whole + b"x"):
            place.raw.write(url, changed)
            assert place.seen() == "CorruptCheckpointError", (url, len(changed))
            assert place.findings(), (url, len(changed))
        place.raw.write(url, whole)
    assert (place.seen(), place.findings()) == (OLD, set())


def test_a_missing_object_is_named(place: Place) -> None:
    """The error has its URL, and verify lists it."""
    place.save(OLD)
    url = data_of(place)
    place.raw.delete(url)
    with pytest.raises(CorruptCheckpointError) as caught:
        dcp.load(
            version_state(0), checkpoint_id=place.url, storage_options=place.storage_options, no_dist=True
        )
    assert caught.value.path == url
    assert "is missing" in str(caught.value)
    missing = [one["file"] for one in place.report()["findings"] if one["kind"] == "missing-file"]
    assert missing == [url.rpartition("/")[2]]


def save_shards(rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    """Shards of one tensor: the objects of the ranks have the same layout."""
    mesh = init_device_mesh("cpu", (world_size,))
    shard = DTensor.from_local(torch.full((4, 6), float(rank + 1)), mesh, [Shard(0)])
    dcp.save({"w": shard}, checkpoint_id=url, storage_options=options)
    dist.barrier()


def test_swapped_objects_are_found(place: Place) -> None:
    """Each is whole and of the right size, but under the other's key."""
    run_ranks(2, save_shards, place.url, place.storage_options)
    names = [name for name in place.raw.list(f"{place.url}/") if name.endswith(".distcp")]
    first, second = (place.raw.read(f"{place.url}/{name}") for name in names)
    assert len(first) == len(second)
    place.raw.write(f"{place.url}/{names[0]}", second)
    place.raw.write(f"{place.url}/{names[1]}", first)
    with pytest.raises(CorruptCheckpointError) as caught:
        dcp.load(
            {"w": torch.zeros(8, 6)},
            checkpoint_id=place.url,
            storage_options=place.storage_options,
            no_dist=True,
        )
    assert caught.value.fqn == "w"
    assert {one["file"] for one in place.report()["findings"]} == set(names)


# -- readers that are overtaken ------------------------------------------------------------------------------


def load_overtaken(place: Place, at: int, overtake: Callable[[], object], times: int = 1) -> tuple[Any, int]:
    """The version that a load sees which is overtaken before its ``at``-th reading of a data file, and how
    often it looked."""
    left = [times]

    def hook(_: object) -> None:
        if left[0]:
            left[0] -= 1
            overtake()

    def open_store(path: str | os.PathLike[str]) -> Store:
        return FaultInjectingStore(
            open_at(path, place.storage_options), Fault("preadv", at=at, name="*.distcp", hook=hook)
        )

    reader = dcp.FileSystemReader(place.url, open_store=open_store)
    state = version_state(0, large=place.large)
    report = dcp.load(state, storage_reader=reader, no_dist=True)
    assert left == [0]
    return version_of(state, large=place.large), report.attempts


def test_an_overtaken_reader_loads_the_successor(place: Place) -> None:
    """What its index names is gone: it reads the index anew, and every value is the new one's."""
    place.save(OLD)
    assert load_overtaken(place, 1, lambda: place.save(NEW)) == (NEW, 2)


def test_an_object_that_is_replaced_while_it_is_read(s3_server: S3Server, s3_root: str) -> None:
    """Stock overwrites in place: what was read of the object before is not mixed with the rest of it."""
    place = Place(s3_root, s3_server.storage_options, large=20 * MIB)
    place.stock_save(OLD)
    assert load_overtaken(place, 2, lambda: place.stock_save(NEW)) == (NEW, 2)


def test_a_reader_that_is_overtaken_by_nobody_raises(place: Place) -> None:
    """The object is gone, and nobody has committed since."""
    place.save(OLD)
    url = data_of(place)
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        load_overtaken(place, 1, lambda: place.raw.delete(url))


# -- ranks that fail -----------------------------------------------------------------------------------------


def save_with_loss(
    rank: int, world_size: int, url: str, options: dict[str, Any], victim: int, op: str, at: int
) -> None:
    """A save of 12 MiB a rank, in parts; ``victim`` dies before its ``at``-th ``op``."""

    def hook(_: object) -> None:
        if rank == victim:
            kill_rank(victim)

    def open_store(path: str | os.PathLike[str]) -> Store:
        return FaultInjectingStore(open_at(path, options), Fault(op, at=at, hook=hook))

    mesh = init_device_mesh("cpu", (world_size,))
    shard = DTensor.from_local(torch.full((12, MIB), float(rank + 1)), mesh, [Shard(0)])
    writer = dcp.FileSystemWriter(url, open_store=open_store)
    dcp.save({"w": shard}, storage_writer=writer, timeout_seconds=60)


def lose_ranks(place: Place) -> list[tuple[int, list[Ending], Any, dict[str, int], int]]:
    """(victim, endings, what dcp sees, objects, unfinished uploads) for kills of either rank."""
    kills = [(1, "write", 9), (1, "finish", 1), (0, "write", 9)]
    groups, places = [], []
    for number, (victim, op, at) in enumerate(kills):
        target = place.at(str(number))
        target.save(OLD)
        places.append(target)
        groups.append(Group(2, save_with_loss, (target.url, place.storage_options, victim, op, at)))
    endings = run_groups(groups)
    return [
        (victim, ends, target.seen(), target.listing(), target.uploads())
        for (victim, _, _), ends, target in zip(kills, endings, places, strict=True)
    ]


def test_a_dead_rank_leaves_the_old_checkpoint(s3_server: S3Server, s3_root: str) -> None:
    """The survivor names it; a surviving coordinator throws away the parts that the dead rank had sent."""
    place = Place(s3_root, {**s3_server.storage_options, "part_bytes": 5 << 20})
    losses = in_lab(lose_ranks, place)
    for victim, endings, seen, listing, uploads in losses:
        assert endings[victim].signal == signal.SIGKILL
        survivor = endings[1 - victim].raised
        assert survivor is not None
        assert "RankFailedError" in survivor.class_names, survivor.traceback_text
        assert survivor.facts["failed_ranks"] == [victim]
        assert seen == OLD
        if victim == 1:
            assert (listing, uploads) == (CLEAN, 0)


def save_different(rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    """One name, other data on each rank."""
    dcp.save({"w": torch.full((64,), float(rank))}, checkpoint_id=url, storage_options=options)


def test_replicas_that_differ_leave_nothing(place: Place) -> None:
    """All ranks raise, and no object is there."""
    for result in run_ranks(2, save_different, place.url, place.storage_options, failures=True):
        assert isinstance(result, RankRaised)
        assert ReplicaMismatchError.__name__ in result.class_names
        assert "'w'" in result.message
    assert (place.raw.list(place.url), place.uploads(), place.seen()) == ({}, 0, ABSENT)


# -- what else may lie there ---------------------------------------------------------------------------------


STRANGE = (
    "../manifest.msgpack",
    "../../escaped.distcp",
    "..",
    "nested/manifest.msgpack",
    "nested/.metadata",
    "nested/__0_0.0a1b2c3d.distcp",
    "nested/deeper/__0_0.0a1b2c3d.distcp",
    "back\\slash.distcp",
    "__0_0.0a1b2c3d.distcp/inside",
    "x" * 300,
    "folder/",
    "",
)
"""What follows the folder's key and a slash, in keys that no file of a store can have."""


def put_strange_objects(place: Place) -> dict[str, int]:
    """Write them, and tell which the server has taken, with their sizes."""
    for name in STRANGE:
        try:
            place.raw.write(f"{place.url}/{name}", b"" if name.endswith("/") or not name else b"strange")
        except ClientError:  # the server does not want such a key: then nobody else can have it, either
            continue
    return place.raw.list(f"{place.url}/")


def test_strange_objects_do_no_harm(place: Place) -> None:
    """Keys with .., nested ones and markers of folders are no files of the checkpoint: saving, loading and
    verifying go on beside them, and leave them alone."""
    step = place.at("run/step-00000001")
    strange = put_strange_objects(step)
    assert len(strange) >= 5
    assert step.seen() == ABSENT
    for version in (1, 2):
        step.save(version)
        assert (step.seen(), step.seen_by_stock(), step.findings()) == (version, version, set())
        objects = step.raw.list(f"{step.url}/")
        assert {name: objects.get(name) for name in strange} == strange
        assert len(objects) == len(strange) + 3
    rows = run("ls", f"{place.url}/run", "--json", *given(place.storage_options)).json
    assert [(row["name"], row["state"]) for row in rows] == [("step-00000001", "committed")]


def test_a_hostile_name_in_the_index_reaches_nothing(place: Place) -> None:
    """A `.metadata` of stock's form that names files elsewhere: it is refused, and nothing is read or deleted
    there, also when it is saved over."""
    outside = place.at("other")
    outside.save(OLD)
    victim = data_of(outside)
    hostile = place.at("hostile")
    hostile.stock_save(OLD)
    whole = hostile.raw.read(f"{hostile.url}/{METADATA_NAME}")
    name = b"__0_0.distcp"
    away = f"../other/{victim.rpartition('/')[2]}".encode()
    # A short string of the pickle: its length is in the byte before.
    assert whole.count(bytes([len(name)]) + name) == 1
    body = whole.replace(bytes([len(name)]) + name, bytes([len(away)]) + away)
    frame = int.from_bytes(body[3:11], "little") + len(away) - len(name)
    hostile.raw.write(f"{hostile.url}/{METADATA_NAME}", body[:3] + frame.to_bytes(8, "little") + body[11:])
    assert hostile.seen() == "CheckpointFormatError"
    hostile.save(NEW)
    assert hostile.seen() == NEW
    assert (outside.seen(), outside.listing()) == (OLD, CLEAN)


def test_a_folder_whose_name_begins_like_another(place: Place) -> None:
    """``step-1`` and ``step-10``: saving over, failing in and clearing the one leave the other alone."""
    short, long = place.at("step-1"), place.at("step-10")
    long.save(OLD)
    short.raw.begin_upload(f"{long.url}/__0_0.0a1b2c3d.distcp")
    for version in (1, 2):
        short.save(version)
    with pytest.raises(dcp.errors.StorageError):
        short.save(3, Fault("finish", error=dcp.errors.StorageError("injected")))
    assert (short.seen(), short.listing(), short.uploads()) == (2, CLEAN, 0)
    assert (long.seen(), long.listing(), long.uploads()) == (OLD, CLEAN, 1)
