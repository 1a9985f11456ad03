"""`dcp.Rescale`: values per rank that another number of ranks loads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import CheckpointError, CorruptCheckpointError, OptionError, PlanError
from tests.save_load.code_paths import TakesObjects
from tests.support.ranks import run_ranks

MANY = 40


def numbers(rank: int) -> list[int]:
    """Return whole numbers of a rank, up to 60 bits."""
    return [(-1) ** case * ((1 << 3 * case // 2) + 7 * rank) for case in range(MANY)]


def rows(rank: int, case: int) -> list[int]:
    """Return some items of a rank, or none."""
    return list(range(100 * rank, 100 * rank + (7 * case + 3 * rank) % 11))


def of_rules(rank: int) -> dict[str, Any]:
    """Return many values for each rule, also tensors and dicts."""
    state: dict[str, Any] = {"same": dcp.Rescale({"epoch": 3, "l": [torch.ones(2), (1, "a")]}, "same")}
    for case, number in enumerate(numbers(rank)):
        tensor = torch.tensor(rows(rank, case)).view(-1, 1)
        state[f"sum{case}"] = dcp.Rescale({"seen": number, "t": torch.tensor([number])}, "sum")
        state[f"split{case}"] = dcp.Rescale({"list": rows(rank, case), "t": tensor}, "split")
    return state


def save_rules(rank: int, world_size: int, path: str) -> None:
    """Save the values of each rank."""
    dcp.save(of_rules(rank), checkpoint_id=path)


def load_rules(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Load on a rank, and return the values."""
    state = of_rules(rank)
    dcp.load(state, checkpoint_id=path)
    return {name: value.value for name, value in state.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sums_are_kept_and_lists_split_again(world_size: int, of_three: str) -> None:
    """A sum of whole numbers is exact and even; a split has every item once, in the order of ranks."""
    found = run_ranks(world_size, load_rules, of_three)
    for case in range(MANY):
        sums, parts = ([each[f"{rule}{case}"] for each in found] for rule in ("sum", "split"))
        seen = [each["seen"] for each in sums]
        assert sum(seen) == sum(numbers(rank)[case] for rank in range(3)) and max(seen) - min(seen) <= 1
        assert [int(each["t"]) for each in sums] == seen
        joined = [item for rank in range(3) for item in rows(rank, case)]
        assert [item for part in parts for item in part["list"]] == joined
        assert torch.cat([part["t"] for part in parts]).flatten().tolist() == joined
        sizes = [len(part["list"]) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and sizes == [len(part["t"]) for part in parts]
    for each in found:
        assert each["same"]["epoch"] == 3 and each["same"]["l"][0].tolist() == [1, 1]


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint saved by three ranks."""
    path = str(tmp_path_factory.mktemp("three"))
    run_ranks(3, save_rules, path)
    return path


WRONG: list[tuple[Any, list[Any]]] = [
    *(("sum", ["a", "b"]), ("sum", [True, False]), ("split", [1, 2]), ("sum", [{"a": 1}, {"b": 1}])),
    ("same", [{"epoch": 3}, {"epoch": 4}]),
    ("same", [[torch.ones(2)], [torch.zeros(2)]]),
    ("same", [{"epoch": 3, "l": 1}, {"epoch": 3}]),
]


def save_wrong(rank: int, world_size: int, path: str) -> None:
    """Save values that do not suit the rules."""
    dcp.save({f"v{n}": dcp.PerRank(states[rank]) for n, (_, states) in enumerate(WRONG)}, checkpoint_id=path)


def test_values_unsuited_to_a_rule(tmp_path: Path) -> None:
    """A value unsuited to its rule is an error with its name; `Rescale` refuses an unknown rule."""
    run_ranks(2, save_wrong, str(tmp_path))
    for number, (rule, _) in enumerate(WRONG):
        with pytest.raises(CheckpointError, match=f"v{number}"):
            dcp.load({f"v{number}": dcp.Rescale(None, rule)}, checkpoint_id=tmp_path)
    for wrong in ("mean", None):
        with pytest.raises(OptionError, match=re.escape('"same", "sum", "split", "keep" or a function')):
            dcp.Rescale(1, wrong)  # type: ignore[arg-type]


class App:
    """A `Stateful` with values that differ by rank, some in lists and dicts."""

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
        """Return the values, each with a rule."""
        return {
            "list": [dcp.Rescale({"seen": self.own["seen"], "half": self.own["half"]}, "sum")],
            "rows": dcp.Rescale(self.own["weights"], "split"),
            "queue": dcp.Rescale(self.queue, "split"),
            "noise": dcp.Rescale(self.noise, "keep"),
            "plain": 5,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state."""
        self.given = state_dict


def saved(rank: int, world_size: int, path: str) -> None:
    """Save `App`, and a value whose structure differs by rank."""
    last = {"parts": {str(number): torch.full((number,), rank) for number in range(rank + 1)}}
    dcp.save({"app": App(rank), "odd": dcp.PerRank(last)}, checkpoint_id=path)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint saved by two ranks."""
    path = tmp_path_factory.mktemp("two")
    run_ranks(2, saved, str(path))
    return path


def merge(states: list[Any], rank: int, world_size: int) -> Any:
    """Merge states by a function, as a rule."""
    return [sorted(state["parts"]) for state in states], rank, world_size


def loaded(rank: int, world_size: int, path: str, options: dict[str, Any]) -> Any:
    """Load an `App`, and return its values and the report's names."""
    app, odd = App(7), dcp.Rescale(None, merge)
    if world_size == 2:
        app = App(rank)
        app.own["seen"], app.queue = 0, []
    state = {"app": app} | ({"odd": odd} if world_size != 2 else {})  # two ranks fill existing values
    report = dcp.load(state, checkpoint_id=path, **options)
    assert report.kept_per_rank == []
    given = app.given
    sums = given["list"][0].value
    lists = [given["rows"].value.tolist(), given["queue"].value, given["noise"].value.tolist()]
    return sums["seen"], sums["half"], *lists, odd.value, sorted(report.rescaled)


def test_rules_on_other_numbers_of_ranks(of_two: Path) -> None:
    """Saved by 2 ranks, loaded by 3 and by 1: every rule works in objects, lists and dicts."""
    names = ["app.list.0", "app.noise", "app.queue", "app.rows", "odd"]
    odd: Any = [["0"], ["0", "1"]]
    for options in ({}, {"per_rank": "keep"}):
        assert run_ranks(3, loaded, str(of_two), options) == [
            (11, 2 / 3, [0.0], [0], [7, 7], (odd, 0, 3), names),
            (11, 2 / 3, [1.0], [1], [7, 7], (odd, 1, 3), names),
            (10, 2 / 3, [1.0], [1], [7, 7], (odd, 2, 3), names),
        ]
    alone = (32, 2.0, [0.0, 1.0, 1.0], [0, 1, 1], [7, 7], (odd, 0, 1), names)
    assert run_ranks(1, loaded, str(of_two), {}) == [alone]


def test_as_many_ranks_load_their_own(of_two: Path) -> None:
    """As many ranks as saved load their own values, for any rule; stock torch sees a `PerRank`."""
    assert run_ranks(2, loaded, str(of_two), {}) == [
        (11, 0.5, [0.0], [0], [0, 0], None, []),
        (21, 1.5, [1.0, 1.0], [1, 1], [1, 1], None, []),
    ]
    state: dict[str, Any] = {"app": {"queue": {"rank-1": []}}}
    stock.load(state, checkpoint_id=of_two, no_dist=True)
    assert state["app"]["queue"]["rank-1"] == [1, 1]


def test_rescaling_follows_rename_and_patterns(of_two: Path) -> None:
    """A value is rescaled under another name, and left alone if the patterns exclude it."""
    state: dict[str, Any] = {"mine": {"queue": dcp.Rescale([], "split"), "plain": 0}}
    report = dcp.load(state, checkpoint_id=of_two, rename={"^mine": "app"}, unexpected="ignore")
    assert (state["mine"]["queue"].value, report.rescaled) == ([0, 1, 1], ["mine.queue"])
    state = {"app": {"queue": dcp.Rescale([], "split"), "plain": 0}}
    report = dcp.load(state, checkpoint_id=of_two, only="app.plain")
    assert (state["app"]["queue"].value, state["app"]["plain"], report.rescaled) == ([], 5, [])


def test_rescaling_by_torchs_protocol(of_two: Path) -> None:
    """A planner that overrides a step rescales too; a foreign reader cannot, and raises."""
    state: dict[str, Any] = {"app": {"queue": dcp.Rescale([], "split")}}
    dcp.load(state, checkpoint_id=of_two, planner=TakesObjects(), unexpected="ignore")
    assert state["app"]["queue"].value == [0, 1, 1]
    with pytest.raises(PlanError, match=r"'app\.queue'.*FileSystemReader"):
        dcp.load(state, storage_reader=stock.FileSystemReader(of_two), unexpected="ignore")


def test_a_rule_that_fails_changes_nothing(of_two: Path, tmp_path: Path) -> None:
    """If a rule fails, or another rank's state is damaged, an error is raised and no value changes."""
    state: dict[str, Any] = {"app": {"plain": 0, "rows": dcp.Rescale(torch.zeros(1), "same")}}
    with pytest.raises(PlanError, match="differs"):
        dcp.load(state, checkpoint_id=of_two, unexpected="ignore")
    assert state["app"]["plain"] == 0
    copy = shutil.copytree(of_two, tmp_path / "copy")
    for file in copy.glob("*.distcp"):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    state["app"]["rows"] = dcp.Rescale(torch.zeros(1), "split")
    with pytest.raises(CorruptCheckpointError):
        dcp.load(state, checkpoint_id=copy, unexpected="ignore")
    assert (state["app"]["plain"], state["app"]["rows"].value.tolist()) == (0, [0])


def save_on_rank_1(rank: int, world_size: int, path: str) -> None:
    """Save a value on rank 1 alone."""
    dcp.save({"own": dcp.Rescale(rank, "sum")} if rank else {"w": torch.ones(1)}, checkpoint_id=path)


def test_a_rule_needs_the_states_of_all_ranks(tmp_path: Path) -> None:
    """A sum over a part of the ranks would be wrong, so it is an error."""
    run_ranks(2, save_on_rank_1, str(tmp_path))
    with pytest.raises(PlanError, match=r"'own'.*2 ranks saved.*only the state of ranks \[1\]"):
        dcp.load({"own": dcp.Rescale(0, "sum")}, checkpoint_id=tmp_path)
