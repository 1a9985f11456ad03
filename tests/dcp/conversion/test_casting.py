"""Casts against torch's own, over all values where there are few, else over sampled bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.conversion.contents.casting import TOO_LARGE, cast, check_castable, narrowed
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes

_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_PAIRS = [pair for pair in itertools.product(_NAMES, _NAMES) if pair[0] != pair[1]]


def _assert_as_torch(bits: np.ndarray, source: str, target: str) -> None:
    """The same bits as torch, but for NaN, which is some NaN."""
    raw = np.ascontiguousarray(bits).view(np.uint8)
    ours = cast(memoryview(raw.tobytes()), dtypes.BY_NAME[source].code, dtypes.BY_NAME[target].code)
    tensor = torch.from_numpy(raw.copy()).view(getattr(torch, source))
    expected = tensor.to(getattr(torch, target))
    got = torch.from_numpy(ours.copy()).view(getattr(torch, target))
    nan = torch.isnan(expected.to(torch.float32))
    assert torch.equal(torch.isnan(got.to(torch.float32)), nan)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[expected.element_size()]
    differs = (got.view(width) != expected.view(width)) & ~nan
    assert not differs.any(), (tensor[differs][:5], got[differs][:5], expected[differs][:5])


@pytest.mark.parametrize(("source", "target"), [p for p in _PAIRS if p[0] not in ("float64", "float32")])
def test_all_values_of_narrow_types(source: str, target: str) -> None:
    """Every value of the 8 and 16 bit types is cast as torch casts it."""
    size = dtypes.BY_NAME[source].itemsize
    _assert_as_torch(np.arange(1 << 8 * size, dtype=f"<u{size}"), source, target)


@pytest.mark.parametrize(("source", "target"), [p for p in _PAIRS if p[0] in ("float64", "float32")])
def test_boundaries_of_wide_types(source: str, target: str) -> None:
    """Values at, just below and just above every midpoint of two neighbours of the narrow types."""
    steps = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    near = torch.cat([steps.view(torch.float16).double(), steps.view(torch.bfloat16).double()])
    codes = torch.arange(256, dtype=torch.uint8)
    small = torch.cat([codes.view(getattr(torch, n)).double() for n in _NAMES[4:]])
    near = torch.unique(torch.cat([near, small])[torch.isfinite(torch.cat([near, small]))])
    middle = (near[1:] + near[:-1]) / 2
    values = torch.cat([near, middle]).numpy()
    kind = "<f8" if source == "float64" else "<f4"
    with np.errstate(over="ignore"):
        values = values.astype(kind)
    values = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], kind)
    _assert_as_torch(np.concatenate([values, special]), source, target)


@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from([p for p in _PAIRS if p[0] in ("float64", "float32")]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_of_wide_types(pair: tuple[str, str], seed: int) -> None:
    """Random bits, which are mostly numbers of any size, denormal ones, and NaN."""
    source, target = pair
    size = dtypes.BY_NAME[source].itemsize
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * size, 4096, dtype=f"<u{size}", endpoint=False)
    _assert_as_torch(bits, source, target)


def test_names_of_types() -> None:
    """torch's own way to write them is understood, and what cannot be cast is refused by name."""
    assert check_castable(torch.bfloat16) == check_castable("bfloat16") == dtypes.BY_NAME["bfloat16"].code
    with pytest.raises(PlanError, match="complex64"):
        check_castable("complex64")


def _nearest(values: np.ndarray, name: str) -> np.ndarray:
    """The bits of a narrow type that are nearest to each of ``values``, ties to even, by comparing with the
    middles between neighbours, which float64 has exactly."""
    kind = getattr(torch, name)
    width = {2: torch.int16, 1: torch.uint8}[torch.empty(0, dtype=kind).element_size()]
    count = 1 << (15 if width is torch.int16 else 7)
    numbers = torch.arange(count).to(width).view(kind).to(torch.float64).numpy()
    numbers = numbers[np.isfinite(numbers)]  # the positive ones, ascending
    middles = (numbers[1:] + numbers[:-1]) / 2
    below = np.searchsorted(middles, np.abs(values), "left")
    is_tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == np.abs(values))
    bits = below + (is_tie & (below % 2 == 1))
    signed: np.ndarray = np.where(np.signbit(values), bits + count, bits)
    return signed


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_sums_are_rounded_once(name: str) -> None:
    """float64 is not rounded to float32 first: numbers right beside the middle of two neighbours, middles,
    and any others, down to the smallest."""
    code = dtypes.BY_NAME[name].code
    draw = np.random.default_rng(0)
    limit = min(TOO_LARGE[code], 3e38)
    any_size = draw.uniform(0.5, 1, 20_000) * 2.0 ** draw.uniform(-160, np.log2(limit), 20_000)
    some = torch.from_numpy(any_size).to(getattr(torch, name)).to(torch.float64).numpy()
    beside = some * (1 + 2.0**-9) if name == "bfloat16" else some * (1 + 2.0**-4)
    middles = (some + _decoded(_nearest(np.nextafter(beside, np.inf), name), name)) / 2
    values = np.concatenate(
        [any_size, middles, np.nextafter(middles, np.inf), np.nextafter(middles, 0), [0.0, 1e-300]]
    )
    values = np.concatenate([values, -values])
    values = values[np.isfinite(values) & (np.abs(values) < limit)]
    got = narrowed(values, code).view(f"<u{dtypes.BY_NAME[name].itemsize}")
    assert np.array_equal(got, _nearest(values, name))


def _decoded(bits: np.ndarray, name: str) -> np.ndarray:
    width = torch.uint8 if dtypes.BY_NAME[name].itemsize == 1 else torch.int32
    tensor = torch.from_numpy(bits.astype(np.int32)).to(width)
    tensor = tensor if width is torch.uint8 else tensor.to(torch.int16)
    return tensor.view(getattr(torch, name)).to(torch.float64).numpy()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_what_is_too_large_is_known(name: str) -> None:
    """One step below the limit is still the largest number; the limit itself rounds to none."""
    code = dtypes.BY_NAME[name].code
    limit = TOO_LARGE[code]
    largest = torch.finfo(getattr(torch, name)).max
    below = narrowed(np.array([np.nextafter(limit, 0)]), code)
    back = cast(memoryview(below.tobytes()), code, dtypes.BY_NAME["float64"].code).view("<f8")
    assert back[0] == largest
    if name != "float8_e4m3fn":  # which has no infinity
        there = narrowed(np.array([limit]), code)
        assert np.isinf(cast(memoryview(there.tobytes()), code, dtypes.BY_NAME["float64"].code).view("<f8"))
