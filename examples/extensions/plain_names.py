"""A planner by one step of ours: what torch.compile puts before names is left out of the checkpoint."""

from __future__ import annotations

from typing import Any

import dcp

_COMPILED = "_orig_mod."


class PlainNamesPlanner(dcp.DefaultSavePlanner):
    """``dcp.save(state, planner=PlainNamesPlanner())``: models load into what is compiled and what is not."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        """The step in which a planner gets to know what there is to save; the others take it from there."""
        super().set_up_planner(plain_names(state_dict), *args, **options)


def plain_names(value: Any) -> Any:
    """The same nested state dict, by names as they are without torch.compile."""
    if not isinstance(value, dict):
        return value
    return {
        key.replace(_COMPILED, "") if isinstance(key, str) else key: plain_names(item)
        for key, item in value.items()
    }
