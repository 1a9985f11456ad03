"""Merges through the public functions: inputs that become one checkpoint, and errors before any write.

test_numbers tests the sums to the last bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeyError,
    OptionError,
    PlanError,
)
from tests.support.conversion import FUSED, NAMES, command, flip, names_in, state_to_fuse
from tests.support.harmless_values import same
from tests.support.s3 import raw_s3

State = dict[str, torch.Tensor]
_WEIGHTS = [0.5, 0.3, 0.2]


def _state(number: int, elements: int = 1000) -> State:
    torch.manual_seed(number)
    return {f"t{n}": torch.randn(elements).to(torch.bfloat16) for n in range(6)}


def _save_three(folder: Path, elements: int = 1000) -> list[Path]:
    """Save three sources in three formats, with values and a nested state."""
    states = [_state(number, elements) for number in range(3)]
    first = {"model": states[0], "lr": 0.1}
    dcp.save(first, checkpoint_id=folder / "a", no_dist=True, user_metadata={"step": 7})
    save_file({f"model.{name}": tensor for name, tensor in states[1].items()}, folder / "b.safetensors")
    torch.save({"model": states[2], "lr": 0.3}, folder / "c.pt")
    return [folder / "a", folder / "b.safetensors", folder / "c.pt"]


def _sum(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Add in float32, one source after the other, and round once."""
    total = tensors[0].float() * np.float32(weights[0]).item()
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor.float() * np.float32(weight).item()
    return total.to(tensors[0].dtype)


