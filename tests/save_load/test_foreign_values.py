"""A save warns of values that need weights_only=False in a load, and of no other values."""

from __future__ import annotations

import collections
import datetime
import enum
import logging
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

import dcp


class Mode(enum.Enum):
    """An enumeration of a user's program."""

    FAST = 1


class Settings:
    """A class of a user's program."""

    def __init__(self) -> None:
        self.width = 3


SAFE: dict[str, Any] = {
    "arrays": [np.arange(3), np.ones((2, 2), np.float16), np.array(["text"])],
    "scalars": (np.float64(1.5), np.int32(3), np.bool_(True)),
    "stdlib": [datetime.date(2026, 1, 2), datetime.timedelta(3), complex(1, 2), {1, 2}, frozenset({3})],
    "betas": (torch.ones(1), torch.nn.Parameter(torch.ones(1))),
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1])],
    "counts": (collections.Counter("aab"), collections.OrderedDict(a=1)),
    "path": pathlib.PurePosixPath("a/b"),
    "long": [0.5] * 1000,
}
FOREIGN: dict[str, Any] = {
    "mode": Mode.FAST,
    "settings": [1, ("x", Settings())],
    "objects": np.array([1, None]),
    "masked": np.ma.zeros(2),
    "scheduler": {"deep": (Settings(),)},
    "lambda": (collections.defaultdict(Settings),),
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of a save that concern values."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "weights_only=False" in message]


def test_values_that_load_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values that are safe by type or content are saved without a warning, and load. A class in torch's
    safe_globals counts as safe."""
    with caplog.at_level(logging.WARNING):
        dcp.save(dict(SAFE), checkpoint_id=tmp_path / "c")
        with torch.serialization.safe_globals([Settings]):
            dcp.save({"x": [Settings()]}, checkpoint_id=tmp_path / "given")
    assert warnings_of(caplog) == []
    dcp.load(dict.fromkeys(SAFE), checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize("name", FOREIGN)
def test_values_that_loads_refuse_are_warned_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the value and the required option; without that option the load refuses it."""
    with caplog.at_level(logging.WARNING):
        dcp.save({"x": FOREIGN[name]}, checkpoint_id=tmp_path / "c")
    (warning,) = warnings_of(caplog)
    assert "'x" in warning
    target: dict[str, Any] = {"x": {"deep": None} if isinstance(FOREIGN[name], dict) else None}
    with pytest.raises(dcp.errors.UnsafeObjectError):
        dcp.load(target, checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_async_save_warns_at_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """async_save warns once, in the training process, before it returns."""
    chosen = dcp.AsyncCheckpointerType(kind)
    state = {"w": torch.ones(2), "mode": Mode.FAST, "a": np.ones(2)}
    with caplog.at_level(logging.WARNING):
        future = dcp.async_save(state, checkpoint_id=tmp_path / "c", async_checkpointer_type=chosen)
        warned = warnings_of(caplog)
    future.result(120)
    assert len(warned) == 1 and "'mode'" in warned[0] and "Mode" in warned[0] and "'a'" not in warned[0]


class _ByItems(dcp.DefaultSavePlanner):
    """A planner that overrides a step, and is therefore called for each item."""

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        return super().transform_object(write_item, value)


@pytest.mark.parametrize("planner", [_ByItems, stock.DefaultSavePlanner])
def test_a_save_by_another_planner_warns(
    planner: type[SavePlanner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves with torch's planner or a user's planner give the same warning."""
    state = {"w": torch.ones(2), "mode": {"now": Mode.FAST}, "a": np.ones(2)}
    with caplog.at_level(logging.WARNING):
        dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner())
    (warning,) = warnings_of(caplog)
    assert "'mode.now'" in warning and "'a'" not in warning and "1 of the saved values" in warning
