"""`dcp.load` of parts, under other names, and of `PerRank` values by another number of ranks."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from dcp.errors import CheckpointError, MissingKeyError, PlanError, ShapeMismatchError
from tests.save_load.code_paths import CODE_PATHS, Part, load
from tests.support.examples import examples
from tests.support.rank_acts import warned
from tests.support.ranks import run_ranks

# -- patterns and names --------------------------------------------------------------------------------------

KEYS = ["model", "model.w", "model.layers.0.w", "model.layers.10.bias", "models.w", "Model.w", "opt.lr"]
PATTERNS = st.sampled_from(
    ["model", "model.*", "model.layers.?", "*.w", "[Mm]odel.w", "opt", "m*", "models*", "*.bias"]
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with an entry for each key."""
    folder = tmp_path_factory.mktemp("stored")
    dcp.save({key: torch.ones(1) for key in KEYS}, checkpoint_id=folder, no_dist=True)
    return folder


def chosen(patterns: list[str], key: str) -> bool:
    """Return whether a pattern matches the key or a key above it."""
    parts = key.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(name, pattern) for name in above for pattern in patterns)


@examples(40)
@given(only=st.none() | st.lists(PATTERNS, min_size=1, max_size=2), exclude=st.lists(PATTERNS, max_size=2))
def test_patterns_select_matches_and_entries_below(
    stored: Path, only: list[str] | None, exclude: list[str]
) -> None:
    """A glob selects its matches and everything below, is case-sensitive, and yields to ``exclude``."""
    state = {key: torch.zeros(1) for key in KEYS}
    expected = [key for key in KEYS if (only is None or chosen(only, key)) and not chosen(exclude, key)]
    if not expected:
        with pytest.raises(PlanError, match="select nothing"):
            dcp.load(state, checkpoint_id=stored, only=only, exclude=exclude, no_dist=True)
        return
    dcp.load(state, checkpoint_id=stored, only=only, exclude=exclude, no_dist=True)
    assert [key for key in KEYS if state[key].item()] == expected


def test_a_pattern_without_a_match_has_suggestions(stored: Path) -> None:
    """A pattern without a match raises with suggestions of the pattern's depth, and nothing is loaded."""
    state = {key: torch.zeros(1) for key in KEYS}
    with pytest.raises(PlanError, match=r"did you mean 'Model' or 'models'") as caught:
        dcp.load(state, checkpoint_id=stored, only=["modle.*", "opt"], exclude="zzz", no_dist=True)
    assert "zzz" in str(caught.value) and "'opt'" not in str(caught.value)
    assert not any(tensor.item() for tensor in state.values())


def test_rename_rules_apply_in_order(tmp_path: Path) -> None:
    """Rules apply in order as `re.sub`, with groups and functions, and may map several keys to one."""
    dcp.save({"layers.3.W": torch.ones(2), "n": 1, "spare": 2}, checkpoint_id=tmp_path, no_dist=True)
    state = {"module.layer3.w": torch.zeros(2), "module.layer3.w_ema": torch.zeros(2), "module.n": 0}
    rules: Any = {
        r"^module\.": "",
        "_ema$": "",
        r"layer(\d+)": r"layers.\1",
        "w$": lambda found: found[0].upper(),
    }
    report = dcp.load(state, checkpoint_id=tmp_path, rename=rules, unexpected="ignore", no_dist=True)
    assert state["module.layer3.w"].sum() == state["module.layer3.w_ema"].sum() == 2  # type: ignore[attr-defined]
    assert state["module.n"] == 1 and report.unexpected == ["spare"]
    assert set(report.renamed.values()) == {"layers.3.W", "n"}


def test_errors_have_both_names_of_a_key(tmp_path: Path) -> None:
    """An error has the key of the state dict and the renamed key."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ShapeMismatchError, match=r"Size mismatch between .* for 'm\.w' \(renamed to 'w'\)"):
        dcp.load({"m": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path, rename={"^m.": ""}, no_dist=True)
    with pytest.raises(MissingKeyError, match=re.escape("'m.v' (renamed to 'v')")) as caught:
        dcp.load(
            {"m": {"v": torch.zeros(2), "n": 1}}, checkpoint_id=tmp_path, rename={"^m.": ""}, no_dist=True
        )
    assert caught.value.fqns == ["m.v", "m.n"]


def test_torchs_load_uses_the_options(tmp_path: Path) -> None:
    """Options of the planner work in torch's load, and meta tensors that are not loaded stay meta."""
    saved = {"w": torch.ones(4, 2), "n": 3, "v": torch.ones(1), "b": torch.ones(2)}
    stock.save(saved, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"m": {"w": torch.empty(4, 2, device="meta"), "n": 0}, "v": torch.zeros(1)}
    state["b"] = torch.empty(2, device="meta")
    planner = dcp.DefaultLoadPlanner(only="m", rename={"^m.": ""})
    stock.load(state, checkpoint_id=tmp_path, planner=planner)
    assert (state["m"]["w"].sum(), state["m"]["n"], state["v"].item()) == (8, 3, 0)
    assert state["b"].is_meta
    with pytest.raises(stock.CheckpointException, match=r"exclude='q'.* matches nothing"):
        stock.load(
            {"w": torch.zeros(4, 2)}, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(exclude="q")
        )


