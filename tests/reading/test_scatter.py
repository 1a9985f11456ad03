"""Reading from stores where a request is dear: few, large, bounded in what they fetch for nothing."""

from __future__ import annotations

import dataclasses
import math
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.engine import write
from dcp.storage.engine.reading import fragments, scatter, units
from dcp.storage.engine.reading import source as read_source
from dcp.storage.engine.reading import worker as read_worker
from dcp.storage.engine.reading.coalescing import clusters, joining
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import ByteRuns, Region, Verify
from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.formats import index as index_module
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry import payload_parts
from dcp.storage.stores import MemoryStore
from dcp.storage.stores.base import ReadProfile
from tests.support.recording import OBJECT_PROFILE, RecordingStore
from tests.support.stored_arrays import no_runs, region_of, runs_of, write_arrays

_SMALL_BLOCK = 512
_SMALL_PROFILE = ReadProfile(threads=2, request_bytes=1024, join_below_bytes=1024, gap_bytes=64, scatter=True)


def test_an_empty_piece_behind_a_large_one_is_no_piece() -> None:
    """It would have to be taken from scratch memory that a request for large pieces alone has not."""
    large = joining.RequestPiece(0, 0, 1 << 20, 0, 0, 1 << 12, None)
    empty = joining.RequestPiece(0, 1 << 20, 0, 1, 0, 0, None)
    requests, _ = joining.join([large, empty], OBJECT_PROFILE, 1 << 24)
    assert [(request.direct, request.copied) for request in requests] == [([large], [])]


def test_what_needs_memory_as_a_whole_is_asked_for_in_small_requests() -> None:
    """Parts of boxes and pieces with bytes in common are joined up to a bound of their own; what streams
    through, copied or not, fills whole requests."""
    profile = dataclasses.replace(OBJECT_PROFILE, request_bytes=16 << 20, join_below_bytes=2 << 20)

    def sizes(pieces: list[joining.RequestPiece]) -> list[int]:
        requests, _ = joining.join(pieces, profile, profile.request_bytes)
        return [request.end - request.begin for request in requests]

    small = [joining.RequestPiece(0, n << 15, 1 << 15, n, 0, 1 << 12, None) for n in range(1024)]
    assert sizes(small) == [16 << 20, 16 << 20]
    large = joining.RequestPiece(0, 1 << 25, 1 << 25, 1024, 0, 1 << 12, None)
    assert sizes([*small, large]) == [16 << 20] * 4
    parts = [piece._replace(put=print) for piece in small]
    assert sizes(parts) == [2 << 20] * 16
    overlapping = [piece._replace(size_bytes=piece.size_bytes + 100) for piece in small]
    assert max(sizes(overlapping)) <= (2 << 20) + 100
    assert max(sizes([*overlapping[:16], *small[17:80]])) <= (2 << 20) + 100


def fresh(profile: ReadProfile = OBJECT_PROFILE) -> RecordingStore:
    """A store of its own."""
    return RecordingStore(f"scatter-{uuid.uuid4().hex}", profile)


def plain_twin(store: RecordingStore) -> MemoryStore:
    """The same files, read as from a disk."""
    return MemoryStore(store.url.removeprefix("memory://"))


@contextmanager
def small_blocks() -> Iterator[None]:
    """Everything a thousandth of its size, so that few bytes have many blocks and requests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            payload_parts,
            clusters,
            index_module,
            joining,
            fragments,
            read_source,
            read_worker,
            scatter,
            units,
            write,
        ):
            patch.setattr(module, "BLOCK_BYTES", _SMALL_BLOCK)
        patch.setattr(write, "_PIECE_BYTES", _SMALL_BLOCK)
        for module in (joining, scatter):
            patch.setattr(module, "COPIED_BELOW_BYTES", 100)
            patch.setattr(module, "CHEAP_GAP_BYTES", 16)
        patch.setattr(scatter, "_CLUSTERS_PER_REQUEST", 2)
        patch.setattr(joining, "_CHEAP_JUNK_BYTES", 128)
        patch.setattr(joining, "_JUNK_BYTES", 64)
        patch.setattr(joining, "_LEAST_CUT_BYTES", 50)
        patch.setattr(scatter, "_LEAST_REQUEST_BYTES", 600)
        yield


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Arrays of these shapes and item sizes; runs of them as (array, first byte, bytes); boxes as (array,
    (offset, length) by dimension, whether the destination is transposed)."""

    arrays: list[tuple[tuple[int, ...], int]]
    runs: list[tuple[int, int, int]]
    boxes: list[tuple[int, list[tuple[int, int]], bool]]


