"""Names of ``torch.distributed.checkpoint.api``.

`CheckpointException` is torch's class. Where torch raises it, dcp raises a `dcp.errors.CheckpointError` that
is also a `CheckpointException`.
"""

from torch.distributed.checkpoint.api import CheckpointException

from dcp.calls.torch_names import names_of

__all__ = ["CheckpointException"]

globals()["__getattr__"] = names_of("api")
