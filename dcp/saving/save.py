"""One save: begin, plan, write, commit.

`Save` has the steps in their order. What each of them does on columns is in `dcp.saving.columns`, by planners
and storages of other packages in `dcp.torch_protocol.save`; `dcp.engines` chooses, once a save. The training
loop runs a save itself, the thread writer in the background, the process writer in a process to which the
save travels.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from dcp.ranks.collectives import Codec, LocalSteps, Ranks
from dcp.ranks.handshake import begin, check_same_target
from dcp.ranks.retrying import retried
from dcp.saving.options import SaveOptions
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    SaveAbortedError,
    StorageError,
    StorageFullError,
)
from dcp.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageWriter

    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["Held", "Save", "SaveOutcome", "SavingRank", "agreeing_seconds"]

_LONGEST_AGREEING_SECONDS = 20.0

Held = Any
"""What a rank has: a `RankState`, or for planners of other packages the state dict."""


class SavingRank(NamedTuple):
    """A rank among those that save together."""

    rank: int
    world_size: int
    is_coordinator: bool


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save on this rank: ``seconds`` by phase, ``attempts`` (1 if it worked at once) and
    ``staged_bytes`` of this rank's tensors."""

    save_id: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    staged_bytes: int = 0


@dataclass(kw_only=True, eq=False)
class Save(ABC):
    """One save, as it travels to who carries it out, and its steps.

    Every rank says what it has, one plans for all, each writes its share, one commits. ``storage`` is
    ``writer`` where that is of this package, else None. ``seconds`` are phases that came before; those of an
    attempt are ``times``.
    """

    writer: StorageWriter
    storage: FileSystemWriter | None
    options: SaveOptions
    serial: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    on_columns: ClassVar[bool]
    manner: ClassVar[tuple[str, ...]] = ()
    """What decides which steps follow."""
    outcomes: ClassVar[Codec]
    """Packs what `write` returns for the way to the coordinator."""

    ranks: Ranks = field(init=False)
    steps: Ranks | LocalSteps = field(init=False)
    together: bool = field(init=False)
    given: Callable[[], Held] = field(init=False)
    times: dict[str, float] = field(init=False)
    size_bytes: int = field(init=False)

    # -- for each way to save --------------------------------------------------------------------------------

    @abstractmethod
    def held(self, state: dict[str, Any], at: SavingRank) -> Held:
        """Return what this rank has, of its state dict, to be staged or saved."""

    @abstractmethod
    def agreed(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks."""

    @abstractmethod
    def plan(self) -> Callable[[], Any]:
        """Plan with the other ranks; the result gives this rank's part, in the next step."""

    @abstractmethod
    def write(self, plan: Any) -> Any:
        """Write this rank's part of the plan; return what the commit has to know of it."""

    @abstractmethod
    def commit(self, outcomes: list[Any]) -> bytes:
        """Publish what was written, on the coordinator; the answer goes to all ranks."""

    @abstractmethod
    def metadata(self, answer: bytes) -> Metadata:
        """Return torch's metadata of what is committed."""

    # -- the steps -------------------------------------------------------------------------------------------

    def run(self, given: Callable[[], Held], ranks: Ranks) -> tuple[Metadata, SaveOutcome]:
        """Save what ``given`` gives: what this rank has, or a staged copy of it.

        It is asked within a step, so that a failed staging of one rank fails the save on all. Storage errors
        that may pass are followed by ``options.retries`` further attempts, which end alike on all ranks,
        since all see the same error. The abort of ``ranks`` calls the save off.
        """
        self.ranks, self.given = ranks, given
        self.together = self.options.use_collectives
        self.steps = ranks if self.together else LocalSteps()
        try:
            return retried(
                self._attempt,
                f"the save to {getattr(self.writer, 'checkpoint_id', None)}",
                retries=self.options.retries,
                pause_seconds=self.options.retry_pause_seconds,
                is_passing=_is_passing,
                wait=(ranks.abort or threading.Event()).wait,
            )
        finally:
            del self.given  # it may refer to this save: a cycle would keep the tensors for a while

    def _attempt(self, number: int) -> tuple[Metadata, SaveOutcome]:
        if number > 1:
            self.writer.reset()
        self.times, self.size_bytes = {}, 0
        begun, answer = time.perf_counter(), b""
        alone = () if self.together else ("without collectives",)
        places = begin(self.ranks, self._place, manner=(*self.manner, *alone), options=self.agreed)
        if self.together:
            if len(set(places)) > 1:
                check_same_target(self.ranks, places, None if self.storage is None else self.storage.store)
            answer = self._save()
        else:  # no plan is exchanged, and no rank sees another's failure before the end
            self.ranks.all_gather("save", self._save_alone)
        seconds = self.times | {"save": time.perf_counter() - begun}
        save_id = str(getattr(self.writer, "save_id", ""))
        return self.metadata(answer), SaveOutcome(save_id, seconds, number, self.size_bytes)

    def _place(self) -> str:
        if self.storage is not None:
            return self.storage.store.url
        return str(getattr(self.writer, "checkpoint_id", ""))

    def _save(self) -> bytes:
        """Plan, write and commit; return the answer of the commit. What fails leaves nothing behind."""
        ranks, storage, begun = self.ranks, self.storage, time.perf_counter()
        plan = None
        try:
            plan = self.plan()
            self.times["plan"] = time.perf_counter() - begun
            answer: bytes = self.steps.reduce_broadcast(
                "write", lambda: self.write(plan()), self.commit, sent=self.outcomes
            )
            return answer
        except BaseException as error:  # an interrupt, too, must not leave files behind
            # By the coordinator alone: by now every rank has reported to it, or was given up. Another rank,
            # which was interrupted, would take away what the coordinator is just committing.
            if storage is not None and (ranks.is_coordinator or not self.together):
                self._clear_up(storage, error, is_planned=plan is not None)
            if self.together and isinstance(error, SaveAbortedError):
                with suppress(CheckpointError):  # on no rank it has ended before nothing of it is left
                    ranks.barrier("clear up")
            raise

    def _save_alone(self) -> bytes:
        self._save()
        return b""

    def _clear_up(self, storage: FileSystemWriter, error: BaseException, *, is_planned: bool) -> None:
        if not is_planned:
            storage.remove_made_root()
            return
        storage.discard()
        is_committed = storage.index is not None and self.ranks.is_coordinator
        if is_committed and isinstance(error, CheckpointError) and not error.committed:
            error.committed = True
            error.add_note("The checkpoint is committed: only the answer did not reach every rank.")

    def provenance(self) -> dict[str, Any]:
        """Return facts about the job, for the manifest."""
        facts = {
            "world_size": self.ranks.world_size,
            "torch_version": str(torch.__version__),
            "dcphub_version": __version__,
        }
        if self.options.resumed_from is not None:
            facts["resumed_from"] = dict(self.options.resumed_from)
        return facts


def _is_passing(error: CheckpointError) -> bool:
    """Test whether another attempt may succeed: not on a full disk, which stays full until space is freed.

    The class of the error is the same on all ranks."""
    if error.committed or isinstance(error, CheckpointConflictError | StorageFullError):
        return False
    return isinstance(error, StorageError)


def agreeing_seconds(timeout_seconds: float) -> float:
    """Return how much of the time that a save may wait for other ranks is for the trainers, who agree on how
    it ended once their writer processes have given up."""
    return min(_LONGEST_AGREEING_SECONDS, timeout_seconds / 4)
