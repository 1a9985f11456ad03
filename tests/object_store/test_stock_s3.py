"""What dcp saves on S3 stock torch loads from there by its own reader, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks
from tests.support.s3 import S3Server
from tests.support.s3_versions import CLEAN, Place

SHAPE = (12, 10)


def test_each_loads_what_the_other_saved(s3_server: S3Server, s3_root: str) -> None:
    """Tensors, values and nested containers, in every byte."""
    place = Place(s3_root, s3_server.storage_options)
    place.at("ours").save(1)
    place.at("stock").stock_save(2)
    assert (place.at("ours").seen_by_stock(), place.at("stock").seen()) == (1, 2)


def test_each_overwrites_the_other(s3_server: S3Server, s3_root: str) -> None:
    """Whoever saved last is what both load. dcp clears away what it replaces, whoever wrote it."""
    place = Place(s3_root, s3_server.storage_options)
    place.stock_save(1)
    place.save(2)
    assert (place.seen(), place.seen_by_stock(), place.listing()) == (2, 2, CLEAN)
    place.stock_save(3)
    assert (place.seen(), place.seen_by_stock()) == (3, 3)
    assert place.findings() <= {"metadata", "stray-file"}
    place.save(4)
    assert (place.seen(), place.seen_by_stock(), place.listing()) == (4, 4, CLEAN)
    assert place.findings() == set()


def _whole() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)


def state_of(mesh: DeviceMesh, factor: float, placement: Shard | Replicate) -> dict[str, Any]:
    """A sharded, a replicated and a plain tensor, and a value; ``factor`` 0 is to load into."""
    return {
        "sharded": distribute_tensor(_whole() * factor, mesh, [placement]),
        "replicated": distribute_tensor(_whole() * factor + factor, mesh, [Replicate()]),
        "plain": torch.full((5,), factor),
        "step": int(factor),
    }


def _equals(state: dict[str, Any], factor: float) -> bool:
    sharded, replicated = state["sharded"], state["replicated"]
    assert isinstance(sharded, DTensor)
    assert isinstance(replicated, DTensor)
    return (
        torch.equal(sharded.full_tensor(), _whole() * factor)
        and torch.equal(replicated.full_tensor(), _whole() * factor + factor)
        and torch.equal(state["plain"], torch.full((5,), factor))
        and state["step"] == int(factor)
    )


def reshard(rank: int, world_size: int, url: str, options: dict[str, Any]) -> list[bool]:
    """Save by one and load by the other into other shards, both ways and back and forth."""
    mesh = init_device_mesh("cpu", (world_size,))
    uncached = {**options, "use_listings_cache": False}

    def ours_save(state: dict[str, Any], name: str) -> None:
        dcp.save(state, checkpoint_id=f"{url}/{name}", storage_options=options)

    def ours_load(state: dict[str, Any], name: str) -> None:
        dcp.load(state, checkpoint_id=f"{url}/{name}", storage_options=options)

    def theirs_save(state: dict[str, Any], name: str) -> None:
        stock_save(state, storage_writer=FsspecWriter(f"{url}/{name}", **uncached))

    def theirs_load(state: dict[str, Any], name: str) -> None:
        stock_load(state, storage_reader=FsspecReader(f"{url}/{name}", **uncached))

    seen: list[bool] = []
    ways: list[tuple[Callable[..., None], Callable[..., None]]] = [
        (ours_save, theirs_load),
        (theirs_save, ours_load),
    ]
    for number, (save, load) in enumerate(ways):
        for source, target in ((Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0))):
            factor = float(len(seen) + 1)
            name = f"{number}-{factor:g}"
            save(state_of(mesh, factor, source), name)
            dist.barrier()
            state = state_of(mesh, 0.0, target)
            load(state, name)
            seen.append(_equals(state, factor))
    return seen


def test_each_reshards_what_the_other_saved(s3_server: S3Server, s3_root: str) -> None:
    """Two ranks, from each placement to another one."""
    for seen in run_ranks(2, reshard, s3_root, s3_server.storage_options):
        assert seen == [True] * 6
