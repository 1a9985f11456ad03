"""Training job of the demo: ranks, model and checkpoints. Also a small example of using dcp."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from dcp import CheckpointManager, FileSystemWriter, PerRank
from dcp.planners.flatten import flatten
from dcp.storage.stores import Store, open_store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall
from dcp.storage.stores.objects.store import ObjectOptions
from dcp.storage.stores.posix.store import PosixStore

_TIMEOUT_SECONDS = 120.0
_WINDOWS = 12
"""Windows of text per step over all ranks, divisible by 1, 2 and 3."""
_CONTEXT = 96
_VOCABULARY = 128
"""ASCII: one token per character."""
_WIDTH, _HEADS, _BLOCKS = 128, 4, 3

torch.compiler.reset()
"""Import the compiler once, before the fork; FSDP2 would import it in each rank."""


@dataclass(frozen=True)
class TrainingJob:
    """Options of a job.

    ``stop`` is a step and a point of its save at which all ranks stop to be killed: "writing" (before the
    second write of 8 MiB, or the second part of an upload) or "staged" (after the copy is handed to the
    writer process).
    """

    corpus: Path
    checkpoints: str
    results: Path
    steps: int
    save_every: int
    writer: str
    stop: tuple[int, str] | None


class Transformer(nn.Module):
    """Transformer from characters to next-character logits, with the embedding's weight as output layer.

    2.8 million parameters, 34 MB with AdamW's moments, mostly a table of character pairs: fast, yet large
    enough for a rank's file to need several writes of 8 MiB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(_VOCABULARY, _WIDTH)
        self.pair = nn.Embedding(_VOCABULARY * _VOCABULARY, _WIDTH)
        self.position = nn.Embedding(_CONTEXT, _WIDTH)
        block = partial(nn.TransformerEncoderLayer, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block(_WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0) for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        for table in (self.character, self.pair, self.position):
            nn.init.normal_(table.weight, std=0.05)
        self.head.weight = self.character.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [windows, context, vocabulary] for int64 tokens [windows, context]."""
        before = F.pad(tokens[:, :-1], (1, 0))
        x = self.character(tokens) + self.pair(before * _VOCABULARY + tokens)
        x = x + self.position(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Training:
    """Model, optimizer and step as a `Stateful` for `dcp.save`."""

    def __init__(self) -> None:
        torch.manual_seed(20)  # equal initial values for any number of ranks
        self.model = Transformer()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        rest = [value for name, value in self.model.named_parameters() if name != "pair.weight"]
        # Rows of the pair table are rare and need a high learning rate.
        groups = [{"params": rest, "lr": 2e-3}, {"params": [self.model.pair.weight], "lr": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
        self.step = 0
        # draws the probe window, separately on each rank
        self.generator = torch.Generator().manual_seed(1000 + dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        """Return sharded tensors, under names independent of the sharding."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state filled by `dcp.load`."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]

    def train_step(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Train one step; return the log entry with the loss over all ranks and each rank's random probe."""
        self.step += 1
        world_size = dist.get_world_size()
        # The seed depends only on the step, so that a run resumed on another number of ranks reads the same
        # text.
        of_step = torch.Generator().manual_seed(1_000_003 * self.step + 17)
        end = len(tokens) - _CONTEXT - 1
        starts = torch.randint(0, end, (_WINDOWS,), generator=of_step).chunk(world_size)[dist.get_rank()]
        # A probe window, drawn by the rank's generator and not trained on. It shows whether the generator was
        # restored.
        look = torch.randint(0, end, (1,), generator=self.generator)
        positions = torch.cat([starts, look])[:, None] + torch.arange(_CONTEXT)
        inputs, targets = tokens[positions], tokens[positions + 1]
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
    """Checkpoints in the background through `dcp.CheckpointManager`."""

    def __init__(self, training: Training, job: TrainingJob) -> None:
        self._training = training
        self._job = job
        self.manager = CheckpointManager(
            job.checkpoints,
            mode="process" if job.writer == "process" else "thread",
            every_steps=job.save_every,
            writer=self._writer,
            on_failure="raise",
            timeout_seconds=_TIMEOUT_SECONDS,
        )

    def _writer(self, checkpoint_id: str) -> FileSystemWriter:
        if self._job.stop == (self._training.step, "writing"):
            stopping = partial(_stopping_store, results=self._job.results)
            return FileSystemWriter(checkpoint_id, open_store=stopping)
        return FileSystemWriter(checkpoint_id)

    def save(self, loss: float) -> None:
        """Save this step if due, and record digests of every second state."""
        training, job = self._training, self._job
        if not self.manager.should_save(training.step):
            return
        if training.step % (2 * job.save_every) == 0:  # the checkpoint to resume from, and the last
            _note_digests(training, job, f"saved-{training.step}.json")
        stops = job.stop == (training.step, "staged")
        if stops:
            self.manager.wait()  # the demo kills the job while only the next save is running
        state = {"app": training, "rng": PerRank(training.generator.get_state())}
        self.manager.save(training.step, state, metrics={"loss": loss})
        if stops:
            _stop(job.results)

    def restore(self) -> None:
        """Load the newest valid checkpoint of any number of ranks into this rank's shards."""
        training = self._training
        own = PerRank(torch.empty_like(training.generator.get_state()))
        # Generators belong to ranks: on another number of ranks they start from their seeds.
        restored = self.manager.restore({"app": training, "rng": own}, per_rank="keep")
        if restored is None:
            return
        if restored.report.kept_per_rank:
            training.generator.manual_seed(1000 * training.step + dist.get_rank())
        else:
            training.generator.set_state(own.value)
        _note_digests(training, self._job, f"loaded-{training.step}.json")


def _note_digests(training: Training, job: TrainingJob, name: str) -> None:
    """Write digests by entry name, with those in `PerRank` for all ranks."""
    rank, own = dist.get_rank(), {}
    state = {"app": training.state_dict(), "rng": PerRank(training.generator.get_state())}
    for fqn, value in flatten(state, rank=rank).values.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if full is value or rank == 0:  # gathered tensors are equal on all ranks
            own[fqn] = digest_of(full)
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    if rank == 0:
        digests = {fqn: digest for part in reversed(found) for fqn, digest in part.items()}
        (job.results / name).write_text(json.dumps(digests, indent=1))


def digest_of(value: Any) -> str:
    """Return SHA-256 of a tensor's dtype, shape and bytes, or of another value's type and repr."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()
    full = value.detach().contiguous()
    digest = hashlib.sha256(f"{full.dtype} {tuple(full.shape)} ".encode())
    digest.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _train(job: TrainingJob) -> None:
    """Train to the last step in an existing process group."""
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


# -- ranks: forked processes with the variables and store of torchrun ----------------------------------------


def launch(job: TrainingJob, ranks: int, environment: Mapping[str, str], log: Path) -> None:
    """Run a job in a new session; exit with status 1 if a rank fails, and end the other ranks."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = start_processes(  # type: ignore[no-untyped-call]
        _run_rank, (job, ranks, port), ranks, join=False, start_method="fork"
    )
    # only now, because a fork of a process with threads may hang
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        while not context.join():
            pass
    except ProcessException as error:
        sys.exit(f"{error}")
    finally:
        del store


