import json
from pathlib import Path

import pytest

from benchmarks.service.scan import main


@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_figures_are_written_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny root is scanned, found unchanged, and each figure is one."""
    (tmp_path / "work").mkdir()
    sizes = ["--checkpoints", "12", "--runs", "3", "--tensors", "9", "--rounds", "1"]
    assert main([*sizes, "--tmp", str(tmp_path / "work"), "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found["checkpoints"] == 12
    for name in ("inserted_per_second", "rescanned_per_second", "read_only_per_second", "manifest_bytes"):
        assert found[name] > 0
    assert 0 < found["register_microseconds"]["median"] <= found["register_microseconds"]["p99"]
    assert list((tmp_path / "work").iterdir()) == []
