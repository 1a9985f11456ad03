"""The schedule of saves: intervals of steps and seconds, resumed and repeated steps, invalid steps."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp
from tests.support.manager_runs import (
    Gate,
    Recorder,
    loaded_step,
    manager_of,
    plain_writer,
    state_at,
    steps_on_disk,
    writer_with,
)

STATE = {"w": torch.zeros(1)}


def run(**options: Any) -> dcp.CheckpointManager:
    """Return a manager of a run in memory, with mode="sync"."""
    root = f"memory://schedule-{uuid.uuid4().hex}"
    return manager_of(root, mode="sync", verify_saved="off", handle_sigterm=False, **options)


def saved(manager: dcp.CheckpointManager, steps: range, last: int = -1) -> list[int]:
    """Save in a loop; return the saved steps, and check that `should_save` agrees on every call."""
    found = []
    for step in steps:
        asked = [manager.should_save(step, last=step == last) for _ in range(2)]
        is_saved = manager.save(step, STATE, last=step == last) is not None
        assert asked == [is_saved] * 2, step
        found += [step] if is_saved else []
    return found


def test_first_and_last_steps_are_saved() -> None:
    """`save_first` saves the first step, `last=` the last step, and a step that is both is saved once."""
    with run(every_steps=100, save_first=True) as manager:
        assert saved(manager, range(7, 251), last=250) == [7, 100, 200, 250]
    with run(every_steps=100) as manager:
        assert saved(manager, range(1, 201), last=200) == [100, 200]
    with run() as manager:
        assert saved(manager, range(0, 50, 7)) == [*range(0, 50, 7)]


def test_a_resumed_run_keeps_its_multiples(tmp_path: Path) -> None:
    """A run restored at 137 saves at 200, neither at once nor 100 steps later, also after going back."""
    with manager_of(tmp_path, mode="sync", every_steps=100) as manager:
        manager.save(137, STATE, force=True)
    with manager_of(tmp_path, mode="sync", every_steps=100, save_first=True) as manager:
        assert manager.restore(dict(STATE)) is not None
        assert saved(manager, range(138, 301)) == [200, 300]
        assert manager.restore(dict(STATE), 137) is not None
        assert saved(manager, range(138, 250)) == [200]
        assert manager.restore(dict(STATE), 137) is not None
        assert saved(manager, range(1, 151)) == [100], "a loop that counts anew"
    with manager_of(tmp_path, mode="sync", every_steps=100) as manager:
        assert manager.restore(dict(STATE), 137) is not None
        assert saved(manager, range(205, 250, 20)) == [205], "a multiple that its first stride passes"


def test_seconds_count_from_the_last_save() -> None:
    """An interval that has always passed saves each step; an interval that never passes saves none."""
    with run(every_seconds=1e-9) as often, run(every_seconds=1e9, every_steps=3) as seldom:
        assert saved(often, range(1, 4)) == [1, 2, 3]
        assert saved(seldom, range(1, 7)) == [3, 6], "whichever comes first"


@given(
    every=st.integers(1, 50),
    stride=st.integers(1, 60),
    start=st.integers(0, 200),
    restored=st.none() | st.integers(0, 200),
)
def test_a_passed_multiple_leads_to_one_save(
    every: int, stride: int, start: int, restored: int | None
) -> None:
    """A multiple that the loop passes leads to one save, for any stride, begin or restored step."""
    with run(every_steps=every) as manager:
        begin = start
        if restored is not None:
            manager.save(restored, STATE, force=True)
            manager.restore(dict(STATE))
            begin = restored + stride
        steps = range(begin, begin + 5 * stride, stride)
        found = saved(manager, steps)
    base = begin if restored is None else restored
    for step in steps:
        is_due = step // every > base // every
        if step == base:  # the first step is due if it is a multiple
            is_due = step > 0 and step % every == 0
        assert (step in found) == is_due, (step, found)
        base = step if is_due else base


def test_a_step_is_saved_again_only_by_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second save of a step needs force=True; else one warning is logged, except with last=True."""
    with manager_of(tmp_path, mode="sync", every_steps=2) as manager:
        assert saved(manager, range(1, 3)) == [2]
        assert [manager.save(2, state_at(2)) for _ in range(3)] == [None] * 3
        assert manager.save(2, state_at(2), last=True) is None
        assert manager.save(2, state_at(20), force=True) is not None
    with manager_of(tmp_path, mode="sync", every_steps=2) as manager:
        manager.restore(state_at(0))
        assert manager.save(2, state_at(2)) is None
    messages = [text for text in caplog.messages if "already" in text]
    assert len(messages) == 2 and all("step 2" in text and "force=True" in text for text in messages)
    assert loaded_step(manager.checkpoint_id(2)) == 20


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_a_save_during_another_save(tmp_path: Path, when_busy: Any) -> None:
    """A save during another waits, is skipped, or raises; with force=True or last=True it always waits."""
    gate, seen = Gate(), Recorder()
    options: dict[str, Any] = {"every_steps": 1, "when_busy": when_busy, "on_event": seen}
    with manager_of(tmp_path, writer=writer_with(gate), **options) as manager:
        manager.save(1, state_at(1))
        gate.wait_until_reached()
        if when_busy == "skip":
            assert manager.save(2, state_at(2)) is None and not manager.should_save(2)
        elif when_busy == "raise":
            with pytest.raises(dcp.CheckpointError, match="when_busy='raise'"):
                manager.save(2, state_at(2))
        gate.open()
        manager.save(3, state_at(3), force=True)
        manager.save(4, state_at(4), last=True)
    assert manager.all_steps() == [1, 3, 4]
    assert seen.steps("save_skipped") == ([2] if when_busy == "skip" else [])


