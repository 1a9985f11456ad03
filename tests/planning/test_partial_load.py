"""Which entries a load is for, and what the checkpoint calls them: patterns, renaming, `PerRank` values."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version

from dcp.planners.load.options import LoadAttempt
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.planners.load.selection import Matches, Selection, check_matches, renamer
from dcp.planners.per_rank import PerRank
from dcp.planners.save.global_plan import plan_save
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.storage.errors import MissingKeyError, PlanError, ShapeMismatchError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.torch_storage.metadata import LazyMetadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def index_of(values: dict[str, Any], *, world_size: int | None = None) -> CheckpointIndex:
    """What a save of ``values`` by one rank would plan, said to be of ``world_size`` ranks."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(values)
    index = plan_save([planner.create_local_columns(digests=False).columns]).index
    provenance = {} if world_size is None else {"world_size": world_size}
    return replace(index, provenance=provenance)


def chosen(planner: DefaultLoadPlanner, values: dict[str, Any], index: CheckpointIndex) -> dict[str, str]:
    """The stored names that ``values`` are loaded from, by the state dict's."""
    planner.set_up_planner(values)
    columns, destinations = planner.create_load_columns(index)
    flat = {id(tensor): fqn for fqn, tensor in planner.state_dict.items()}
    tensors = index.chunk_tensors[columns.chunks].tolist()
    names = {
        flat[id(destinations.tensors[dest])]: index.fqns[tensor]
        for dest, tensor in zip(columns.dests.tolist(), tensors, strict=True)
    }
    objects = [index.objects.fqns[row] for row in columns.objects.tolist()]
    return names | dict(zip(columns.object_fqns, objects, strict=True))


# -- patterns ------------------------------------------------------------------------------------------------

KEYS = ["model", "model.w", "model.layers.0.w", "model.layers.10.bias", "models.w", "Model.w", "opt.lr"]


@pytest.mark.parametrize(
    ("only", "exclude", "expected"),
    [
        ("model", None, ["model", "model.w", "model.layers.0.w", "model.layers.10.bias"]),
        ("model.*", None, ["model.w", "model.layers.0.w", "model.layers.10.bias"]),
        ("model.layers.?", None, ["model.layers.0.w"]),
        ("*.w", None, ["model.w", "model.layers.0.w", "models.w", "Model.w"]),
        ("[Mm]odel.w", None, ["model.w", "Model.w"]),
        (["opt", "model.w"], None, ["model.w", "opt.lr"]),
        (None, "model", ["models.w", "Model.w", "opt.lr"]),
        (None, (), KEYS),
        ("model", "*.bias", ["model", "model.w", "model.layers.0.w"]),
        ("model", ["model.layers", "model.w"], ["model"]),
        ("m*", "models*", ["model", "model.w", "model.layers.0.w", "model.layers.10.bias"]),
        ("model.l[0]", None, []),
    ],
)
def test_what_patterns_select(only: Any, exclude: Any, expected: list[str]) -> None:
    """Globs, each with everything below what it matches; case-sensitive; exclude wins."""
    selection = Selection.of(only, exclude)
    assert selection is not None
    assert [key for key in KEYS if selection.selects(key)] == expected


NAMES = st.lists(st.text("ab0", min_size=1, max_size=3), min_size=2, max_size=4).map(".".join)
GLOBS = st.text("ab0.*?[]", min_size=1, max_size=8)


@given(data=st.data(), name=NAMES)
def test_what_is_not_reached_cannot_be_selected(data: st.DataObject, name: str) -> None:
    """An object that is not asked for its state has no entry that the patterns would have selected."""
    cut, at = (data.draw(st.integers(0, len(name) - 1)) for _ in range(2))
    alike = st.sampled_from([name, f"{name[:cut]}*", f"{name[:at]}?{name[at + 1 :]}", f"*{name[cut:]}"])
    only = data.draw(st.one_of(alike.map(lambda pattern: [pattern]), st.lists(GLOBS, min_size=1), st.none()))
    selection = Selection.of(only, data.draw(st.none() | st.lists(GLOBS, max_size=2)))
    if selection is not None and selection.selects(name):
        parts = name.split(".")
        assert all(selection.reaches(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))


