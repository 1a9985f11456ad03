"""Benchmark runs at a tiny size: figures are written, and no files are left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def command(folder: Path, *options: str) -> list[str]:
    """Return a `python -m benchmarks` command at a tiny size with all files below ``folder``."""
    (folder / "work").mkdir()
    folders = ["--out", str(folder / "out"), "--tmp", str(folder / "work")]
    return [sys.executable, "-m", "benchmarks", "--scale", "0.002", "--rounds", "1", *folders, *options]


def rows_of(folder: Path, *options: str) -> dict[str, Any]:
    """Return the rows of a run by operation."""
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
def test_a_workload_has_rows_of_dcp_and_baseline(
    tmp_path: Path, options: tuple[str, ...], operations: list[str]
) -> None:
    """Each operation has its seconds and those of stock torch or another baseline."""
    rows = rows_of(tmp_path, "--only", *options)
    assert rows and set(operations) <= rows.keys()
    for operation in operations:
        assert rows[operation]["ours"]["median"] > 0 and rows[operation]["stock"]["median"] > 0
