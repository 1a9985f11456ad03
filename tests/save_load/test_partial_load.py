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


def save(path: Path) -> None:
    """A model, an optimizer, and a step."""
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "head": {"w": torch.ones(2), "name": "old"}},
        "opt": {"m": torch.full((2, 3), 2.0), "lr": 0.5},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=path)


def fresh() -> dict[str, Any]:
    """The same structure with nothing in it, and objects at the top level."""
    return {
        "model": Part(w=torch.zeros(2, 3), head={"w": torch.zeros(2), "name": "new"}),
        "opt": Part(m=torch.zeros(2, 3), lr=0.0),
        "step": 0,
    }


@pytest.mark.parametrize("road", ROADS)
def test_only_the_model(tmp_path: Path, road: str) -> None:
    """The optimizer is not asked for its state, which for a new one would mean to make it."""
    save(tmp_path)
    state = fresh()
    report = load(state, tmp_path, road, only="model")
    assert state["model"].state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["model"].given == [state["model"].state]
    assert state["model"].state["head"]["name"] == "old"
    assert (state["opt"].asked, state["opt"].given, state["step"]) == (0, [], 0)
    assert (report.missing, report.unexpected) == ([], [])


@pytest.mark.parametrize("road", ROADS)
def test_without_a_part(tmp_path: Path, road: str) -> None:
    """What is excluded keeps its value, and goes back to its object with what was loaded beside it."""
    save(tmp_path)
    state = fresh()
    load(state, tmp_path, road, exclude=["model.head", "*.lr"])
    (given,) = state["model"].given
    assert given["w"].sum() == 15
    assert (given["head"]["w"].tolist(), given["head"]["name"]) == ([0, 0], "new")
    assert state["opt"].given[0]["m"].tolist() == [[2] * 3] * 2
    assert state["opt"].state["lr"] == 0.0
    assert state["step"] == 7


def test_an_object_of_which_nothing_is_selected_is_not_touched(tmp_path: Path) -> None:
    """A pattern that could have meant something of it makes it give its state, and no more."""
    save(tmp_path)
    state = fresh()
    load(state, tmp_path, only="*.head.w")
    assert state["model"].given
    assert (state["opt"].asked, state["opt"].given) == (1, [])
    assert not state["opt"].state["m"].any()


def test_everything_is_given_back_without_patterns(tmp_path: Path) -> None:
    """Also to an object that has no state."""
    save(tmp_path)
    state = fresh() | {"empty": Part()}
    load(state, tmp_path)
    assert [len(state[name].given) for name in ("model", "opt", "empty")] == [1, 1, 1]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("patterns", [{"only": "modell"}, {"exclude": ["model", "opt.z"]}])
def test_a_misspelt_pattern_loads_nothing(tmp_path: Path, road: str, patterns: dict[str, Any]) -> None:
    """No tensor is filled before the patterns have been looked at."""
    save(tmp_path)
    state = fresh()
    with pytest.raises(PlanError, match="matches nothing"):
        load(state, tmp_path, road, **patterns)
    assert not state["model"].state["w"].any()
    assert not state["opt"].state["m"].any()


def test_options_of_the_planner_and_of_the_load(tmp_path: Path) -> None:
    """A planner brings its own; the load's are for one load."""
    save(tmp_path)
    planner = dcp.DefaultLoadPlanner(only="step")
    state = fresh()
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    assert (state["step"], state["model"].asked) == (7, 0)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, only="model", rename={"x": "y"})
    assert state["model"].state["w"].any()
    assert (planner.only, planner.rename, planner.per_rank) == ("step", None, "exact")
    for options in ({"only": "w"}, {"exclude": "w"}, {"rename": {"a": "b"}}, {"per_rank": "keep"}):
        with pytest.raises(CheckpointError, match=r"need dcp\.DefaultLoadPlanner"):
            dcp.load(state, checkpoint_id=tmp_path, planner=stock.DefaultLoadPlanner(), **options)


@pytest.mark.parametrize("road", ROADS)
def test_two_names_for_one_entry(tmp_path: Path, road: str) -> None:
    """Weights and their moving average begin with the same values, in memory of their own."""
    save(tmp_path)
    both: list[dict[str, Any]] = [
        {"w": torch.zeros(2, 3), "head": {"w": torch.zeros(2), "name": ""}} for _ in range(2)
    ]
    model, ema = both
    report = load({"model": model, "ema": ema}, tmp_path, road, rename={"^ema": "model"})
    assert model["w"].tolist() == ema["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ema["head"]["name"] == "old"
    assert report.renamed["ema.head.w"] == "model.head.w"


def test_the_report_tells_what_the_save_told(tmp_path: Path) -> None:
    """User metadata, save id and world size, by each of the ways that go through our storage."""
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, user_metadata={"run": "a", "step": 3})
    for road in ("columns", "objects"):
        report = load({"w": torch.zeros(1)}, tmp_path, road)
        assert (report.user_metadata, report.world_size) == ({"run": "a", "step": 3}, 1)
        assert report.save_id
        assert report.attempts == 1
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


def load_prefixed(rank: int, world_size: int, path: str, road: str) -> Any:
    """Into a model in the wrappers of FSDP1 and torch.compile, in more parts than were saved."""
    w = sharded(torch.zeros(7, 3), world_size)
    layer: dict[str, Any] = {"w": w, "n": 0}
    state = {"_orig_mod": {"_fsdp_wrapped_module": {"layers": {"0": layer}}}}
    rename = {r"(_orig_mod|_fsdp_wrapped_module)\.": ""}
    report = load(state, path, road, rename=rename, only="*.layers")
    return w.full_tensor().tolist(), report.renamed, layer["n"]


