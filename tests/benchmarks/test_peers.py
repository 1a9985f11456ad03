from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.asynchronous.saving import CONTENDERS, AsyncSpec, async_peers, save_in_one_life
from benchmarks.rounds import Measurement
from benchmarks.targets import peer_rows
from benchmarks.workloads import build_state


def test_other_packages_load_what_they_saved_into_our_tensors(tmp_path: Path) -> None:
    """Each that is installed, durably and not; what they leave is one folder each."""
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
    assert len(list(tmp_path.iterdir())) == 2 * len(sides)


def test_what_is_not_installed_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither timed nor an error; the word is for runs of workloads that it would have been in."""
    monkeypatch.setattr(peers, "find_spec", lambda package: None if package == "torch_checkpointing" else 1)
    assert [side.name for side in peers.peer_sides("W1", 1)] == ["safetensors", "torch.save"]
    assert async_peers("W1", 1) == ()
    for workload in ("W1", "W2", "async", "async-W2"):
        assert peers.not_installed(["R1", workload]) == ["torch-checkpointing"]
    assert peers.not_installed(["R1", "W3", "async-W4", "loop"]) == []


def test_others_have_rows_of_their_own() -> None:
    """Ratios above 1 mean that ours is faster, pair by pair in a round."""
    measured = Measurement("W1", 1, "save", 1 << 30, 291)
    measured.samples = {"ours": [1.0, 10.0], "stock": [2.0, 20.0], "safetensors": [0.5, 5.0]}
    (row,) = peer_rows(measured)
    assert (row.operation, row.peer_name, row.stock) == ("save, vs safetensors", "safetensors", None)
    assert row.ratio_peer is not None and (row.ratio_peer.smallest, row.ratio_peer.largest) == (0.5, 0.5)
    measured.samples = {"ours_process": [2.0], "torch-checkpointing": [3.0]}
    (row,) = peer_rows(measured, "process")
    assert row.operation == "save, process writer, vs torch-checkpointing"
    assert row.ratio_peer is not None and row.ratio_peer.median == 1.5


@pytest.mark.exhaustive
def test_others_save_asynchronously_what_loads_again(tmp_path: Path) -> None:
    """The first life loads each contender's first checkpoint, and compares it byte by byte."""
    spec = AsyncSpec("W2", 0.002, 1, 0, tmp_path, ("ours_thread", *async_peers("W2", 1)))
    first, later, committed = save_in_one_life(0, 1, print, spec)
    for name in spec.contenders:
        assert 0 < later.samples[name][0] <= committed.samples[name][0]
    assert not set(async_peers("W2", 1)) & set(CONTENDERS)
    assert first.samples.keys() >= set(spec.contenders) and not list(tmp_path.iterdir())
