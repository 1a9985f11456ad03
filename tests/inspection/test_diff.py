"""``dcp diff --json``: a comparison by checksums if they decide, else by values as in torch."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line.cli_support import BLOCK_BYTES, data_file, flip, run, save_dcp, save_stock, state
from tests.support.sharded import grid, save_sharded

Save = Callable[[Path, dict[str, Any]], Path]


def diff(a: Path, b: Path, *options: str) -> Any:
    """Return the report of the command, and assert that the status says whether there are differences."""
    ran = run("diff", a, b, "--json", *options)
    assert ran.status in (0, 1), ran.err
    found = ran.json
    assert ran.status == bool(found["tensors"] or found["objects"])
    return found


def by_name(found: Any) -> dict[str, Any]:
    """Return the tensors that differ, by name."""
    return {tensor["fqn"]: tensor for tensor in found["tensors"]}


def is_empty(found: Any) -> bool:
    """Return whether the report has no differences."""
    return not found["tensors"] and not found["objects"]


def assert_measures(tensor: Any, before: torch.Tensor, after: torch.Tensor) -> None:
    """Assert that the measures equal torch's in float64."""
    a, b = before.double(), after.double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    deltas = (a - b)[finite]
    assert tensor["values"]["elements"] == before.numel()
    assert tensor["values"]["max_abs"] == pytest.approx(deltas.abs().max().item(), rel=1e-12)
    relative = deltas.norm().item() / a[finite].norm().item()
    assert tensor["values"]["relative_l2"] == pytest.approx(relative, rel=1e-9)


def changed_values(tmp_path: Path, before: torch.Tensor, after: torch.Tensor) -> Any:
    """Save one tensor before and after a change, and return the measured difference."""
    a, b = save_dcp(tmp_path / "a", {"w": before}), save_dcp(tmp_path / "b", {"w": after})
    (tensor,) = diff(a, b)["tensors"]
    return tensor["values"]


