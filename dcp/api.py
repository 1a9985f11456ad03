"""What ``torch.distributed.checkpoint.api`` has.

`CheckpointException` is torch's own; where stock torch raises it, ours raises a `dcp.errors.CheckpointError`
that is a `CheckpointException` too.
"""

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["CheckpointException"]
