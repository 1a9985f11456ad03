"""Buffers that end anywhere. Internal: windows and limits of files are made small, which no option does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.conversion.contents.casting import narrowed
from dcp.conversion.copying import sums, tasks
from dcp.conversion.targets import safetensors, torch_save
from dcp.errors import PlanError
from dcp.storage.formats import dtypes
from tests.support.conversion import write_adapter
from tests.support.conversion_states import FUSED, KINDS, NAMES, same, state_to_fuse, write

Small = Callable[..., None]


def _seeds(usual: int, all_of_them: int) -> list[Any]:
    return [
        pytest.param(seed, marks=[pytest.mark.exhaustive] if seed >= usual else [])
        for seed in range(all_of_them)
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Sets a number of a module for one test."""
    return monkeypatch.setattr


def _cut_anywhere(small: Small, draw: random.Random) -> None:
    small(tasks, "WINDOW_BYTES", draw.choice([61, 400, 5000]))
    small(sums, "_STEP_BYTES", draw.choice([50, 300, 5000]))
    small(sums, "_BLOCK", draw.choice([7, 1000]))


def _rounded(total: np.ndarray[Any, Any], kind: str) -> torch.Tensor:
    """As test_numbers tries it against torch."""
    data = narrowed(np.ascontiguousarray(total).reshape(-1), dtypes.BY_NAME[kind].code)
    made = torch.empty(total.shape, dtype=getattr(torch, kind))
    if data.size:
        made.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    return made


def _added(tensors: list[torch.Tensor], weights: list[float], accumulate: str) -> np.ndarray[Any, Any]:
    """What a merge promises, on whole tensors: products and sums in the order of the sources, each rounded in
    the type in which is added."""
    number = np.dtype(accumulate)
    total: Any = None
    for tensor, weight in zip(tensors, weights, strict=True):
        with np.errstate(all="ignore"):
            term = tensor.to(torch.float64).numpy().astype(number) * number.type(weight)
            total = term if total is None else total + term
    return np.asarray(total)


