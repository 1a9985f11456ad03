"""The benchmark of downloads at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service.download import main, measure


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


@pytest.mark.exhaustive
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results are printed and written."""
    assert main(["--gigabytes", "0.05", "--rounds", "1", "--out", str(tmp_path / "out.json")]) == 0
    assert (tmp_path / "out.json").read_text() in capsys.readouterr().out