@st.composite
def wanted_parts(draw: st.DrawFn) -> Wanted:
    """Anything that may be asked for, overlaps and nothing included."""
    shapes = st.sampled_from([(), (7,), (300,), (1500,), (30, 41), (3, 9, 50), (2, 3, 4, 60)])
    arrays = draw(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 8, 16])), min_size=1, max_size=6))
    sizes = [math.prod(shape) * itemsize for shape, itemsize in arrays]
    runs = [(number, 0, size) for number, size in enumerate(sizes) if draw(st.booleans())]
    for _ in range(draw(st.integers(0, 5))):
        number = draw(st.integers(0, len(arrays) - 1))
        first = draw(st.integers(0, sizes[number]))
        runs.append((number, first, draw(st.integers(0, sizes[number] - first))))
    regions = []
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(arrays) - 1))
        box = []
        for extent in arrays[number][0]:
            offset = draw(st.integers(0, extent - 1))
            box.append((offset, draw(st.integers(1, extent - offset))))
        regions.append((number, box, draw(st.booleans())))
    return Wanted(arrays, runs, regions)


def destinations(
    arrays: Sequence[np.ndarray],
    runs: Sequence[tuple[int, int, int]],
    regions: Sequence[tuple[int, list[tuple[int, int]], bool]],
) -> tuple[ByteRuns, list[Region], list[np.ndarray], list[bytes]]:
    """Requests, where they go, and the bytes that must be there."""
    targets, expected, rows, asked = [], [], [], []
    for number, first, size in runs:
        target = np.zeros(size, np.uint8)
        targets.append(target)
        expected.append(arrays[number].tobytes()[first : first + size])
        rows.append((number, first, target))
    for number, box, transposed in regions:
        part = arrays[number][tuple(slice(o, o + n) for o, n in box)]
        target = np.zeros(part.shape[::-1] if transposed else part.shape, part.dtype)
        view = target.T if transposed else target
        targets.append(view)
        expected.append(part.tobytes())
        asked.append(region_of(number, view, tuple(o for o, _ in box)))
    return runs_of(rows), asked, targets, expected


@settings(max_examples=120, deadline=None)
@given(wanted=wanted_parts(), verify=st.sampled_from(["blocks", "full", "none"]), threads=st.integers(1, 2))
def test_whatever_is_wanted_arrives_as_from_a_disk(wanted: Wanted, verify: Verify, threads: int) -> None:
    """Any runs and boxes of any arrays: the same bytes, figures that add up, and bounded requests."""
    with small_blocks():
        store = fresh(_SMALL_PROFILE)
        rng = np.random.default_rng(0)
        arrays = [
            np.frombuffer(rng.bytes(math.prod(shape) * itemsize), dtype=f"V{itemsize}").reshape(shape)
            for shape, itemsize in wanted.arrays
        ]
        index = write_arrays(store, arrays)
        figures = []
        for source in (store, plain_twin(store)):
            runs, regions, targets, expected = destinations(arrays, wanted.runs, wanted.boxes)
            with ReadEngine(source, index, verify=verify, threads=threads) as engine:
                figures.append(engine.run(runs, regions))
            assert [target.tobytes() for target in targets] == expected
    joined, plain = figures
    assert joined.bytes_needed == plain.bytes_needed
    assert joined.bytes_read == sum(note.size_bytes for note in store.reads)
    if verify == "none":
        assert joined.blocks_verified == joined.blocks_unverified == 0
        assert all(note.size_bytes <= _SMALL_PROFILE.request_bytes for note in store.reads)
    elif verify == "full":
        assert joined.blocks_unverified == 0


@pytest.mark.parametrize("verify", ["blocks", "full"])
def test_a_flipped_byte_is_found_wherever_a_whole_block_was_read(verify: Verify) -> None:
    """Each seventh byte of a file: what is wrong in a block that was read whole is an error, whatever the
    pieces it was read in; what lies outside of all that was asked for changes nothing."""
    with small_blocks():
        rng = np.random.default_rng(1)
        shapes = [(40,), (2000,), (40, 45), (20, 30), (1,)]
        arrays = [rng.integers(0, 255, shape, dtype=np.uint8) for shape in shapes]
        store = fresh(_SMALL_PROFILE)
        index = write_arrays(store, arrays)
        runs = [(0, 0, 40), (1, 300, 1400), (4, 0, 1)]
        regions = [(2, [(0, 40), (3, 30)], False), (3, [(2, 18), (0, 30)], True)]
        covered = sure_blocks(index, verify)
        data = MemoryStore(store.url.removeprefix("memory://"))._file("data.distcp").data
        for position in range(0, len(data), 7):
            data[position] ^= 0x40
            asked, boxes_asked, targets, expected = destinations(arrays, runs, regions)
            found = None
            try:
                with ReadEngine(store, index, verify=verify, threads=1) as engine:
                    engine.run(asked, boxes_asked)
            except CorruptCheckpointError as error:
                found = error
            data[position] ^= 0x40
            chunk = next(
                (c for c, blocks in covered.items() if any(b <= position < e for b, e in blocks)), None
            )
            if chunk is not None:
                assert found is not None, f"byte {position} of chunk {chunk}"
                assert found.fqn == f"t{chunk}"
            elif found is None and [t.tobytes() for t in targets] != expected:
                assert verify == "blocks"
                assert partly_read(index, position)


