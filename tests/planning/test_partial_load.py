"""Which entries a load is for, and what the checkpoint calls them: patterns, renaming, `PerRank` values."""

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

import dcp
from dcp.errors import MissingKeyError, PlanError, ShapeMismatchError
from tests.support.examples import examples
from tests.support.ranks import run_ranks

KEYS = ["model", "model.w", "model.layers.0.w", "model.layers.10.bias", "models.w", "Model.w", "opt.lr"]
PATTERNS = st.sampled_from(
    ["model", "model.*", "model.layers.?", "*.w", "[Mm]odel.w", "opt", "m*", "models*", "*.bias"]
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an entry for each key."""
    folder = tmp_path_factory.mktemp("stored")
    dcp.save({key: torch.ones(1) for key in KEYS}, checkpoint_id=folder, no_dist=True)
    return folder


def chosen(patterns: list[str], key: str) -> bool:
    """Whether a pattern means the key, or something above it."""
    parts = key.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(name, pattern) for name in above for pattern in patterns)


@examples(40)
@given(only=st.none() | st.lists(PATTERNS, min_size=1, max_size=2), exclude=st.lists(PATTERNS, max_size=2))
def test_patterns_select_what_they_match_and_all_below(
    stored: Path, only: list[str] | None, exclude: list[str]
) -> None:
    """Globs, each with everything below what it matches; case-sensitive; exclude wins."""
    state = {key: torch.zeros(1) for key in KEYS}
    expected = [key for key in KEYS if (only is None or chosen(only, key)) and not chosen(exclude, key)]
    if not expected:
        with pytest.raises(PlanError, match="leave nothing"):
            dcp.load(state, checkpoint_id=stored, only=only, exclude=exclude, no_dist=True)
        return
    dcp.load(state, checkpoint_id=stored, only=only, exclude=exclude, no_dist=True)
    assert [key for key in KEYS if state[key].item()] == expected


def test_a_pattern_without_a_match_is_named_with_what_it_resembles(stored: Path) -> None:
    """Suggestions are as deep as the pattern; patterns that match are not told, and nothing is loaded."""
    state = {key: torch.zeros(1) for key in KEYS}
    with pytest.raises(PlanError, match=r"did you mean 'Model' or 'models'") as caught:
        dcp.load(state, checkpoint_id=stored, only=["modle.*", "opt"], exclude="zzz", no_dist=True)
    assert "zzz" in str(caught.value) and "'opt'" not in str(caught.value)
    assert not any(tensor.item() for tensor in state.values())


@pytest.mark.parametrize(
    "options",
    [
        *({"only": []}, {"only": [""]}, {"only": 3}, {"exclude": [b"w"]}),
        *({"rename": {"(": "x"}}, {"rename": {3: "x"}}, {"rename": "x"}, {"per_rank": "kept"}),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    """When the planner is made, before anything is read."""
    with pytest.raises(PlanError):
        dcp.DefaultLoadPlanner(**options)


# -- names ---------------------------------------------------------------------------------------------------


def test_rules_apply_in_order_each_to_what_the_last_one_gave(tmp_path: Path) -> None:
    """As `re.sub`: anywhere in the key, with groups and with functions; several from one."""
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


@pytest.mark.parametrize("rename", [{"w": r"\3"}, lambda _: None, {"w": 3}])
def test_a_renaming_that_fails_names_the_key(stored: Path, rename: Any) -> None:
    """A group that is not there, or a result that is no string."""
    with pytest.raises(PlanError, match=r"model\.w|rename"):
        dcp.load({"model.w": torch.zeros(1)}, checkpoint_id=stored, rename=rename, no_dist=True)


def test_what_does_not_fit_is_told_under_both_names(tmp_path: Path) -> None:
    """The state dict's, which the reader knows, and the one that was looked for."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ShapeMismatchError, match=r"Size mismatch between .* for 'm\.w' \(renamed to 'w'\)"):
        dcp.load({"m": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path, rename={"^m.": ""}, no_dist=True)
    with pytest.raises(MissingKeyError, match=re.escape("'m.v' (renamed to 'v')")) as caught:
        dcp.load(
            {"m": {"v": torch.zeros(2), "n": 1}}, checkpoint_id=tmp_path, rename={"^m.": ""}, no_dist=True
        )
    assert caught.value.fqns == ["m.v", "m.n"]


def test_torchs_load_heeds_the_options(tmp_path: Path) -> None:
    """The planner is enough, also for tensors on the meta device, which stay so if not loaded."""
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


class PlansAlone(dcp.DefaultLoadPlanner):
    """A subclass that makes its plan as it sees fit."""

    def create_local_plan(self) -> Any:
        """Nothing."""
        return stock.LoadPlan([])


def test_a_subclass_that_plans_otherwise_cannot_heed_the_options(stored: Path) -> None:
    """Better an error than a whole load where a part was asked for."""
    for options in ({"only": "opt"}, {"per_rank": "keep"}, {"rename": {"a": "b"}}):
        with pytest.raises(PlanError, match="PlansAlone"):
            planner = PlansAlone(**options)
            dcp.load({"opt.lr": torch.zeros(1)}, checkpoint_id=stored, planner=planner, no_dist=True)


# -- PerRank -------------------------------------------------------------------------------------------------


def resume(rank: int, world_size: int, folder: str, saved_by: int) -> dict[str, Any]:
    """Save by the first ranks, load by all: what `per_rank="keep"` keeps, and what an exact load says."""
    import torch.distributed as dist

    group = dist.new_group(list(range(saved_by)))
    mine = dcp.PerRank({"pos": rank, "gen": torch.full((2,), rank)})
    if rank < saved_by:
        dcp.save({"w": torch.ones(2), "loader": mine}, checkpoint_id=folder, process_group=group)
    dist.barrier()
    own = dcp.PerRank({"pos": -1, "gen": torch.full((2,), -1)})
    state: dict[str, Any] = {"w": torch.zeros(2), "loader": own}
    report = dcp.load(state, checkpoint_id=folder, per_rank="keep")
    told = ""
    try:
        dcp.load(state, checkpoint_id=folder)
    except dcp.CheckpointError as error:
        told = str(error)
    return {"pos": own.value["pos"], "kept": report.kept_per_rank, "told": told, "w": state["w"].sum().item()}


@pytest.mark.parametrize("saved_by", [2, 1])
def test_values_of_another_number_of_ranks_are_kept_if_asked(tmp_path: Path, saved_by: int) -> None:
    """Of as many ranks each loads its own; else all keep theirs, and without "keep" the error names it."""
    for rank, seen in enumerate(run_ranks(2, resume, str(tmp_path), saved_by)):
        assert seen["w"] == 2
        if saved_by == 2:
            assert (seen["pos"], seen["kept"], seen["told"]) == (rank, [], "")
        else:
            assert (seen["pos"], seen["kept"]) in ((-1, ["loader"]), (0, ["loader"]))
            assert 'per_rank="keep"' in seen["told"]
