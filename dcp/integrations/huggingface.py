"""Hugging Face `Trainer` that saves through `CheckpointManager` (docs/how-to/use-a-trainer.md)."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dcp
from dcp.integrations import trainer_state as shared
from dcp.integrations.random_state import RandomState
from dcp.manager.events import Event
from dcp.manager.restore import is_unusable
from dcp.storage.formats.opening import has_checkpoint
from dcp.storage.stores import open_store

with shared.package_of("transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

logger = logging.getLogger(__name__)

PRIVATE_HOOKS: Final = {
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_rng_state": ("self", "checkpoint"),
    "_load_best_model": ("self",),
    "_finalize_training": ("self", "trial", "num_train_samples", "start_time"),
}
"""Overridden private methods of `Trainer` with their parameters. Also saved and restored: ``_tr_loss``,
``_total_loss_scalar`` and ``_globalstep_last_logged``.
"""

_BEST: Final = "best_step"
"""Metric of the best checkpoint for retention: its step if best at that time, else -1."""

_Base: Any = Trainer if TYPE_CHECKING else object


class DcpTrainerMixin(_Base):  # type: ignore[misc]
    """Mixin for any `Trainer`, as first base: ``class MyTrainer(DcpTrainerMixin, SFTTrainer)``.

    Saves run in the background and are committed when `train` returns.

    Args:
        checkpoint_options: Further arguments of `CheckpointManager`, such as ``mode`` or ``catalog``.
        **kwargs: Arguments of the Trainer.

    Raises:
        ValueError: For DeepSpeed, FSDP1 and arguments that need the Trainer's own files.
        RuntimeError: If transformers lacks `PRIVATE_HOOKS`.

    Examples:
        trainer = DcpTrainer(model, args, train_dataset=data, checkpoint_options={"mode": "process"})
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self, *args: Any, checkpoint_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        shared.check_private("transformers", Trainer, PRIVATE_HOOKS)
        _refuse_unsupported(self)
        self._dcp_options = dict(checkpoint_options or {})
        self._dcp_manager: dcp.CheckpointManager | None = None
        self._dcp_source: str | None = None
        self._dcp_only_model = False
        self._dcp_rest: dict[str, Any] = {}
        self._dcp_unusable: dcp.CheckpointError | None = None
        self.add_callback(_Callback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train like `Trainer.train`; ``resume_from_checkpoint`` may also name a folder of the Trainer.

        Raises:
            ValueError: If ``resume_from_checkpoint`` is True and no checkpoint exists.
            CheckpointError: Errors of `CheckpointManager.restore` and `save`.
        """
        with dcp.CheckpointManager(self._folder(), **self._manager_options()) as self._dcp_manager:
            sources: list[tuple[str | None, bool]] = [(None, False)]
            if resume_from_checkpoint:
                sources = shared.on_first_rank(lambda: self._look_for(resume_from_checkpoint))
            for number, (path, is_dcps) in enumerate(sources, 1):
                self._dcp_source = path if is_dcps else None
                try:
                    return self._train_from(path, *args, **kwargs)
                except dcp.CheckpointError as error:
                    if error is not self._dcp_unusable or number == len(sources):
                        raise
                    logger.warning("%s cannot be loaded; trying the previous checkpoint: %s", path, error)
                finally:
                    self._dcp_source, self._dcp_rest = None, {}
        raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")

    def _manager_options(self) -> dict[str, Any]:
        given = self._dcp_options.get("on_event") or ()
        return {
            "name": "checkpoint-{step}",
            "keep": _retention(self.args),
            "handle_sigterm": self.args.save_strategy != "no",  # otherwise no callback checks
            "on_failure": "raise",
            **self._dcp_options,
            "on_event": [*((given,) if callable(given) else given), self._delete_later_ones],
        }

    def _train_from(self, path: str | None, *args: Any, **kwargs: Any) -> Any:
        if self._dcp_source is None:
            return super().train(path, *args, **kwargs)
        state: dict[str, Any] = {"trainer": ""}
        self._dcp_only_model = bool(self._dcp_load(state).get("only_model"))
        # The Trainer reads its progress from a file of this name before training.
        with tempfile.TemporaryDirectory(prefix="dcp-resume-") as folder:
            Path(folder, "trainer_state.json").write_text(state["trainer"])
            self._dcp_rest["folder"] = folder
            return super().train(folder, *args, **kwargs)

    def _look_for(self, resume: str | bool) -> list[tuple[str | None, bool]]:
        """Return (folder, saved by dcp) to try in order."""
        before: float = float("inf")
        if not isinstance(resume, bool):
            path, is_dcps = Path(resume), has_checkpoint(open_store(resume))
            step = self._step_of(path)
            if is_dcps or step is None or (path / "trainer_state.json").exists():
                return [(str(path), is_dcps)]  # otherwise the Trainer's folder, or its error
            logger.warning("%s was never committed: resuming from the newest committed one, if any", path)
            before = step
        theirs = [self._step_of(file.parent) for file in self._folder().glob("*/trainer_state.json")]
        ours = {step: False for step in theirs if step is not None}
        ours |= dict.fromkeys(self._manager.all_steps(), True)
        steps = sorted((step for step in ours if step < before), reverse=True)
        found: list[Any] = [(str(self._folder(step)), ours[step]) for step in steps]
        return found or ([] if isinstance(resume, bool) else [(None, False)])

    def _step_of(self, folder: Path) -> int | None:
        """Return the step of a checkpoint folder in ``output_dir``."""
        is_here = folder.parent.resolve() == self._folder().resolve()
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name) if is_here else None
        return None if match is None else int(match[1])

    def _folder(self, step: int | None = None) -> Path:
        folder = Path(self.args.output_dir or ".")
        return folder if step is None else folder / f"checkpoint-{step}"

    @property
    def _manager(self) -> dcp.CheckpointManager:
        if self._dcp_manager is None:
            raise ValueError("DcpTrainer saves and loads checkpoints only within train()")
        return self._dcp_manager

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise ValueError("DcpTrainer does not save checkpoints in a hyperparameter search")
        self.store_flos()
        step = self.state.global_step
        if is_best := self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(self._folder(step))
        logged = (pair for entry in self.state.log_history if entry["step"] == step for pair in entry.items())
        metrics = {name: value for name, value in logged if isinstance(value, int | float)}
        metrics[_BEST] = step if is_best else -1
        user = {"only_model": self.args.save_only_model}
        save = partial(self._manager.save, step, metrics=metrics, force=True, user_metadata=user)
        with shared.refused_by_all(save):
            state = self._to_save()
        save(state)

    def _to_save(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": shared.TrainedModel(self.model, saving=True)}
        # only rank 0, because log histories contain times that differ between ranks
        if self.is_world_process_zero():
            callbacks = [*self.callback_handler.callbacks, self.control]
            exportable: Any = [callback for callback in callbacks if isinstance(callback, ExportableState)]
            # with the present states of callbacks
            now = dataclasses.replace(self.state, stateful_callbacks=exportable)
            state["trainer"] = json.dumps(dataclasses.asdict(now))
        if not self.args.save_only_model:
            state |= self._state_of_training((self._tr_loss.item(), self._globalstep_last_logged))
        return state

    def _state_of_training(self, losses: Any) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimizer": shared.TrainedOptimizers(self.model, [self.optimizer.optimizer]),
            # Tuples are stored as one value, loadable without a template.
            "scheduler": (self.lr_scheduler.state_dict(),),
            "scaler": (None if scaler is None else scaler.state_dict(),),
            "losses": dcp.PerRank((losses,)),
            "random": RandomState().state_dict(),
        }

    def _delete_later_ones(self, event: Event) -> None:
        """Delete later steps of an earlier run, which retention would consider newest."""
        manager, step = self._manager, event.step
        if event.kind == "saved" and step is not None and self.args.save_total_limit and not manager.rank:
            for later in (one for one in manager.all_steps() if one > step and one not in manager.pinned()):
                logger.warning("save_total_limit: deleting checkpoint-%d of another run", later)
                manager.delete(later)

    def _dcp_load(self, state: dict[str, Any]) -> Mapping[str, Any]:
        """Fill ``state``, and return the user metadata."""
        source = self._dcp_source
        assert source is not None
        step = self._step_of(Path(source))
        try:
            if step is None:
                return dcp.load(state, checkpoint_id=source, per_rank="keep").user_metadata
            restored = self._manager.restore(state, step=step, per_rank="keep")
            return restored.user_metadata if restored is not None else {}
        except dcp.CheckpointError as error:
            # Without the Trainer's state: weights saved alone before a deadline.
            if is_unusable(error) or (isinstance(error, dcp.MissingKeyError) and "trainer" in state):
                self._dcp_unusable = error
            raise

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._dcp_source is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._dcp_load({"model": shared.TrainedModel(self.model)})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._dcp_source is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif self._dcp_only_model:
            logger.warning(
                "%s has only the model: optimizer and scheduler start from their initial state",
                self._dcp_source,
            )
        else:
            self._dcp_load(state := self._state_of_training(None))
            self._dcp_rest |= state
            self.lr_scheduler.load_state_dict(state["scheduler"][0])
            if self.accelerator.scaler is not None and state["scaler"][0] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"][0])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._dcp_source is None:
            super()._load_rng_state(checkpoint)
        elif "random" in self._dcp_rest:
            # after batches have been skipped, because this draws random numbers
            RandomState().load_state_dict(self._dcp_rest.pop("random"))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if shared.on_first_rank(lambda: has_checkpoint(open_store(best))):
            dcp.load({"model": shared.TrainedModel(self.model)}, checkpoint_id=best)
        else:
            super()._load_best_model()

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        self._manager.wait()  # the Trainer now loads and deletes folders
        return super()._finalize_training(trial, num_train_samples, start_time)


class DcpTrainer(DcpTrainerMixin, Trainer):
    """`transformers.Trainer` with `DcpTrainerMixin`."""


class _Callback(TrainerCallback):
    """Callback between the Trainer's private hooks."""

    def __init__(self, trainer: DcpTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the sums of losses, which the Trainer has reset."""
        trainer, rest = self._trainer, self._trainer._dcp_rest
        if "folder" in rest and not args.auto_find_batch_size:  # left by a killed training
            shutil.rmtree(rest.pop("folder"), ignore_errors=True)
        if "losses" in rest and (losses := rest["losses"].value[0]) is not None:
            running, trainer._globalstep_last_logged = losses
            trainer._tr_loss.fill_(running)
            trainer._total_loss_scalar = -running  # the Trainer averages over the steps of this call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop on all ranks after SIGTERM on any rank, without evaluation."""
        if args.save_strategy != "no":
            self._trainer._manager.should_save(state.global_step)
            if self._trainer._manager.stop_requested:
                control.should_save = control.should_training_stop = True
                control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the save after SIGTERM as the last."""
        if self._trainer._manager.stop_requested:
            control.should_save = control.should_evaluate = False


def _retention(args: Any) -> dcp.Retention | None:
    """Return retention of at most ``save_total_limit`` checkpoints, including the best and the newest."""
    limit = args.save_total_limit or 0
    if limit <= 0:
        return None
    best = None if args.metric_for_best_model is None else dcp.Best(_BEST, mode="max")
    return dcp.Retention(last=max(1, limit - (best is not None)), best=best)


def _refuse_unsupported(trainer: Any) -> None:
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "DcpTrainer does not support DeepSpeed, which writes its own checkpoints: use "
            "transformers.Trainer, or FSDP2"
        )
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError("DcpTrainer supports version 2 of FSDP: fsdp_config={'version': 2}")
    if args.save_on_each_node:
        raise ValueError("set save_on_each_node=False, and use one output_dir on all nodes")
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError("DcpTrainer cannot push checkpoints to the hub: set hub_strategy='end'")
    if args.enable_jit_checkpoint:
        raise ValueError("set enable_jit_checkpoint=False: DcpTrainer saves at SIGTERM by itself")