def sure_blocks(index: CheckpointIndex, verify: Verify) -> dict[int, list[tuple[int, int]]]:
    """File ranges of the blocks which that test's requests read whole, by chunk."""
    whole = {
        "blocks": {0: range(1), 1: range(1, 3), 2: range(4), 3: range(1, 2), 4: range(1)},
        "full": {0: range(1), 1: range(4), 2: range(4), 3: range(2), 4: range(1)},
    }[verify]
    ranges: dict[int, list[tuple[int, int]]] = {}
    for chunk, numbers in whole.items():
        begin, length = int(index.payload_offsets[chunk]), int(index.payload_lengths[chunk])
        ranges[chunk] = [
            (begin + n * _SMALL_BLOCK, begin + min((n + 1) * _SMALL_BLOCK, length)) for n in numbers
        ]
    return ranges


def partly_read(index: CheckpointIndex, position: int) -> bool:
    """Whether a byte of the file is in a payload of which that test's requests read a part."""
    return any(
        int(index.payload_offsets[chunk]) <= position < int(index.payload_offsets[chunk] + length)
        for chunk, length in enumerate(index.payload_lengths.tolist())
        if chunk in (1, 3)
    )


def test_thousands_of_small_tensors_take_few_requests() -> None:
    """Five thousand tensors of 600 bytes, headers between them: as many requests as their bytes need."""
    rng = np.random.default_rng(2)
    arrays = [rng.integers(0, 255, (600,), dtype=np.uint8) for _ in range(5000)]
    store = fresh()
    index = write_arrays(store, arrays)
    targets = [np.zeros_like(array) for array in arrays]
    with ReadEngine(store, index, threads=3) as engine:
        stats = engine.run(runs_of([(n, 0, target) for n, target in enumerate(targets)]), [])
    assert len(store.reads) <= 5
    assert stats.blocks_verified == 5000
    assert all(np.array_equal(a, b) for a, b in zip(arrays, targets, strict=True))


def test_small_boxes_are_joined_like_small_runs() -> None:
    """A column of each of a thousand small matrices: their rows lie apart, and yet few requests are made."""
    arrays = [np.full((16, 20), number, dtype=np.uint16) for number in range(1000)]
    store = fresh()
    index = write_arrays(store, arrays)
    targets = [np.zeros((16, 5), np.uint16) for _ in arrays]
    with ReadEngine(store, index, threads=3) as engine:
        stats = engine.run(no_runs(), [region_of(n, target, (0, 7)) for n, target in enumerate(targets)])
    assert len(store.reads) <= 3
    assert (stats.blocks_verified, stats.blocks_unverified) == (1000, 0)
    assert all((target == number).all() for number, target in enumerate(targets))


