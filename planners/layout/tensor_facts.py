"""Facts of many tensors, compared with those of other tensors in one call.

Class, dtype, device, sizes, strides, requires_grad, and whether they are lazily conjugated or negated, sparse
or otherwise special: what torch.compile asks of its inputs before each call, and asked by its own guard. One
tensor costs a tenth of a microsecond; attribute by attribute it would be ten times that. Neither the contents
nor the address is among the facts, and no tensor is kept alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch

__all__ = ["TensorFacts"]

_dynamo = getattr(torch._C, "_dynamo", None)
_TensorGuards: Any = getattr(getattr(_dynamo, "guards", None), "TensorGuards", None)
"""Not public. What it compares is spelled out in tests/planners/test_known_state.py."""

_is_nested = attrgetter("is_nested")


class TensorFacts:
    """The facts of ``tensors`` when this was made, and which of them were one and the same object."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._count = len(tensors)
        self._types = frozenset(map(type, tensors))  # the guard compares classes by address: they must live
        ids = list(map(id, tensors))
        first = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))
        self._again: list[tuple[int, int]] = []
        self._is_first: list[bool] = []
        if len(first) < len(ids):
            self._again = [
                (place, first[number]) for place, number in enumerate(ids) if first[number] != place
            ]
            self._is_first = [first[number] == place for place, number in enumerate(ids)]
        self._guard: Any = None
        if _TensorGuards is not None:
            distinct = self._distinct(tensors)
            with torch.enable_grad():  # without it requires_grad would not be compared
                self._guard = _TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors``, one by one, have these facts; always False where torch cannot compare them."""
        if self._guard is None or len(tensors) != self._count:
            return False
        if not all(tensors[position] is tensors[first] for position, first in self._again):
            return False
        if any(
            map(_is_nested, tensors)
        ):  # which have no strides; torch ends the process where it asks for them
            return False
        with torch.enable_grad():
            return bool(self._guard.check(*self._distinct(tensors)))  # never true of one tensor given twice

    def _distinct(self, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        return compress(tensors, self._is_first) if self._again else tensors
