import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.machine import page_cache
from benchmarks.patterns import fill, is_intact
from benchmarks.rounds import Measurement, rotated
from benchmarks.targets import memory_row, save_load_row
from benchmarks.workloads import build_state, tensor_specs, total_bytes

ROOT = Path(__file__).parents[2]


def command(tmp: Path, *options: str) -> list[str]:
    """`python -m benchmarks` at a tiny size with everything below ``tmp``."""
    (tmp / "work").mkdir(exist_ok=True)
    folders = ["--out", str(tmp / "out"), "--tmp", str(tmp / "work")]
    return [sys.executable, "-m", "benchmarks", "--scale", "0.002", "--rounds", "1", *folders, *options]


@pytest.mark.exhaustive
def test_table_and_json_are_written_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """One tiny round of a workload, of memory and of asynchronous saving gives rows with sane figures."""
    run = subprocess.run(
        command(tmp_path, "--only", "W2,memory,async", "--ranks", "1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    table = (tmp_path / "out" / "benchmarks.md").read_text()
    assert run.stdout.strip() == table.strip()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    document = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    assert {"torch", "kernel", "cpu", "filesystem"} <= set(document["environment"])
    rows = {(row["workload"], row["operation"]): row for row in document["rows"]}
    assert len(lines) == len(rows) + 2
    for operation in ("save durable", "save", "load warm", "load cold"):
        row = rows["W2", operation]
        assert row["ours"]["median"] > 0
        assert row["ratio"]["median"] == pytest.approx(row["stock"]["median"] / row["ours"]["median"])
        assert row["of_limit"] > 0 and row["microseconds"] > 0
    for operation in ("save durable", "save", "load warm"):
        assert rows["W2", f"{operation}, vs torch.save"]["peer"]["median"] > 0
        assert rows["W2", f"{operation}, vs safetensors"]["ratio_peer"]["median"] > 0
    assert rows["W1", "load, peak memory"]["mebibytes"] >= 0
    for kind in ("thread", "process"):
        blocked = rows["W1", f"async_save, {kind} writer"]
        committed = rows["W1", f"async_save committed, {kind} writer"]
        assert 0 < blocked["ours"]["median"] < committed["ours"]["median"]
        assert blocked["stock"]["median"] > 0 and blocked["stock_tuned"]["median"] > 0
        assert rows["W1", f"async_save, kept memory, {kind} writer"]["mebibytes"] is not None
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.exhaustive
def test_an_interrupted_run_removes_its_checkpoints(tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves no file and no process."""
    process = subprocess.Popen(
        command(tmp_path, "--only", "W1", "--rounds", "1000", "--ranks", "1"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1/" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(240) == 130
    assert list((tmp_path / "work").iterdir()) == []
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a process of the benchmark outlived it")


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    """The message says which workloads there are."""
    run = subprocess.run(command(tmp_path, "--only", "W9"), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "W9" in run.stderr and "W1-opt" in run.stderr


def test_workloads_have_the_sizes_they_are_named_for() -> None:
    """1 GiB in 291 tensors, three more for each with Adam, 20,000 of 16 KiB, four of 512 MiB."""
    llama = tensor_specs("W1", 1.0)
    assert len(llama) == 291
    assert total_bytes(llama) == pytest.approx(1 << 30, rel=0.01)
    adam = tensor_specs("W1-opt", 1.0)
    assert len(adam) == 4 * 291
    assert total_bytes(adam) == pytest.approx(3 << 29, rel=0.03)
    small = tensor_specs("W2", 1.0)
    assert (len(small), total_bytes(small)) == (20_000, 20_000 << 14)
    assert [total_bytes([spec]) for spec in tensor_specs("W3", 1.0)] == [512 << 20] * 4


def test_a_changed_element_is_noticed_after_a_load() -> None:
    """`State.is_intact` compares every element, so a load of wrong bytes is no success."""
    state = build_state("W1-opt", 0.002, rank=0, world_size=1)
    assert state.is_intact()
    state.locals[5][0].view(torch.uint8)[-1] += 1
    assert not state.is_intact()


def test_contents_belong_to_the_global_position() -> None:
    """A shard's contents are those of the whole tensor at its place, along both dimensions."""
    whole = torch.empty(64, 96, dtype=torch.float32)
    fill(whole, 3, (0, 0))
    for rows, columns in ((slice(16, 32), slice(None)), (slice(None), slice(24, 48))):
        shard = whole[rows, columns].contiguous()
        offsets = (rows.start or 0, columns.start or 0)
        assert is_intact(shard, 3, offsets)
        assert not is_intact(shard, 4, offsets)
        assert not is_intact(shard, 3, (offsets[0] + 1, offsets[1]))


def test_page_cache_is_emptied_and_filled(tmp_path: Path) -> None:
    """After `evict` no page of a file is resident, after `warm` every one is."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    page_cache.evict([path])
    assert page_cache.resident_fraction([path]) < 0.02
    page_cache.warm([path])
    assert page_cache.resident_fraction([path]) == 1.0


def test_ratios_are_taken_within_a_round() -> None:
    """A round in which the machine is slow weighs on both sides, not on the ratio."""
    measured = Measurement("W1", 1, "load warm", 1 << 30, 291)
    measured.samples = {
        "ours": [1.0, 10.0, 2.0],
        "stock": [6.0, 60.0, 12.0],
        "raw_read_warm_2_threads": [0.7, 7.0, 1.4],
    }
    row = save_load_row(measured)
    assert row.ratio is not None and (row.ratio.smallest, row.ratio.largest) == (6.0, 6.0)
    assert row.of_limit == pytest.approx(0.7)
    assert [verdict.met for verdict in row.verdicts] == [True, True]


def test_a_missed_target_is_said() -> None:
    """Costs have an upper bound; a figure that is not there meets nothing."""
    assert memory_row("W1", "save", 1.0, 64.0, 0.0).verdicts[0].met
    assert not memory_row("W1", "save", 1.0, 65.0, 0.0).verdicts[0].met
    assert not memory_row("W1", "save", 1.0, math.nan, 0.0).verdicts[0].met


def test_order_changes_with_every_round() -> None:
    """Each contender is first in turn."""
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
