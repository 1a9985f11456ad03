"""`dcp.Rescale` in saves and loads, with real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import CorruptCheckpointError, PlanError
from tests.support.ranks import run_ranks


class App:
    """An object with values that differ by rank, some below lists and dicts."""

    def __init__(self, rank: int) -> None:
        self.own = {
            "seen": 10 * (rank + 1) + 1,
            "half": rank + 0.5,
            "weights": torch.full((rank + 1,), float(rank)),
        }
        self.queue: Any = [rank] * (rank + 1)
        self.noise: Any = torch.full((2,), rank)
        self.given: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Each with a rule of its own."""
        return {
            "list": [dcp.Rescale({"seen": self.own["seen"], "half": self.own["half"]}, "sum")],
            "rows": dcp.Rescale(self.own["weights"], "split"),
            "queue": dcp.Rescale(self.queue, "split"),
            "noise": dcp.Rescale(self.noise, "keep"),
            "plain": 5,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it."""
        self.given = state_dict


def saved(rank: int, world_size: int, path: str) -> None:
    """Save `App`, and a value whose structure differs by rank."""
    last = {"parts": {str(number): torch.full((number,), rank) for number in range(rank + 1)}}
    dcp.save({"app": App(rank), "odd": dcp.PerRank(last)}, checkpoint_id=path)


def told(states: list[Any], rank: int, world_size: int) -> Any:
    """A rule."""
    return [sorted(state["parts"]) for state in states], rank, world_size


def loaded(rank: int, world_size: int, path: str, options: dict[str, Any]) -> Any:
    """What an `App` is given, and what there is to tell."""
    app = App(7)
    state: dict[str, Any] = {"app": app, "odd": dcp.Rescale(None, told)}
    if world_size == 2:
        del state["odd"]  # as many ranks as saved fill what is there
    report = dcp.load(state, checkpoint_id=path, **options)
    given = app.given
    return (
        given["list"][0].value["seen"],
        given["list"][0].value["half"],
        given["rows"].value.tolist(),
        given["queue"].value,
        given["noise"].value.tolist(),
        state["odd"].value if "odd" in state else None,
        sorted(report.rescaled),
        report.kept_per_rank,
    )


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """2 save, 3 and 1 load: every rule, in objects, lists and dicts; ``per_rank`` changes nothing."""
    run_ranks(2, saved, str(tmp_path))
    names = ["app.list.0", "app.noise", "app.queue", "app.rows", "odd"]
    odd: Any = [["0"], ["0", "1"]]
    for options in ({}, {"per_rank": "keep"}):
        assert run_ranks(3, loaded, str(tmp_path), options) == [
            (11, 2 / 3, [0.0], [0], [7, 7], (odd, 0, 3), names, []),
            (11, 2 / 3, [1.0], [1], [7, 7], (odd, 1, 3), names, []),
            (10, 2 / 3, [1.0], [1], [7, 7], (odd, 2, 3), names, []),
        ]
    assert run_ranks(1, loaded, str(tmp_path), {}) == [
        (32, 2.0, [0.0, 1.0, 1.0], [0, 1, 1], [7, 7], (odd, 0, 1), names, [])
    ]


def same_number(rank: int, world_size: int, path: str) -> Any:
    """Into an `App` of the same shape."""
    app = App(rank)
    app.own["seen"], app.queue = 0, []
    report = dcp.load({"app": app}, checkpoint_id=path)
    given = app.given
    return (
        given["list"][0].value["seen"],
        given["queue"].value,
        given["noise"].value.tolist(),
        report.rescaled,
    )


def test_as_many_ranks_get_their_own(tmp_path: Path) -> None:
    """Whatever the rule is; stock torch sees what it sees of `PerRank`."""
    run_ranks(2, saved, str(tmp_path))
    assert run_ranks(2, same_number, str(tmp_path)) == [(11, [0], [0, 0], []), (21, [1, 1], [1, 1], [])]
    state: dict[str, Any] = {"app": {"queue": {"rank-1": []}}}
    stock.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["app"]["queue"]["rank-1"] == [1, 1]


def test_names_and_parts(tmp_path: Path) -> None:
    """Under another name, and left out where the patterns leave it out."""
    run_ranks(2, saved, str(tmp_path))
    state: dict[str, Any] = {"mine": {"queue": dcp.Rescale([], "split"), "plain": 0}}
    report = dcp.load(state, checkpoint_id=tmp_path, rename={"^mine": "app"}, unexpected="ignore")
    assert (state["mine"]["queue"].value, report.rescaled) == ([0, 1, 1], ["mine.queue"])
    state = {"app": {"queue": dcp.Rescale([], "split"), "plain": 0}}
    report = dcp.load(state, checkpoint_id=tmp_path, only="app.plain")
    assert (state["app"]["queue"].value, state["app"]["plain"], report.rescaled) == ([], 5, [])


class OwnPlanner(dcp.DefaultLoadPlanner):
    """One that goes by torch's protocol."""

    def finish_plan(self, central_plan: Any) -> Any:
        """As it is."""
        return super().finish_plan(central_plan)


def test_by_torchs_protocol(tmp_path: Path) -> None:
    """A planner that overrides a step rescales as well; a foreign reader cannot, and says so."""
    run_ranks(2, saved, str(tmp_path))
    state: dict[str, Any] = {"app": {"queue": dcp.Rescale([], "split")}}
    dcp.load(state, checkpoint_id=tmp_path, planner=OwnPlanner(), unexpected="ignore")
    assert state["app"]["queue"].value == [0, 1, 1]
    with pytest.raises(PlanError, match=r"'app\.queue'.*FileSystemReader"):
        dcp.load(state, storage_reader=stock.FileSystemReader(tmp_path), unexpected="ignore")


def test_a_rule_that_fails_changes_nothing(tmp_path: Path) -> None:
    """Nor does a damaged state of another rank, which is noticed."""
    run_ranks(2, saved, str(tmp_path))
    state: dict[str, Any] = {"app": {"plain": 0, "rows": dcp.Rescale(torch.zeros(1), "same")}}
    with pytest.raises(PlanError, match="differs"):
        dcp.load(state, checkpoint_id=tmp_path, unexpected="ignore")
    assert state["app"]["plain"] == 0
    for file in tmp_path.glob("*.distcp"):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    state["app"]["rows"] = dcp.Rescale(torch.zeros(1), "split")
    with pytest.raises(CorruptCheckpointError):
        dcp.load(state, checkpoint_id=tmp_path, unexpected="ignore")
    assert (state["app"]["plain"], state["app"]["rows"].value.tolist()) == (0, [0])


def one_has_it(rank: int, world_size: int, path: str) -> None:
    """Rank 1 alone."""
    dcp.save({"own": dcp.Rescale(rank, "sum")} if rank else {"w": torch.ones(1)}, checkpoint_id=path)


def test_states_of_some_ranks_are_no_states_of_all(tmp_path: Path) -> None:
    """A sum of a part of them is none."""
    run_ranks(2, one_has_it, str(tmp_path))
    with pytest.raises(PlanError, match=r"'own'.*2 ranks saved.*\[1\] only"):
        dcp.load({"own": dcp.Rescale(0, "sum")}, checkpoint_id=tmp_path)
