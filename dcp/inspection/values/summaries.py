"""Summaries of many numbers, found in one pass: moments, counts, a histogram. Torch-free.

Types of 8 and 16 bits are counted: how often each of the 256 or 65,536 codes is there says everything else
exactly, at a nanosecond or two an element. Of the rest each step has its moments, which are merged by the
formula of Chan, Golub and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979), so that nothing is lost by subtracting large sums. All sums are float64.

Histograms are over the binary logarithm of magnitudes, by sign: one count for each power of two, which the
exponent bits tell. So they need neither the range beforehand nor a second pass, add up over blocks and
tensors, and show small weights and outliers alike. They are folded into the wanted number of bins at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dcp.inspection.values.elements import Array, decode, is_integral, stored_dtype
from dcp.storage.formats.dtypes import Dtype

__all__ = ["MIN_BINS", "Collector", "ElementStatistics", "Histogram", "Summary"]

MIN_BINS: Final = 3

_STEP: Final = 1 << 15
"""Elements at a time, so that all that is done to them finds them in the cache."""

_COUNTED: Final = 1 << 15
"""From as many elements on counting codes of 16 bits is cheaper than calculating with values."""

_WIDE_SPAN: Final = 15
"""Powers of two below the largest magnitude that a histogram tells apart from zero."""

_LOWEST: Final = 1100
"""What is added to an exponent to make it a position: doubles have -1074 to 1023."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts[i]`` finite values lie between ``edges[i]`` and ``edges[i + 1]``, which are powers of two.

    By magnitude: a bin includes the edge that is nearer to 0, and excludes the other. The bin around 0
    excludes both, and has all that is too small for the others.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ElementStatistics:
    """The statistics of ``count`` elements; those of complex tensors stand for their magnitudes.

    ``min``, ``max``, ``mean``, ``std``, ``norm`` (L2) and the histogram are of the finite elements, and None
    where there are none. ``std`` has Bessel's correction, as torch's; None for a single element. Bools are 0
    and 1. ``min`` and ``max`` of integers are exact. What float64 cannot hold is infinite. A complex
    number with a part that is NaN is NaN.
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


class Summary:
    """Mergeable facts about numbers."""

    def __init__(self) -> None:
        self.count = self.nans = self.infs = self.zeros = self.finite = 0
        self.min: float | int | None = None
        self.max: float | int | None = None
        self._mean = self._squares = 0.0  # squares: sum of squared differences from the mean
        self._binades = np.zeros((2, 2 * _LOWEST), np.int64)  # by sign and exponent

    def merge(self, other: Summary, times: int = 1) -> None:
        """Add what is known of other numbers, which are there ``times``."""
        self.count += other.count * times
        self.nans += other.nans * times
        self.infs += other.infs * times
        self.zeros += other.zeros * times
        self._binades += other._binades * times
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
            small = values[(np.abs(values) < np.finfo(values.dtype).smallest_normal) & (values != 0)]
            exponents = np.frexp(small)[1] - 1 + _LOWEST
            np.add.at(self._binades, (np.signbit(small).astype(np.int64), exponents), 1)

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
        large = values != 0
        places = np.signbit(values[large]).astype(np.int64), np.frexp(values[large])[1] - 1 + _LOWEST
        np.add.at(self._binades, places, counts[large])

    # -- results ---------------------------------------------------------------------------------------------

    def result(self, bins: int) -> ElementStatistics:
        """Return all of it, with a histogram of at most ``bins`` bins."""
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
        )

    def _histogram(self, bins: int) -> Histogram:
        there = np.flatnonzero(self._binades.any(axis=0))
        if len(there) == 0:
            return Histogram((0.0, 0.0), (self.zeros,))
        tops = [int(found[-1]) + 1 for side in self._binades if len(found := np.flatnonzero(side))]
        around, width = _resolution(int(there[0]), tops, bins - 1)
        edges: list[list[float]] = []
        counts: list[list[int]] = []
        for side in self._binades:
            last = int(np.flatnonzero(side)[-1]) + 1 if side.any() else 0
            lows = range(around, last, width)
            counts.append([int(side[low : low + width].sum()) for low in lows])
            reached = [around, *(low + width for low in lows)] if last else []
            edges.append([_power(exponent - _LOWEST) for exponent in reached])
        (above, below), (positive, negative) = edges, counts
        middle = self.zeros + int(self._binades[:, :around].sum())
        return Histogram(
            (*(-edge for edge in below[::-1] or [-0.0]), *(above or [0.0])),
            (*negative[::-1], middle, *positive),
        )


def _resolution(bottom: int, tops: list[int], bins: int) -> tuple[int, int]:
    """Return (exponent up to which magnitudes count as around zero, powers of two in a bin) for ``bins``
    other bins.

    ``tops`` are the ends of positive and negative magnitudes, ``bottom`` is the smallest that there is.
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


def _power(exponent: int) -> float:
    return math.inf if exponent > 1023 else math.ldexp(1.0, exponent)


class Collector:
    """Takes the stored elements of one tensor of ``elements`` elements, tile by tile."""

    def __init__(self, dtype: Dtype, elements: int) -> None:
        self._dtype = dtype
        self._summary = Summary()
        self._codes: npt.NDArray[np.int64] | None = None
        if dtype.itemsize == 1 or (dtype.itemsize == 2 and elements >= _COUNTED):
            self._codes = np.zeros(256**dtype.itemsize, np.int64)

    def add(self, array: Array) -> None:
        """Take elements as `dcp.inspection.values.elements.stored_dtype` says."""
        if self._codes is None:
            self._summary.add(decode(array, self._dtype))
            return
        codes = array.reshape(-1).view(f"u{array.itemsize}")
        step = max(_STEP, 4 * len(self._codes))
        for begin in range(0, len(codes), step):
            self._codes += np.bincount(codes[begin : begin + step], minlength=len(self._codes))

    def summary(self) -> Summary:
        """Return the summary, once all has been added."""
        codes, summary = self._codes, self._summary
        if codes is not None:
            values = _values_of_codes(self._dtype)
            summary.add_counted(values, np.repeat(codes, len(values) // len(codes)))
            self._codes = None
            if is_integral(self._dtype) and summary.min is not None and summary.max is not None:
                summary.min, summary.max = int(summary.min), int(summary.max)
        return summary


@cache
def _values_of_codes(dtype: Dtype) -> npt.NDArray[np.float64]:
    """Return the values of all codes of a type of 8 or 16 bits; two each where it packs two into one."""
    codes = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    values = codes != 0 if dtype.name == "bool" else decode(codes.view(stored_dtype(dtype)), dtype)
    with np.errstate(invalid="ignore"):  # what a signalling NaN makes of a conversion
        return values.astype(np.float64).reshape(-1)
