"""Tensors read without torch: blocks, slices, dtypes, checksums, compared with torch and numpy."""

import itertools
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp.inspection.values.elements import as_float32, decode, stored_dtype
from dcp.inspection.values.tensor_reading import TensorReader, open_tensors
from dcp.storage.errors import CorruptCheckpointError, PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.stores import MemoryStore
from tests.dcp.cli_support import data_file, flip, save_ours, save_stock
from tests.support.sharded import grid, save_sharded, tensor_bytes


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements as unsigned integers (bytes of complex ones side by side)."""
    flat = np.frombuffer(tensor_bytes(tensor), f"V{tensor.element_size()}")
    return flat.reshape(tuple(tensor.shape))


def assemble(reader: TensorReader, fqn: str, max_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(the tensor put together from its blocks, how often each element came)."""
    row = reader.index.position[fqn]
    shape = reader.index.shape(row)
    whole = np.zeros(shape, f"V{reader.index.dtype(row).itemsize}")
    times = np.zeros(shape, np.int64)
    for tile in reader.tiles(row, max_bytes):
        assert tile.array.flags.c_contiguous
        assert tile.array.nbytes <= max(max_bytes, tile.array.itemsize)
        place = tuple(slice(o, o + n) for o, n in zip(tile.offsets, tile.array.shape, strict=True))
        whole[place] = np.frombuffer(tile.array.tobytes(), whole.dtype).reshape(tile.array.shape)
        times[place] += 1
    return whole, times


@pytest.mark.parametrize("save", [save_ours, save_stock])
@pytest.mark.parametrize("max_bytes", [1, 100, 5000, 1 << 24])
def test_blocks_have_every_element_once(
    tmp_path: Path, save: Callable[[Path, dict[str, Any]], Path], max_bytes: int
) -> None:
    """Tensors of all kinds, of our checkpoints and stock's: any dtype, order of dimensions, empty, scalar."""
    generator = torch.Generator().manual_seed(1)
    state = {
        "matrix": torch.randn(30, 41, generator=generator),
        "half": torch.randn(7, 3, 5, generator=generator).to(torch.bfloat16),
        "turned": torch.randn(20, 30, generator=generator).T,
        "channels": torch.randn(2, 6, 5, 4, generator=generator).to(memory_format=torch.channels_last),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(9, dtype=torch.complex128, generator=generator),
        "scalar": torch.tensor(5, dtype=torch.int16),
        "empty": torch.zeros(0, 4),
    }
    with open_tensors(save(tmp_path / "x", state)) as reader:
        for fqn, tensor in state.items():
            whole, times = assemble(reader, fqn, max_bytes)
            assert (times == 1).all(), fqn
            assert whole.tobytes() == bits_of(tensor).tobytes(), fqn
            read = reader.read(reader.index.position[fqn])
            assert read.shape == tuple(tensor.shape)
            assert read.tobytes() == tensor_bytes(tensor)


