import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.asynchronous.device_staging import DeviceSpec, stage_from_device
from benchmarks.asynchronous.saving import merge_lives
from benchmarks.asynchronous.training_loop import LoopSpec, train
from benchmarks.rounds import Measurement
from benchmarks.targets import async_row, device_row, loop_rows


@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_a_training_loop_is_timed_with_and_without_saves(tmp_path: Path) -> None:
    """A round has a segment by each contender and one without saves; the checkpoints are removed."""
    result = train(0, 1, print, LoopSpec(0.002, 1, tmp_path, ("ours_thread", "stock"), steps=2))
    assert {name: len(samples) for name, samples in result.samples.items()} == {
        "no_saves": 1,
        "ours_thread": 1,
        "stock": 1,
    }
    assert all(seconds > 0 for samples in result.samples.values() for seconds in samples)
    assert {name: len(costs) for name, costs in result.facts["cost_seconds"].items()} == {
        "ours_thread": 1,
        "stock": 1,
    }
    assert result.size_bytes > 0 and result.tensors > 0
    assert not any(path.is_dir() for path in tmp_path.iterdir())


@pytest.mark.exhaustive  # test_smoke.py has a whole run
def test_staging_from_a_device_measures_what_it_says(tmp_path: Path) -> None:
    """Its rounds run on any device of torch's; here the processor stands in for the accelerator."""
    spec = DeviceSpec("W1", 0.002, 1, tmp_path, "cpu")
    rows = {row.operation: row for row in map(device_row, stage_from_device(0, 1, print, spec))}
    assert set(rows) == {
        "stage (cpu)",
        "async_save on device (cpu)",
        "async_save overlapping (cpu)",
        "kernels while staging (cpu)",
    }
    assert rows["stage (cpu)"].of_limit is not None and rows["stage (cpu)"].verdicts
    assert rows["kernels while staging (cpu)"].limit_name == "kernels_alone"
    assert list(tmp_path.iterdir()) == []


def test_the_blocking_time_is_judged_against_the_copy_and_stock() -> None:
    """1.3 times the memcpy at most, half of stock's at most; pair by pair."""
    measured = Measurement("W1", 1, "async_save", 1 << 30, 291)
    measured.samples = {
        "ours_thread": [0.12, 1.2],
        "stock": [0.36, 3.6],
        "stock_reused": [0.18, 1.8],
        "memory_copy": [0.1, 1.0],
        "memory_copy_2_threads": [0.2, 2.0],
    }
    row = async_row(measured, "thread")
    assert (row.limit_name, row.percentile_90, row.stock_percentile_90) == ("memory_copy", 1.2, 3.6)
    assert row.ratio is not None and row.ratio.median == pytest.approx(3)
    assert row.ratio_tuned is not None and row.ratio_tuned.median == pytest.approx(1.5)
    assert [verdict.met for verdict in row.verdicts] == [True, True]
    measured.samples["memory_copy_2_threads"] = [0.09, 0.9]
    judged = async_row(measured, "thread")
    assert judged.limit_name == "memory_copy_2_threads"
    assert [verdict.met for verdict in judged.verdicts] == [False, True]


def test_steps_that_a_loop_loses_are_taken_within_a_round() -> None:
    """A loop that takes 4 % longer a step is within the target, one that takes 10 % longer is not."""
    measured = Measurement("loop", 1, "train", 1 << 30, 392)
    measured.samples = {
        "no_saves": [1.0, 2.0, 3.0],
        "ours_process": [1.04, 2.08, 3.12],
        "ours_thread": [1.1, 2.2, 3.3],
        "stock_process": [1.2, 2.4, 3.6],
        "stock": [1.25, 2.5, 3.75],
    }
    measured.facts["cost_seconds"] = {name: [0.8, 1.6, 2.4] for name in measured.samples}
    process, thread = loop_rows(measured)
    assert process.lost == pytest.approx(1 - 1 / 1.04) and process.verdicts[0].met
    assert process.stock_lost == pytest.approx(1 - 1 / 1.2)
    assert process.cost is not None and process.cost.median == 1.6
    assert thread.stock_lost == pytest.approx(1 - 1 / 1.25) and not thread.verdicts
    measured.samples["ours_process"] = [1.1, 2.2, 3.3]
    assert not loop_rows(measured)[0].verdicts[0].met


def test_lives_are_put_together() -> None:
    """Samples keep their pairing: those of the second life follow those of the first for every contender."""
    lives = []
    for life in (1.0, 2.0):
        measured = Measurement("W1", 1, "async_save", 1, 1)
        measured.samples = {"ours_thread": [life], "stock": [10 * life]}
        measured.others = {"ours_thread": [0.0], "stock": [0.0]}
        measured.facts = {"cpu_seconds": {"ours_thread": [life], "stock": [life]}}
        lives.append([measured])
    (merged,) = merge_lives(lives)
    assert merged.samples == {"ours_thread": [1.0, 2.0], "stock": [10.0, 20.0]}
    assert merged.facts["cpu_seconds"] == {"ours_thread": [1.0, 2.0], "stock": [1.0, 2.0]}
    assert merged.others == {"ours_thread": [0.0, 0.0], "stock": [0.0, 0.0]}


_PARENT = """
import subprocess, sys
from benchmarks.machine.process_tree import PeakMemory, cpu_seconds
work = "import sys; block = b'x' * (64 << 20); print(sum(range(3_000_000)), flush=True); sys.stdin.read()"
with PeakMemory() as memory:
    before = cpu_seconds()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", work], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        spent = cpu_seconds() - before
        child.stdin.close()
print(spent, memory.peak - memory.before)
"""


def test_memory_and_processor_time_of_children_count() -> None:
    """A child that fills 64 MiB and computes shows in the figures of its parent.

    The parent is a process of its own: children that earlier tests left to end would count here.
    """
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", _PARENT], cwd=root, capture_output=True, check=True)
    spent_seconds, grown_mebibytes = map(float, ran.stdout.split())
    assert spent_seconds > 0
    assert grown_mebibytes > 60
