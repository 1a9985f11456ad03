"""Lightning's Trainer, the real package, with dcp's plug-in, strategy and callback: killed and resumed."""

from __future__ import annotations

import datetime
import os
import pickle
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UnsafeObjectError
from tests.support.batches import losses
from tests.support.conversion import flip
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.harmless_values import same
from tests.support.manager_runs import Fault, Gate, WatchedRoot

STEPS = 14
LAST = "last.ckpt"


def _trained(jobs: list[tuple[Path, int, dict[str, Any]]]) -> list[list[Ending]]:
    """Run trainings one after the other, each on its number of ranks."""
    from tests.support.lightning_training import training

    return [run_groups([Group(ranks, training, (folder, options))])[0] for folder, ranks, options in jobs]


def plugin_of(**options: Any) -> Any:
    """Return dcp's plug-in for a Trainer."""
    from dcp.integrations.lightning import DcpCheckpointIO

    return DcpCheckpointIO(**options)


def _killed_and_resumed(
    folder: Path, strategy: str, ranks: int, die_at: int, resume_on: int
) -> tuple[Path, Path]:
    """Return the folders of an uninterrupted training, and of a training that was killed and resumed."""
    whole, killed = folder / "whole", folder / "killed"
    jobs: list[tuple[Path, int, dict[str, Any]]] = [
        (whole, ranks, {"strategy": strategy}),
        (killed, ranks, {"strategy": strategy, "die_at": die_at}),
        (killed, resume_on, {"strategy": strategy}),
    ]
    finished, died, resumed = in_lab(_trained, jobs)
    assert [ending.value for ending in finished] == [STEPS] * ranks, finished
    assert died[0].killed, died
    assert [ending.value for ending in resumed] == [STEPS] * resume_on, resumed
    return whole, killed


# Steps 3, 6 and so on have two saves: one with the step in the name, and "last".
@pytest.mark.parametrize(
    ("strategy", "ranks", "die_at"),
    [
        ("ddp", 1, 6),
        *(
            pytest.param(strategy, ranks, die_at, marks=pytest.mark.exhaustive)
            for strategy, ranks in (("ddp", 1), ("ddp", 2), ("fsdp2", 2))
            for die_at in (1, 2, 3, 4, 5, 6)
            if (strategy, ranks, die_at) != ("ddp", 1, 6)
        ),
    ],
)
def test_a_trainer_killed_in_a_save_resumes_exactly(
    tmp_path: Path, strategy: str, ranks: int, die_at: int
) -> None:
    """After a kill within an epoch, with dropout, each loss of each rank equals that of an uninterrupted run.
    The checkpoints that ModelCheckpoint keeps are left."""
    whole, killed = _killed_and_resumed(tmp_path, strategy, ranks, die_at, resume_on=ranks)
    for rank in range(ranks):
        assert losses(killed, rank) == losses(whole, rank)
    left = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert len(left) == 3, left  # the two best and the last
    assert left[-1] == LAST


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "ranks", "resume_on"),
    [("ddp", 2, 1), ("ddp", 1, 2), ("fsdp2", 2, 1), ("fsdp2", 1, 2), ("fsdp2", 2, 3)],
)
def test_a_trainer_resumes_on_another_number_of_ranks(
    tmp_path: Path, strategy: str, ranks: int, resume_on: int
) -> None:
    """A run that is killed in the save of step 9 resumes after step 6, and trains to the end."""
    whole, killed = _killed_and_resumed(tmp_path, strategy, ranks, 6, resume_on)
    before, after = losses(whole), losses(killed)
    assert sorted(after) == list(range(STEPS))
    assert [after[step] for step in range(6)] == [before[step] for step in range(6)]
    assert all(float.fromhex(loss) < 1 for loss in after.values())


