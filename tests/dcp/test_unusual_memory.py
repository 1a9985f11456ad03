"""Destinations of unusual memory, and limits of the process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.storage.engine.reading.requests import ReadColumns
from dcp.storage.errors import (
    CorruptCheckpointError,
    PlanError,
)
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter


def parameters(kind: str) -> torch.Tensor:
    """A destination of another dtype than stored."""
    if kind == "inference":
        with torch.inference_mode():
            return torch.zeros(300, 300, dtype=torch.bfloat16)
    return torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["requires grad", "inference"])
def test_casts_into_leaves_and_inference_tensors(tmp_path: Path, kind: str) -> None:
    """Autograd's rules are about computing; a load fills memory."""
    stored = torch.randn(300, 300)
    dcp.save({"w": stored}, checkpoint_id=tmp_path)
    target = parameters(kind)
    dcp.load({"w": target}, checkpoint_id=tmp_path, dtype="cast")
    assert torch.equal(target.detach(), stored.bfloat16())


def test_an_expanded_tensor_is_no_destination(tmp_path: Path) -> None:
    """Its elements share memory: rows would silently overwrite each other. torch refuses it, too."""
    dcp.save({"w": torch.arange(16.0).view(4, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match="'w' cannot be loaded into an expanded tensor"):
        dcp.load({"w": torch.zeros(1, 4).expand(4, 4)}, checkpoint_id=tmp_path)


def test_strided_four_bit_floats(tmp_path: Path) -> None:
    """torch has no strided copy of float4_e2m1fn_x2."""
    stored = torch.randint(0, 255, (600, 400), dtype=torch.uint8)
    for tensor in (stored, stored[:20]):
        dcp.save({"w": tensor.view(torch.float4_e2m1fn_x2).t()}, checkpoint_id=tmp_path)
        target = torch.zeros_like(tensor)
        dcp.load({"w": target.view(torch.float4_e2m1fn_x2).t()}, checkpoint_id=tmp_path)
        assert torch.equal(target, tensor)


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_runs_inside_of_others_are_read_whole(tmp_path: Path, verify: Any) -> None:
    """Tied tensors share a payload: one wanted whole, the other in part, overlap in the file."""
    stored = torch.arange(5000, dtype=torch.int32)
    dcp.save({"a": stored, "b": stored}, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path, verify=verify)
    whole, part = torch.zeros(4000, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with reader.engine(reader.read_index()) as engine:
        columns = ReadColumns.of_rows([0, 1], [(0,), (100,)], [(0,), (0,)], [(4000,), (10,)])
        reader.read_columns(engine, columns, LocalMemory.of([whole, part]))
    assert torch.equal(whole, stored[:4000])
    assert torch.equal(part, stored[100:110])


@contextmanager
def open_file_limit(limit: int) -> Iterator[None]:
    """At most ``limit`` file descriptors in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_files_than_a_process_can_open(tmp_path: Path) -> None:
    """A checkpoint of many ranks, or of a file for each tensor, saves and loads under any limit."""
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(300)}
    wanted = {name: torch.zeros(10) for name in state}
    writer = FileSystemWriter(tmp_path, single_file_per_rank=False, sync_files=False)
    used = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
    with open_file_limit(used + 60):
        dcp.save(state, storage_writer=writer)
        dcp.load(wanted, storage_reader=FileSystemReader(tmp_path, threads=3))
    assert len(list(tmp_path.glob("*.distcp"))) == 300
    assert all(torch.equal(wanted[name], state[name]) for name in state)


def test_an_object_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """Where the format has no file sizes, the file itself bounds what is read."""
    stock.save({"o": {1, 2, 3}}, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path)
    index = reader.read_index()
    index.objects.lengths[:] = 1 << 50
    with reader.engine(index) as engine, pytest.raises(CorruptCheckpointError, match="truncated"):
        next(reader.read_objects(engine, index.objects.fqns[:1]))


def test_blocks_of_a_payload_read_in_part_do_not_count_as_verified(tmp_path: Path) -> None:
    """Stock's records have one checksum for the whole: without all blocks nothing was compared."""
    stored = torch.randn(4 << 20)
    stock.save({"w": stored}, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path)
    index = reader.read_index()
    target = torch.zeros(2 << 20)
    with reader.engine(index) as engine:
        columns = ReadColumns.of_rows([0], [(0,)], [(0,)], [(2 << 20,)])
        reader.read_columns(engine, columns, LocalMemory.of([target]))
        assert (engine.stats.blocks_verified, engine.stats.blocks_unverified) == (0, 2)
    assert torch.equal(target, stored[: 2 << 20])
