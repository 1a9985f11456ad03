"""Distances of two tensors of one shape, added up tile by tile. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.inspection.values.elements import Array, decode, is_integral, is_opaque
from dcp.storage.formats.dtypes import Dtype

__all__ = ["Deltas", "ValueDifference", "are_comparable"]

_STEP: Final = 1 << 15
"""Elements at a time, so that all that is done to them finds them in the cache."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """``differing`` of ``elements`` are not the same.

    Of tensors of one dtype those are not the same whose bits differ: 0.0 and -0.0 are two things, and a NaN
    is itself. Of two dtypes their values are compared, and all NaNs are one. ``nonfinite`` of those that
    differ are NaN or infinite on a side; ``max_abs`` and ``relative_l2`` (the L2 norm of the differences
    divided by that of the first tensor; infinite where that is 0) are of the others. Both are None for bits
    without a meaning, and where no element is finite on both sides. ``nonfinite_after`` elements of the
    second tensor are NaN or infinite, whether they differ or not.
    """

    elements: int
    differing: int
    nonfinite: int
    max_abs: float | None
    relative_l2: float | None
    nonfinite_after: int = 0


def are_comparable(first: Dtype, second: Dtype) -> bool:
    """Return whether elements of one dtype can be compared with those of the other."""
    return first == second or not any(
        is_opaque(dtype) or dtype.name == "float4_e2m1fn_x2" for dtype in (first, second)
    )


class Deltas:
    """Takes pairs of arrays of one shape, as `elements.stored_dtype` says; see `are_comparable`."""

    def __init__(self, first: Dtype, second: Dtype) -> None:
        self._first, self._second = first, second
        self._compares_bits = first == second
        self._has_values = not is_opaque(first)
        self._is_wide = first == second and is_integral(first) and first.itemsize == 8
        self.elements = self.differing = 0
        self._nonfinite = self._nonfinite_after = self._finite = 0
        self._max_abs = self._delta_squares = self._squares = 0.0

    def add(self, first: Array, second: Array) -> None:
        """Add one pair."""
        first, second = first.reshape(-1), second.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(first), _STEP):
                self._add_step(first[begin : begin + _STEP], second[begin : begin + _STEP])

    def _add_step(self, first: Array, second: Array) -> None:
        self.elements += len(first)
        if not self._has_values:
            self.differing += int(np.count_nonzero(_bits_differ(first, second)))
            return
        a, b = _numbers(first, self._first), _numbers(second, self._second)
        if self._compares_bits:
            differ = _bits_differ(first, second)
        else:
            differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        count = int(np.count_nonzero(differ))
        self.differing += count
        finite, finite_after = np.isfinite(a), np.isfinite(b)
        if not (finite.all() and finite_after.all()):
            finite &= finite_after
            self._nonfinite += int(np.count_nonzero(differ & ~finite))
            self._nonfinite_after += int(np.count_nonzero(~finite_after))
            first, second, a, b = first[finite], second[finite], a[finite], b[finite]
        self._finite += len(a)
        self._squares += _square_sum(a)
        if count:
            self._add_deltas(_exact(first, second) if self._is_wide else np.abs(a - b))

    def _add_deltas(self, deltas: npt.NDArray[np.float64]) -> None:
        self._max_abs = max(self._max_abs, float(deltas.max(initial=0.0)))
        self._delta_squares += _square_sum(deltas)

    def result(self) -> ValueDifference:
        """Return the result, once all has been added."""
        relative = 0.0
        if self._delta_squares:
            relative = math.sqrt(self._delta_squares / self._squares) if self._squares else math.inf
        is_known = self._has_values and (self._finite > 0 or self.elements == 0)
        return ValueDifference(
            self.elements,
            self.differing,
            self._nonfinite,
            self._max_abs if is_known else None,
            relative if is_known else None,
            self._nonfinite_after,
        )


def _numbers(array: Array, dtype: Dtype) -> Array:
    numbers = decode(array, dtype)
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _bits_differ(first: Array, second: Array) -> npt.NDArray[np.bool_]:
    if first.itemsize == 16:
        halves = first.view(np.uint64) != second.view(np.uint64)
        either: npt.NDArray[np.bool_] = halves.reshape(-1, 2).any(axis=1)
        return either
    kind = f"u{first.itemsize}"
    differ: npt.NDArray[np.bool_] = first.view(kind) != second.view(kind)
    return differ


def _square_sum(values: npt.NDArray[Any]) -> float:
    if values.dtype.kind == "c":
        values = values.view(np.float64)
    return float(np.square(values).sum())


def _exact(first: Array, second: Array) -> npt.NDArray[np.float64]:
    """Return differences of integers of 64 bits, which float64 would round before it subtracts them."""
    up = first.astype(np.uint64) - second.astype(np.uint64)  # modulo 2**64, so right where first > second
    return np.where(first > second, up, np.uint64(0) - up).astype(np.float64)
