"""How much tensors, and all that is below a name, changed since another step, by what a job `diff` found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp.storage.formats import dtypes

__all__ = ["Change", "changes_of"]

_LEVELS: Final = 6


@dataclass(slots=True)
class Change:
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

    def add(self, one: Mapping[str, Any]) -> None:
        """A tensor that differs, as the job has it."""
        self.differing += 1
        values, after = one["values"], one["after"]
        if values is None:
            self.added += one["kind"] == "added"
            self.unbounded += one["kind"] != "added"
        elif values["relative_l2"] is None:
            self.unbounded += values["differing"] > 0
        else:
            size = math.prod(after["shape"]) * dtypes.BY_NAME[after["dtype"]].itemsize
            self._squares += size * values["relative_l2"] ** 2


def changes_of(
    document: Mapping[str, Any], sizes: Iterable[tuple[str, int]], name_of: Callable[[str], str | None]
) -> dict[str, Change]:
    """Of each name with its bytes. ``name_of`` says to which of them a tensor belongs, if to any."""
    found = {name: Change(size) for name, size in sizes}
    for one in document["tensors"]:
        name = name_of(one["fqn"]) if one["after"] is not None else None
        if name in found:
            found[name].add(one)
    return found
