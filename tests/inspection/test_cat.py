"""``dcp cat``: parts of tensors in each format as by numpy and torch; damaged values are never printed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.command_line.cli_support import BLOCK_BYTES, data_file, flip, run, save_dcp, save_stock
from tests.support.examples import examples
from tests.support.sharded import grid, save_sharded, tensor_bytes

FORMATS = ["dcp", "stock", "sharded", "torch", "safetensors", "huggingface"]


def taken(place: Path, name: str, index: str | None = None) -> np.ndarray:
    """Run ``--npy``, and return the array that it writes."""
    target = place.parent / "taken.npy"
    options = () if index is None else (f"--slice={index}",)
    done = run("cat", place, name, *options, "--npy", target)
    assert (done.status, done.out, done.err) == (0, "", "")
    found: np.ndarray = np.load(target)
    return found


def refused(place: Path, name: str, *options: str) -> str:
    """Run a command that fails, and return its one line of error."""
    failed = run("cat", place, name, *options)
    assert (failed.status, failed.out, failed.err.count("\n")) == (3, "", 1)
    return failed.err


def tensors() -> dict[str, torch.Tensor]:
    """Return views, ties, expanded, transposed, empty and scalar tensors, of several dtypes."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(120, 100, generator=generator)
    return {
        "a": weight,
        "tied": weight,
        "view": weight[10:20, ::2],
        "turned": torch.randn(60, 40, generator=generator).t(),
        "channels": torch.randn(2, 6, 5, 4, generator=generator).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 5, generator=generator).expand(4, 5),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "eighth": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
    }


