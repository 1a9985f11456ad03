"""Casts, sums, plans to the last bit. Internal: pure functions over all values, buffers that end anywhere."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dcp
from dcp.conversion import running, sums
from dcp.conversion.adapters import ModulePattern
from dcp.conversion.arithmetic import average_weights, formula_weights
from dcp.conversion.casting import TOO_LARGE, cast, narrowed
from dcp.errors import OptionError
from dcp.storage.formats import dtypes
from tests.support.conversion import FUSED, NAMES, state_to_fuse, write_adapter
from tests.support.harmless_values import same

Small = Callable[..., None]
_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_NARROW = _NAMES[2:]
_FROM_WIDE = [pair for pair in itertools.product(_NAMES[:2], _NAMES) if pair[0] != pair[1]]


def _assert_as_torch(bits: np.ndarray[Any, Any], source: str, target: str) -> None:
    """Assert that a cast gives torch's bits; any NaN equals any NaN."""
    data = np.ascontiguousarray(bits).view(np.uint8)
    own = cast(memoryview(data.tobytes()), dtypes.BY_NAME[source].code, dtypes.BY_NAME[target].code)
    tensor = torch.from_numpy(data.copy()).view(getattr(torch, source))
    expected = tensor.to(getattr(torch, target))
    got = torch.from_numpy(own.copy()).view(getattr(torch, target))
    nan = torch.isnan(expected.to(torch.float32))
    assert torch.equal(torch.isnan(got.to(torch.float32)), nan)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[expected.element_size()]
    differs = (got.view(width) != expected.view(width)) & ~nan
    assert not differs.any(), (tensor[differs][:5], got[differs][:5], expected[differs][:5])


@pytest.mark.parametrize("source", _NARROW)
def test_casts_of_narrow_types_equal_torchs(source: str) -> None:
    """All values of the 8 and 16 bit types are cast to each other type as torch does."""
    size = dtypes.BY_NAME[source].itemsize
    for target in {*_NAMES} - {source}:
        _assert_as_torch(np.arange(1 << 8 * size, dtype=f"<u{size}"), source, target)


def _numbers(name: str) -> torch.Tensor:
    """Return all finite numbers of a narrow type, ascending."""
    size = dtypes.BY_NAME[name].itemsize
    kind = {1: torch.uint8, 2: torch.int16}[size]
    values = torch.arange(1 << 8 * size, dtype=torch.int32).to(kind).view(getattr(torch, name)).double()
    found: torch.Tensor = torch.unique(values[torch.isfinite(values)])
    return found


@pytest.mark.parametrize(("source", "target"), _FROM_WIDE)
def test_casts_at_boundaries_of_wide_types_equal_torchs(source: str, target: str) -> None:
    """Values at, just below and just above midpoints of neighbours of narrow types are cast as by torch."""
    near = torch.unique(torch.cat([_numbers(name) for name in _NARROW]))
    values = torch.cat([near, (near[1:] + near[:-1]) / 2]).numpy()
    kind = "<f8" if source == "float64" else "<f4"
    with np.errstate(over="ignore"):
        values = values.astype(kind)
    values = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], kind)
    _assert_as_torch(np.concatenate([values, special]), source, target)


