"""Loads into unusual memory, lossy casts, and limits of the process."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.errors import CorruptCheckpointError, PlanError
from tests.support.examples import examples


@pytest.mark.parametrize("kind", ["requires grad", "inference"])
def test_casts_into_leaves_and_inference_tensors(tmp_path: Path, kind: str) -> None:
    """A cast fills Parameters and inference tensors, because autograd's rules concern computing only."""
    stored = torch.randn(300, 300)
    dcp.save({"w": stored}, checkpoint_id=tmp_path)
    with torch.inference_mode(kind == "inference"):
        target = torch.zeros(300, 300, dtype=torch.bfloat16)
    if kind == "requires grad":
        target = torch.nn.Parameter(target)
    dcp.load({"w": target}, checkpoint_id=tmp_path, dtype="cast")
    assert torch.equal(target.detach(), stored.bfloat16())


ONE, NAN = torch.ones(3, 3), float("nan")
BEYOND = "values beyond its range became inf or nan"
CASTS: dict[str, tuple[torch.Tensor, torch.dtype, str | None]] = {
    "over": (ONE * 1e6, torch.float16, f"float32 to float16: {BEYOND}"),
    "infinite": (torch.tensor([float("inf"), NAN, -float("inf"), 65519.0]), torch.float16, None),
    "both": (torch.tensor([NAN, 1e9]), torch.float16, f"float32 to float16: {BEYOND}"),
    "saturated": (
        torch.tensor([NAN, -1e9]),
        torch.float8_e4m3fn,
        "float32 to float8_e4m3fn: values beyond its range became 448",
    ),
    "edge": (torch.tensor([463.0]), torch.float8_e4m3fn, None),
    "wide": (torch.tensor([3.4e38, 1.0]), torch.bfloat16, f"float32 to bfloat16: {BEYOND}"),
    "rounded": (ONE * 0.1, torch.float16, None),
    "imaginary": (
        torch.tensor([1 + 2j]),
        torch.float32,
        "complex64 to float32: imaginary parts were dropped",
    ),
    "real": (torch.tensor([1 + 0j]), torch.float32, None),
    "fraction": (ONE * 1.5, torch.int64, "float32 to int64: values were cut off"),
    "whole": (ONE, torch.int64, None),
    "large": (torch.tensor([1 << 40]), torch.int32, "int64 to int32: values were cut off"),
    "count": (torch.tensor([70_000]), torch.float16, f"int64 to float16: {BEYOND}"),
    "real over": (torch.tensor([1e6 + 0j]), torch.float16, f"complex64 to float16: {BEYOND}"),
    "small count": (torch.tensor([65_504]), torch.float16, None),
}


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_lossy_casts_are_in_the_report(tmp_path: Path, verify: Any) -> None:
    """Overflow, dropped imaginary parts and fractions are reported; rounding is not."""
    dcp.save({name: stored for name, (stored, _, _) in CASTS.items()}, checkpoint_id=tmp_path)
    state = {name: torch.zeros(stored.shape, dtype=dtype) for name, (stored, dtype, _) in CASTS.items()}
    report = dcp.load(state, checkpoint_id=tmp_path, dtype="cast", verify=verify)
    assert set(report.cast) == set(CASTS)
    assert report.lossy == {name: loss for name, (_, _, loss) in CASTS.items() if loss}


@examples(60)
@given(axes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4))
def test_self_overlapping_memory_is_refused(
    tmp_path_factory: pytest.TempPathFactory, axes: list[tuple[int, int]]
) -> None:
    """A view with two elements in one place is refused, as rows would overwrite each other."""
    sizes, strides = tuple(size for size, _ in axes), tuple(stride for _, stride in axes)
    places = [
        sum(at * stride for at, stride in zip(index, strides, strict=True)) for index in np.ndindex(*sizes)
    ]
    stored = torch.arange(1.0, len(places) + 1).view(sizes)
    folder = tmp_path_factory.mktemp("view")
    dcp.save({"w": stored}, checkpoint_id=folder, no_dist=True)
    target = torch.zeros(max(places) + 1).as_strided(sizes, strides)
    if len(set(places)) < len(places):
        with pytest.raises(PlanError, match="'w' cannot be loaded into"):
            dcp.load({"w": target}, checkpoint_id=folder, no_dist=True)
    else:
        dcp.load({"w": target}, checkpoint_id=folder, no_dist=True)
        assert torch.equal(target, stored)


