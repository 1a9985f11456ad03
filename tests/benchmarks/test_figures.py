"""Figures of the benchmarks mean what their columns say: pairs of one round, limits, targets, contents."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.asynchronous.saving import merge_lives
from benchmarks.digests import digests_row
from benchmarks.machine import page_cache
from benchmarks.machine.process_tree import cpu_seconds, resident_mebibytes
from benchmarks.patterns import fill, is_intact
from benchmarks.resharding import Resharding
from benchmarks.rounds import Measurement, rotated
from benchmarks.s3.rows import object_reshard_row, object_row
from benchmarks.s3.store import LOAD
from benchmarks.targets import async_row, loop_rows, memory_row, peer_rows, plan_row, save_load_row
from benchmarks.workloads import build_state, tensor_specs, total_bytes
from tests.support.crashes import in_lab
from tests.support.programs import run_program


def measured(operation: str, **samples: list[float]) -> Measurement:
    """Of W1, one rank, 1 GiB."""
    return Measurement("W1", 1, operation, 1 << 30, 291, samples=samples)


def test_ratios_are_taken_within_a_round() -> None:
    """A round in which the machine is slow weighs on both sides, not on the ratio."""
    raw = {"raw_read_warm_2_threads": [0.7, 7, 1.4]}
    row = save_load_row(measured("load warm", ours=[1, 10, 2], stock=[6, 60, 12], **raw))
    assert row.ratio is not None and (row.ratio.smallest, row.ratio.largest) == (6.0, 6.0)
    assert row.of_limit == pytest.approx(0.7)
    assert [verdict.met for verdict in row.verdicts] == [True, True]
    (other,) = peer_rows(measured("save", ours=[1.0, 10.0], stock=[2.0, 20.0], safetensors=[0.5, 5.0]))
    assert (other.operation, other.peer_name, other.stock) == ("save, vs safetensors", "safetensors", None)
    assert other.ratio_peer is not None and other.ratio_peer.median == 0.5


@pytest.mark.parametrize(("copy", "met"), [(0.1, True), (0.09, False)])
def test_the_blocking_time_is_judged_against_the_fastest_copy(copy: float, met: bool) -> None:
    """1.3 times the copy at most, half of stock's at most."""
    samples = {"ours_thread": [0.12], "stock": [0.36], "stock_reused": [0.18]}
    samples |= {"memory_copy": [0.1], "memory_copy_2_threads": [copy]}
    row = async_row(measured("async_save", **samples), "thread")
    assert row.ratio is not None and row.ratio.median == pytest.approx(3)
    assert [verdict.met for verdict in row.verdicts] == [met, True]


@pytest.mark.parametrize(("seconds", "met"), [(1.04, True), (1.1, False)])
def test_steps_that_a_loop_loses_are_taken_within_a_round(seconds: float, met: bool) -> None:
    """A loop that takes 4 % longer a step is within the target, one that takes 10 % longer is not."""
    loop = measured("train", no_saves=[1.0], ours_process=[seconds], stock_process=[1.2], stock=[1.25])
    loop.samples["ours_thread"] = [1.1]
    loop.facts["cost_seconds"] = {name: [0.8] for name in loop.samples}
    process, _ = loop_rows(loop)
    assert process.lost == pytest.approx(1 - 1 / seconds) and process.verdicts[0].met == met


def test_a_missed_target_is_said() -> None:
    """Costs have an upper bound; a figure that is not there meets nothing."""
    for mebibytes, met in ((64.0, True), (65.0, False), (math.nan, False)):
        assert memory_row("W1", "save", 1.0, mebibytes, 0.0).verdicts[0].met == met
    for seconds, met in ((1.04, True), (1.06, False)):
        digests = measured("save, digests", ours=[seconds], without=[1.0])
        assert digests_row(digests).verdicts[0].met == met
    for milliseconds, met in ((40, True), (60, False)):
        plan = measured("plan again, sharded", ours=[milliseconds / 1000], stock=[0.4])
        assert plan_row(plan).verdicts[0].met == met


def test_the_fastest_client_of_s3_is_the_limit() -> None:
    """What is not installed is not judged; bytes are judged along the sharded dimension only."""
    samples = {"ours": [1.2], "stock": [6.6], "raw_get_s3fs": [1.1], "raw_get_botocore": [1.0]}
    row = object_row(measured(LOAD, **samples))
    assert row.limit_name == "raw_get_botocore" and row.of_limit == pytest.approx(1 / 1.2)
    assert row.peer is None
    for dim, met in ((0, [False]), (1, [])):
        case = Resharding(2, dim, 1000, {"ours": [1.0], "stock": [3.0]}, {}, {"ours": 1100})
        assert [verdict.met for verdict in object_reshard_row(case).verdicts] == met


