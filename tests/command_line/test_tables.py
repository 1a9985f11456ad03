"""Tables in the terminal: width, sorting and limits; lists of runs; and printed values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dcp
from tests.command_line.cli_support import data_file, flip, run, save_dcp, save_stock
from tests.support.programs import run_program

LAYER = "transformer.encoder.layers.{}.self_attention.query_key_value.weight"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two runs of two steps with long names, and a safetensors file beside them."""
    root = tmp_path_factory.mktemp("runs")
    for n, name in enumerate(("a/step-1", "a/step-20", "b/nested/step-3", "b/nested/step-4")):
        tensors = {LAYER.format(layer): torch.randn(4, 40 + layer) + n for layer in range(6)}
        save_dcp(root / name, tensors | {"options": {"betas": [0.9] * 40}, "step": n})
    save_file({"w": torch.ones(3)}, root / "w.safetensors")
    return root


def lines_of(*arguments: str | Path) -> list[str]:
    """Return the lines of a command that may find differences."""
    outcome = run(*arguments)
    assert outcome.status in (0, 1), outcome.err
    return outcome.out.splitlines()


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_tables_fit_the_terminal(runs: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """No row is wider than the terminal; lines with only a path may be longer, to be copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    one, other = runs / "a/step-1", runs / "a/step-20"
    commands: list[list[str | Path]] = [
        ["show", one, "--objects"],
        ["show", one, "--tree"],
        ["stats", one],
        ["diff", one, other],
        ["ls", runs / "a"],
        ["ls", runs],
        ["ls", "-r", runs],
    ]
    for command in commands:
        for line in lines_of(*command):
            assert len(line) <= columns or str(runs) in line, line


def test_pipes_get_whole_names(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets whole names; a narrow terminal shows both ends of names, and the sorted column."""
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = lines_of("stats", runs / "a/step-1")
    assert any(line.startswith(LAYER.format(5)) for line in lines)
    assert "norm" in lines[2] and "inf" in lines[2]
    monkeypatch.setenv("COLUMNS", "60")
    lines = lines_of("stats", runs / "a/step-1", "--sort", "norm", "--top", "2")
    assert lines[2].split() == ["tensor", "min", "max", "mean", "norm"]
    assert lines[3].startswith("transf") and lines[3].split()[0].endswith(".weight")
    assert "…" in lines[3]


def test_sort_and_top(runs: Path) -> None:
    """--sort lists the largest first; --top limits the rows and counts the others; totals include all."""
    one, other = runs / "a/step-1", runs / "a/step-20"
    lines = lines_of("show", one, "--sort", "size", "--top", "2")
    assert [line.split()[0] for line in lines[-3:-1]] == [LAYER.format(5), LAYER.format(4)]
    assert lines[-1] == "and 4 more tensors"
    lines = lines_of("stats", one, "--sort", "size", "--top", "1")
    assert lines[0].startswith(f"{one}: 6 tensors, 1,020 values, ")
    assert lines[3].startswith(LAYER.format(5)) and lines[4].startswith("total") and "5 more" in lines[5]
    lines = lines_of("diff", one, other, "--sort", "max", "--top", "3")
    assert lines[0].startswith(f"{one} and {other}: 6 tensors and 1 object differ (")
    largest = [float(line.split()[-2]) for line in lines[3:6]]
    assert largest == sorted(largest, reverse=True)
    assert len(run("stats", one, "--top", "1", "--json").json["tensors"]) == 6


def test_ls_lists_runs_and_with_r_their_checkpoints(runs: Path) -> None:
    """Runs are found in nested folders; their newest step is that of the last commit."""
    summary, files, table = run("ls", runs).out.split("\n\n")
    assert summary == f"{runs}: 1 checkpoint, 76 B, 2 runs below (-r: with their checkpoints)"
    assert files.split()[:4] == ["name", "step", "modified", "format"]
    rows = [line.split()[:3] for line in table.splitlines()]
    assert rows[1:] == [["a", "2", "20"], ["b/nested", "2", "4"]]
    by_name = {row["name"]: row for row in run("ls", runs, "--json").json}
    assert (by_name["a"]["state"], by_name["a"]["checkpoints"], by_name["a"]["step"]) == ("run", 2, 20)
    assert by_name[runs.name]["state"] == "complete"
    names = [row["name"] for row in run("ls", "-r", runs, "--json").json]
    assert names == [runs.name, "a/step-1", "a/step-20", "b/nested/step-3", "b/nested/step-4"]
    assert [row["name"] for row in run("ls", "-r", runs / "a/step-1", "--json").json] == ["step-1"]


# -- cat, stats and diff -------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    """Return a model with distinct numbers, and values beside it."""
    return {
        "model": {
            "w": torch.arange(2000, dtype=torch.float32).reshape(40, 50),
            "half": torch.tensor([1.5, -2.0, math.nan]).bfloat16(),
            "scalar": torch.tensor(3, dtype=torch.int16),
            "z": torch.tensor([1 + 2j, 0j]),
            "empty": torch.zeros(0, 2),
        },
        "step": 7,
        "name": "a\x1b[31m",
        "device": torch.device("cpu"),
    }


@pytest.fixture(scope="module")
def by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with dcp."""
    return save_dcp(tmp_path_factory.mktemp("run") / "step-1", state())


@pytest.fixture(scope="module")
def by_stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with stock torch."""
    return save_stock(tmp_path_factory.mktemp("run") / "step-1", state())


@pytest.mark.parametrize("kind", ["by_dcp", "by_stock"])
def test_cat_prints_as_numpy_does(kind: str, request: pytest.FixtureRequest) -> None:
    """Values are printed as by numpy, then the dtype; JSON has nested lists, or reprs if needed."""
    folder = request.getfixturevalue(kind)
    w = state()["model"]["w"].numpy()
    shown = run("cat", folder, "model.w", "--slice", "0:2, ::-20")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out == f"{np.array2string(w[0:2, ::-20], separator=', ')}\nfloat32 2x3\n"
    assert run("cat", folder, "model.w", "--slice", "-1,...,3").out == "1953.\nfloat32 scalar\n"
    assert run("cat", folder, "model.half").out == "[ 1.5, -2. ,  nan]\nbfloat16 3\n"
    assert run("cat", folder, "model.empty").out == "[]\nfloat32 0x2\n"
    found = run("cat", folder, "model.half", "--json").json
    assert found == {"fqn": "model.half", "dtype": "bfloat16", "shape": [3], "values": [1.5, -2.0, "nan"]}
    assert run("cat", folder, "model.z", "--json").json["values"] == ["(1+2j)", "0j"]
    assert run("cat", folder, "model.scalar", "--json").json["values"] == 3


@pytest.mark.parametrize("kind", ["by_dcp", "by_stock"])
def test_cat_prints_plain_values(kind: str, request: pytest.FixtureRequest) -> None:
    """Plain values are printed as Python's repr, with control characters escaped; pickles are not decoded."""
    folder = request.getfixturevalue(kind)
    assert run("cat", folder, "step").out == "7\n"
    assert run("cat", folder, "name").out == "'a\\x1b[31m'\n"
    assert run("cat", folder, "step", "--json").json == {"fqn": "step", "type": "int", "value": 7}
    pickled = run("cat", folder, "device")
    assert (pickled.status, pickled.out) == (3, "") and "does not unpickle" in pickled.err
    sliced = run("cat", folder, "step", "--slice", "0")
    assert sliced.status == 3 and "not a tensor" in sliced.err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.half2", "did you mean 'model.half'"),
        ("qqqqqqqq", "dcp show"),
        ("model", "'model' is a prefix of 5 values, not a value: model.w, model.half, model.scalar, "),
    ],
)
def test_cat_suggests_similar_names(by_dcp: Path, name: str, hint: str) -> None:
    """The error for a misspelt name suggests similar names, in one line with status 3."""
    failed = run("cat", by_dcp, name)
    assert (failed.status, failed.out, failed.err.count("\n")) == (3, "", 1)
    assert hint in failed.err


