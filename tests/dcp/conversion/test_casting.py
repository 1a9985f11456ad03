"""Casts against torch's own, over all values where there are few, else over sampled bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.conversion.contents.casting import cast, check_castable
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