@pytest.mark.parametrize("save", [save_dcp, save_stock])
def test_equal_checkpoints_are_equal_by_their_checksums(tmp_path: Path, save: Save) -> None:
    """Two dcp saves of one state are equal without reading a payload."""
    big = {"big": torch.randn(BLOCK_BYTES // 2), "same": torch.tensor([math.nan, -0.0])}
    a, b = save(tmp_path / "a", state() | big), save(tmp_path / "b", state() | big)
    found = diff(a, b)
    assert is_empty(found)
    assert (len(found["equal"]), found["equal_objects"]) == (7, 5)
    assert found["bytes_read"] == 0 if save is save_dcp else found["bytes_read"] < 60_000
    assert is_empty(diff(a, b, "--no-values")) or save is save_stock


def test_every_kind_of_difference_is_reported(tmp_path: Path) -> None:
    """Added and removed tensors, other shapes, dtypes and values are reported, with the distance."""
    generator = torch.Generator().manual_seed(0)
    same, weight = torch.randn(40, generator=generator), torch.randn(300, 500, generator=generator)
    changed = weight.clone()
    changed[7, 100:200] += 0.25
    changed[250, 3] = -1000.0
    a = {"same": same, "gone": same, "w": weight, "shape": same, "dtype": weight, "cast": torch.ones(3)}
    b = {"same": same, "new": same, "w": changed, "shape": same[:39]}
    b |= {"dtype": weight.bfloat16(), "cast": torch.ones(3, dtype=torch.int64)}
    found = diff(save_dcp(tmp_path / "a", a), save_dcp(tmp_path / "b", b))
    tensors = by_name(found)
    kinds = {"gone": "removed", "w": "changed", "shape": "shape", "dtype": "dtype", "cast": "dtype"}
    assert {fqn: tensor["kind"] for fqn, tensor in tensors.items()} == kinds | {"new": "added"}
    assert found["equal"] == ["same"]
    assert (tensors["w"]["values"]["differing"], tensors["w"]["values"]["nonfinite"]) == (101, 0)
    assert_measures(tensors["w"], weight, changed)
    assert_measures(tensors["dtype"], weight, weight.bfloat16())
    assert tensors["cast"]["values"]["differing"] == 0
    assert (tensors["shape"]["before"]["shape"], tensors["shape"]["after"]["shape"]) == ([40], [39])
    assert tensors["shape"]["values"] is None
    assert tensors["gone"]["after"] is None and tensors["new"]["before"] is None


CUTS = [((4, 1), (3, 1)), ((2, 3), (5, 1))]


@pytest.mark.parametrize(("cut_a", "cut_b"), CUTS)
def test_shardings_do_not_matter(tmp_path: Path, cut_a: tuple[int, int], cut_b: tuple[int, int]) -> None:
    """Chunks contiguous in the tensor are compared by combined checksums, others by reading."""
    tensor = torch.randn(61, 47)
    changed = tensor.clone()
    changed[60, 46] += 1
    shape = tensor.shape
    a = save_sharded(tmp_path / "a", {"w": tensor}, {"w": grid(shape, cut_a)})
    same = save_sharded(tmp_path / "same", {"w": tensor}, {"w": grid(shape, cut_b)})
    other = save_sharded(tmp_path / "other", {"w": changed}, {"w": grid(shape, cut_b)})
    by_checksums = cut_a == cut_b or cut_a[1] == cut_b[1] == 1
    found = diff(a, same)
    assert is_empty(found) and (found["bytes_read"] == 0) == by_checksums
    assert is_empty(diff(a, same, "--no-values")) == by_checksums
    (entry,) = diff(a, other)["tensors"]
    assert entry["values"]["differing"] == 1
    assert_measures(entry, tensor, changed)
    (unread,) = diff(a, other, "--no-values")["tensors"]
    assert unread["kind"] == ("changed" if by_checksums else "undecided")
    assert unread["values"] is None


def test_bits_are_compared_and_nonfinite_counted_apart(tmp_path: Path) -> None:
    """Elements differ if their bits differ. Infinities are counted apart and left out of the distance."""
    before = torch.tensor([math.nan, 0.0, math.inf, 1.0, 2.0, -math.inf])
    after = torch.tensor([math.nan, -0.0, 5.0, 1.0, 2.5, math.inf])
    values = changed_values(tmp_path, before, after)
    assert (values["differing"], values["nonfinite"], values["nonfinite_after"]) == (4, 2, 2)
    assert values["max_abs"] == 0.5
    assert values["relative_l2"] == pytest.approx(0.5 / math.sqrt(5))


def test_a_tensor_that_became_nan_has_no_distance(tmp_path: Path) -> None:
    """The distance of a tensor without finite pairs is None, not 0; other tensors keep their distance."""
    nan, ones = torch.full((4,), math.nan), torch.ones(4)
    before = {"all": ones, "half": ones, "late": nan}
    after = {"all": nan, "half": torch.tensor([1.0, 1.0, math.nan, math.inf]), "late": -nan}
    found = by_name(diff(save_dcp(tmp_path / "a", before), save_dcp(tmp_path / "b", after)))
    names = ("nonfinite", "nonfinite_after", "max_abs", "relative_l2")
    measures = {fqn: [one["values"][name] for name in names] for fqn, one in found.items()}
    assert measures == {"all": [4, 4, None, None], "half": [2, 2, 0.0, 0.0], "late": [4, 4, None, None]}


LARGE = 2**62
DTYPES: list[tuple[torch.dtype, list[Any], list[Any], float, int]] = [
    (torch.int64, [LARGE, 5], [LARGE + 1, 2], 3.0, 2),
    (torch.uint64, [LARGE, 5], [LARGE + 1, 2], 3.0, 2),
    (torch.int64, [LARGE], [LARGE + 1], 1.0, 1),
    (torch.complex128, [3 + 4j, 1], [0j, 1], 5.0, 1),
    *((dtype, [0, 1, 1], [1, 1, 0], 1.0, 2) for dtype in (torch.int32, torch.bool, torch.float8_e5m2)),
]


@pytest.mark.parametrize(("dtype", "before", "after", "largest", "count"), DTYPES)
def test_differences_of_other_dtypes(
    tmp_path: Path, dtype: torch.dtype, before: list[Any], after: list[Any], largest: float, count: int
) -> None:
    """Integers of any size are subtracted exactly; complex numbers differ by a magnitude."""
    values = changed_values(tmp_path, torch.tensor(before).to(dtype), torch.tensor(after).to(dtype))
    assert (values["max_abs"], values["differing"]) == (largest, count)


@pytest.mark.parametrize(("save_a", "save_b"), [(save_dcp, save_dcp), (save_dcp, save_stock)])
def test_plain_and_pickled_values_are_compared(tmp_path: Path, save_a: Save, save_b: Save) -> None:
    """Plain values are compared by value and type, pickled values by their pickles."""
    a = {"w": torch.ones(2), "step": 1, "lr": 0.1, "gone": 1, "one": 1, "nan": math.nan}
    b = {"w": torch.ones(2), "step": 2, "lr": 0.1, "new": [1, 2], "one": 1.0, "nan": math.nan}
    a |= {"device": torch.device("cpu"), "size": torch.Size([1]), "odd": OrderedDict(a=torch.device("cpu"))}
    b |= {"device": torch.device("meta"), "size": torch.Size([1]), "odd": OrderedDict(a=torch.device("cpu"))}
    found = diff(save_a(tmp_path / "a", a), save_b(tmp_path / "b", b))
    assert {value["fqn"]: (value["kind"], value["before"], value["after"]) for value in found["objects"]} == {
        "step": ("changed", 1, 2),
        "gone": ("removed", 1, None),
        "new": ("added", None, [1, 2]),
        "one": ("changed", 1, 1.0),
        "device": ("changed", None, None),
    }
    assert (found["equal_objects"], found["tensors"]) == (4, [])


def test_names_are_selected_and_renamed(tmp_path: Path) -> None:
    """``--rename`` maps names of the first checkpoint, then globs apply; clashes are errors."""
    first = {"model.a": torch.ones(3), "model.b": torch.ones(4), "optim.x": torch.ones(5)}
    a = save_dcp(tmp_path / "a", first)
    b = save_dcp(tmp_path / "b", {"net.a": torch.ones(3), "net.b": torch.zeros(4)})
    rename = ("--rename", r"^model\.=>net.")
    found = diff(a, b, *rename, "--only", "net")
    assert found["equal"] == ["net.a"]
    (tensor,) = found["tensors"]
    assert (tensor["fqn"], tensor["kind"], tensor["before"]["fqn"]) == ("net.b", "changed", "model.b")
    assert is_empty(diff(a, b, *rename, "--exclude", "optim", "--exclude", "*.b"))
    for options, words in (
        (("--only", "nothing"), "select nothing"),
        ((*rename, "--only", "model"), "they select names after the renaming"),
        (("--rename", r"^model\..=>x"), "rename maps both 'model.a' and 'model.b' to 'x'"),
    ):
        refused = run("diff", a, b, *options)
        assert refused.status == 3 and words in refused.err


def test_damage_is_an_error_not_a_difference(tmp_path: Path) -> None:
    """Damaged bytes and missing files are errors, and never compared as values."""
    weight = torch.randn(5000, 30)
    a, b = save_dcp(tmp_path / "a", {"w": weight}), save_dcp(tmp_path / "b", {"w": weight + 1})
    flip(data_file(b), 3000)
    refused = run("diff", a, b)
    assert refused.status == 3 and "'w' is damaged" in refused.err
    twin = save_dcp(tmp_path / "twin", {"w": weight})
    assert "without reading tensors" in run("diff", a, twin).out
    stored = data_file(twin)
    os.truncate(stored, 3000)
    for words in ("has 3000 bytes", "is missing"):
        refused = run("diff", a, twin)
        assert refused.status == 3 and words in refused.err
        stored.unlink(missing_ok=True)
