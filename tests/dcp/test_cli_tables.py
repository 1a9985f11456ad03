"""What fits where: tables, sorted and cut, and the lists of runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp
from tests.dcp.cli_support import run, save_ours
from tests.support.programs import Program, run_program

LAYER = "transformer.encoder.layers.{}.self_attention.query_key_value.weight"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two steps with long names, and a safetensors file beside them."""
    root = tmp_path_factory.mktemp("runs")
    for n, name in enumerate(("a/step-1", "a/step-20", "b/nested/step-3", "b/nested/step-4")):
        tensors = {LAYER.format(layer): torch.randn(4, 40 + layer) + n for layer in range(6)}
        save_ours(root / name, tensors | {"options": {"betas": [0.9] * 40}, "step": n})
    save_file({"w": torch.ones(3)}, root / "w.safetensors")
    return root


def lines_of(*arguments: str | Path) -> list[str]:
    """What a command that may find differences prints."""
    outcome = run(*arguments)
    assert outcome.status in (0, 1), outcome.err
    return outcome.out.splitlines()


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_tables_fit_the_terminal(runs: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """All of them at 80, 100 and 200 columns; lines that name a place alone may be longer, to be copied."""
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


def test_nothing_is_left_out_where_nobody_watches(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets whole names, for grep."""
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = lines_of("stats", runs / "a/step-1")
    assert any(line.startswith(LAYER.format(5)) for line in lines)
    assert "norm" in lines[2] and "inf" in lines[2]


def test_shortened_names_keep_both_ends(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is sorted by is shown, however narrow it is."""
    monkeypatch.setenv("COLUMNS", "60")
    lines = lines_of("stats", runs / "a/step-1", "--sort", "norm", "--top", "2")
    assert lines[2].split() == ["tensor", "min", "max", "mean", "norm"]
    assert lines[3].startswith("transf") and lines[3].split()[0].endswith(".weight")
    assert "…" in lines[3]


def test_sorted_and_cut(runs: Path) -> None:
    """--sort puts the largest first; --top shows some rows and how many more there are; the whole counts."""
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


@pytest.mark.parametrize("command", ["show", "stats", "diff"])
def test_an_unknown_column_is_wrong_usage(runs: Path, command: str) -> None:
    """It is told before anything is opened, with those that there are."""
    wrong = run(command, *[runs / "nothing"] * (2 if command == "diff" else 1), "--sort", "colour")
    assert wrong.status == 2
    assert "name" in wrong.err


def test_ls_lists_runs_and_with_r_their_checkpoints(runs: Path) -> None:
    """Runs may be in folders of folders; their newest step is that of the last commit."""
    listed = run("ls", runs)
    summary, files, table = listed.out.split("\n\n")
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


def test_the_newest_step_of_a_run_is_of_those_that_have_one(tmp_path: Path) -> None:
    """A checkpoint that is called otherwise, and was committed later, hides it no more."""
    for name in ("run/step-7", "run/by-hand", "other/by-hand"):
        save_ours(tmp_path / name, {"n": 1})
    rows = {row["name"]: (row["checkpoints"], row["step"]) for row in run("ls", tmp_path, "--json").json}
    assert rows == {"other": (1, None), "run": (2, 7)}


def test_runs_of_an_object_store_are_found(runs: Path) -> None:
    """And in memory."""
    for step in (1, 2):
        dcp.save({"n": 1}, checkpoint_id=f"memory://runs-of-memory/step-{step}", no_dist=True)
    assert [row["step"] for row in run("ls", "memory://runs-of-memory", "--json").json] == [1, 2]


def test_files_without_checksums_are_not_said_to_be_ok(runs: Path) -> None:
    """They were read, and that is all; and their time is that of their last change."""
    verified = run("verify", runs / "w.safetensors")
    assert verified.status == 0
    assert verified.out == f"{runs / 'w.safetensors'}: readable, no checksums (1 tensor, 1 file, 12 B read)\n"
    assert run("verify", runs / "a/step-1").out.startswith(f"{runs / 'a/step-1'}: ok (6 tensors, 1 file, ")
    assert "\nmodified    20" in run("show", runs / "w.safetensors").out
    assert "\ncommitted   20" in run("show", runs / "a/step-1").out


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_the_help_uses_the_width_and_has_groups(columns: int) -> None:
    """No sentence of the list of commands is cut."""
    done = run_program("-m", "dcp", "--help", env=os.environ | {"COLUMNS": str(columns)})
    assert done.returncode == 0
    longest = max(map(len, done.stdout.splitlines()))
    assert min(columns, 120) - 20 < longest <= columns
    assert "..." not in done.stdout.partition("Options:")[2]
    panels = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert panels == ["Options:", "Look:", "Check and convert:", "Remove:", "The service:", "Try it:"]


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path: Path) -> None:
    """``dcp show | head``: status 0 and nothing on standard error, from a pipe that is full."""
    folder = save_ours(tmp_path / "x", {f"layer{number}.w": torch.ones(1) for number in range(3000)})
    for command in ("show", "stats"):
        pipe = subprocess.PIPE
        with Program("-m", "dcp", command, folder, stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 0