@pytest.mark.parametrize("text", ["", "a", "1.5", "0:2;3", "::0", "1:2:3:4", "--1", "0,,1"])
def test_an_invalid_slice_is_a_usage_error(by_dcp: Path, text: str) -> None:
    """An invalid slice is a usage error with status 2, before the checkpoint is opened."""
    wrong = run("cat", by_dcp, "model.w", f"--slice={text}")
    assert wrong.status == 2 and "--slice" in wrong.err


def test_cat_writes_npy_to_a_pipe(by_dcp: Path, tmp_path: Path) -> None:
    """`numpy.load` reads the output, also of a slice; --json and --npy exclude each other."""
    arguments = ("cat", str(by_dcp), "model.w", "--slice", "5:1:-2,1:", "--npy", "-")
    with (tmp_path / "x.npy").open("wb") as file:
        done = run_program("-m", "dcp", *arguments, stdout=file)
    assert done.returncode == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), state()["model"]["w"].numpy()[5:1:-2, 1:])
    assert run(*arguments, "--json").status == 2


def test_damage_found_while_writing_keeps_the_target(tmp_path: Path) -> None:
    """Damage found while writing leaves the target unchanged."""
    folder = save_dcp(tmp_path / "x", {"w": torch.ones(5000)})
    flip(data_file(folder), 3000)
    target = tmp_path / "w.npy"
    target.write_bytes(b"old")
    failed = run("cat", folder, "w", "--npy", target)
    assert failed.status == 3 and "damaged" in failed.err
    assert target.read_bytes() == b"old"
    assert not list(tmp_path.glob(".tmp-*"))
    assert run("cat", folder, "w", "--npy", tmp_path / "no" / "folder.npy").status == 3


