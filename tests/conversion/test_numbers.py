"""Casts, weights, patterns of names, plans. Internal: pure functions, tried over all values."""

from __future__ import annotations

import base64
import itertools
import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.conversion.contents.casting import TOO_LARGE, cast, narrowed
from dcp.conversion.merging.arithmetic import (
    average_weights,
    formula_weights,
    weights_of_adapters,
    weights_of_sources,
)
from dcp.conversion.merging.module_patterns import ModulePattern
from dcp.conversion.wire import decode_batch, decode_layout, decode_result
from dcp.errors import CheckpointFormatError, OptionError
from dcp.storage.formats import dtypes
from tests.support.examples import examples

_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_NARROW = _NAMES[2:]
_FROM_WIDE = [pair for pair in itertools.product(_NAMES[:2], _NAMES) if pair[0] != pair[1]]


def _assert_as_torch(bits: np.ndarray[Any, Any], source: str, target: str) -> None:
    """The same bits as torch, but for NaN, which is some NaN."""
    data = np.ascontiguousarray(bits).view(np.uint8)
    ours = cast(memoryview(data.tobytes()), dtypes.BY_NAME[source].code, dtypes.BY_NAME[target].code)
    tensor = torch.from_numpy(data.copy()).view(getattr(torch, source))
    expected = tensor.to(getattr(torch, target))
    got = torch.from_numpy(ours.copy()).view(getattr(torch, target))
    nan = torch.isnan(expected.to(torch.float32))
    assert torch.equal(torch.isnan(got.to(torch.float32)), nan)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[expected.element_size()]
    differs = (got.view(width) != expected.view(width)) & ~nan
    assert not differs.any(), (tensor[differs][:5], got[differs][:5], expected[differs][:5])


@pytest.mark.parametrize("source", _NARROW)
def test_each_value_of_a_narrow_type_is_cast_as_torch_casts_it(source: str) -> None:
    """All values of the 8 and 16 bit types, to each other type."""
    size = dtypes.BY_NAME[source].itemsize
    for target in {*_NAMES} - {source}:
        _assert_as_torch(np.arange(1 << 8 * size, dtype=f"<u{size}"), source, target)


def _numbers(name: str) -> torch.Tensor:
    """All finite numbers of a narrow type, ascending."""
    size = dtypes.BY_NAME[name].itemsize
    kind = {1: torch.uint8, 2: torch.int16}[size]
    values = torch.arange(1 << 8 * size, dtype=torch.int32).to(kind).view(getattr(torch, name)).double()
    found: torch.Tensor = torch.unique(values[torch.isfinite(values)])
    return found


@pytest.mark.parametrize(("source", "target"), _FROM_WIDE)
def test_boundaries_of_wide_types_are_cast_as_torch_casts_them(source: str, target: str) -> None:
    """Values at, just below and just above every midpoint of two neighbours of the narrow types."""
    near = torch.unique(torch.cat([_numbers(name) for name in _NARROW]))
    values = torch.cat([near, (near[1:] + near[:-1]) / 2]).numpy()
    kind = "<f8" if source == "float64" else "<f4"
    with np.errstate(over="ignore"):
        values = values.astype(kind)
    values = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], kind)
    _assert_as_torch(np.concatenate([values, special]), source, target)


@examples(60)
@given(pair=st.sampled_from(_FROM_WIDE), seed=st.integers(0, 2**32 - 1))
def test_any_bits_of_wide_types_are_cast_as_torch_casts_them(pair: tuple[str, str], seed: int) -> None:
    """Random bits are mostly numbers of any size, denormal ones, and NaN."""
    size = dtypes.BY_NAME[pair[0]].itemsize
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * size, 4096, dtype=f"<u{size}", endpoint=False)
    _assert_as_torch(bits, *pair)


