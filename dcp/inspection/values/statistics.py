"""Statistics of a checkpoint's tensors, in one pass and bounded memory. Torch-free.

Types of 8 and 16 bits are counted by code (256 or 65,536), which gives all figures exactly. For other types
the moments of each step are merged by the formula of Chan, Golub and LeVeque ("Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances", 1979), without cancellation. Sums are float64.

Histograms count magnitudes by sign and power of two, from the exponent bits. They need no range in advance,
can be merged over blocks and tensors, and are folded into the requested bins at the end. Linear histograms
have bins of one power-of-two width, which doubles as the range grows, and are exact after one pass too.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.entries import first_of_ties
from dcp.inspection.values.elements import Array, decode, is_integral, is_opaque, stored_dtype
from dcp.inspection.values.tensor_reading import ReportBytes, TensorReader, Tile, opened
from dcp.planners.load.selection import Patterns
from dcp.storage.errors import OptionError
from dcp.storage.formats.dtypes import Dtype

_MIN_BINS: Final = 3

_STEP: Final = 1 << 15
"""Elements processed at a time, within the cache."""

_COUNTED: Final = 1 << 15
"""Number of elements from which counting 16-bit codes is faster than computing with values."""

_WIDE_SPAN: Final = 15
"""Powers of two below the largest magnitude that a histogram separates from zero."""

_LINEAR: Final = 512
"""Maximum number of bins of linear counts while counting."""

_LOWEST: Final = 1100
"""Offset from an exponent to a position: doubles have exponents from -1074 to 1023."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of finite values ``counts[i]`` between ``edges[i]`` and ``edges[i + 1]``, which are powers of
    two.

    A bin includes the edge nearer to 0 and excludes the other. The bin around 0 excludes both edges and
    contains all smaller magnitudes.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearHistogram:
    """Number of finite values ``counts[i]`` from ``edges[i]`` up to, but excluding, ``edges[i + 1]``.

    All bins have one power-of-two width; edges are multiples of the width.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ElementStatistics:
    """Statistics of ``count`` elements; complex tensors count by magnitude.

    ``min``, ``max``, ``mean``, ``std``, ``norm`` (L2) and histograms use finite elements, and are None
    without any. ``std`` has Bessel's correction; None for one element. Bools are 0 and 1. ``min`` and ``max``
    of integers are exact. Values beyond float64 are infinite. A complex number with a NaN part is NaN.
    """

    count: int
    nans: int
    infs: int
    zeros: int
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    norm: float | None
    histogram: Histogram | None
    linear: LinearHistogram | None = None


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of one tensor; None for dtypes without numeric values."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: ElementStatistics | None


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """Statistics of each tensor and of all together. ``bytes_read`` counts shared payloads once."""

    url: str
    tensors: tuple[TensorStatistics, ...]
    total: ElementStatistics
    bytes_read: int


@plain_errors
def statistics(
    checkpoint_id: str | os.PathLike[str] | TensorReader,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    bins: int = 32,
    storage_options: Mapping[str, Any] | None = None,
    progress: ReportBytes | None = None,
) -> CheckpointStatistics:
    """Read the tensors of a checkpoint and describe their values.

    Tied tensors count for each name, and are read once. Memory is bounded by about 64 MiB.

    Args:
        checkpoint_id: Path or URL of a checkpoint, torch.save file, safetensors file or Hugging Face folder;
            or an open reader, which stays open.
        only: Names or shell globs, as for `dcp.load`; a name includes everything below.
        exclude: Names or shell globs to leave out.
        bins: Largest number of histogram bins.
        storage_options: Options of the URL's file system, as for `dcp.save`.
        progress: Function of (bytes done, total bytes).

    Returns:
        Statistics by tensor in order, and of all tensors together.

    Raises:
        PlanError: Nothing is selected, or ``bins`` is too small.
        CheckpointNotFoundError: No committed checkpoint exists there.
        CorruptCheckpointError: Stored bytes differ from the committed checksums.
        StorageError: The storage cannot be read.
    """
    if bins < _MIN_BINS:
        raise OptionError(f"bins must be at least {_MIN_BINS}, not {bins}")
    total = Summary()
    found: dict[int, ElementStatistics] = {}
    with opened(checkpoint_id, storage_options) as reader:
        index, rows = reader.index, reader.rows(only, exclude)
        firsts = first_of_ties(index, rows)
        times = Counter(firsts)
        described = [row for row in times if not is_opaque(index.dtype(row))]
        for row, summary in _summaries(reader, described, progress):
            found[row] = summary.result(bins)
            total.merge(summary, times[row])
        tensors = tuple(
            TensorStatistics(index.fqns[row], index.dtype(row).name, index.shape(row), found.get(first))
            for row, first in zip(rows, firsts, strict=True)
        )
        return CheckpointStatistics(reader.name, tensors, total.result(bins), reader.bytes_read)


def statistics_of_row(reader: TensorReader, row: int, *, bins: int = 32) -> ElementStatistics | None:
    """Return the statistics of the tensor in a row of an open checkpoint; None without numeric values."""
    if is_opaque(reader.index.dtype(row)):
        return None
    return next(summary for _, summary in _summaries(reader, [row], None)).result(bins)


def _summaries(
    reader: TensorReader, rows: list[int], progress: ReportBytes | None
) -> Iterator[tuple[int, Summary]]:
    """Yield summaries of the tensors ``rows``, each once."""
    yield from ((row, Summary()) for row in rows if not reader.tensor_bytes(row))
    for row, tiles in reader.tiles_of(rows, progress):
        yield row, _summary_of(tiles, reader.index.dtype(row), math.prod(reader.index.shape(row)))


def _summary_of(tiles: Iterator[Tile], dtype: Dtype, elements: int) -> Summary:
    summary = Summary()
    if dtype.itemsize > 2 or (dtype.itemsize == 2 and elements < _COUNTED):
        for tile in tiles:
            summary.add(decode(tile.array, dtype))
        return summary
    codes = np.zeros(256**dtype.itemsize, np.int64)
    step = max(_STEP, 4 * len(codes))
    for tile in tiles:
        flat = tile.array.reshape(-1).view(f"u{dtype.itemsize}")
        for begin in range(0, len(flat), step):
            codes += np.bincount(flat[begin : begin + step], minlength=len(codes))
    values = _values_of_codes(dtype)
    summary.add_counted(values, np.repeat(codes, len(values) // len(codes)))
    if is_integral(dtype) and summary.min is not None and summary.max is not None:
        summary.min, summary.max = int(summary.min), int(summary.max)
    return summary


class Summary:
    """Mergeable facts about numbers."""

    def __init__(self) -> None:
        self.count = self.nans = self.infs = self.zeros = self.finite = 0
        self.min: float | int | None = None
        self.max: float | int | None = None
        self._mean = self._squares = 0.0  # squares: sum of squared differences from the mean
        self._binades = np.zeros((2, 2 * _LOWEST), np.int64)  # by sign and exponent
        self._linear = LinearCounts()

    def merge(self, other: Summary, times: int = 1) -> None:
        """Add the summary of other numbers, repeated ``times``."""
        for name in ("count", "nans", "infs", "zeros"):
            setattr(self, name, getattr(self, name) + getattr(other, name) * times)
        self._binades += other._binades * times
        self._linear.merge(other._linear, times)
        for _ in range(times):
            self._merge_moments(other.finite, other._mean, other._squares)
        self._widen(other.min, other.max)

    def _merge_moments(self, count: int, mean: float, squares: float) -> None:
        if count == 0:
            return
        total = self.finite + count
        delta = mean - self._mean
        self._squares += squares + delta * delta * self.finite * count / total
        self._mean += delta * count / total
        self.finite = total

    def _widen(self, low: float | int | None, high: float | int | None) -> None:
        if low is not None and high is not None:
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)

    # -- numbers ---------------------------------------------------------------------------------------------

    def add(self, values: Array) -> None:
        """Add an array of any shape and any numeric type of numpy."""
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(flat), _STEP):
                self._add_step(flat[begin : begin + _STEP])

    def _add_step(self, values: Array) -> None:
        self.count += len(values)
        if values.dtype.kind == "c":
            values = np.abs(self._finite(values).astype(np.complex128))
        if len(values) == 0:
            return
        low, high = values.min(), values.max()
        if values.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            values = self._finite(values)
            if len(values) == 0:
                return
            low, high = values.min(), values.max()
        self._widen(low.item(), high.item())
        wide = values.astype(np.float64)
        self._count_binades(values if values.dtype == np.float32 else wide)
        self._linear.add(wide, float(low), float(high))
        mean = float(wide.mean())
        wide -= mean
        wide *= wide
        self._merge_moments(len(wide), mean, float(wide.sum()))

    def _finite(self, values: Array) -> Array:
        nans = int(np.count_nonzero(np.isnan(values)))
        finite = values[np.isfinite(values)]
        self.nans += nans
        self.infs += len(values) - len(finite) - nans
        return finite

    def _count_binades(self, values: Array) -> None:
        """Count finite floats of 32 or 64 bits by sign and exponent; zeros for themselves."""
        zeros = len(values) - int(np.count_nonzero(values))
        self.zeros += zeros
        if values.dtype == np.float32:
            fields, bias = np.bincount(values.view(np.uint32) >> 23, minlength=512).reshape(2, 256), 127
        else:
            exponents = (values.view(np.uint64) >> np.uint64(52)).view(np.int64)
            fields, bias = np.bincount(exponents, minlength=4096).reshape(2, 2048), 1023
        first = _LOWEST + 1 - bias
        self._binades[:, first : first + fields.shape[1] - 2] += fields[:, 1:-1]
        if int(fields[:, 0].sum()) > zeros:
            is_small = (np.abs(values) < np.finfo(values.dtype).smallest_normal) & (values != 0)
            self._add_binades(values[is_small], 1)

    def add_counted(self, values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> None:
        """Add each of ``values`` as often as ``counts`` says."""
        there = counts > 0
        values, counts = values[there], counts[there]
        self.count += int(counts.sum())
        self.nans += int(counts[np.isnan(values)].sum())
        self.infs += int(counts[np.isinf(values)].sum())
        self.zeros += int(counts[values == 0].sum())
        finite = np.isfinite(values)
        values, counts = values[finite], counts[finite]
        if len(values) == 0:
            return
        number = int(counts.sum())
        mean = float((values * counts).sum() / number)
        self._merge_moments(number, mean, float((np.square(values - mean) * counts).sum()))
        self._widen(float(values.min()), float(values.max()))
        self._add_binades(values[values != 0], counts[values != 0])
        self._linear.add(values, float(values.min()), float(values.max()), counts)

    def _add_binades(self, values: Array, counts: Any) -> None:
        places = np.signbit(values).astype(np.int64), np.frexp(values)[1] - 1 + _LOWEST
        np.add.at(self._binades, places, counts)

    # -- results ---------------------------------------------------------------------------------------------

    def result(self, bins: int) -> ElementStatistics:
        """Return the statistics, with a histogram of at most ``bins`` bins."""
        known = self.finite > 0
        return ElementStatistics(
            self.count,
            self.nans,
            self.infs,
            self.zeros,
            self.min,
            self.max,
            self._mean if known else None,
            _root(self._squares / (self.finite - 1)) if self.finite > 1 else None,
            _root(self._squares + self.finite * self._mean * self._mean) if known else None,
            self._histogram(bins) if known else None,
            self._linear.result(bins) if known else None,
        )

    def _histogram(self, bins: int) -> Histogram:
        there = np.flatnonzero(self._binades.any(axis=0))
        if len(there) == 0:
            return Histogram((0.0, 0.0), (self.zeros,))
        tops = [int(found[-1]) + 1 if len(found := np.flatnonzero(side)) else 0 for side in self._binades]
        around, width = _resolution(int(there[0]), [top for top in tops if top], bins - 1)
        edges: list[list[float]] = []
        counts: list[list[int]] = []
        for side, top in zip(self._binades, tops, strict=True):
            lows = range(around, top, width)
            counts.append([int(side[low : low + width].sum()) for low in lows])
            reached = [around, *(low + width for low in lows)] if top else []
            powers = (exponent - _LOWEST for exponent in reached)
            edges.append([math.inf if power > 1023 else math.ldexp(1.0, power) for power in powers])
        (above, below), (positive, negative) = edges, counts
        middle = self.zeros + int(self._binades[:, :around].sum())
        return Histogram(
            (*(-edge for edge in below[::-1] or [-0.0]), *(above or [0.0])),
            (*negative[::-1], middle, *positive),
        )


class LinearCounts:
    """Counts of finite numbers in up to `_LINEAR` bins of the width ``2 ** exponent``, from the bin number
    ``first`` on: the bin ``n`` begins at ``n`` widths."""

    def __init__(self) -> None:
        self._exponent = 0
        self._first = 0
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def add(
        self,
        values: npt.NDArray[np.float64],
        low: float,
        high: float,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add ``values`` from ``low`` to ``high``, each as often as ``counts`` says."""
        exponent = self._width(low, high)
        self._cover(exponent, _bin_of(low, exponent), _bin_of(high, exponent))
        exponent = self._exponent
        with np.errstate(under="ignore"):  # negligible in relation to a bin's width
            scaled = values * 2.0**-exponent if abs(exponent) < 1000 else np.ldexp(values, -exponent)
        places = np.floor(scaled)
        places -= self._first
        number = places.astype(np.int64)
        if counts is None:
            self._counts += np.bincount(number, minlength=len(self._counts))
        else:
            np.add.at(self._counts, number, counts)

    def merge(self, other: LinearCounts, times: int = 1) -> None:
        """Add the counts of ``other``, ``times``."""
        if not len(other._counts):
            return
        shift = max(0, self._exponent - other._exponent) if len(self._counts) else 0
        exponent = other._exponent + shift
        self._cover(exponent, other._first >> shift, (other._first + len(other._counts) - 1) >> shift)
        shift = self._exponent - other._exponent
        places = ((other._first + np.arange(len(other._counts))) >> shift) - self._first
        np.add.at(self._counts, places, other._counts * times)

    def result(self, bins: int) -> LinearHistogram:
        """Return at most ``bins`` bins, the first and the last of which have values."""
        there = np.flatnonzero(self._counts)
        low, high = self._first + int(there[0]), self._first + int(there[-1])
        shift = 0
        while (high >> shift) - (low >> shift) >= bins:
            shift += 1
        counts = np.zeros((high >> shift) - (low >> shift) + 1, np.int64)
        np.add.at(counts, ((self._first + there) >> shift) - (low >> shift), self._counts[there])
        numbers = range(low >> shift, (high >> shift) + 2)
        edges = (_ldexp(number, self._exponent + shift) for number in numbers)
        return LinearHistogram(tuple(edges), tuple(counts.tolist()))

    def _width(self, low: float, high: float) -> int:
        """Return the width exponent for all earlier values and for ``low`` to ``high``."""
        half = high / 2 - low / 2  # the sum may exceed the range of a float
        largest = math.frexp(max(abs(low), abs(high)))[1]
        exponent = max(math.frexp(half)[1] + 2 - _LINEAR.bit_length(), largest - 52, -1074)
        return max(exponent, self._exponent) if len(self._counts) else exponent

    def _cover(self, exponent: int, low: int, high: int) -> None:
        """Extend the bins to ``low`` to ``high`` of width ``2 ** exponent``, joining bins as needed."""
        if not len(self._counts):
            self._exponent, self._first = exponent, low
            self._counts = np.zeros(high - low + 1, np.int64)
            return
        shift = exponent - self._exponent
        first, last = self._first >> shift, (self._first + len(self._counts) - 1) >> shift
        begin, end, more = min(first, low), max(last, high), 0
        while (end >> more) - (begin >> more) >= _LINEAR:
            more += 1
        if shift + more == 0 and begin == self._first and end == last:
            return
        joined = np.zeros((end >> more) - (begin >> more) + 1, np.int64)
        old = ((self._first + np.arange(len(self._counts))) >> (shift + more)) - (begin >> more)
        np.add.at(joined, old, self._counts)
        self._exponent, self._first, self._counts = exponent + more, begin >> more, joined


