"""Names of ``torch.distributed.checkpoint.planner``: torch's interfaces, which dcp's planners implement."""

from torch.distributed.checkpoint.planner import *  # noqa: F403 - each name of its users

from dcp.calls.torch_names import names_of as _names_of

globals()["__getattr__"] = _names_of("planner")
