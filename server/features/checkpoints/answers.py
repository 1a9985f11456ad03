"""For pages that helper D replaces: deleted when that is merged."""

from dcp.server.records.checkpoints import Checkpoint as CheckpointAnswer
from dcp.server.records.checkpoints import CheckpointDetail as CheckpointDetailAnswer

__all__ = ["CheckpointAnswer", "CheckpointDetailAnswer"]
