"""Signs of life of the ranks, in the key-value store of their group: for when collectives do not work.

Who gives an operation up says so there; who waits looks there, and answers. Those who do not answer within a
while are lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Presence", "grace_seconds"]

_LONGEST_GRACE_SECONDS = 3.0
_SHORTEST_GRACE_SECONDS = 0.5
_LOOKS_PER_GRACE = 6.0


def grace_seconds(timeout_seconds: float) -> float:
    """Return how much of the time that a rank waits for the others is for their signs of life."""
    return max(_SHORTEST_GRACE_SECONDS, min(_LONGEST_GRACE_SECONDS, timeout_seconds / 4))


class Presence:
    """Signs that the ranks of one operation give each other by ``store``.

    ``keys`` are prefixes that the ranks share: that of the operation; and before it that of the group's first
    exchange, if that is not over yet, because some ranks may still be in it.
    """

    def __init__(self, store: Any, rank: int, world_size: int, keys: Sequence[str]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._keys = tuple(keys)

    @staticmethod
    def pause_seconds(timeout_seconds: float) -> float:
        """Return how often a waiting rank looks here: often enough to answer in time."""
        return grace_seconds(timeout_seconds) / _LOOKS_PER_GRACE

    def is_given_up(self) -> bool:
        """Return whether another rank has said so. RuntimeError where the store is gone, as everywhere
        here."""
        return any(self._store.check([f"{key}/abort"]) for key in self._keys)

    def give_up(self) -> None:
        """Say so to the others, who would else learn of it by their timeout."""
        for key in self._keys:
            self._store.set(f"{key}/abort", "1")

    def show(self) -> None:
        """Give a sign of life."""
        for key in self._keys:
            self._store.set(f"{key}/alive/{self._rank}", "1")

    def come(self, step: str) -> None:
        """Say that this rank waits in ``step``."""
        self._store.set(f"{self._keys[-1]}/late/{step}/{self._rank}", "1")

    def is_called(self, step: str) -> bool:
        """Return whether a rank asks who has come to ``step``."""
        return bool(self._store.check([f"{self._keys[-1]}/late/{step}"]))

    def call(self, step: str) -> None:
        """Ask who has come to ``step``; who waits there says so within a `pause_seconds`."""
        self._store.set(f"{self._keys[-1]}/late/{step}", "1")

    def absent(self, step: str) -> list[int]:
        """Return the ranks that have not said that they wait in ``step``, for the lowest of those that have;
        for the others none, so that not every rank asks for every other."""
        absent: list[int] = []
        for rank in range(self._world_size):
            if rank != self._rank and not self._store.check([f"{self._keys[-1]}/late/{step}/{rank}"]):
                absent.append(rank)
            elif rank < self._rank:
                return []
        return absent

    def missing(self, deadline: float) -> list[int]:
        """Return the ranks that have given no sign of life until ``deadline`` (`time.monotonic`)."""
        missing = list(range(self._world_size))
        while True:
            missing = [rank for rank in missing if not self._is_there(rank)]
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.02)

    def _is_there(self, rank: int) -> bool:
        return any(self._store.check([f"{key}/alive/{rank}"]) for key in self._keys)
