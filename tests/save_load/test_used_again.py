"""Readers, writers and planners used for several saves or loads."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp import FileSystemReader, FileSystemWriter
from dcp.errors import OptionError, PlanError
from tests.support.loaded import Unpicklable, values


def test_a_failed_save_keeps_the_writers_last_commit(tmp_path: Path) -> None:
    """Without a new id a writer still begins a new save, whose failure removes its own files only."""
    writer = FileSystemWriter(tmp_path)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    with pytest.raises(dcp.CheckpointError):
        dcp.save({"w": torch.zeros(4), "o": Unpicklable()}, storage_writer=writer)
    assert values(tmp_path, w=torch.zeros(4)) == {"w": [1.0] * 4}
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_reused_reader_sees_later_saves(tmp_path: Path) -> None:
    """A reader keeps neither index nor statistics of its previous load."""
    reader = FileSystemReader(tmp_path)
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), value)}, checkpoint_id=tmp_path)
        wanted = {"w": torch.zeros(4)}
        report = dcp.load(wanted, storage_reader=reader)
        assert wanted["w"].tolist() == [value] * 4
        assert report.bytes_needed == 16
        assert reader.read_metadata().state_dict_metadata.keys() == {"w"}


def test_a_reader_serves_one_thread_at_a_time(tmp_path: Path) -> None:
    """A second thread's load by the same reader raises, and the first load succeeds."""
    dcp.save({"w": torch.ones(4), "own": {"x": 1}}, checkpoint_id=tmp_path)
    reader, asked, proceed = FileSystemReader(tmp_path), threading.Event(), threading.Event()

    class Held:
        loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            asked.set()
            proceed.wait(60)
            return {"x": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    held, wanted = Held(), torch.zeros(4)
    thread = threading.Thread(target=lambda: dcp.load({"w": wanted, "own": held}, storage_reader=reader))
    thread.start()
    assert asked.wait(60)
    with pytest.raises(OptionError, match="another thread"):
        dcp.read(storage_reader=reader)
    proceed.set()
    thread.join(60)
    assert (held.loaded, wanted.tolist()) == ({"x": 1}, [1.0] * 4)
    assert dcp.read(storage_reader=reader)["own"] == {"x": 1}


class _Steps(dcp.DefaultLoadPlanner):
    def finish_plan(self, central_plan: Any) -> Any:
        return super().finish_plan(central_plan)


@pytest.mark.parametrize("make", [dcp.DefaultLoadPlanner, _Steps])
def test_options_hold_for_one_load(tmp_path: Path, make: type[dcp.DefaultLoadPlanner]) -> None:
    """Options of a call apply to that load only, on each code path; an unknown option value raises."""
    dcp.save({"w": torch.ones(4), "x": torch.ones(4)}, checkpoint_id=tmp_path)
    reader, planner = FileSystemReader(tmp_path), make()
    wanted = {"w": torch.zeros(4, dtype=torch.float64), "x": torch.zeros(4), "more": torch.zeros(1)}
    options: dict[str, Any] = {"verify": "none", "dtype": "cast", "allow_partial_load": True, "exclude": "x"}
    report = dcp.load(wanted, storage_reader=reader, planner=planner, **options)
    assert (report.cast, report.missing, report.blocks_verified) == (["w"], ["more"], 0)
    assert (wanted["w"].tolist(), wanted["x"].tolist()) == ([1] * 4, [0] * 4)
    assert (reader.verify, planner.dtype, planner.allow_partial_load) == ("blocks", "exact", False)
    stock.load({"x": wanted["x"]}, storage_reader=reader, planner=planner, no_dist=True)
    assert reader.stats.blocks_verified > 0
    assert wanted["x"].tolist() == [1] * 4
    for wrong in ({"verify": "ful"}, {"dtype": "casts"}):
        with pytest.raises(PlanError):
            dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path, **wrong)  # type: ignore[arg-type]


class _Watching(dict[str, Any]):
    """A dict that records whether garbage collection is enabled while a load reads its tensors."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.seen: list[bool] = []

    def values(self) -> Any:
        self.seen.append(gc.isenabled())
        return super().values()


@pytest.mark.parametrize("is_on", [True, False])
def test_loads_restore_garbage_collection(tmp_path: Path, is_on: bool) -> None:
    """Garbage collection is off while a load plans, and restored even if the load fails."""
    state = {f"w{n}": torch.full((3,), n) for n in range(500)}
    dcp.save({"in": state}, checkpoint_id=tmp_path, no_dist=True)
    watching = _Watching(state)
    (gc.enable if is_on else gc.disable)()
    try:
        dcp.load({"in": watching}, checkpoint_id=tmp_path, no_dist=True)
        assert gc.isenabled() == is_on
        with pytest.raises(dcp.MissingKeyError):
            dcp.load({"in": state, "more": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
    assert watching.seen and not all(watching.seen)
