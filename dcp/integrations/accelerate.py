"""Accelerate: `save_state` and `load_state` go through dcp::

    import dcp.integrations.accelerate

    dcp.integrations.accelerate.use(accelerator)

docs/trainers.md says what is saved and what changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor

import dcp
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import load_model_state, model_state, on_first_rank
from dcp.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from dcp.state_dict_saver import AsyncCheckpointerType
from dcp.storage.formats.open import has_checkpoint
from dcp.storage.stores import open_store

try:
    import accelerate
    from accelerate import Accelerator, DistributedType
except ModuleNotFoundError as error:
    message = f"this needs {error.name}: pip install 'dcphub[accelerate]'"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["PRIVATE_ATTRIBUTES", "AcceleratorCheckpoints", "use"]

PRIVATE_ATTRIBUTES: Final = (
    "_models",
    "_optimizers",
    "_schedulers",
    "_dataloaders",
    "_custom_objects",
    "_save_model_state_pre_hook",
    "_load_model_state_pre_hook",
)
"""Of an `Accelerator`: what it was given to prepare and to save, which no public name tells."""

_OF_ACCELERATE: Final = "random_states_*.pkl"  # in each checkpoint that it has written itself


def use(
    accelerator: Accelerator, *, weights_only: bool | None = None, **options: Any
) -> AcceleratorCheckpoints:
    """Let ``save_state`` and ``load_state`` of ``accelerator`` go through dcp; before either is called.

    Alone, with DDP, and with FSDP2, whose checkpoints load on any number of ranks.

    Args:
        accelerator: Prepared or not.
        weights_only: False also loads registered objects whose values are of any class, by running pickles.
        **options: ``mode``; with ``automatic_checkpoint_naming`` all those of `CheckpointManager`.

    Returns:
        What waits for saves under way. ``end_training`` and the end of the process do, too.

    Raises:
        ValueError: DeepSpeed, Megatron-LM, XLA or FSDP1; it says what to do.
        RuntimeError: This version of Accelerate has not `PRIVATE_ATTRIBUTES`.
    """
    _refuse_what_cannot_be(accelerator, options)
    checkpoints = AcceleratorCheckpoints(accelerator, weights_only, options)
    accelerator.save_state = checkpoints.save_state
    accelerator.load_state = checkpoints.load_state
    accelerator.end_training = checkpoints.end_training
    return checkpoints


class AcceleratorCheckpoints:
    """What `use` puts in place of an accelerator's methods."""

    def __init__(self, accelerator: Accelerator, weights_only: bool | None, options: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._load_options: dict[str, Any] = {"per_rank": "keep", "weights_only": weights_only}
        self._options = options
        self._load_their_own, self._end_training = accelerator.load_state, accelerator.end_training
        self._manager: dcp.CheckpointManager | None = None
        self._replaceable: set[int] = set()
        self._future: dcp.SaveFuture | None = None

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **ignored: Any,
    ) -> str:
        """As `Accelerator.save_state`; returns once the state is copied. All ranks call it.

        Args:
            output_dir: A folder or URL; not with ``automatic_checkpoint_naming``.

        Returns:
            The checkpoint's place.

        Raises:
            ValueError: No place; or with ``automatic_checkpoint_naming`` one that is taken.
            CheckpointError: The save before this one has failed.
        """
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            place = self._save_iteration(project.iteration)
        elif output_dir is None:
            raise ValueError("save_state needs an output_dir, or automatic_checkpoint_naming")
        else:
            place = os.fspath(output_dir)
            self._save_to(place)
        project.iteration += 1
        return place

    def _save_to(self, place: str) -> None:
        self.wait()
        self._run_save_hooks(place)
        mode = self._options.get("mode", "thread")
        kind = AsyncCheckpointerType.PROCESS if mode == "process" else AsyncCheckpointerType.THREAD
        state = self._state(saving=True)
        self._future = dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=kind)
        if mode == "sync":
            self.wait()

    def _save_iteration(self, iteration: int) -> str:
        manager = self._automatic()
        place = str(self._root() / f"checkpoint_{iteration}")
        taken = on_first_rank(lambda: iteration in manager.all_steps())
        if taken and iteration not in self._replaceable:
            raise ValueError(
                f"Checkpoint directory {place} ({iteration}) already exists. Call load_state() first, or set "
                "project_configuration.iteration to what to start with."
            )
        self._run_save_hooks(place)
        manager.save(iteration, self._state(saving=True), force=True)
        return place

    def _automatic(self) -> dcp.CheckpointManager:
        if self._manager is None:
            limit = self._accelerator.project_configuration.total_limit
            options = {
                "name": "checkpoint_{step}",
                "keep": dcp.Retention(last=limit) if limit else None,
                "handle_sigterm": False,  # the loop does not ask whether to stop
                "on_failure": "raise",
            }
            self._manager = dcp.CheckpointManager(self._root(), **options | self._options)
        return self._manager

    def _root(self) -> Path:
        return Path(self._accelerator.project_dir or ".", "checkpoints")

    def _run_save_hooks(self, place: str) -> None:
        """Those may write files of their own, and take away weights that they have written."""
        models, hooks = self._accelerator._models, self._accelerator._save_model_state_pre_hook.values()
        if hooks and "://" not in place:
            Path(place).mkdir(parents=True, exist_ok=True)
        for hook in hooks:
            hook(models, [{} for _ in models], place)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Any = None, **kwargs: Any
    ) -> None:
        """As `Accelerator.load_state`; loads what Accelerate has written itself, too.

        Args:
            input_dir: Of a checkpoint; with ``automatic_checkpoint_naming`` None is the newest that is whole.
            load_kwargs: For Accelerate's own checkpoints, as are ``kwargs``.

        Raises:
            ValueError: There is no such folder, or other objects are registered than were saved.
            CheckpointNotFoundError: Nothing was committed; of ``input_dir`` it names the newest beside it.
            CheckpointError: Others of `dcp.load`.
        """
        self.wait()
        state: dict[str, Any] | None = None
        if input_dir is not None:
            place = str(Path(input_dir).expanduser()) if "://" not in str(input_dir) else str(input_dir)
            if on_first_rank(lambda: _is_ours(place)):
                dcp.load(state := self._state(saving=False), checkpoint_id=place, **self._load_options)
        elif self._accelerator.project_configuration.automatic_checkpoint_naming:
            place, state = self._load_newest()
        if state is None:
            self._load_their_own(input_dir, load_kwargs, **kwargs)
            return
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(list(self._accelerator._models), place)
        self._apply(state)

    def _load_newest(self) -> tuple[str, dict[str, Any] | None]:
        state, project = self._state(saving=False), self._accelerator.project_configuration
        restored = self._automatic().restore(state, **self._load_options)
        if restored is None:
            root = self._root()
            if on_first_rank(lambda: any(root.glob(f"*/{_OF_ACCELERATE}"))):
                return "", None
            raise dcp.CheckpointNotFoundError(
                f"{root} holds no checkpoint: begin without one", path=str(root)
            )
        self._replaceable = {step for step, _ in restored.skipped}
        project.iteration = max(project.iteration, restored.step + 1)
        return restored.checkpoint_id, state

    def _models(self) -> dict[str, nn.Module]:
        unwrap, models = self._accelerator.unwrap_model, self._accelerator._models
        inner = [unwrap(model, keep_torch_compile=False) for model in models]
        return {"model" if number == 0 else f"model_{number}": model for number, model in enumerate(inner)}

    def _trained(self) -> tuple[nn.Module, list[Any]]:
        """The models as one, because an optimizer may have parameters of several; and the optimizers."""
        models = self._models()
        model = models["model"] if len(models) == 1 else nn.ModuleDict(models)
        return model, [getattr(wrapped, "optimizer", wrapped) for wrapped in self._accelerator._optimizers]

    def _loaders(self) -> list[Any]:
        """Those with a state of their own."""
        loaders = self._accelerator._dataloaders
        return [loader for loader in loaders if getattr(loader, "use_stateful_dataloader", False)]

    def _state(self, *, saving: bool) -> dict[str, Any]:
        accelerator = self._accelerator
        state: dict[str, Any] = {name: model_state(model) for name, model in self._models().items()}
        if accelerator._optimizers:
            state["optimizer"] = get_optimizer_state_dict(*self._trained())
        state["random"] = RandomState().state_dict()
        # Asking a loader for its state begins an epoch.
        positions = [loader.state_dict() for loader in self._loaders()] if saving else None
        state["dataloaders"] = dcp.PerRank((positions,))
        custom = {str(number): one.state_dict() for number, one in enumerate(accelerator._custom_objects)}
        state["custom"] = {number: one for number, one in custom.items() if _has_shards(one)}
        if accelerator.is_main_process or not saving:  # the main process's values are for all
            rest = {number: one for number, one in custom.items() if number not in state["custom"]}
            # A tuple is one value: a load need not know what is in it.
            state["accelerator"] = (self._values(rest),)
        return state

    def _values(self, custom: dict[str, Any]) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "loaders": [_place_of(loader) for loader in accelerator._dataloaders],
            "custom": custom,
        }

    def _apply(self, state: dict[str, Any]) -> None:
        accelerator, values = self._accelerator, state["accelerator"][0]
        custom = values["custom"] | state["custom"]
        _check_alike(accelerator, values, custom)
        for name, model in self._models().items():
            load_model_state(model, state[name])
        if accelerator._optimizers:
            set_optimizer_state_dict(*self._trained(), optim_state_dict=state["optimizer"])
        for scheduler, saved in zip(accelerator._schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if accelerator.scaler is not None and values["scaler"] is not None:
            accelerator.scaler.load_state_dict(values["scaler"])
        for number, one in enumerate(accelerator._custom_objects):
            one.load_state_dict(custom[str(number)])
        self._apply_to_loaders(values["loaders"], state["dataloaders"].value[0])
        accelerator.step = values["step"]
        RandomState().load_state_dict(state["random"])

    def _apply_to_loaders(self, places: list[Any], positions: list[Any] | None) -> None:
        for loader, (epoch, generator) in zip(self._accelerator._dataloaders, places, strict=True):
            if epoch is not None:
                loader.iteration = epoch
            if generator is not None and (own := _generator_of(loader)) is not None:
                own.set_state(generator)
        if positions is not None:
            for loader, position in zip(self._loaders(), positions, strict=True):
                loader.load_state_dict(position)

    def wait(self) -> None:
        """Wait until all that was saved is committed; raises CheckpointError where a save has failed."""
        future, self._future = self._future, None
        if future is not None:
            future.result()
        if self._manager is not None:
            self._manager.wait()

    def end_training(self) -> None:
        """As `Accelerator.end_training`, once all that was saved is committed."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        self._end_training()


def _is_ours(place: str) -> bool:
    if has_checkpoint(open_store(place)):
        return True
    folder = Path(place)
    if "://" not in place and (not folder.is_dir() or any(folder.glob(_OF_ACCELERATE))):
        return False  # Accelerate's own, or its error
    beside = (
        [] if "://" in place else [one for one in folder.parent.iterdir() if one.is_dir() and one != folder]
    )
    whole = [one for one in beside if has_checkpoint(open_store(one))]
    newest = f"; the newest beside it is {max(whole, key=lambda one: one.stat().st_mtime)}" if whole else ""
    raise dcp.CheckpointNotFoundError(
        f"{place} holds no checkpoint: no save there has ended{newest}", path=place
    )


def _generator_of(loader: Any) -> Any:
    return getattr(loader, "synchronized_generator", None) or getattr(loader, "generator", None)


def _place_of(loader: Any) -> tuple[Any, Any]:
    """Its epoch, and the state of the generator that shuffles the next one."""
    own = _generator_of(loader)
    return getattr(loader, "iteration", None), None if own is None else own.get_state()


def _has_shards(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_has_shards(one) for one in value)
    return isinstance(value, DTensor)


def _check_alike(accelerator: Accelerator, values: dict[str, Any], custom: dict[str, Any]) -> None:
    counts = {
        "schedulers": (len(values["schedulers"]), len(accelerator._schedulers)),
        "data loaders": (len(values["loaders"]), len(accelerator._dataloaders)),
        "registered objects": (len(custom), len(accelerator._custom_objects)),
    }
    for what, (saved, there) in counts.items():
        if saved != there:
            raise ValueError(f"the checkpoint has {saved} {what}, this accelerator {there}: prepare the same")


def _refuse_what_cannot_be(accelerator: Accelerator, options: dict[str, Any]) -> None:
    missing = [name for name in PRIVATE_ATTRIBUTES if not hasattr(accelerator, name)]
    if missing:
        raise RuntimeError(f"Accelerate {accelerate.__version__} has no {missing[0]}, which dcp needs")
    engines = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
    if accelerator.distributed_type in engines:
        raise ValueError(f"{accelerator.distributed_type.value} saves by itself: use DDP or FSDP2 with dcp")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("of FSDP dcp takes version 2: FullyShardedDataParallelPlugin(fsdp_version=2)")
    if options.keys() - {"mode"} and not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            f"{', '.join(options)}: the manager's options need the Accelerator's "
            "project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)"
        )