def test_stats_prints_each_tensor_and_the_whole(by_dcp: Path) -> None:
    """stats prints figures, counts and a sparkline of each tensor, and the histogram of all."""
    shown = run("stats", by_dcp)
    assert (shown.status, shown.err) == (0, "")
    summary, table, histogram = shown.out.split("\n\n")
    assert summary.startswith(f"{by_dcp}: 5 tensors, 2,006 values, ") and "1 NaN, 0 infinite" in summary
    assert summary.endswith("cover finite elements; nan and inf count all others")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    header = ["dtype", "shape", "min", "max", "mean", "std", "norm", "nan", "inf", "zero", "values"]
    assert rows["tensor"] == header
    assert rows["model.w"][:6] == ["float32", "40x50", "0", "1999", "999.5", "577.5"]
    assert rows["model.half"][:8] == ["bfloat16", "3", "-2", "1.5", "-0.25", "2.475", "2.5", "1"]
    assert rows["model.empty"][2:7] == ["-"] * 5
    assert "█" in rows["model.w"][-1]
    counts = [int(line.split()[2].replace(",", "")) for line in histogram.splitlines()[1:]]
    assert sum(counts) == 2000 + 2 + 1 + 2


def test_diff_prints_differences_and_exits_with_1(by_dcp: Path, by_stock: Path, tmp_path: Path) -> None:
    """Equal checkpoints have status 0; else tensors are printed with figures, and values of both sides."""
    shown = run("diff", by_dcp, by_stock)
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith(f"{by_dcp} and {by_stock}: equal (5 tensors and 3 objects equal")
    other = state()
    other["model"]["w"][3, 4:6] += 0.5
    other["model"]["half"][2] = 1.0
    other["model"]["new"] = other["model"].pop("scalar")
    other["step"] = 8
    folder = save_dcp(tmp_path / "x", other)
    shown = run("diff", by_dcp, folder)
    assert (shown.status, shown.err) == (1, "")
    verdict, tensors, objects = shown.out.split("\n\n")
    rows = {line.split()[0]: [cell.strip() for cell in line.split("  ")] for line in tensors.splitlines()}
    cells = [cell for cell in rows["model.w"] if cell][:6]
    assert cells == ["model.w", "changed", "float32 40x50", "float32 40x50", "2", "0.5"]
    assert "1 (1 nan or inf)" in tensors
    assert "removed" in rows["model.scalar"] and "added" in rows["model.new"]
    assert objects.splitlines()[1].split() == ["step", "changed", "7", "8"]
    assert ": 4 tensors and 1 object differ (2 tensors and 2 objects equal, " in verdict
    assert run("diff", by_dcp, folder, "--rename", "x").status == 2
    failed = run("diff", by_dcp, tmp_path / "nothing")
    assert (failed.status, failed.err.count("\n")) == (3, 1)


def test_diff_suggests_a_rename_for_other_prefixes(tmp_path: Path) -> None:
    """A diff of a checkpoint and its conversion suggests a --rename rule, with which they are equal."""
    model = {f"layer{number}.{name}": torch.ones(2) * number for number in range(2) for name in "wb"}
    state = {"model": model, "optim": {"state": {name: {"m": torch.ones(2)} for name in model}}}
    a, b = tmp_path / "a", tmp_path / "b"
    dcp.save(state, checkpoint_id=a)
    dcp.convert(a, b, to="safetensors", only="model", rename={r"^model\.": ""})
    shown = run("diff", a, b)
    hint = r"dcp: the names differ by a prefix: compare with --rename '^model\.=>'"
    assert (shown.status, shown.err) == (1, f"{hint}\n")
    same = run("diff", a, b, "--exclude", "optim", "--rename", r"^model\.=>")
    assert (same.status, same.err) == (0, "")
