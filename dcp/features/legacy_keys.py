"""Checkpoints with the keys of torch before 2.4, which opened mappings by the rule of lists only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import filterfalse
from typing import Any

from dcp.features.base import LoadSession
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["LegacyKeys"]


class LegacyKeys(LoadSession):
    """Finds the entries of such checkpoints."""

    def names(self, index: CheckpointIndex) -> None:
        """Take the old keys where the checkpoint has those instead of today's."""
        call, tensors, values = self.call, index.position, index.objects.position

        def stored(flat: Mapping[str, Any]) -> Iterable[str]:
            chosen = call.selected(flat)
            return chosen if call.renamed is None else map(call.renamed, chosen)

        absent = filterfalse(values.__contains__, filterfalse(tensors.__contains__, stored(call.flat.values)))
        if not call.flattens or next(absent, None) is None:
            return
        legacy, current = call.flattened(legacy=True), call.flat.values
        others = {fqn: value for fqn, value in legacy.values.items() if fqn not in current}
        if any(name in tensors or name in values for name in stored(others)):
            call.flat = legacy
