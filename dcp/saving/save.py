"""Steps of one save: begin, plan, write, commit.

`Save` has the steps in order. `ColumnSave` implements them on columns, and `dcp.engines.protocol_save` for
custom planners and storages. A save runs in the training loop, in a thread, or in a writer process that
receives the pickled save.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp.calls.features import Features, ask, refused
from dcp.planners.columns import SaveColumns, decode_save_columns, encode_save_columns
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.value_digests import ReplicaCheck
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback, reporting
from dcp.ranks.agreement import begin, by_rank, refuse_odd
from dcp.ranks.collectives import Codec, Ranks, retried
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.saving.feature import SaveFeature, save_features
from dcp.storage.engine.write import Observer, WriteColumns, WriteOutcome, assemble_index
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    OptionError,
    PlanError,
    SaveAbortedError,
    StorageError,
    StorageFullError,
    check_flags,
)
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import MAX_PLAIN_SECTION_BYTES
from dcp.storage.formats.opening import open_index
from dcp.storage.formats.plain import encode_plain
from dcp.storage.geometry.strides import Int64
from dcp.storage.packing import pack, unpack
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store
from dcp.storage.threads import unwanted_once
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.writer import FileSystemWriter
from dcp.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageWriter

_OF_WRITERS: Final = ("overwrite", "torch_compatible", "digests", "sync_files", "single_file_per_rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Options of `dcp.save` and `CheckpointManager`, with the manager's ``step`` and ``resumed_from``."""

    step: int | None = None
    resumed_from: Mapping[str, Any] | None = None
    use_collectives: bool = True
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    progress: bool | ProgressCallback | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    map: WeightMap | None = None
    map_must_invert: bool = False
    """True if the checkpoint must be restorable through the inverse of the map."""
    retries: int = 0
    retry_pause_seconds: float = 1.0
    apart: tuple[tuple[str, ...], ...] = ()
    """Patterns of entries for separate files, one tuple for each part. Applies to saves on columns."""

    def check(self) -> None:
        """Raise OptionError for invalid flags and user metadata, before any write."""
        check_flags(use_collectives=self.use_collectives, progress=self.progress)
        if not isinstance(self.user_metadata, Mapping):
            raise OptionError(f"user_metadata must be a dict, not a {type(self.user_metadata).__name__}")
        for key, value in self.user_metadata.items():
            if not isinstance(key, str) or encode_plain(value, limit_bytes=MAX_PLAIN_SECTION_BYTES) is None:
                raise OptionError(
                    f"user_metadata[{key!r}], a {type(value).__name__}, cannot be stored: pass plain data "
                    "(None, numbers, text, bytes, and lists, tuples and dicts of these) with string keys"
                )


_LONGEST_AGREEING_SECONDS = 20.0


