"""torchtitan's checkpoint manager over ours: killed in a save, resumed; by its interface in our words, and
the real package where it is installed (docs/trainers.md says why it is not beside the others)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Ending, Group, in_lab, run_groups

STEPS = 14
INTERFACES = ["hooks", "older", *(["installed"] if importlib.util.find_spec("torchtitan") else [])]


def _trained(jobs: list[tuple[Path, int, dict[str, Any]]]) -> list[list[Ending]]:
    """In a laboratory: one training after another, each on its number of ranks."""
    from tests.support.torchtitan_training import training

    return [run_groups([Group(ranks, training, (folder, options))])[0] for folder, ranks, options in jobs]


def _run(*jobs: tuple[Path, int, dict[str, Any]]) -> list[list[Ending]]:
    endings = in_lab(_trained, list(jobs))
    assert isinstance(endings, list)
    return endings


def _losses(folder: Path, rank: int = 0) -> dict[int, str]:
    lines = (folder / f"losses-{rank}.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


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
def test_killed_in_a_save_it_goes_on_bit_for_bit(tmp_path: Path, interface: str, mode: str) -> None:
    """Two ranks, FSDP2, within an epoch, with dropout: every loss is that of a run nobody killed, and the
    newest two steps stay. A writer in a process of its own outlives the kill."""
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
        assert _losses(killed, rank) == _losses(whole, rank)
    assert _steps(whole) == _steps(killed) == ["step-12", "step-14"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_on_another_number_of_ranks_it_goes_on_without_the_loaders_place(
    tmp_path: Path, interface: str, ranks: int
) -> None:
    """Model, optimizer, scheduler and step are those that were saved; the data loader's place fits no other
    number of ranks, and the error says how to leave it out."""
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_damaged_step_is_passed_over_and_a_finished_run_leaves_its_model(
    tmp_path: Path, interface: str
) -> None:
    """The newest whole step is taken; the last one of a run has the model alone, in the dtype that was asked
    for, and another run begins from it."""
    import torch

    import dcp

    run, other = tmp_path / "run", tmp_path / "other"
    options = {"interface": interface, "steps": 7}
    _run((run, 2, options))
    for data in (run / "checkpoint" / "step-7").glob("*.distcp"):
        data.write_bytes(b"\0" * data.stat().st_size)
    last = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    begun = {"initial_load_path": str(run / "checkpoint" / "step-8")}
    (resumed, fresh) = _run(
        (run, 2, options | {"steps": 8, "config": last}), (other, 1, options | {"steps": 0, "config": begun})
    )
    assert resumed[0].value is not None, resumed
    assert list(_losses(run))[-2:] == [7, 8]
    model = dcp.read(run / "checkpoint" / "step-8")
    assert sorted(model) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}
    assert "DtypeMismatchError" in (fresh[0].raised.traceback_text if fresh[0].raised else "")


def _wrong_uses() -> list[str]:
    from tests.support.torchtitan_interface import install

    config = install("older")
    from dcp.integrations.torchtitan import DcpCheckpointManager

    class Enabled:
        enabled = True

    said = []
    for options in (
        {"checkpoint_config": config(async_mode="later")},
        {"checkpoint_config": config(), "ft_manager": Enabled()},
    ):
        try:
            DcpCheckpointManager(**options)
        except TypeError as error:
            said.append(str(error))
    return said


def test_wrong_use_says_what_to_do() -> None:
    """A mode that there is not, and torchft's manager."""
    mode, torchft = in_lab(_wrong_uses)
    assert "one of disabled, async, async_with_pinned_mem" in mode
    assert "use torchtitan's own" in torchft


def _without_triton(folder: str) -> str:
    sys.path.insert(0, folder)
    try:
        importlib.import_module("dcp.integrations.torchtitan")
    except ModuleNotFoundError as error:
        return str(error)
    return ""


def test_what_torchtitan_itself_lacks_is_no_matter_of_the_extra(tmp_path: Path) -> None:
    """Such as triton, which torch's builds for CPUs do not bring: the message is Python's."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("import triton_of_nowhere")
    assert in_lab(_without_triton, str(tmp_path)).startswith("No module named 'triton_of_nowhere'")
