"""What ``torch.distributed.checkpoint.protocol`` has, from torch 2.14 on; here in any version."""

from dcp.planners.layout.checkpointable import CheckpointableTensor

__all__ = ["CheckpointableTensor"]