def test_rounds_and_lives_keep_their_pairs() -> None:
    """Each contender is first in turn; samples of a second life follow those of the first."""
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    lives = []
    for life in (1.0, 2.0):
        lives.append([measured("async_save", ours_thread=[life], stock=[10 * life])])
        lives[-1][0].others = {"ours_thread": [0.0], "stock": [0.0]}
        lives[-1][0].facts = {"cpu_seconds": {"ours_thread": [life], "stock": [life]}}
    assert merge_lives(lives)[0].samples == {"ours_thread": [1.0, 2.0], "stock": [10.0, 20.0]}


def test_workloads_have_the_sizes_they_are_named_for() -> None:
    """1 GiB in 291 tensors, three more for each with Adam, 20,000 of 16 KiB, four of 512 MiB."""
    counts = {name: len(tensor_specs(name, 1.0)) for name in ("W1", "W1-opt", "W2", "W3")}
    assert counts == {"W1": 291, "W1-opt": 4 * 291, "W2": 20_000, "W3": 4}
    sizes = {name: total_bytes(tensor_specs(name, 1.0)) for name in counts}
    assert sizes["W1"] == pytest.approx(1 << 30, rel=0.01)
    assert (sizes["W2"], sizes["W3"]) == (20_000 << 14, 4 * 512 << 20)


def test_wrong_contents_are_noticed_after_a_load() -> None:
    """Every element is compared, and belongs to its place in the whole tensor."""
    state = build_state("W1-opt", 0.002, rank=0, world_size=1)
    assert state.is_intact()
    state.locals[5][0].view(torch.uint8)[-1] += 1
    assert not state.is_intact()
    whole = torch.empty(64, 96)
    fill(whole, 3, (0, 0))
    shard = whole[16:32, 24:48].contiguous()
    assert is_intact(shard, 3, (16, 24)) and not is_intact(shard, 3, (17, 24))
    assert not is_intact(shard, 4, (16, 24))


def test_page_cache_is_emptied_and_filled(tmp_path: Path) -> None:
    """After `evict` no page of a file is resident, after `warm` every one is."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    page_cache.evict([path])
    assert page_cache.resident_fraction([path]) < 0.02
    page_cache.warm([path])
    assert page_cache.resident_fraction([path]) == 1.0


def _left_out(*workloads: str) -> list[str]:
    sys.modules["torch_checkpointing"] = None  # type: ignore[assignment]
    return peers.not_installed(workloads)


def test_a_package_that_is_missing_is_named() -> None:
    """Neither timed nor an error; the word is for runs of workloads that it would have been in."""
    assert in_lab(_left_out, "W1") == ["torch-checkpointing"]
    assert in_lab(_left_out, "W3") == []


_PARENT = """
import subprocess, sys
from benchmarks.machine.process_tree import PeakMemory, cpu_seconds, descendants
work = "import sys; data = bytearray(b'x') * (64 << 20); print(flush=True); sys.stdin.read()"
before = cpu_seconds()
with PeakMemory() as memory:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", work], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        print(cpu_seconds() - before, *descendants(__import__("os").getpid()), child.pid)
        child.stdin.close()
print(memory.peak - memory.before)
"""


def test_memory_and_processor_time_of_children_count() -> None:
    """A child that fills 64 MiB and computes shows in the figures of its parent."""
    ran = run_program("-c", _PARENT, cwd=Path(__file__).parents[2])
    first, grown_mebibytes = ran.stdout.splitlines()
    spent_seconds, pid, expected = first.split()
    assert pid == expected and float(spent_seconds) > 0 and float(grown_mebibytes) > 60


def test_processes_that_end_while_they_are_looked_at_cost_nothing() -> None:
    """Whatever /proc has of them at that instant."""
    ended = threading.Event()

    def begin_and_end() -> None:
        while not ended.is_set():
            subprocess.run(["true"], check=True)

    thread = threading.Thread(target=begin_and_end)
    thread.start()
    try:
        for _ in range(5):
            assert cpu_seconds() >= 0 and resident_mebibytes() > 0
    finally:
        ended.set()
        thread.join()


def test_other_packages_load_what_they_saved_into_our_tensors(tmp_path: Path) -> None:
    """Each that is installed, durably and not."""
    state = build_state("W2", 0.002, rank=0, world_size=1)
    sides = peers.peer_sides("W2", 1)
    assert {side.name for side in sides} >= {"safetensors", "torch.save"}
    for side in sides:
        for durable in (False, True):
            folder = tmp_path / f"{side.name}-{durable}"
            side.save(state.state_dict, folder, durable)
            state.wipe()
            side.load(state.state_dict, folder)
            assert state.is_intact(), side.name