def test_different_entries_for_one_memory_are_refused(tmp_path: Path) -> None:
    """Different entries for the same memory are both named in an error; one of them alone is loaded."""
    stored = torch.arange(16.0).view(4, 4)
    dcp.save({"a": stored, "b": stored + 100, "c": stored}, checkpoint_id=tmp_path)
    base = torch.zeros(12, 8)
    for a, b in (
        (base[:4, :4], base[:4, :4]),
        (base[:2].view(4, 4), base[:2].view(4, 4)),
        (base[:2].view(4, 4), base[1:3].view(4, 4)),
        (base[:4, :4], base[:4, 2:6].t()),  # rows and columns overlap
        (base[:4, :4], base[:4, :2].view(torch.int32).view(torch.bfloat16)),
        (base[:4, :4], base.flatten()[6:38].view(4, 8)[:, :4]),  # the view extends beyond a row
    ):
        state = {"a": a, "b": b, "c": torch.zeros(4, 4)}
        with pytest.raises(PlanError, match=r"share memory .* different values in the checkpoint: 'a', 'b'"):
            dcp.load(state, checkpoint_id=tmp_path, dtype="cast")
        dcp.load(state, checkpoint_id=tmp_path, dtype="cast", exclude="b")
        assert torch.equal(a, stored)


@pytest.mark.parametrize("way", ["one payload", "copies", "torch", "file"])
def test_equal_entries_load_into_one_memory(tmp_path: Path, way: str) -> None:
    """Tied weights, also with NaN, whole or in part, load from one payload or from two."""
    base = torch.arange(32.0).view(4, 8)
    base[0, 5] = torch.nan
    state = {"embedding": base, "head": base, "part": base[1:3, 2:5], "turned": base.t()}
    state |= {"one": base[1].as_strided((1,), (0,)), "other": base.clone()}
    place = tmp_path / "model.pt" if way == "file" else tmp_path
    if way == "file":
        torch.save(state, place)
    elif way == "torch":
        stock.save(state, checkpoint_id=place)
    else:
        saved = {k: v.clone() for k, v in state.items()} if way == "copies" else state
        dcp.save(dict(saved), checkpoint_id=place)
    target = torch.nn.Parameter(torch.zeros(4, 8))
    wanted: dict[str, Any] = {"embedding": target, "head": target, "other": torch.zeros(4, 8)}
    one = target.detach().as_strided((1,), (0,), 8)
    for more in ({}, {"part": target[1:3, 2:5], "turned": target.detach().t(), "one": one}):
        target.detach().zero_()
        dcp.load({**wanted, **more}, checkpoint_id=place)
        assert torch.equal(target.nan_to_num(-1), base.nan_to_num(-1))


@pytest.mark.parametrize("count", [3, 2000])
def test_slices_that_interleave_share_no_memory(tmp_path: Path, count: int) -> None:
    """Column slices of a fused weight share no memory, for few or very many slices."""
    state = {f"w{number}": torch.full((2, 3), float(number)) for number in range(count)}
    dcp.save(dict(state), checkpoint_id=tmp_path)
    fused = torch.zeros(2, 3 * count)
    wanted = {name: fused[:, 3 * number : 3 * number + 3] for number, name in enumerate(state)}
    dcp.load(dict(wanted), checkpoint_id=tmp_path)
    assert torch.equal(fused, torch.cat(list(state.values()), dim=1))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("rows", [1, 5000])
def test_read_only_memory_is_named(tmp_path: Path, rows: int) -> None:
    """A read-only memory map is refused: a write would end the process, or look like a damaged file."""
    dcp.save({"x": torch.ones(2), "w": torch.ones(rows, 100)}, checkpoint_id=tmp_path / "c")
    np.zeros((rows, 100), np.float32).tofile(tmp_path / "map")
    state = {"x": torch.zeros(2)}
    for mode in ("r", "r+"):
        mapped = np.memmap(tmp_path / "map", np.float32, mode, shape=(rows, 100))
        state["w"] = torch.from_numpy(mapped)
        if mode == "r":
            with pytest.raises(PlanError, match=r"cannot be loaded into: 'w': the memory is read-only"):
                dcp.load(state, checkpoint_id=tmp_path / "c")
        else:
            dcp.load(state, checkpoint_id=tmp_path / "c")
            assert (mapped == 1).all()


def test_more_files_than_a_process_can_open(tmp_path: Path) -> None:
    """A checkpoint with one file for each tensor saves and loads under a low limit of open files."""
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(200)}
    wanted = {name: torch.zeros(10) for name in state}
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False, sync_files=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 60, limits[1]))
    try:
        dcp.save(dict(state), storage_writer=writer)
        dcp.load(dict(wanted), storage_reader=dcp.FileSystemReader(tmp_path, threads=3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(tmp_path.glob("*.distcp"))) == 200
    assert all(torch.equal(wanted[name], state[name]) for name in state)


def test_an_object_of_false_size_takes_no_memory(tmp_path: Path) -> None:
    """Stock metadata has no file sizes, so the size of the file limits the read."""
    stock.save({"o": {1, 2, 3}}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = 1 << 50
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        dcp.load({"o": set()}, checkpoint_id=tmp_path)
