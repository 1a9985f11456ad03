import itertools
import math
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.engine.reading import units
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import ByteRuns, Verify
from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.stores import MemoryStore, PosixStore
from tests.support.stored_arrays import no_runs, region_of, write_arrays


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """(shape, offsets, lengths, itemsize) of a box within a small array."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    lengths = [draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]
    return tuple(shape), tuple(offsets), tuple(lengths), draw(st.sampled_from([1, 2, 4, 8, 16]))


@settings(max_examples=150, deadline=None)
@given(box=boxes(), transposed=st.booleans(), verify=st.sampled_from(["blocks", "full", "none"]))
def test_any_region_arrives_as_numpy_would_slice_it(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int], transposed: bool, verify: Verify
) -> None:
    """Any box of any chunk lands in memory of any stride as slicing the whole would put it."""
    shape, offsets, lengths, itemsize = box
    rng = np.random.default_rng(math.prod(shape) + itemsize)
    array = np.frombuffer(rng.bytes(math.prod(shape) * itemsize), dtype=f"V{itemsize}").reshape(shape)
    store = MemoryStore(f"regions-{uuid.uuid4().hex}")
    index = write_arrays(store, [array])
    expected = array[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    target = np.zeros(lengths[::-1] if transposed else lengths, dtype=f"V{itemsize}")
    view = target.T if transposed else target
    with ReadEngine(store, index, verify=verify, threads=1) as engine:
        stats = engine.run(no_runs(), [region_of(0, view, offsets)])
    assert view.tobytes() == expected.tobytes()
    assert stats.bytes_needed == expected.nbytes


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("columns", [(0, 700), (650, 50), (1, 1398)])
def test_wide_rows_are_read_through_the_window_once(
    tmp_path: Path, threads: int, columns: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of a chunk of many blocks: each block is fetched about once and every one is verified."""
    monkeypatch.setattr(units, "_UNIT_BYTES", 1 << 20)
    rows, width = 6000, 1400
    array = np.random.default_rng(1).integers(0, 2**32, (rows, width), dtype=np.uint32)
    store = PosixStore(tmp_path / "c")
    index = write_arrays(store, [array])
    begin, count = columns
    target = np.zeros((rows, count), np.uint32)
    with ReadEngine(store, index, threads=threads) as engine:
        stats = engine.run(no_runs(), [region_of(0, target, (0, begin))])
    assert np.array_equal(target, array[:, begin : begin + count])
    assert stats.blocks_unverified == 0
    assert stats.bytes_read <= array.nbytes + 40 * BLOCK_BYTES


def test_regions_of_few_very_long_rows_are_split_along_the_next_dimension(tmp_path: Path) -> None:
    """A chunk whose first dimension has rows larger than any buffer, wanted in part along the last."""
    array = np.random.default_rng(2).integers(0, 2**16, (3, 1500, 1600), dtype=np.uint16)
    store = PosixStore(tmp_path / "c")
    index = write_arrays(store, [array])
    target = np.zeros((2, 1500, 400), np.uint16)
    with ReadEngine(store, index, threads=2) as engine:
        engine.run(no_runs(), [region_of(0, target, (1, 0, 800))])
    assert np.array_equal(target, array[1:3, :, 800:1200])


