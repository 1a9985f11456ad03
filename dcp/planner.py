"""Names of ``torch.distributed.checkpoint.planner``: torch's own interfaces, which our planners implement."""

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp.calls.torch_names import names_of

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]

if not TYPE_CHECKING:
    __getattr__ = names_of("planner")