def _run_rank(rank: int, job: TrainingJob, ranks: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    # rank 0 serves no store
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    # torch's advice on views between FSDP modules; nothing here writes into one
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    try:
        _train(job)
    finally:
        dist.destroy_process_group()


# -- to be killed at a certain place -------------------------------------------------------------------------


def _stop(results: Path) -> NoReturn:
    """Record the arrival of this rank, and wait to be killed."""
    (results / f"stopped-{dist.get_rank()}").touch()
    while True:
        time.sleep(1)


def _stopping_store(checkpoint_id: str | os.PathLike[str], results: Path) -> Store:
    """Open a store that stops half-way in data files."""
    store = open_store(checkpoint_id)
    writes, given = itertools.count(1), Counter[str]()

    def before_call(step: str, name: str) -> None:
        if step in ("write", "pwrite") and name.endswith(".distcp") and next(writes) == 2:
            _stop(results)

    def before_part(operation: StoreCall) -> None:
        if given[operation.name] >= ObjectOptions().part_bytes:
            while not store.traffic().get("put_part", 0):
                time.sleep(0.01)
            _stop(results)
        given[operation.name] += operation.size_bytes

    if isinstance(store, PosixStore):
        return PosixStore(checkpoint_id, before_call)
    return FaultInjectingStore(store, Fault("write", name="*.distcp", onwards=True, hook=before_part))
