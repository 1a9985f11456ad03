"""The benchmark of the catalog runs: over HTTP, beside a writer, and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.service.catalog import main
from benchmarks.service.rows import QUESTIONS


@pytest.mark.exhaustive
def test_a_tiny_catalog_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every question is asked and answered, and somebody writes meanwhile."""
    out = tmp_path / "results.json"
    arguments = ["--checkpoints", "3000", "--databases", "sqlite", "--requests", "40"]
    assert main([*arguments, "--tmp", str(tmp_path), "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())
    assert set(result["questions"]) == set(QUESTIONS)
    assert result["written_meanwhile"] > 0
    assert "K1 sqlite 3,000 checkpoints" in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == [out]