def write(root: Path, kind: str, state: dict[str, torch.Tensor]) -> Path:
    """Save ``state`` in a format, and return the checkpoint id."""
    plain = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    if kind == "dcp":
        return save_dcp(root / "dcp", dict(state))
    if kind == "stock":
        return save_stock(root / "stock", dict(state))
    if kind == "sharded":
        boxes = {"a": grid((120, 100), (3, 2)), "view": grid((10, 50), (4, 1))}
        return save_sharded(root / "sharded", state, boxes)
    if kind == "torch":
        torch.save(state, root / "model.pt")
        return root / "model.pt"
    if kind == "safetensors":
        save_file(plain, root / "model.safetensors")
        return root / "model.safetensors"
    folder = root / "hf"
    folder.mkdir()
    files = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(sorted(plain))}
    for file in {*files.values()}:
        save_file({name: plain[name] for name in plain if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the model in each format."""
    root = tmp_path_factory.mktemp("formats")
    return {kind: write(root, kind, tensors()) for kind in FORMATS}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_tensor_is_read_from_every_format(places: dict[str, Path], kind: str) -> None:
    """Whole tensors and slices equal torch's, in each format."""
    for name, tensor in tensors().items():
        wanted = tensor if tensor.dtype in (torch.float32, torch.int64, torch.bool) else tensor.float()
        assert np.array_equal(taken(places[kind], name), wanted.numpy()), name
        if tensor.ndim:
            assert np.array_equal(taken(places[kind], name, "::-2"), wanted.numpy()[::-2]), name
    assert run("cat", places[kind], "scalar").out == "3\nint64 scalar\n"


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_figures_do_not_depend_on_the_format(places: dict[str, Path], kind: str) -> None:
    """Statistics of all formats are equal, sums up to rounding, and a diff of any two formats is empty."""
    own, other = (run("stats", places[one], "--json").json["tensors"] for one in ("dcp", kind))
    others = {tensor["fqn"]: tensor for tensor in other}
    assert len(others) == len(own)
    for tensor in own:
        mine, found = tensor["statistics"], others[tensor["fqn"]]["statistics"]
        for fact in ("count", "zeros", "min", "max", "histogram"):
            assert mine[fact] == found[fact], (tensor["fqn"], fact)
        assert found["norm"] == (None if mine["norm"] is None else pytest.approx(mine["norm"], rel=1e-12))
    for second in FORMATS[: FORMATS.index(kind) + 1]:
        same = run("diff", places[kind], places[second], "--json")
        assert (same.status, same.err, len(same.json["equal"])) == (0, "", len(tensors())), second


@pytest.mark.parametrize("kind", FORMATS)
def test_one_changed_element_is_found_in_every_format(
    places: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """A diff finds exactly the changed elements, against a dcp checkpoint and against the same format."""
    state = {name: tensor.clone() for name, tensor in tensors().items()}
    state["a"][119, 99] += 2.0
    state["turned"][39, 59] -= 1.0
    changed = write(tmp_path, kind, state)
    for before in (places["dcp"], places[kind]):
        found = {tensor["fqn"]: tensor for tensor in run("diff", before, changed, "--json").json["tensors"]}
        assert set(found) == {"a", "turned"}
        for name, size in (("a", 2.0), ("turned", 1.0)):
            assert found[name]["values"]["differing"] == 1
            assert found[name]["values"]["max_abs"] == pytest.approx(size, rel=1e-6)


@st.composite
def slicings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Draw (shape, number of cuts an axis, slices as text) of an array."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    cuts = tuple(draw(st.integers(1, 3)) for _ in shape)
    bound = st.just("") | st.integers(-9, 9).map(str)
    step = st.just("") | st.integers(-4, 4).filter(bool).map(str)
    parts = st.builds(lambda low, high, by: f"{low}:{high}:{by}", bound, bound, step)
    items = [
        draw(parts | st.integers(-size, max(0, size - 1)).map(str))
        for size in shape[: draw(st.integers(0, len(shape)))]
    ]
    if draw(st.booleans()) or not items:
        items.insert(draw(st.integers(0, len(items))), "...")
    return shape, cuts, ",".join(items)


def as_numpy(text: str) -> tuple[Any, ...]:
    """Return the slices as objects."""
    return eval(f"np.s_[{text},]", {"np": np})  # type: ignore[no-any-return]


@examples(80)
@given(case=slicings())
def test_slices_equal_numpys(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], tuple[int, ...], str]
) -> None:
    """Any slices of any sharding equal numpy's indexing of the whole, and fail if numpy fails."""
    shape, cuts, text = case
    tensor = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    folder = save_sharded(tmp_path_factory.mktemp("slices") / "x", {"w": tensor}, {"w": grid(shape, cuts)})
    try:
        expected = tensor.numpy()[as_numpy(text)]
    except IndexError:
        assert "'w'" in refused(folder, "w", f"--slice={text}")
        return
    found = taken(folder, "w", text)
    assert found.shape == expected.shape and np.array_equal(found, expected)


def test_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    """A tensor with a missing chunk is an error in cat and stats."""
    save_sharded(tmp_path / "x", {"w": torch.ones(8, 2)}, {"w": [((0, 0), (5, 2))]})
    assert "10 of 16 elements of 'w'" in refused(tmp_path / "x", "w")
    assert "10 of 16" in run("stats", tmp_path / "x").err


@pytest.mark.parametrize("save", [save_dcp, save_stock])
def test_damage_in_any_block_is_found(tmp_path: Path, save: Callable[[Path, dict[str, Any]], Path]) -> None:
    """cat and stats find a flipped bit in any block, by dcp's checksums or by the CRC of stock's zip."""
    size = 2 * BLOCK_BYTES + 5000
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (size // 8, 8), dtype=np.uint8))
    folder = save(tmp_path / "x", {"w": tensor})
    begin = data_file(folder).read_bytes().find(tensor_bytes(tensor)[:64])
    for position in (17, BLOCK_BYTES + 1, 2 * BLOCK_BYTES - 1, size - 100):
        flip(data_file(folder), begin + position)
        for command in (("cat", folder, "w", "--npy", tmp_path / "w.npy"), ("stats", folder)):
            damaged = run(*command)
            assert damaged.status == 3 and "'w' is damaged" in damaged.err
        flip(data_file(folder), begin + position)
    assert not (tmp_path / "w.npy").exists()
