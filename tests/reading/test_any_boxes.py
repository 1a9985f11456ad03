"""Reads of any box of any stored tensor into any memory layout, from disks and from object stores."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.errors import CheckpointError
from dcp.storage.stores import MemoryStore
from tests.support.examples import examples
from tests.support.reading_places import Place, boxed
from tests.support.values import raw

DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)
SHAPES = st.lists(st.integers(0, 9), max_size=4) | st.sampled_from(
    [[300], [30, 41], [3, 9, 50], [2, 3, 4, 60]]
)


@dataclass(frozen=True)
class Want:
    """A box of stored tensor ``row``, read into memory with ``before`` elements before the box."""

    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    before: tuple[int, ...]
    kind: str

    def memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of ones that extends the box by ``before`` and by one element behind."""
        shape = [before + size + 1 for before, size in zip(self.before, self.sizes, strict=True)]
        if self.kind == "transposed":
            return torch.ones(shape[::-1], dtype=dtype).permute(tuple(range(len(shape))[::-1]))
        return (
            torch.ones([*shape, 2], dtype=dtype)[..., 0]
            if self.kind == "gaps"
            else torch.ones(shape, dtype=dtype)
        )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[Want]]:
    """Draw stored tensors of any strides, and boxes in them: empty, whole or overlapping."""
    tensors, wants = [], []
    for row in range(draw(st.integers(1, 5))):
        shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
        turn = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else range(len(shape))
        count = math.prod(shape)
        plain = (torch.arange(count * dtype.itemsize) * 7 % 120 + row).to(torch.uint8).view(dtype)
        back = [[*turn].index(dim) for dim in range(len(shape))]
        tensors.append(plain.view([shape[dim] for dim in turn]).permute(back))
        for _ in range(draw(st.integers(0, 2))):
            offsets = [draw(st.integers(0, n)) for n in shape]
            sizes = [draw(st.integers(0, n - at)) for n, at in zip(shape, offsets, strict=True)]
            before = [draw(st.integers(0, 2)) for _ in shape]
            kind = draw(st.sampled_from(["plain", "transposed", "gaps"]))
            wants.append(Want(row, tuple(offsets), tuple(sizes), tuple(before), kind))
    return tensors, wants


def region(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of a box."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


@examples(160)
@given(
    case=cases(),
    verify=st.sampled_from(["blocks", "full", "none"]),
    scatters=st.booleans(),
    saver=st.sampled_from(["compatible", "dcp alone", "stock"]),
)
def test_any_box_equals_the_slice(
    case: tuple[list[torch.Tensor], list[Want]], verify: str, scatters: bool, saver: str
) -> None:
    """A box gets the bytes of the slice, and no other memory is touched. Records of stock torch, whose
    strides are only in their own pickles, are read too."""
    tensors, wants = case
    place = Place() if scatters else Place(MemoryStore)
    saved: dict[str, Any] = {f"t{row}": tensor for row, tensor in enumerate(tensors)}
    if saver == "stock":
        with tempfile.TemporaryDirectory() as folder:
            stock.save(saved, checkpoint_id=folder, no_dist=True)
            place.take(Path(folder))
    else:
        place.save(saved, torch_compatible=saver == "compatible")
    memories = [want.memory(tensors[want.row].dtype) for want in wants]
    state = {
        f"w{n}": boxed(memory, tensors[want.row].shape, want.offsets, want.sizes, want.before)
        for n, (want, memory) in enumerate(zip(wants, memories, strict=True))
    }
    rename = {f"w{n}": f"t{want.row}" for n, want in enumerate(wants)}
    report = place.load(state, verify, rename=rename.__getitem__, unexpected="ignore")
    for want, memory in zip(wants, memories, strict=True):
        expected = want.memory(memory.dtype)
        expected[region(want.before, want.sizes)] = tensors[want.row][region(want.offsets, want.sizes)]
        assert raw(memory) == raw(expected), want
    assert report.bytes_needed == sum(math.prod(w.sizes) * tensors[w.row].itemsize for w in wants)
    assert verify != "none" or report.blocks_verified == 0
    assert verify != "full" or saver == "stock" or report.blocks_unverified == 0
    place.forget()


@examples(40)
@given(data=st.data())
def test_views_in_files_of_torch_save_are_read(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Views with gaps, expanded or overlapping, are read from torch.save's files by their strides."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    strides = [data.draw(st.sampled_from([0, 1, 2, 7, 40, 300])) for _ in shape]
    first = data.draw(st.sampled_from([0, 3]))
    extent = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    view = torch.arange(extent, dtype=data.draw(st.sampled_from([torch.int16, torch.float64]))).as_strided(
        shape, strides, first
    )
    path = tmp_path_factory.mktemp("view") / "m.pt"
    torch.save({"t": view}, path)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, offsets, strict=True))
    part = boxed(torch.zeros(sizes, dtype=view.dtype), shape, offsets, sizes)
    dcp.load({"t": part}, checkpoint_id=path, no_dist=True)
    assert torch.equal(part, view[region(offsets, sizes)])
    assert torch.equal(dcp.read(path)["t"], view)


def test_a_box_outside_its_tensor_is_refused(tmp_path: Path) -> None:
    """A plan with a box outside of its tensor is refused, because the write would hit foreign memory."""
    dcp.save({"w": torch.ones(6)}, checkpoint_id=tmp_path, no_dist=True)
    for at, offset in (((4,), (0,)), ((0,), (4,))):
        outside = boxed(torch.zeros(8), (6,), offset, (6,), at)
        with pytest.raises(CheckpointError, match="outside"):
            dcp.load({"w": outside}, checkpoint_id=tmp_path, no_dist=True)
