"""One rank of the training job that `dcp.demo.training.launch` starts. Also a small example of using dcp."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dcp import CheckpointManager, FileSystemWriter, PerRank
from dcp.demo.training.crash import CrashPoint
from dcp.demo.training.digests import digests_of_state
from dcp.demo.training.model import ModelSize, build_model
from dcp.demo.training.rank_notes import rank_note, start_ticks

__all__ = ["main"]

_WINDOWS = 12
"""Windows of text in a step over all ranks; 1, 2 and 3 ranks get equal parts."""

_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class TrainingJob:
    """The command line of a rank."""

    corpus: Path
    checkpoints: str
    results: Path
    steps: int
    save_every: int
    writer: str


class Training:
    """All that a training job has to find again: model, optimizer, step. A `Stateful` for `dcp.save`."""

    def __init__(self) -> None:
        self.size = ModelSize()
        self.model = build_model(self.size)
        rest = [value for name, value in self.model.named_parameters() if name != "pair.weight"]
        # A row of the pair table is seen rarely, so it has to learn fast.
        groups = [{"params": rest, "lr": 2e-3}, {"params": [self.model.pair.weight], "lr": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
        self.step = 0
        # each rank's own: which window it looks at in passing
        self.generator = torch.Generator().manual_seed(1000 + dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors, under names that do not depend on the sharding."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `dcp.load` has filled."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]

    def train_step(self, tokens: torch.Tensor) -> dict[str, Any]:
        """One step; returns what to log: the loss over all ranks, and each rank's passing look."""
        self.step += 1
        context, rank, world_size = self.size.context, dist.get_rank(), dist.get_world_size()
        starts = _batch_of_step(tokens, self.step, _WINDOWS, context).chunk(world_size)[rank]
        # One window more, drawn by the rank's own generator: looked at, not learned from. It shows whether
        # the generator came back too.
        look = torch.randint(0, len(tokens) - context - 1, (1,), generator=self.generator)
        inputs, targets = _window_batch(tokens, torch.cat([starts, look]), context)
        losses = F.cross_entropy(self.model(inputs).transpose(1, 2), targets, reduction="none").mean(1)
        loss = losses[:-1].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        own = torch.stack([loss.detach(), losses[-1].detach()]).double()
        all_ranks = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(all_ranks, own)
        by_rank = torch.stack(all_ranks)
        return {"step": self.step, "loss": by_rank[:, 0].mean().item(), "looks": by_rank[:, 1].tolist()}


class Checkpoints:
    """What the job saves and restores: through a `dcp.CheckpointManager`, behind the training loop."""

    def __init__(self, training: Training, job: TrainingJob, crash: CrashPoint | None) -> None:
        self._training = training
        self._job = job
        self._crash = crash
        self.manager = CheckpointManager(
            job.checkpoints,
            mode="process" if job.writer == "process" else "thread",
            every_steps=job.save_every,
            writer=self._writer,
            on_failure="raise",
            timeout_seconds=_TIMEOUT_SECONDS,
        )

    def _writer(self, checkpoint_id: str) -> FileSystemWriter:
        if self._crash is not None and self._crash.is_in_save_of(self._training.step):
            open_store = self._crash.open_store(self._job.results, dist.get_rank(), dist.get_world_size())
            return FileSystemWriter(checkpoint_id, open_store=open_store)
        return FileSystemWriter(checkpoint_id)

    def save(self, loss: float) -> None:
        """Save this step if it is time for that, and beside every second checkpoint note what the state was,
        for the comparison."""
        training, job = self._training, self._job
        if not self.manager.should_save(training.step):
            return
        if training.step % (2 * job.save_every) == 0:  # the one that is resumed from, and the last one
            _note_digests(training, job, f"saved-{training.step}.json")
        state = {"app": training, "rng": PerRank(training.generator.get_state())}
        is_last = self._crash is not None and self._crash.is_after_staging_of(training.step)
        if is_last:
            self.manager.wait()  # what follows is about this save alone
        self.manager.save(training.step, state, metrics={"loss": loss})
        if self._crash is not None and is_last:
            dist.barrier()  # all ranks have handed their copy over
            self._crash.die()

    def restore(self) -> None:
        """Load the newest good checkpoint, of any number of ranks, into the shards of this one's."""
        training = self._training
        own = PerRank(torch.empty_like(training.generator.get_state()))
        # Generators belong to ranks: with other ranks than before they start anew.
        restored = self.manager.restore({"app": training, "rng": own}, per_rank="keep")
        if restored is None:
            return
        if restored.report.kept_per_rank:
            training.generator.manual_seed(1000 * training.step + dist.get_rank())
        else:
            training.generator.set_state(own.value)
        _note_digests(training, self._job, f"loaded-{training.step}.json")
        report = restored.report
        numbers = [report.bytes_needed, report.bytes_read, report.blocks_verified, report.blocks_unverified]
        counts = torch.tensor(numbers)
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            (self._job.results / "load.json").write_text(json.dumps(counts.tolist()))


def _read_tokens(path: Path) -> torch.Tensor:
    """The text as int64 tokens, shape [characters]."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def _batch_of_step(tokens: torch.Tensor, step: int, windows: int, context: int) -> torch.Tensor:
    """Where the windows of ``step`` begin, shape [windows]: a function of the step alone.

    Neither the number of ranks nor what ran before the step has any influence, so that a resumed run on
    another number of ranks reads the same text.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + 17)
    return torch.randint(0, len(tokens) - context - 1, (windows,), generator=generator)


def _window_batch(
    tokens: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The characters of the windows at ``starts`` and those that follow each: two of [windows, context]."""
    positions = starts[:, None] + torch.arange(context)
    return tokens[positions], tokens[positions + 1]


def _note_digests(training: Training, job: TrainingJob, name: str) -> None:
    state = {"app": training.state_dict(), "rng": PerRank(training.generator.get_state())}
    digests = digests_of_state(state)
    if dist.get_rank() == 0:
        (job.results / name).write_text(json.dumps(digests, indent=1))


def _run(job: TrainingJob) -> None:
    crash = CrashPoint.from_environment()
    rank = dist.get_rank()
    note = rank_note(job.results, rank)
    note.with_suffix(".part").write_text(f"{os.getpid()} {start_ticks(os.getpid())}")
    note.with_suffix(".part").rename(note)  # whoever reads it must not find half of a number
    tokens = _read_tokens(job.corpus)
    training = Training()
    checkpoints = Checkpoints(training, job, crash)
    checkpoints.restore()
    with (
        checkpoints.manager,
        (job.results / "losses.jsonl").open("a") if rank == 0 else Path(os.devnull).open("w") as log,
    ):
        while training.step < job.steps:
            line = training.train_step(tokens)
            log.write(json.dumps(line) + "\n")
            log.flush()
            checkpoints.save(line["loss"])
            if checkpoints.manager.stop_requested:
                break


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank until ``--steps``."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--corpus", "--results"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--checkpoints", required=True, help="a path or a URL")
    for name in ("--steps", "--save-every"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--writer", choices=("thread", "process"), default="thread")
    job = TrainingJob(**vars(parser.parse_args(arguments)))
    # torch's advice on views between FSDP modules; nothing here writes into one
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    try:
        _run(job)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
