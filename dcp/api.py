"""Names of ``torch.distributed.checkpoint.api``.

`CheckpointException` is torch's own; where stock torch raises it, ours raises a `dcp.errors.CheckpointError`
that is a `CheckpointException` too.
"""

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException

from dcp.calls.torch_names import names_of

__all__ = ["CheckpointException"]

if not TYPE_CHECKING:
    __getattr__ = names_of("api")
