"""Statistics of checkpoints, compared with what torch computes in float64 from the tensors themselves."""

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.inspection.values.statistics import ElementStatistics, statistics
from dcp.inspection.values.summaries import Collector, Histogram, Summary
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from tests.dcp.cli_support import data_file, save_ours, save_stock
from tests.support.sharded import grid, save_sharded


def reference(tensor: torch.Tensor) -> dict[str, Any]:
    """The facts by torch, in float64."""
    if tensor.is_complex():
        wide = tensor.to(torch.complex128)
        nans = torch.isnan(wide)
        infs = torch.isinf(wide) & ~nans
        values = torch.from_numpy(np.abs(wide[~nans & ~infs].numpy()))  # torch's differs in the last bit
    else:
        exact = tensor.to(torch.float64)
        nans, infs = torch.isnan(exact), torch.isinf(exact)
        values = exact[~nans & ~infs]
    some = values.numel() > 0
    is_whole = not tensor.is_complex() and not tensor.is_floating_point()
    bounds = tensor.reshape(-1).tolist() if is_whole else values.tolist()
    return {
        "count": tensor.numel(),
        "nans": int(nans.sum()),
        "infs": int(infs.sum()),
        "zeros": int((values == 0).sum()),
        "min": min(bounds, default=None),
        "max": max(bounds, default=None),
        "mean": values.mean().item() if some else None,
        "std": values.std().item() if values.numel() > 1 else None,
        "norm": torch.linalg.vector_norm(values).item() if some else None,
    }


def assert_describes(found: ElementStatistics | None, tensor: torch.Tensor) -> None:
    """Counts and bounds are exact, sums within rounding."""
    assert found is not None
    expected = reference(tensor)
    for name in ("count", "nans", "infs", "zeros", "min", "max"):
        assert getattr(found, name) == expected[name], name
    scale = max(abs(expected["min"] or 0), abs(expected["max"] or 0))
    for name in ("mean", "std", "norm"):
        wanted = expected[name]
        wanted = None if wanted is None else pytest.approx(wanted, rel=1e-9, abs=1e-12 * scale)
        assert getattr(found, name) == wanted, name
    if found.histogram is not None:
        assert sum(found.histogram.counts) == found.count - found.nans - found.infs
        assert len(found.histogram.edges) == len(found.histogram.counts) + 1