@pytest.mark.parametrize("cuts", [(4, 1, 1), (1, 3, 1), (2, 2, 3), (1, 1, 1)])
def test_sharding_is_not_seen(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """Chunks along any dimensions give the same tensor, blocks and slices, in blocks of any size."""
    tensor = torch.arange(9 * 10 * 11, dtype=torch.int32).reshape(9, 10, 11)
    save_sharded(tmp_path / "x", {"w": tensor}, {"w": grid(tensor.shape, cuts)})
    with open_tensors(tmp_path / "x") as reader:
        for max_bytes in (4, 300, 1 << 20):
            whole, times = assemble(reader, "w", max_bytes)
            assert (times == 1).all()
            assert whole.tobytes() == tensor_bytes(tensor)
        assert np.array_equal(
            reader.read(0, (slice(2, 8), 3, slice(None, None, -2))), tensor.numpy()[2:8, 3, ::-2]
        )


def test_replicated_and_overlapping_chunks_are_read_once(tmp_path: Path) -> None:
    """Replicas of a chunk, and chunks that share rows, as ranks that save on their own leave them."""
    tensor = torch.randn(12, 7, generator=torch.Generator().manual_seed(2))
    boxes = [((0, 0), (8, 7)), ((0, 0), (8, 7)), ((5, 0), (7, 7)), ((2, 3), (3, 2))]
    save_sharded(tmp_path / "x", {"w": tensor}, {"w": boxes})
    with open_tensors(tmp_path / "x") as reader:
        whole, times = assemble(reader, "w", 64)
        assert (times == 1).all()
        assert whole.tobytes() == tensor_bytes(tensor)
        assert np.array_equal(reader.read(0, (slice(4, 11, 3),)), tensor.numpy()[4:11:3])


def test_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    """Half a tensor is never taken for a whole one."""
    save_sharded(tmp_path / "x", {"w": torch.ones(8, 2)}, {"w": [((0, 0), (5, 2))]})
    with open_tensors(tmp_path / "x") as reader:
        with pytest.raises(CorruptCheckpointError, match="10 of 16 elements of 'w'"):
            list(reader.tiles(0))
        with pytest.raises(CorruptCheckpointError, match="10 of 16"):
            reader.read(0)


@st.composite
def slicings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], int]:
    """(shape, cuts, index, elements of a slab) of an array."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    cuts = tuple(draw(st.integers(1, 3)) for _ in shape)
    bound = st.none() | st.integers(-9, 9)
    step = st.none() | st.integers(-4, 4).filter(bool)
    items: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        items.append(draw(st.builds(slice, bound, bound, step) | st.integers(-size, max(0, size - 1))))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
    return shape, cuts, tuple(items), draw(st.integers(1, 40))


@settings(max_examples=150, deadline=None)
@given(case=slicings())
def test_slices_are_numpys(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], int],
) -> None:
    """Any slices of any sharding give what numpy's indexing of the whole gives, and fail where it fails."""
    shape, cuts, index, _ = case
    tensor = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    store = MemoryStore(f"slices-{next(_COUNTER)}")
    save_sharded(store, {"w": tensor}, {"w": grid(shape, cuts)})
    with TensorReader(store, dcp.open_index(store.url)) as reader:
        try:
            expected = tensor.numpy()[index]
        except IndexError:
            with pytest.raises(PlanError):
                reader.read(0, index)
            return
        found = reader.read(0, index)
        assert found.shape == expected.shape
        assert np.array_equal(found, expected)
        slabs = list(reader.slabs(0, index, 2 * case[3]))
        assert np.array_equal(np.concatenate(slabs) if expected.ndim else slabs[0], expected)


_COUNTER = itertools.count()


def test_steps_over_many_bytes_read_only_what_is_taken(tmp_path: Path) -> None:
    """Rows that a step leaves out are not read where they are long; a slice does not read the rest."""
    tensor = torch.arange(400 * 30_000, dtype=torch.int32).reshape(400, 30_000)
    save_ours(tmp_path / "x", {"w": tensor})
    for index, needed in (
        ((slice(None, None, 100),), 4 * 120_000),
        ((slice(398, 90, -150), slice(7, 9)), 3 * 8),
        ((slice(3, 5),), 2 * 120_000),
        ((7, slice(20_000, None, 10_000)), 40_000),
    ):
        with open_tensors(tmp_path / "x", verify="none") as reader:
            assert np.array_equal(reader.read(0, index), tensor.numpy()[index])
            assert reader.bytes_read <= needed


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, 0), "has 2 dimensions"),
        ((..., ...), "has 2 dimensions"),
        ((4,), "4 elements along dimension 0"),
        ((slice(None, None, 0),), "zero"),
        (("a",), "slices and integers"),
        ((slice("a"),), "cannot be sliced"),
    ],
)
def test_wrong_slices_are_refused(tmp_path: Path, index: Any, message: str) -> None:
    """What numpy does not take is one clear error with the tensor's name."""
    save_ours(tmp_path / "x", {"w": torch.zeros(4, 4)})
    with open_tensors(tmp_path / "x") as reader, pytest.raises(PlanError, match=message) as caught:
        reader.read(0, index)
    assert caught.value.fqn == "w"


LARGE = 3 * BLOCK_BYTES + 5000


