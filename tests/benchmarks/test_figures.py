"""Figures of the benchmarks match their columns: pairs of one round, limits, targets, contents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.patterns import fill, is_intact
from benchmarks.rounds import Measurement
from benchmarks.targets import peer_rows, save_load_row
from benchmarks.workloads import build_state, tensor_specs, total_bytes
from tests.support.programs import run_program


def measured(operation: str, **samples: list[float]) -> Measurement:
    """Return a measurement of W1 with one rank and 1 GiB."""
    return Measurement("W1", 1, operation, 1 << 30, 291, samples=samples)


def test_ratios_are_taken_within_a_round() -> None:
    """A round on a slow machine affects both sides, not the ratio."""
    raw = {"raw_read_warm_2_threads": [0.7, 7, 1.4]}
    row = save_load_row(measured("load warm", ours=[1, 10, 2], stock=[6, 60, 12], **raw))
    assert row.ratio is not None and (row.ratio.smallest, row.ratio.largest) == (6.0, 6.0)
    assert row.of_limit == pytest.approx(0.7)
    assert [verdict.met for verdict in row.verdicts] == [True, True]
    (other,) = peer_rows(measured("save", ours=[1.0, 10.0], stock=[2.0, 20.0], safetensors=[0.5, 5.0]))
    assert (other.operation, other.peer_name, other.stock) == ("save, vs safetensors", "safetensors", None)
    assert other.ratio_peer is not None and other.ratio_peer.median == 0.5


def test_workloads_have_their_documented_sizes() -> None:
    """W1 has 1 GiB in 291 tensors, with Adam three more for each; others have 20,000 of 16 KiB and four of
    512 MiB."""
    counts = {name: len(tensor_specs(name, 1.0)) for name in ("W1", "W1-opt", "W2", "W3")}
    assert counts == {"W1": 291, "W1-opt": 4 * 291, "W2": 20_000, "W3": 4}
    sizes = {name: total_bytes(tensor_specs(name, 1.0)) for name in counts}
    assert sizes["W1"] == pytest.approx(1 << 30, rel=0.01)
    assert (sizes["W2"], sizes["W3"]) == (20_000 << 14, 4 * 512 << 20)


def test_wrong_values_are_found_after_a_load() -> None:
    """Every element is compared, at its index in the whole tensor."""
    state = build_state("W1-opt", 0.002, rank=0, world_size=1)
    assert state.is_intact()
    state.locals[5][0].view(torch.uint8)[-1] += 1
    assert not state.is_intact()
    whole = torch.empty(64, 96)
    fill(whole, 3, (0, 0))
    shard = whole[16:32, 24:48].contiguous()
    assert is_intact(shard, 3, (16, 24)) and not is_intact(shard, 3, (17, 24))
    assert not is_intact(shard, 4, (16, 24))


_PARENT = """
import subprocess, sys, time
from benchmarks.machine.process_tree import PeakMemory, cpu_seconds, descendants
work = "import sys; data = bytearray(b'x') * (64 << 20); print(flush=True); sys.stdin.read()"
before = cpu_seconds()
with PeakMemory() as memory:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", work], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        print(cpu_seconds() - before, *descendants(__import__("os").getpid()), child.pid)
        begun = time.monotonic()
        while memory.peak - memory.before < 60 and time.monotonic() < begun + 60:
            time.sleep(0.01)  # it is looked at now and then
        child.stdin.close()
print(memory.peak - memory.before)
"""


def test_memory_and_cpu_time_of_children_count() -> None:
    """A child that fills 64 MiB and computes counts in the figures of its parent."""
    ran = run_program("-c", _PARENT, cwd=Path(__file__).parents[2])
    first, grown_mebibytes = ran.stdout.splitlines()
    spent_seconds, pid, expected = first.split()
    assert pid == expected and float(spent_seconds) > 0 and float(grown_mebibytes) >= 60
