"""What ranks agree on from step to step: alike, at the same step, and within a bounded time."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcp.background.session import own_channel
from dcp.manager.coordination.agreement import Agreement, RankAgreement, Votes
from dcp.ranks import channel
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from dcp.storage.errors import CheckpointError, CollectiveTimeoutError
from tests.support.crashes import Group, in_lab, run_groups
from tests.support.ranks import RankRaised, run_ranks


def agreement(rank: int, world_size: int, *, timeout_seconds: float = 120.0, every: int = 1) -> RankAgreement:
    """One over a gloo group of its own, on the store of the default group."""
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore("agreement", group.get_group_store())
    own = Channel.own_gloo(store, rank, world_size, timeout_seconds=timeout_seconds)
    return RankAgreement(own, timeout_seconds=timeout_seconds, every_steps=every)


def _votes_of_single_ranks(rank: int, world_size: int, every: int) -> list[tuple[int, Votes]]:
    """Rank 1 wants to stop at step 3, rank 0 a save by the clock at step 5: what is agreed, and when."""
    agreed = agreement(rank, world_size, every=every)
    seen = []
    for step in range(1, 12):
        votes = Votes(stop=rank == 1 and step == 3, time=rank == 0 and step in (5, 6, 7, 8, 9))
        result = agreed.exchange(step, votes)
        if result != Votes():
            seen.append((step, result))
    agreed.close(wait=True)
    agreed.close(wait=True)
    return seen


def test_what_one_rank_wants_is_agreed_by_all_at_the_next_step() -> None:
    """All ranks see it at the same step; a granted vote is not cast again at once."""
    expected = [
        (4, Votes(stop=True)),
        (6, Votes(time=True)),
        (8, Votes(time=True)),
        (10, Votes(time=True)),
    ]
    assert run_ranks(3, _votes_of_single_ranks, 1) == [expected] * 3


def test_exchanging_less_often_agrees_later() -> None:
    """With every fifth step: cast at 1, 6, 11, agreed at the step after; what came at 3 only was not cast."""
    assert run_ranks(2, _votes_of_single_ranks, 5) == [[(7, Votes(time=True))]] * 2


def _straggler(rank: int, world_size: int) -> tuple[list[float], bool, bool]:
    agreed = agreement(rank, world_size)
    waited = []
    for step in range(3):
        if rank == 0 and step == 1:
            dist.recv(dist_token := _token(), src=1)
            assert dist_token.item() == 1
        begun = time.monotonic()
        agreed.exchange(step, Votes())
        waited.append(time.monotonic() - begun)
        if rank == 1 and step == 1:  # rank 0 is still before its step 1: this was reached without it
            dist.send(_token(1), dst=0)
    one, none = agreed.any_rank(rank == 1), agreed.any_rank(False)
    agreed.close(wait=True)
    return waited, one, none


def _token(value: int = 0) -> Any:
    import torch

    return torch.tensor([value])


def test_no_rank_waits_for_the_stragglers_of_its_step() -> None:
    """Rank 1 passes a step that rank 0 begins only when told so by rank 1: waiting would be a deadlock."""
    for _, one, none in run_ranks(2, _straggler):
        assert (one, none) == (True, False)


def _different_steps(rank: int, world_size: int) -> None:
    agreed = agreement(rank, world_size)
    try:
        agreed.exchange(10 + rank, Votes())
        agreed.exchange(11 + rank, Votes())
    finally:
        agreed.close(wait=True)


def test_ranks_at_different_steps_are_told_so() -> None:
    """One rank skipping a step is found at the next exchange, by all, with the numbers."""
    results = run_ranks(3, _different_steps, failures=True)
    for rank, result in enumerate(results):
        assert isinstance(result, RankRaised)
        assert result.type_name == CheckpointError.__name__
        assert f"rank {rank} did so for {10 + rank}, others for 10 to 12" in result.message


def _dies(rank: int, world_size: int) -> str:
    agreed = agreement(rank, world_size)
    agreed.exchange(1, Votes())
    agreed.exchange(2, Votes())
    if rank == 1:
        os._exit(0)
    try:
        agreed.exchange(3, Votes())
        agreed.exchange(4, Votes())
    except CollectiveTimeoutError as error:
        agreed.close(wait=False)
        return str(error)
    return "no error"


def _late(rank: int, world_size: int) -> str:
    agreed = agreement(rank, world_size)
    agreed.exchange(1, Votes())
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    if rank == 1:
        store.wait(["told"], timedelta(seconds=120))
        agreed.close(wait=False)
        return ""
    try:
        agreed.exchange(2, Votes())
        agreed._ranks.timeout_seconds = 1.0
        agreed.exchange(3, Votes())
    except CollectiveTimeoutError as error:
        agreed.close(wait=False)
        return str(error)
    finally:
        store.set("told", "1")
    return "no error"


def _endings() -> list[list[Any]]:
    groups = [Group(3, _dies), Group(2, _late)]
    return [[ending.value if not ending.hung else "hung" for ending in group] for group in run_groups(groups)]


def test_a_dead_and_a_late_rank_are_named_by_the_others() -> None:
    """Killed: at once. Silent: after the timeout. Either way the error says which rank, and ends the wait."""
    dead, late = in_lab(_endings)
    for rank in (0, 2):
        assert "rank 1 of 3 died or did not answer" in dead[rank]
    assert "rank 1 of 2 died or did not answer" in late[0]


def _lives(rank: int, world_size: int) -> bool:
    first = own_channel(Ranks(use_dist=True, timeout_seconds=30.0))
    assert first is not None
    first.store.set(f"address/{rank}", "of the first life")
    channel._group_serial.clear()  # a new process counts its groups anew
    second = own_channel(Ranks(use_dist=True, timeout_seconds=30.0))
    assert second is not None
    seen = bool(second.store.check([f"address/{rank}"]))
    dist.barrier()  # who ends before takes its connections along, and the other may still make its own
    return seen


def test_workers_that_are_started_again_do_not_see_what_the_dead_left_in_the_store() -> None:
    """torchrun keeps its store: without it the groups would try to connect to processes that are gone."""
    assert run_ranks(2, _lives) == [False, False]


def test_alone_everything_is_agreed_at_once() -> None:
    """One rank needs nobody."""
    alone = Agreement()
    assert alone.exchange(5, Votes(stop=True)) == Votes(stop=True)
    assert alone.any_rank(True)
    assert not alone.any_rank(False)
    alone.close(wait=True)