def tensors() -> dict[str, torch.Tensor]:
    """All kinds of dtypes and values."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(300, 257, generator=generator) * 0.02
    special = normal.clone()
    special[3, 5:9] = float("nan")
    special[7, :3] = float("inf")
    special[7, 3] = float("-inf")
    special[100] = 0.0
    special[101] = -0.0
    special[102] = 1e-42  # subnormal
    whole = torch.randint(-(2**62), 2**62, (5000,), generator=generator)
    fp8 = [getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")]
    return {
        "float32": special,
        "float64": special.double() * 1e100,
        "float16": special.half(),
        "bfloat16": special.bfloat16(),
        "bfloat16_small": special[:4].bfloat16(),
        "large_mean": 1e6 + normal.double(),
        "complex64": torch.complex(special, normal),
        "complex128": torch.complex(normal.double(), special.double()),
        "complex32": torch.complex(special, normal).to(torch.complex32),
        "bool": normal > 0,
        "int64": whole,
        "int32": whole.to(torch.int32),
        "int16": whole.to(torch.int16),
        "int16_many": torch.randint(-(2**15), 2**15, (60_000,), generator=generator).to(torch.int16),
        "int8": whole.to(torch.int8),
        "uint8": whole.to(torch.uint8),
        "uint64": torch.tensor([0, 1, 2**63 + 5], dtype=torch.uint64),
        "one": torch.tensor(-3.5),
        "step": torch.tensor(7),
        "zeros": torch.zeros(10),
        "empty": torch.zeros(0, 3),
        "nothing_finite": torch.full((4,), math.nan),
        **{str(dtype).rpartition(".")[2]: normal.to(dtype) for dtype in fp8},
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("save", [save_ours, save_stock])
def test_statistics_are_torchs(tmp_path: Path, save: Callable[[Path, dict[str, Any]], Path]) -> None:
    """Every dtype, NaN and infinities apart, zeros of both signs, subnormal numbers, a mean that is large."""
    state = tensors()
    found = statistics(save(tmp_path / "x", state))
    assert [tensor.fqn for tensor in found.tensors] == list(state)
    for tensor in found.tensors:
        source = state[tensor.fqn]
        assert (tensor.dtype, tensor.shape) == (str(source.dtype).rpartition(".")[2], tuple(source.shape))
        assert_describes(tensor.statistics, source)
    by_name = {tensor.fqn: tensor.statistics for tensor in found.tensors}
    for name in ("int64", "int8", "uint64", "bool", "step"):
        bounds = by_name[name]
        assert bounds is not None
        assert (type(bounds.min), type(bounds.max)) == (int, int)
    assert found.total.count == sum(tensor.numel() for tensor in state.values())


def test_the_whole_is_that_of_all_elements(tmp_path: Path) -> None:
    """Merged moments are those of the concatenation, also where means differ by far more than deviations."""
    state = {f"t{number}": torch.randn(997) * 10.0**number + 10.0 ** (2 * number) for number in range(4)}
    found = statistics(save_ours(tmp_path / "x", state))
    assert_describes(found.total, torch.cat(list(state.values())))


@pytest.mark.parametrize("cuts", [(3, 1), (1, 4), (2, 3)])
def test_sharding_does_not_matter(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """Any cutting gives the same figures, also where a chunk is stored twice."""
    tensor = torch.randn(211, 133)
    boxes = [*grid(tensor.shape, cuts), grid(tensor.shape, cuts)[0]]
    found = statistics(save_sharded(tmp_path / "x", {"w": tensor}, {"w": boxes}))
    assert_describes(found.tensors[0].statistics, tensor)


def test_tied_tensors_count_by_name_and_are_read_once(tmp_path: Path) -> None:
    """Two names of one tensor have their figures each; the bytes of both are fetched once."""
    weight = torch.randn(500, 300)
    folder = save_ours(tmp_path / "x", {"a": weight, "b": weight, "c": weight[:0]})
    assert data_file(folder).stat().st_size < 2 * weight.nbytes
    found = statistics(folder)
    assert found.bytes_read == weight.nbytes
    assert found.tensors[0].statistics == found.tensors[1].statistics
    assert_describes(found.total, torch.cat([weight, weight]))


def test_globs_choose_tensors(tmp_path: Path) -> None:
    """``only`` and ``exclude`` work as for a load, and nothing else is read; no match is an error."""
    folder = save_ours(
        tmp_path / "x", {"m": {"a": torch.ones(40), "b": torch.ones(90_000)}, "o": torch.ones(60)}
    )
    found = statistics(folder, only=["m", "o"], exclude="*.b")
    assert [tensor.fqn for tensor in found.tensors] == ["m.a", "o"]
    assert found.bytes_read == 4 * 100
    assert found.total.count == 100
    with pytest.raises(PlanError, match="select none of its 3 tensors"):
        statistics(folder, only="nothing")
    with pytest.raises(PlanError, match="at least 3"):
        statistics(folder, bins=2)


def test_bits_without_a_meaning_have_no_statistics(tmp_path: Path) -> None:
    """Opaque types are listed, and not part of the whole."""
    save_ours(tmp_path / "x", {"q": torch.zeros(8, dtype=torch.uint8).view(torch.bits8), "w": torch.ones(3)})
    found = statistics(tmp_path / "x")
    assert [(tensor.fqn, tensor.statistics is None) for tensor in found.tensors] == [
        ("q", True),
        ("w", False),
    ]
    assert found.total.count == 3


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress counts the bytes of tensors, ties once, upwards."""
    weight = torch.randn(100)
    calls: list[tuple[int, int]] = []
    statistics(
        save_ours(tmp_path / "x", {"a": weight, "b": weight, "c": torch.ones(7)}),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(400, 428), (428, 428)]


