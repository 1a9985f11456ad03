"""Tensors made of others: what tells of them is compared with what the checkpoint has, not loaded."""

from __future__ import annotations

from typing import Any

from dcp.features.base import LoadSession
from dcp.planners.layout.tensor_parts import check_facts

__all__ = ["Subclasses"]


class Subclasses(LoadSession):
    """Compares such tensors; their parts are entries as any."""

    def accept(self, fqn: str, value: Any) -> bool:
        """Raise PlanError where the checkpoint has another kind of tensor."""
        flat = self.call.flat
        if fqn not in flat.facts:
            return False
        check_facts(fqn, flat.values[fqn], value)
        return True
