"""`DcpModelParallelStrategy`: sharded checkpoints for FSDP2 and tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy

from dcp.errors import OptionError
from dcp.integrations.lightning.exact_values import entry_with_shards, opened, sealed
from dcp.integrations.lightning.loading import is_of_lightning, newest_good
from dcp.integrations.lightning.names import BEFORE_REQUEUE
from dcp.integrations.path_saves import Mode, PathSaves
from dcp.integrations.trainer_state import OptimizerState, own_part, refused_by_all
from dcp.manager.catalog.registration import CatalogRegistration
from dcp.state_dict import get_model_state_dict, set_model_state_dict
from dcp.state_dict_loader import LoadKeywords, load, read

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["DcpModelParallelStrategy", "DcpStrategyMixin"]

_Path = str | os.PathLike[str]
_REST = "rest"


class DcpStrategyMixin:
    """Sharded checkpoints by dcp, for a strategy of Lightning's whose model has DTensors::

        class Mine(DcpStrategyMixin, ModelParallelStrategy): ...

    Each rank writes its own shards behind the training, and reads what it needs of them on any number of
    ranks. What belongs to no model and no optimizer is rank 0's. Lightning's own checkpoints are loaded as
    before.

    Args:
        mode: As for `DcpCheckpointIO`.
        storage_options: As for `DcpCheckpointIO`.
        catalog: As for `DcpCheckpointIO`.

    The others are the strategy's.

    Raises:
        OptionError: ``mode`` is none, or ``save_distributed_checkpoint=False`` asks for one file.
    """

    def __init__(
        self,
        *args: Any,
        mode: Mode = "thread",
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | CatalogRegistration | None = None,
        **kwargs: Any,
    ) -> None:
        if not kwargs.get("save_distributed_checkpoint", True):
            raise OptionError(
                f"{type(self).__name__} saves shards: leave out save_distributed_checkpoint=False; "
                "`dcp convert` makes one file of a checkpoint"
            )
        super().__init__(*args, **kwargs)
        self._saves = PathSaves(mode, storage_options, catalog, no_dist=False)

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """The model's state, sharded, and where it is: the save copies it."""
        return get_model_state_dict(self.model)

    def optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state by the names of parameters, likewise."""
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return OptimizerState(self.model, [own]).state_dict()

    def save_checkpoint(
        self: Any, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any | None = None
    ) -> None:
        """Save, all ranks together; as `DcpCheckpointIO.save_checkpoint`.

        Raises:
            OptionError: A DTensor is neither in the model's state nor in an optimizer's.
            CheckpointError: What an earlier save raised.
        """
        if storage_options is not None:
            raise OptionError(f"give storage_options to {type(self).__name__}, which needs them to load too")
        begin = partial(self._saves.begin, path=self.broadcast(filepath), step=checkpoint.get("global_step"))
        with refused_by_all(begin):
            state = self._to_save(checkpoint)
        begin(state)
        if os.path.basename(filepath).startswith(BEFORE_REQUEUE):  # noqa: PTH119 - may be a URL
            self._saves.wait()

    def _to_save(self: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What this rank has of it."""
        rest = dict(checkpoint)
        state = {"state_dict": own_part(self.model, rest.pop("state_dict"))}
        for number, optimizer_state in enumerate(rest.pop("optimizer_states", ())):
            state[f"optimizer_{number}"] = optimizer_state
        if (name := entry_with_shards(rest)) is not None:
            raise OptionError(
                f"checkpoint[{name!r}] has a DTensor, which can be saved as a part of the model or of an "
                "optimizer only: keep it there, or save its full_tensor()"
            )
        return state | {_REST: sealed(rest)} if self.is_global_zero else state

    def load_checkpoint(
        self: Any, checkpoint_path: _Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model and the optimizers, all ranks together; the rest of the checkpoint.

        Raises:
            MissingKeyError: The checkpoint lacks something of the model or of an optimizer.
            CheckpointError: Others of `DcpCheckpointIO.load_checkpoint` and of `dcp.load`.
        """
        path = self.broadcast(checkpoint_path)
        if is_of_lightning(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return loaded
        self._saves.wait()
        storage_options = self._saves.storage_options

        def fill(path: _Path) -> dict[str, Any]:
            rest = read(path, only=_REST, weights_only=weights_only, storage_options=storage_options)[_REST]
            self._fill({"checkpoint_id": path, "storage_options": storage_options})
            return opened(rest)

        return newest_good(path, fill, storage_options)

    def _fill(self: Any, options: dict[str, Any]) -> None:
        strict = self.lightning_module.strict_loading
        lenient: LoadKeywords = {} if strict else {"allow_partial_load": True, "unexpected": "ignore"}
        model = {"state_dict": get_model_state_dict(self.model)}
        optimizers = {
            f"optimizer_{number}": OptimizerState(self.model, [optimizer])
            for number, optimizer in enumerate(self.optimizers)
        }
        load(model, **options, **lenient)
        set_model_state_dict(self.model, model["state_dict"])
        if optimizers:
            load({**optimizers}, **options)

    def remove_checkpoint(self: Any, filepath: _Path) -> None:
        """As `DcpCheckpointIO.remove_checkpoint`."""
        if self.is_global_zero:
            self._saves.remove(filepath)

    def on_exception(self: Any, exception: BaseException) -> None:
        """Do not wait long for saves under way: other ranks may be gone."""
        self._saves.hurry()
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self: Any) -> None:
        """Wait for the saves under way."""
        self._saves.close()
        super().teardown()  # type: ignore[misc]


class DcpModelParallelStrategy(DcpStrategyMixin, ModelParallelStrategy):
    """`ModelParallelStrategy` with sharded checkpoints by dcp, as `DcpStrategyMixin` says."""
