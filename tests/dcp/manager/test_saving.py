"""Which steps a manager saves, and what is in them."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import pytest
import torch

import dcp
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats.native.manifest import decode_manifest
from tests.dcp.manager.manager_support import (
    Gate,
    Recorder,
    loaded_step,
    manager_of,
    state_at,
    writer_with,
)


def user_of(root: Path, step: int) -> dict[str, Any]:
    """The user metadata of a step."""
    data = (root / f"step-{step:08d}" / MANIFEST_NAME).read_bytes()
    return dict(decode_manifest(data).user)


@pytest.mark.parametrize("mode", ["thread", "process", "sync"])
def test_each_checkpoint_has_the_values_of_its_step(tmp_path: Path, mode: Any) -> None:
    """The state changes right after each save; what is loaded is what it was when it was saved."""
    state = state_at(0)
    with manager_of(tmp_path, mode=mode, every_steps=3) as manager:
        for step in range(1, 11):
            state["model"]["weight"].fill_(step)
            state["model"]["bias"].copy_(torch.arange(4) + step)
            state["step"] = step
            future = manager.save(step, state, last=step == 10)
            assert (future is not None) == (step in (3, 6, 9, 10))
            state["model"]["weight"].fill_(-1.0)
        assert manager.wait(240)
        assert manager.all_steps() == [3, 6, 9, 10]
        assert manager.latest() == 10
        assert manager.failures == 0
    assert [loaded_step(manager.checkpoint_id(step)) for step in (3, 6, 9, 10)] == [3, 6, 9, 10]


def test_copies_that_overlap_are_complete_inside_of_the_lock(tmp_path: Path) -> None:
    """``save(overlap=True)`` returns at once; what changes inside of `lock` is not in the checkpoint."""
    weight = torch.zeros(1 << 20)
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            with manager.lock():
                weight.fill_(step)
            manager.save(step, {"weight": weight}, overlap=True)
            with manager.lock():
                weight.fill_(-1.0)
    assert manager.failures == 0
    for step in (1, 2, 3):
        state = {"weight": torch.zeros(1 << 20)}
        dcp.load(state, checkpoint_id=manager.checkpoint_id(step), no_dist=True)
        assert torch.equal(state["weight"], torch.full((1 << 20,), float(step)))


def test_should_save_says_what_save_does_and_asking_changes_nothing(tmp_path: Path) -> None:
    """Asked any number of times, with save in between; a step is not saved twice unless forced."""
    with manager_of(tmp_path, every_steps=2, save_first=True) as manager:
        answers = []
        for step in (1, 2, 3):
            answers.append([manager.should_save(step), manager.should_save(step)])
            assert (manager.save(step, state_at(step)) is not None) == answers[-1][0]
            assert not manager.should_save(step, last=step == 2)
        assert answers == [[True, True], [True, True], [False, False]]
        assert manager.save(2, state_at(2)) is None
        assert manager.save(3, state_at(30), force=True) is not None
        assert manager.save(3, state_at(31), force=True) is not None
    assert manager.all_steps() == [1, 2, 3]
    assert loaded_step(manager.checkpoint_id(3)) == 31


def test_without_an_interval_each_call_saves(tmp_path: Path) -> None:
    """For loops that decide themselves; names and run are the user's, metadata is stored beside."""
    with manager_of(tmp_path, name=lambda step: f"epoch_{step}", run="tuesday") as manager:
        manager.save(7, state_at(7), user_metadata={"tags": ["good"]}, metrics={"loss": 0.5})
        manager.save(9, state_at(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_7", "epoch_9"]
    user = decode_manifest((tmp_path / "epoch_7" / MANIFEST_NAME).read_bytes()).user
    assert user == {"step": 7, "metrics": {"loss": 0.5}, "run": "tuesday", "tags": ["good"]}


def test_metrics_are_numbers(tmp_path: Path) -> None:
    """Whatever is a number is stored as a float, NaN too; anything else is refused before it is saved."""
    with manager_of(tmp_path) as manager:
        given = {"a": torch.tensor(2, dtype=torch.bfloat16), "b": 3, "c": math.nan, "d": torch.tensor(0.25)}
        manager.save(1, state_at(1), metrics=given)  # type: ignore[arg-type]  # tensors are allowed
        for wrong in ({"x": "0.5"}, {"x": torch.zeros(2)}, {"x": True}, {5: 1.0}, {"x": 1j}):
            with pytest.raises(TypeError, match=r"metrics: .*(x|5)"):
                manager.save(2, state_at(2), metrics=wrong)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(ValueError, match="may not have 'step'"):
            manager.save(2, state_at(2), user_metadata={"step": 9})
    assert manager.all_steps() == [1]
    stored = user_of(tmp_path, 1)["metrics"]
    assert math.isnan(stored.pop("c"))
    assert stored == {"a": 2.0, "b": 3.0, "d": 0.25}


def test_seconds_save_by_the_clock(tmp_path: Path) -> None:
    """An interval that has always passed saves at each step, one that never passes at none."""
    with manager_of(tmp_path / "often", every_seconds=1e-9) as manager:
        assert [manager.save(step, state_at(step)) is not None for step in (1, 2)] == [True, True]
    with manager_of(tmp_path / "seldom", every_seconds=1e9) as manager:
        assert [manager.save(step, state_at(step)) is not None for step in (1, 2)] == [False, False]


def test_a_step_that_is_saved_again_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once a step, and so is a save of the step that was restored; not at a last call after the loop."""

    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "already" in record.getMessage()]
        caplog.clear()
        return found

    with manager_of(tmp_path, mode="sync", every_steps=2) as manager:
        for step in (1, 1, 2):
            manager.save(step, state_at(step))
        assert told() == []
        assert [manager.save(2, state_at(2)) for _ in range(3)] == [None] * 3
        (message,) = told()
        assert "step 2" in message and "force=True" in message
        assert manager.save(2, state_at(2), last=True) is None
        assert manager.save(2, state_at(2), force=True) is not None
        assert told() == []
    with manager_of(tmp_path, mode="sync", every_steps=2) as manager:
        manager.restore(state_at(0))
        manager.save(2, state_at(2))
        assert len(told()) == 1


def test_metrics_are_numbers_of_any_kind(tmp_path: Path) -> None:
    """Losses as training has them; what is no number yet, or not of all ranks, is refused with the reason."""
    loss = torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2))
    metrics: dict[str, SupportsFloat] = {
        "loss": loss,
        "bf16": torch.tensor(0.5, dtype=torch.bfloat16),
        "count": torch.tensor(3),
        "scalar": np.float32(0.25),
        "array": np.array(2.0),
        "int": 7,
    }
    with manager_of(tmp_path, mode="sync") as manager:
        manager.save(1, state_at(1), metrics=metrics)
        for wrong in (
            torch.ones(2),
            torch.ones(1, 1),
            np.ones(3),
            "0.5",
            None,
            True,
            1j,
            torch.ones(100, 100),
        ):
            with pytest.raises(TypeError, match="'x' must be a number or a 0-d tensor") as caught:
                manager.save(2, state_at(2), metrics={"x": wrong})  # type: ignore[dict-item]
            assert len(str(caught.value)) < 300
    assert user_of(tmp_path, 1)["metrics"] == {
        "loss": 1.0,
        "bf16": 0.5,
        "count": 3.0,
        "scalar": 0.25,
        "array": 2.0,
        "int": 7.0,
    }


@pytest.mark.parametrize("step", [-1, True, 2.0, "2", 10**18])
def test_steps_that_cannot_be_listed_are_refused_at_once(tmp_path: Path, step: Any) -> None:
    """Not only when one is due: training must not fail hours later, nor save what nobody finds again."""
    with manager_of(tmp_path, every_steps=1000) as manager:
        for call in (manager.should_save, lambda step: manager.save(step, {})):
            with pytest.raises(ValueError, match="step: must be a whole number from 0 to"):
                call(step)


def test_whole_numbers_of_numpy_and_torch_are_steps(tmp_path: Path) -> None:
    """As loops have them that count by arrays, or restore a counter."""
    with manager_of(tmp_path) as manager:
        manager.save(np.int64(2), state_at(2))  # type: ignore[arg-type]
        manager.save(torch.tensor(10**18 - 1), state_at(3))  # type: ignore[arg-type]
        manager.wait()
        manager.pin(np.int64(2))  # type: ignore[arg-type]
        restored = manager.restore(state_at(0), np.int64(2))  # type: ignore[arg-type]
    assert restored is not None
    assert type(restored.step) is int
    assert manager.all_steps() == [2, 10**18 - 1]
    assert manager.pinned() == [2]


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_a_save_that_comes_too_early(tmp_path: Path, when_busy: Any) -> None:
    """Waits, is left out, or is an error; one that is forced, or the last, always waits."""
    gate, seen = Gate(), Recorder()
    options: dict[str, Any] = {"every_steps": 1, "when_busy": when_busy, "on_event": seen}
    with manager_of(tmp_path, writer=writer_with(gate), **options) as manager:
        manager.save(1, state_at(1))
        assert gate.reached.wait(240)
        if when_busy == "skip":
            assert manager.save(2, state_at(2)) is None
            assert not manager.should_save(2)
        elif when_busy == "raise":
            with pytest.raises(dcp.CheckpointError, match="when_busy='raise'"):
                manager.save(2, state_at(2))
        threading.Timer(0.2, gate.open).start()
        manager.save(3, state_at(3), force=True)
        manager.save(4, state_at(4), last=True)
    assert manager.all_steps() == [1, 3, 4]
    assert seen.steps("save_skipped") == ([2] if when_busy == "skip" else [])


def test_a_step_that_was_left_out_is_saved_as_the_last(tmp_path: Path) -> None:
    """Its interval was skipped while a save was under way, and then the loop turns out to end with it."""
    gate = Gate()
    with manager_of(tmp_path, writer=writer_with(gate), every_steps=2, when_busy="skip") as manager:
        manager.save(2, state_at(2))
        assert gate.reached.wait(240)
        assert manager.save(4, state_at(4)) is None
        gate.open()
        assert manager.save(4, state_at(4)) is None
        assert manager.save(4, state_at(4), last=True) is not None
        assert manager.save(4, state_at(4), last=True) is None
    assert manager.all_steps() == [2, 4]


def test_a_forced_save_of_the_stopping_step_is_waited_for(tmp_path: Path) -> None:
    """A loop that forces each of its saves stops as well as one that does not."""
    with manager_of(tmp_path, every_steps=100) as manager:
        assert manager.save(1, state_at(1)) is None
        manager.request_stop()
        future = manager.save(2, state_at(2), force=True)
        assert future is not None
        assert future.done()
        assert manager.stop_requested
    assert loaded_step(str(tmp_path / "step-00000002")) == 2


def test_what_is_no_state_dict_is_refused_at_the_call(tmp_path: Path) -> None:
    """Also at steps that are not due: in the background each save would fail, and training go on without."""
    with manager_of(tmp_path, every_steps=10) as manager:
        for step in (1, 10):
            with pytest.raises(dcp.errors.PlanError, match="put the Linear into one"):
                manager.save(step, torch.nn.Linear(2, 2))  # type: ignore[arg-type]  # on purpose
    assert (manager.all_steps(), manager.failures) == ([], 0)


@pytest.mark.parametrize(
    "described",
    [
        {"metrics": [1.0]},
        {"user_metadata": {"config": object()}},
        {"user_metadata": {"weights": torch.ones(1)}},
    ],
)
def test_what_cannot_be_stored_beside_the_state_is_refused_at_once(tmp_path: Path, described: Any) -> None:
    """It would fail in the background otherwise, with every save."""
    with manager_of(tmp_path) as manager:
        with pytest.raises(TypeError, match="must"):
            manager.save(1, state_at(1), **described)
        assert manager.all_steps() == []
