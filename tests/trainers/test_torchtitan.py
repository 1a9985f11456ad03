"""torchtitan's checkpoint manager by dcp: killed in a save and resumed. Tested with a stand-in, and with the
real package if installed (docs/how-to/use-a-trainer.md has the reason)."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import losses
from tests.support.crashes import Ending, Group, in_lab, run_groups

STEPS = 14
INTERFACES = ["hooks", "older", *(["installed"] if importlib.util.find_spec("torchtitan") else [])]


def _trained(jobs: list[tuple[Path, int, dict[str, Any]]]) -> list[list[Ending]]:
    """Run trainings one after the other, each on its number of ranks."""
    from tests.support.torchtitan_training import training

    return [run_groups([Group(ranks, training, (folder, options))])[0] for folder, ranks, options in jobs]


def _run(*jobs: tuple[Path, int, dict[str, Any]]) -> list[list[Ending]]:
    endings = in_lab(_trained, list(jobs))
    assert isinstance(endings, list)
    return endings


def _steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.mark.parametrize(
    ("interface", "mode"),
    [
        (interface, mode)
        if (interface, mode) == ("hooks", "async")
        else pytest.param(interface, mode, marks=pytest.mark.exhaustive)
        for interface in INTERFACES
        for mode in ("disabled", "async", "async_with_pinned_mem")
    ],
)
def test_a_run_killed_in_a_save_resumes_exactly(tmp_path: Path, interface: str, mode: str) -> None:
    """With two ranks, FSDP2, within an epoch and with dropout, each loss equals that of an uninterrupted run,
    and the newest two steps are kept. A separate writer process outlives the kill."""
    options = {"interface": interface, "config": {"async_mode": mode}}
    die_at = None if mode == "async_with_pinned_mem" else 3
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished, died, resumed = _run(
        (whole, 2, options),
        (killed, 2, options | {"die_at": die_at, "steps": STEPS if die_at else 8}),
        (killed, 2, options),
    )
    assert died[0].killed == bool(die_at), died
    assert [ending.value for ending in resumed] == [ending.value for ending in finished], resumed
    assert finished[0].value is not None
    assert finished[0].value[0] == STEPS
    for rank in range(2):
        assert losses(killed, rank) == losses(whole, rank)
    assert _steps(whole) == _steps(killed) == ["step-12", "step-14"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_reset_the_loader(tmp_path: Path, interface: str, ranks: int) -> None:
    """Model, optimizer, scheduler and step are loaded. The data loader's position fits no other number of
    ranks, and the error says how to exclude it."""
    options = {"interface": interface, "steps": 6}
    without = options | {"config": {"exclude_from_loading": ["dataloader"]}}
    (saved, refused, resumed) = _run(
        (tmp_path, 2, options), (tmp_path, ranks, options), (tmp_path, ranks, without)
    )
    assert refused[0].raised is not None
    assert "exclude_from_loading=['dataloader']" in refused[0].raised.traceback_text
    assert resumed[0].value is not None, resumed
    assert resumed[0].value[0] == 6
    assert saved[0].value is not None
    assert resumed[0].value[1] == pytest.approx(saved[0].value[1], abs=1e-5)
