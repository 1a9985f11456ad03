"""Destinations of unusual memory, and limits of the process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.storage.engine.memory import repeats_places
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


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_casts_that_lose_more_than_digits_are_in_the_report(tmp_path: Path, verify: Any) -> None:
    """Overflow, imaginary parts, fractions; what was infinite, or is only rounded, is no loss."""
    one, none = torch.ones(3, 3), float("nan")
    stored = {
        "over": one * 1e6,
        "infinite": torch.tensor([float("inf"), none, -float("inf"), 65519.0]),
        "both": torch.tensor([none, 1e9]),
        "saturated": torch.tensor([none, -1e9]),
        "edge": torch.tensor([463.0]),
        "wide": torch.tensor([3.4e38, 1.0]),
        "rounded": one * 0.1,
        "imaginary": torch.tensor([1 + 2j]),
        "real": torch.tensor([1 + 0j]),
        "fraction": one * 1.5,
        "whole": one,
        "large": torch.tensor([1 << 40]),
        "count": torch.tensor([70_000]),
        "real over": torch.tensor([1e6 + 0j]),
        "small count": torch.tensor([65_504]),
    }
    dtypes = [torch.float16] * 3 + [torch.float8_e4m3fn] * 2
    dtypes += [torch.bfloat16, torch.float16, torch.float32, torch.float32]
    dtypes += [torch.int64, torch.int64, torch.int32] + [torch.float16] * 3
    dcp.save(stored, checkpoint_id=tmp_path)
    state = {k: torch.zeros(v.shape, dtype=d) for (k, v), d in zip(stored.items(), dtypes, strict=True)}
    report = dcp.load(state, checkpoint_id=tmp_path, dtype="cast", verify=verify)
    assert set(report.cast) == set(stored)
    assert report.lossy == {
        "over": "float32 to float16: values beyond its range became inf or nan",
        "both": "float32 to float16: values beyond its range became inf or nan",
        "saturated": "float32 to float8_e4m3fn: values beyond its range became 448",
        "wide": "float32 to bfloat16: values beyond its range became inf or nan",
        "imaginary": "complex64 to float32: imaginary parts were dropped",
        "fraction": "float32 to int64: values were cut off",
        "large": "int64 to int32: values were cut off",
        "count": "int64 to float16: values beyond its range became inf or nan",
        "real over": "complex64 to float16: values beyond its range became inf or nan",
    }


def test_an_expanded_tensor_is_no_destination(tmp_path: Path) -> None:
    """Its elements share memory: rows would silently overwrite each other. torch refuses it, too."""
    dcp.save({"w": torch.arange(16.0).view(4, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match="'w' cannot be loaded into an expanded tensor"):
        dcp.load({"w": torch.zeros(1, 4).expand(4, 4)}, checkpoint_id=tmp_path)


def overlapping(kind: str) -> dict[str, torch.Tensor]:
    """Two destinations "a" and "b" of 4 x 4 that share memory in one way or another."""
    base = torch.zeros(12, 8)
    ways = {
        "the same": (base[:4, :4], base[:4, :4]),
        "tied": (base[:2].view(4, 4), base[:2].view(4, 4)),
        "parts": (base[:2].view(4, 4), base[1:3].view(4, 4)),
        "rows and columns": (base[:4, :4], base[:4, 2:6].t()),
        "another dtype": (base[:4, :4], base[:4, :2].view(torch.int32).view(torch.bfloat16)),
        "beyond a row": (base[:4, :4], base.flatten()[6:38].view(4, 8)[:, :4]),
    }
    return dict(zip("ab", ways[kind], strict=True))


@pytest.mark.parametrize(
    "kind", ["the same", "tied", "parts", "rows and columns", "another dtype", "beyond a row"]
)
def test_entries_that_differ_are_not_loaded_into_the_same_memory(tmp_path: Path, kind: str) -> None:
    """Of such the last one wins. Which are meant is named; one of them alone is loaded."""
    stored = torch.arange(16.0).view(4, 4)
    dcp.save({"a": stored, "b": stored + 100, "c": stored}, checkpoint_id=tmp_path)
    state = {**overlapping(kind), "c": torch.zeros(4, 4)}
    with pytest.raises(
        PlanError, match=r"share memory .* different values in the checkpoint: 'a', 'b'"
    ) as caught:
        dcp.load(state, checkpoint_id=tmp_path, dtype="cast")
    assert caught.value.fqns == ["a", "b"]
    dcp.load(state, checkpoint_id=tmp_path, dtype="cast", exclude="b")
    assert torch.equal(state["a"], stored)


@pytest.mark.parametrize("way", ["one payload", "copies", "torch", "file"])
def test_entries_that_are_equal_are_loaded_into_the_same_memory(tmp_path: Path, way: str) -> None:
    """Tied weights, NaN among them, whole or in part, be they one payload in the checkpoint or two."""
    base = torch.arange(32.0).view(4, 8)
    base[0, 5] = torch.nan
    state = {
        "embedding": base,
        "head": base,
        "part": base[1:3, 2:5],
        "turned": base.t(),
        "one": base[1].as_strided((1,), (0,)),
        "other": base.clone(),
    }
    if way == "file":
        torch.save(state, tmp_path / "model.pt")
    elif way == "torch":
        stock.save(state, checkpoint_id=tmp_path)
    else:
        dcp.save(
            {k: v.clone() for k, v in state.items()} if way == "copies" else state, checkpoint_id=tmp_path
        )
    place = tmp_path / "model.pt" if way == "file" else tmp_path
    target = torch.nn.Parameter(torch.zeros(4, 8))
    wanted: dict[str, Any] = {"embedding": target, "head": target, "other": torch.zeros(4, 8)}
    one = target.detach().as_strided((1,), (0,), 8)
    for more in ({}, {"part": target[1:3, 2:5], "turned": target.detach().t(), "one": one}):
        target.detach().zero_()
        dcp.load({**wanted, **more}, checkpoint_id=place)
        assert torch.equal(target.nan_to_num(-1), base.nan_to_num(-1))


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (1, 2)])
def test_a_view_whose_elements_share_memory_is_no_destination(
    tmp_path: Path, stride: tuple[int, int]
) -> None:
    """As an expanded tensor is none: what is written last would stand in several places."""
    dcp.save({"w": torch.arange(16.0).view(4, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match=r"'w' cannot be loaded into .* whose elements share memory"):
        dcp.load({"w": torch.zeros(12).as_strided((4, 4), stride)}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("count", [3, 50, 5000])
def test_slices_that_interleave_share_no_memory(tmp_path: Path, count: int) -> None:
    """A fused weight divided by columns, into few or very many."""
    state = {f"w{number}": torch.full((2, 3), float(number)) for number in range(count)}
    dcp.save(state, checkpoint_id=tmp_path)
    fused = torch.zeros(2, 3 * count)
    wanted = {name: fused[:, 3 * number : 3 * number + 3] for number, name in enumerate(state)}
    dcp.load(wanted, checkpoint_id=tmp_path)
    assert torch.equal(fused, torch.cat(list(state.values()), dim=1))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("rows", [1, 5000])
def test_read_only_memory_is_named(tmp_path: Path, rows: int) -> None:
    """A memory map of mode "r" cannot be filled: to try it ends the process, or looks like a damaged file."""
    dcp.save({"x": torch.ones(2), "w": torch.ones(rows, 100)}, checkpoint_id=tmp_path / "ckpt")
    np.zeros((rows, 100), np.float32).tofile(tmp_path / "map")
    for mode in ("r", "r+"):
        mapped = np.memmap(tmp_path / "map", np.float32, mode, shape=(rows, 100))
        state = {"x": torch.zeros(2), "w": torch.from_numpy(mapped)}
        if mode == "r":
            with pytest.raises(PlanError, match=r"cannot be loaded into: 'w': its memory is read-only"):
                dcp.load(state, checkpoint_id=tmp_path / "ckpt")
        else:
            dcp.load(state, checkpoint_id=tmp_path / "ckpt")
            assert (mapped == 1).all()


@given(
    axes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4),
)
def test_repeated_places_are_those_that_counting_finds(axes: list[tuple[int, int]]) -> None:
    """Whatever sizes and strides are."""
    sizes, strides = [size for size, _ in axes], [stride for _, stride in axes]
    places = [
        sum(at * stride for at, stride in zip(index, strides, strict=True)) for index in np.ndindex(*sizes)
    ]
    assert repeats_places(sizes, strides) == (len(set(places)) < len(places))


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
