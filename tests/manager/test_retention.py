"""Retention of a run: a manager compared with a model of its rules, and steps that no rule may delete."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dcp
from dcp.errors import CorruptCheckpointError, OptionError
from tests.support.command import run as command
from tests.support.manager_runs import (
    MODES,
    data_files,
    loaded_step,
    manager_of,
    state_at,
    steps_on_disk,
    truncate,
)


class Run(RuleBasedStateMachine):
    """A run that saves, pins, deletes, damages and restarts, compared with a model of its rules."""

    @initialize(
        last=st.integers(1, 3),
        best=st.integers(0, 2),
        every=st.sampled_from([None, 4]),
        mode=st.sampled_from(MODES),
    )
    def begin(self, last: int, best: int, every: int | None, mode: str) -> None:
        """Begin with an empty root."""
        self.root = Path(tempfile.mkdtemp(prefix="dcp-retention-"))
        self.last, self.best, self.every = last, best, every
        rule = dcp.Best("loss", best) if best else None
        keep = dcp.Retention(last=last, best=rule, every_steps=every)
        self.options: dict[str, Any] = {"mode": mode, "keep": keep, "handle_sigterm": False}
        self.manager = manager_of(self.root, **self.options)
        self.losses: dict[int, float] = {}
        self.pinned: set[int] = set()
        self.damaged: set[int] = set()
        self.noted: set[int] = set()
        self.step = 0

    def kept(self) -> set[int]:
        """Return the present steps that the rules keep."""
        good = [step for step in sorted(self.losses) if step not in self.noted]
        by_loss = sorted(good, key=lambda step: (self.losses[step], -step))
        kept = {*good[-self.last :], *by_loss[: self.best], *self.pinned}
        kept |= {step for step in good if self.every and step % self.every == 0}
        return kept | {bad for bad in self.noted if sum(step > bad for step in good) < self.last}

    @rule(more=st.integers(1, 3), loss=st.integers(0, 9))
    def save(self, more: int, loss: int) -> None:
        """Save a later step, and apply the rules."""
        self.step += more
        assert self.manager.save(self.step, state_at(self.step), metrics={"loss": loss}) is not None
        assert self.manager.wait(240)
        self.losses[self.step] = loss
        kept = self.kept()
        for gone in self.losses.keys() - kept:
            del self.losses[gone]
        self.damaged &= kept
        self.noted &= kept

    @precondition(lambda self: bool(self.losses))
    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        """Pin or unpin a present step."""
        step = data.draw(st.sampled_from(sorted(self.losses)))
        (self.manager.unpin if step in self.pinned else self.manager.pin)(step)
        self.pinned ^= {step}

    @precondition(lambda self: bool(self.losses))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete a present step; a pinned step raises."""
        step = data.draw(st.sampled_from(sorted(self.losses)))
        if step in self.pinned:
            with pytest.raises(dcp.CheckpointError, match=f"step {step} is pinned"):
                self.manager.delete(step)
            return
        self.manager.delete(step)
        assert step not in self.manager.all_steps()
        assert self.manager.wait(240)
        del self.losses[step]
        self.damaged.discard(step)
        self.noted.discard(step)

    @precondition(lambda self: bool(self.losses))
    @rule()
    def damage(self) -> None:
        """Truncate a file of the newest step."""
        step = max(self.losses)
        if step not in self.damaged:
            truncate(data_files(self.root / f"step-{step:08d}")[0])
            self.damaged.add(step)

    @rule()
    def restore(self) -> None:
        """Restore the newest good step; newer steps are recorded as damaged."""
        state = state_at(-1)
        good = self.losses.keys() - self.damaged
        if self.losses and not good:
            with pytest.raises(CorruptCheckpointError):
                self.manager.restore(state)
        else:
            restored = self.manager.restore(state)
            assert (restored and restored.step) == max(good, default=None)
            assert state["step"] == max(good, default=-1)
        assert self.manager.wait(240)
        self.noted |= {step for step in self.damaged if step > max(good, default=-1)}

    @rule()
    def restart(self) -> None:
        """Continue with a new manager."""
        self.manager.close()
        self.manager = manager_of(self.root, **self.options)

    @invariant()
    def the_steps_are_those_of_the_model(self) -> None:
        """Compare steps and pins with the listing and the disk."""
        if hasattr(self, "root"):
            assert self.manager.all_steps() == sorted(self.losses) == steps_on_disk(self.root)
            assert self.manager.pinned() == sorted(self.pinned)

    def teardown(self) -> None:
        """Close the manager, check the good steps, and delete the root."""
        if hasattr(self, "root"):
            self.manager.close()
            for step in self.losses.keys() - self.damaged:
                assert loaded_step(self.root / f"step-{step:08d}") == step
            shutil.rmtree(self.root)


