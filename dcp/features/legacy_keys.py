"""Keys of torch before 2.4, which opened mappings by the rule of lists only, in checkpoints from then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

from dcp.loading.feature import LoadFeature
from dcp.storage.formats.index import CheckpointIndex

if TYPE_CHECKING:
    from dcp.loading.call import LoadCall

__all__ = ["LegacyKeys"]


class LegacyKeys(LoadFeature):
    """Finds the entries of such checkpoints."""

    name = "legacy_keys"

    def names(self, index: CheckpointIndex) -> None:
        """Take the old keys where the checkpoint has those instead of today's."""
        call, tensors, values = self.call, index.position, index.objects.position
        if not call.flattens:
            return
        names = _stored_names(call, call.flat.values)
        absent = filterfalse(values.__contains__, filterfalse(tensors.__contains__, names))
        if next(absent, None) is None:
            return
        legacy, current = call.flattened(legacy=True), call.flat.values
        others = {fqn: value for fqn, value in legacy.values.items() if fqn not in current}
        if any(name in tensors or name in values for name in _stored_names(call, others)):
            call.flat = legacy


def _stored_names(call: LoadCall, flat: Mapping[str, Any]) -> Iterable[str]:
    """Return the checkpoint's names of the entries of ``flat`` that are loaded."""
    chosen = call.selected(flat)
    return chosen if call.renamed is None else map(call.renamed, chosen)
