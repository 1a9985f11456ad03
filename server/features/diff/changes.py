"""Changes since the step before, for the areas on the page of a checkpoint, as a job ``diff`` found them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from dcp.server.catalog.values import short_name
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.pages.requests import FormDep
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.diff import feature
from dcp.server.features.diff.job import DiffKind, DiffParams
from dcp.storage.formats import dtypes

if TYPE_CHECKING:
    from dcp.inspection.values.difference import TensorDifference, TensorFacts
    from dcp.server.features.diff.differences import ContentDifference

__all__ = ["WeightChange", "changes_below", "changes_of_list"]

_LEVELS: Final = 6


@dataclass(slots=True)
class WeightChange:
    """Change of a tensor, or of all below a name. ``differing``, ``added`` and ``unbounded`` count tensors;
    the last have no relative distance, since they had been all 0, are not finite, or have another shape."""

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
        """Count a tensor that differs; ``after`` are its facts."""
        self.differing += 1
        if one.values is None:
            self.added += one.kind == "added"
            self.unbounded += one.kind != "added"
        elif one.values.relative_l2 is None or one.values.nonfinite:
            self.unbounded += one.values.differing > 0
        else:
            size = math.prod(after.shape) * dtypes.BY_NAME[after.dtype].itemsize
            self._squares += size * one.values.relative_l2**2


def changes_below(found: ContentDifference, prefix: str, nodes: Any) -> dict[str, WeightChange]:
    """The changes of the nodes of one level of the tree, by name."""
    start = f"{prefix}." if prefix else ""

    def name_of(fqn: str) -> str | None:
        return fqn[len(start) :].partition(".")[0] if fqn.startswith(start) else None

    return _changes(found, {node.name: node.bytes for node in nodes}, name_of)


def changes_of_list(found: ContentDifference, entries: Any) -> dict[str, WeightChange]:
    """The changes of tensors, by name."""
    return _changes(found, {entry.fqn: entry.bytes for entry in entries}, short_name)


def _changes(
    found: ContentDifference, sizes: dict[str, int], name_of: Callable[[str], str | None]
) -> dict[str, WeightChange]:
    """The change of each name in ``sizes``, to one of which ``name_of`` assigns each tensor."""
    changes = {name: WeightChange(size) for name, size in sizes.items()}
    for one in found.tensors:
        name = None if one.after is None else name_of(one.fqn)
        if name in changes and one.after is not None:
            changes[name].add(one, one.after)
    return changes


@feature.form("/checkpoints/{checkpoint_id}/change", scope="read")
def change_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str:
    """Compare it with another checkpoint, value by value, and return to its page."""
    before = form.text("before")
    if not before.isdecimal() or len(before) > 18:
        raise UnprocessableError("before: the number of a checkpoint", field="before")
    ask.submit(DiffKind, DiffParams(a=int(before), b=checkpoint_id))
    query = {"colour": "change", **({"prefix": prefix} if (prefix := form.text("prefix")) else {})}
    return f"/checkpoints/{checkpoint_id}?{urlencode(query)}#tensors"
