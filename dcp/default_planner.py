"""What ``torch.distributed.checkpoint.default_planner`` has.

The planners are ours; the functions on torch's plan objects are torch's own, for custom planners that call
them.
"""

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)

from dcp.calls.torch_names import names_of
from dcp.loading.planner import DefaultLoadPlanner
from dcp.loading.whole import EmptyStateLoadPlanner as _EmptyStateDictLoadPlanner
from dcp.planners.save.planner import DefaultSavePlanner

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

if not TYPE_CHECKING:
    __getattr__ = names_of("default_planner")