def test_large_tensors_are_read_where_they_belong_in_even_requests() -> None:
    """Tensors of some blocks and a half: every block is compared, no request is larger than wished, and
    hardly anything is read beside them."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 255, (n,), dtype=np.uint8) for n in (9_000_000, 5_000, 21_000_000, 4 << 20)]
    store = fresh()
    index = write_arrays(store, arrays)
    targets = [np.zeros_like(array) for array in arrays]
    with ReadEngine(store, index, threads=2) as engine:
        stats = engine.run(runs_of([(n, 0, target) for n, target in enumerate(targets)]), [])
    assert all(np.array_equal(a, b) for a, b in zip(arrays, targets, strict=True))
    assert stats.blocks_unverified == 0
    assert max(note.size_bytes for note in store.reads) <= OBJECT_PROFILE.request_bytes
    assert len(store.reads) <= 7
    assert stats.bytes_read - stats.bytes_needed < 4096


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_resharding_along_the_first_dimension_fetches_hardly_more_than_needed(ranks: int) -> None:
    """A model that four ranks saved in quarters, loaded by more and by fewer: hardly a byte too many."""
    rng = np.random.default_rng(4)
    rows = [(1024, 1024), (256, 1024), (2816, 512), (1024, 512), (1024,), (64, 1024)] * 2
    store = fresh()
    whole = [rng.integers(0, 2**16, shape, dtype=np.uint16) for shape in rows]
    needed = fetched = 0
    indexes = []
    for part in range(4):
        own = [array[len(array) * part // 4 : len(array) * (part + 1) // 4] for array in whole]
        indexes.append(write_arrays(store, own, name=f"{part}.distcp"))
    for rank in range(ranks):
        for part, index in enumerate(indexes):
            wanted = []
            for number, array in enumerate(whole):
                quarter, row_bytes = len(array) // 4, array.nbytes // len(array)
                begin = max(0, len(array) * rank // ranks - part * quarter)
                end = min(quarter, len(array) * (rank + 1) // ranks - part * quarter)
                if begin < end:
                    wanted.append((number, begin * row_bytes, np.zeros((end - begin) * row_bytes, np.uint8)))
            with ReadEngine(store, index, threads=4) as engine:
                stats = engine.run(runs_of(wanted), [])
            needed, fetched = needed + stats.bytes_needed, fetched + stats.bytes_read
    assert needed == sum(array.nbytes for array in whole)
    assert fetched <= 1.05 * needed


def test_unwanted_tensors_are_not_read_over() -> None:
    """Every other tensor of 100 KiB: those between stay unread, though each alone would be a bearable gap."""
    arrays = [np.zeros(100_000, np.uint8) for _ in range(40)]
    store = fresh()
    index = write_arrays(store, arrays)
    targets = [np.ones(100_000, np.uint8) for _ in range(20)]
    with ReadEngine(store, index, threads=1) as engine:
        stats = engine.run(runs_of([(2 * n, 0, target) for n, target in enumerate(targets)]), [])
    assert stats.bytes_read == stats.bytes_needed
    assert len(store.reads) == 20
    assert not any(target.any() for target in targets)


@pytest.mark.parametrize("verify", ["blocks", "full"])
def test_rows_far_apart_are_read_alone_and_near_ones_together(verify: Verify) -> None:
    """Columns of a wide matrix: with rows of 1 MiB only what is wanted is fetched, with rows of 100 KiB the
    blocks are read through in large steps, and compared."""
    wide = np.random.default_rng(5).integers(0, 2**32, (24, 1 << 18), dtype=np.uint32)
    narrow = np.random.default_rng(6).integers(0, 2**32, (200, 25_000), dtype=np.uint32)
    store = fresh()
    index = write_arrays(store, [wide, narrow])
    targets = [np.zeros((24, 5000), np.uint32), np.zeros((200, 9000), np.uint32)]
    with ReadEngine(store, index, threads=3, verify=verify) as engine:
        first = dataclasses.replace(engine.run(no_runs(), [region_of(0, targets[0], (0, 77))]))
        apart = len(store.reads)
        both = engine.run(no_runs(), [region_of(1, targets[1], (0, 16_000))])
    assert np.array_equal(targets[0], wide[:, 77:5077])
    assert np.array_equal(targets[1], narrow[:, 16_000:])
    assert len(store.reads) - apart <= 5
    assert both.blocks_verified - first.blocks_verified == -(-narrow.nbytes // BLOCK_BYTES)
    if verify == "blocks":
        assert apart == 24
        assert first.bytes_read <= first.bytes_needed + 77 * 4
    else:
        assert first.blocks_verified == 6
        assert first.bytes_read == wide.nbytes


def test_a_large_box_is_work_for_all_threads() -> None:
    """One column shard of one large tensor is read in several requests, by several threads at a time."""
    array = np.random.default_rng(7).integers(0, 2**16, (2000, 8000), dtype=np.uint16)
    store = fresh()
    index = write_arrays(store, [array])
    target = np.zeros((2000, 4000), np.uint16)
    meeting = threading.Barrier(3)
    met = 0

    class Meeting(RecordingStore):
        def note(self, op: str, received_bytes: int = 0) -> None:
            nonlocal met
            super().note(op, received_bytes)
            if op == "get" and met < 3:
                met += 1
                meeting.wait(240)

    together = Meeting(store.url.removeprefix("memory://"))
    with ReadEngine(together, index, threads=3) as engine:
        stats = engine.run(no_runs(), [region_of(0, target, (0, 4000))])
    assert np.array_equal(target, array[:, 4000:])
    assert stats.blocks_unverified == 0
    assert stats.bytes_read == array.nbytes


def test_equal_bytes_wanted_twice_are_read_once() -> None:
    """Tied tensors, and the same shard on two devices: one read, and copies of it."""
    array = np.random.default_rng(8).integers(0, 255, (5_000_000,), dtype=np.uint8)
    small = np.arange(100, dtype=np.uint8)
    store = fresh()
    index = write_arrays(store, [array, small])
    large = [np.zeros_like(array) for _ in range(3)]
    little = [np.zeros_like(small) for _ in range(3)]
    rows = [(0, 0, target) for target in large] + [(1, 0, target) for target in little]
    with ReadEngine(store, index, threads=2) as engine:
        stats = engine.run(runs_of(rows), [])
    assert all(np.array_equal(target, array) for target in large)
    assert all(np.array_equal(target, small) for target in little)
    assert stats.bytes_read < array.nbytes + 10_000
    assert stats.bytes_needed == 3 * (array.nbytes + small.nbytes)
