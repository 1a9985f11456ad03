"""Times and names as printed. Internal: no file system here keeps the times that are no dates."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from dcp.cli.common import describe_time, print_json
from dcp.demo.places import newest_checkpoint


def test_times_are_local_and_sortable() -> None:
    """Times are shown in the reader's zone, year first."""
    assert describe_time(None) == "-"
    assert describe_time(0.0) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    for odd in (float("nan"), float("inf"), 1e14):  # a memory file system keeps the last one for a file
        assert describe_time(odd) == "-"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_of_any_name(encoding: str) -> None:
    """Halves of surrogate pairs, and what a terminal has no letters for, are escaped."""
    document = {"\ud800": "\u00e9"}
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with redirect_stdout(shown):
        print_json(document)
    shown.seek(0)
    assert json.loads(shown.read()) == document


def test_an_empty_run_has_no_newest_checkpoint(tmp_path: Path) -> None:
    """None is the answer, for a folder that is not there too."""
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "none") is None
