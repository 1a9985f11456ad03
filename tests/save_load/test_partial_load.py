"""`dcp.load` of a part, under other names, and of `PerRank` values by another number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from dcp.errors import CheckpointError, MissingKeyError, PlanError
from tests.save_load.roads import ROADS, Part, load
from tests.support.ranks import RankRaised, run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model, an optimizer, and a step."""
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "head": {"w": torch.ones(2), "name": "old"}},
        "opt": {"m": torch.full((2, 3), 2.0), "lr": 0.5},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def fresh() -> dict[str, Any]:
    """The same structure with nothing in it, and objects at the top level."""
    return {
        "model": Part(w=torch.zeros(2, 3), head={"w": torch.zeros(2), "name": "new"}),
        "opt": Part(m=torch.zeros(2, 3), lr=0.0),
        "step": 0,
    }


@pytest.mark.parametrize("road", ROADS)
def test_only_the_model(saved: Path, road: str) -> None:
    """The optimizer is not asked for its state, which for a new one would mean to make it."""
    state = fresh()
    report = load(state, saved, road, only="model")
    assert state["model"].state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["model"].given == [state["model"].state]
    assert state["model"].state["head"]["name"] == "old"
    assert (state["opt"].asked, state["opt"].given, state["step"]) == (0, [], 0)
    assert (report.missing, report.unexpected) == ([], [])


@pytest.mark.parametrize("road", ROADS)
def test_without_a_part(saved: Path, road: str) -> None:
    """An excluded entry keeps its value, and goes back to its object with what was loaded beside it."""
    state = fresh()
    load(state, saved, road, exclude=["model.head", "*.lr"])
    (given,) = state["model"].given
    assert given["w"].sum() == 15
    assert (given["head"]["w"].tolist(), given["head"]["name"]) == ([0, 0], "new")
    assert state["opt"].given[0]["m"].tolist() == [[2] * 3] * 2
    assert (state["opt"].state["lr"], state["step"]) == (0.0, 7)


def test_objects_are_given_what_is_selected_of_them(saved: Path) -> None:
    """One of which nothing is selected gives its state at most; without patterns all are given theirs, also
    one that has no state."""
    state = fresh()
    load(state, saved, only="*.head.w")
    assert state["model"].given
    assert (state["opt"].asked, state["opt"].given) == (1, [])
    assert not state["opt"].state["m"].any()
    state = fresh() | {"empty": Part()}
    load(state, saved)
    assert [len(state[name].given) for name in ("model", "opt", "empty")] == [1, 1, 1]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("patterns", [{"only": "modell"}, {"exclude": ["model", "opt.z"]}])
def test_a_misspelt_pattern_loads_nothing(saved: Path, road: str, patterns: dict[str, Any]) -> None:
    """No tensor is filled before the patterns have been looked at."""
    state = fresh()
    with pytest.raises(PlanError, match="matches nothing"):
        load(state, saved, road, **patterns)
    assert not state["model"].state["w"].any()
    assert not state["opt"].state["m"].any()


def test_options_of_the_planner_and_of_the_load(saved: Path) -> None:
    """A planner brings its own; the load's are for one load, and need a planner that knows them."""
    planner = dcp.DefaultLoadPlanner(only="step")
    state = fresh()
    dcp.load(state, checkpoint_id=saved, planner=planner)
    assert (state["step"], state["model"].asked) == (7, 0)
    dcp.load(state, checkpoint_id=saved, planner=planner, only="model", rename={"x": "y"})
    assert state["model"].state["w"].any()
    assert (planner.only, planner.rename, planner.per_rank) == ("step", None, "exact")
    for options in ({"only": "w"}, {"exclude": "w"}, {"rename": {"a": "b"}}, {"per_rank": "keep"}):
        with pytest.raises(CheckpointError, match=r"need dcp\.DefaultLoadPlanner"):
            dcp.load(state, checkpoint_id=saved, planner=stock.DefaultLoadPlanner(), **options)


@pytest.mark.parametrize("road", ROADS)
def test_two_names_for_one_entry(saved: Path, road: str) -> None:
    """Weights and their moving average begin with the same values, in memory of their own."""
    model, ema = ({"w": torch.zeros(2, 3), "head": {"w": torch.zeros(2), "name": ""}} for _ in range(2))
    report = load({"model": model, "ema": ema}, saved, road, rename={"^ema": "model"})
    assert torch.equal(model["w"], torch.arange(6.0).view(2, 3))  # type: ignore[arg-type]
    assert torch.equal(ema["w"], model["w"])  # type: ignore[arg-type]
    assert ema["head"]["name"] == "old"  # type: ignore[index]
    assert report.renamed["ema.head.w"] == "model.head.w"