@pytest.mark.parametrize("save", [save_ours, save_stock])
@pytest.mark.parametrize("max_bytes", [3_000_000, 5_500_000, 1 << 26])
def test_all_bytes_are_checked_and_read_once(
    tmp_path: Path, save: Callable[[Path, dict[str, Any]], Path], max_bytes: int
) -> None:
    """Blocks that end anywhere: no byte is fetched twice, and a flipped bit in any block of 4 MiB is found,
    by the CRCs of blocks and by the only one that stock's zip has."""
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (LARGE // 8, 8), dtype=np.uint8))
    folder = save(tmp_path / "x", {"w": tensor})
    with open_tensors(folder) as reader:
        assert b"".join(tile.array.tobytes() for tile in reader.tiles(0, max_bytes)) == tensor_bytes(tensor)
        assert LARGE - 8 < reader.stats.bytes_read <= LARGE
        if save is save_ours:
            assert (reader.stats.blocks_verified, reader.stats.blocks_unverified) == (4, 0)
    begin = data_file(folder).read_bytes().find(tensor_bytes(tensor)[:64])
    for position in (17, BLOCK_BYTES + 1, 2 * BLOCK_BYTES - 1, LARGE - 100):
        flip(data_file(folder), begin + position)
        with open_tensors(folder) as reader, pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
            for _ in reader.tiles(0, max_bytes):
                pass
        flip(data_file(folder), begin + position)


def test_memory_is_bounded_by_the_blocks(tmp_path: Path) -> None:
    """A tensor of 48 MiB, in C order and turned, is read in blocks of 2 MiB with a few of them in memory."""
    tensor = torch.zeros(6, 1 << 21, dtype=torch.int32)
    folders = [save_ours(tmp_path / "a", {"w": tensor}), save_stock(tmp_path / "b", {"w": tensor.T})]
    for folder in folders:
        with open_tensors(folder) as reader:
            tracemalloc.start()
            try:
                total = sum(tile.array.size for tile in reader.tiles(0, 2 << 20))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert total == tensor.numel()
        assert peak < 32 << 20


def test_many_small_tensors_are_read_together(tmp_path: Path) -> None:
    """A stream over tensors keeps their order, in lots of many tensors."""
    state = {f"t{number}": torch.full((number % 7, 3), float(number)) for number in range(2000)}
    save_ours(tmp_path / "x", state)
    with open_tensors(tmp_path / "x") as reader:
        found = list(reader.stream(range(2000), 10_000))
    rows = [row for row, _ in found]
    assert rows == sorted(rows)
    assert rows == [row for row in range(2000) if state[f"t{row}"].numel()]
    assert all(np.array_equal(block.array, state[f"t{row}"].numpy()) for row, block in found)


def test_a_stream_that_is_left_early_ends_cleanly(tmp_path: Path) -> None:
    """Whoever needs only the first block leaves the rest, and the reader still works."""
    save_ours(tmp_path / "x", {"w": torch.arange(100_000)})
    with open_tensors(tmp_path / "x") as reader:
        first = next(iter(reader.tiles(0, 1000)))
        assert first.array.tolist() == list(range(125))
        assert reader.read(0, (99_999,)) == 99_999


FLOATS = [
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_is_decoded_as_torch_does(name: str) -> None:
    """All 65536 or 256 codes: the same value, the same NaNs, the same signs of zeros."""
    dtype = dtypes.BY_NAME[name]
    codes = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    expected = torch.from_numpy(codes.copy()).view(getattr(torch, name)).to(torch.float32).numpy()
    found = as_float32(codes.view(stored_dtype(dtype)), dtype)
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))
    assert np.array_equal(
        found, decode(codes.view(stored_dtype(dtype)), dtype).astype(np.float32), equal_nan=True
    )


def test_pairs_of_four_bits_are_decoded_low_bits_first() -> None:
    """The sixteen values of e2m1 by its specification, which torch itself cannot convert."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    found = as_float32(np.array([[0x10, 0x32], [0x54, 0xFE]], np.uint8), dtypes.BY_NAME["float4_e2m1fn_x2"])
    assert found.tolist() == [values[:4], [*values[4:6], -4.0, -6.0]]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_complex32_is_decoded_as_torch_does() -> None:
    """Two halves become one complex64."""
    tensor = torch.randn(5, 3, dtype=torch.complex64).to(torch.complex32)
    bits = np.frombuffer(tensor_bytes(tensor), "<u4").reshape(5, 3)
    assert np.array_equal(decode(bits, dtypes.BY_NAME["complex32"]), tensor.to(torch.complex64).numpy())


def test_what_float32_cannot_hold_is_refused() -> None:
    """Rounding silently would be a lie; `decode` leaves such types as they are."""
    for name in ("float64", "int32", "complex64", "bits8"):
        array = np.zeros(2, stored_dtype(dtypes.BY_NAME[name]))
        with pytest.raises(PlanError, match=name):
            as_float32(array, dtypes.BY_NAME[name])
        assert decode(array, dtypes.BY_NAME[name]) is array


def test_every_dtype_is_read(tmp_path: Path) -> None:
    """Each dtype of the format comes back with numpy's type of its size."""
    for dtype in dtypes.BY_CODE.values():
        assert stored_dtype(dtype).itemsize == dtype.itemsize
    state = {
        name: torch.arange(48, dtype=torch.uint8).view(getattr(torch, name))
        for name in ("float8_e4m3fnuz", "complex32", "uint64", "float64")
    }
    with open_tensors(save_ours(tmp_path / "x", state)) as reader:
        for fqn, tensor in state.items():
            found = reader.read(reader.index.position[fqn])
            assert found.dtype == stored_dtype(dtypes.BY_NAME[fqn])
            assert found.tobytes() == tensor_bytes(tensor)