def counts_by_numpy(values: np.ndarray, histogram: Histogram) -> list[int]:
    """The histogram's counts, by comparing each value with each bin's edges."""
    found = []
    for low, high in zip(histogram.edges, histogram.edges[1:], strict=False):
        if low >= 0 < high and not (low == 0 or high == 0):
            inside = (low <= values) & (values < high)
        elif high <= 0 and low < 0 and high != 0:
            inside = (low < values) & (values <= high)
        else:
            inside = ((low < values) & (values < high)) | (values == 0)
        found.append(int(inside.sum()))
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("bins", [3, 4, 9, 32, 100])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "int64", "uint8", "int8", "one", "zeros"])
def test_histograms_count_what_is_between_their_edges(bins: int, name: str) -> None:
    """Bins of powers of two, at most as many as asked for, with every finite value in one of them."""
    tensor = tensors()[name]
    summary = Summary()
    summary.add(tensor.double().numpy())
    histogram = summary.result(bins).histogram
    assert histogram is not None
    assert len(histogram.counts) <= bins
    assert list(histogram.edges) == sorted(histogram.edges)
    assert all(edge == 0 or abs(math.frexp(edge)[0]) == 0.5 for edge in histogram.edges)
    values = tensor.double().numpy().reshape(-1)
    assert list(histogram.counts) == counts_by_numpy(values[np.isfinite(values)], histogram)


def test_a_histogram_shows_sign_and_size() -> None:
    """Ones and minus twos are in the bins that begin at their magnitudes."""
    summary = Summary()
    summary.add(np.array([1.0, 1.0, 1.5, -2.0, 0.0, 2.0**-40]))
    assert summary.result(7).histogram == Histogram(
        (-4.0, -(2.0**-3), -(2.0**-8), -(2.0**-13), 2.0**-13, 2.0**-8, 2.0**-3, 4.0), (1, 0, 0, 2, 0, 0, 3)
    )
    only_positive = Summary()
    only_positive.add(np.array([3, 5, 6, 1], np.int32))
    assert only_positive.result(32).histogram == Histogram((0.0, 1.0, 2.0, 4.0, 8.0), (0, 1, 1, 2))


def test_sums_that_float64_cannot_hold_are_infinite() -> None:
    """Doubles near the limit have no finite norm; their bounds and counts are right all the same."""
    summary = Summary()
    summary.add(np.array([1e308, -1e308, 1e308]))
    found = summary.result(32)
    assert (found.min, found.max, found.std, found.norm) == (-1e308, 1e308, math.inf, math.inf)
    assert found.histogram == Histogram((-math.inf, -(2.0**1023), 2.0**1023, math.inf), (1, 0, 2))


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.lists(st.floats(width=32, allow_nan=True), max_size=20), max_size=6),
    name=st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2"]),
)
def test_merging_is_adding(parts: list[list[float]], name: str) -> None:
    """Summaries of parts, merged, say what one of all elements says; so does one fed block by block."""
    dtype = dtypes.BY_NAME[name]
    arrays = [torch.tensor(part, dtype=torch.float32).to(getattr(torch, name)) for part in parts]
    stored = [
        np.frombuffer(
            a.view(torch.uint8).numpy().tobytes(), "<f4" if name == "float32" else f"<u{a.itemsize}"
        )
        if a.numel()
        else np.zeros(0, "<f4" if name == "float32" else f"<u{a.itemsize}")
        for a in arrays
    ]
    if name == "float16":
        stored = [array.view("<f2") for array in stored]
    merged, fed = Summary(), Collector(dtype, 100_000)
    for array in stored:
        fed.add(array)
        single = Collector(dtype, array.size)
        single.add(array)
        merged.merge(single.summary())
    whole = torch.cat([torch.zeros(0, dtype=torch.float64), *(a.to(torch.float64) for a in arrays)])
    assert_describes(merged.result(32), whole)
    assert_describes(fed.summary().result(32), whole)
    assert merged.result(32).histogram == fed.summary().result(32).histogram


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """96 MiB of bfloat16 are described in far less memory than they have."""
    folder = save_ours(tmp_path / "x", {"w": torch.ones(48 << 20, dtype=torch.bfloat16)})
    tracemalloc.start()
    try:
        found = statistics(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.total.mean == 1.0
    assert peak < 64 << 20
