"""Payloads with any strides, as torch.save files have them: permuted, with gaps, expanded, overlapping."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.engine.memory import ScratchBuffers
from dcp.storage.engine.reading import fragments, payloads, scatter
from dcp.storage.engine.reading import source as read_source
from dcp.storage.engine.reading import worker as read_worker
from dcp.storage.engine.reading.coalescing import joining
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Region, Verify
from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError
from dcp.storage.formats import index as index_module
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import CheckpointIndex, starts
from dcp.storage.geometry import payload_parts
from dcp.storage.stores import MemoryStore, Store
from dcp.storage.stores.base import ReadProfile
from tests.support.recording import RecordingStore
from tests.support.stored_arrays import no_runs

_SMALL_BLOCK = 512
_PROFILE = ReadProfile(threads=2, request_bytes=1024, join_below_bytes=1024, gap_bytes=64, scatter=True)
_CODES = {1: 5, 2: 7, 4: 8, 8: 9, 16: 13}


@contextmanager
def small_blocks() -> Iterator[None]:
    """Everything a thousandth of its size, so that few bytes have many blocks and windows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            payload_parts,
            index_module,
            fragments,
            joining,
            payloads,
            read_source,
            read_worker,
            scatter,
        ):
            patch.setattr(module, "BLOCK_BYTES", _SMALL_BLOCK)
        patch.setattr(read_worker, "_SCRATCH_BYTES", 2 * _SMALL_BLOCK)
        patch.setattr(read_worker, "_SPARSE_GAP_BYTES", 100)
        patch.setattr(read_worker, "SCRATCH", ScratchBuffers(2 * _SMALL_BLOCK))
        yield


@dataclasses.dataclass(frozen=True)
class Strided:
    """A view of a storage, and a box of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    head: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@st.composite
def strided(draw: st.DrawFn) -> Strided:
    """Strides that are dense in any order, with gaps, 0, or overlapping."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.booleans()):
        order, step, steps = draw(st.permutations(range(len(shape)))), 1, [0] * len(shape)
        for dimension in reversed(order):
            steps[dimension] = 0 if draw(st.integers(0, 5)) == 0 else step
            step = step * shape[dimension] + draw(st.sampled_from([0, 0, 1, 70]))
    else:
        steps = [draw(st.sampled_from([0, 1, 2, 7, 40, 300])) for _ in shape]
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return Strided(shape, tuple(steps), itemsize, draw(st.sampled_from([0, 0, 3])), offsets, lengths)


def _stored(store: Store, case: Strided) -> tuple[CheckpointIndex, np.ndarray]:
    """(index of a file with the storage, the view of it)."""
    size = (case.head + case.extent) * case.itemsize
    data = np.random.default_rng(size).bytes(size)
    before = b"header"
    store.make_root()
    with store.create("model.pt", durable=False) as handle:
        handle.write(before + data)
    index = CheckpointIndex(
        format="torch_save",
        fqns=["t"],
        dtype_codes=np.array([_CODES[case.itemsize]], dtype=np.uint8),
        requires_grad=np.zeros(1, np.uint8),
        shape_start=starts([len(case.shape)]),
        shape_values=np.array(case.shape, dtype=np.int64),
        chunk_start=starts([1]),
        chunk_offsets=np.zeros(len(case.shape), np.int64),
        chunk_sizes=np.array(case.shape, dtype=np.int64),
        chunk_files=np.zeros(1, np.int64),
        record_offsets=np.array([len(before)]),
        record_lengths=np.array([size]),
        payload_offsets=np.array([len(before) + case.head * case.itemsize]),
        payload_lengths=np.array([case.extent * case.itemsize]),
        crc_start=np.zeros(2, np.int64),
        files=["model.pt"],
        file_sizes=np.array([len(before) + size]),
        payload_strides={0: case.strides},
        record_crcs={0: crc32(data)},
    )
    index.check()
    dtype = np.dtype(f"V{case.itemsize}")
    strides = tuple(stride * case.itemsize for stride in case.strides)
    return index, np.ndarray(case.shape, dtype, data, case.head * case.itemsize, strides)


def _read(
    store: Store, index: CheckpointIndex, case: Strided, verify: Verify, *, transposed: bool = False
) -> np.ndarray:
    target = np.zeros(case.lengths[::-1] if transposed else case.lengths, dtype=f"V{case.itemsize}")
    view = target.T if transposed else target
    with ReadEngine(store, index, verify=verify, threads=2) as engine:
        region = Region(0, case.offsets, view.shape, view.ctypes.data, view.strides)
        engine.run(no_runs(), [region])
    return view


@settings(max_examples=150, deadline=None)
@given(
    case=strided(),
    transposed=st.booleans(),
    verify=st.sampled_from(["blocks", "full", "none"]),
    scatters=st.booleans(),
)
def test_any_strides_are_read_as_numpy_reads_them(
    case: Strided, transposed: bool, verify: Verify, scatters: bool
) -> None:
    """Any box of a payload of any strides arrives in memory of any strides, from disks and object stores."""
    name = f"strided-{uuid.uuid4().hex}"
    with small_blocks():
        store: Store = RecordingStore(name, _PROFILE) if scatters else MemoryStore(name)
        index, array = _stored(store, case)
        expected = array[tuple(slice(o, o + n) for o, n in zip(case.offsets, case.lengths, strict=True))]
        got = _read(store, index, case, verify, transposed=transposed)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scatters", [False, True])
def test_a_storage_that_was_read_whole_is_compared_with_its_checksum(scatters: bool) -> None:
    """A flipped bit in a transposed tensor that covers its storage is found; verify='none' lets it be."""
    name = f"strided-{uuid.uuid4().hex}"
    store: Store = RecordingStore(name, ReadProfile(scatter=True)) if scatters else MemoryStore(name)
    case = Strided((1200, 1000), (1, 1200), 8, 0, (0, 0), (1200, 1000))
    index, array = _stored(store, case)
    assert array.nbytes > 2 * BLOCK_BYTES
    assert _read(store, index, case, "blocks").tobytes() == array.tobytes()
    data = bytearray(store.read("model.pt", limit_bytes=1 << 30))
    data[BLOCK_BYTES + 77] ^= 1
    store.delete("model.pt")
    with store.create("model.pt", durable=False) as handle:
        handle.write(data)
    with pytest.raises(CorruptCheckpointError, match="'t' is damaged"):
        _read(store, index, case, "blocks")
    assert _read(store, index, case, "none").tobytes() != array.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"payload_strides": {0: (1,)}},
        {"payload_strides": {0: (-1, 1)}},
        {"payload_strides": {0: (4, 2)}},
        {"payload_strides": {0: (1 << 61, 1)}},
        {"payload_strides": {1: (3, 1)}},
        {"payload_strides": {}},
        {"record_crcs": {0: -1}},
        {"record_crcs": {3: 0}},
    ],
)
def test_strides_that_do_not_fit_are_refused(change: dict[str, dict[int, int]]) -> None:
    """Strides are checked before anything is read on their word."""
    store = MemoryStore(f"strided-{uuid.uuid4().hex}")
    index, _ = _stored(store, Strided((2, 3), (4, 1), 4, 0, (0, 0), (2, 3)))
    with pytest.raises(CheckpointFormatError):
        dataclasses.replace(index, **change).check()  # type: ignore[arg-type]
