"""Digests of runs of bytes, as AES-GCM computes them, and of boxes, which are sums over their runs.

The *value* of a run is that of GHASH over its blocks and one block of zeros: each block times a power of
`KEY` that grows with the number of blocks behind it. Blocks are counted from the tensor's first byte, so a
run that begins within one has ``phase`` zero bytes before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.digests.field import (
    BLOCK_BYTES,
    Elements,
    as_elements,
    horner,
    power,
    product,
    scaled,
    times,
    times_powers,
)
from dcp.storage.geometry.ragged import Int64
from dcp.storage.geometry.strides import c_strides

__all__ = [
    "KEY",
    "BoxDigest",
    "LogicalRuns",
    "OrderedSum",
    "RunDigest",
    "blocks_of",
    "logical_runs",
    "row_values",
    "run_value",
]

KEY: Final = 0x66E94BD4EF8A2C3B884CFA59CA342B2E
"""AES-128 of zeros with the key of zeros, which GHASH goes by. It generates the whole group of the field, so
that no two positions have the same power."""

_NONCE: Final = bytes(12)
_MAX_CALL_BYTES: Final = 1 << 30  # AES-GCM takes less than 2 GiB at a time
_TABLE_BLOCKS: Final = 3
"""Rows of up to so many blocks are multiplied by tables, all together: a call for each takes as long."""


def run_value(data: memoryview, phase: int = 0) -> int:
    """Return the value of one run."""
    if phase:
        data = memoryview(bytes(phase) + bytes(data))
    if len(data) > _MAX_CALL_BYTES:
        raise ValueError(f"{len(data)} bytes at once, and the limit is {_MAX_CALL_BYTES}")
    return int.from_bytes(_ghash()(data), "big") ^ _correction(len(data))


def row_values(rows: npt.NDArray[np.uint8], phase: int = 0) -> Elements:
    """Return the values of many runs of one length, a row each, all of one ``phase``."""
    count, size = rows.shape
    blocks = -(-(phase + size) // BLOCK_BYTES)
    if phase or (blocks <= _TABLE_BLOCKS and size % BLOCK_BYTES):
        padded = np.zeros((count, blocks * BLOCK_BYTES), np.uint8)
        padded[:, phase : phase + size] = rows
        rows, size = padded, blocks * BLOCK_BYTES
    if blocks > _TABLE_BLOCKS:
        data = np.ascontiguousarray(rows).reshape(-1).data
        tags = b"".join(map(_ghash(), (data[begin : begin + size] for begin in range(0, count * size, size))))
        return as_elements(tags) ^ as_elements(_correction(size).to_bytes(BLOCK_BYTES, "big"))
    elements = as_elements(np.ascontiguousarray(rows).reshape(-1)).reshape(count, blocks, 2)
    total = np.zeros((count, 2), np.uint64)
    for column in range(blocks):
        total = times(total ^ elements[:, column], KEY)
    return times(total, KEY)


@lru_cache(maxsize=1)
def _ghash() -> Callable[[Any], bytes]:
    """Return a function from bytes to what AES-GCM authenticates them by: their value but for
    `_correction`."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # dear to import, and seldom needed

    return partial(AESGCM(bytes(BLOCK_BYTES)).encrypt, _NONCE, b"")


@lru_cache(maxsize=1024)
def _correction(size: int) -> int:
    """Return the part of the tag beside the value: the encrypted counter, and the length in bits as a
    block."""
    return _ENCRYPTED_COUNTER ^ product(8 * size << 64, KEY)


_ENCRYPTED_COUNTER: Final = 0x58E2FCCEFA7E3061367F1D57A4E7455A
"""The tag of no bytes at all."""


# -- boxes ---------------------------------------------------------------------------------------------------


_STEP_BYTES: Final = 1 << 20
"""Of a long run this much at a time: what was read from memory once is still in the cache behind it."""

