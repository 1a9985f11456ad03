"""How much tensors, and all that is below a name, changed since another step, by what a job `diff` found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dcp.storage.formats import dtypes

if TYPE_CHECKING:
    from dcp.inspection.values.difference import TensorDifference, TensorFacts

__all__ = ["WeightChange", "changes_of"]

_LEVELS: Final = 6


@dataclass(slots=True)
class WeightChange:
    """``differing``, ``added`` and ``unbounded`` are counts of tensors: of the last no relative distance is
    known, since they had been all 0, are not finite, or have another shape."""

    total_bytes: int
    differing: int = 0
    added: int = 0
    unbounded: int = 0
    _squares: float = 0.0

    @property
    def relative_l2(self) -> float:
        """The root mean square of the tensors' relative L2 distances, weighed by bytes."""
        return math.sqrt(self._squares / self.total_bytes) if self.total_bytes else 0.0

    @property
    def colour(self) -> str:
        """A class of CSS: a level for each power of ten, the last from 0.1 on."""
        if self.added and self.added == self.differing:
            return "new"
        if self.unbounded:
            return f"q{_LEVELS}"
        if not self.differing or not self.relative_l2:
            return "q1" if self.differing else "q0"
        return f"q{min(_LEVELS, max(1, _LEVELS + 1 + math.floor(math.log10(self.relative_l2))))}"

    def add(self, one: TensorDifference, after: TensorFacts) -> None:
        """A tensor that differs, and what it is after."""
        self.differing += 1
        if one.values is None:
            self.added += one.kind == "added"
            self.unbounded += one.kind != "added"
        elif one.values.relative_l2 is None or one.values.nonfinite:
            self.unbounded += one.values.differing > 0
        else:
            size = math.prod(after.shape) * dtypes.BY_NAME[after.dtype].itemsize
            self._squares += size * one.values.relative_l2**2


def changes_of(
    tensors: Iterable[TensorDifference],
    sizes: Iterable[tuple[str, int]],
    name_of: Callable[[str], str | None],
) -> dict[str, WeightChange]:
    """Of each name with its bytes. ``name_of`` says to which of them a tensor belongs, if to any."""
    found = {name: WeightChange(size) for name, size in sizes}
    for one in tensors:
        name = None if one.after is None else name_of(one.fqn)
        if name in found and one.after is not None:
            found[name].add(one, one.after)
    return found
