"""Benchmark a training loop that saves every 20 steps, beside the same loop without saves.

A small transformer with Adam in fp32 has about 0.8 GiB of state. Each round runs 20 steps per contender, so
that a slow minute of the machine affects all contenders. A segment starts with a save and includes the wait
for the rest of that save after its last step.

The cost of one save is also estimated within its segment: the time until the commit, less the time of as many
steps in the second half of the segment. This figure is more stable on a shared machine.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.asynchronous.sides import ASYNC_SIDES, AsyncSide
from benchmarks.machine.process_tree import cpu_seconds
from benchmarks.processes import Progress
from benchmarks.rounds import Measurement, Sample, busy_seconds, remove_durably, rotated

__all__ = ["CONTENDERS", "STEPS_PER_SAVE", "LoopSpec", "train"]

STEPS_PER_SAVE = 20
CONTENDERS = ("ours_process", "ours_thread", "stock", "stock_process")
_NO_SAVES = "no_saves"
_VOCABULARY = 8192
_CONTEXT = 64
_WINDOWS = 2
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class LoopSpec:
    """A job: size of the model (1: 69 million parameters), number of rounds, folder of the checkpoints."""

    scale: float
    rounds: int
    folder: Path
    contenders: tuple[str, ...] = CONTENDERS
    steps: int = STEPS_PER_SAVE


class _Segment(NamedTuple):
    step: Sample
    cost_seconds: float


class _Model(nn.Module):
    """Map tokens to logits of the next tokens."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = max(32, round(768 * scale**0.5 / 32) * 32)
        vocabulary = max(64, int(_VOCABULARY * scale**0.5))
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map shape [windows, context] to [windows, context, vocabulary]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: torch.Tensor = self.output(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


class _Trainer:
    def __init__(self, scale: float) -> None:
        torch.manual_seed(0)
        self._model = _Model(scale)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        vocabulary = self._model.embedding.num_embeddings
        self._tokens = torch.randint(vocabulary, (_WINDOWS, _CONTEXT + 1))

    def step(self) -> None:
        """Forward, backward, update."""
        logits = self._model(self._tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return model and optimizer as in torch's DCP tutorial."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def train(rank: int, world_size: int, progress: Progress, spec: LoopSpec) -> Measurement:
    """Return seconds per step by contender and round, and ``cost_seconds`` per save among the facts.

    The calling process must be allowed to start child processes. The loop runs in a process group of one
    rank, because stock's process writer needs a group.
    """
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # otherwise stock's process writer resolves the host name
    store = dist.FileStore(str(spec.folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    loop = _Loop(spec, progress)
    try:
        return loop.run()
    finally:
        loop.close()
        dist.destroy_process_group()


class _Loop:
    def __init__(self, spec: LoopSpec, progress: Progress) -> None:
        self._spec = spec
        self._progress = progress
        self._trainer = _Trainer(spec.scale)
        self._sides: dict[str, AsyncSide] = {name: ASYNC_SIDES[name]() for name in spec.contenders}
        self._saves = 0

    def run(self) -> Measurement:
        """Warm up every contender, then the rounds."""
        for _ in range(_WARM_UP_STEPS):
            self._trainer.step()
        state = self._trainer.state_dict()
        tensors = [value for value in _leaves(state) if isinstance(value, torch.Tensor)]
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        del state
        result = Measurement("loop", 1, "train", size_bytes, len(tensors))
        costs: dict[str, list[float]] = {name: [] for name in self._sides}
        result.facts |= {"threads": torch.get_num_threads(), "cost_seconds": costs}
        for name in self._sides:
            self._progress(f"warming up {name}")
            self._segment(name, 2)
        for number in range(self._spec.rounds):
            for name in rotated((_NO_SAVES, *self._sides), number):
                segment = self._segment(name, self._spec.steps)
                result.note(name, segment.step)
                if name in costs:
                    costs[name].append(segment.cost_seconds)
            self._progress(f"round {number + 1}/{self._spec.rounds}, a step: {result.latest()}")
        return result

    def close(self) -> None:
        """Release the buffers and writers of the contenders."""
        for side in self._sides.values():
            side.close()

    def _segment(self, name: str, steps: int) -> _Segment:
        self._saves += 1
        folder = self._spec.folder / f"save-{self._saves}"
        side = self._sides.get(name)
        gc.collect()
        busy, own, begun = busy_seconds(), cpu_seconds(), time.perf_counter()
        started = side.start(self._trainer.state_dict(), folder) if side else None
        if started:
            started.wait_until_staged()
        ends = [time.perf_counter()]
        saving = 0
        for _ in range(steps):
            saving += started is not None and not started.ended
            self._trainer.step()
            ends.append(time.perf_counter())
        if started:
            started.wait_until_committed()
        elapsed = time.perf_counter() - begun
        own, busy = cpu_seconds() - own, busy_seconds() - busy
        if started:
            remove_durably(folder)
        durations = [end - begin for begin, end in itertools.pairwise(ends)]
        undisturbed = statistics.median(durations[steps // 2 :])
        cost_seconds = elapsed - sum(durations[saving:]) - saving * undisturbed
        return _Segment(Sample(elapsed / steps, max(0.0, busy - own) / elapsed), cost_seconds)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]
