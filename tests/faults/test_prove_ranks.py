"""A proof on several ranks of which one dies, or cannot tell what it has: all others are told why."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.ranks.collectives import Ranks
from tests.support.crashes import Group, in_lab, run_groups
from tests.support.ranks import run_ranks
from tests.support.versions import save_version, seen_by_dcp, version_state

Told = tuple[list[str], list[int], str]
"""Of an exception: its classes, the ranks that it names, its text."""


def told(root: Path, state: dict[str, Any]) -> Told | bool:
    """What a rank hears of the proof: whether all is the same, or why nobody knows."""
    try:
        return bool(dcp.prove(state, root, timeout_seconds=60).ok)
    except dcp.CheckpointError as error:
        ranks = error.facts.get("ranks") or getattr(error, "ranks", [])
        return [cls.__name__ for cls in type(error).__mro__], list(ranks), str(error)


def killed_at(rank: int, world_size: int, root: Path, victim: int, at: int) -> Told | bool:
    """The victim is killed at its ``at``-th exchange."""
    numbers, wait = itertools.count(1), Ranks._wait

    def killed(ranks: Ranks, work: Any) -> None:
        if rank == victim and next(numbers) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(ranks, work)

    Ranks._wait = killed  # type: ignore[assignment, method-assign]
    return told(root, version_state(1))


@pytest.mark.parametrize(
    ("victim", "exchanges"),
    [
        (1, [2]),
        *(pytest.param(victim, itertools.count(1), marks=pytest.mark.exhaustive) for victim in range(3)),
    ],
)
def test_a_rank_that_is_killed_at_an_exchange_is_named(
    tmp_path: Path, victim: int, exchanges: Iterable[int]
) -> None:
    """By all others, long before the timeout, unless they have all that they need; the checkpoint stays."""
    save_version(tmp_path / "x", 1)
    found = 0
    for at in exchanges:
        (endings,) = in_lab(run_groups, [Group(3, killed_at, (tmp_path / "x", victim, at))])
        if not endings[victim].killed:
            break  # there were no more exchanges
        found += 1
        for ending in (each for rank, each in enumerate(endings) if rank != victim):
            assert ending.raised is None, ending.raised.traceback_text
            if ending.value is not True:
                classes, ranks, text = ending.value
                assert "CollectiveTimeoutError" in classes and victim in ranks, (at, text)
            assert ending.seconds < 40, (at, ending)
    assert found
    assert seen_by_dcp(tmp_path / "x") == 1


def spoiled(rank: int, world_size: int, root: Path, what: str) -> Told | bool:
    """Rank 1 has something that cannot be saved, or asks for another place, or the bytes are damaged."""
    state = version_state(1)
    if what == "state" and rank == 1:
        state["model"] = {"w": torch.zeros(3, device="meta")}
    return told(root.with_name(what) if what.startswith("other") and rank == 1 else root, state)


@pytest.mark.parametrize(
    ("what", "error", "ranks"),
    [
        ("state", "RankFailedError", [1]),
        ("other", "PlanError", [1]),
        ("other, which is none", "CheckpointNotFoundError", [1]),
        ("nothing", "CheckpointNotFoundError", None),
        ("manifest", "CorruptCheckpointError", None),
    ],
)
def test_what_one_rank_cannot_do_is_an_error_on_all(
    tmp_path: Path, what: str, error: str, ranks: list[int] | None
) -> None:
    """The same one, which says which rank has it."""
    root = tmp_path / "x"
    save_version(root, 1)
    save_version(tmp_path / "other", 1)
    if what == "manifest":
        data = bytearray((root / "manifest.msgpack").read_bytes())
        data[len(data) // 2] ^= 1
        (root / "manifest.msgpack").write_bytes(data)
    found = run_ranks(3, spoiled, tmp_path / "none" if what == "nothing" else root, what)
    for one in found:
        assert isinstance(one, tuple), one
        assert error in one[0], one
        assert ranks is None or one[1] == ranks, one


@pytest.mark.exhaustive
def test_one_checkpoint_may_have_several_names(tmp_path: Path) -> None:
    """As a mount has on several hosts."""
    save_version(tmp_path / "x", 1)
    (tmp_path / "other").symlink_to(tmp_path / "x")
    assert run_ranks(3, spoiled, tmp_path / "x", "other") == [True] * 3
