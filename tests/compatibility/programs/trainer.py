"""The checkpoint part of a large trainer: asynchronous saves, a stager that is kept, the newest steps stay;
at the end the weights as safetensors.

After the interface that such trainers have for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Part(Stateful):
    """What torch's helpers get and set of a model."""

    def __init__(self, get: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], object]) -> None:
        self.get, self.take = get, take

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return self.get()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it."""
        self.take(state_dict)


class TrainState(Stateful):
    """How far it is."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it."""
        self.step = int(state_dict["step"])


class Trainer:
    """Keeps two steps; loads the newest."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.folder = folder
        self.group = dist.new_group(backend="gloo")
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.train = TrainState()
        trained, lenient = (self.model, self.optimizer), StateDictOptions(strict=False)
        flat: Any = {"options": StateDictOptions(flatten_optimizer_state_dict=True)}
        self.states: dict[str, Any] = {
            "model": Part(
                lambda: get_model_state_dict(self.model),
                lambda state: set_model_state_dict(self.model, state, options=lenient),
            ),
            "optimizer": Part(
                lambda: get_optimizer_state_dict(*trained, **flat),
                lambda state: set_optimizer_state_dict(*trained, state, **flat),
            ),
            "train_state": self.train,
        }
        self.stager = DefaultStager(StagingOptions(False, False, True, False))
        self.response: AsyncSaveResponse | None = None

    def close(self) -> None:
        """After the last save."""
        self.wait()
        self.stager.close()

    def learn(self) -> None:
        """A step."""
        self.model(torch.ones(2, 8)).square().mean().backward()
        if self.response is not None:
            self.response.staging_completion.result()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.train.step += 1

    def wait(self) -> None:
        """For the save under way."""
        if self.response is not None:
            self.response.upload_completion.result()
            self.response = None

    def save(self) -> None:
        """The step it is at, behind the loop."""
        self.wait()
        result = dcp.async_save(
            self.states,
            checkpoint_id=str(self.folder / f"step-{self.train.step}"),
            process_group=self.group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
        )
        assert isinstance(result, AsyncSaveResponse)
        self.response = result
        dist.barrier()
        if dist.get_rank() == 0:
            for old in self.steps()[:-2]:
                shutil.rmtree(self.folder / f"step-{old}")

    def steps(self) -> list[int]:
        """What is there whole."""
        whole = (path.parent for path in self.folder.glob("step-*/.metadata"))
        return sorted(int(path.name.removeprefix("step-")) for path in whole)

    def load(self) -> None:
        """The newest."""
        dcp.load(
            self.states,
            checkpoint_id=str(self.folder / f"step-{self.steps()[-1]}"),
            process_group=self.group,
        )

    def export(self) -> None:
        """The weights alone, in shards first and then in one file."""
        weights = self.states["model"].state_dict()
        dcp.save(
            weights,
            storage_writer=HuggingFaceStorageWriter(
                path=str(self.folder / "sharded"),
                save_distributed=True,
                fqn_to_index_mapping=dict.fromkeys(weights, 1),
                enable_consolidation=False,
            ),
            process_group=self.group,
        )
        (self.folder / "export").mkdir(exist_ok=True)
        consolidate_safetensors_files_on_every_rank(
            input_dir=str(self.folder / "sharded"),
            output_dir=str(self.folder / "export"),
            fqn_to_index_mapping=dict.fromkeys(weights, 1),
            num_threads=1,
        )


def main(folder: Path) -> dict[str, Any]:
    """Save three steps, load the newest into another trainer, export; what is there then, on rank 0."""
    first, second = Trainer(folder, seed=0), Trainer(folder, seed=1)
    for _ in range(3):
        first.learn()
        first.save()
    first.close()
    dist.barrier()
    second.load()
    first.learn()
    second.learn()
    assert second.train.step == first.train.step == 4
    second.export()
    dist.barrier()
    whole = get_model_state_dict(second.model, options=StateDictOptions(full_state_dict=True))
    second.close()
    if dist.get_rank():
        return {}
    stored: dict[str, Any] = {}
    _load_state_dict(
        stored,
        storage_reader=dcp.FileSystemReader(str(folder / "step-3")),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    (file,) = (folder / "export").glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        exported = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - it is no dict
    return {"model": whole, "stored": stored, "exported": exported, "newest": first.steps()[-1]}