def test_what_surely_has_nothing_is_not_reached() -> None:
    """The cases that matter: an optimizer beside the model that is loaded, or excluded by name."""
    cases = {
        ("model", None): False,
        ("model.*", None): False,
        (("mod*", "rng"), None): False,
        (None, "optimizer"): False,
        (None, "optimizer.*"): False,
        (None, "opt*"): False,
        (None, "optimizer.state"): True,
        ("optimizer.st*", None): True,
        ("*.step", None): True,
        ("optimizer.state.0", None): True,
    }
    for (only, exclude), expected in cases.items():
        selection = Selection.of(only, exclude)
        assert selection is not None
        assert selection.reaches("optimizer") is expected, (only, exclude)


def test_a_pattern_without_a_match_is_named_with_what_it_resembles() -> None:
    """Suggestions are as deep as the pattern; patterns that match are not told."""
    selection = Selection.of(["modle.*", "model.layers.0.weigth", "opt"], "zzz")
    assert selection is not None
    matches = selection.match(["model.layers.0.weight", "model.layers.0.bias", "opt.lr"], ())
    assert matches.idle["only='modle.*'"] == ["model"]
    assert matches.idle["only='model.layers.0.weigth'"][0] == "model.layers.0.weight"
    assert matches.idle["exclude='zzz'"] == []
    with pytest.raises(PlanError, match=r"did you mean 'model'\?.*match nothing") as caught:
        check_matches([matches])
    assert caught.value.patterns == list(matches.idle)
    assert "opt" not in str(caught.value).split("match")[0]


def test_a_pattern_may_match_on_one_rank_only() -> None:
    """Stages of a pipeline have different keys, of one program that gives the same patterns."""
    selection = Selection.of(["layers.0", "layers.1"], None)
    assert selection is not None
    ranks = [selection.match([f"layers.{rank}.w"], ()) for rank in range(2)]
    assert all(matches.idle for matches in ranks)
    check_matches(ranks)
    with pytest.raises(PlanError, match=r"layers\.1"):
        check_matches([ranks[0], ranks[0]])


def test_an_object_that_was_not_asked_may_have_what_a_pattern_means() -> None:
    """``exclude`` of something in a part that ``only`` leaves out anyway is no mistake that can be seen."""
    selection = Selection.of("model", ["optimizer.state", "optimiser"])
    assert selection is not None
    assert list(selection.match(["model.w"], ["optimizer"]).idle) == ["exclude='optimiser'"]


def test_nothing_to_load_is_an_error() -> None:
    """Patterns which all match, and leave nothing on any rank."""
    check_matches([Matches({}, 0), Matches({}, 1)])
    with pytest.raises(PlanError, match="leave nothing"):
        check_matches([Matches({}, 0), Matches({}, 0)])


