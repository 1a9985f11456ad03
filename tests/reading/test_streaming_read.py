"""Requests whose bytes are used while they come: an attempt that fails on the way leaves nothing behind."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.stores.handles import Inflow, ReadHandle
from tests.support.recording import RecordingStore
from tests.support.stored_arrays import region_of, runs_of, write_arrays


class _BrokenOnce(RecordingStore):
    """Each request breaks off after ``share`` of its bytes, which are others, and is made again."""

    share = 0.5

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        return _Handle(super().open_read(name, expected_bytes=expected_bytes), self.share)


class _Handle(ReadHandle):
    def __init__(self, inner: ReadHandle, share: float) -> None:
        self.name, self.size_bytes = inner.name, inner.size_bytes
        self._inner, self._share = inner, share

    def receive(self, inflow: Inflow, offset: int) -> None:
        left = inflow.size_bytes * self._share
        for buffer in inflow.buffers():
            buffer[:] = b"\xa5" * len(buffer)
            left -= len(buffer)
            if left <= 0:
                break
        self._inner.receive(inflow, offset)

    def preadv(self, buffers: Any, offset: int) -> None:
        self._inner.preadv(buffers, offset)

    def pread(self, length: int, offset: int) -> bytes:
        return self._inner.pread(length, offset)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("verify", ["blocks", "full", "none"])
def test_an_attempt_that_broke_does_not_count(verify: Verify, share: float) -> None:
    """Small runs, large ones and boxes arrive as committed, and each block is counted once."""
    rng = np.random.default_rng(7)
    shapes = [(600,)] * 400 + [(5_000_000,), (9_000_000,), (300, 700), (700, 300)]
    arrays = [rng.integers(0, 255, shape, dtype=np.uint8) for shape in shapes]
    store = _BrokenOnce(f"passage-{uuid.uuid4().hex}")
    store.share = share
    index = write_arrays(store, arrays)
    targets = [np.zeros_like(array) for array in arrays[:-1]] + [np.zeros((700, 100), np.uint8)]
    runs = [(number, 0, target) for number, target in enumerate(targets[:-1])]
    with ReadEngine(store, index, threads=2, verify=verify) as engine:
        stats = engine.run(runs_of(runs), [region_of(len(runs), targets[-1], (0, 100))])
    assert all(np.array_equal(a, b) for a, b in zip(arrays[:-1], targets[:-1], strict=True))
    assert np.array_equal(arrays[-1][:, 100:200], targets[-1])
    blocks = 0 if verify == "none" else 400 + 2 + 3 + 1 + 1
    assert (stats.blocks_verified, stats.blocks_unverified) == (blocks, 0)