class SavingRank(NamedTuple):
    """This rank among the ranks of a save."""

    rank: int
    world_size: int
    is_coordinator: bool


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save on this rank: ``seconds`` by phase, ``attempts`` and ``staged_bytes``."""

    save_id: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    staged_bytes: int = 0


@dataclass(kw_only=True, eq=False)
class Save(ABC):
    """One save and its steps; picklable for a writer process.

    Every rank describes its state, the coordinator plans, every rank writes, and the coordinator commits.
    ``storage`` is ``writer`` if it is dcp's, otherwise None. ``plan_options`` are those of dcp's planner.
    ``seconds`` has earlier phases and ``times`` those of the current attempt.
    """

    writer: StorageWriter
    storage: FileSystemWriter | None
    options: SaveOptions
    plan_options: Mapping[str, Any]
    serial: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    on_columns: ClassVar[bool]
    manner: ClassVar[tuple[str, ...]] = ()
    """Facts that select the steps of the save."""
    outcomes: ClassVar[Codec]
    """Codec of the results of `write`."""

    ranks: Ranks = field(init=False)
    steps: Ranks = field(init=False)
    together: bool = field(init=False)
    given: Callable[[], Any] = field(init=False)
    times: dict[str, float] = field(init=False)
    size_bytes: int = field(init=False)

    # -- for each way to save --------------------------------------------------------------------------------

    @abstractmethod
    def held(self, state: dict[str, Any], at: SavingRank) -> Any:
        """Return this rank's state to stage or save: a `RankState`, or the state dict for custom planners."""

    @abstractmethod
    def plan(self) -> Callable[[], Any]:
        """Plan with the other ranks; the result gives this rank's part, in the next step."""

    @abstractmethod
    def write(self, plan: Any) -> Any:
        """Write this rank's part of the plan; return the facts for the commit."""

    @abstractmethod
    def commit(self, outcomes: list[Any]) -> bytes:
        """Publish the checkpoint on the coordinator; return the answer for all ranks."""

    @abstractmethod
    def metadata(self, answer: bytes) -> Metadata:
        """Return torch's metadata of the checkpoint."""

    # -- the steps -------------------------------------------------------------------------------------------

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by public name."""
        found: dict[str, Any] = {} if self.options.step is None else {"step": self.options.step}
        if self.storage is not None:
            found |= zip(_OF_WRITERS, attrgetter(*_OF_WRITERS)(self.storage), strict=True)
        return {**found, **self.plan_options}

    def run(self, given: Callable[[], Any], ranks: Ranks) -> tuple[Metadata, SaveOutcome]:
        """Save the result of ``given``: this rank's state, or a staged copy.

        ``given`` is called inside a step, so that a failed staging fails the save on all ranks. Passing
        storage errors are retried ``options.retries`` times, on all ranks. The abort of ``ranks`` cancels the
        save.
        """
        self.ranks, self.given = ranks, given
        self.together = self.options.use_collectives
        self.steps = ranks if self.together else Ranks(use_dist=False, is_within=True)
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
            del self.given  # avoids a reference cycle that would keep the tensors

    def _attempt(self, number: int) -> tuple[Metadata, SaveOutcome]:
        if number > 1:
            self.writer.reset()
        self.times, self.size_bytes = {}, 0
        begun, answer = time.perf_counter(), b""
        alone = () if self.together else ("without collectives",)
        manner, notes = (*self.manner, *alone), None if alone else self.options.user_metadata
        places = begin(self.ranks, self._place, manner=manner, options=self.agreed, notes=notes)
        if self.together:
            if len(set(places)) > 1:
                _check_same_target(self.ranks, places, None if self.storage is None else self.storage.store)
            answer = self._save()
        else:  # without collectives, a rank does not see other ranks' failures before the end
            self.ranks.all_gather("save", lambda: self._save()[:0])
        seconds = self.times | {"save": time.perf_counter() - begun}
        save_id = str(getattr(self.writer, "save_id", ""))
        return self.metadata(answer), SaveOutcome(save_id, seconds, number, self.size_bytes)

    def _place(self) -> str:
        return self.storage.store.url if self.storage else str(getattr(self.writer, "checkpoint_id", ""))

    def _save(self) -> bytes:
        """Plan, write and commit; return the commit's answer. A failed save leaves no files."""
        ranks, begun = self.ranks, time.perf_counter()
        plan = None
        try:
            plan = self.plan()
            self.times["plan"] = time.perf_counter() - begun
            answer: bytes = self.steps.reduce_broadcast(
                "write", lambda: self.write(plan()), self.commit, sent=self.outcomes
            )
            return answer
        except BaseException as error:  # also after an interrupt, files must be removed
            # Only on the coordinator, after every rank has reported or was given up. An interrupted other
            # rank could remove files of a commit in progress.
            if ranks.is_coordinator or not self.together:
                self._clear_up(error, is_planned=plan is not None)
            if self.together and isinstance(error, SaveAbortedError):
                with suppress(CheckpointError):  # all ranks wait for the clean-up
                    ranks.all_gather("clear up", bytes)
            raise

    def _clear_up(self, error: BaseException, *, is_planned: bool) -> None:
        storage = self.storage
        if storage is None:
            return
        if not is_planned:
            storage.remove_made_root()
            return
        storage.discard()
        is_committed = storage.index is not None and self.ranks.is_coordinator
        if is_committed and isinstance(error, CheckpointError) and not error.committed:
            error.committed = True
            error.add_note("The checkpoint is committed, but not all ranks received the confirmation.")

    def provenance(self) -> dict[str, Any]:
        """Return facts about the job, for the manifest."""
        resumed = self.options.resumed_from
        return {
            "world_size": self.ranks.world_size,
            "torch_version": str(torch.__version__),
            "dcphub_version": __version__,
            **({} if resumed is None else {"resumed_from": dict(resumed)}),
        }


def _is_passing(error: CheckpointError) -> bool:
    """Return whether another attempt may succeed; False for a full disk. The class of the error is equal on
    all ranks.
    """
    if error.committed or isinstance(error, CheckpointConflictError | StorageFullError):
        return False
    return isinstance(error, StorageError)


def agreeing_seconds(timeout_seconds: float) -> float:
    """Return the part of a timeout reserved for trainers to agree on the end, after their writer processes
    gave up.
    """
    return min(_LONGEST_AGREEING_SECONDS, timeout_seconds / 4)


class RankPlan(NamedTuple):
    """Plan of one rank: the save id, its rows to write, and cached parts of the plan."""

    save_id: str
    writes: WriteColumns
    kept: bytes = b""


