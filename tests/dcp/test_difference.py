"""What differs between two checkpoints: by checksums where they tell, else by values as torch sees them."""

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp.inspection.values.difference import Difference, TensorDifference, diff
from dcp.storage.errors import CorruptCheckpointError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES
from tests.dcp.cli_support import data_file, flip, save_ours, save_stock, state
from tests.support.sharded import grid, save_sharded

Save = Callable[[Path, dict[str, Any]], Path]


def by_name(found: Difference) -> dict[str, TensorDifference]:
    """The tensors that differ."""
    return {tensor.fqn: tensor for tensor in found.tensors}


def assert_measures(tensor: TensorDifference, before: torch.Tensor, after: torch.Tensor) -> None:
    """The figures are what torch computes in float64."""
    a, b = before.double(), after.double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    deltas = (a - b)[finite]
    assert tensor.values is not None
    assert tensor.values.elements == before.numel()
    assert tensor.values.max_abs == pytest.approx(deltas.abs().max().item(), rel=1e-12)
    relative = deltas.norm().item() / a[finite].norm().item()
    assert tensor.values.relative_l2 == pytest.approx(relative, rel=1e-9)


@pytest.mark.parametrize("save", [save_ours, save_stock])
def test_equal_checkpoints_are_equal_by_their_checksums(tmp_path: Path, save: Save) -> None:
    """Two saves of one state: no payload is read, of ours nothing beside the manifests."""
    big = {"big": torch.randn(BLOCK_BYTES // 2), "same": torch.tensor([math.nan, -0.0])}
    a, b = save(tmp_path / "a", state() | big), save(tmp_path / "b", state() | big)
    found = diff(a, b)
    assert found.is_empty
    assert len(found.equal) == 7
    assert found.equal_objects == 5
    assert found.bytes_read == 0 if save is save_ours else found.bytes_read < 60_000
    assert diff(a, b, values=False).is_empty or save is save_stock


def test_ours_and_stocks_are_compared_across(tmp_path: Path) -> None:
    """The same state in two formats is equal, by the checksums of both; values by what they are."""
    tensors = {"big": torch.randn(1_000_000), "turned": torch.randn(300, 200).T, "none": torch.zeros(0, 5)}
    found = diff(save_ours(tmp_path / "a", state() | tensors), save_stock(tmp_path / "b", state() | tensors))
    assert found.is_empty
    assert found.equal_objects == 5
    assert found.bytes_read < 1_000_000


def test_every_kind_of_difference_is_told(tmp_path: Path) -> None:
    """Added, removed, another shape, another dtype, other values, and by how much."""
    generator = torch.Generator().manual_seed(0)
    same, weight = torch.randn(40, generator=generator), torch.randn(300, 500, generator=generator)
    changed = weight.clone()
    changed[7, 100:200] += 0.25
    changed[250, 3] = -1000.0
    a = {"same": same, "gone": same, "w": weight, "shape": same, "dtype": weight, "cast": torch.ones(3)}
    b = {
        "same": same,
        "new": same,
        "w": changed,
        "shape": same[:39],
        "dtype": weight.bfloat16(),
        "cast": torch.ones(3, dtype=torch.int64),
    }
    found = diff(save_ours(tmp_path / "a", a), save_ours(tmp_path / "b", b))
    kinds = {tensor.fqn: tensor.kind for tensor in found.tensors}
    assert kinds == {
        "gone": "removed",
        "w": "changed",
        "shape": "shape",
        "dtype": "dtype",
        "cast": "dtype",
        "new": "added",
    }
    assert found.equal == ("same",)
    tensors = by_name(found)
    values = tensors["w"].values
    assert values is not None
    assert (values.differing, values.nonfinite) == (101, 0)
    assert_measures(tensors["w"], weight, changed)
    assert_measures(tensors["dtype"], weight, weight.bfloat16())
    assert tensors["cast"].values is not None
    assert tensors["cast"].values.differing == 0
    after, before = tensors["shape"].after, tensors["shape"].before
    assert before is not None and after is not None
    assert (before.shape, after.shape, tensors["shape"].values) == ((40,), (39,), None)
    assert tensors["gone"].after is None and tensors["new"].before is None


CUTS = [
    ((1, 1), (4, 1)),
    ((4, 1), (3, 1)),
    ((1, 4), (1, 1)),
    ((2, 3), (5, 1)),
    ((1, 3), (1, 2)),
    ((2, 2), (2, 2)),
]


@pytest.mark.parametrize(("cut_a", "cut_b"), CUTS)
def test_shardings_do_not_matter(tmp_path: Path, cut_a: tuple[int, int], cut_b: tuple[int, int]) -> None:
    """Chunks that follow one another in memory are compared by combined checksums, others by reading."""
    tensor = torch.randn(61, 47)
    changed = tensor.clone()
    changed[60, 46] += 1
    shape = tensor.shape
    a = save_sharded(tmp_path / "a", {"w": tensor}, {"w": grid(shape, cut_a)})
    same = save_sharded(tmp_path / "same", {"w": tensor}, {"w": grid(shape, cut_b)})
    other = save_sharded(tmp_path / "other", {"w": changed}, {"w": grid(shape, cut_b)})
    found = diff(a, same)
    assert found.is_empty
    by_checksums = cut_a == cut_b or cut_a[1] == cut_b[1] == 1
    assert (found.bytes_read == 0) == by_checksums
    assert diff(a, same, values=False).is_empty == by_checksums
    (tensor_difference,) = diff(a, other).tensors
    assert tensor_difference.values is not None
    assert tensor_difference.values.differing == 1
    assert_measures(tensor_difference, tensor, changed)
    (unread,) = diff(a, other, values=False).tensors
    assert unread.kind == ("changed" if by_checksums else "undecided")
    assert unread.values is None


def test_large_tensors_cut_differently_are_compared_in_slabs(tmp_path: Path) -> None:
    """Columns against rows over several blocks, one side stored turned: every element is compared once."""
    tensor = torch.arange(1500 * 3000, dtype=torch.int32).reshape(1500, 3000)
    changed = tensor.clone()
    changed[::100, ::1000] ^= 1
    columns = save_sharded(tmp_path / "a", {"w": tensor}, {"w": grid(tensor.shape, (1, 3))})
    turned = save_stock(tmp_path / "b", {"w": changed.T.contiguous().T})
    for before, after in ((columns, turned), (turned, columns)):
        (found,) = diff(before, after).tensors
        assert found.values is not None
        assert (found.values.elements, found.values.differing) == (1500 * 3000, 45)
        assert found.values.max_abs == 1.0


def test_bits_decide_and_nonfinite_is_counted_apart(tmp_path: Path) -> None:
    """A NaN is itself; zeros of two signs differ by nothing; infinities do not spoil the figures."""
    before = torch.tensor([math.nan, 0.0, math.inf, 1.0, 2.0, -math.inf])
    after = torch.tensor([math.nan, -0.0, 5.0, 1.0, 2.5, math.inf])
    (found,) = diff(save_ours(tmp_path / "a", {"w": before}), save_ours(tmp_path / "b", {"w": after})).tensors
    assert found.values is not None
    assert (found.values.differing, found.values.nonfinite) == (4, 2)
    assert found.values.max_abs == 0.5
    assert found.values.relative_l2 == pytest.approx(0.5 / math.sqrt(5))
    assert found.values.nonfinite_after == 2


def test_what_has_become_nan_has_no_distance(tmp_path: Path) -> None:
    """None, and not 0: there is nothing that could be measured. Beside it the rest is measured as before."""
    nan, ones = torch.full((4,), math.nan), torch.ones(4)
    before = {"all": ones, "half": ones, "late": nan}
    after = {"all": nan, "half": torch.tensor([1.0, 1.0, math.nan, math.inf]), "late": -nan}
    found = {
        one.fqn: one.values
        for one in diff(save_ours(tmp_path / "a", before), save_ours(tmp_path / "b", after)).tensors
    }
    assert {
        fqn: (one and (one.nonfinite, one.nonfinite_after, one.max_abs, one.relative_l2))
        for fqn, one in found.items()
    } == {"all": (4, 4, None, None), "half": (2, 2, 0.0, 0.0), "late": (4, 4, None, None)}


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint64, torch.int32, torch.bool, torch.complex128, torch.float8_e5m2]
)
def test_differences_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Integers are subtracted exactly however large they are; complex numbers differ by a magnitude."""
    if dtype in (torch.int64, torch.uint64):
        before, after, largest = (
            torch.tensor([2**62, 5]).to(dtype),
            torch.tensor([2**62 + 1, 2]).to(dtype),
            3.0,
        )
    elif dtype == torch.complex128:
        before, after, largest = (
            torch.tensor([3 + 4j, 1], dtype=dtype),
            torch.tensor([0j, 1], dtype=dtype),
            5.0,
        )
    else:
        before, after, largest = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 1, 0]).to(dtype), 1.0
    a, b = save_ours(tmp_path / "a", {"w": before}), save_ours(tmp_path / "b", {"w": after})
    (found,) = diff(a, b).tensors
    assert found.values is not None
    assert found.values.max_abs == largest
    assert found.values.differing == (1 if dtype == torch.complex128 else 2)


def test_a_norm_of_zero_makes_the_relative_change_infinite(tmp_path: Path) -> None:
    """What was all zeros has no scale to compare with; nothing at all is no difference."""
    a, b = save_ours(tmp_path / "a", {"w": torch.zeros(3)}), save_ours(tmp_path / "b", {"w": torch.ones(3)})
    (found,) = diff(a, b).tensors
    assert found.values is not None
    assert found.values.relative_l2 == math.inf


@pytest.mark.parametrize(
    ("save_a", "save_b"), [(save_ours, save_ours), (save_ours, save_stock), (save_stock, save_stock)]
)
def test_values_that_are_no_tensors(tmp_path: Path, save_a: Save, save_b: Save) -> None:
    """Plain values are compared by value and type, pickled ones by their pickles."""
    a = {"w": torch.ones(2), "step": 1, "lr": 0.1, "gone": 1, "one": 1, "nan": math.nan}
    b = {"w": torch.ones(2), "step": 2, "lr": 0.1, "new": [1, 2], "one": 1.0, "nan": math.nan}
    a |= {"device": torch.device("cpu"), "size": torch.Size([1]), "odd": OrderedDict(a=torch.device("cpu"))}
    b |= {"device": torch.device("meta"), "size": torch.Size([1]), "odd": OrderedDict(a=torch.device("cpu"))}
    found = diff(save_a(tmp_path / "a", a), save_b(tmp_path / "b", b))
    objects = {value.fqn: (value.kind, value.before, value.after) for value in found.objects}
    assert objects == {
        "step": ("changed", 1, 2),
        "gone": ("removed", 1, None),
        "new": ("added", None, [1, 2]),
        "one": ("changed", 1, 1.0),
        "device": ("changed", None, None),
    }
    assert found.equal_objects == 4
    assert found.tensors == ()


def test_names_are_chosen_and_renamed(tmp_path: Path) -> None:
    """``rename`` maps the first one's names to the second's; globs are on those."""
    a = save_ours(
        tmp_path / "a", {"model.a": torch.ones(3), "model.b": torch.ones(4), "optim.x": torch.ones(5)}
    )
    b = save_ours(tmp_path / "b", {"net.a": torch.ones(3), "net.b": torch.zeros(4)})
    found = diff(a, b, rename={r"^model\.": "net."}, only="net")
    assert found.equal == ("net.a",)
    (tensor,) = found.tensors
    assert (tensor.fqn, tensor.kind) == ("net.b", "changed")
    assert tensor.before is not None
    assert tensor.before.fqn == "model.b"
    assert diff(a, b, rename={r"^model\.": "net."}, exclude=["optim", "*.b"]).is_empty
    with pytest.raises(PlanError, match="select nothing"):
        diff(a, b, only="nothing")
    with pytest.raises(PlanError, match=r"gives 'x' for both 'model.a' and 'model.b'"):
        diff(a, b, rename=lambda name: "x")


def test_only_what_differs_is_read(tmp_path: Path) -> None:
    """Of two tensors the one with equal checksums costs nothing; progress ends at the bytes of the other."""
    same, weight = torch.randn(300_000), torch.randn(400_000)
    a = save_ours(tmp_path / "a", {"same": same, "w": weight})
    b = save_ours(tmp_path / "b", {"same": same, "w": weight + 1})
    calls: list[tuple[int, int]] = []
    found = diff(a, b, progress=lambda done, total: calls.append((done, total)))
    assert found.bytes_read == 2 * weight.nbytes
    assert calls[-1] == (2 * weight.nbytes, 2 * weight.nbytes)


def test_damage_is_an_error_and_no_difference(tmp_path: Path) -> None:
    """Bytes that are not those committed are not compared as if they were."""
    weight = torch.randn(5000, 30)
    a, b = save_ours(tmp_path / "a", {"w": weight}), save_ours(tmp_path / "b", {"w": weight + 1})
    flip(data_file(b), 3000)
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        diff(a, b)


def test_many_tensors_are_compared_together(tmp_path: Path) -> None:
    """Hundreds of small tensors that all changed, with empty ones between, have their own figures."""
    a = {f"t{number}": torch.full((number % 5, 2), float(number)) for number in range(500)}
    b = {fqn: tensor + number for number, (fqn, tensor) in enumerate(a.items())}
    found = diff(save_ours(tmp_path / "a", a), save_ours(tmp_path / "b", b))
    tensors = by_name(found)
    assert list(tensors) == [f"t{number}" for number in range(1, 500) if number % 5]
    for fqn, tensor in tensors.items():
        assert tensor.values is not None
        assert tensor.values.max_abs == float(fqn[1:])
    assert len(found.equal) == 500 - len(tensors)
