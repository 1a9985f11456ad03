"""Short training runs of the trainers with an integration, in one process and on gloo ranks on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import dcp
import dcp.integrations.accelerate
from dcp.integrations.huggingface import DcpTrainer
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["HuggingFaceRun", "LoopRun", "fsdp_on_cpu", "llama"]


class DyingWriter(FileSystemWriter):
    """A writer that kills its process by SIGKILL after writing the data and before the commit."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the data, then kill the process."""
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def writer_that_dies_at(name: str | None) -> Callable[[str], FileSystemWriter]:
    """Return a maker of writers: all ranks die in the save of the checkpoint ``name``."""
    return lambda place: DyingWriter(place) if Path(place).name == name else FileSystemWriter(place)


@contextmanager
def fsdp_on_cpu(enabled: bool = True) -> Iterator[None]:
    """Enable Accelerate's FSDP on the CPU, where Accelerate ignores FSDP although all of it works. As on
    GPUs, a single process uses no FSDP."""
    original = AcceleratorState.__init__

    def patched(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and PartialState._shared_state["num_processes"] > 1:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    if "RANK" in os.environ:  # torchrun also sets these
        os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1")
    os.environ["OMP_NUM_THREADS"] = "1"  # by default Accelerate uses all cores for each rank
    if enabled:
        AcceleratorState.__init__ = patched
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Token sequences with a rule to learn: each token is the previous one plus three."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * 3 + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def llama(tied: bool = False) -> LlamaForCausalLM:
    """Return a tiny model, equal on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def with_adapters(model: nn.Module) -> nn.Module:
    """Add LoRA adapters, and a second adapter that is not trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)
    adapted.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    adapted.set_adapter("default")
    result: nn.Module = adapted
    return result


class Sigterm(TrainerCallback):
    """Send SIGTERM within a step, like a scheduler."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send SIGTERM to this process."""
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class HuggingFaceRun:
    """A training: ``run(rank, world_size)`` trains in ``folder`` and returns the log as (step, loss)."""

    folder: str
    steps: int = 9
    resume: bool | str | None = None
    die_at: str | None = None
    sigterm_at: int | None = None
    fsdp: bool = False
    tied: bool = False
    peft: bool = False
    trainer: type[Any] = DcpTrainer
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Return the trainer."""
        arguments = TrainingArguments(
            output_dir=self.folder,
            **{
                "save_steps": 3,
                "max_steps": self.steps,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-2,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2,
                "logging_steps": 2,
                "report_to": "none",
                "ddp_find_unused_parameters": False,
                "disable_tqdm": True,
                "use_cpu": True,
                "fsdp": self.fsdp,
                **self.arguments,
            },
        )
        options: dict[str, Any] = {}
        if issubclass(self.trainer, DcpTrainer):
            options["checkpoint_options"] = (
                {"writer": writer_that_dies_at(self.die_at)} if self.die_at else {}
            )
        model: nn.Module = llama(self.tied)
        if self.peft:
            model = with_adapters(model)
        return self.trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences(), **options)

    def run(self, rank: int = 0, world_size: int = 1) -> list[tuple[int, float]]:
        """Train and return the logged losses."""
        with fsdp_on_cpu(self.fsdp):
            trainer = self.make()
            if self.sigterm_at is not None and rank == world_size - 1:
                trainer.add_callback(Sigterm(self.sigterm_at))
            trainer.train(resume_from_checkpoint=self.resume)
        return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


class Progress:
    """The position of a loop; registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, whose number grows with each step."""
        return {"epoch": self.epoch, "batch": self.batch, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position."""
        self.epoch, self.batch, self.losses = state["epoch"], state["batch"], state["losses"]


@dataclass(frozen=True)
class LoopRun:
    """A loop with an `Accelerator`: ``run(rank, world_size)`` trains in ``folder`` and returns all losses."""

    folder: str
    steps: int = 9
    every: int = 3
    resume: bool = False
    die_at: str | None = None
    fsdp: bool = False
    peft: bool = False
    stateful_loader: bool = False

    def run(self, rank: int = 0, world_size: int = 1) -> list[float]:
        """Train and return the losses."""
        with fsdp_on_cpu(self.fsdp):
            return self._train()

    def accelerator(self) -> Accelerator:
        """Return an Accelerator with automatic naming and dcp."""
        loading = DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=0, use_stateful_dataloader=self.stateful_loader
        )
        project = ProjectConfiguration(self.folder, automatic_checkpoint_naming=True, total_limit=2)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if self.fsdp else None
        accelerator = Accelerator(
            cpu=True, dataloader_config=loading, project_config=project, fsdp_plugin=plugin
        )
        writer: dict[str, Any] = {"writer": writer_that_dies_at(self.die_at)} if self.die_at else {}
        dcp.integrations.accelerate.use(accelerator, **writer)
        return accelerator

    def _train(self) -> list[float]:
        accelerator = self.accelerator()
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
        if self.peft:
            model = llama()
            model = with_adapters(model)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        inputs = torch.randn(40, 16)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        own = torch.Generator().manual_seed(0)  # without it each iterator draws from the global generator
        loader: Any = DataLoader(data, batch_size=4, shuffle=True, generator=own)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        torch.manual_seed(1000 + accelerator.process_index)
        progress = Progress()
        accelerator.register_for_checkpointing(progress)
        if self.resume:
            accelerator.load_state()
        self._loop(accelerator, model, optimizer, scheduler, loader, progress)
        accelerator.end_training()
        return progress.losses

    def _loop(
        self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any, progress: Progress
    ) -> None:
        while len(progress.losses) < self.steps:
            batches = loader
            if progress.batch and not self.stateful_loader:
                batches = accelerator.skip_first_batches(loader, progress.batch)
            for inputs, targets in batches:
                loss = nn.functional.mse_loss(self._predicted(model, inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.losses.append(accelerator.reduce(loss.detach(), "mean").item())
                progress.batch += 1
                if len(progress.losses) % self.every == 0:
                    accelerator.save_state()
                if len(progress.losses) >= self.steps:
                    return
            progress.epoch, progress.batch = progress.epoch + 1, 0
            loader.set_epoch(progress.epoch)

    def _predicted(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        if not self.peft:
            predicted: torch.Tensor = model(inputs)
            return predicted
        logits: torch.Tensor = model(input_ids=(inputs.abs() * 10).long() % 64).logits
        return logits.mean((1, 2))[:, None]