_ROWS: Final = attrgetter(*(each.name for each in fields(WriteColumns)))


def _decode_plan(data: bytes) -> RankPlan:
    save_id, rows, kept = unpack(data)
    return RankPlan(save_id, WriteColumns(*rows), kept)


@dataclass(kw_only=True, eq=False)
class ColumnSave(Save):
    """Save by dcp's planner and storage, without a plan object for each tensor.

    The planner itself is not pickled; the options have its decisions. Digests of replicas are computed during
    the local plan. All ``times`` are stored in the manifest, by rank: ``plan`` includes ``local_plan``,
    ``digests`` (exchange) and ``global_plan`` (coordinator).
    """

    storage: FileSystemWriter
    planner: DefaultSavePlanner
    kinds: Sequence[type[SaveFeature]] = ()

    on_columns: ClassVar = True
    plans: ClassVar = Codec(lambda plan: pack(plan._replace(writes=_ROWS(plan.writes))), _decode_plan)
    outcomes: ClassVar = Codec(lambda done: pack(vars(done)), lambda data: WriteOutcome(**unpack(data)))

    features: Features[SaveFeature] = field(init=False)
    local: RankState | None = field(init=False)
    planned: GlobalSavePlan | None = field(init=False)
    check: ReplicaCheck = field(init=False)
    parts: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.features = save_features(self.kinds, self.options, self.storage)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("planner", "features")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, planner=DefaultSavePlanner())  # unused in the writer process
        self.__post_init__()

    def held(self, state: dict[str, Any], at: SavingRank) -> RankState:
        """Return the columns, tensors and values of ``state``."""
        planner = self.planner
        planner.rank = at.rank
        planner.set_up_planner(
            state_dict=state, storage_meta=self.storage.storage_meta(), is_coordinator=at.is_coordinator
        )
        local = planner.create_local_columns(digests=False)
        held: RankState = self.features.through("held", RankState, local, at)
        return held

    # -- begin -----------------------------------------------------------------------------------------------

    def agreed(self) -> dict[str, Any]:
        """Return the options of the save, storage, planner and features."""
        return self.features.agreed(super().agreed())

    # -- plan ------------------------------------------------------------------------------------------------

    def plan(self) -> Callable[[], RankPlan]:
        """Plan with the other ranks."""
        self.start()
        return self.steps.reduce_scatter(
            "plan", self.local_plan, self.global_plan, sent=self.parts, reply=self.plans
        )

    def start(self) -> None:
        """Clear the previous attempt. A single rank has no replicas to compare."""
        self.local, self.planned = None, None
        # decode names and paths once, because most ranks have the same
        self.parts = Codec(encode_save_columns, partial(decode_save_columns, cache={}))
        is_alone = not self.together or self.ranks.world_size == 1
        self.check = "off" if is_alone else self.plan_options["replica_check"]

    def local_state(self) -> RankState:
        """Set up the storage and return this rank's state."""
        if self.local is None:
            storage, ranks = self.storage, self.ranks
            storage.set_up_storage_writer(
                ranks.is_coordinator, rank=ranks.rank, use_collectives=self.together
            )
            if ranks.is_coordinator or not self.together:
                storage.prepare()
            self.local = self.given()
            self.times.update(self.seconds)  # staging may have ended only now
            self.size_bytes = self.local.memory.size_bytes
        return self.local

    def local_plan(self) -> SaveColumns:
        """Return the rows that this rank can write."""
        begun, local = time.perf_counter(), self.local_state()
        if self.check != "off":
            self.local = local = local.with_digests(self.check)
        self.times["local_plan"] = self.times.get("local_plan", 0.0) + time.perf_counter() - begun
        return local.columns

    def global_plan(self, parts: list[SaveColumns], *, with_sets: bool = False) -> list[RankPlan]:
        """Plan for all ranks, on the coordinator."""
        begun = time.perf_counter()
        try:
            self.planned = plan_save(
                parts,
                dedup_to_lowest_rank=self.plan_options["dedup_save_to_lowest_rank"],
                split_bytes=self.plan_options["split_bytes"],
                check_replicas=self.check != "off",
                with_sets=with_sets,
            )
        except PlanError as error:
            for _, call in self.features.having("explained"):
                better = call(PlanError | None, error, parts)
                if better is not None:
                    raise better from error
            raise
        self.times["global_plan"] = time.perf_counter() - begun
        return [RankPlan(self.storage.save_id, writes) for writes in self.planned.writes]

    # -- write -----------------------------------------------------------------------------------------------

    def write(self, plan: RankPlan) -> WriteOutcome:
        """Write the rows of ``plan``, seen by the features' observers."""
        local, storage, ranks = self.local_state(), self.storage, self.ranks
        storage.save_id, columns = plan.save_id, plan.writes
        begun = time.perf_counter()
        memory, objects = local.memory, local.encoded_objects(columns.objects)
        groups, observers = self._groups(local), dict[str, Observer]()
        for feature, call in self.features.having("observer"):
            observer = call(Observer | None, local, columns)
            if observer is not None:
                observer.name, observers[feature.name] = feature.name, observer
        total = int(columns.payload_bytes(memory.dtype_codes)[columns.own_rows].sum())
        with reporting(self.options.progress, "write", total, show=ranks.is_coordinator) as on_bytes:
            watched = ranks.watching(on_bytes)
            try:
                with unwanted_once(ranks.abort):
                    outcome = storage.write_columns(
                        columns, memory, objects, watched, groups, [*observers.values()]
                    )
            except StorageError:
                ranks.check_called_off()  # a cancellation has ended the request
                raise
        self.times["write"] = time.perf_counter() - begun
        found = {}
        for name, observer in observers.items():  # the decoded form
            found[name] = ask(name, "finish", lambda one: unpack(pack(one.finish())), object, observer)
        return replace(outcome, found=found, seconds=self.times, traffic=storage.traffic)

    def _groups(self, local: RankState) -> Int64 | None:
        """Return the file number of each local tensor, from the first feature with groups."""
        count = len(local.memory.tensors)
        for feature, call in self.features.having("groups"):
            numbers = call(np.ndarray | None, local)
            if numbers is None:
                continue
            if numbers.shape != (count,):
                raise refused(feature.name, "groups", f"expected {count} numbers")
            found: Int64 = numbers.astype(np.int64)
            return found
        return None

    # -- commit ----------------------------------------------------------------------------------------------

    def commit(self, outcomes: list[WriteOutcome]) -> bytes:
        """Publish the index on the coordinator."""
        plan, begun = self.planned, time.perf_counter()
        if plan is None:
            raise PlanError("the save was not planned")
        index = assemble_index(plan.index, plan.writes, outcomes)
        rows = np.concatenate(list(map(attrgetter("chunks"), plan.writes)))
        for feature, call in self.features.having("manifest"):
            before, name = dict(index.provenance), feature.name
            found = [outcome.found.get(name) for outcome in outcomes]
            index = call(CheckpointIndex, index, rows, found)
            changed = {*before, *index.provenance} - {name}
            if any(before.get(key) != index.provenance.get(key) for key in changed):
                raise refused(name, "manifest", "changed the provenance of another feature")
        provenance = self.provenance()
        provenance["rank_seconds"] = list(map(attrgetter("seconds"), outcomes))
        traffic = list(map(attrgetter("traffic"), outcomes))
        if any(traffic):
            provenance["rank_traffic"] = traffic
        provenance["assemble_seconds"] = time.perf_counter() - begun
        self.storage.publish(index, self.options.user_metadata, provenance)
        return b""

    def metadata(self, answer: bytes) -> Metadata:
        """Return torch's metadata, built from the index on access."""
        index, store = self.storage.index, self.storage.store
        rank = None if self.together else self.ranks.rank
        return LazyMetadata.of(
            lambda: index if index is not None else open_index(store, rank=rank), self.storage.storage_meta()
        )