def _bin_of(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent))


def _ldexp(number: int, exponent: int) -> float:
    """Return ``number * 2 ** exponent``, infinite on overflow."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def _resolution(bottom: int, tops: list[int], bins: int) -> tuple[int, int]:
    """Return (exponent up to which magnitudes count as zero, powers of two in a bin) for ``bins`` other bins.

    ``tops`` are the largest positive and negative exponents, ``bottom`` the smallest exponent.
    """

    def needed(exponent: int, width: int) -> int:
        return sum(max(0, -((exponent - top) // width)) for top in tops)

    around, width = max(bottom, max(tops) - _WIDE_SPAN), 1
    while needed(around, width) > bins:
        width += 1
    while around > bottom and needed(around - 1, width) <= bins:
        around -= 1
    return around, width


def _root(square: float) -> float:
    return math.inf if math.isnan(square) else math.sqrt(square)


@cache
def _values_of_codes(dtype: Dtype) -> npt.NDArray[np.float64]:
    """Return the values of all codes of an 8-bit or 16-bit type; two for each code of packed types."""
    codes = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    values = codes != 0 if dtype.name == "bool" else decode(codes.view(stored_dtype(dtype)), dtype)
    with np.errstate(invalid="ignore"):  # a conversion changes the bits of a signalling NaN
        return values.astype(np.float64).reshape(-1)
