"""Readers, writers and planners that serve several saves or loads."""

from __future__ import annotations

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


def test_a_failed_save_leaves_what_the_same_writer_committed_before(tmp_path: Path) -> None:
    """A writer without a new id begins a new save all the same: its failure removes its own files only."""
    writer = FileSystemWriter(tmp_path)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    with pytest.raises(dcp.CheckpointError):
        dcp.save({"w": torch.zeros(4), "o": Unpicklable()}, storage_writer=writer)
    assert values(tmp_path, w=torch.zeros(4)) == {"w": [1.0] * 4}
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_reader_that_loads_again_sees_what_was_saved_since(tmp_path: Path) -> None:
    """Neither index nor figures of the first load are kept."""
    reader = FileSystemReader(tmp_path)
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), value)}, checkpoint_id=tmp_path)
        wanted = {"w": torch.zeros(4)}
        report = dcp.load(wanted, storage_reader=reader)
        assert wanted["w"].tolist() == [value] * 4
        assert report.bytes_needed == 16
        assert reader.read_metadata().state_dict_metadata.keys() == {"w"}


def test_a_reader_serves_one_thread_at_a_time(tmp_path: Path) -> None:
    """It would mix up two loads; so the second one says so, and the first one ends well."""
    dcp.save({"w": torch.ones(4), "own": {"x": 1}}, checkpoint_id=tmp_path)
    reader, asked, go_on = FileSystemReader(tmp_path), threading.Event(), threading.Event()

    class Held:
        loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            asked.set()
            go_on.wait(60)
            return {"x": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    held, wanted = Held(), torch.zeros(4)
    thread = threading.Thread(target=lambda: dcp.load({"w": wanted, "own": held}, storage_reader=reader))
    thread.start()
    assert asked.wait(60)
    with pytest.raises(OptionError, match="another thread"):
        dcp.read(storage_reader=reader)
    go_on.set()
    thread.join(60)
    assert (held.loaded, wanted.tolist()) == ({"x": 1}, [1.0] * 4)
    assert dcp.read(storage_reader=reader)["own"] == {"x": 1}


def test_options_of_one_load_do_not_stay(tmp_path: Path) -> None:
    """Options of `dcp.load` hold for that load, not for the reader's and planner's next one."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    reader, planner = FileSystemReader(tmp_path), dcp.DefaultLoadPlanner()
    wanted = {"w": torch.zeros(4, dtype=torch.float64), "more": torch.zeros(1)}
    options: dict[str, Any] = {"verify": "none", "dtype": "cast", "allow_partial_load": True}
    report = dcp.load(wanted, storage_reader=reader, planner=planner, **options)
    assert (report.cast, report.missing) == (["w"], ["more"])
    assert (reader.verify, planner.dtype, planner.allow_partial_load) == ("blocks", "exact", False)


@pytest.mark.parametrize("steps", [0, 1])
def test_options_hold_for_one_load_on_either_road(tmp_path: Path, steps: int) -> None:
    """On columns and by torch's protocol; stock's load with the same objects then goes by their own."""

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, central_plan: Any) -> Any:
            return super().finish_plan(central_plan)

    dcp.save({"w": torch.ones(4), "x": torch.ones(4)}, checkpoint_id=tmp_path)
    reader, planner = FileSystemReader(tmp_path), Planner() if steps else dcp.DefaultLoadPlanner()
    wanted = {"w": torch.zeros(4), "x": torch.zeros(4)}
    options: dict[str, Any] = {"verify": "none", "only": "w"}
    report = dcp.load(wanted, storage_reader=reader, planner=planner, **options)
    assert (report.blocks_verified, wanted["w"].tolist(), wanted["x"].tolist()) == (0, [1] * 4, [0] * 4)
    stock.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    assert reader.stats.blocks_verified > 0
    assert wanted["x"].tolist() == [1] * 4


@pytest.mark.parametrize("options", [{"verify": "ful"}, {"dtype": "casts"}])
def test_misspelt_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """A policy that nobody knows is not taken for the default one."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError):
        dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path, **options)


def test_the_report_names_missing_keys_with_a_planner_of_the_users(tmp_path: Path) -> None:
    """A subclass that plans with torch's objects reports as ours does."""

    class Planner(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            return super().commit_tensor(read_item, tensor)

    dcp.save({"w": torch.ones(4), "x": torch.ones(1)}, checkpoint_id=tmp_path)
    wanted = {"w": torch.zeros(4), "more": torch.zeros(1)}
    report = dcp.load(wanted, checkpoint_id=tmp_path, planner=Planner(allow_partial_load=True))
    assert (report.missing, report.unexpected) == (["more"], ["x"])
