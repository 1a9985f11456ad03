"""One rank of the training job that `dcp.demo.ranks` starts. Also a small example of using dcp."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dcp import CheckpointManager, FileSystemWriter, PerRank
from dcp.demo.digests import digests_of_state
from dcp.demo.model import ModelSize, build_model
from dcp.storage.stores import Store, open_store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from dcp.storage.stores.objects.shared import ObjectOptions
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["TIMEOUT_SECONDS", "TrainingJob", "train"]

TIMEOUT_SECONDS = 120.0

_WINDOWS = 12
"""Windows of text in a step over all ranks; 1, 2 and 3 ranks get equal parts."""


@dataclass(frozen=True)
class TrainingJob:
    """Options of a job. ``stop`` is a training step, and where in its save all ranks stop to be killed:
    "writing" (before the second write of 8 MiB to their data files, or before the second part of them is sent
    to an object store) or "staged" (once the copy of the state is handed over to the writer process)."""

    corpus: Path
    checkpoints: str
    results: Path
    steps: int
    save_every: int
    writer: str
    stop: tuple[int, str] | None


class Training:
    """Model, optimizer and step: a `Stateful` for `dcp.save`."""

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
        """Give sharded tensors, under names that do not depend on the sharding."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that `dcp.load` has filled."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]

    def train_step(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Make one step; give the log line: the loss over all ranks, and each rank's passing look."""
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
    """Saves and restores through a `dcp.CheckpointManager`, behind the training loop."""

    def __init__(self, training: Training, job: TrainingJob) -> None:
        self._training = training
        self._job = job
        self.manager = CheckpointManager(
            job.checkpoints,
            mode="process" if job.writer == "process" else "thread",
            every_steps=job.save_every,
            writer=self._writer,
            on_failure="raise",
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def _writer(self, checkpoint_id: str) -> FileSystemWriter:
        if self._job.stop == (self._training.step, "writing"):
            stopping = partial(_stopping_store, results=self._job.results)
            return FileSystemWriter(checkpoint_id, open_store=stopping)
        return FileSystemWriter(checkpoint_id)

    def save(self, loss: float) -> None:
        """Save this step if it is time for that, and note digests of every second state."""
        training, job = self._training, self._job
        if not self.manager.should_save(training.step):
            return
        if training.step % (2 * job.save_every) == 0:  # the one that is resumed from, and the last one
            _note_digests(training, job, f"saved-{training.step}.json")
        stops = job.stop == (training.step, "staged")
        if stops:
            self.manager.wait()  # the claim is on the next save alone
        state = {"app": training, "rng": PerRank(training.generator.get_state())}
        self.manager.save(training.step, state, metrics={"loss": loss})
        if stops:
            _stop(job.results)

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


def _batch_of_step(tokens: torch.Tensor, step: int, windows: int, context: int) -> torch.Tensor:
    """Draw the places where the windows of ``step`` begin, shape [windows]: a function of the step alone.

    Neither the number of ranks nor what ran before the step has any influence, so that a resumed run on
    another number of ranks reads the same text.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + 17)
    return torch.randint(0, len(tokens) - context - 1, (windows,), generator=generator)


def _window_batch(
    tokens: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the windows at ``starts`` and the characters that follow each: two of [windows, context]."""
    positions = starts[:, None] + torch.arange(context)
    return tokens[positions], tokens[positions + 1]


def _note_digests(training: Training, job: TrainingJob, name: str) -> None:
    state = {"app": training.state_dict(), "rng": PerRank(training.generator.get_state())}
    digests = digests_of_state(state)
    if dist.get_rank() == 0:
        (job.results / name).write_text(json.dumps(digests, indent=1))


def train(job: TrainingJob) -> None:
    """Train to the last step, in a process group that is there."""
    tokens = torch.frombuffer(bytearray(job.corpus.read_bytes()), dtype=torch.uint8).long()
    training = Training()
    checkpoints = Checkpoints(training, job)
    checkpoints.restore()
    log_file = job.results / "losses.jsonl" if dist.get_rank() == 0 else Path(os.devnull)
    with checkpoints.manager, log_file.open("a", buffering=1) as log:
        while training.step < job.steps and not checkpoints.manager.stop_requested:
            line = training.train_step(tokens)
            log.write(json.dumps(line) + "\n")
            checkpoints.save(line["loss"])


# -- to be killed at a certain place -------------------------------------------------------------------------


def _stop(results: Path) -> NoReturn:
    """Note that this rank has come to where it is to be killed, and wait for that."""
    (results / f"stopped-{dist.get_rank()}").touch()
    while True:
        time.sleep(1)


def _stopping_store(checkpoint_id: str | os.PathLike[str], results: Path) -> Store:
    """Open the store of a checkpoint whose data files stop half written."""
    store = open_store(checkpoint_id)
    writes, given = itertools.count(1), Counter[str]()

    def before_call(step: str, name: str) -> None:
        if step in ("write", "pwrite") and name.endswith(".distcp") and next(writes) == 2:
            _stop(results)

    def before_part(operation: Operation) -> None:
        if given[operation.name] >= ObjectOptions().part_bytes:
            while not store.traffic().get("put_part", 0):
                time.sleep(0.01)
            _stop(results)
        given[operation.name] += operation.size_bytes

    if isinstance(store, PosixStore):
        return PosixStore(checkpoint_id, before_call)
    return FaultInjectingStore(store, Fault("write", name="*.distcp", onwards=True, hook=before_part))
