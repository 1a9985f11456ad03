"""A save warns of values that will need weights_only=False, and of no others."""

from __future__ import annotations

import collections
import enum
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

import dcp
from dcp.planners.save.trust import foreign_values
from tests.dcp.compat.test_harmless_values import ARRAYS, SCALARS, STDLIB


class Mode(enum.Enum):
    """An enumeration of the user's program."""

    FAST = 1


class Settings:
    """A class of the user's program."""

    def __init__(self) -> None:
        self.width = 3


SAFE: dict[str, Any] = {
    **ARRAYS,
    **SCALARS,
    **STDLIB,
    "betas": (torch.ones(1), torch.nn.Parameter(torch.ones(1))),
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1])],
    "counts": (collections.Counter("aab"), collections.OrderedDict(a=1)),
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
    """What was logged as a warning by a save."""
    return [record.getMessage() for record in caplog.records if record.name == "dcp.saving.foreign_values"]


@pytest.mark.parametrize("name", [*SAFE, *FOREIGN])
def test_the_warning_is_right(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Named is what is refused at load, whether it is safe by type or by its contents; nothing else."""
    value = (SAFE | FOREIGN)[name]
    assert bool(foreign_values([name], [value])) == (name in FOREIGN)
    with caplog.at_level(logging.WARNING):
        dcp.save({"x": value}, checkpoint_id=str(tmp_path / "c"))
    target: dict[str, Any] = {"x": {"deep": None} if isinstance(value, dict) else None}
    if name not in FOREIGN:
        assert warnings_of(caplog) == []
        dcp.load(target, checkpoint_id=str(tmp_path / "c"))
        return
    (said,) = warnings_of(caplog)
    assert "'x" in said and "weights_only=False" in said
    with pytest.raises(dcp.errors.UnsafeObjectError):
        dcp.load(target, checkpoint_id=str(tmp_path / "c"))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_save_behind_the_loop_warns_at_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """async_save says it in the training process, once a save, before it returns."""
    types = dcp.AsyncCheckpointerType
    chosen = types.PROCESS if kind == "process" else types.THREAD
    state = {"w": torch.ones(2), "mode": Mode.FAST, "a": np.ones(2)}
    with caplog.at_level(logging.WARNING):
        future = dcp.async_save(state, checkpoint_id=str(tmp_path / "c"), async_checkpointer_type=chosen)
        said = warnings_of(caplog)
    future.result(120)
    assert len(said) == 1 and "'mode'" in said[0] and "Mode" in said[0] and "'a'" not in said[0]


def test_a_class_that_torch_was_told_of_is_not_named() -> None:
    """The user has done what the warning would ask for."""
    with torch.serialization.safe_globals([Settings]):
        assert foreign_values(["x"], [[Settings()]]) == {}
    assert list(foreign_values(["x"], [[Settings()]])) == ["x"]


class _ByItems(dcp.DefaultSavePlanner):
    """A planner that is asked item by item, as it overrides one of the steps."""

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        return super().transform_object(write_item, value)


@pytest.mark.parametrize("planner", [_ByItems, stock.DefaultSavePlanner])
def test_a_save_by_another_planner_warns(
    planner: type[SavePlanner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Planners of torch's or of the user's own: the same warning of the same values."""
    state = {"w": torch.ones(2), "mode": {"now": Mode.FAST}, "a": np.ones(2)}
    with caplog.at_level(logging.WARNING):
        dcp.save(state, checkpoint_id=str(tmp_path / "c"), planner=planner())
    (said,) = warnings_of(caplog)
    assert "'mode.now'" in said and "'a'" not in said and "1 of the saved values" in said
