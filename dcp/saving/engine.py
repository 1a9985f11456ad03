"""Steps of one save, from a state dict on every rank to a committed checkpoint.

`dcp.engines` chooses the engine, once a save. The training loop, a thread and a process of its own run the
same: what it is made of travels to that process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dcp.ranks.collectives import BYTES, Codec
from dcp.ranks.handshake import begin, check_same_target
from dcp.saving.options import SaveOptions
from dcp.storage.errors import CheckpointError, SaveAbortedError
from dcp.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageWriter

    from dcp.planners.save.plan_cache import PlanCache
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["GivesPart", "RankPart", "SaveAttempt", "SaveEngine", "SaveOrder", "provenance_of"]

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
    """Makes a part of a rank's state dict, which may be staged, and then saves that.

    ``storage`` is ``writer`` where that is of this package, else None.
    """

    on_columns: bool

    def __init__(self, writer: StorageWriter, storage: FileSystemWriter | None) -> None:
        self.writer = writer
        self.storage = storage

    @abstractmethod
    def part(self, state: dict[str, Any], *, rank: int, world_size: int, is_coordinator: bool) -> RankPart:
        """Return what rank ``rank`` has, of ``world_size`` that save together."""

    @abstractmethod
    def attempt(
        self, order: SaveOrder, part: GivesPart, ranks: Ranks, cache: PlanCache | None = None
    ) -> SaveAttempt:
        """One attempt, to be run. ``cache``, on all ranks or on none, lets the plan of the save before serve
        again."""


class SaveAttempt(ABC):
    """Every rank says what it has, one plans for all, each writes its share, one commits.

    ``seconds`` by phase and ``size_bytes`` of this rank's tensors are known after `run`. ``codecs`` pack, for
    the way between ranks, what a rank has, its part of the plan, and its outcome.
    """

    codecs: tuple[Codec, Codec, Codec] = (BYTES, BYTES, BYTES)

    def __init__(self, order: SaveOrder, part: GivesPart, ranks: Ranks) -> None:
        self._order = order
        self._part_of = part
        self._storage = order.engine.storage
        self._ranks = ranks
        self._options = order.options
        self._together = order.options.use_collectives
        self._answer = b""
        self.seconds: dict[str, float] = {}
        self.size_bytes = 0

    def run(self) -> Metadata:
        """Begin, plan, write, commit."""
        is_scattered = self._begin()
        if not self._together:
            self._ranks.all_gather("save", self._save_alone)
            return self._metadata()
        try:
            self._save_together(is_scattered)
        except SaveAbortedError:
            with suppress(CheckpointError):  # on no rank it has ended before nothing of it is left
                self._ranks.barrier("clear up")
            raise
        return self._metadata()

    # -- the steps, which each way takes in its own manner ---------------------------------------------------

    @abstractmethod
    def _manner(self) -> list[str]:
        """Return what decides which steps follow."""

    @abstractmethod
    def _compared(self) -> dict[str, Any]:
        """Return options that must be the same on all ranks; asked within the first step."""

    @abstractmethod
    def _local_plan(self) -> Any:
        """Return what this rank has to save."""

    @abstractmethod
    def _global_plan(self, parts: list[Any]) -> Sequence[Any]:
        """On the coordinator: what each rank has to write."""

    @abstractmethod
    def _write(self, plan: Any) -> Any:
        """Write this rank's share; what the commit has to know of it."""

    @abstractmethod
    def _commit(self, parts: list[Any]) -> bytes:
        """On the coordinator: publish what was written; the answer to all ranks."""

    @abstractmethod
    def _metadata(self) -> Metadata:
        """torch's metadata of what is committed."""

    def _plan_again(self) -> Any:
        """This rank's part of the plan of the save before, where that serves again; else None."""
        return None

    # -- how they follow each other --------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Compare what the ranks are about; whether the id has another name on some of them."""
        ranks, storage = self._ranks, self._storage

        def place() -> str:
            if storage is not None:
                return storage.store.url
            return str(getattr(self._order.engine.writer, "checkpoint_id", ""))

        manner = self._manner() if self._together else [*self._manner(), "without collectives"]
        places = begin(ranks, place, manner=manner, options=self._compared)
        if self._together:
            check_same_target(ranks, places, lambda: storage.store if storage is not None else None)
        return len(set(places)) > 1

    def _part(self) -> RankPart:
        part = self._part_of()
        self.seconds.update(self._order.seconds)  # staging may have ended only now
        return part

    def _save_together(self, is_scattered: bool) -> None:
        ranks, storage, begun = self._ranks, self._storage, time.perf_counter()
        local, planned, outcome = self.codecs
        try:
            known = self._plan_again()
            plan = (lambda: known) if known is not None else ranks.reduce_scatter(
                "plan", self._local_plan, self._global_plan, sent=local, reply=planned
            )
        except BaseException:
            if storage is not None and ranks.is_coordinator:
                storage.remove_made_root()
            raise
        self.seconds["plan"] = time.perf_counter() - begun
        try:
            self._answer = ranks.reduce_broadcast(
                "write", lambda: self._write(plan()), self._commit, sent=outcome
            )
        except BaseException as error:  # an interrupt, too, must not leave files behind
            # By the coordinator alone: by now every rank has reported to it, or was given up. Of what is
            # elsewhere it knows nothing.
            if storage is not None and (ranks.is_coordinator or is_scattered):
                storage.discard()
            is_committed = storage is not None and storage.index is not None
            if ranks.is_coordinator and is_committed and isinstance(error, CheckpointError):
                error.committed = True
                error.add_note("The checkpoint is committed: only the answer did not reach every rank.")
            raise

    def _save_alone(self) -> bytes:
        """No plan is exchanged, no rank sees another's failure before the end."""
        plan = self._plan_again()
        if plan is None:
            plan = self._global_plan([self._local_plan()])[0]
        try:
            self._answer = self._commit([self._write(plan)])
        except BaseException:
            if self._storage is not None:
                self._storage.discard()
            raise
        return b""


def provenance_of(ranks: Ranks, options: SaveOptions) -> dict[str, Any]:
    """Facts about the job that ``ranks`` belong to, for the manifest."""
    facts = {
        "world_size": ranks.world_size,
        "torch_version": str(torch.__version__),
        "dcphub_version": __version__,
    }
    if options.resumed_from is not None:
        facts["resumed_from"] = dict(options.resumed_from)
    return facts
