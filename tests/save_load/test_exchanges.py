"""Messages between ranks. Internal: their number and their memory, which a load does not show."""

from __future__ import annotations

import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.ranks import channel
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Codec, Ranks
from tests.support.ranks import run_ranks


@pytest.fixture
def _no_earlier_works() -> Iterator[None]:
    """Hide exchanges of earlier tests."""
    earlier, channel._works[:] = channel._works[:], []
    yield
    channel._works.extend(earlier)


@pytest.mark.usefixtures("_no_earlier_works")
def test_exit_waits_for_threads_that_drop_tensors() -> None:
    """Exit waits for threads that hold a finished work's tensors, whose release after it would abort."""
    with tempfile.TemporaryDirectory() as folder:
        group = Channel.own_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1, timeout_seconds=60).group
        factor = torch.ones(3, requires_grad=True)
        tensor = torch.zeros(3)
        other_owner = [factor * tensor]  # autograd has a reference that is not Python's
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
    """The next exchange drops the tensors of a finished one, which may be large for a save's plans."""
    with tempfile.TemporaryDirectory() as folder:
        group = Channel.own_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1, timeout_seconds=60).group
        for tensor in (torch.zeros(3), torch.zeros(3)):
            Channel.begun(group.allreduce([tensor]), tensor).wait()
            deadline = time.monotonic() + 60
            while any(one.is_held() for one in channel._works) and time.monotonic() < deadline:
                time.sleep(0.001)
        assert [one.tensors for one in channel._works] == [(tensor,)]


def long_messages(rank: int, world_size: int) -> tuple[int, bytes, int]:
    """Exchange with a long message on rank 0, which has little memory, and an invalid message to rank 1."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)
    message = bytes(24 << 20) if rank == 0 else b"%d" % rank
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (85 << 20), limits[1]))
    try:
        gathered = ranks.reduce_broadcast("probe", lambda: message, lambda parts: b"%d" % len(parts[0]))
        scattered = ranks.reduce_scatter("probe", lambda: message, lambda parts: [message, *parts[1:]])()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    odd = ranks.reduce_scatter("probe", bytes, lambda parts: [b"1", b"x", b"", b""], reply=Codec(bytes, int))
    with pytest.raises(dcp.RankFailedError, match=r"invalid literal.*rank[ s]+1"):
        ranks.all_gather("probe", lambda: b"%d" % odd() if rank < 2 else b"")
    return int(gathered), scattered[:10], len(scattered)


def test_the_coordinators_long_message_is_received_once() -> None:
    """The coordinator's long message to itself, such as shared values, is received once, not per rank."""
    results = run_ranks(4, long_messages)
    assert results[0] == (24 << 20, bytes(10), 24 << 20)
    assert results[1:] == [(24 << 20, b"%d" % rank, 1) for rank in (1, 2, 3)]


def exchanges(rank: int, world_size: int, root: str) -> list[int]:
    """Count the collectives of four saves by one writer, of a load into plain values, and of one into an
    object. In the third save one rank has lost its plan."""
    torch.manual_seed(0)  # ranks reused from earlier tests have drawn different numbers
    model, waits = torch.nn.Linear(8, 8), [0]
    writer = dcp.FileSystemWriter(root, sync_files=False)

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is Ranks._wait.__code__:
            waits[-1] += 1

    def act(call: Any, *args: Any, **options: Any) -> None:
        sys.setprofile(count)
        try:
            call(*args, **options)
        finally:
            sys.setprofile(None)
        waits.append(0)

    for number in range(4):
        if (number, rank) == (2, 1):
            writer = dcp.FileSystemWriter(root, sync_files=False)
        writer.reset(f"{root}/{number}")
        act(dcp.save, {"model": model.state_dict(), "step": number}, storage_writer=writer)
    act(dcp.load, {"model": model.state_dict(), "step": 0}, checkpoint_id=f"{root}/3")
    act(dcp.load, {"model": model, "step": 0}, checkpoint_id=f"{root}/3")
    return waits[:-1]


def test_saves_and_loads_take_few_exchanges(tmp_path: Path) -> None:
    """A save with a known plan exchanges no plan. A load exchanges handshake, index, plan, end of reading and
    values, and once more for objects. Most exchanges are a gather and a broadcast."""
    for first, again, forgot, last, plain, into_object in run_ranks(3, exchanges, str(tmp_path / "x")):
        assert min(first, forgot) > again == last
        assert (plain, into_object) == (9, 11)