TestRun = Run.TestCase
TestRun.settings = settings(stateful_step_count=9)


def test_a_misspelt_metric_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While no step has the metric of `Best`, all are kept, and the log suggests the similar name once."""
    keep = dcp.Retention(last=1, best=dcp.Best("val_loss"))
    with manager_of(tmp_path, mode="sync", keep=keep) as manager:
        for step in range(1, 6):
            manager.save(step, state_at(step), metrics={"valloss": 1.0 / step})
        assert manager.wait(240)
        assert manager.all_steps() == [1, 2, 3, 4, 5]
    (message,) = [text for text in caplog.messages if "val_loss" in text]
    assert "did you mean 'valloss'" in message and "all steps are kept" in message


def test_the_best_step_is_named(tmp_path: Path) -> None:
    """`best_step` compares the good steps with the metric; a misspelt metric raises with a suggestion."""
    with manager_of(tmp_path, mode="sync") as manager:
        assert manager.best_step("val_loss") is None
        for step, loss in enumerate([0.5, 0.1, 0.3, float("nan"), 0.3]):
            manager.save(step, state_at(step), metrics={"val_loss": loss, "accuracy": 1 - loss})
        manager.save(5, state_at(5))
        assert manager.wait(240)
        assert (manager.best_step("val_loss"), manager.best_step("accuracy", "max")) == (1, 1)
        (tmp_path / "step-00000001" / "manifest.msgpack").write_bytes(b"damaged")
        assert manager.best_step("val_loss") == 4  # of equal values the newer
        with pytest.raises(OptionError, match="did you mean 'val_loss'"):
            manager.best_step("valloss")


def test_new_steps_after_going_back_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a restore of an older step, newer steps of the abandoned run do not displace new ones."""
    with manager_of(tmp_path, keep=dcp.Retention(last=2)) as manager:
        for step in (8, 9):
            manager.save(step, state_at(step))
        assert manager.restore(state_at(0), step=8) is not None
        for step in (3, 4):
            manager.save(step, state_at(step))
            manager.wait()
            assert manager.all_steps() == [step, 8, 9]
        assert "newer steps exist, up to 9" in caplog.text
        manager.delete(8)
        manager.delete(9)
        manager.save(5, state_at(5))
    assert manager.all_steps() == [4, 5]


def test_damaged_notes_count_as_a_pin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damaged notes count as a pin: retention and ``dcp rm`` keep the step until it is unpinned."""
    with manager_of(tmp_path, mode="sync", keep=dcp.Retention(last=1)) as manager:
        manager.save(1, state_at(1))
        manager.wait()
        notes = tmp_path / "step-00000001" / "notes.msgpack"
        notes.write_bytes(notes.read_bytes()[:-2])
        assert manager.pinned() == [1]
        manager.save(2, state_at(2))
        manager.wait()
        assert command("rm", manager.checkpoint_id(1), "--yes").status != 0
        assert manager.all_steps() == [1, 2]
        assert "counts as pinned and is kept" in caplog.text
        manager.unpin(1)
        manager.save(3, state_at(3))
    assert manager.all_steps() == [3]
