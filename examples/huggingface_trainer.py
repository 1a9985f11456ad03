"""Hugging Face `Trainer`: a callback that saves and resumes through the manager.

    python examples/huggingface_trainer.py --checkpoints /tmp/trainer
    torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py --checkpoints /tmp/trainer

Stop it in any way (SIGTERM, kill -9), start it again. docs/recipes.md says why resuming takes a folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import dcp
from dcp.integrations.random_state import RandomState
from dcp.state_dict import get_state_dict, set_state_dict


class DcpCheckpointCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, gradient scaler, random generators and `TrainerState`, and resumes.

        callback = DcpCheckpointCallback(manager)
        trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    The manager decides when to save, and what to keep. Give the callback as the last one, so that the states
    of the others are those of the same step. Alone and under DDP; not with the Trainer's FSDP or DeepSpeed,
    which make the model and the optimizer only in ``train()``.
    """

    def __init__(self, manager: dcp.CheckpointManager) -> None:
        self.manager = manager
        self._random = RandomState()
        self._trainer: Trainer | None = None
        self._restored: dict[str, Any] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._save_after: str | None = None

    def resume(self, trainer: Trainer) -> str | None:
        """Restore the newest good checkpoint; what ``train(resume_from_checkpoint=)`` takes: None to begin.

        Model and optimizer are restored here. The rest waits for ``train()`` to make what it belongs to.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.model_init is not None:
            raise ValueError(
                "with FSDP, DeepSpeed or model_init the Trainer makes model and optimizer in train(), too "
                "late to restore them; save and load in a loop of your own"
            )
        self._trainer = trainer
        trainer.create_optimizer()
        state = self._state(trainer, scheduler=None, trainer_state=None)
        if self.manager.restore(state, per_rank="keep") is None:
            return None
        set_state_dict(
            _model(trainer),
            _optimizer(trainer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(state["scaler"][0])
        self._restored = state
        self._folder = tempfile.TemporaryDirectory(prefix="dcp-resume-")
        return _resume_folder(Path(self._folder.name), state["trainer"])

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The scheduler exists by now, and has set the rates of step 0."""
        logging.getLogger("transformers.trainer").removeFilter(_not_about_missing_keys)
        if self._trainer is None:
            raise ValueError("call trainer.train(resume_from_checkpoint=callback.resume(trainer))")
        if self._restored is not None:
            scheduler, optimizer = kwargs["lr_scheduler"], kwargs["optimizer"]
            scheduler.load_state_dict(self._restored["scheduler"][0])
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Between two epochs the generators were saved before the loader drew its seeds from them."""
        if args.ignore_data_skip or state.epoch == int(state.epoch):
            self._restore_random()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Within an epoch, after the skipping of batches that were trained on, which draws as well."""
        self._restore_random()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save; at a step that logs or evaluates after that, so that its figures are saved as well."""
        self._save_after = "evaluate" if control.should_evaluate else "log" if control.should_log else "step"
        self._save("step", state, control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The save of a step that logs."""
        self._save("log", state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The save of a step that evaluates."""
        self._save("evaluate", state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All that was saved is committed once `train` returns."""
        self.manager.wait()

    def _restore_random(self) -> None:
        if self._restored is not None:
            self._random.load_state_dict(self._restored["random"])
            self._restored = None

    def _save(self, event: str, trainer_state: TrainerState, control: TrainerControl) -> None:
        if event != self._save_after or self._trainer is None:
            return
        self._save_after = None
        step = trainer_state.global_step
        last = step >= trainer_state.max_steps
        scheduler = self._trainer.lr_scheduler
        if scheduler is not None and self.manager.should_save(step, last=last):
            logged = [entry for entry in trainer_state.log_history if entry["step"] == step]
            metrics = {name: value for entry in logged for name, value in entry.items() if "loss" in name}
            state = self._state(self._trainer, scheduler.state_dict(), trainer_state)
            self.manager.save(step, state, metrics=metrics, last=last)
        control.should_training_stop |= self.manager.stop_requested

    def _state(
        self, trainer: Trainer, scheduler: dict[str, Any] | None, trainer_state: TrainerState | None
    ) -> dict[str, Any]:
        model, optimizer = get_state_dict(_model(trainer), _optimizer(trainer))
        scaler = trainer.accelerator.scaler
        state = {
            "model": model,
            "optimizer": optimizer,
            "random": self._random.state_dict(),
            # Tuples are values of one piece: a restore need not know what is in them.
            "scheduler": (scheduler,),
            "scaler": (scaler.state_dict() if scaler is not None else None,),
        }
        if trainer_state is None:
            state["trainer"] = ""
        elif trainer.is_world_process_zero():  # the ranks' log histories differ, in times for one
            state["trainer"] = _as_json(trainer_state, trainer)
        return state


def _model(trainer: Trainer) -> nn.Module:
    if trainer.model is None:
        raise ValueError("the Trainer has no model")
    return trainer.model


def _optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Without Accelerate's wrapper, which is there from ``train()`` on."""
    optimizer: Any = trainer.optimizer
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _as_json(trainer_state: TrainerState, trainer: Trainer) -> str:
    """As the Trainer would write it into trainer_state.json, with the callbacks' states of now."""
    exportable: list[Any] = [
        callback
        for callback in [*trainer.callback_handler.callbacks, trainer.control]
        if isinstance(callback, ExportableState)
    ]
    now = dataclasses.replace(trainer_state, stateful_callbacks=exportable)
    return json.dumps(dataclasses.asdict(now))


def _resume_folder(folder: Path, trainer_state: str) -> str:
    """A checkpoint as `Trainer` wants it, with nothing in it but how far the training is.

    The Trainer knows how many batches it has to skip only from a file of this name, and refuses a folder
    without weights. None in the file of weights: then it leaves the model alone, and complains.
    """
    (folder / "trainer_state.json").write_text(trainer_state)
    save_file({}, folder / "model.safetensors")
    logging.getLogger("transformers.trainer").addFilter(_not_about_missing_keys)
    return str(folder)


def _not_about_missing_keys(record: logging.LogRecord) -> bool:
    return "missing keys in the checkpoint model" not in record.getMessage()


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Token sequences with a rule to learn: each token is the one before, plus three."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * 3 + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--checkpoints", type=Path, required=True)
    options.add_argument(
        "--losses", type=Path, default=Path(os.devnull), help="write what the Trainer logged"
    )
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--every", type=int, default=50, help="save every so many steps")
    return options


def main() -> None:
    """Train a tiny Llama, alone or as a rank of torchrun."""
    arguments = parser().parse_args()
    settings = TrainingArguments(
        output_dir=str(arguments.checkpoints),
        save_strategy="no",  # the manager saves
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=1,
        report_to="none",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)  # all ranks begin with the same weights
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    with dcp.CheckpointManager(
        arguments.checkpoints, every_steps=arguments.every, keep=dcp.Retention(last=3)
    ) as manager:
        callback = DcpCheckpointCallback(manager)
        trainer = Trainer(LlamaForCausalLM(config), settings, train_dataset=Sentences(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        arguments.losses.write_text("".join(json.dumps(entry) + "\n" for entry in history))


if __name__ == "__main__":
    main()
