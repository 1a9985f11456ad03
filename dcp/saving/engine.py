"""One way from a state dict on every rank to a committed checkpoint, and the steps that both ways have.

`dcp.engines` chooses the engine, once a save. The training loop, a thread and a process of its own run the
same: what it is made of travels to that process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp.ranks.handshake import begin, check_same_target
from dcp.saving.options import SaveOptions
from dcp.storage.errors import CheckpointError, SaveAbortedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageWriter

    from dcp.planners.save.plan_cache import PlanCache
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["GivesPart", "RankPart", "SaveAttempt", "SaveEngine", "SaveOrder"]

RankPart = Any
"""What a rank has, as the engine takes it: a `RankState`, or for torch's protocol the state dict."""

GivesPart = Callable[[], RankPart]
"""Gives what this rank has. It is asked in the first step, so that its failure reaches all ranks."""


@dataclass
class SaveOrder:
    """What to save and how, as it travels to who carries it out. ``seconds`` are phases that came before.

    ``options.retries`` further attempts follow on storage errors, after ``options.retry_pause_seconds``,
    doubled each time.
    """

    engine: SaveEngine
    options: SaveOptions
    serial: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class SaveEngine(ABC):
    """What makes a part of a rank's state dict, which may be staged, and then saves that.

    ``storage`` is ``writer`` where that is of this package, else None.
    """

    on_columns: bool

    def __init__(self, writer: StorageWriter, storage: FileSystemWriter | None) -> None:
        self.writer = writer
        self.storage = storage

    @abstractmethod
    def part(self, state: dict[str, Any], *, rank: int, world_size: int, is_coordinator: bool) -> RankPart:
        """What rank ``rank`` has, of ``world_size`` that save together."""

    @abstractmethod
    def attempt(
        self, order: SaveOrder, part: GivesPart, ranks: Ranks, cache: PlanCache | None = None
    ) -> SaveAttempt:
        """One attempt, to be run. ``cache``, on all ranks or on none, lets the plan of the save before serve
        again."""


class SaveAttempt(ABC):
    """Every rank says what it has, one plans for all, each writes its share, one commits.

    ``seconds`` by phase and ``size_bytes`` of this rank's tensors are known after `run`.
    """

    def __init__(self, order: SaveOrder, part: GivesPart, ranks: Ranks) -> None:
        self._order = order
        self._part_of = part
        self._storage = order.engine.storage
        self._ranks = ranks
        self._options = order.options
        self._together = order.options.use_collectives
        self._scattered = False
        self._answer = b""
        self.seconds: dict[str, float] = {}
        self.size_bytes = 0

    def run(self) -> Metadata:
        """Plan, write, commit."""
        self._begin()
        if self._together:
            try:
                self._write_together(self._planned())
            except SaveAbortedError:
                with suppress(CheckpointError):  # on no rank it has ended before nothing of it is left
                    self._ranks.barrier("clear up")
                raise
        else:
            self._ranks.all_gather("save", self._by_itself)
        return self._metadata()

    # -- the steps, which each way takes in its own manner ---------------------------------------------------

    @abstractmethod
    def _place(self) -> str:
        """The id."""

    @abstractmethod
    def _manner(self) -> list[str]:
        """What decides which steps follow."""

    @abstractmethod
    def _compared(self) -> dict[str, Any]:
        """Options that must be the same on all ranks."""

    @abstractmethod
    def _local_plan(self) -> bytes:
        """What this rank has to save."""

    @abstractmethod
    def _global_plan(self, parts: list[bytes]) -> list[bytes]:
        """On the coordinator: what each rank has to write."""

    @abstractmethod
    def _write(self, plan: bytes) -> bytes:
        """Write this rank's share; what the commit has to know of it."""

    @abstractmethod
    def _commit(self, parts: list[bytes]) -> bytes:
        """On the coordinator: publish what was written; the answer to all ranks."""

    @abstractmethod
    def _metadata(self) -> Metadata:
        """torch's metadata of what is committed."""

    # -- how they follow each other --------------------------------------------------------------------------

    def _begin(self) -> None:
        manner = self._manner() if self._together else [*self._manner(), "without collectives"]
        places = begin(self._ranks, self._place, manner=manner, options=self._compared())
        if self._together:
            storage = self._storage
            check_same_target(self._ranks, places, lambda: storage.store if storage is not None else None)
        self._scattered = len(set(places)) > 1

    def _part(self) -> RankPart:
        part = self._part_of()
        self.seconds.update(self._order.seconds)  # staging may have ended only now
        return part

    def _plan_together(self) -> bytes:
        return self._ranks.reduce_scatter("plan", self._local_plan, self._global_plan)

    def _planned(self) -> bytes:
        begun = time.perf_counter()
        try:
            plan = self._plan_together()
        except BaseException:
            if self._storage is not None and self._ranks.is_coordinator:
                self._storage.remove_made_root()
            raise
        self.seconds["plan"] = time.perf_counter() - begun
        return plan

    def _write_together(self, plan: bytes) -> None:
        ranks, storage = self._ranks, self._storage
        try:
            self._answer = ranks.reduce_broadcast("write", lambda: self._write(plan), self._commit)
        except BaseException as error:  # an interrupt, too, must not leave files behind
            # By the coordinator alone: by now every rank has reported to it, or was given up. Of what is
            # elsewhere it knows nothing.
            if storage is not None and (ranks.is_coordinator or self._scattered):
                storage.discard()
            is_committed = storage is not None and storage.index is not None
            if ranks.is_coordinator and is_committed and isinstance(error, CheckpointError):
                error.committed = True
                error.add_note("The checkpoint is committed: only the answer did not reach every rank.")
            raise

    def _plan_by_itself(self) -> bytes:
        return self._global_plan([self._local_plan()])[0]

    def _by_itself(self) -> bytes:
        """No plan is exchanged, no rank sees another's failure before the end."""
        plan = self._plan_by_itself()
        try:
            self._answer = self._commit([self._write(plan)])
        except BaseException:
            if self._storage is not None:
                self._storage.discard()
            raise
        return b""