def _checkpoint() -> dict[str, Any]:
    """Return a checkpoint with all unusual kinds of entries."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict(), {"state": {}, "param_groups": []}],
        "lr_schedulers": [{"base_lrs": [0.1], "_step_count": 3, "milestones": Counter({3: 1})}],
        "loops": {"fit_loop": {"state_dict": {}, "progress": {"total": {"ready": 3}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss.a'}": {
                "best_k_models": {"/a/b.c/epoch=1-step=2.ckpt": torch.tensor(0.5)},
                "kth_value": torch.tensor(float("inf")),
                "best_model_score": None,
            }
        },
        "hyper_parameters": OrderedDict(width=16, when=datetime.date(2026, 1, 2), names=["a", ("b", None)]),
        "mixed": {"a": {"b": 1}, "a.b": 2, 0: "zero", "0": "text", None: [], "deep": {"x": OrderedDict()}},
        "nothing": {},
        "lists": [[], [torch.ones(2)], [{}]],
        "pair": (torch.zeros(2), {"x": torch.ones(1)}),
    }


@pytest.mark.parametrize("mode", ["thread", "sync", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_containers_are_loaded_unchanged(tmp_path: Path, mode: Any) -> None:
    """Classes, orders and keys of all containers are loaded; changes after the call are not saved."""
    plugin, checkpoint = plugin_of(mode=mode), _checkpoint()
    plugin.save_checkpoint(checkpoint, tmp_path / LAST)
    expected = pickle.loads(pickle.dumps(checkpoint))
    checkpoint["state_dict"]["0.weight"].zero_()
    checkpoint["callbacks"].clear()
    loaded = plugin.load_checkpoint(tmp_path / LAST)
    differing = {key for key in expected if not same(loaded.get(key), expected[key])}
    assert not differing
    assert list(loaded) == list(expected)
    plugin.teardown()


@pytest.mark.parametrize("how", ["commits", "fails", "has failed"])
def test_old_checkpoints_stay_until_the_next_commit(tmp_path: Path, how: str) -> None:
    """An old checkpoint is deleted only after the newer one committed, so a kill leaves one. After a failed
    save it stays, also if the failure came first, and the next call raises the error."""
    root, gate, plugin = WatchedRoot(tmp_path), Gate(), plugin_of()
    old, new = (f"{root.url}/{root.path(step).name}" for step in (1, 2))
    plugin.save_checkpoint({"a": torch.ones(2)}, old)
    plugin.wait()
    error = None if how == "commits" else StorageError("the storage is away")
    root.store(2).add(Fault("publish", name="manifest.msgpack", hook=gate, error=error))
    plugin.save_checkpoint({"a": torch.ones(2)}, new)
    gate.wait_until_reached()
    if how == "has failed":
        gate.open()
        time.sleep(0.5)
    plugin.remove_checkpoint(old)
    assert root.path(1).exists()
    gate.open()
    if how != "commits":
        with pytest.raises(StorageError, match="the storage is away"):
            plugin.wait()
        assert torch.equal(plugin.load_checkpoint(old)["a"], torch.ones(2))
        plugin.save_checkpoint({"a": torch.ones(2)}, new)
        plugin.remove_checkpoint(old)
    plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == [root.path(2).name]


def test_only_a_damaged_last_checkpoint_is_skipped(tmp_path: Path) -> None:
    """For a damaged "last" the newest good checkpoint is loaded, with a warning; others are errors."""
    plugin = plugin_of(mode="sync")
    for number, name in enumerate(["step=1.ckpt", "step=2.ckpt", LAST]):
        plugin.save_checkpoint({"a": torch.full((5000,), number)}, tmp_path / name)
        os.utime(tmp_path / name / "manifest.msgpack", (number, number))
    flip(tmp_path / LAST)
    with pytest.warns(UserWarning, match=r"loading .*step=2\.ckpt instead"):
        assert plugin.load_checkpoint(tmp_path / LAST)["a"][0] == 1
    flip(tmp_path / "step=1.ckpt")
    with pytest.raises(CorruptCheckpointError):
        plugin.load_checkpoint(tmp_path / "step=1.ckpt")
    with pytest.raises(CheckpointNotFoundError):
        plugin.load_checkpoint(tmp_path / "other" / LAST)


class Unknown:
    """Class that needs weights_only=False."""


def test_objects_need_to_be_allowed(tmp_path: Path) -> None:
    """An object needs weights_only=False, as in torch.load, and the error says where to pass it."""
    plugin = plugin_of(mode="sync")
    plugin.save_checkpoint({"hyper_parameters": {"model": Unknown()}}, tmp_path / LAST)
    with pytest.raises(UnsafeObjectError) as caught:
        plugin.load_checkpoint(tmp_path / LAST)
    assert "fit(..., weights_only=False)" in "".join(caught.value.__notes__)
    loaded = plugin.load_checkpoint(tmp_path / LAST, weights_only=False)
    assert isinstance(loaded["hyper_parameters"]["model"], Unknown)
