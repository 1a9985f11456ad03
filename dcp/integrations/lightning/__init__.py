"""Lightning's Trainer saves and resumes through dcp: a plug-in, a strategy, and a callback::

    Trainer(plugins=[DcpCheckpointIO()], callbacks=[RankStates(), ModelCheckpoint(...)])
    Trainer(strategy=DcpModelParallelStrategy(...), callbacks=[RankStates(), ModelCheckpoint(...)])

`DcpCheckpointIO` is for one process and DDP. `ModelParallelStrategy` (FSDP2, tensor parallelism) never asks a
`CheckpointIO`: `DcpModelParallelStrategy` takes its place. When to save and what to keep stays
ModelCheckpoint's; a checkpoint is a folder of the name that it gives.
"""

try:
    import lightning.pytorch  # noqa: F401 - so that a missing one is told with what brings it
except ModuleNotFoundError as missing:
    if missing.name not in ("lightning", "lightning.pytorch"):
        raise
    raise ModuleNotFoundError(
        "dcp.integrations.lightning needs lightning: pip install 'dcphub[lightning]'", name=missing.name
    ) from missing

from dcp.integrations.lightning.checkpoint_io import DcpCheckpointIO
from dcp.integrations.lightning.rank_states import RankStates
from dcp.integrations.lightning.strategy import DcpModelParallelStrategy, DcpStrategyMixin

__all__ = ["DcpCheckpointIO", "DcpModelParallelStrategy", "DcpStrategyMixin", "RankStates"]