@pytest.mark.parametrize("road", ROADS)
def test_wrappers_prefixes_are_renamed_away(tmp_path: Path, road: str) -> None:
    """A DTensor saved by 2 ranks loads on 3 under other names."""
    run_ranks(2, save_sharded, str(tmp_path))
    prefix = "_orig_mod._fsdp_wrapped_module.layers.0."
    renamed = {f"{prefix}{name}": f"layers.0.{name}" for name in ("w", "n")}
    for full, told, n in run_ranks(3, load_prefixed, str(tmp_path), road):
        assert full == torch.arange(21.0).reshape(7, 3).tolist()
        assert (told, n) == (renamed, 3)


def load_per_rank(rank: int, world_size: int, path: str, road: str, per_rank: str) -> Any:
    """What a rank's own values are afterwards."""
    own: dict[str, Any] = {"pos": -1, "gen": torch.full((3,), -1)}
    state: dict[str, Any] = {
        "layers": {"0": {"w": sharded(torch.zeros(7, 3), world_size), "n": 0}},
        "loader": dcp.PerRank(own),
    }
    report = load(state, path, road, per_rank=per_rank)
    assert state["layers"]["0"]["n"] == 3
    return own["pos"], own["gen"].tolist(), report.kept_per_rank


@pytest.mark.parametrize("road", ["columns", "objects"])
def test_other_ranks_values_are_kept_if_asked(tmp_path: Path, road: str) -> None:
    """Saved by 2: kept on all of 3 ranks and on 1; loaded by 2, and by default by as many as have one."""
    run_ranks(2, save_sharded, str(tmp_path))
    kept = (-1, [-1, -1, -1], ["loader"])
    assert run_ranks(3, load_per_rank, str(tmp_path), road, "keep") == [kept] * 3
    assert run_ranks(1, load_per_rank, str(tmp_path), road, "keep") == [kept]
    loaded: list[Any] = [(10 + rank, [rank] * 3, []) for rank in range(2)]
    assert run_ranks(2, load_per_rank, str(tmp_path), road, "keep") == loaded
    assert run_ranks(1, load_per_rank, str(tmp_path), road, "exact") == loaded[:1]
    for result in run_ranks(3, load_per_rank, str(tmp_path), road, "exact", failures=True):
        assert isinstance(result, RankRaised)
        assert MissingKeyError.__name__ in result.class_names
        assert "loader.rank-2.pos" in result.message
        assert 'per_rank="keep"' in result.message


def test_what_stock_reads_is_kept_where_it_is_absent(tmp_path: Path) -> None:
    """torch's metadata do not tell how many ranks saved: those that have an entry take it."""
    run_ranks(2, save_sharded, str(tmp_path))
    kept = (-1, [-1, -1, -1], ["loader"])
    results = run_ranks(3, load_per_rank, str(tmp_path), "foreign reader", "keep")
    assert results == [(10, [0] * 3, []), (11, [1] * 3, []), kept]


def load_stages(rank: int, world_size: int, path: str, road: str, only: list[str]) -> Any:
    """Each rank has a stage of a pipeline."""
    stage, more = torch.zeros(2), torch.zeros(1)
    load({"stages": {str(rank): stage}, "more": more}, path, road, only=only)
    return stage.tolist(), more.tolist()


@pytest.mark.parametrize("road", ROADS)
def test_a_pattern_needs_a_match_on_some_rank(tmp_path: Path, road: str) -> None:
    """Rank 0 has nothing that ``stages.1`` could mean, and rank 1 nothing at all to load."""
    dcp.save(
        {"stages": {"0": torch.ones(2), "1": torch.ones(2)}, "more": torch.ones(1)}, checkpoint_id=tmp_path
    )
    path = str(tmp_path)
    both = [([1.0, 1.0], [0.0])] * 2
    assert run_ranks(2, load_stages, path, road, ["stages.0", "stages.1"]) == both
    assert run_ranks(2, load_stages, path, road, ["stages.0"]) == [both[0], ([0.0, 0.0], [0.0])]
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


def _told(rank: int, world_size: int, path: str, saving: bool, options: dict[str, Any]) -> list[str]:
    state = {"app": {"loader": dcp.PerRank({"position": rank}), "w": torch.ones(2)}}
    if saving:
        dcp.save(state, checkpoint_id=path)
        return []
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dcp.loading.engine")
    logger.addHandler(handler)
    try:
        for road in ROADS[:2]:
            load(state, path, road, **options)
    finally:
        logger.removeHandler(handler)
    return told


def test_values_of_other_numbers_of_ranks_are_told(tmp_path: Path) -> None:
    """Kept ones begin anew on every rank, and those of ranks that are gone are nowhere: by name, once."""
    run_ranks(3, _told, str(tmp_path), True, {})
    assert run_ranks(3, _told, str(tmp_path), False, {"per_rank": "keep"}) == [[], [], []]
    kept, other = run_ranks(2, _told, str(tmp_path), False, {"per_rank": "keep"})
    assert len(kept) == 2 and other == []
    assert all("saved by 3 ranks, loaded by 2: 'app.loader' of every rank" in text for text in kept)
    left, other = run_ranks(2, _told, str(tmp_path), False, {})
    assert len(left) == 2 and other == []
    assert all("its own of 'app.loader'" in text and "not loaded" in text for text in left)


def test_a_value_that_the_checkpoint_lacks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Kept, because it is new in the state."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    dcp.load({"w": torch.ones(2), "rng": dcp.PerRank(7)}, checkpoint_id=tmp_path, per_rank="keep")
    assert "no 'rng' of rank 0" in caplog.text