@pytest.mark.parametrize(
    "options",
    [
        {"only": []},
        {"only": [""]},
        {"only": 3},
        {"exclude": [b"w"]},
        {"rename": {"(": "x"}},
        {"rename": {3: "x"}},
        {"rename": "x"},
        {"per_rank": "kept"},
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    """When the planner is made, before anything is read."""
    with pytest.raises(PlanError):
        DefaultLoadPlanner(**options)


# -- names ---------------------------------------------------------------------------------------------------


def test_rules_apply_in_order_each_to_what_the_last_one_gave() -> None:
    """As `re.sub`: anywhere in the key, with groups, and with functions for replacements."""
    rename = renamer({r"^module\.": "", r"layer(\d+)": r"layers.\1", "w$": lambda found: found[0].upper()})
    assert rename is not None
    assert rename("module.layer3.w") == "layers.3.W"
    assert rename("opt.module.w") == "opt.module.W"
    assert renamer(None) is None


@pytest.mark.parametrize("rename", [{"w": r"\3"}, lambda _: None, {"w": 3}])
def test_a_renaming_that_fails_names_the_key(rename: Any) -> None:
    """A group that is not there, or a result that is no string."""
    function = renamer(rename)
    assert function is not None
    with pytest.raises(PlanError) as caught:
        function("model.w")
    assert caught.value.fqn == "model.w"


def test_renamed_entries_are_loaded_from_their_stored_names() -> None:
    """Tensors and other values, several from one; what is renamed and found is told."""
    index = index_of({"w": torch.ones(2), "n": 1, "spare": torch.ones(1)})
    planner = DefaultLoadPlanner(rename=lambda key: key.removeprefix("m.").removesuffix("_ema"))
    state = {"m": {"w": torch.zeros(2), "w_ema": torch.zeros(2), "n": 0}}
    assert chosen(planner, state, index) == {"m.w": "w", "m.w_ema": "w", "m.n": "n"}
    assert planner.renamed_keys == {"m.w": "w", "m.w_ema": "w", "m.n": "n"}
    assert planner.unexpected_keys == ("spare",)


def test_what_does_not_fit_is_told_under_both_names() -> None:
    """The state dict's, which the reader knows, and the one that was looked for."""
    index = index_of({"w": torch.ones(2)})
    planner = DefaultLoadPlanner(rename={"^m.": ""})
    planner.set_up_planner({"m": {"w": torch.zeros(3)}})
    with pytest.raises(ShapeMismatchError, match=r"Size mismatch between .* for 'm\.w' \(renamed to 'w'\)"):
        planner.create_load_columns(index)
    planner.set_up_planner({"m": {"v": torch.zeros(2), "n": 1}})
    with pytest.raises(MissingKeyError) as caught:
        planner.create_load_columns(index)
    assert "Missing key in checkpoint state_dict: 'm.v' (renamed to 'v'), " in str(caught.value)
    assert caught.value.fqns == ["m.v", "m.n"]


def test_missing_entries_are_not_told_as_renamed() -> None:
    """With a partial load, names are the state dict's."""
    planner = DefaultLoadPlanner(rename={"^m.": ""}, allow_partial_load=True)
    state = {"m": {"w": torch.zeros(2), "v": torch.zeros(2)}}
    assert chosen(planner, state, index_of({"w": torch.ones(2)})) == {"m.w": "w"}
    assert planner.missing_keys == ("m.v",)
    assert planner.renamed_keys == {"m.w": "w"}


def test_old_keys_are_found_under_patterns_and_other_names(tmp_path: Path) -> None:
    """Checkpoints of torch before 2.4 have dicts without tensors as one entry."""
    _version._derived_version = "2_3"
    try:
        stock.save({"opt": {"lr": 0.5, "one": {"two": 3}}, "w": torch.ones(2)}, checkpoint_id=tmp_path)
    finally:
        _version._derived_version = None
    state: dict[str, Any] = {"m": {"opt": {"lr": 0.0, "one": {"two": 0}}, "w": torch.zeros(2)}}
    planner = DefaultLoadPlanner(only="m.opt", rename={"^m.": ""})
    stock.load(state, checkpoint_id=tmp_path, planner=planner)
    assert state["m"]["opt"] == {"lr": 0.5, "one": {"two": 3}}
    assert state["m"]["w"].tolist() == [0, 0]


# -- in torch's own load -------------------------------------------------------------------------------------


def test_torchs_load_heeds_the_options(tmp_path: Path) -> None:
    """The planner is enough; read items name the stored entry and the wanted one."""
    stock.save({"w": torch.ones(4, 2), "n": 3, "v": torch.ones(1)}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"m": {"w": torch.zeros(4, 2), "n": 0}, "v": torch.zeros(1)}
    planner = DefaultLoadPlanner(only="m", rename={"^m.": ""})
    stock.load(state, checkpoint_id=tmp_path, planner=planner)
    assert state["m"]["w"].sum() == 8
    assert state["m"]["n"] == 3
    assert state["v"].item() == 0
    assert planner.unexpected_keys == ()


def test_torchs_load_refuses_a_pattern_without_a_match(tmp_path: Path) -> None:
    """The coordinator finds it in the plans of all ranks."""
    stock.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(stock.CheckpointException, match=r"exclude='v'.* matches nothing"):
        stock.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(exclude="v"))


def test_meta_tensors_that_are_not_loaded_stay_so(tmp_path: Path) -> None:
    """Memory for them would hold what nobody has saved."""
    stock.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {name: torch.empty(2, device="meta") for name in ("a", "b")}
    stock.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(only="a"))
    assert state["a"].tolist() == [1, 1]
    assert state["b"].is_meta


