"""Accelerate: `use` routes `save_state` and `load_state` through dcp (docs/how-to/use-a-trainer.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.utils.data import RandomSampler

import dcp
from dcp.integrations import trainer_state as shared
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import PathSaves
from dcp.storage.formats.opening import has_checkpoint
from dcp.storage.stores import open_store

with shared.package_of("accelerate"):
    from accelerate import Accelerator, DistributedType

logger = logging.getLogger(__name__)

PRIVATE_ATTRIBUTES: Final = (
    "_models",
    "_optimizers",
    "_schedulers",
    "_dataloaders",
    "_custom_objects",
    "_save_model_state_pre_hook",
    "_load_model_state_pre_hook",
)
"""Private attributes of `Accelerator` for prepared and registered objects."""

_ENDED: Final = "ended_epoch"
_OF_ACCELERATE: Final = "random_states_*.pkl"  # present in each checkpoint of Accelerate


def use(
    accelerator: Accelerator, *, weights_only: bool | None = None, **options: Any
) -> AcceleratorCheckpoints:
    """Route ``save_state`` and ``load_state`` of an accelerator through dcp.

    Call before the first save or load, before or after ``prepare``. Works with one process, DDP and FSDP2;
    FSDP2 checkpoints load on any number of ranks.

    Args:
        accelerator: The accelerator to change.
        weights_only: False loads registered objects with values of any class by running pickles.
        **options: ``mode``; with ``automatic_checkpoint_naming`` all options of `CheckpointManager`.

    Returns:
        An object whose `wait` waits for pending saves, like ``end_training`` and the end of the process.

    Raises:
        ValueError: For DeepSpeed, Megatron-LM, XLA and FSDP1.
        OptionError: For wrong options.
        RuntimeError: If Accelerate lacks one of `PRIVATE_ATTRIBUTES`.

    Examples:
        accelerator = Accelerator()
        dcp.integrations.accelerate.use(accelerator)
        accelerator.save_state("checkpoints/step-100")
    """
    shared.check_private("accelerate", accelerator, PRIVATE_ATTRIBUTES)
    _refuse_unsupported(accelerator, options)
    checkpoints = AcceleratorCheckpoints(accelerator, weights_only, options)
    accelerator.save_state = checkpoints.save_state
    accelerator.load_state = checkpoints.load_state
    accelerator.end_training = checkpoints.end_training
    return checkpoints


class AcceleratorCheckpoints:
    """Methods that `use` installs in an accelerator."""

    def __init__(self, accelerator: Accelerator, weights_only: bool | None, options: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._load_options: dict[str, Any] = {"per_rank": "keep", "weights_only": weights_only}
        self._options = options
        self._load_accelerates, self._end_training = accelerator.load_state, accelerator.end_training
        self._manager: dcp.CheckpointManager | None = None
        self._replaceable: set[int] = set()
        self._paths = PathSaves(options.get("mode", "thread"), no_dist=accelerator.num_processes == 1)
        if accelerator.project_configuration.automatic_checkpoint_naming:
            self._automatic()  # raise errors of wrong options now

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *ignored: Any, **more: Any) -> str:
        """Save like `Accelerator.save_state`, on all ranks; return the path or URL after the state is
        copied.

        Raises:
            ValueError: Without a place, or if automatic naming finds an existing folder.
            CheckpointError: If the previous save failed.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        if accelerator.gradient_accumulation_steps > 1 and not accelerator.sync_gradients:
            logger.warning("save_state() during gradient accumulation: accumulated gradients are not saved")
        save: Callable[[dict[str, Any]], object]
        if project.automatic_checkpoint_naming:
            manager, iteration = self._automatic(), project.iteration
            place = str(self._root() / f"checkpoint_{iteration}")
            taken = shared.on_first_rank(lambda: iteration in manager.all_steps())
            if taken and iteration not in self._replaceable:
                raise ValueError(
                    f"Checkpoint directory {place} ({iteration}) already exists. Call load_state() first, "
                    "or set project_configuration.iteration to the next number."
                )
            save = partial(manager.save, iteration, force=True)
        elif output_dir is None:
            raise ValueError("save_state: pass output_dir, or set automatic_checkpoint_naming=True")
        else:
            place = os.fspath(output_dir)
            save = partial(self._paths.begin, path=place)
        models, hooks = accelerator._models, accelerator._save_model_state_pre_hook.values()
        project.iteration += 1  # on all ranks, even if one raises below
        with shared.refused_by_all(save):
            # Hooks may write additional files, and remove weights that they have written.
            if hooks and "://" not in place:
                Path(place).mkdir(parents=True, exist_ok=True)
            for hook in hooks:
                hook(models, [{} for _ in models], place)
            state = self._state(saving=True)
        save(state)
        return place

    def _automatic(self) -> dcp.CheckpointManager:
        if self._manager is None:
            limit = self._accelerator.project_configuration.total_limit
            options = {
                "name": "checkpoint_{step}",
                "keep": dcp.Retention(last=limit) if limit else None,
                "handle_sigterm": False,  # the training loop does not check stop_requested
                "on_failure": "raise",
            }
            self._manager = dcp.CheckpointManager(self._root(), **options | self._options)
        return self._manager

    def _root(self) -> Path:
        return Path(self._accelerator.project_dir or ".", "checkpoints")

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Any = None, **kwargs: Any
    ) -> None:
        """Load like `Accelerator.load_state`, also folders of Accelerate.

        Args:
            input_dir: Path or URL; by default the newest valid checkpoint with
                ``automatic_checkpoint_naming``.
            load_kwargs: For folders of Accelerate.
            **kwargs: For folders of Accelerate.

        Raises:
            ValueError: If the folder is missing, or other objects are registered.
            CheckpointNotFoundError: If nothing was committed; the message names the newest neighbor.
            CheckpointError: Other errors of `dcp.load`.
        """
        self.wait()
        state: dict[str, Any] | None = None
        if input_dir is not None:
            place = str(Path(input_dir).expanduser()) if "://" not in str(input_dir) else str(input_dir)
            if shared.on_first_rank(lambda: _is_dcps(place)):
                load: Any = partial(dcp.load, checkpoint_id=place, **self._load_options)
                with shared.refused_by_all(load):
                    state = self._state(saving=False)
                load(state)
        elif self._accelerator.project_configuration.automatic_checkpoint_naming:
            place, state = self._load_newest()
        if state is None:
            self._load_accelerates(input_dir, load_kwargs, **kwargs)
            return
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(list(self._accelerator._models), place)
        self._apply(state)

    def _load_newest(self) -> tuple[str, dict[str, Any] | None]:
        project = self._accelerator.project_configuration
        restore: Any = partial(self._automatic().restore, **self._load_options)
        with shared.refused_by_all(restore):
            state = self._state(saving=False)
        restored = restore(state)
        if restored is None:
            root = self._root()
            if shared.on_first_rank(lambda: any(root.glob(f"*/{_OF_ACCELERATE}"))):
                return "", None
            message = f"{root} holds no checkpoint: start without load_state()"
            raise dcp.CheckpointNotFoundError(message, path=str(root))
        self._replaceable = {step for step, _ in restored.skipped}
        project.iteration = max(project.iteration, restored.step + 1)
        return restored.checkpoint_id, state

    def _models(self) -> dict[str, nn.Module]:
        unwrap, models = self._accelerator.unwrap_model, self._accelerator._models
        inner = [unwrap(model, keep_torch_compile=False) for model in models]
        return {"model" if number == 0 else f"model_{number}": model for number, model in enumerate(inner)}

    def _loaders(self) -> list[Any]:
        """Return the data loaders with state."""
        loaders = self._accelerator._dataloaders
        return [one for one in loaders if getattr(one, "use_stateful_dataloader", False)]

    def _state(self, *, saving: bool) -> dict[str, Any]:
        accelerator, loaders, models = self._accelerator, self._accelerator._dataloaders, self._models()
        state: dict[str, Any] = {name: shared.TrainedModel(model, saving) for name, model in models.items()}
        if accelerator._optimizers:
            # One holder for all models, because an optimizer may have parameters of several.
            trained = models["model"] if len(models) == 1 else nn.ModuleDict(models)
            optimizers = [one.optimizer for one in accelerator._optimizers]
            state["optimizer"] = shared.TrainedOptimizers(trained, optimizers)
        state["random"] = RandomState().state_dict()
        # Requesting a loader's state would start an epoch.
        positions = [_position(loader) for loader in self._loaders()] if saving else None
        state["dataloaders"] = dcp.PerRank((positions,))
        custom = {str(number): one.state_dict() for number, one in enumerate(accelerator._custom_objects)}
        state["custom"] = {number: one for number, one in custom.items() if shared.has_shards(one)}
        values = {
            "step": accelerator.step,
            "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "loaders": [_place_of(loader) for loader in loaders],
            "custom": {number: one for number, one in custom.items() if number not in state["custom"]},
        }
        if accelerator.is_main_process or not saving:  # rank 0 saves the values for all ranks
            state["accelerator"] = (values,)  # a tuple is stored as one value, loadable without a template
        return state

    def _apply(self, state: dict[str, Any]) -> None:
        accelerator, values = self._accelerator, state["accelerator"][0]
        custom = values["custom"] | state["custom"]
        prepared = (
            len(accelerator._schedulers),
            len(accelerator._dataloaders),
            len(accelerator._custom_objects),
        )
        saved = len(values["schedulers"]), len(values["loaders"]), len(custom)
        if saved != prepared:
            what = "schedulers, data loaders and registered objects"
            raise ValueError(
                f"prepare the same {what}: the checkpoint has {saved}, but {prepared} are prepared"
            )
        for scheduler, its_state in zip(accelerator._schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(its_state)
        if accelerator.scaler is not None and values["scaler"] is not None:
            accelerator.scaler.load_state_dict(values["scaler"])
        for number, one in enumerate(accelerator._custom_objects):
            one.load_state_dict(custom[str(number)])
        for loader, (epoch, generator) in zip(accelerator._dataloaders, values["loaders"], strict=True):
            if epoch is not None:
                loader.iteration = epoch
            if generator is not None and (own := _generator_of(loader)) is not None:
                own.set_state(generator)
        positions = state["dataloaders"].value[0]  # None from other ranks
        for loader, position in zip(self._loaders(), positions or (), strict=positions is not None):
            ended = position.get(_ENDED)
            loader.load_state_dict(position if ended is None else {})
            if ended is not None:
                _let_end(loader, ended)
        accelerator.step = values["step"]
        RandomState().load_state_dict(state["random"])

    def wait(self) -> None:
        """Wait until all saves are committed. Raises CheckpointError for a failed save."""
        self._paths.wait()
        if self._manager is not None:
            self._manager.wait()

    def end_training(self) -> None:
        """Wait for all saves, then call `Accelerator.end_training`."""
        try:
            self._paths.close()
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()
        finally:
            self._end_training()


def _is_dcps(place: str) -> bool:
    if has_checkpoint(open_store(place)):
        return True
    if "://" not in place and (not Path(place).is_dir() or any(Path(place).glob(_OF_ACCELERATE))):
        return False  # a folder of Accelerate, or Accelerate's error
    newest = "".join(f"; the newest beside it is {one}" for one in shared.committed_beside(place)[:1])
    raise dcp.CheckpointNotFoundError(f"{place} holds no checkpoint: no save was completed{newest}")


def _generator_of(loader: Any) -> Any:
    """Return the loader's own generator for shuffling, if any."""
    return getattr(loader, "synchronized_generator", None) or getattr(loader, "generator", None)


def _place_of(loader: Any) -> tuple[Any, Any]:
    """Return the loader's epoch (the next one after the last batch of a stateful loader) and generator
    state.
    """
    epoch: Any = getattr(loader, "iteration", None)
    own = _generator_of(loader)
    if getattr(loader, "use_stateful_dataloader", False):
        epoch += _is_at_last_batch(loader)
    return epoch, None if own is None else own.get_state()


def _is_at_last_batch(loader: Any) -> bool:
    references = loader.gradient_state.dataloader_references
    return bool(loader.end_of_dataloader) and any(loader is active for active in references)


def _position(loader: Any) -> Any:
    """Return the loader's position within an epoch; {} at the start of the next.

    After the last batch the epoch's number also starts the next, unless the loop repeats that epoch.
    """
    if _is_at_last_batch(loader):
        return {_ENDED: loader.iteration}
    if loader.end_of_dataloader:
        return {}
    if type(loader.get_sampler()) is RandomSampler:
        logger.warning(
            "the order of a data loader is not saved: set DataLoaderConfiguration(use_seedable_sampler=True)"
        )
    return loader.state_dict()


def _let_end(loader: Any, epoch: int) -> None:
    """Yield no batches once if the loader's next epoch is ``epoch``."""
    base = loader.base_dataloader
    iterate = base.__iter__

    def begin() -> Any:
        del base.__iter__
        return iter(()) if loader.iteration == epoch else iterate()

    base.__iter__ = begin  # Accelerate calls it by this name


def _refuse_unsupported(accelerator: Accelerator, options: dict[str, Any]) -> None:
    engines = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
    if accelerator.distributed_type in engines:
        raise ValueError(
            f"dcp does not support {accelerator.distributed_type.value}, which writes its own checkpoints: "
            "use DDP or FSDP2"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("dcp supports version 2 of FSDP: FullyShardedDataParallelPlugin(fsdp_version=2)")
    if options.keys() - {"mode"} and not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            f"{', '.join(options)}: the manager's options need the Accelerator's "
            "project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)"
        )