def _nearest(values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Round to the nearest numbers of a narrow type, ties to even, by comparison with the midpoints of
    neighbours, which are exact in float64."""
    numbers = _numbers(name)[_numbers(name) >= 0].numpy()
    middles = (numbers[1:] + numbers[:-1]) / 2
    below = np.searchsorted(middles, np.abs(values), "left")
    is_tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == np.abs(values))
    made: np.ndarray[Any, Any] = np.copysign(numbers[below + (is_tie & (below % 2 == 1))], values)
    return made


def _widened(made: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    code = dtypes.BY_NAME[name].code
    return cast(memoryview(made.tobytes()), code, dtypes.BY_NAME["float64"].code).view("<f8")


@pytest.mark.parametrize("name", _NARROW)
def test_sums_are_rounded_once(name: str) -> None:
    """float64 is rounded directly, not by way of float32: midpoints of two neighbours, values next to them,
    and random values down to the smallest."""
    code = dtypes.BY_NAME[name].code
    draw, limit = np.random.default_rng(0), min(TOO_LARGE[code], 3e38)
    values = draw.uniform(0.5, 1, 20_000) * 2.0 ** draw.uniform(-160, np.log2(limit), 20_000)
    numbers = _numbers(name)[_numbers(name) >= 0].numpy()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middles, np.inf), np.nextafter(middles, 0)]
    values = np.concatenate([values, middles, *beside, [0.0, 1e-300]])
    values = np.concatenate([values, -values])
    values = values[np.abs(values) < limit]
    assert np.array_equal(_widened(narrowed(values, code), name), _nearest(values, name))


def test_formulas_and_averages() -> None:
    """Factors are computed exactly and rounded once; the weights of an average add up to one."""
    assert formula_weights("A + 0.4*(B - C)", ["A", "B", "C"]) == (1.0, 0.4, -0.4)
    assert formula_weights("0.1*A + 0.2*A - -B/4", ["A", "B"]) == (0.3, 0.25)
    assert average_weights(4, None) == (0.25,) * 4
    assert average_weights(3, 0.5) == pytest.approx((4 / 7, 2 / 7, 1 / 7), rel=1e-15)
    assert sum(average_weights(100, 0.999)) == pytest.approx(1.0, abs=1e-15)


_HOSTILE = [
    *("", "A", "A + C", "A * B", "A / B", "A + B / 0", "A + B + 1", "A ** 2 + B", "A + B.real", "f(A) + B"),
    *("A + 1e999*B", "A + B*" + "9" * 400, "(" * 400 + "A+B" + ")" * 400, "A+B" * 2000, "A + True*B"),
    "__import__('os').abort()",
]


@pytest.mark.parametrize("formula", _HOSTILE)
def test_invalid_formulas_are_refused(formula: str) -> None:
    """An invalid formula raises a typed error, and is never evaluated as code."""
    with pytest.raises(OptionError, match=r"^formula: "):
        formula_weights(formula, ["A", "B"])


_ATOMS = ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "[0-9_]", "(a|b.)", "(?:ab|)", "^", "$"]
_REPEATS = ["", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{2,}"]
_PARTS = st.tuples(st.sampled_from(_ATOMS), st.sampled_from(_REPEATS)).map("".join)
_PATTERNS = st.lists(st.lists(_PARTS, max_size=5).map("".join), min_size=1, max_size=3).map("|".join)


@given(_PATTERNS, st.text("ab.1", max_size=8))
def test_patterns_match_as_in_peft(pattern: str, name: str) -> None:
    """The supported part of regular expressions in adapter configurations matches as in peft."""
    try:
        found = ModulePattern(pattern)
    except OptionError:
        assert "^" in pattern or "$" in pattern  # Python refuses a repeated ^ or $, too, or ignores one
        return
    assert found.match(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(?=a)", r"(a)\1", "a**", "(a", "a)|(b", "[", "\\", r"\p", "a{2,1}", "(" * 99, "(a)" * 400],
)
def test_slow_and_invalid_patterns_are_refused(pattern: str) -> None:
    """Look-around, references, nested repetitions and invalid expressions are refused."""
    with pytest.raises(OptionError, match="pattern"):
        ModulePattern(pattern)


# -- buffers that end anywhere ------------------------------------------------------------------------------


def write(state: dict[str, torch.Tensor], path: Path, draw: random.Random) -> Path:
    """Write in a random format: one file, or a folder of one or several chunks a tensor."""
    way = draw.choice(["torch", "safetensors", "dcp", "split"])
    if way == "torch":
        torch.save(state, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    if way == "safetensors":
        plain = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(plain, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    if way == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return path
    torch.save(state, path.with_suffix(".part.pt"))
    dcp.convert(path.with_suffix(".part.pt"), path, to="dcp", files=draw.randint(2, 4), chunks="split")
    return path


def _seeds(usual: int, all_of_them: int) -> list[Any]:
    return [
        pytest.param(seed, marks=[pytest.mark.exhaustive] if seed >= usual else [])
        for seed in range(all_of_them)
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Return a function that sets a constant of a module for one test."""
    return monkeypatch.setattr


def _cut_anywhere(small: Small, draw: random.Random) -> None:
    small(running, "WINDOW_BYTES", draw.choice([61, 400, 5000]))
    small(sums, "_STEP_BYTES", draw.choice([50, 300, 5000]))
    small(sums, "_BLOCK", draw.choice([7, 1000]))


def _rounded(total: np.ndarray[Any, Any], kind: str) -> torch.Tensor:
    """Round with `narrowed`, which is tested against torch above."""
    data = narrowed(np.ascontiguousarray(total).reshape(-1), dtypes.BY_NAME[kind].code)
    made = torch.empty(total.shape, dtype=getattr(torch, kind))
    if data.size:
        made.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    return made


def _added(tensors: list[torch.Tensor], weights: list[float], accumulate: str) -> np.ndarray[Any, Any]:
    """Compute the specified sum on whole tensors: products and sums in the order of the sources, each rounded
    in the dtype of the sums."""
    number = np.dtype(accumulate)
    total: Any = None
    for tensor, weight in zip(tensors, weights, strict=True):
        with np.errstate(all="ignore"):
            term = tensor.to(torch.float64).numpy().astype(number) * number.type(weight)
            total = term if total is None else total + term
    return np.asarray(total)


@pytest.mark.parametrize("seed", _seeds(3, 60))
def test_sums_are_exact(tmp_path: Path, small: Small, seed: int) -> None:
    """Sums of any dtypes, weights, shapes, formats and shardings equal whole-tensor sums to the last bit."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(1, 5)
    shapes = {
        name: [draw.randint(0 if name == "z" else 1, 9) for _ in range(draw.randint(0, 3))] for name in "xyz"
    }
    shapes["large"] = [37, 53]  # several blocks of a split file
    kinds = {name: [draw.choice(_NAMES) for _ in range(count)] for name in shapes}
    states = [
        {name: torch.randn(shape).to(getattr(torch, kinds[name][n])) for name, shape in shapes.items()}
        for n in range(count)
    ]
    for number, state in enumerate(states):
        state["steps"] = torch.arange(3) + number
        if draw.random() < 0.5:  # stored transposed
            state["large"] = state["large"].T.contiguous().T
    sources = [write(state, tmp_path / f"in{n}", draw) for n, state in enumerate(states)]
    weights = [draw.choice([0.5, 0.1, -1.5, 1.0, 1e-3, draw.uniform(-2, 2)]) for _ in range(count)]
    _cut_anywhere(small, draw)
    given: dict[str, Any] = {"accumulate": draw.choice(["float32", "float64"])}
    given |= {"dtype": draw.choice([None, *_NAMES]), "files": draw.randint(1, 3)}
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
    """Windows end inside elements and axes, with permuted payloads, split chunks, casts and padding."""
    draw = random.Random(seed)
    heads, half, width, pad = (draw.randint(1, 5) for _ in range(4))
    kind = draw.choice([torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64])
    whole = torch.arange(1, heads * 2 * half * width + 1).view(heads * 2 * half, width).to(kind)
    states = {"x": whole.T.contiguous().T, "small": torch.arange(draw.randint(1, 3)).to(torch.uint8)}
    torch.save(states, source := tmp_path / "in.pt")
    if draw.random() < 0.5:
        dcp.convert(source, tmp_path / "in", to="dcp", files=draw.randint(1, 4), chunks="split")
        source = tmp_path / "in"
    small(running, "WINDOW_BYTES", draw.randint(3, 90))
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
def test_a_mapped_merge_equals_merge_then_conversion(tmp_path: Path, small: Small, seed: int) -> None:
    """The bytes are equal for any formats and shardings; with another dtype the sum is rounded once."""
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
    if accumulate == "float32":  # float64 is rounded by way of float32, in torch too
        assert all(same(cast[name], wide[name]) for name in wide)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_adapters_are_added_exactly(tmp_path: Path, small: Small, accumulate: str) -> None:
    """Two adapters on the sum of two bases, one transposed, are added rank by rank with any buffer size."""
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
        small(running, "WINDOW_BYTES", window)
        made = tmp_path / f"{window}.safetensors"
        dcp.merge([tmp_path / "1.safetensors", tmp_path / "2.pt"], made, **given)
        assert same(load_file(made)["m.weight"], torch.from_numpy(total).to(torch.float32))
