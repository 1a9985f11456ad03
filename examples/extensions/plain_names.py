"""A save planner: remove the prefix of torch.compile from the names in a checkpoint."""

from __future__ import annotations

from typing import Any

import dcp

_COMPILED = "_orig_mod."


class PlainNamesPlanner(dcp.DefaultSavePlanner):
    """Save names without ``_orig_mod.``, so that compiled and uncompiled models load the checkpoint."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        """Rename the entries before planning; the inherited steps do the rest."""
        super().set_up_planner(plain_names(state_dict), *args, **options)


def plain_names(value: Any) -> Any:
    """Return the nested state dict ``value`` with the names of an uncompiled model."""
    if not isinstance(value, dict):
        return value
    return {
        key.replace(_COMPILED, "") if isinstance(key, str) else key: plain_names(item)
        for key, item in value.items()
    }