def test_a_stop_saves_the_next_step_and_waits(tmp_path: Path) -> None:
    """After request_stop() the next step is saved once and awaited, also if all saves are forced."""
    for force in (False, True):
        with manager_of(tmp_path / str(force), every_steps=100) as manager:
            assert manager.save(1, state_at(1)) is None
            manager.request_stop()
            assert not manager.stop_requested
            future = manager.save(2, state_at(2), force=force)
            assert future is not None and future.done() and manager.stop_requested
            assert manager.save(3, state_at(3)) is None
        assert steps_on_disk(tmp_path / str(force)) == [2]


@pytest.mark.parametrize("step", [-1, True, 2.0, "2", None, 10**18])
def test_an_invalid_step_is_refused_at_once(step: Any) -> None:
    """An invalid step raises on every call, also if no save is due: training must not fail hours later."""
    with run(every_steps=1000) as manager:
        for call in (manager.should_save, lambda step: manager.save(step, {}), manager.checkpoint_id):
            with pytest.raises(ValueError, match="step: must be a whole number from 0 to"):
                call(step)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "async"},
        {"when_busy": "no"},
        {"on_failure": "ignore"},
        {"verify_saved": "some"},
        {"every_steps": 0},
        {"every_steps": "10"},
        {"retries": "2"},
        {"save_first": "no"},
        {"every_seconds": float("nan")},
        {"keep": 3},
        *({"name": name} for name in ("constant", "step-{}", "{other}", "a/{step}", "{step:x}", "{step:,}")),
        {"name": lambda step: "x"},
    ],
)
def test_invalid_options_are_refused_by_name(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """An invalid option raises ValueError with its name when the manager is made."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dcp.CheckpointManager(tmp_path, **wrong)


@pytest.mark.parametrize(
    ("form", "step", "name"),
    [
        ("step-{step:08d}", 1_234_567_890, "step-1234567890"),
        ("{step}", 0, "0"),
        ("run2.{step:04d}.ckpt", 2, "run2.0002.ckpt"),
        (lambda step: f"epoch-{step // 100}-step-{step}", 305, "epoch-3-step-305"),
    ],
)
def test_folders_follow_the_name_format(tmp_path: Path, form: Any, step: int, name: str) -> None:
    """Folders follow the `name` format, and another manager reads the step back from it."""
    with manager_of(tmp_path, name=form, mode="sync") as manager:
        manager.save(step, state_at(step))
        assert manager.checkpoint_id(step) == str(tmp_path / name)
    assert dcp.CheckpointManager(tmp_path, name=form).all_steps() == [step]


def test_other_folders_are_not_steps(tmp_path: Path) -> None:
    """A folder counts as a step only if the format gives exactly its name."""
    names = ["step-12", "step-000000012", "step-0000001x", "xstep-00000001", "best", "٣", "9" * 99]
    for name in names:
        dcp.save(STATE, storage_writer=plain_writer(str(tmp_path / name)), no_dist=True)
    (tmp_path / "step-00000002").write_text("a file")
    assert dcp.CheckpointManager(tmp_path).all_steps() == []
    assert dcp.CheckpointManager(tmp_path, name="{step}").latest() is None
