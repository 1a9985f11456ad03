"""``dcp stats --json``: statistics of each tensor, equal to torch's in float64."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.command_line.cli_support import run, save_dcp, save_stock
from tests.support.examples import examples


def statistics(folder: Path, *options: str) -> Any:
    """Return the report of the command."""
    ran = run("stats", folder, "--json", *options)
    assert ran.status == 0, ran.err
    return ran.json


def reference(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the statistics by torch, in float64."""
    if tensor.is_complex():
        wide = tensor.to(torch.complex128)
        nans = torch.isnan(wide)
        infs = torch.isinf(wide) & ~nans
        values = torch.from_numpy(np.abs(wide[~nans & ~infs].numpy()))  # torch's abs differs in the last bit
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


def assert_describes(found: dict[str, Any], tensor: torch.Tensor) -> None:
    """Assert that counts and bounds are exact, sums right within rounding, and finite values in bins."""
    expected = reference(tensor)
    for name in ("count", "nans", "infs", "zeros", "min", "max"):
        assert found[name] == expected[name], name
    scale = max(abs(expected["min"] or 0), abs(expected["max"] or 0))
    for name in ("mean", "std", "norm"):
        wanted = expected[name]
        wanted = None if wanted is None else pytest.approx(wanted, rel=1e-9, abs=1e-12 * scale)
        assert found[name] == wanted, name
    if found["histogram"] is not None:
        counts = found["histogram"]["counts"]
        assert sum(counts) == found["count"] - found["nans"] - found["infs"]
        assert len(found["histogram"]["edges"]) == len(counts) + 1
    assert (found["linear"] is None) == (found["histogram"] is None)
    if found["linear"] is not None and not tensor.is_complex():
        edges, counts = found["linear"]["edges"], found["linear"]["counts"]
        values = tensor.double().reshape(-1)
        inside = zip(edges, edges[1:], counts, strict=False)
        for low, high, count in inside:
            assert int(((values >= low) & (values < (math.inf if high is None else high))).sum()) == count
        assert sum(counts) == found["count"] - found["nans"] - found["infs"] and 1 <= len(counts) <= 32
        assert counts[0] and counts[-1] and len(edges) == len(counts) + 1


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of all dtypes and kinds of values."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(300, 257, generator=generator) * 0.02
    special = normal.clone()
    special[3, 5:9] = float("nan")
    special[7, :3] = float("inf")
    special[7, 3] = float("-inf")
    special[100], special[101] = 0.0, -0.0
    special[102] = 1e-42  # subnormal
    whole = torch.randint(-(2**62), 2**62, (5000,), generator=generator)
    fp8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
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
        "int16": torch.randint(-(2**15), 2**15, (60_000,), generator=generator).to(torch.int16),
        "int8": whole.to(torch.int8),
        "uint8": whole.to(torch.uint8),
        "uint64": torch.tensor([0, 1, 2**63 + 5], dtype=torch.uint64),
        "one": torch.tensor(-3.5),
        "step": torch.tensor(7),
        "zeros": torch.zeros(10),
        "empty": torch.zeros(0, 3),
        "nothing_finite": torch.full((4,), math.nan),
        **{name: normal.to(getattr(torch, name)) for name in fp8},
    }


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save `tensors` with dcp."""
    return save_dcp(tmp_path_factory.mktemp("run") / "dcp", tensors())


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("kind", ["dcp", "stock"])
def test_statistics_equal_torchs(dcp_folder: Path, tmp_path: Path, kind: str) -> None:
    """Each dtype has correct statistics, with NaN and infinities apart, subnormal numbers and large means."""
    state = tensors()
    found = statistics(dcp_folder if kind == "dcp" else save_stock(tmp_path / "x", tensors()))
    assert [tensor["fqn"] for tensor in found["tensors"]] == list(state)
    for tensor in found["tensors"]:
        source = state[tensor["fqn"]]
        assert tensor["dtype"] == str(source.dtype).rpartition(".")[2]
        assert tensor["shape"] == [*source.shape]
        assert_describes(tensor["statistics"], source)
        if tensor["fqn"] in ("int64", "int8", "uint64", "bool", "step"):
            assert type(tensor["statistics"]["min"]) is int
    assert found["total"]["count"] == sum(tensor.numel() for tensor in state.values())


@examples(25)
@given(
    parts=st.lists(st.lists(st.floats(width=32, allow_nan=True), max_size=20), min_size=1, max_size=6),
    name=st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2"]),
)
def test_the_total_is_that_of_all_elements(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[float]], name: str
) -> None:
    """The combined statistics of several tensors equal those of one tensor with all their values."""
    arrays = [torch.tensor(part, dtype=torch.float32).to(getattr(torch, name)) for part in parts]
    folder = tmp_path_factory.mktemp("parts") / "x"
    found = statistics(save_dcp(folder, {f"t{n}": array for n, array in enumerate(arrays)}))
    assert_describes(found["total"], torch.cat([array.to(torch.float64) for array in arrays]))


def test_globs_select_tensors(tmp_path: Path) -> None:
    """Only selected tensors are read. A selection of nothing fails, and too few bins are a usage error."""
    state = {"m": {"a": torch.ones(40), "b": torch.ones(90_000)}, "o": torch.ones(60)}
    folder = save_dcp(tmp_path / "x", state)
    found = statistics(folder, "--only", "m", "--only", "o", "--exclude", "*.b")
    assert [tensor["fqn"] for tensor in found["tensors"]] == ["m.a", "o"]
    assert (found["bytes_read"], found["total"]["count"]) == (4 * 100, 100)
    nothing = run("stats", folder, "--only", "nothing")
    assert (nothing.status, nothing.err.count("\n")) == (3, 1)
    assert "select none of its 3 tensors" in nothing.err
    assert run("stats", folder, "--bins", "2").status == 2


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """A tensor of 96 MiB in any order of dimensions takes less than 64 MiB of memory."""
    folder = save_stock(tmp_path / "x", {"w": torch.ones(6, 8 << 20, dtype=torch.bfloat16).T})
    tracemalloc.start()
    try:
        found = statistics(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["total"]["mean"] == 1.0
    assert peak < 64 << 20


def test_a_histogram_shows_sign_and_size(tmp_path: Path) -> None:
    """Each value is in the bin of its sign and magnitude."""
    signed = torch.tensor([1.0, 1.0, 1.5, -2.0, 0.0, 2.0**-40], dtype=torch.float64)
    found = statistics(save_dcp(tmp_path / "x", {"w": signed}), "--bins", "7")["tensors"][0]["statistics"]
    inner = [2.0**-13, 2.0**-8, 2.0**-3]
    edges = [-4.0, *(-edge for edge in inner[::-1]), *inner, 4.0]
    assert found["histogram"] == {"edges": edges, "counts": [1, 0, 0, 2, 0, 0, 3]}
    assert found["linear"] == {"edges": [-2.0, -1.0, 0.0, 1.0, 2.0], "counts": [1, 0, 2, 3]}