def test_small_runs_are_read_together_and_verified(tmp_path: Path) -> None:
    """A thousand small tensors take a few reads, and each one's checksum is compared."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 255, (200 + number % 7,), dtype=np.uint8) for number in range(1000)]
    store = PosixStore(tmp_path / "c")
    index = write_arrays(store, arrays)
    targets = [np.zeros_like(array) for array in arrays]
    runs = ByteRuns(
        np.arange(1000),
        np.zeros(1000, np.int64),
        np.array([t.nbytes for t in targets]),
        np.array([t.ctypes.data for t in targets]),
    )
    with ReadEngine(store, index, threads=2) as engine:
        found = list(units.run_units(engine, runs))
        stats = engine.run(runs, [])
    assert len(found) == 1
    assert stats.blocks_verified == 1000
    assert all(np.array_equal(a, b) for a, b in zip(arrays, targets, strict=True))


@pytest.mark.parametrize(("verify", "caught"), [("blocks", False), ("full", True), ("none", False)])
def test_partly_needed_blocks_are_verified_only_on_request(
    tmp_path: Path, verify: Verify, caught: bool
) -> None:
    """The policy "full" fetches and checks the rest of a block wanted in part; the default does not."""
    array = np.random.default_rng(4).integers(0, 255, (BLOCK_BYTES + 1000,), dtype=np.uint8)
    store = PosixStore(tmp_path / "c")
    index = write_arrays(store, [array])
    path = tmp_path / "c" / "data.distcp"
    data = bytearray(path.read_bytes())
    data[int(index.payload_offsets[0]) + 10] ^= 1  # outside of what is wanted below
    path.write_bytes(data)
    target = np.zeros(3_000_000, np.uint8)
    runs = ByteRuns(*(np.array([v]) for v in (0, 1_000_000, target.nbytes, target.ctypes.data)))
    with ReadEngine(store, index, verify=verify) as engine:
        if caught:
            with pytest.raises(CorruptCheckpointError, match="t0"):
                engine.run(runs, [])
        else:
            engine.run(runs, [])
            assert np.array_equal(target, array[1_000_000:4_000_000])


def test_a_flipped_bit_anywhere_in_a_payload_is_found(tmp_path: Path) -> None:
    """Every block of every payload is covered: small run, large run, strided region."""
    rng = np.random.default_rng(5)
    arrays = [
        rng.integers(0, 255, (100,), dtype=np.uint8),
        rng.integers(0, 255, (2 * BLOCK_BYTES + 17,), dtype=np.uint8),
        rng.integers(0, 255, (3000, 2000), dtype=np.uint8),
    ]
    store = PosixStore(tmp_path / "c")
    index = write_arrays(store, arrays)
    path = tmp_path / "c" / "data.distcp"
    good = path.read_bytes()
    targets = [np.zeros(100, np.uint8), np.zeros_like(arrays[1]), np.zeros((3000, 10), np.uint8)]
    runs = ByteRuns(
        np.arange(2),
        np.zeros(2, np.int64),
        np.array([t.nbytes for t in targets[:2]]),
        np.array([t.ctypes.data for t in targets[:2]]),
    )
    for chunk, place in itertools.product(range(3), (0.0, 0.37, 0.999)):
        damaged = bytearray(good)
        length = int(index.payload_lengths[chunk])
        damaged[int(index.payload_offsets[chunk]) + int(place * length)] ^= 0x10
        path.write_bytes(damaged)
        with ReadEngine(store, index, threads=2) as engine, pytest.raises(CorruptCheckpointError) as caught:
            engine.run(runs, [region_of(2, targets[2], (0, 5))])
        assert caught.value.fqn == f"t{chunk}"
        assert "data.distcp" in caught.value.path


@pytest.mark.parametrize("damage", ["truncate", "extend", "remove"])
def test_a_data_file_of_another_size_is_refused(tmp_path: Path, damage: str) -> None:
    """A truncated, extended or missing file is named before any byte of it is used."""
    array = np.arange(100_000, dtype=np.uint8)
    store = PosixStore(tmp_path / "c")
    index = write_arrays(store, [array])
    path = tmp_path / "c" / "data.distcp"
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncate" else path.read_bytes() + b"x")
    target = np.zeros_like(array)
    runs = ByteRuns(*(np.array([v]) for v in (0, 0, target.nbytes, target.ctypes.data)))
    with ReadEngine(store, index) as engine, pytest.raises(CorruptCheckpointError, match=r"data\.distcp"):
        engine.run(runs, [])
