"""Small runs that lie closely are read as one: which ones, and what is said of each."""

from __future__ import annotations

import uuid
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.engine.reading.coalescing.clusters import PlacedRuns, split_off_clusters
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import ByteRuns
from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.stores import MemoryStore
from dcp.storage.stores.base import ReadProfile
from tests.support.recording import OBJECT_PROFILE, RecordingStore
from tests.support.stored_arrays import runs_of, write_arrays

DISK_PROFILE = ReadProfile()


@st.composite
def placed_runs(draw: st.DrawFn) -> PlacedRuns:
    """Runs in the order of two files: some follow one another, some overlap, some straddle two blocks."""
    rows = []
    for file in range(2):
        offset = 0
        for _ in range(draw(st.integers(0, 12))):
            offset = max(0, offset + draw(st.sampled_from((0, 0, 3, 8, 9, 40, -5))))
            size = draw(st.integers(1, 20))
            position = draw(st.sampled_from((0, 7, BLOCK_BYTES - 4)))
            rows.append((file, offset, size, position))
            offset += size
    rows.sort()
    files, offsets, sizes, positions = np.array(rows, np.int64).reshape(-1, 4).T
    numbers = np.arange(len(rows), dtype=np.int64)
    return PlacedRuns(files, offsets, ByteRuns(numbers, positions, sizes, numbers + 1))


@settings(max_examples=150, deadline=None)
@given(placed=placed_runs(), limit_bytes=st.integers(16, 100))
def test_every_run_is_in_one_cluster_or_alone(placed: PlacedRuns, limit_bytes: int) -> None:
    """Clusters are bounded, of one file, without wide gaps and overlaps; each run is somewhere, once."""
    is_small = placed.runs.sizes_bytes <= 15
    clusters, others = split_off_clusters(placed, is_small, gap_bytes=8, limit_bytes=limit_bytes)
    found = others.runs.chunks.tolist()
    for cluster in clusters:
        rows = list(cluster.members.tuples())
        assert len(rows) > 1
        assert {row[0] for row in rows} == {cluster.file}
        assert (cluster.begin, cluster.end) == (rows[0][1], rows[-1][1] + rows[-1][2])
        assert cluster.end - cluster.begin <= limit_bytes
        assert all(0 <= after[1] - row[1] - row[2] <= 8 for row, after in pairwise(rows))
        assert all(
            (size <= 15 and position != BLOCK_BYTES - 4) or size <= 4 for _, _, size, _, position, _ in rows
        )
        found += [row[3] for row in rows]
    assert sorted(found) == placed.runs.chunks.tolist()


@pytest.mark.parametrize("profile", [DISK_PROFILE, OBJECT_PROFILE])
def test_damage_to_one_of_many_is_told_with_its_place(profile: ReadProfile) -> None:
    """The error names the tensor, the file and the byte; the others of its cluster are not blamed."""
    arrays = [np.full(500, number % 251, np.uint8) for number in range(300)]
    store = RecordingStore(f"clusters-{uuid.uuid4().hex}", profile)
    index = write_arrays(store, arrays)
    place = int(index.payload_offsets[170])
    MemoryStore(store.url.removeprefix("memory://"))._file("data.distcp").data[place + 123] ^= 1
    targets = [np.zeros_like(array) for array in arrays]
    rows = [(number, 0, target) for number, target in enumerate(targets)]
    with ReadEngine(store, index) as engine, pytest.raises(CorruptCheckpointError) as caught:
        engine.run(runs_of(rows), [])
    assert (caught.value.fqn, caught.value.offset) == ("t170", place)
    assert f"block 0 at byte {place} of data.distcp" in str(caught.value)
    with ReadEngine(store, index, verify="none") as engine:
        stats = engine.run(runs_of(rows), [])
    assert stats.blocks_verified == stats.blocks_unverified == 0
    assert len(store.reads) == 2
    damaged = [n for n, (a, b) in enumerate(zip(arrays, targets, strict=True)) if not np.array_equal(a, b)]
    assert damaged == [170]


@pytest.mark.parametrize("profile", [DISK_PROFILE, OBJECT_PROFILE])
def test_parts_of_small_payloads_are_counted_as_not_compared(profile: ReadProfile) -> None:
    """A cluster may have parts: two that make a whole are compared as one, others are not."""
    arrays = [np.arange(200, dtype=np.uint8) for _ in range(4)]
    store = RecordingStore(f"clusters-{uuid.uuid4().hex}", profile)
    index = write_arrays(store, arrays)
    wanted = [(0, 0, 200), (1, 0, 120), (1, 120, 80), (2, 50, 100), (3, 0, 200)]
    targets = [np.zeros(size, np.uint8) for _, _, size in wanted]
    rows = [(number, first, target) for (number, first, _), target in zip(wanted, targets, strict=True)]
    with ReadEngine(store, index) as engine:
        stats = engine.run(runs_of(rows), [])
    for (number, first, size), target in zip(wanted, targets, strict=True):
        assert np.array_equal(target, arrays[number][first : first + size])
    assert (stats.blocks_verified, stats.blocks_unverified) == (3, 1)
    assert len(store.reads) == 1