@pytest.mark.parametrize("road", ROADS)
def test_patterns_are_about_the_names_before_the_renaming(saved: Path, road: str) -> None:
    """Patterns choose by the names of the state dict, whatever the checkpoint calls it."""
    state = {"model": {"w": torch.zeros(2, 3)}, "ema": {"w": torch.zeros(2, 3)}}
    load(state, saved, road, rename={"^ema": "model"}, only="ema")
    assert state["ema"]["w"].any() and not state["model"]["w"].any()


def test_the_report_has_what_the_save_was_given(tmp_path: Path) -> None:
    """User metadata, save id and world size are there for loads through our storage."""
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, user_metadata={"run": "a", "step": 3})
    for road in ("columns", "objects"):
        report = load({"w": torch.zeros(1)}, tmp_path, road)
        assert (report.user_metadata, report.world_size) == ({"run": "a", "step": 3}, 1)
        assert report.save_id and report.attempts == 1
    assert load({"w": torch.zeros(1)}, tmp_path, "foreign reader").user_metadata == {}


# -- ranks ---------------------------------------------------------------------------------------------------


def sharded(tensor: torch.Tensor, world_size: int) -> DTensor:
    """Rows over all ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def save_sharded(rank: int, world_size: int, path: str) -> None:
    """A model and the state of each rank's data loader and generator."""
    state = {
        "layers": {"0": {"w": sharded(torch.arange(21.0).reshape(7, 3), world_size), "n": 3}},
        "loader": dcp.PerRank({"pos": 10 + rank, "gen": torch.full((3,), rank)}),
    }
    dcp.save(state, checkpoint_id=path)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two ranks have saved."""
    path = str(tmp_path_factory.mktemp("two"))
    run_ranks(2, save_sharded, path)
    return path


def load_prefixed(rank: int, world_size: int, path: str, road: str) -> Any:
    """Into a model in the wrappers of FSDP1 and torch.compile, in more parts than were saved."""
    w = sharded(torch.zeros(7, 3), world_size)
    layer: dict[str, Any] = {"w": w, "n": 0}
    state = {"_orig_mod": {"_fsdp_wrapped_module": {"layers": {"0": layer}}}}
    rename = {r"(_orig_mod|_fsdp_wrapped_module)\.": ""}
    report = load(state, path, road, rename=rename, only="*.layers")
    return w.full_tensor().tolist(), report.renamed, layer["n"]


@pytest.mark.parametrize("road", ROADS)
def test_wrappers_prefixes_are_renamed_away(of_two: str, road: str) -> None:
    """A DTensor saved by 2 ranks loads on 3 under other names."""
    prefix = "_orig_mod._fsdp_wrapped_module.layers.0."
    renamed = {f"{prefix}{name}": f"layers.0.{name}" for name in ("w", "n")}
    for full, told, n in run_ranks(3, load_prefixed, of_two, road):
        assert full == torch.arange(21.0).reshape(7, 3).tolist()
        assert (told, n) == (renamed, 3)


def load_per_rank(rank: int, world_size: int, path: str, road: str, per_rank: str) -> Any:
    """A rank's own values afterwards."""
    own: dict[str, Any] = {"pos": -1, "gen": torch.full((3,), -1)}
    layers = {"0": {"w": sharded(torch.zeros(7, 3), world_size), "n": 0}}
    report = load({"layers": layers, "loader": dcp.PerRank(own)}, path, road, per_rank=per_rank)
    assert layers["0"]["n"] == 3
    return own["pos"], own["gen"].tolist(), report.kept_per_rank


KEPT = (-1, [-1, -1, -1], ["loader"])
OWN: list[Any] = [(10 + rank, [rank] * 3, []) for rank in range(2)]