# -- objects and code paths of a load ------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint of a model, an optimizer and a step."""
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "head": {"w": torch.ones(2), "name": "old"}},
        "opt": {"m": torch.full((2, 3), 2.0), "lr": 0.5},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def fresh() -> dict[str, Any]:
    """Return the same structure without values, with objects at the top level."""
    return {
        "model": Part(w=torch.zeros(2, 3), head={"w": torch.zeros(2), "name": "new"}),
        "opt": Part(m=torch.zeros(2, 3), lr=0.0),
        "step": 0,
    }


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_only_model_is_loaded(saved: Path, code_path: str) -> None:
    """With only="model" the optimizer's state is not requested, which for a new one would create it."""
    state = fresh()
    report = load(state, saved, code_path, only="model")
    assert state["model"].state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["model"].given == [state["model"].state]
    assert state["model"].state["head"]["name"] == "old"
    assert (state["opt"].asked, state["opt"].given, state["step"]) == (0, [], 0)
    assert (report.missing, report.unexpected) == ([], [])


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_excluded_entries_keep_their_values(saved: Path, code_path: str) -> None:
    """An excluded entry keeps its value, and its object receives it with the loaded entries."""
    state = fresh()
    load(state, saved, code_path, exclude=["model.head", "*.lr"])
    (given,) = state["model"].given
    assert given["w"].sum() == 15
    assert (given["head"]["w"].tolist(), given["head"]["name"]) == ([0, 0], "new")
    assert state["opt"].given[0]["m"].tolist() == [[2] * 3] * 2
    assert (state["opt"].state["lr"], state["step"]) == (0.0, 7)


def test_options_of_the_planner_and_of_the_load(saved: Path) -> None:
    """Options of a load override the planner's for one load, and need a planner with such options."""
    planner = dcp.DefaultLoadPlanner(only="step")
    state = fresh()
    dcp.load(state, checkpoint_id=saved, planner=planner)
    assert (state["step"], state["model"].asked) == (7, 0)
    dcp.load(state, checkpoint_id=saved, planner=planner, only="model", rename={"x": "y"})
    assert state["model"].state["w"].any()
    assert (planner.only, planner.rename, planner.per_rank) == ("step", None, "exact")
    for options in ({"only": "w"}, {"exclude": "w"}, {"rename": {"a": "b"}}, {"per_rank": "keep"}):
        with pytest.raises(CheckpointError, match=r"pass dcp\.DefaultLoadPlanner"):
            dcp.load(state, checkpoint_id=saved, planner=stock.DefaultLoadPlanner(), **options)


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_patterns_match_names_before_the_renaming(saved: Path, code_path: str) -> None:
    """Patterns match the state dict's names, before they are renamed."""
    state = {"model": {"w": torch.zeros(2, 3)}, "ema": {"w": torch.zeros(2, 3)}}
    load(state, saved, code_path, rename={"^ema": "model"}, only="ema")
    assert state["ema"]["w"].any() and not state["model"]["w"].any()


# -- ranks ---------------------------------------------------------------------------------------------------