def _check_three(target: Path, elements: int = 1000) -> None:
    states, made = [_state(number, elements) for number in range(3)], dcp.read(target)
    for name in states[0]:
        found = made["model"][name] if "model" in made else made[f"model.{name}"]
        assert same(found, _sum([state[name] for state in states], _WEIGHTS)), name


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save one set of sources for all tests that only read them."""
    return _save_three(tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("to", list(NAMES))
def test_values_and_nesting_are_of_the_first_source(three: list[Path], tmp_path: Path, to: str) -> None:
    """The provenance of the target names the sources; metrics of single sources are left out."""
    report = dcp.merge(three, tmp_path / NAMES[to], weights=_WEIGHTS)
    _check_three(tmp_path / NAMES[to])
    if to != "safetensors":  # only conversions read plain values of safetensors
        assert dcp.read(tmp_path / NAMES[to])["lr"] == 0.1
    assert report.format == to and [weight for _, weight in report.weights] == _WEIGHTS
    if to == "dcp":
        index = dcp.open_index(tmp_path / "out")
        assert index.user == {"step": 7}  # the other sources have none
        merged = [(one["weight"], one["format"]) for one in index.provenance["merged_from"]]
        assert merged == list(zip(_WEIGHTS, ["dcp", "safetensors", "torch_save"], strict=True))


def test_one_error_names_all_mismatches(tmp_path: Path) -> None:
    """One error names missing tensors of each source, shapes and kinds; the rest can be merged."""
    shared: State = {"same": torch.ones(3), "complex": torch.ones(2, dtype=torch.complex64)}
    one = shared | {"shape": torch.ones(3), "kind": torch.ones(3), "mine": torch.ones(1)}
    other = shared | {"shape": torch.ones(1, 3), "kind": torch.ones(3, dtype=torch.int64)}
    dcp.save(one, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp.save(other | {"theirs": torch.ones(1)}, checkpoint_id=tmp_path / "other", no_dist=True)
    sources, odd = [tmp_path / "one", tmp_path / "other"], ["complex", "kind", "mine", "shape", "theirs"]
    with pytest.raises(PlanError) as caught:
        dcp.merge(sources, tmp_path / "out")
    assert sorted(caught.value.fqns) == odd
    for words in (
        "'shape' has different shapes: (3,), (1, 3)",
        "'kind' has different dtypes: float32, int64",
        "'mine' is missing from 2",
        "'theirs' is missing from 1",
        "'complex' is complex64, a dtype that cannot be summed",
    ):
        assert words in str(caught.value)
    assert names_in(tmp_path) == ["one", "other"]
    dcp.merge(sources, tmp_path / "out", exclude=odd)
    assert torch.equal(dcp.read(tmp_path / "out")["same"], torch.ones(3))
    with pytest.raises(MissingKeyError, match="nowhere"):
        dcp.merge(sources, tmp_path / "out2", only=["same", "nowhere"])


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_nonfinite_sums_are_not_published(tmp_path: Path, to: str) -> None:
    """The error names all tensors with NaN, infinite or too large sums and their counts; no file is left."""
    bad = torch.ones(1000)
    bad[7], bad[999] = float("nan"), float("inf")
    state = {"good": torch.ones(1000), "bad": bad, "large": torch.full((5,), 40_000.0)}
    sources = [tmp_path / "in0", tmp_path / "in1"]
    for source in sources:
        dcp.save(state, checkpoint_id=source, no_dist=True)
    given: dict[str, Any] = {"weights": [1, 1], "to": to}
    with pytest.raises(PlanError) as caught:
        dcp.merge(sources, tmp_path / NAMES[to], dtype="float16", **given)
    assert caught.value.fqns == ["bad", "large"]
    assert "'bad' (2 NaN or infinite)" in str(caught.value)
    assert "'large' (5 too large for its dtype)" in str(caught.value)
    assert names_in(tmp_path) == ["in0", "in1"]
    dcp.merge(sources, tmp_path / NAMES[to], dtype="bfloat16", exclude="bad", **given)
    assert dcp.read(tmp_path / NAMES[to])["large"].tolist() == [79872.0] * 5


def test_entries_that_a_source_lacks_may_be_excluded(three: list[Path], tmp_path: Path) -> None:
    """A source may have entries that the others lack, such as an optimizer, if they are excluded."""
    state = {"net": _state(1), "optimizer": {"m": torch.ones(4)}}
    dcp.save(state, checkpoint_id=tmp_path / "t", no_dist=True)
    sources, rename = [three[0], tmp_path / "t"], {"^(model|net)\\.": ""}
    with pytest.raises(PlanError, match=r"'optimizer\.m' is missing from 1"):
        dcp.merge(sources, tmp_path / "out", rename=rename)
    dcp.merge(sources, tmp_path / "out", exclude=["optimizer", "lr"], rename=rename)
    made = dcp.read(tmp_path / "out")
    assert same(made["t0"], _sum([_state(n)["t0"] for n in range(2)], [0.5, 0.5]))
    assert made.keys() == _state(0).keys()


@pytest.mark.parametrize("rules", [None, FUSED])
def test_damage_of_any_source_is_found(tmp_path: Path, rules: Any) -> None:
    """The error has the path of the damaged file, also if a map permutes the tensor."""
    for name in ("1", "2"):
        dcp.save(state_to_fuse(0), checkpoint_id=tmp_path / name, no_dist=True)
    data = next((tmp_path / "2").glob("*.distcp"))
    flip(tmp_path / "2", data.read_bytes().find(state_to_fuse(0)["k"].numpy().tobytes()) + 9)
    with pytest.raises(CorruptCheckpointError) as caught:
        dcp.merge([tmp_path / "1", tmp_path / "2"], tmp_path / "out", map=rules)
    assert caught.value.path == str(data)
    assert str(caught.value).startswith(f"{tmp_path / '2'}: tensor 'k' is damaged")
    assert names_in(tmp_path) == ["1", "2"]


@pytest.mark.parametrize("change", [{"weights": [0.5, 0.3, 0.25]}, {"accumulate": "float64"}, {"order": 1}])
def test_a_stopped_merge_resumes_unless_it_changed(
    three: list[Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    """A stopped merge resumes finished tasks. Other weights, sum dtypes or orders start over."""
    given: dict[str, Any] = {"to": "safetensors", "shard_bytes": 3000, "executor": "inline"}
    given |= {"weights": _WEIGHTS}

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    for target in (tmp_path / "same", tmp_path / "other"):
        with pytest.raises(KeyboardInterrupt):
            dcp.merge(three, target, progress=stop, **given)
        assert not target.exists()
    report = dcp.merge(three, tmp_path / "same", **given)
    assert report.tasks_resumed == 1 < report.tasks
    sources = three[::-1] if change.pop("order", 0) else three
    assert dcp.merge(sources, tmp_path / "other", **given | change).tasks_resumed == 0
    dcp.merge(sources, tmp_path / "whole", **given | change)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()


def test_a_source_is_refused_as_target(three: list[Path], tmp_path: Path) -> None:
    """The target may be neither a source nor a folder that holds a source, by any path."""
    for target in three:
        with pytest.raises(OptionError, match="choose another target"):
            dcp.merge(three, target, overwrite=True)
    own, linked = tmp_path / "own", tmp_path / "linked"
    own.mkdir()
    linked.symlink_to(own)
    save_file({"weight": torch.ones(3)}, own / "model.safetensors")
    before = (own / "model.safetensors").read_bytes()
    places: list[Path | str] = [
        linked / "model.safetensors",
        f"{linked}/../own/model.safetensors",
        own,
        linked,
    ]
    for place in places:
        with pytest.raises(OptionError, match="choose another target"):
            dcp.merge([own / "model.safetensors"], place, to="safetensors", weights=[2.0], overwrite=True)
        assert (names_in(own), (own / "model.safetensors").read_bytes()) == (["model.safetensors"], before)
    dcp.merge(three, tmp_path / "out", weights=_WEIGHTS)
    with pytest.raises(CheckpointConflictError):
        dcp.merge(three, tmp_path / "out")


@pytest.mark.exhaustive
def test_sources_and_target_on_s3(tmp_path: Path, s3_server: Any, s3_root: str) -> None:
    """Sources on S3 and local ones merge. A failed merge leaves no object, also if the target is one file
    uploaded in several parts."""
    elements, options = 5 << 17, s3_server.storage_options
    three = _save_three(tmp_path, elements)
    parts = options | {"part_bytes": 5 << 20}
    both: dict[str, Any] = {"storage_options": options, "target_options": parts}
    dcp.convert(three[1], f"{s3_root}/b", to="dcp", files=2, chunks="split", target_options=options)
    dcp.convert(three[2], f"{s3_root}/c.pt", to="torch", target_options=options)
    sources = [str(three[0]), f"{s3_root}/b", f"{s3_root}/c.pt"]
    dcp.merge(sources, f"{s3_root}/out.safetensors", weights=_WEIGHTS, **both)
    dcp.convert(f"{s3_root}/out.safetensors", tmp_path / "here.pt", to="torch", storage_options=options)
    _check_three(tmp_path / "here.pt", elements)
    with raw_s3(s3_server) as raw:
        before = sorted(raw.list(s3_root))
        with pytest.raises(PlanError, match="6 of the merged tensors would get NaN"):
            dcp.merge(sources, f"{s3_root}/bad.safetensors", weights=[3e38, 3e38, 1], **both)
        assert sorted(raw.list(s3_root)) == before and not raw.uploads(s3_root)


# -- under weight maps ---------------------------------------------------------------------------------------


def test_sources_with_different_maps(tmp_path: Path) -> None:
    """Each source is added through its own map, in either direction."""
    plain = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for number, place in enumerate(plain):
        save_file(state_to_fuse(number), place)
    dcp.convert(plain[1], tmp_path / "1.pt", to="torch", map=FUSED)
    there, back = dcp.weight_map(FUSED), dcp.weight_map(FUSED, inverse=True, width=7)
    given: dict[str, Any] = {"weights": [0.25, 0.5], "to": "safetensors"}
    for maps, wanted in (([None, back], None), ([there, None], FUSED)):
        made, expected = (tmp_path / f"{name}{maps.index(None)}.safetensors" for name in ("made", "plain"))
        dcp.merge([plain[0], tmp_path / "1.pt"], made, map=maps, **given)
        dcp.merge(plain, expected, map=wanted, **given)
        one, other = load_file(made), load_file(expected)
        assert one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


# -- of a run ------------------------------------------------------------------------------------------------


def _run_of(root: Path, steps: list[int]) -> dict[int, torch.Tensor]:
    """Save these steps with a manager, and return the weights by step."""
    found = {}
    with dcp.CheckpointManager(root) as manager:
        for step in steps:
            torch.manual_seed(step)
            found[step] = torch.randn(100)
            manager.save(step, {"w": found[step]}, metrics={"loss": float(step)}, force=True)
    return found


def test_averages_over_a_run(tmp_path: Path) -> None:
    """The newest steps are averaged equally or by exponential decay, normalised; metrics are dropped."""
    weights = _run_of(tmp_path / "run", [10, 20, 30, 40])
    newest = torch.stack([weights[step].double() for step in (40, 30, 20)])
    given: dict[str, Any] = {"run": tmp_path / "run", "last": 3, "accumulate": "float64", "dtype": "float64"}
    report = dcp.merge([], tmp_path / "mean", **given)
    torch.testing.assert_close(dcp.read(tmp_path / "mean")["w"], newest.mean(0), rtol=1e-14, atol=1e-15)
    assert [Path(name).name[-2:] for name, _ in report.weights] == ["40", "30", "20"]
    dcp.merge([], tmp_path / "ema", decay=0.9, **given)
    factors = torch.tensor([1.0, 0.9, 0.9**2], dtype=torch.float64)
    expected = (newest * (factors / factors.sum())[:, None]).sum(0)
    torch.testing.assert_close(dcp.read(tmp_path / "ema")["w"], expected, rtol=1e-14, atol=1e-15)
    user = dcp.open_index(tmp_path / "ema").user
    assert user["step"] == 40 and "metrics" not in user
    with pytest.raises(CheckpointNotFoundError, match="has 4 committed steps, fewer than last=5"):
        dcp.merge([], tmp_path / "more", run=tmp_path / "run", last=5)


def test_damaged_and_partial_steps_are_refused_by_name(tmp_path: Path) -> None:
    """Incomplete steps are ignored; damaged and partial steps are errors, all named at once."""
    _run_of(tmp_path / "run", [1, 2, 3, 4])
    (tmp_path / "run/step-00000009").mkdir()
    partial = {"step": 5, "partial": ["model"]}  # as an emergency save that is cut short
    fifth = tmp_path / "run/step-00000005"
    dcp.save({"w": torch.ones(100)}, checkpoint_id=fifth, no_dist=True, user_metadata=partial)
    manifest = tmp_path / "run/step-00000003/manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(PlanError) as caught:
        dcp.merge([], tmp_path / "out", run=tmp_path / "run", last=4)
    assert "step 5 has only" in str(caught.value) and "step 3 is damaged" in str(caught.value)
    assert len(caught.value.problems) == 2


def test_merge_on_the_command_line(three: list[Path], tmp_path: Path) -> None:
    """`dcp merge` takes weights, a formula, a run and maps, and prints JSON and errors of one line."""
    done = command("merge", *three, "-o", tmp_path / "out.safetensors", "--weights", "0.5,0.3,0.2")
    assert done.status == 0 and f"0.3 * {three[1]}" in done.out, done.err
    _check_three(tmp_path / "out.safetensors")
    done = command("merge", *three, "-o", tmp_path / "out", "--formula", "A + 0.4*(B - C)", "--json")
    assert [weight for _, weight in done.json["weights"]] == [1.0, 0.4, -0.4]
    _run_of(tmp_path / "run", [1, 2])
    run = ["--run", tmp_path / "run", "--last", 2, "--decay", 0.5]
    assert "0.666667 * " in command("merge", *run, "-o", tmp_path / "ema").out
    for wrong in (["--weights", "1,x,1"], [], ["-o", tmp_path / "c", "--inverse"]):
        assert command("merge", *three, *wrong).status == 2
    assert command("merge", *three, "-o", tmp_path / "o", "--formula", "A + B").status == 3
    (tmp_path / "map.json").write_text(json.dumps(FUSED))
    save_file(state_to_fuse(0), tmp_path / "0.safetensors")
    dcp.convert(tmp_path / "0.safetensors", tmp_path / "1.pt", to="torch", map=FUSED)
    maps = ["--map", tmp_path / "map.json", "--map", "-"]
    done = command("merge", tmp_path / "0.safetensors", tmp_path / "1.pt", "-o", tmp_path / "fused", *maps)
    assert done.status == 0 and "qk" in dcp.read(tmp_path / "fused"), done.err