@pytest.mark.parametrize("seed", _seeds(3, 60))
def test_sums_are_exact(tmp_path: Path, small: Small, seed: int) -> None:
    """Of any dtypes, weights, shapes, formats and shardings, to the last bit."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(1, 5)
    shapes = {
        name: [draw.randint(0 if name == "z" else 1, 9) for _ in range(draw.randint(0, 3))] for name in "xyz"
    }
    shapes["large"] = [37, 53]  # of several blocks of a file that is split
    kinds = {name: [draw.choice(KINDS) for _ in range(count)] for name in shapes}
    states = [
        {name: torch.randn(shape).to(getattr(torch, kinds[name][n])) for name, shape in shapes.items()}
        for n in range(count)
    ]
    for number, state in enumerate(states):
        state["steps"] = torch.arange(3) + number
        if draw.random() < 0.5:  # stored the other way round
            state["large"] = state["large"].T.contiguous().T
    sources = [write(state, tmp_path / f"in{n}", draw) for n, state in enumerate(states)]
    weights = [draw.choice([0.5, 0.1, -1.5, 1.0, 1e-3, draw.uniform(-2, 2)]) for _ in range(count)]
    _cut_anywhere(small, draw)
    given: dict[str, Any] = {"accumulate": draw.choice(["float32", "float64"])}
    given |= {"dtype": draw.choice([None, *KINDS]), "files": draw.randint(1, 3)}
    target = tmp_path / NAMES[draw.choice([*NAMES])]
    report = dcp.merge(sources, target, weights=weights, executor="inline", **given)
    made = dcp.read(target)
    assert torch.equal(made["steps"], states[0]["steps"]) and report.unmerged == ("steps",)
    for name in shapes:
        kind, tensors = given["dtype"] or kinds[name][0], [state[name] for state in states]
        is_copy = weights == [1.0] and kind == kinds[name][0]
        expected = _rounded(_added(tensors, weights, given["accumulate"]), kind)
        assert same(made[name], tensors[0] if is_copy else expected), name


@pytest.mark.parametrize("seed", _seeds(2, 40))
def test_a_map_moves_each_element(tmp_path: Path, small: Small, seed: int) -> None:
    """Windows end in the middle of elements and of axes; permuted payloads, chunks that do not end where axes
    do, casts and zeros lie beside each other."""
    draw = random.Random(seed)
    heads, half, width, pad = (draw.randint(1, 5) for _ in range(4))
    kind = draw.choice([torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64])
    whole = torch.arange(1, heads * 2 * half * width + 1).view(heads * 2 * half, width).to(kind)
    states = {"x": whole.T.contiguous().T, "small": torch.arange(draw.randint(1, 3)).to(torch.uint8)}
    torch.save(states, source := tmp_path / "in.pt")
    if draw.random() < 0.5:
        dcp.convert(source, tmp_path / "in", to="dcp", files=draw.randint(1, 4), chunks="split")
        source = tmp_path / "in"
    small(tasks, "WINDOW_BYTES", draw.randint(3, 90))
    sides = {"x": "(heads two half) width"}, {"y": "width (half heads two + pad)"}
    rules = [{"from": sides[0], "to": sides[1], "padding": ["pad"]}, {"from": "small", "to": "a"}]
    weights = {"rules": rules, "sizes": {"two": 2, "half": half, "pad": pad}}
    dtype, to = draw.choice([None, "float32", "bfloat16"]), draw.choice([*NAMES])
    dcp.convert(source, tmp_path / NAMES[to], to=to, map=weights, dtype=dtype)
    made = dcp.read(tmp_path / NAMES[to])
    wanted = whole.view(heads, 2, half, width).permute(3, 2, 0, 1).reshape(width, -1)
    wanted = torch.cat([wanted, torch.zeros(width, pad, dtype=kind)], dim=1)
    if dtype is not None and kind.is_floating_point:
        wanted = wanted.to(getattr(torch, dtype))
    assert torch.equal(made["y"], wanted)
    assert torch.equal(made["a"], states["small"])


@pytest.mark.parametrize("seed", _seeds(2, 30))
def test_a_merge_under_a_map_is_a_merge_and_a_conversion(tmp_path: Path, small: Small, seed: int) -> None:
    """Bit for bit, of any formats and shardings; with another dtype the sum is rounded once."""
    draw = random.Random(seed)
    _cut_anywhere(small, draw)
    count = draw.randint(1, 3)
    sources = [write(state_to_fuse(number), tmp_path / f"in{number}", draw) for number in range(count)]
    weights = [draw.choice([0.5, -1.25, 0.1]) for _ in range(count)]
    accumulate = draw.choice(["float32", "float64"])
    chosen: dict[str, Any] = {"weights": weights, "accumulate": accumulate, "executor": "inline"}
    report = dcp.merge(sources, tmp_path / "direct.safetensors", map=FUSED, **chosen)
    assert report.unmerged == ("count",)
    dcp.merge(sources, tmp_path / "merged", to="dcp", **chosen)
    dcp.convert(tmp_path / "merged", tmp_path / "then.safetensors", to="safetensors", map=FUSED)
    made, expected = (load_file(tmp_path / f"{name}.safetensors") for name in ("direct", "then"))
    assert made.keys() == expected.keys() == {"qk", "blocks.0.weight", "blocks.1.weight", "count"}
    assert all(same(made[name], expected[name]) for name in made)
    assert torch.equal(made["qk"][:, 18:], torch.zeros(7, 5, dtype=made["qk"].dtype))
    dcp.merge(sources, tmp_path / "cast", to="dcp", map=FUSED, dtype="bfloat16", **chosen)
    dcp.merge(sources, tmp_path / "wide", to="dcp", dtype=accumulate, **chosen)
    dcp.convert(tmp_path / "wide", tmp_path / "wide.pt", to="torch", map=FUSED, dtype="bfloat16")
    cast, wide = dcp.read(tmp_path / "cast"), torch.load(tmp_path / "wide.pt", weights_only=True)
    if accumulate == "float32":  # float64 is rounded to float32 on the way, by torch too
        assert all(same(cast[name], wide[name]) for name in wide)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_adapters_are_added_exactly(tmp_path: Path, small: Small, accumulate: str) -> None:
    """Two adapters on the sum of two bases, one of them transposed, rank by rank, cut anywhere."""
    torch.manual_seed(2)
    rows, columns, kind = 23, 37, np.dtype(accumulate)
    bases = [torch.randn(rows, columns).to(torch.bfloat16) for _ in range(2)]
    save_file({"m.weight": bases[0]}, tmp_path / "1.safetensors")
    torch.save({"m.weight": bases[1].T.contiguous().T}, tmp_path / "2.pt")
    factors = [(torch.randn(rank, columns), torch.randn(rows, rank).to(torch.float16)) for rank in (3, 5)]
    for number, (a, b) in enumerate(factors):
        config = {"peft_type": "LORA", "r": len(a), "lora_alpha": 7, "use_rslora": bool(number)}
        write_adapter(tmp_path / f"lora{number}", config, {"m.lora_A.weight": a, "m.lora_B.weight": b})
    total = _added(bases, [0.6, -1.1], accumulate)
    for (a, b), weight, scale in zip(factors, (1.5, 0.3), (7 / 3, 7 / 5**0.5), strict=True):
        product: Any = None
        for rank in range(len(a)):
            term = b[:, rank, None].numpy().astype(kind) * a[rank].numpy().astype(kind)
            product = term if product is None else product + term
        total = total + product * kind.type(weight * scale)
    small(sums, "_BLOCK", 11)
    given: dict[str, Any] = {"weights": [0.6, -1.1], "adapter_weights": [1.5, 0.3], "accumulate": accumulate}
    given |= {"adapters": [tmp_path / "lora0", tmp_path / "lora1"], "dtype": "float32", "executor": "inline"}
    for window in (50, 333, 1 << 20):
        small(tasks, "WINDOW_BYTES", window)
        made = tmp_path / f"{window}.safetensors"
        dcp.merge([tmp_path / "1.safetensors", tmp_path / "2.pt"], made, **given)
        assert same(load_file(made)["m.weight"], torch.from_numpy(total).to(torch.float32))


def test_what_readers_would_refuse_is_not_written(tmp_path: Path, small: Small) -> None:
    """More tensors than readers take from one file are an error of the plan; shards end before that."""
    state = {f"t{number}": torch.ones(2) for number in range(9)}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    small(torch_save, "MAX_FILE_ENTRIES", 7)
    with pytest.raises(PlanError, match="in parts"):
        dcp.convert(tmp_path / "in", tmp_path / "model.pt", to="torch")
    small(safetensors, "_SHARD_TENSORS", 2)
    report = dcp.convert(tmp_path / "in", tmp_path / "model", to="safetensors", executor="inline")
    shards = [load_file(path) for path in (tmp_path / "model").glob("*.safetensors")]
    assert sorted(map(len, shards)) == [1, 2, 2, 2, 2]
    assert len(report.files) == len(shards) + 1
    small(safetensors, "MAX_WEIGHT_MAP_BYTES", 100)
    with pytest.raises(PlanError, match="in parts"):
        dcp.convert(tmp_path / "in", tmp_path / "other", to="safetensors")
    assert not (tmp_path / "model.pt").exists() and not (tmp_path / "other").exists()
