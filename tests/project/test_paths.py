"""The main operations enter few functions and modules: so much a reader has to open to follow one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.programs import run_program
from tests.support.suite import ROOT

MOST = {"save": (236, 42), "load": (248, 45), "convert": (296, 41)}
MOST |= {"manager.save": (263, 49), "manager.restore": (304, 52)}
"""(functions, modules) that each enters at most, as `benchmarks/paths.py` counts; they only go down."""


def test_the_main_operations_stay_short(tmp_path: Path) -> None:
    """Another function on the way of a save has to take one away."""
    done = run_program(str(ROOT / "benchmarks" / "paths.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(n <= most for name in MOST for n, most in zip(found[name], MOST[name], strict=True)), found
