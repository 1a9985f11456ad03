"""Hugging Face `Trainer` whose checkpoints go through `CheckpointManager`::

    from dcp.integrations.huggingface import DcpTrainer  # in place of transformers.Trainer

    trainer = DcpTrainer(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

The arguments of the Trainer and the folders ``output_dir/checkpoint-N`` keep their meaning; docs/trainers.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dcp
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import load_model_state, model_state, on_first_rank
from dcp.manager.restore import is_unusable
from dcp.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from dcp.storage.formats.open import has_checkpoint
from dcp.storage.stores import open_store

try:
    import transformers
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    message = f"this needs {error.name}: pip install 'dcphub[transformers]'"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["PRIVATE_HOOKS", "DcpTrainer", "DcpTrainerMixin"]

logger = logging.getLogger(__name__)

PRIVATE_HOOKS: Final = {
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_rng_state": ("self", "checkpoint"),
    "_load_best_model": ("self",),
}
"""The private methods of `Trainer` that are overridden, and their parameters. Besides, its ``_tr_loss``,
``_total_loss_scalar`` and ``_globalstep_last_logged``, the losses since the last log, are saved and set."""

_BEST: Final = "best_step"
"""The metric by which retention finds the best checkpoint: its step if it was the best by then, or -1."""

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class DcpTrainerMixin(_Base):
    """First among the bases of a class with any `Trainer`: ``class Mine(DcpTrainerMixin, SFTTrainer)``.

    Alone, with DDP, and with FSDP2, whose checkpoints resume on any number of ranks. Saves are written behind
    the training; when `train` returns they are committed.

    Args:
        *args: Those of the Trainer.
        checkpoint_options: More arguments of `CheckpointManager`, such as ``mode`` or ``catalog``.
        **kwargs: Those of the Trainer.

    Raises:
        ValueError: DeepSpeed, FSDP1, or an argument that needs the Trainer's own files; it says what to do.
        RuntimeError: This version of transformers has not `PRIVATE_HOOKS`.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, checkpoint_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _check_hooks()
        _refuse_what_cannot_be(self)
        self._dcp_options = dict(checkpoint_options or {})
        self._dcp_manager: dcp.CheckpointManager | None = None
        self._dcp_source: str | None = None
        self._dcp_only_model = False
        self._dcp_rest: dict[str, Any] = {}
        self.add_callback(_Callback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; ``resume_from_checkpoint`` may also name a folder of the Trainer's own.

        Raises ValueError if it is True and there is none, CorruptCheckpointError if what it names, or each
        that there is, is damaged, and what else `CheckpointManager.restore` does.
        """
        options: dict[str, Any] = {"name": "checkpoint-{step}", "keep": _retention(self.args)}
        options["handle_sigterm"] = self.args.save_strategy != "no"  # else nobody asks whether it has come
        with dcp.CheckpointManager(self._folder(), **options | self._dcp_options) as self._dcp_manager:
            sources = self._sources(resume_from_checkpoint)
            while True:
                path, self._dcp_source = sources.pop(0)
                try:
                    return self._train_from(path, *args, **kwargs)
                except _UnusableError as error:
                    if not sources:
                        raise error.cause from None
                    logger.warning("%s cannot be used, and the one before is: %s", path, error.cause)
                finally:
                    self._dcp_source, self._dcp_rest = None, {}

    def _train_from(self, path: str | None, *args: Any, **kwargs: Any) -> Any:
        if self._dcp_source is None:
            return super().train(path, *args, **kwargs)
        state: dict[str, Any] = {"trainer": ""}
        self._dcp_only_model = bool(self._dcp_load(state).get("only_model"))
        # The Trainer knows how far it is only from a file of this name.
        with tempfile.TemporaryDirectory(prefix="dcp-resume-") as folder:
            Path(folder, "trainer_state.json").write_text(state["trainer"])
            return super().train(folder, *args, **kwargs)

    def _sources(self, resume: str | bool | None) -> list[tuple[str | None, str | None]]:
        """What to try in turn, alike on all ranks: what the Trainer resumes from, and that if it is ours."""
        if not resume:
            return [(None, None)]
        found = on_first_rank(lambda: self._look_for(resume))
        if not found:
            raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        return [(path, path if ours else None) for path, ours in found]

    def _look_for(self, resume: str | bool) -> list[tuple[str | None, bool]]:
        assert self._dcp_manager is not None
        before: float = math.inf
        if not isinstance(resume, bool):
            path = Path(resume)
            if has_checkpoint(open_store(path)):
                return [(str(path), True)]
            step = self._step_of(path)
            if step is None or (path / "trainer_state.json").exists():
                return [(str(path), False)]  # the Trainer's own, or its error
            before = step
            logger.warning("%s was never committed: going on from the newest that was, if any", path)
        steps = sorted((step for step in self._dcp_manager.all_steps() if step < before), reverse=True)
        if steps:
            return [(str(self._folder(step)), True) for step in steps]
        theirs = [file.parent for file in self._folder().glob("checkpoint-*/trainer_state.json")]
        if theirs:
            return [(str(max(theirs, key=lambda folder: self._step_of(folder) or 0)), False)]
        return [] if isinstance(resume, bool) else [(None, False)]

    def _step_of(self, folder: Path) -> int | None:
        """The step whose checkpoint in ``output_dir`` it is."""
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        here = folder.parent.resolve() == self._folder().resolve()
        return int(match[1]) if match is not None and here else None

    def _folder(self, step: int | None = None) -> Path:
        folder = Path(self.args.output_dir or ".")
        return folder if step is None else folder / f"checkpoint-{step}"

    # -- saving ----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        manager = self._dcp_manager
        if manager is None or trial is not None:
            raise ValueError("checkpoints are saved within train(), and not in a search for hyperparameters")
        self.store_flos()
        step = self.state.global_step
        is_best = self.state.best_global_step == step
        if is_best:
            self.state.best_model_checkpoint = str(self._folder(step))
        if self.args.save_total_limit and manager.rank == 0:
            _delete_later_ones(manager, step)
        logged = [entry for entry in self.state.log_history if entry["step"] == step]
        values = {name: value for entry in logged for name, value in entry.items()}
        metrics = {name: value for name, value in values.items() if isinstance(value, int | float)}
        metrics[_BEST] = step if is_best else -1
        only_model = {"only_model": self.args.save_only_model}
        manager.save(step, self._dcp_state(), metrics=metrics, force=True, user_metadata=only_model)

    def _dcp_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": model_state(self.model)}
        if self.is_world_process_zero():  # the ranks' log histories differ, in times for one
            state["trainer"] = self._trainer_state()
        if self.args.save_only_model:
            return state
        # As they are summed up since the last log.
        losses = self._tr_loss.item(), self._globalstep_last_logged
        return state | self._state_of_training(losses)

    def _state_of_training(self, losses: Any) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimizer": get_optimizer_state_dict(self.model, _inner(self.optimizer)),
            # Tuples are values of one piece: a load need not know what is in them.
            "scheduler": (self.lr_scheduler.state_dict(),),
            "scaler": (None if scaler is None else scaler.state_dict(),),
            "losses": dcp.PerRank((losses,)),
            "random": RandomState().state_dict(),
        }

    def _trainer_state(self) -> str:
        """What the Trainer would write into trainer_state.json, with the callbacks' states of now."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        exportable: Any = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        now = dataclasses.replace(self.state, stateful_callbacks=exportable)
        return json.dumps(dataclasses.asdict(now))

    # -- loading ---------------------------------------------------------------------------------------------

    def _dcp_load(self, state: dict[str, Any]) -> Mapping[str, Any]:
        """Fill ``state``; the user metadata."""
        source, manager = self._dcp_source, self._dcp_manager
        assert source is not None and manager is not None
        step = self._step_of(Path(source))
        try:
            if step is None:
                return dcp.load(state, checkpoint_id=source, per_rank="keep").user_metadata
            restored = manager.restore(state, step=step, per_rank="keep")
            return restored.user_metadata if restored is not None else {}
        except dcp.CheckpointError as error:
            if is_unusable(error):
                raise _UnusableError(error) from error
            raise

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._dcp_source is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._dcp_load({"model": (state := model_state(self.model))})
            load_model_state(self.model, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._dcp_source is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif not self._dcp_only_model:
            state = self._dcp_rest = self._state_of_training(None)
            self._dcp_load(state)
            set_optimizer_state_dict(self.model, _inner(self.optimizer), state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"][0])
            if self.accelerator.scaler is not None and state["scaler"][0] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"][0])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._dcp_source is None:
            super()._load_rng_state(checkpoint)
        elif "random" in self._dcp_rest:
            # After batches have been skipped, which draws as well.
            RandomState().load_state_dict(self._dcp_rest.pop("random"))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert self._dcp_manager is not None and best is not None
        self._dcp_manager.wait()
        if on_first_rank(lambda: has_checkpoint(open_store(best))):
            dcp.load({"model": (state := model_state(self.model))}, checkpoint_id=best)
            load_model_state(self.model, state)
        else:
            super()._load_best_model()


class DcpTrainer(DcpTrainerMixin, Trainer):
    """`transformers.Trainer` with `DcpTrainerMixin`."""


class _UnusableError(Exception):
    """A checkpoint is damaged or gone; ``cause`` says how."""

    def __init__(self, cause: dcp.CheckpointError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Callback(TrainerCallback):
    """What happens between the Trainer's private hooks."""

    def __init__(self, trainer: DcpTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has set its sums of losses to zero by now."""
        trainer = self._trainer
        losses = trainer._dcp_rest["losses"].value[0] if trainer._dcp_rest else None
        if losses is not None:
            running, trainer._globalstep_last_logged = losses
            trainer._tr_loss.fill_(running)
            trainer._total_loss_scalar = -running  # its mean at the end is of this call's steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At SIGTERM on any rank all save this step, and stop."""
        manager = self._trainer._dcp_manager
        if manager is not None and args.save_strategy != "no":
            manager.should_save(state.global_step)
            if manager.stop_requested:
                control.should_save = control.should_training_stop = True


def _inner(optimizer: Any) -> Any:
    """Without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _retention(args: Any) -> dcp.Retention | None:
    """At most ``save_total_limit``, the best and the newest among them."""
    limit = args.save_total_limit or 0
    if limit <= 0:
        return None
    if args.metric_for_best_model is None:
        return dcp.Retention(last=limit)
    return dcp.Retention(last=max(1, limit - 1), best=dcp.Best(_BEST, mode="max"))


def _delete_later_ones(manager: dcp.CheckpointManager, step: int) -> None:
    """Those of a run that this one does not go on with: to retention they would be the newest."""
    for later in {*manager.all_steps()} - {*manager.pinned()}:
        if later > step:
            logger.warning("save_total_limit: checkpoint-%d, of another run, makes room for %d", later, step)
            manager.delete(later)


def _check_hooks() -> None:
    for name, parameters in PRIVATE_HOOKS.items():
        hook = getattr(Trainer, name, None)
        if hook is None or tuple(inspect.signature(hook).parameters) != parameters:
            raise RuntimeError(
                f"transformers {transformers.__version__} has no Trainer.{name}{parameters}, which dcp "
                "needs; docs/trainers.md has the version that was tried"
            )


def _refuse_what_cannot_be(trainer: Any) -> None:
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed writes its own checkpoints: use transformers.Trainer with it, or FSDP2")
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError("of FSDP DcpTrainer takes version 2: fsdp_config={'version': 2}")
    if args.save_on_each_node:
        raise ValueError("save_on_each_node: leave it off, and give all nodes one output_dir")
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError(
            "checkpoints are no models of the Hub: set hub_strategy='end', which pushes the last"
        )
    if args.enable_jit_checkpoint:
        raise ValueError("leave enable_jit_checkpoint off: DcpTrainer saves at SIGTERM without it")