# -- one place for all ranks ---------------------------------------------------------------------------------


def _check_same_target(ranks: Ranks, places: Sequence[str], store: Store | None) -> None:
    """Raise PlanError on all ranks unless all save to the same place.

    ``places`` are the ids from `begin`. If they differ, the coordinator creates an empty file in its
    ``store`` and the other ranks look for it. ``store`` is None for custom storages.
    """
    if len(set(places)) == 1:
        return
    is_new = False

    def leave() -> bytes:
        nonlocal is_new
        if store is None:
            return b""
        is_new = not store.exists()
        store.make_root()
        name = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        store.create(name, durable=False).finish()
        return name.encode()

    name = ranks.broadcast("compare", leave).decode()
    if not name:
        return

    def look() -> bytes:
        return b"\x01" if store is None or store.stat(name) is not None else b""

    try:
        found = ranks.all_gather("compare", look)
    finally:
        if ranks.is_coordinator and store is not None:
            try:  # an error is reported in the next step; a later save removes the file
                store.delete_all([name])
                if is_new:  # the save creates the folder again
                    store.remove_root()
            except Exception as error:  # noqa: BLE001 - as said
                logging.getLogger(__name__).warning("%s could not be removed: %s", name, error)
    odd = [rank for rank, there in enumerate(found) if not there]
    text = f"the ranks save to different places: {by_rank(places)}. Pass one checkpoint_id on all ranks"
    refuse_odd(ranks, "compare", odd, text)
