"""Names of ``torch.distributed.checkpoint.api``.

`CheckpointException` is torch's own; where stock torch raises it, ours raises a `dcp.errors.CheckpointError`
that is a `CheckpointException` too.
"""

from torch.distributed.checkpoint.api import CheckpointException

from dcp.calls.torch_names import names_of

__all__ = ["CheckpointException"]

globals()["__getattr__"] = names_of("api")
