"""Merges under weight maps: what merging and then converting makes, bit for bit, in one pass."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dcp
from dcp.cli.app import app
from dcp.conversion.copying import sums, tasks
from dcp.storage.errors import CorruptCheckpointError, OptionError, PlanError
from tests.dcp.conversion.test_merge import names_in, same, write

State = dict[str, torch.Tensor]

# Fused by heads, transposed and padded; stacked; renamed.
FUSED: dict[str, Any] = {
    "rules": [
        {
            "from": {"q": "(two q) width", "k": "(two k) width"},
            "to": {"qk": "width (two (q + k) + pad)"},
            "padding": ["pad"],
        },
        {"from": "layers.{n}.w", "to": "blocks.{n}.weight"},
        {"from": "steps", "to": "count"},
    ],
    "sizes": {"two": 2, "pad": 5, "q": 5, "k": 4},
}


def state_of(number: int) -> State:
    """Of the source of that number."""
    torch.manual_seed(number)
    state = {
        "q": torch.randn(10, 7),
        "k": torch.randn(8, 7),
        "layers.0.w": torch.randn(31),
        "layers.1.w": torch.randn(3, 5),
    }
    kind = [torch.float32, torch.bfloat16, torch.float16][number % 3]
    return {name: tensor.to(kind) for name, tensor in state.items()} | {"steps": torch.arange(3) + number}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 30))]
)
def test_as_merged_and_then_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of any formats and shardings, in windows that end anywhere; elements that no source has are zeros."""
    draw = random.Random(seed)
    monkeypatch.setattr(tasks, "WINDOW_BYTES", draw.choice([61, 400, 5000]))
    monkeypatch.setattr(sums, "_STEP_BYTES", draw.choice([50, 300, 5000]))
    monkeypatch.setattr(sums, "_BLOCK", draw.choice([7, 1000]))
    count = draw.randint(1, 3)
    sources = [write(state_of(number), tmp_path / f"in{number}", draw) for number in range(count)]
    chosen: dict[str, Any] = {
        "weights": [draw.choice([0.5, -1.25, 0.1]) for _ in range(count)],
        "accumulate": draw.choice(["float32", "float64"]),
        "executor": "inline",
    }
    report = dcp.merge(sources, tmp_path / "direct.safetensors", map=FUSED, **chosen)
    assert report.unmerged == ("count",)
    dcp.merge(sources, tmp_path / "merged", to="dcp", **chosen)
    dcp.convert(tmp_path / "merged", tmp_path / "then.safetensors", to="safetensors", map=FUSED)
    made = load_file(tmp_path / "direct.safetensors")
    expected = load_file(tmp_path / "then.safetensors")
    assert made.keys() == expected.keys() == {"qk", "blocks.0.weight", "blocks.1.weight", "count"}
    assert all(same(made[name], expected[name]) for name in made)
    assert torch.equal(made["qk"][:, 18:], torch.zeros(7, 5, dtype=made["qk"].dtype))
    # with another dtype the sum is rounded once, as where nothing is lost before the cast
    dcp.merge(sources, tmp_path / "cast", to="dcp", map=FUSED, dtype="bfloat16", **chosen)
    dcp.merge(sources, tmp_path / "wide", to="dcp", dtype=chosen["accumulate"], **chosen)
    dcp.convert(tmp_path / "wide", tmp_path / "wide.pt", to="torch", map=FUSED, dtype="bfloat16")
    cast, wide = dcp.read(tmp_path / "cast"), torch.load(tmp_path / "wide.pt", weights_only=True)
    if chosen["accumulate"] == "float32":  # float64 is rounded to float32 on the way, by torch too
        assert all(same(cast[name], wide[name]) for name in wide)


def test_sources_under_different_definitions(tmp_path: Path) -> None:
    """One of them is converted by its own map, so to speak, before it is added."""
    for number in range(2):
        save_file(state_of(number), tmp_path / f"{number}.safetensors")
    dcp.convert(tmp_path / "1.safetensors", tmp_path / "1.pt", to="torch", map=FUSED)
    there = dcp.weight_map(FUSED)
    back = dcp.weight_map(FUSED, inverse=True, width=7)
    places = [tmp_path / "0.safetensors", tmp_path / "1.pt"]
    for maps, wanted in (([None, back], None), ([there, None], FUSED)):
        made = tmp_path / f"made{maps.index(None)}"
        dcp.merge(places, made, weights=[0.25, 0.5], map=maps, to="dcp")
        plain = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
        expected = tmp_path / f"expected{maps.index(None)}"
        dcp.merge(plain, expected, weights=[0.25, 0.5], map=wanted, to="dcp")
        one, other = dcp.read(made), dcp.read(expected)
        flat = [{str(key): value for key, value in state.items()} for state in (one, other)]
        assert flat[0].keys() == flat[1].keys()
        assert all(same(flat[0][name], flat[1][name]) for name in flat[0])