def sharded(tensor: torch.Tensor, world_size: int) -> DTensor:
    """Return a tensor sharded by rows over all ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def save_sharded(rank: int, world_size: int, path: str) -> None:
    """Save a model, and the state of each rank's data loader and generator."""
    state = {
        "layers": {"0": {"w": sharded(torch.arange(21.0).reshape(7, 3), world_size), "n": 3}},
        "loader": dcp.PerRank({"pos": 10 + rank, "gen": torch.full((3,), rank)}),
    }
    dcp.save(state, checkpoint_id=path)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint saved by two ranks."""
    path = str(tmp_path_factory.mktemp("two"))
    run_ranks(2, save_sharded, path)
    return path


def load_per_rank(rank: int, world_size: int, path: str, code_paths: list[tuple[str, str]]) -> list[Any]:
    """Load by each code path; return the rank's own values, or the error."""
    found: list[Any] = []
    for code_path, per_rank in code_paths:
        own: dict[str, Any] = {"pos": -1, "gen": torch.full((3,), -1)}
        layers = {"0": {"w": sharded(torch.zeros(7, 3), world_size), "n": 0}}
        try:
            report = load({"layers": layers, "loader": dcp.PerRank(own)}, path, code_path, per_rank=per_rank)
        except MissingKeyError as error:
            found.append(str(error))
            continue
        found.append((own["pos"], own["gen"].tolist(), report.kept_per_rank))
    return found


KEPT = (-1, [-1, -1, -1], ["loader"])
OWN: list[Any] = [(10 + rank, [rank] * 3, []) for rank in range(2)]


@pytest.mark.parametrize("code_path", ["columns", "objects"])
def test_values_per_rank_are_kept_on_request(of_two: str, code_path: str) -> None:
    """With per_rank="keep" other numbers of ranks keep their values; by default a rank needs an entry."""
    ways = [(code_path, "keep"), (code_path, "exact")]
    for kept, error in run_ranks(3, load_per_rank, of_two, ways):
        assert kept == KEPT
        assert "loader.rank-2.pos" in error and 'per_rank="keep"' in error
    assert run_ranks(2, load_per_rank, of_two, ways) == [[own, own] for own in OWN]
    assert run_ranks(1, load_per_rank, of_two, ways) == [[KEPT, OWN[0]]]
    # torch's metadata has no number of ranks, so ranks with an entry load it
    found = run_ranks(3, load_per_rank, of_two, [("foreign reader", "keep")])
    assert found == [[OWN[0]], [OWN[1]], [KEPT]]


def load_stages(rank: int, world_size: int, path: str, code_path: str) -> Any:
    """Load a rank's pipeline stage with each list of patterns."""
    found: list[Any] = []
    for only in (["stages.0", "stages.1"], ["stages.0"], ["stages.0", "stages.2"]):
        stage, more = torch.zeros(2), torch.zeros(1)
        try:
            load({"stages": {str(rank): stage}, "more": more}, path, code_path, only=only)
        except PlanError as error:
            found.append(str(error))
        else:
            found.append((stage.tolist(), more.tolist()))
    return found


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_a_pattern_needs_a_match_on_some_rank(tmp_path: Path, code_path: str) -> None:
    """A pattern needs a match on some rank, not on all; a rank may have nothing to load."""
    stages = {"0": torch.ones(2), "1": torch.ones(2)}
    dcp.save({"stages": stages, "more": torch.ones(1)}, checkpoint_id=tmp_path)
    full, none = ([1.0, 1.0], [0.0]), ([0.0, 0.0], [0.0])
    found = run_ranks(2, load_stages, str(tmp_path), code_path)
    assert [each[:2] for each in found] == [[full, full], [full, none]]
    assert all("only='stages.2'" in error for *_, error in found)


def save_own(rank: int, world_size: int, path: str) -> None:
    """Save a position per rank in an object's state."""
    dcp.save({"app": {"loader": dcp.PerRank({"position": rank})}}, checkpoint_id=path)


def warnings_of_loads(rank: int, world_size: int, path: str) -> list[list[str]]:
    """Return the warnings of loads with and without per_rank="keep"."""
    found: list[list[str]] = []
    for options in ({"per_rank": "keep"}, {}):
        for code_path in CODE_PATHS[:2]:
            with warned() as logged:
                load({"app": {"loader": dcp.PerRank({"position": -1})}}, path, code_path, **options)
            found.append(logged)
    return found


def test_kept_and_unloaded_values_are_warned_of(tmp_path: Path) -> None:
    """Values that are kept, and values of missing ranks that are not loaded, are named in one warning."""
    run_ranks(3, save_own, str(tmp_path))
    assert run_ranks(3, warnings_of_loads, str(tmp_path)) == [[[]] * 4] * 3
    (*kept, left, other_left), others = run_ranks(2, warnings_of_loads, str(tmp_path))
    assert others == [[]] * 4
    for (text,) in kept:
        assert "saved by 3 ranks, loaded by 2: 'app.loader' of every rank" in text
    for (text,) in (left, other_left):
        assert "each rank loads its own state of 'app.loader'" in text and "not loaded" in text
