"""What is Lightning's own and not documented: names in its files and folders. A test compares them with the
installed version."""

from typing import Final

__all__ = ["BEFORE_REQUEUE", "LAST", "SHARDS", "VERSION"]

LAST: Final = "last"
"""What the names begin with that ``ckpt_path="last"`` finds."""
BEFORE_REQUEUE: Final = "hpc_ckpt_"
"""What the names begin with that are saved right before SLURM ends the job."""
VERSION: Final = "pytorch-lightning_version"
"""The key that every checkpoint has."""
SHARDS: Final = "meta.pt"
"""The file that makes a folder a sharded checkpoint of Lightning's own."""
