"""Rows that are runs are found for all together; they must be those that looking at each row finds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import ByteRuns, ReadColumns
from dcp.storage.errors import PlanError
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.destinations import classify
from dcp.storage.torch_storage.reader import FileSystemReader

SHAPES = ((), (6,), (1,), (4, 5), (3, 1), (1, 3, 4), (3, 1, 2), (2, 1, 1, 5), (2, 3, 1, 4))
STORED = {f"t{n}": torch.arange(max(1, int(np.prod(s)))).view(s) * 1.5 + n for n, s in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def engine() -> Iterator[ReadEngine]:
    """An engine on a checkpoint of ``STORED``."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(dict(STORED), checkpoint_id=Path(folder), no_dist=True)
        reader = FileSystemReader(folder)
        with reader.engine(reader.read_index()) as engine:
            yield engine


@dataclass(frozen=True)
class Row:
    """A box of a stored tensor, and the tensor that it goes to a place of."""

    tensor: int
    offsets: tuple[int, ...]
    dest_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dest: torch.Tensor

    @property
    def expected(self) -> torch.Tensor:
        """The stored elements."""
        box = tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))
        return STORED[f"t{self.tensor}"][box]

    @property
    def filled(self) -> torch.Tensor:
        """Where they go."""
        box = tuple(slice(o, o + n) for o, n in zip(self.dest_offsets, self.lengths, strict=True))
        return self.dest[box]


def transposed(shape: tuple[int, ...]) -> torch.Tensor:
    """Dense, the other way round."""
    return torch.zeros(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))


MAKE: dict[str, Any] = {
    "plain": torch.zeros,
    "double": lambda shape: torch.zeros(shape, dtype=torch.float64),
    "transposed": transposed,
    "with gaps": lambda shape: torch.zeros((*shape, 2))[..., 0],
    "negated": lambda shape: torch.zeros(shape, dtype=torch.complex64).conj().imag,
}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Any box of any tensor, to a place in a tensor of any kind, which may be larger than the box."""
    tensor = draw(st.integers(0, len(SHAPES) - 1))
    shape = SHAPES[tensor]
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    lengths = tuple(draw(st.integers(0, s - o)) for s, o in zip(shape, offsets, strict=True))
    if draw(st.booleans()):
        offsets, lengths = (0,) * len(shape), shape
    before, behind = ([draw(st.sampled_from((0, 0, 0, 1, 2))) for _ in shape] for _ in range(2))
    dest = MAKE[draw(st.sampled_from(("plain", "plain", *MAKE)))](
        tuple(b + n + a for b, n, a in zip(before, lengths, behind, strict=True))
    )
    return Row(tensor, offsets, tuple(before), lengths, dest)


def columns_of(engine: ReadEngine, wanted: list[Row]) -> tuple[ReadColumns, LocalMemory]:
    """The columns of rows, and where they go: each tensor is one chunk."""
    index = engine.index
    columns = ReadColumns.of_rows(
        [int(index.chunk_start[index.position[f"t{row.tensor}"]]) for row in wanted],
        [row.offsets for row in wanted],
        [row.dest_offsets for row in wanted],
        [row.lengths for row in wanted],
    )
    return columns, LocalMemory.of([row.dest for row in wanted])


def sorted_runs(runs: ByteRuns) -> list[tuple[int, ...]]:
    """The runs that have bytes, as tuples."""
    columns = (runs.chunks, runs.payload_positions, runs.sizes_bytes, runs.addresses)
    return sorted(run for run in zip(*(c.tolist() for c in columns), strict=True) if run[2])


@settings(max_examples=150, deadline=None)
@given(wanted=st.lists(rows(), max_size=12))
def test_all_together_and_row_by_row_are_the_same(engine: ReadEngine, wanted: list[Row]) -> None:
    """Runs, regions and staged reads are the same, and each element ends where it belongs, nothing else."""
    columns, memory = columns_of(engine, wanted)
    unknown = replace(memory, is_plain=np.zeros_like(memory.is_plain))
    together = classify(engine, columns, memory)
    one_by_one = classify(engine, columns, unknown)
    assert sorted_runs(together[0]) == sorted_runs(one_by_one[0])
    assert together[1] == one_by_one[1]
    assert len(together[2]) == len(one_by_one[2])
    assert not together[3]
    assert not one_by_one[3]
    engine.run(*together)
    for row in wanted:
        assert torch.equal(row.filled.to(torch.float32), row.expected)
        assert row.dest.count_nonzero() == row.expected.count_nonzero()


def test_a_box_beside_its_tensor_is_refused(engine: ReadEngine) -> None:
    """A plan that places a box outside of its tensor writes nowhere: the addresses there are of others."""
    row = Row(1, (0,), (4,), (6,), torch.zeros(8))
    with pytest.raises(RuntimeError, match="start"):
        classify(engine, *columns_of(engine, [row]))


def test_rows_of_two_dimensionalities_are_refused() -> None:
    """Offsets and lengths of a row must be of one dimensionality: their columns share positions."""
    with pytest.raises(PlanError, match="dimensionality"):
        ReadColumns.of_rows([0], [(0, 0)], [(0,)], [(2,)])
