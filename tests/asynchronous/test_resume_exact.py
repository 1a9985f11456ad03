"""Training resumed from an asynchronous save is bit for bit the same as uninterrupted training.

Two FSDP2 ranks train with AdamW, a learning rate schedule and a random generator per rank. As soon as the
staged copy is complete, the whole state is overwritten with garbage, and only then may storage receive a
byte. A value that a save reads too late is therefore garbage in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp
from dcp.state_dict import get_state_dict, set_state_dict
from tests.support.background import FileGate, gated_writer
from tests.support.ranks import run_ranks
from tests.support.values import leaves, local_parts, raw

Mode = Literal["thread", "process"]
TIMEOUT_SECONDS = 240.0
STEPS = 7


class Trainer:
    """A `Stateful` with model, optimizer, schedule and lists that all ranks share. It also holds a generator
    and losses per rank, which `saved` adds."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (world_size,))
        layers = [nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1)]
        self.model = nn.Sequential(*layers)
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.random = torch.Generator().manual_seed(100 * seed + rank)
        self.trail: list[list[float]] = []
        self.own_losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks share."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        schedule = self.schedule.state_dict()
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "trail": self.trail}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the loaded state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.schedule.load_state_dict(state_dict["schedule"])
        self.trail = state_dict["trail"]

    def saved(self) -> dict[str, Any]:
        """Return the state to save: the shared state and the state per rank."""
        own = {"random": self.random.get_state(), "losses": self.own_losses}
        return {"trainer": self, "own": dcp.PerRank(own)}

    def restored(self, own: dict[str, Any]) -> None:
        """Take the restored state of this rank."""
        self.random.set_state(own["random"])
        self.own_losses = own["losses"]

    def compute(self) -> float:
        """Compute gradients for a batch of this rank, and return the loss."""
        batch = torch.randn(4, 6, generator=self.random)
        loss = F.mse_loss(self.model(batch), batch.sin().sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        self.batch = batch.sum(0)
        dist.all_reduce(self.batch)
        self.own_losses.append(loss.item())
        return loss.item()

    def update(self) -> None:
        """Change everything that is saved."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.trail.append([len(self.trail), self.batch[0].item()])


class Vandal:
    """Overwrites the saved state of a trainer, and can bring it back."""

    def __init__(self, trainer: Trainer, own: dict[str, Any]) -> None:
        self.lists: list[Any] = [trainer.trail, *trainer.trail, trainer.own_losses, own]
        self.lists_before = [entry.copy() for entry in self.lists]
        tensors = [value for _, value in leaves([trainer.state_dict(), own]) if torch.is_tensor(value)]
        self.parts = [part for tensor in tensors for part in local_parts(tensor)]
        self.before = [part.clone() for part in self.parts]

    def strike(self) -> None:
        """Fill tensors with garbage, and clear lists and dicts."""
        with torch.no_grad():
            for number, part in enumerate(self.parts):
                part.fill_(number % 7 + 13)
        for entry in self.lists:
            entry.clear()

    def undo(self) -> None:
        """Bring back the state from before `strike`."""
        with torch.no_grad():
            for part, before in zip(self.parts, self.before, strict=True):
                part.copy_(before)
        for entry, entry_before in zip(self.lists, self.lists_before, strict=True):
            entry.extend(entry_before) if isinstance(entry, list) else entry.update(entry_before)


Plan = dict[int, Literal["call", "completion", "lock"]]
"""Maps each step to save to the event after which its state may change. The state of an even step stays
garbage until the commit."""


class Saver:
    """Saves the planned steps of a trainer, and overwrites the state as soon as that is allowed."""

    def __init__(self, root: Path, gates: Path, plan: Plan, **options: Any) -> None:
        self.gates, self.plan = gates, plan
        self.manager = dcp.CheckpointManager(
            root, writer=self.writer, timeout_seconds=TIMEOUT_SECONDS, **options
        )

    def gate(self, checkpoint_id: str) -> FileGate:
        """Return the gate that holds back the writer of a step."""
        return FileGate(self.gates / Path(checkpoint_id).name)

    def writer(self, checkpoint_id: str) -> dcp.FileSystemWriter:
        """Return a writer that receives no byte before `save` opens its gate."""
        return gated_writer(Path(checkpoint_id), self.gate(checkpoint_id))

    def save(self, trainer: Trainer, step: int) -> None:
        """Save ``step`` if it is planned: overwrite the state with garbage, then allow the commit."""
        how = self.plan.get(step)
        if how is None:
            return
        state = trainer.saved()
        vandal = Vandal(trainer, state["own"].value)
        future = self.manager.save(step, state, force=True, overlap=how != "call")
        assert future is not None
        if how == "completion":
            future.staging_completion.result(TIMEOUT_SECONDS)
        with self.manager.lock() if how == "lock" else nullcontext():
            vandal.strike()
        assert not future.done()
        self.gate(self.manager.checkpoint_id(step)).open()
        if step % 2 == 0:
            future.result(TIMEOUT_SECONDS)
        vandal.undo()


def train(trainer: Trainer, first: int, saver: Saver | None = None) -> Iterator[float]:
    """Train from step ``first``, and yield the loss of each step."""
    for step in range(first, STEPS + 1):
        yield trainer.compute()
        trainer.update()
        if saver is not None:
            saver.save(trainer, step)


def snapshot(trainer: Trainer) -> dict[str, Any]:
    """Return all bytes of the state by name."""
    found: dict[str, Any] = {}
    for name, value in leaves([trainer.state_dict(), trainer.random.get_state(), trainer.own_losses]):
        found[name] = [*map(raw, local_parts(value))] if isinstance(value, torch.Tensor) else value
    return found


def differing(trainer: Trainer, wanted: dict[str, Any]) -> list[str]:
    """Return the names that differ from a snapshot."""
    found = snapshot(trainer)
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def run_and_resume(
    rank: int, world_size: int, root: Path, mode: Mode, plan: Plan, back_to: list[int]
) -> dict[int, Any]:
    """Train without saves, train with saves, and resume from each step of ``back_to``. Return (losses, names
    that differ at the end) by the step resumed from. The key 0 is the uninterrupted run, the key -1 the run
    with saves."""
    alone = Trainer(rank, world_size, seed=1)
    results: dict[int, Any] = {0: (list(train(alone, 1)), [])}
    wanted = snapshot(alone)

    gates = root / f"gates-{rank}"
    gates.mkdir()
    saver = Saver(root / "ckpt", gates, plan, mode=mode)
    with saver.manager as manager:
        saved = Trainer(rank, world_size, seed=1)
        results[-1] = list(train(saved, 1, saver)), differing(saved, wanted)
        assert manager.wait(TIMEOUT_SECONDS)
        assert manager.failures == 0
        assert manager.all_steps() == sorted(plan)

    with dcp.CheckpointManager(root / "ckpt", mode="sync", handle_sigterm=False) as manager:
        for step in back_to:
            resumed = Trainer(rank, world_size, seed=2)
            state = resumed.saved()
            restored = manager.restore(state, step)
            assert restored is not None
            assert restored.step == step
            resumed.restored(state["own"].value)
            results[step] = list(train(resumed, step + 1)), differing(resumed, wanted)
    return results


_EACH: Plan = {step: "lock" if step % 3 == 0 else "call" for step in range(1, STEPS + 1)}
_SOME: Plan = {2: "call", 3: "completion", 4: "lock", 6: "call"}


@pytest.mark.parametrize(
    ("mode", "plan", "back_to"),
    [("thread", _EACH, [2, 3]), pytest.param("process", _SOME, [*_SOME], marks=pytest.mark.exhaustive)],
)
def test_a_resumed_run_equals_an_uninterrupted_run(
    tmp_path: Path, mode: Mode, plan: Plan, back_to: list[int]
) -> None:
    """With and without overlap, by threads and by processes that share memory with the trainers, all later
    losses and the final state equal those of the uninterrupted run bit for bit."""
    for results in run_ranks(2, run_and_resume, tmp_path, mode, plan, back_to):
        uninterrupted = results[0][0]
        assert len(set(uninterrupted)) == STEPS
        for step, (losses, different) in results.items():
            assert losses == uninterrupted[max(step, 0) :], step
            assert different == [], step