def test_what_is_wrong_under_a_map_is_named(tmp_path: Path) -> None:
    """Before anything is written: names that no rule knows, tensors that one source lacks, another number of
    maps, adapters; afterwards: sums that are no numbers, by the source's tensor that they are of."""
    one, other = state_of(0), state_of(0)
    other["k"][3, 2] = float("nan")
    other["layers.1.w"][1, 1] = 3e38
    save_file(one, tmp_path / "0.safetensors")
    save_file(other, tmp_path / "1.safetensors")
    sources = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    before = names_in(tmp_path)
    for options, words in (
        ({"map": [FUSED] * 3}, "map: 3 are given for 2 sources"),
        ({"map": [FUSED, None]}, "'qk' is not in 2"),
        ({"map": FUSED, "adapters": [tmp_path]}, "map: adapters are added"),
        ({"map": {"rules": [{"from": "q", "to": "p"}]}}, "no rule knows 'k'"),
    ):
        with pytest.raises((PlanError, OptionError), match=words):
            dcp.merge(sources, tmp_path / "out", to="dcp", **options)
    with pytest.raises(PlanError) as caught:
        dcp.merge(sources, tmp_path / "out", to="dcp", map=FUSED, weights=[1, 2])
    assert caught.value.fqns == ["k", "layers.1.w"]
    assert "'k' (1 NaN or infinite)" in str(caught.value)
    assert names_in(tmp_path) == before


def test_what_is_no_number_where_the_first_source_has_nothing(tmp_path: Path) -> None:
    """The map pads the first; the other, which is under the target's definition, has elements there."""
    save_file(state_of(0), tmp_path / "0.safetensors")
    dcp.convert(tmp_path / "0.safetensors", tmp_path / "1.safetensors", to="safetensors", map=FUSED)
    fused = load_file(tmp_path / "1.safetensors")
    fused["qk"][2, 20] = float("nan")
    fused["qk"][3, 1] = float("inf")
    save_file(fused, tmp_path / "1.safetensors")
    before = names_in(tmp_path)
    with pytest.raises(PlanError, match=r"'qk' \(1 NaN or infinite\)") as caught:
        dcp.merge(
            [tmp_path / "0.safetensors", tmp_path / "1.safetensors"], tmp_path / "out", map=[FUSED, None]
        )
    assert "'q' (1 NaN or infinite)" in str(caught.value)
    assert names_in(tmp_path) == before


def test_damage_is_noticed_though_it_is_permuted(tmp_path: Path) -> None:
    """Of any source."""
    for number in range(2):
        dcp.save(state_of(0), checkpoint_id=tmp_path / str(number), no_dist=True)
    (data,) = (tmp_path / "1").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.find(state_of(0)["k"].numpy().tobytes()) + 9] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        dcp.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", map=FUSED)
    assert names_in(tmp_path) == ["0", "1"]


def test_the_command_line(tmp_path: Path) -> None:
    """One map for all, or one for each; what is about a map needs one."""
    for number in range(2):
        save_file(state_of(number), tmp_path / f"{number}.safetensors")
    (tmp_path / "map.json").write_text(json.dumps(FUSED))
    dcp.convert(tmp_path / "1.safetensors", tmp_path / "1.pt", to="torch", map=FUSED)
    names = [str(tmp_path / name) for name in ("0.safetensors", "1.safetensors", "1.pt", "map.json")]

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["merge", *arguments])

    done = run(*names[:2], "-o", str(tmp_path / "a.safetensors"), "--map", names[3])
    assert done.exit_code == 0, done.output
    both = ["--map", names[3], "--map", "-"]
    done = run(names[0], names[2], "-o", str(tmp_path / "b.safetensors"), "--to", "safetensors", *both)
    assert done.exit_code == 0, done.output
    one, other = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    assert run(*names[:2], "-o", str(tmp_path / "c"), "--inverse").exit_code == 2
