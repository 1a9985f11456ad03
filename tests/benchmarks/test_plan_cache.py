"""The benchmark of planning again, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rounds import Measurement
from benchmarks.targets import plan_row

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_planning_gives_rows_for_both_layouts(tmp_path: Path) -> None:
    """Two ranks, a few tensors: the first plan and the next, ours beside stock, sharded and replicated, and
    where the time of ours goes."""
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", "benchmarks", "--only", "plan", "--scale", "0.004", "--rounds", "1"]
    command += ["--ranks", "2", "--out", str(tmp_path / "out"), "--tmp", str(tmp_path / "work")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    rows = {row["operation"]: row for row in document["rows"]}
    for layout in ("sharded", "replicated"):
        for operation in ("plan first", "plan again"):
            row = rows[f"{operation}, {layout}"]
            assert row["ours"]["median"] > 0
            assert row["stock"]["median"] > 0
    assert "local_plan" in run.stderr
    assert "digests" in run.stderr
    assert list((tmp_path / "work").iterdir()) == []


def test_planning_again_is_judged_by_its_milliseconds() -> None:
    """40 ms meet the target, 60 do not; the first plan has none."""
    measured = Measurement("plan", 4, "plan again, sharded", 1 << 20, 5000)
    measured.samples = {"ours": [0.04, 0.03, 0.05], "stock": [0.4, 0.4, 0.4]}
    row = plan_row(measured)
    assert row.milliseconds == pytest.approx(40)
    assert row.verdicts[0].met
    measured.samples["ours"] = [0.06, 0.03, 0.07]
    assert not plan_row(measured).verdicts[0].met
    measured.operation = "plan first, sharded"
    assert plan_row(measured).verdicts == ()
