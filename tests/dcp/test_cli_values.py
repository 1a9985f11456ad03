"""``dcp cat``, ``dcp stats`` and ``dcp diff``: what is printed, as text and as JSON, and the exit status."""

import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp
from dcp.cli.pictures import bar, sparkline
from tests.dcp.cli_support import data_file, flip, run, save_ours, save_stock
from tests.support.programs import Program, run_program

ROOT = Path(dcp.__file__).parents[1]


def state() -> dict[str, Any]:
    """A model with numbers that are easily told apart, and values beside it."""
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
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours."""
    return save_ours(tmp_path_factory.mktemp("run") / "step-1", state())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of stock torch."""
    return save_stock(tmp_path_factory.mktemp("run") / "step-1", state())


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_cat_prints_as_numpy_does(kind: str, request: pytest.FixtureRequest) -> None:
    """A slice, a scalar and types that numpy lacks: values as numpy prints them, then the type."""
    folder = request.getfixturevalue(kind)
    w = state()["model"]["w"].numpy()
    shown = run("cat", folder, "model.w", "--slice", "0:2, ::-20")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out == f"{np.array2string(w[0:2, ::-20], separator=', ')}\nfloat32 2x3\n"
    assert run("cat", folder, "model.w", "--slice", "-1,...,3").out == "1953.\nfloat32 scalar\n"
    assert run("cat", folder, "model.half").out == "[ 1.5, -2. ,  nan]\nbfloat16 3\n"
    assert run("cat", folder, "model.scalar").out == "3\nint16 scalar\n"
    assert run("cat", folder, "model.empty").out == "[]\nfloat32 0x2\n"


def test_cat_of_a_large_tensor_reads_its_edges_only(tmp_path: Path) -> None:
    """What numpy would leave out is not read: damage in the middle is not noticed, damage at an edge is."""
    tensor = torch.arange(10_000_000, dtype=torch.uint8).reshape(100_000, 100)
    folder = save_ours(tmp_path / "x", {"w": tensor})
    expected = np.array2string(tensor.numpy(), separator=", ", threshold=1000, max_line_width=100)
    assert run("cat", folder, "w").out == f"{expected}\nuint8 100000x100\n"
    flip(data_file(folder), 6_000_000)
    assert run("cat", folder, "w").out == f"{expected}\nuint8 100000x100\n"
    flip(data_file(folder), 1_000)
    assert "damaged" in run("cat", folder, "w").err


