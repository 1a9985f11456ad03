"""Messages between ranks. Internal: how many are exchanged, and what memory they take, no load can show."""

from __future__ import annotations

import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.ranks import channel
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from tests.support.ranks import run_ranks


@pytest.fixture
def _no_earlier_works() -> Iterator[None]:
    """Exchanges of earlier tests are put aside."""
    earlier = channel._works[:]
    channel._works.clear()
    yield
    channel._works.extend(earlier)


@pytest.mark.usefixtures("_no_earlier_works")
def test_the_end_waits_for_threads_that_drop_tensors() -> None:
    """A complete work that Python has let go, and a thread of the group's has not: where that drops it after
    the interpreter has ended, the process aborts."""
    with tempfile.TemporaryDirectory() as folder:
        group = Channel.own_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1, timeout_seconds=60).group
        factor = torch.ones(3, requires_grad=True)
        tensor = torch.zeros(3)
        other_owner = [factor * tensor]  # autograd has a reference that is none of Python's
        for sent in (tensor, torch.zeros(3)):
            work = Channel.begun(group.allreduce([sent]), sent)
            work.wait()
        assert [one.work is None for one in channel._works] == [True, False]
        dropped = threading.Timer(0.3, other_owner.clear)
        dropped.start()
        channel._let_works_go()
        assert not other_owner
        dropped.join()


@pytest.mark.usefixtures("_no_earlier_works")
def test_finished_exchanges_are_forgotten() -> None:
    """With the next one their tensors are gone: of a save's plans they may be large."""
    with tempfile.TemporaryDirectory() as folder:
        group = Channel.own_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1, timeout_seconds=60).group
        for tensor in (torch.zeros(3), torch.zeros(3)):
            Channel.begun(group.allreduce([tensor]), tensor).wait()
            deadline = time.monotonic() + 60
            while any(one.is_held() for one in channel._works) and time.monotonic() < deadline:
                time.sleep(0.001)
        assert [one.tensors for one in channel._works] == [(tensor,)]


def long_message_of_the_coordinator(rank: int, world_size: int) -> tuple[int, bytes, int]:
    """Rank 0 has a long message to take part with, and then one to keep, and memory for little more."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)
    message = bytes(48 << 20) if rank == 0 else b"%d" % rank
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def reduce(parts: list[bytes]) -> list[bytes]:
        return [message, *parts[1:]]

    if rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (170 << 20), limits[1]))
    try:
        gathered = ranks.reduce_broadcast("probe", lambda: message, lambda parts: b"%d" % len(parts[0]))
        scattered = ranks.reduce_scatter("probe", lambda: message, reduce)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return int(gathered), scattered[:10], len(scattered)


def test_the_coordinators_own_message_does_not_make_the_others_as_long() -> None:
    """What it tells itself, such as all values that ranks share, is not received once for each rank."""
    results = run_ranks(4, long_message_of_the_coordinator)
    assert results[0] == (48 << 20, bytes(10), 48 << 20)
    assert results[1:] == [(48 << 20, b"%d" % rank, 1) for rank in (1, 2, 3)]


def exchanges_of_loads(rank: int, world_size: int, root: str) -> tuple[int, int]:
    """How many collectives a load takes into plain values, and into an object."""
    torch.manual_seed(0)  # ranks that served other tests before have drawn different numbers
    model = torch.nn.Linear(8, 8)
    dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=root)
    waits: list[None] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is Ranks._wait.__code__:
            waits.append(None)

    sys.setprofile(count)
    try:
        dcp.load({"model": model.state_dict(), "step": 0}, checkpoint_id=root)
        plain = len(waits)
        dcp.load({"model": model, "step": 0}, checkpoint_id=root)
    finally:
        sys.setprofile(None)
    return plain, len(waits) - plain


def test_a_load_takes_few_exchanges(tmp_path: Path) -> None:
    """Each is a moment at which all ranks have to have a core: the handshake, the index, the plan, the end of
    reading, the values; and one more where objects are given their state. All but that of the index are a
    gather and a broadcast."""
    assert run_ranks(3, exchanges_of_loads, str(tmp_path / "x")) == [(9, 11)] * 3
