"""Names of faults. Internal: pure judgements of elements; public tests would run ranks for each case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dcp.testing.judging import SavedState, SavedTensor, StateFinding, judge
from dcp.testing.live_state import Identity, LiveTensor, coded_bits, gram_width, write_bits

_SHAPE = (8, 50)
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def saved(dtype: torch.dtype) -> SavedState:
    """Return a saved state of two tensors of all ranks, and a tensor that differs on each of two ranks."""
    rows = [
        SavedTensor(name, name, "model", _SHAPE, dtype, rank)
        for name, rank in (("a", None), ("b", None), ("own", 0), ("own", 1))
    ]
    return SavedState(2, {(row.part, row.name, row.rank): row for row in rows}, frozenset({"own"}))


def _values(dtype: torch.dtype, name: str, rank: int | None = None, moment: str = "saved") -> torch.Tensor:
    made = torch.zeros(_SHAPE, dtype=dtype)
    index = np.arange(made.numel(), dtype=np.int64)
    write_bits(made, coded_bits(Identity(name, rank, moment), index, dtype))
    return made


def _found(tensor: torch.Tensor, name: str = "a", rank: int = 0) -> list[StateFinding]:
    index = np.arange(tensor.numel(), dtype=np.int64)
    live = LiveTensor("model", name, name, tensor, _SHAPE, index, is_alone=name == "own")
    return list(judge(live, rank, saved(tensor.dtype)))


def _half(dtype: torch.dtype, first: int, **of_another: Any) -> torch.Tensor:
    made, other = _values(dtype, "a"), _values(dtype, **({"name": "a"} | of_another))
    made[first : first + 4] = other[first : first + 4]
    return made


def _half_zero(dtype: torch.dtype) -> torch.Tensor:
    made = _values(dtype, "a")
    made[4:] = torch.zeros(1).to(dtype)
    return made


_FAULTS: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], str, str, str]] = {
    "rows turned": (
        lambda dtype: _values(dtype, "a")[[6, 7, 2, 3, 4, 5, 0, 1]],
        *("shuffled", "[0:2, 6:8]", "has [6:8, 0:2] of itself"),
    ),
    "row twice": (
        lambda dtype: _values(dtype, "a")[[0, 1, 2, 2, 4, 5, 6, 7]],
        *("doubled", "[3:4]", "has [2:3] of itself"),
    ),
    "half of another": (lambda dtype: _half(dtype, 4, name="b"), "mixed up", "[4:8]", "has [4:8] of b"),
    "half before": (
        lambda dtype: _half(dtype, 0, moment="before"),
        *("lost", "[0:4]", "the values before the load"),
    ),
    "half earlier": (
        lambda dtype: _half(dtype, 0, moment="earlier"),
        *("stale", "[0:4]", "the values of an earlier save"),
    ),
    "half zero": (_half_zero, "lost", "[4:8]", "zeros"),
}


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("fault", _FAULTS)
def test_findings_have_kind_place_and_origin(dtype: torch.dtype, fault: str) -> None:
    """A finding has kind, places and origin. In dtypes of few bits some values are right by chance, so the
    finding may have a count of places."""
    make, kind, places, origin = _FAULTS[fault]
    (one,) = _found(make(dtype))
    assert one.kind == kind and (one.name, one.rank) == ("a", 0)
    if gram_width(dtype) <= 2:
        assert (one.places, one.found) == (places, origin)
    elif not origin.startswith("has"):
        assert one.found == origin


def test_garbage_and_unknown_tensors_are_reported() -> None:
    """Garbage is reported with samples, and a tensor with a name or shape of no rank as never saved."""
    made = _values(torch.float32, "a")
    made[2] = float("nan")
    (one,) = _found(made)
    assert (one.kind, one.places, one.found) == ("garbage", "[2:3]", "nan, nan, nan")
    (one,) = _found(_values(torch.float32, "c"), "c")
    assert one.kind == "never saved"