def test_no_damaged_number_is_shown(tmp_path: Path) -> None:
    """Of a slice the blocks that it is in are read whole and checked, wherever in them the damage is."""
    folder = save_ours(tmp_path / "x", {"w": torch.arange(100_000)})
    assert run("cat", folder, "w", "--slice", "7").out == "7\nint64 scalar\n"
    flip(data_file(folder), 500_000)
    damaged = run("cat", folder, "w", "--slice", "7")
    assert (damaged.status, damaged.out) == (3, "")
    assert "'w' is damaged" in damaged.err


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    """Rate and time left are for people who watch: nothing of it is in a script's output."""
    folder = save_ours(tmp_path / "x", {"w": torch.zeros(5_000_000)})
    command = ["-m", "dcp", "stats", str(folder)]
    piped = run_program(*command)
    assert (piped.returncode, piped.stderr) == (0, "")
    controller, terminal = os.openpty()
    with Program(*command, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        drawn = b""
        try:
            while piece := os.read(controller, 4096):
                drawn += piece
        except OSError:  # how Linux says that the other end of the terminal is closed
            pass
        out, _ = process.communicate()
    os.close(controller)
    assert out == piped.stdout
    assert folder.name.encode() in drawn


def test_cat_prints_other_values(ours: Path, stock: Path) -> None:
    """Plain values are printed as Python writes them, and cannot steer the terminal; pickles are not run."""
    for folder in (ours, stock):
        assert run("cat", folder, "step").out == "7\n"
        assert run("cat", folder, "name").out == "'a\\x1b[31m'\n"
        assert run("cat", folder, "step", "--json").json == {"fqn": "step", "type": "int", "value": 7}
        pickled = run("cat", folder, "device")
        assert (pickled.status, pickled.out) == (3, "")
        assert "pickles are not run" in pickled.err
        sliced = run("cat", folder, "step", "--slice", "0")
        assert sliced.status == 3
        assert "no tensor" in sliced.err


def test_cat_of_what_is_not_there_says_what_is(ours: Path, tmp_path: Path) -> None:
    """A misspelt name comes with those that are like it; errors are one line and status 3."""
    cases: list[tuple[list[str | Path], str]] = [
        (["cat", ours, "model.half2"], "did you mean 'model.half'"),
        (["cat", ours, "qqqqqqqq"], "dcp show"),
        (
            ["cat", ours, "model"],
            "'model' is not a value, 5 are below it: model.w, model.half, model.scalar, ",
        ),
        (["cat", ours, "model.w", "--slice", "0,0,0"], "2 dimensions"),
        (["cat", ours, "model.w", "--slice", "40"], "40 elements along dimension 0"),
        (["cat", tmp_path / "nothing", "w"], "nothing"),
    ]
    for arguments, hint in cases:
        failed = run(*arguments)
        assert (failed.status, failed.out) == (3, "")
        assert failed.err.count("\n") == 1
        assert hint in failed.err


@pytest.mark.parametrize("text", ["", "a", "1.5", "0:2;3", "::0", "1:2:3:4", "--1", "0,,1"])
def test_a_slice_that_is_none_is_wrong_usage(ours: Path, text: str) -> None:
    """Mistakes on the command line are status 2, and nothing is opened."""
    wrong = run("cat", ours, "model.w", f"--slice={text}")
    assert wrong.status == 2
    assert "--slice" in wrong.err


def test_cat_json_has_the_values(ours: Path) -> None:
    """Nested lists; what JSON lacks as its repr."""
    found = run("cat", ours, "model.half", "--json").json
    assert found == {"fqn": "model.half", "dtype": "bfloat16", "shape": [3], "values": [1.5, -2.0, "nan"]}
    assert run("cat", ours, "model.z", "--json").json["values"] == ["(1+2j)", "0j"]
    assert run("cat", ours, "model.scalar", "--json").json["values"] == 3


@pytest.mark.parametrize(
    ("name", "index"), [("model.w", None), ("model.w", "5:1:-2,1:"), ("model.half", None)]
)
def test_cat_writes_npy_files(ours: Path, tmp_path: Path, name: str, index: str | None) -> None:
    """`numpy.load` reads what is written, to a file and to a pipe; nothing is left aside."""
    arguments = ["cat", str(ours), name, *(() if index is None else ("--slice", index))]
    tensor = state()["model"][name.removeprefix("model.")].float().numpy()
    expected = tensor[5:1:-2, 1:] if index else tensor
    target = tmp_path / "x.npy"
    target.write_bytes(b"old")
    done = run(*arguments, "--npy", target)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert np.array_equal(np.load(target), expected, equal_nan=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    read, write = os.pipe()
    with (
        Program("-m", "dcp", *arguments, "--npy", "-", stdout=write) as process,
        os.fdopen(read, "rb") as file,
    ):
        os.close(write)
        piped = file.read()
    assert process.returncode == 0
    assert np.array_equal(np.load(io.BytesIO(piped)), expected, equal_nan=True)
    assert run(*arguments, "--npy", "-", "--json").status == 2


def test_a_file_that_cannot_be_written_leaves_the_old_one(ours: Path, tmp_path: Path) -> None:
    """Damage found while writing: one line, status 3, and the target is as it was."""
    folder = save_ours(tmp_path / "x", {"w": torch.ones(5000)})
    flip(data_file(folder), 3000)
    target = tmp_path / "w.npy"
    target.write_bytes(b"old")
    failed = run("cat", folder, "w", "--npy", target)
    assert failed.status == 3
    assert "damaged" in failed.err
    assert target.read_bytes() == b"old"
    assert not list(tmp_path.glob(".tmp-*"))
    assert run("cat", folder, "w", "--npy", tmp_path / "no" / "folder.npy").status == 3


def test_stats_prints_a_row_a_tensor_and_the_whole(ours: Path) -> None:
    """Figures, counts, a sparkline of each tensor, and the histogram of all."""
    shown = run("stats", ours)
    assert (shown.status, shown.err) == (0, "")
    summary, table, histogram = shown.out.split("\n\n")
    assert summary.startswith(f"{ours}: 5 tensors, 2,006 values, ") and "1 NaN, 0 infinite" in summary
    assert summary.endswith("of the finite elements; nan and inf count the others")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["tensor"] == [
        "dtype",
        "shape",
        "min",
        "max",
        "mean",
        "std",
        "norm",
        "nan",
        "inf",
        "zero",
        "values",
    ]
    assert rows["model.w"][:6] == ["float32", "40x50", "0", "1999", "999.5", "577.5"]
    assert rows["model.half"][:7] == ["bfloat16", "3", "-2", "1.5", "-0.25", "2.475", "2.5"]
    assert rows["model.half"][7] == "1"
    assert rows["model.empty"][2:7] == ["-"] * 5
    assert "█" in rows["model.w"][-1]
    counts = [int(line.split()[2].replace(",", "")) for line in histogram.splitlines()[1:]]
    assert sum(counts) == 2000 + 2 + 1 + 2


def test_stats_json_has_the_numbers(ours: Path) -> None:
    """The same as the library's data classes."""
    found = run("stats", ours, "--json", "--only", "model.*", "--exclude", "model.w", "--bins", "5").json
    assert [tensor["fqn"] for tensor in found["tensors"]] == [
        "model.half",
        "model.scalar",
        "model.z",
        "model.empty",
    ]
    assert found["tensors"][1]["statistics"]["max"] == 3
    assert found["tensors"][3]["statistics"]["histogram"] is None
    assert found["total"]["nans"] == 1
    assert len(found["total"]["histogram"]["counts"]) <= 5
    nothing = run("stats", ours, "--only", "x")
    assert (nothing.status, nothing.err.count("\n")) == (3, 1)
    assert run("stats", ours, "--bins", "2").status == 2


def test_diff_of_equals_says_so(ours: Path, stock: Path) -> None:
    """Equal checkpoints of two formats: status 0, and what was compared."""
    shown = run("diff", ours, stock)
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith(f"{ours} and {stock}: equal (5 tensors and 3 objects equal")
    assert run("diff", ours, ours, "--no-values", "--json").json["bytes_read"] == 0


def test_diff_prints_what_differs_and_exits_with_1(ours: Path, tmp_path: Path) -> None:
    """Tensors with their figures, values with both sides; as JSON the same."""
    other = state()
    other["model"]["w"][3, 4:6] += 0.5
    other["model"]["half"][2] = 1.0
    other["model"]["new"] = other["model"].pop("scalar")
    other["step"] = 8
    folder = save_ours(tmp_path / "x", other)
    shown = run("diff", ours, folder)
    assert (shown.status, shown.err) == (1, "")
    verdict, tensors, objects = shown.out.split("\n\n")
    rows = {line.split()[0]: line.split("  ") for line in tensors.splitlines()}
    assert [cell.strip() for cell in rows["model.w"] if cell.strip()][:6] == [
        "model.w",
        "changed",
        "float32 40x50",
        "float32 40x50",
        "2",
        "0.5",
    ]
    assert "1 (1 nan or inf)" in tensors
    assert "removed" in "".join(rows["model.scalar"])
    assert "added" in "".join(rows["model.new"])
    assert objects.splitlines()[1].split() == ["step", "changed", "7", "8"]
    assert ": 4 tensors and 1 object differ (2 tensors and 2 objects equal, " in verdict
    parsed = run("diff", ours, folder, "--json")
    assert parsed.status == 1
    assert {tensor["fqn"]: tensor["kind"] for tensor in parsed.json["tensors"]} == {
        "model.w": "changed",
        "model.half": "changed",
        "model.scalar": "removed",
        "model.new": "added",
    }
    renamed = run("diff", ours, folder, "--rename", r"scalar$=>new", "--only", "model.new", "--only", "name")
    assert renamed.status == 0
    assert run("diff", ours, folder, "--rename", "x").status == 2
    failed = run("diff", ours, tmp_path / "nothing")
    assert (failed.status, failed.err.count("\n")) == (3, 1)


def test_diff_with_other_prefixes_says_how_to_compare(tmp_path: Path) -> None:
    """Of a checkpoint and what was converted of it: the rule that it names makes them equal."""
    model = {f"layer{number}.{name}": torch.ones(2) * number for number in range(2) for name in "wb"}
    state = {"model": model, "optim": {"state": {name: {"m": torch.ones(2)} for name in model}}}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    dcp.convert(tmp_path / "a", tmp_path / "b", to="safetensors", only="model", rename={r"^model\.": ""})
    told = run("diff", tmp_path / "a", tmp_path / "b")
    rule = r"'^model\.=>'"
    assert (told.status, told.err) == (
        1,
        f"dcp: the same names with another prefix: --rename {rule} compares these\n",
    )
    same = run("diff", tmp_path / "a", tmp_path / "b", "--exclude", "optim", "--rename", rule.strip("'"))
    assert (same.status, same.err) == (0, "")


def test_pictures_show_whatever_is_not_zero() -> None:
    """A single value beside a million can be seen; nothing is nothing."""
    assert sparkline([0, 1, 500_000, 1_000_000]) == " ▁▄█"
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "  "
    assert [bar(count, 1000, 4) for count in (0, 1, 500, 1000)] == ["", "▏", "██", "████"]
    assert bar(0, 0, 4) == ""


def test_the_commands_start_without_numpy_and_rich() -> None:
    """Help and mistakes must not wait for what only the work needs."""
    program = (
        "import sys, dcp.cli.app\n"
        "heavy = {'numpy', 'torch', 'msgpack', 'isal', 'fsspec', 'rich.progress'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_works_without_torch(ours: Path, stock: Path) -> None:
    """cat, stats, diff, rm and gc in an interpreter in which torch cannot be imported."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from dcp.cli.app import app\n"
        "a, b = sys.argv[1:]\n"
        "for arguments in (['cat', a, 'model.w'], ['stats', a], ['diff', a, b], ['rm', a], ['gc', a]):\n"
        "    try:\n"
        "        app(args=arguments, prog_name='dcp')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, arguments\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ours), str(stock)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
