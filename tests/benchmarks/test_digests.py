"""The benchmark of what digests cost a save, at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.digests import DigestsSpec, digests_row, save_with_digests
from benchmarks.rounds import Measurement


def test_a_save_with_digests_is_judged_beside_one_without() -> None:
    """By the ratio within a round: 4 % more meet the target, 6 % do not."""
    measured = Measurement("W2", 1, "save, digests", 1 << 20, 100)
    measured.samples = {"ours": [1.04, 2.08, 1.04], "without": [1.0, 2.0, 1.0]}
    assert digests_row(measured).verdicts[0].met
    measured.samples["ours"] = [1.06, 2.12, 1.06]
    assert not digests_row(measured).verdicts[0].met


@pytest.mark.exhaustive
def test_saves_of_both_kinds_are_timed(tmp_path: Path) -> None:
    """A round of each, durable and not, and nothing is left behind."""
    told: list[str] = []
    results = save_with_digests(0, 1, told.append, DigestsSpec("W2", 0.002, 1, tmp_path))
    assert [result.operation for result in results] == ["save durable, digests", "save, digests"]
    for result in results:
        assert len(result.samples["ours"]) == len(result.samples["without"]) == 1
        assert {*result.facts["cpu_seconds"]} == {"ours", "without"}
    assert len(told) == 2 and not [*tmp_path.iterdir()]