def _nearest(values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """The numbers of a narrow type that are nearest, ties to even, by comparing with the middles between
    neighbours, which float64 has exactly."""
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
    """float64 is not rounded to float32 first: numbers right beside the middle of two neighbours, middles,
    and any others, down to the smallest."""
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


@pytest.mark.parametrize("name", _NAMES[1:])
def test_what_is_too_large_is_known(name: str) -> None:
    """One step below the limit is still the largest number; the limit itself rounds to none."""
    limit = TOO_LARGE[code := dtypes.BY_NAME[name].code]
    below, there = (narrowed(np.array([value]), code) for value in (np.nextafter(limit, 0), limit))
    assert _widened(below, name)[0] == torch.finfo(getattr(torch, name)).max
    assert name == "float8_e4m3fn" or np.isinf(_widened(there, name)[0])  # which has no infinity


def test_formulas_and_averages() -> None:
    """Factors are computed exactly and rounded once; the weights of an average add up to one."""
    assert formula_weights("A + 0.4*(B - C)", ["A", "B", "C"]) == (1.0, 0.4, -0.4)
    assert formula_weights("0.1*A + 0.2*A - -B/4", ["A", "B"]) == (0.3, 0.25)
    assert average_weights(4, None) == (0.25,) * 4
    assert average_weights(3, 0.5) == pytest.approx((4 / 7, 2 / 7, 1 / 7), rel=1e-15)
    assert sum(average_weights(100, 0.999)) == pytest.approx(1.0, abs=1e-15)


def test_weights_are_any_real_numbers() -> None:
    """Of numpy, fractions and torch, one by one or as one array: what float64 has of them."""
    half = np.float32(0.1)
    given: list[Any] = [half, np.int8(-2), Fraction(1, 4), torch.tensor(0.5), np.array(3.0), 7]
    made = weights_of_sources(len(given), given, None)
    assert made == (float(half), -2.0, 0.25, 0.5, 3.0, 7.0) and {type(one) for one in made} == {float}
    arrays: list[Any] = [np.array([0.25, 0.75], np.float32), torch.tensor([0.25, 0.75])]
    for array in arrays:
        assert weights_of_sources(2, array, None) == weights_of_adapters(2, array) == (0.25, 0.75)
    assert weights_of_sources(2, None, None, np.float32(0.5)) == weights_of_sources(2, None, None, 0.5)


_HOSTILE = [
    *("", "A", "A + C", "A * B", "A / B", "A + B / 0", "A + B + 1", "A ** 2 + B", "A + B.real", "f(A) + B"),
    *("A + 1e999*B", "A + B*" + "9" * 400, "(" * 400 + "A+B" + ")" * 400, "A+B" * 2000, "A + True*B"),
    "__import__('os').abort()",
]


@pytest.mark.parametrize("formula", _HOSTILE)
def test_formulas_that_are_none(formula: str) -> None:
    """A typed error, whatever is written; nothing is evaluated."""
    with pytest.raises(OptionError, match=r"^formula: "):
        formula_weights(formula, ["A", "B"])


_ATOMS = ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "[0-9_]", "(a|b.)", "(?:ab|)", "^", "$"]
_REPEATS = ["", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{2,}"]
_PARTS = st.tuples(st.sampled_from(_ATOMS), st.sampled_from(_REPEATS)).map("".join)
_PATTERNS = st.lists(st.lists(_PARTS, max_size=5).map("".join), min_size=1, max_size=3).map("|".join)


@given(_PATTERNS, st.text("ab.1", max_size=8))
def test_patterns_match_as_peft_matches_them(pattern: str, name: str) -> None:
    """The part of regular expressions that configurations of adapters may use."""
    try:
        found = ModulePattern.parse(pattern)
    except OptionError:
        assert "^" in pattern or "$" in pattern  # repeated, which Python refuses, too, or matches as once
        return
    assert found.match(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(?=a)", r"(a)\1", "a**", "(a", "a)|(b", "[", "\\", r"\p", "a{2,1}", "(" * 99, "(a)" * 400],
)
def test_patterns_that_may_take_for_ever_are_refused(pattern: str) -> None:
    """Look-around, references, repeated repetitions, and what is no expression."""
    with pytest.raises(OptionError, match="pattern"):
        ModulePattern.parse(pattern)


def test_a_pattern_ends_in_time() -> None:
    """A name that almost matches is refused or tried in linear time."""
    with pytest.raises(OptionError, match="longer than"):
        ModulePattern.parse(".*a").match("a" * 1001)
    assert not ModulePattern.parse("(a|b)*[ab]*.*a*b*" * 9 + "c").match("ab" * 400 + "_")


@pytest.mark.parametrize("decode", [decode_batch, decode_layout, decode_result])
def test_a_plan_that_is_none_is_a_typed_error(decode: Callable[[str], object]) -> None:
    """No text of ours, cut off, or of something else: as a ledger of jobs that was damaged may have it."""
    plain = [5, "x", [], {}, [1, 2, 3], [1, False, [[1]]], list("abcdefgh"), [1, 2, b"x", b"x"]]
    packed = [base64.b64encode(zlib.compress(msgpack.packb(one))).decode() for one in plain]
    for text in ("", "no base64!", "AAAA", packed[0][:-6], *packed):
        with pytest.raises(CheckpointFormatError):
            decode(text)
