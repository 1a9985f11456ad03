"""Weighted sums of copies: read a few MiB at a time, and add block by block in the CPU cache.

Each element is computed separately, with the same operations in the same order, so that results are bit for
bit equal for any windows, tasks and executors. Matrix products are added rank by rank, because the order of
additions inside BLAS varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.conversion.casting import TOO_LARGE, narrowed, stored_dtype, widened
from dcp.conversion.gather import BadElements, RangeReader, Wanted
from dcp.conversion.layout import SourcePart, TaskCopy, Term
from dcp.storage.formats import dtypes

_Array = npt.NDArray[Any]

_STEP_BYTES: Final = 4 << 20
"""Bytes of terms in memory at a time; small enough for the cache."""
_STEP_OF_REQUESTS_BYTES: Final = 32 << 20
"""Bytes of terms in memory where a request is expensive."""
_BLOCK: Final = 1 << 15
"""Elements added at a time."""
_ALIGNMENT: Final = 64

NOT_FINITE: Final = 0
OUT_OF_RANGE: Final = 1


class Sums:
    """Compute sums of copies in the type of code ``accumulate``; `flush` completes pending work.

    The reader's result collects sums that are not finite.
    """

    def __init__(self, reader: RangeReader, accumulate: int) -> None:
        self._reader = reader
        self._faults = reader.result.faults
        kind = stored_dtype(accumulate)
        self._sum, self._product, self._values = (np.empty(_BLOCK, kind) for _ in range(3))
        self._limit = _STEP_OF_REQUESTS_BYTES if reader.profile.scatter else _STEP_BYTES
        self._memory = np.empty(self._limit, np.uint8)
        self._used = 0
        self._steps: list[Callable[[], None]] = []
        self._wanted: list[Wanted] = []
        self._done: list[Callable[[], None]] = []
        self._newest = -1
        self._rights: dict[tuple[int, int], _Array] = {}

    def add(self, copy: TaskCopy, place: memoryview, low: int, done: Callable[[], None]) -> None:
        """Sum the bytes of ``copy`` from ``low`` on into ``place``; ``done`` is called afterwards."""
        size, high = dtypes.BY_CODE[copy.target_code].itemsize, low + len(place)
        width = sum(dtypes.BY_CODE[term.codes[0]].itemsize for term in copy.terms if not term.rank)
        last, count = -(-high // size), max(1, self._limit // max(1, width))
        for first in range(low // size, last, count):
            end = min(first + count, last)
            if self._used and self._used + (end - first) * width > self._limit:
                self.flush()
            begin, stop = max(low, first * size), min(high, end * size)
            read = [
                array for number in range(len(copy.terms)) for array in self._want(copy, number, first, end)
            ]
            part = place[begin - low : stop - low]
            step = partial(self._carry_out, copy, first, end, part, begin - first * size, read)
            self._steps.append(step)
            self._newest = copy.copy
        self._done.append(done)

    def flush(self) -> None:
        """Read and add all pending terms."""
        self._reader.read(self._wanted)
        for act in (*self._steps, *self._done):
            act()
        self._rights = {key: array for key, array in self._rights.items() if key[0] == self._newest}
        self._used, self._steps, self._wanted, self._done = 0, [], [], []

    # -- what to read ----------------------------------------------------------------------------------------

    def _want(self, copy: TaskCopy, number: int, first: int, last: int) -> list[_Array]:
        """Return memory for the elements ``first`` to ``last`` of a term, and request their read."""
        term = copy.terms[number]
        if not term.rank:
            found = self._gather(term, 0, first, last)
            if copy.is_padded:
                _fill_with_zeros(found, term.weight)
            return [found]
        rows = self._gather(term, 0, first // term.width * term.rank, -(-last // term.width) * term.rank)
        key = copy.copy, number
        if key not in self._rights:  # shared by all windows of the copy
            self._rights[key] = self._gather(term, 1, 0, term.rank * term.width)
        return [rows, self._rights[key]]

    def _gather(self, term: Term, side: int, first: int, last: int) -> _Array:
        kind = stored_dtype(term.codes[side])
        size = (last - first) * kind.itemsize
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if side or begin + size > len(self._memory):  # a right factor is kept in separate memory
            found: _Array = np.empty(last - first, kind)
        else:
            found = self._memory[begin : begin + size].view(kind)
            self._used = begin + size
        target = memoryview(found.view(np.uint8).data)
        self._wanted.append(Wanted(target, kind.itemsize, term.gathers[side], first, last))
        return found

    # -- adding ----------------------------------------------------------------------------------------------

    def _carry_out(
        self, copy: TaskCopy, first: int, last: int, place: memoryview, skip: int, read: list[_Array]
    ) -> None:
        """Sum elements ``first`` to ``last``, and store their bytes except the first ``skip``."""
        size = dtypes.BY_CODE[copy.target_code].itemsize
        target = np.frombuffer(place, np.uint8)
        for begin in range(0, last - first, _BLOCK):
            total = self._added(copy, read, first, begin, min(_BLOCK, last - first - begin))
            self._check(copy, total, first + begin)
            data = narrowed(total, copy.target_code)
            at = begin * size - skip
            end = min(at + len(data), len(target))
            target[max(at, 0) : end] = data[max(-at, 0) : end - at]

    def _added(self, copy: TaskCopy, read: list[_Array], first: int, begin: int, count: int) -> _Array:
        """Return the sum for ``count`` elements from ``begin`` behind ``first`` on, where ``read`` begins."""
        arrays, total = iter(read), self._sum[:count]
        with np.errstate(over="ignore", invalid="ignore"):
            for number, term in enumerate(copy.terms):
                values = self._values[:count]
                if term.rank:
                    self._multiply(term, next(arrays), next(arrays), first, begin, values)
                else:
                    elements = next(arrays)[begin : begin + count]
                    values = widened(elements, term.codes[0], values)
                weight = total.dtype.type(term.weight)
                if not number:
                    np.multiply(values, weight, out=total)
                else:
                    total += np.multiply(values, weight, out=self._product[:count])
        return total

    def _multiply(self, term: Term, left: _Array, right: _Array, first: int, begin: int, out: _Array) -> None:
        """Multiply ``left`` and ``right`` for the elements from ``begin``, relative to element ``first`` of
        the copy."""
        width, rank = term.width, term.rank
        rows, columns = left.reshape(-1, rank), right.reshape(rank, width)
        at, end, origin = first + begin, first + begin + len(out), first // width
        while at < end:
            row, column = divmod(at, width)
            wide = min(width - column, end - at)
            high = 1 if column or wide < width else (end - at) // width
            part = out[at - first - begin :][: high * wide].reshape(high, wide)
            self._add_ranks(
                rows[row - origin : row - origin + high], columns[:, column : column + wide], term.codes, part
            )
            at += high * wide

    def _add_ranks(self, left: _Array, right: _Array, codes: tuple[int, ...], out: _Array) -> None:
        kind = out.dtype
        wide = np.ascontiguousarray(left)
        factors = widened(wide, codes[0], np.empty(wide.shape, kind))
        product = self._product[: out.size].reshape(out.shape)
        row = np.empty(right.shape[1], kind)
        for rank in range(len(right)):
            values = widened(np.ascontiguousarray(right[rank]), codes[1], row)
            np.multiply(factors[:, rank, None], values, out=product if rank else out)
            if rank:
                out += product

    def _check(self, copy: TaskCopy, total: _Array, first: int) -> None:
        """Record elements from ``first`` on that are NaN, infinite or too large for the dtype."""
        limit = TOO_LARGE[copy.target_code]
        if -limit < float(total.min()) and float(total.max()) < limit:
            return
        is_finite = np.isfinite(total)
        too_large = is_finite & (np.abs(total, dtype=np.float64) >= limit)
        for kind, wrong in ((NOT_FINITE, ~is_finite), (OUT_OF_RANGE, too_large)):
            left = first + np.flatnonzero(wrong)
            # Terms except products, in order; with padding the first may lack the element.
            plain = (term.gathers[0] for term in copy.terms if not term.rank) if len(left) else ()
            for source in chain.from_iterable(plain):
                is_there = _has(source, left)
                if count := int(is_there.sum()):
                    self._faults.append(BadElements(copy.copy, source.chunk, count, kind))
                    left = left[~is_there]


def _has(source: SourcePart, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a mask of the elements of the copy inside a part."""
    left = elements - source.target
    found: npt.NDArray[np.bool_] = left >= 0
    for n, step in zip(source.lengths, source.target_strides, strict=True):
        if n > 1:
            at = left // step
            found &= at < n
            left = left - at * step
    found &= left == 0
    return found


def _fill_with_zeros(stored: _Array, weight: float) -> None:
    """Fill with 0.0 times ``weight``, which may be -0.0, for elements without a source."""
    bits = stored.view(f"u{stored.itemsize}")
    bits.fill(1 << (8 * stored.itemsize - 1) if math.copysign(1.0, weight) < 0 else 0)
