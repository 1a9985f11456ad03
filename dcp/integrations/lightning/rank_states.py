"""`RankStates`: what Lightning saves of one rank alone, of every rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

from dcp.errors import OptionError
from dcp.integrations.lightning.checkpoint_io import BYPASSED, DcpCheckpointIO
from dcp.integrations.lightning.strategy import DcpStrategyMixin
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import gathered

__all__ = ["RankStates"]

_KEY = "rank_states"


class RankStates(Callback):
    """Saves of every rank the random generators, which Lightning does not save, and the loops with the
    positions of stateful data loaders, which it saves of rank 0 alone::

        trainer = Trainer(..., callbacks=[RankStates()])

    On another number of ranks the generators stay as they are and the loops are rank 0's, with a warning. In
    the middle of an epoch a run goes on with the same data only if the data loader has a state, as
    torchdata's `StatefulDataLoader` has: without one Lightning begins the epoch's order anew.
    """

    def __init__(self) -> None:
        self._random = RandomState()
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise OptionError for a `DcpCheckpointIO` that the strategy would never ask."""
        strategy = trainer.strategy
        asks = isinstance(strategy, DcpStrategyMixin) or not isinstance(strategy, ModelParallelStrategy)
        if not asks and isinstance(strategy.checkpoint_io, DcpCheckpointIO):
            raise OptionError(BYPASSED)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gather what all ranks have."""
        random = self._random.state_dict()["generators"].value
        checkpoint[_KEY] = gathered({"loops": checkpoint["loops"], "random": random})

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give this rank its own back, if training goes on from the checkpoint."""
        states = checkpoint.get(_KEY)
        if states is None or trainer.state.fn != "fit":
            return
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint is of {len(states)} ranks, not of {trainer.world_size}: random generators "
                "stay as they are, and the positions of data loaders are those of rank 0"
            )
            return
        own = states[trainer.global_rank]
        checkpoint["loops"] = own["loops"]
        self._resumed = own["random"]
        self._set(own["random"])  # for the order of a new epoch, which is drawn before its first batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Once, within an epoch: its data loader has been made anew, and drew from the generators."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and batch_idx:
            self._set(resumed)

    def _set(self, random: dict[str, Any]) -> None:
        state = self._random.state_dict()
        state["generators"].value = random
        self._random.load_state_dict(state)