_STEP_POWER: Final = power(KEY, _STEP_BYTES // BLOCK_BYTES)

_ROWS_BYTES: Final = 256 << 10
"""Runs shorter than this are collected, many at a time."""


def blocks_of(size_bytes: int) -> int:
    """Return the number of blocks that ``size_bytes`` take."""
    return -(-size_bytes // BLOCK_BYTES)


class LogicalRuns(NamedTuple):
    """Places of the bytes of a box among those of its tensor (``tensor_bytes``) in C order.

    ``run_bytes`` follow each other, from ``first`` on and then again and again: ``counts`` times, ``strides``
    bytes apart, in each of some dimensions.
    """

    first: int
    run_bytes: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    tensor_bytes: int

    @property
    def phase(self) -> int:
        """Bytes from the begin of a block to the first byte."""
        return self.first % BLOCK_BYTES

    @property
    def last_end(self) -> int:
        """One behind the last byte."""
        steps = zip(self.counts, self.strides, strict=True)
        return self.first + self.run_bytes + sum((count - 1) * stride for count, stride in steps)

    @property
    def blocks_behind(self) -> int:
        """Blocks of the tensor behind the last one of the box."""
        return blocks_of(self.tensor_bytes) - blocks_of(self.last_end)

    @property
    def is_regular(self) -> bool:
        """Return whether all runs begin alike within a block."""
        return all(stride % BLOCK_BYTES == 0 for stride in self.strides)

    def begins(self) -> Int64:
        """Return the begin of each run."""
        begins = np.array([self.first], np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            begins = (begins[:, None] + stride * np.arange(count, dtype=np.int64)).reshape(-1)
        return begins


@lru_cache(maxsize=4096)
def logical_runs(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int
) -> LogicalRuns:
    """Return the runs of the box of ``sizes`` from ``offsets`` on in a tensor of ``shape``."""
    strides = c_strides(shape, itemsize)
    run, counts, steps = itemsize, list[int](), list[int]()
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if not counts and run == stride:
            run *= size
        elif counts and steps[-1] * counts[-1] == stride:
            counts[-1] *= size
        else:
            counts.append(size)
            steps.append(stride)
    if 0 in sizes:
        run, counts, steps = 0, [], []
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return LogicalRuns(
        first, run, tuple(reversed(counts)), tuple(reversed(steps)), itemsize * math.prod(shape)
    )


class OrderedSum:
    """A sum of values, each of which says where its last block ends; what comes in order costs least."""

    __slots__ = ("_end", "_value")

    def __init__(self) -> None:
        self._value = self._end = 0

    def add(self, value: int, end: int) -> None:
        """Add a value that has ``end`` blocks before its end."""
        if end < self._end:
            value = product(power(KEY, self._end - end), value)
        elif self._value and end > self._end:
            step = end - self._end
            if step * BLOCK_BYTES == _STEP_BYTES:
                self._value = scaled(self._value, _STEP_POWER)
            else:
                self._value = product(power(KEY, step), self._value)
        self._value ^= value
        self._end = max(self._end, end)

    def upto(self, end: int) -> int:
        """Return the sum with ``end`` blocks in all."""
        if end == self._end or not self._value:
            return self._value
        return product(power(KEY, end - self._end), self._value)


class RunDigest:
    """Takes the bytes of a box that is one run and begins with a block, in pieces of any length."""

    __slots__ = ("_position", "_sum")

    def __init__(self) -> None:
        self._position = 0
        self._sum = OrderedSum()

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        self._position = _extend(self._sum, data, self._position)

    def value(self) -> int:
        """As `BoxDigest.value`."""
        return self._sum.upto(blocks_of(self._position))


def _extend(total: OrderedSum, data: memoryview, begin: int) -> int:
    """Add the bytes that are at ``begin`` of a tensor, behind those that are in the sum, and return where
    they end."""
    for at in range(begin, begin + len(data), _STEP_BYTES):
        part = data[at - begin : at - begin + _STEP_BYTES]
        total.add(run_value(part, at % BLOCK_BYTES), blocks_of(at + len(part)))
    return begin + len(data)


class BoxDigest:
    """Takes the bytes of one box in C order, in pieces of any length; `value` is known when all are there."""

    def __init__(self, runs: LogicalRuns) -> None:
        self._runs = runs
        self._position = 0
        self._sum = OrderedSum()
        self._carried = bytearray()
        self._values: list[Elements] = []
        self._run_count = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        runs = self._runs
        if not runs.counts:
            _extend(self._sum, data, runs.first + self._position)
            self._position += len(data)
        elif runs.run_bytes <= _ROWS_BYTES:
            self._collect(data)
        else:
            self._cut(data)

    def value(self) -> int:
        """Return the value that the box adds to the sum of the tensor's values, but for the blocks behind
        its last one."""
        runs = self._runs
        if not runs.counts:
            return self._sum.upto(blocks_of(runs.last_end))
        values = np.concatenate([np.zeros((0, 2), np.uint64), *self._values])
        if runs.is_regular:
            values = values.reshape(*runs.counts, 2)
            for stride in reversed(runs.strides):
                values = horner(values, power(KEY, stride // BLOCK_BYTES))
            total = values
        else:
            ends = -(-(self._begins + runs.run_bytes) // BLOCK_BYTES)
            total = np.bitwise_xor.reduce(times_powers(values, KEY, blocks_of(runs.last_end) - ends), axis=0)
        return int.from_bytes(total.tobytes(), "big")

    @cached_property
    def _begins(self) -> Int64:
        return self._runs.begins()

    def _cut(self, data: memoryview) -> None:
        """Take pieces of long runs."""
        size, begins = self._runs.run_bytes, self._begins
        while len(data):
            number, at = divmod(self._position, size)
            begin, part = int(begins[number]), data[: size - at]
            _extend(self._sum, part, begin + at)
            self._position += len(part)
            data = data[len(part) :]
            if at + len(part) == size:
                value = self._sum.upto(blocks_of(begin + size))
                self._values.append(as_elements(value.to_bytes(BLOCK_BYTES, "big")))
                self._sum = OrderedSum()

    def _collect(self, data: memoryview) -> None:
        """Whole runs at once; what is left of the last one is kept for the next piece."""
        size = self._runs.run_bytes
        if self._carried:
            lacking = size - len(self._carried)
            self._carried += data[:lacking]
            data = data[lacking:]
            if len(self._carried) < size:
                return
            self._add_runs(np.frombuffer(bytes(self._carried), np.uint8).reshape(1, size))
            self._carried.clear()
        count = len(data) // size
        self._add_runs(np.frombuffer(data[: count * size], np.uint8).reshape(count, size))
        self._carried += data[count * size :]

    def _add_runs(self, rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        first, count = self._run_count, len(rows)
        self._run_count += count
        if self._runs.is_regular:
            self._values.append(row_values(rows, self._runs.phase))
            return
        phases = self._begins[first : first + count] % BLOCK_BYTES
        values = np.zeros((count, 2), np.uint64)
        for phase in np.unique(phases).tolist():
            chosen = np.flatnonzero(phases == phase)
            values[chosen] = row_values(rows[chosen], phase)
        self._values.append(values)
