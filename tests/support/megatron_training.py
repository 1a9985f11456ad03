"""A small training like Megatron's: layers over tensor- and pipeline-parallel ranks and replicas, sharded
state, folders, a tracker file, and a queue of asynchronous saves."""

from __future__ import annotations

import json
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.dying import die_in_commit
from tests.support.megatron_interface import PACKAGE

__all__ = ["training"]

LAYERS, WIDTH = 4, 8


class _Stage:
    """The layers of a pipeline stage; of each layer the rows of one tensor-parallel rank."""

    def __init__(self, rank: int, tp: int, pp: int) -> None:
        self.tp, self.pp = tp, pp
        self.tp_rank, self.pp_rank, self.dp_rank = rank % tp, rank // tp % pp, rank // (tp * pp)
        count = LAYERS // pp
        self.layers = range(self.pp_rank * count, (self.pp_rank + 1) * count)
        whole = torch.arange(LAYERS * WIDTH * WIDTH, dtype=torch.float32).sin().view(LAYERS, WIDTH, WIDTH)
        parts = [whole[layer].chunk(tp)[self.tp_rank] for layer in self.layers]
        self.weights = [nn.Parameter(part.clone()) for part in parts]
        self.biases = [nn.Parameter(torch.zeros(WIDTH)) for _ in parts]
        self.optimizer = torch.optim.SGD([*self.weights, *self.biases], lr=0.05, momentum=0.9)
        self.generator = torch.Generator().manual_seed(self.pp_rank * tp + self.tp_rank)

    def step(self, iteration: int) -> float:
        """Update this rank's part once, with noise; return the loss."""
        batch = torch.linspace(0, iteration, 2 * WIDTH).cos().view(2, WIDTH)
        noisy = batch + torch.rand(batch.shape, generator=self.generator)
        losses = [(noisy @ weight.T - 1).square().mean() for weight in self.weights]
        losses += [(batch + bias).square().mean() for bias in self.biases]  # equal on replicas
        loss: Any = torch.stack(losses).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def sharded(self, *, momentum: bool, rng: bool) -> dict[str, Any]:
        """Return the sharded state: the weights of all layers are one tensor with the layer as first axis;
        biases are replicated."""
        package = import_module(PACKAGE)
        make = package.ShardedTensor.from_rank_offsets
        state: dict[str, Any] = {"model": self._tensors("decoder", make, lambda parameter: parameter)}
        if momentum:
            buffers = self.optimizer.state
            state["optimizer"] = self._tensors(
                "optimizer", make, lambda parameter: buffers[parameter]["momentum_buffer"]
            )
        if rng:
            places = ((self.pp, self.tp), (self.pp_rank, self.tp_rank))
            given = [{"torch": self.generator.get_state()}]
            state["rng_state"] = package.ShardedObject("rng_state", given, *places, replica_id=self.dp_rank)
        return state

    def _tensors(self, name: str, make: Any, of: Any) -> dict[str, list[Any]]:
        weights = [
            make(
                f"{name}.weight",
                of(weight),
                (0, layer, LAYERS),
                (1, self.tp_rank, self.tp),
                prepend_axis_num=1,
                replica_id=self.dp_rank,
            )
            for layer, weight in zip(self.layers, self.weights, strict=True)
        ]
        biases = [
            make(f"{name}.layers.{layer}.bias", of(bias), replica_id=(self.tp_rank, self.dp_rank))
            for layer, bias in zip(self.layers, self.biases, strict=True)
        ]
        return {"weights": weights, "biases": biases}


def training(rank: int, ranks: int, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train up to ``steps``, from the newest iteration, saving every third.

    Options: ``tp``, ``pp``; ``mode`` "sync", "thread" or "process"; with ``die_at`` rank 0 is killed in save
    number ``die_at``. Returns the sum of the weights and the common state of the checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mode = options.get("mode", "sync")
    import dcp.integrations.megatron

    dcp.integrations.megatron.use(**({} if mode == "sync" else {"mode": mode}))
    stage = _Stage(rank, options.get("tp", 1), options.get("pp", 1))
    if rank == 0 and options.get("die_at") and mode != "process":
        die_in_commit(options["die_at"])
    iteration, common = _resumed(stage, folder, options)
    queue = import_module(f"{PACKAGE}.strategies.torch").get_async_strategy("mcore", "AsyncCallsQueue")[1]()
    while iteration < options["steps"]:
        iteration += 1
        loss = stage.step(iteration)
        with (folder / f"losses-{rank}.jsonl").open("a") as log:
            log.write(json.dumps({"step": iteration, "loss": loss.hex()}) + "\n")
        if iteration % 3 == 0:
            queue.maybe_finalize_async_calls(blocking=True)  # so that the previous save is the newest
            _save(stage, folder, iteration, queue, is_async=mode != "sync")
            if rank == 0 and mode == "process" and iteration == 3 * options.get("die_at", 0):
                os.kill(os.getpid(), signal.SIGKILL)
        queue.maybe_finalize_async_calls()
    queue.maybe_finalize_async_calls(blocking=True)
    tensors = [*stage.weights, *stage.biases]
    return {"sum": sum(float(each.detach().double().sum()) for each in tensors), "common": common}


def _save(stage: _Stage, folder: Path, iteration: int, queue: Any, *, is_async: bool) -> None:
    place = folder / f"iter_{iteration:07d}"
    place.mkdir(exist_ok=True)
    state = stage.sharded(momentum=True, rng=True)
    state |= {"iteration": iteration, "args": Namespace(tp=stage.tp, pp=stage.pp)}
    request = import_module(PACKAGE).save(
        state, str(place), async_sharded_save=is_async, async_strategy="mcore"
    )
    done = partial((folder / "latest").write_text, str(iteration))
    if is_async:
        request.finalize_fns.append(done)
        queue.schedule_async_request(request)
    else:
        done()


def _resumed(stage: _Stage, folder: Path, options: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    tracker = folder / "latest"
    if not tracker.exists():
        return 0, {}
    for parameter in (*stage.weights, *stage.biases):
        stage.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    place = folder / f"iter_{int(tracker.read_text()):07d}"
    state = stage.sharded(momentum=True, rng=options.get("rng", True))
    loaded = import_module(PACKAGE).load(state, str(place))
    if "rng_state" in loaded:
        stage.generator.set_state(loaded["rng_state"][0]["torch"])
    common = {"tp": loaded["args"].tp, "pp": loaded["args"].pp, "iteration": loaded["iteration"]}
    return loaded["iteration"], common
