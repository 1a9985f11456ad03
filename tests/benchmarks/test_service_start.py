"""Tests of the benchmark of the service's start, at its smallest."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service.start import measure


@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_one_start(tmp_path: Path) -> None:
    """The figures are there and are of this world."""
    found = measure(1, 2, tmp_path)
    assert found["processor_seconds"] > 0
    assert found["import_of_frameworks_seconds"] > 0
    assert 0 < found["first_answer_seconds"] < 120
    assert 10 < found["idle_mebibytes"] <= found["used_mebibytes"] + 5