# -- PerRank -------------------------------------------------------------------------------------------------


def two_ranks(world_size: int | None) -> CheckpointIndex:
    """Generators and loader positions of two ranks."""
    by_rank = {f"rank-{rank}": {"pos": rank, "gen": torch.full((2,), rank)} for rank in range(2)}
    return index_of({"w": torch.ones(2), "loader": by_rank, "user": {"rank-1": 5}}, world_size=world_size)


def resuming(rank: int, world_size: int, **options: Any) -> tuple[DefaultLoadPlanner, dict[str, Any]]:
    """A planner of one rank, and its state dict."""
    planner = DefaultLoadPlanner(**options)
    planner.begin_load(rank, world_size)
    own = {"pos": -1, "gen": torch.full((2,), -1)}
    return planner, {"w": torch.zeros(2), "loader": PerRank(own), "user": {f"rank-{min(rank, 1)}": 0}}


@pytest.mark.parametrize("world_size", [2, None])
def test_own_values_are_loaded_where_as_many_ranks_saved(world_size: int | None) -> None:
    """With "keep" as without; a checkpoint that does not tell is taken at its names."""
    for per_rank in ("keep", "exact"):
        planner, state = resuming(1, 2, per_rank=per_rank)
        assert set(chosen(planner, state, two_ranks(world_size))) == {
            "w",
            "loader.rank-1.pos",
            "loader.rank-1.gen",
            "user.rank-1",
        }
        assert planner.kept_per_rank == ()


def test_values_of_another_number_of_ranks_are_kept() -> None:
    """Also on the ranks for which the checkpoint has an entry; a plain key that looks like one is loaded."""
    planner, state = resuming(1, 3, per_rank="keep")
    assert set(chosen(planner, state, two_ranks(2))) == {"w", "user.rank-1"}
    assert planner.kept_per_rank == ("loader",)
    assert "loader.rank-1.pos" not in planner.unexpected_keys


@pytest.mark.parametrize("rename", [None, {r"^loader": "reader"}])
def test_what_other_ranks_have_of_a_value_is_not_unexpected(rename: dict[str, str] | None) -> None:
    """Each rank loads its own part; what only looks like such a part, and is not wanted, is told."""
    name = "loader" if rename is None else "reader"
    by_rank = {f"rank-{rank}": {"pos": rank} for rank in range(3)}
    index = index_of({name: by_rank, "user": {"rank-1": 5, "rank-2": 6}}, world_size=3)
    planner = DefaultLoadPlanner(rename=rename)
    planner.begin_load(1, 3)
    chosen(planner, {"loader": PerRank({"pos": -1}), "user": {"rank-1": 0}}, index)
    assert planner.unexpected_keys == ("user.rank-2",)


