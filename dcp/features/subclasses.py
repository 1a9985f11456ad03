"""Tensor subclasses made of other tensors: their facts are compared with the checkpoint's, not loaded."""

from __future__ import annotations

from typing import Any

from dcp.loading.feature import LoadFeature
from dcp.planners.flatten import check_facts

__all__ = ["Subclasses"]


class Subclasses(LoadFeature):
    """Compares such tensors; their parts are entries as any."""

    name = "subclasses"

    def takes_part(self) -> bool:
        """Return whether there are such tensors."""
        return bool(self.call.flat.facts)

    def accept(self, fqn: str, value: Any) -> bool:
        """Raise PlanError where the checkpoint has another kind of tensor."""
        flat = self.call.flat
        if fqn not in flat.facts:
            return False
        check_facts(fqn, flat.values[fqn], value)
        return True
