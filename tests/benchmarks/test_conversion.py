"""The conversion benchmark at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_rows_of_all_directions(tmp_path: Path) -> None:
    """Each direction has its seconds beside torch's and the loop's, and peaks of whole processes."""
    (tmp_path / "work").mkdir()
    options = ["--only", "convert", "--rounds", "1", "--scale", "0.002", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks", *options, "--tmp", str(tmp_path / "work")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "out" / "benchmarks.json").read_text())["rows"]
    found = {row["operation"]: row for row in rows if row["workload"] == "C1"}
    assert len(found) == 10
    for direction in (
        "dcp to torch",
        "torch to dcp",
        "dcp to safetensors",
        "experts stacked to safetensors",
        "eight merged to safetensors",
    ):
        assert found[direction]["ours"]["median"] > 0
        assert found[direction]["ratio"]["median"] > 0
        assert found[direction]["of_limit"] > 0
        memory = found[f"{direction}, peak memory"]
        assert 10 < memory["mebibytes"] < 300 < memory["stock_mebibytes"] + 200
    assert list((tmp_path / "work").iterdir()) == []