def test_values_the_checkpoint_lacks_are_kept_whole() -> None:
    """One of which it has a part is another thing, and an error."""
    planner, state = resuming(2, 2, per_rank="keep", exclude="user")
    assert set(chosen(planner, state, two_ranks(2))) == {"w"}
    assert planner.kept_per_rank == ("loader",)
    planner, state = resuming(1, 2, per_rank="keep")
    state["loader"].value["more"] = 1
    planner.set_up_planner(state)
    with pytest.raises(MissingKeyError, match=r"loader\.rank-1\.more"):
        planner.create_load_columns(two_ranks(2))


def test_the_error_names_the_way_out() -> None:
    """A resume by more ranks than saved says what can be done; other missing keys have other advice."""
    planner, state = resuming(2, 3, exclude="user")
    planner.set_up_planner(state)
    with pytest.raises(MissingKeyError, match=re.escape('per_rank="keep"')):
        planner.create_load_columns(two_ranks(2))
    planner.set_up_planner({"v": torch.zeros(1), "user": {"rank-2": 1}})
    with pytest.raises(MissingKeyError) as caught:
        planner.create_load_columns(two_ranks(2))
    assert "per_rank" not in str(caught.value)


def test_a_kept_value_on_the_meta_device_stays_there() -> None:
    """It is not replaced by memory that nothing fills."""
    planner, state = resuming(1, 3, per_rank="keep")
    state["loader"] = PerRank(torch.empty(2, device="meta"))
    chosen(planner, state, two_ranks(2))
    assert state["loader"].value.is_meta


# -- after a load that failed --------------------------------------------------------------------------------


def test_values_wait_for_the_load_to_succeed() -> None:
    """Objects, and tensors of `PerRank` values that the next checkpoint may leave as they are."""
    planner, state = resuming(1, 2, per_rank="keep")
    planner.begin_load(1, 2, LoadAttempt(stores_later=True))
    planner.set_up_planner(state)
    _, destinations = planner.create_load_columns(two_ranks(2))
    own = state["loader"].value
    for dest in destinations.tensors:
        dest.fill_(7)
    planner.store_object("loader.rank-1.pos", 7)
    assert own["pos"] == -1
    assert own["gen"].tolist() == [-1, -1]
    assert planner.touched_keys == {"w"}
    planner.store_values()
    assert own["pos"] == 7
    assert own["gen"].tolist() == [7, 7]


def test_a_checkpoint_that_cannot_replace_what_a_failed_load_filled_is_refused() -> None:
    """Else the state would be of two checkpoints, half of it damaged."""
    planner = DefaultLoadPlanner(allow_partial_load=True)
    planner.begin_load(0, 1)
    state = {"w": torch.zeros(2), "v": torch.zeros(2)}
    chosen(planner, state, index_of({"w": torch.ones(2), "v": torch.ones(2)}))
    assert planner.touched_keys == {"w", "v"}
    planner.begin_load(0, 1, LoadAttempt(must_fill=planner.touched_keys))
    planner.set_up_planner(state)
    with pytest.raises(PlanError, match=r"'v'.*two checkpoints"):
        planner.create_load_columns(index_of({"w": torch.ones(2)}))
    assert planner.touched_keys == {"w", "v"}


class PlansAlone(DefaultLoadPlanner):
    """A subclass that makes its plan as it sees fit."""

    def create_local_plan(self) -> Any:
        """Nothing."""
        return stock.LoadPlan([])


def test_a_subclass_that_plans_otherwise_cannot_heed_the_options() -> None:
    """Better an error than a whole load where a part was asked for."""
    for options in ({"only": "w"}, {"per_rank": "keep"}, {"rename": {"a": "b"}}):
        planner = PlansAlone(**options)
        planner.set_up_planner({"w": torch.zeros(2)}, LazyMetadata.of(lambda: index_of({})))
        planner.create_local_plan()
        with pytest.raises(PlanError, match="PlansAlone"):
            planner.check_chosen()
    PlansAlone().check_chosen()