@pytest.mark.parametrize("road", ["columns", "objects"])
def test_other_ranks_values_are_kept_if_asked(of_two: str, road: str) -> None:
    """Saved by 2: kept on all of 3 ranks and on 1; loaded by 2, and by default by as many as have one."""
    assert run_ranks(3, load_per_rank, of_two, road, "keep") == [KEPT] * 3
    assert run_ranks(1, load_per_rank, of_two, road, "keep") == [KEPT]
    assert run_ranks(2, load_per_rank, of_two, road, "keep") == OWN
    assert run_ranks(1, load_per_rank, of_two, road, "exact") == OWN[:1]
    for result in run_ranks(3, load_per_rank, of_two, road, "exact", failures=True):
        assert isinstance(result, RankRaised)
        assert MissingKeyError.__name__ in result.class_names
        assert "loader.rank-2.pos" in result.message and 'per_rank="keep"' in result.message


def test_what_stock_reads_is_kept_where_it_is_absent(of_two: str) -> None:
    """torch's metadata have no number of ranks: those that have an entry take it."""
    assert run_ranks(3, load_per_rank, of_two, "foreign reader", "keep") == [*OWN, KEPT]


def load_stages(rank: int, world_size: int, path: str, road: str, only: list[str]) -> Any:
    """Each rank has a stage of a pipeline."""
    stage, more = torch.zeros(2), torch.zeros(1)
    load({"stages": {str(rank): stage}, "more": more}, path, road, only=only)
    return stage.tolist(), more.tolist()


@pytest.mark.parametrize("road", ROADS)
def test_a_pattern_needs_a_match_on_some_rank(tmp_path: Path, road: str) -> None:
    """Rank 0 has nothing that ``stages.1`` could mean, and rank 1 nothing at all to load."""
    stages = {"0": torch.ones(2), "1": torch.ones(2)}
    dcp.save({"stages": stages, "more": torch.ones(1)}, checkpoint_id=tmp_path)
    path, loaded = str(tmp_path), ([1.0, 1.0], [0.0])
    assert run_ranks(2, load_stages, path, road, ["stages.0", "stages.1"]) == [loaded] * 2
    assert run_ranks(2, load_stages, path, road, ["stages.0"]) == [loaded, ([0.0, 0.0], [0.0])]
    for result in run_ranks(2, load_stages, path, road, ["stages.0", "stages.2"], failures=True):
        assert isinstance(result, RankRaised)
        assert "only='stages.2'" in result.message


def test_views_of_a_fused_weight(tmp_path: Path) -> None:
    """Entries of their own go into the parts of a plain parameter."""
    parts = {name: {"weight": torch.full((2, 2), float(number))} for number, name in enumerate("qkv")}
    dcp.save({"attention": parts}, checkpoint_id=tmp_path)
    fused = torch.nn.Linear(2, 6)
    q, k, v = fused.weight.detach().chunk(3)
    dcp.load({"q": q, "k": k, "v": v}, checkpoint_id=tmp_path, rename={"^([qkv])$": r"attention.\1.weight"})
    assert fused.weight[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def save_own(rank: int, world_size: int, path: str) -> None:
    """A position of each rank, in an object's state."""
    dcp.save({"app": {"loader": dcp.PerRank({"position": rank})}}, checkpoint_id=path)


def warnings_of_load(rank: int, world_size: int, path: str, options: dict[str, Any]) -> list[str]:
    """The messages of a load."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dcp")
    logger.addHandler(handler)
    try:
        for road in ROADS[:2]:
            load({"app": {"loader": dcp.PerRank({"position": -1})}}, path, road, **options)
    finally:
        logger.removeHandler(handler)
    return told


def test_values_of_other_numbers_of_ranks_are_warned_of(tmp_path: Path) -> None:
    """Kept ones begin anew on every rank, and those of ranks that are gone are nowhere: by name, once."""
    run_ranks(3, save_own, str(tmp_path))
    assert run_ranks(3, warnings_of_load, str(tmp_path), {"per_rank": "keep"}) == [[], [], []]
    kept, other = run_ranks(2, warnings_of_load, str(tmp_path), {"per_rank": "keep"})
    assert len(kept) == 2 and other == []
    assert all("saved by 3 ranks, loaded by 2: 'app.loader' of every rank" in text for text in kept)
    left, other = run_ranks(2, warnings_of_load, str(tmp_path), {})
    assert len(left) == 2 and other == []
    assert all("its own of 'app.loader'" in text and "not loaded" in text for text in left)


def test_a_value_that_the_checkpoint_lacks_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that is new in the state is kept."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    dcp.load({"w": torch.ones(2), "rng": dcp.PerRank(7)}, checkpoint_id=tmp_path, per_rank="keep")
    assert "no 'rng' of rank 0" in caplog.text
