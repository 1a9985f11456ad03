"""Names of ``torch.distributed.checkpoint.logger``: torch's own logging hooks."""

from torch.distributed.checkpoint.logger import *  # noqa: F403 - each name of its users

from dcp.calls.torch_names import names_of

globals()["__getattr__"] = names_of("logger")
