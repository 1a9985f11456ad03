"""Keys of torch before 2.4, which opened mappings by the rule of lists only, in checkpoints from then."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

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
        call, flat = self.call, self.call.flat.values
        known = ChainMap(*cast("list[dict[str, int]]", [index.position, index.objects.position]))
        if not call.flattens or _are_known(call, flat, known, all):
            return
        legacy = call.flattened(legacy=True)
        others = {fqn: value for fqn, value in legacy.values.items() if fqn not in flat}
        if _are_known(call, others, known, any):
            call.flat = legacy


def _are_known(
    call: LoadCall, flat: Mapping[str, Any], known: Mapping[str, int], among: Callable[[Iterable[bool]], bool]
) -> bool:
    """Return whether the checkpoint has ``all`` or ``any`` of the entries ``flat`` that are loaded."""
    chosen = call.selected(flat)
    return among(map(known.__contains__, chosen if call.renamed is None else map(call.renamed, chosen)))
