"""The benchmarks run, at a tiny size: figures are written, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import catalog, download, scan, start
from benchmarks.service.download import measure
from tests.support.crashes import wait_for_end

ROOT = Path(__file__).parents[2]


def command(folder: Path, *options: str) -> list[str]:
    """`python -m benchmarks` at a tiny size with everything below ``folder``."""
    (folder / "work").mkdir()
    folders = ["--out", str(folder / "out"), "--tmp", str(folder / "work")]
    return [sys.executable, "-m", "benchmarks", "--scale", "0.002", "--rounds", "1", *folders, *options]


def rows_of(folder: Path, *options: str) -> dict[str, Any]:
    """The rows of a run, by their operations."""
    run = subprocess.run(command(folder, *options), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    table = (folder / "out" / "benchmarks.md").read_text()
    assert run.stdout.strip() == table.strip()
    document = json.loads((folder / "out" / "benchmarks.json").read_text())
    assert {"torch", "kernel", "cpu", "filesystem"} <= set(document["environment"])
    assert len([line for line in table.splitlines() if line.startswith("|")]) == len(document["rows"]) + 2
    assert list((folder / "work").iterdir()) == []
    return {row["operation"]: row for row in document["rows"]}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "operations"),
    [
        (("W2", "--ranks", "1"), ["save durable", "save", "load warm", "load cold"]),
        (("async", "--ranks", "1"), ["async_save, thread writer", "async_save, process writer"]),
        (("plan", "--ranks", "2"), ["plan first, sharded", "plan again, replicated"]),
        (("convert",), ["dcp to torch", "torch to dcp", "dcp to safetensors", "eight merged to safetensors"]),
        (("loop", "--ranks", "1"), []),
        (("s3", "--scale", "0.001"), []),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_workload_has_rows_with_both_sides(
    tmp_path: Path, options: tuple[str, ...], operations: list[str]
) -> None:
    """Each operation has its seconds and those of stock torch, or of what else it is compared with."""
    rows = rows_of(tmp_path, "--only", *options)
    assert rows and set(operations) <= rows.keys()
    for operation in operations:
        assert rows[operation]["ours"]["median"] > 0 and rows[operation]["stock"]["median"] > 0


@pytest.mark.exhaustive
def test_an_interrupted_run_removes_its_checkpoints(tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves no file and no process."""
    words = command(tmp_path, "--only", "W1", "--rounds", "1000", "--ranks", "1")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert any("round 1/" in line for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(240) == 130
    assert list((tmp_path / "work").iterdir()) == []
    wait_for_end(process.pid)


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    """The message says which workloads there are."""
    run = subprocess.run(command(tmp_path, "--only", "W9"), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "W9" in run.stderr and "W1-opt" in run.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("main", "sizes"),
    [
        (catalog.main, ["--checkpoints", "3000", "--databases", "sqlite", "--requests", "40"]),
        (download.main, ["--gigabytes", "0.05", "--rounds", "1"]),
        (scan.main, ["--checkpoints", "12", "--runs", "3", "--tensors", "9", "--rounds", "1"]),
    ],
    ids=["catalog", "download", "scan"],
)
def test_the_service_is_measured(
    tmp_path: Path, main: Callable[[list[str]], int], sizes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Results are printed and written as JSON."""
    out = tmp_path / "out.json"
    assert main([*sizes, "--out", str(out)]) == 0
    assert json.loads(out.read_text()) and capfd.readouterr().out


@pytest.mark.exhaustive
def test_the_start_of_the_service_is_measured(tmp_path: Path) -> None:
    """The figures are there and are of this world."""
    found = start.measure(1, 2, tmp_path)
    assert found["processor_seconds"] > 0 and 0 < found["first_answer_seconds"] < 120
    assert 10 < found["idle_mebibytes"] <= found["used_mebibytes"] + 5


@pytest.mark.exhaustive
def test_downloads_are_measured_in_constant_memory(tmp_path: Path) -> None:
    """Every contender has its speed, and the server holds a few parts of what it sends, not the whole."""
    found = measure(0.4, 1, tmp_path)
    assert {result["contender"] for result in found["results"]} == {
        "made, safetensors",
        "made, torch",
        "file",
        "bare sendfile",
    }
    assert all(result["megabytes_per_second"] > 0 for result in found["results"])
    assert found["peak_mebibytes"] - found["idle_mebibytes"] < 100 < found["gigabytes"] * 1000 / 2
