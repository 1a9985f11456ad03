"""Loads from a checkpoint into a state dict: the steps of each, and those on columns.

`dcp.engines` chooses the way, once a load; see `docs/design/loading.md`.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from dcp.calls.arguments import check_top_level
from dcp.loading.call import LoadAttempt, LoadCall
from dcp.loading.feature import Features, LoadFeature, Stored, Target, View
from dcp.loading.report import LoadReport
from dcp.loading.whole import Whole
from dcp.planners.load.options import LoadOptions
from dcp.planners.load.plan import LoadPlan
from dcp.planners.load.selection import Matches, check_matches
from dcp.progress import reporting
from dcp.ranks.collectives import Ranks, begin, check_same_checkpoint, raise_on_all_ranks
from dcp.ranks.exchanges import causes_of, is_damage
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import CheckpointConflictError, CheckpointError, PlanError, StorageError
from dcp.storage.formats.index import Path
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening import index_at, naming_near_places, saved_by_rank
from dcp.storage.geometry.strides import row_products
from dcp.storage.packing import pack, unpack
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.destinations import read_into
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.reader import FileSystemReader

if TYPE_CHECKING:
    from dcp.default_planner import DefaultLoadPlanner

__all__ = ["ColumnLoad", "LoadEngine", "read_whole"]

_ATTEMPTS = 3
_LENGTH_BYTES = 4
_COMPARED = ("only", "exclude", "dtype", "allow_partial_load", "weights_only")
_COMPARED_OF_PLANNERS = ("flatten_state_dict", "flatten_sharded_tensors")


class LoadEngine(ABC):
    """One load: plan what goes where, read it, give objects their state.

    ``planner`` and ``storage`` are None where they are not ours. ``options`` are those of the call,
    over those of the planner.
    """

    defers_values = False
    """Values wait for the whole load to succeed."""

    def __init__(
        self,
        ranks: Ranks,
        options: LoadOptions,
        planner: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
        features: Sequence[type[LoadFeature]],
    ) -> None:
        self.ranks = ranks
        self._given = options
        self.options = options if planner is None else options.over(planner)
        self.features = Features(features, self.options)
        self._ours = planner
        self._storage = storage
        self._has_given_back = False

    def target(self, state_dict: dict[str, Any]) -> Target:
        """Return the target of a load into ``state_dict``. Raises OptionError for a value without entries."""
        check_top_level(state_dict)
        target: Target = self.features.through("target", Target, Target(state_dict))
        return target

    @abstractmethod
    def run(self, target: Target, report: LoadReport) -> None:
        """Find the checkpoint, plan what of it goes where in ``target``, and fill that; errors are of all
        ranks alike, as in each step."""

    def load(self, target: Target, filled: set[str] | None = None) -> LoadReport:
        """Load into ``target``; again where the checkpoint was replaced after its index was read.

        ``filled`` are entries that a load which failed may have filled, so that this one must; those that it
        fills are added if it fails. Raises CheckpointConflictError if the checkpoint is replaced again and
        again: it is no damage, for which an older one is taken.
        """
        filled = filled if filled is not None else set()
        with ExitStack() as stack:
            if self._storage is not None:
                with raise_on_all_ranks(self.ranks):
                    stack.enter_context(self._storage.in_use())
            attempts = 0
            try:
                while (report := self._attempt(target, filled, attempts := attempts + 1)) is None:
                    pass
            except BaseException:
                target.take_back()
                raise
            if target.gives_back and not self._has_given_back:
                try:
                    self.ranks.all_gather("load_state_dict", partial(self._give_back, target))
                except BaseException:
                    if self._ours is not None:
                        filled |= self._ours.call.touched - target.made
                    raise
            return report

    def _attempt(self, target: Target, filled: set[str], attempts: int) -> LoadReport | None:
        """Return the report; None where another attempt may end better."""
        report = LoadReport(attempts=attempts)
        planner, ranks = self._ours, self.ranks
        if planner is not None:
            attempt = LoadAttempt(
                options=self._given,  # a planner may set its own until it is set up
                unasked=target.unasked,
                must_fill=frozenset(filled),
                defers_values=self.defers_values,
            )
            planner.begin_load(ranks.rank, ranks.world_size, attempt, self.features)
        self.features.begin()
        try:
            self.run(target, report)
        except BaseException as error:
            if planner is not None:
                filled |= planner.end_load() - target.made
            if not isinstance(error, CheckpointError):
                raise
            self._look_again(error, attempts)
            return None
        if planner is not None:
            planner.end_load()
        if self._storage is not None:
            report.storage = self._storage.traffic
        return report

    def _look_again(self, error: CheckpointError, attempts: int) -> None:
        """Raise ``error``, or what it means, unless another attempt may end better."""
        causes, storage = causes_of(error), self._storage
        if storage is None or not all(is_damage(cause) or _is_stale(cause) for cause in causes):
            raise error

        def look() -> bytes:
            if not storage.was_replaced():
                return b""
            if attempts < _ATTEMPTS:
                return b"\x01"
            place = storage.place.url
            raise CheckpointConflictError(
                f"{place} was replaced while it was being read, in each of {attempts} attempts; load again "
                f"when no job saves there, and give each save its own id. The last attempt: {error}",
                path=place,
            ) from error

        is_replaced = bool(self.ranks.broadcast("look again", look))
        if not is_replaced and (attempts == _ATTEMPTS or not any(map(_is_stale, causes))):
            raise error

    def agreed(self) -> dict[str, Any]:
        """Return options that must be the same on all ranks, because the outcome would differ by rank.

        ``rename`` is not among them: stages of a pipeline may number their layers on their own. What planners
        and storages of other packages make of options is not known.
        """
        options, planner, storage = self.options, self._ours, self._storage
        found: dict[str, Any] = {}
        if planner is not None:
            found |= {name: getattr(options, name) for name in _COMPARED}
            found |= {name: getattr(planner, name) for name in _COMPARED_OF_PLANNERS}
        for name in ("only", "exclude"):  # in any order; one string is one pattern
            if isinstance(found.get(name), list | tuple | set | frozenset):
                patterns = sorted(found[name])
                found[name] = patterns[0] if len(patterns) == 1 else patterns
        if storage is not None:
            found["verify"] = options.verify or storage.verify
        return self.features.agreed(found)

    def fit(self, target: Target, plan: Callable[[], object]) -> None:
        """Call ``plan``, which asks ``target`` for the state, until it succeeds or nothing else may fit."""
        while True:
            try:
                plan()
            except CheckpointError as error:
                if not target.fits_after(error):
                    raise
            else:
                return

    def findings(self, *, is_shared: bool) -> bytes:
        """Return the findings of features in the plan of this rank, for `judge`; empty for none."""
        return self.features.packed("findings", is_shared=is_shared)

    def judge(self, parts: Sequence[bytes]) -> bytes:
        """Raise what the findings of all ranks mean."""
        if any(parts):
            found = [unpack(part) if part else {} for part in parts]
            for feature, ask in self.features.having("judge", idle=True):
                ask(object, [unpack(own[feature.name]) if feature.name in own else None for own in found])
        return b""

    def _give_back(self, target: Target) -> bytes:
        planner = self._ours
        if planner is None:
            target.give_back((), ())
        else:
            target.give_back(planner.call.untouched_keys, planner.call.new)
        self._has_given_back = True
        return b""


def _is_stale(cause: BaseException) -> bool:
    """Return whether a file has been deleted or replaced on another host since it was opened, as NFS
    says it."""
    return isinstance(cause, StorageError) and cause.errno == errno.ESTALE


class ColumnLoad(LoadEngine):
    """One load on columns: the coordinator reads the index, each rank plans and reads its own part."""

    defers_values = True

    def __init__(
        self,
        reader: FileSystemReader,
        planner: DefaultLoadPlanner,
        ranks: Ranks,
        options: LoadOptions,
        features: Sequence[type[LoadFeature]],
    ) -> None:
        super().__init__(ranks, options, planner, reader, features)
        self._reader = reader
        self._planner = planner
        self._target = Target({})
        self._report = LoadReport()
        self._manifest = b""
        self._beside: dict[str, Any] = {}
        self._view: View | None = None
        self._is_set_up = False
        self._planned: tuple[LoadPlan, LocalMemory] | None = None

    def run(self, target: Target, report: LoadReport) -> None:
        """Agree, index, patterns, plan, read, store: tensors, and only then the values that are none."""
        ranks, reader, options = self.ranks, self._reader, self.options
        self._target, self._report, self._view, self._is_set_up = target, report, None, False
        begun = time.perf_counter()
        reader.reset()  # it may have served another load, before another save
        agreed, kinds = (self.agreed, target.kinds) if ranks.world_size > 1 else (None, None)
        places = begin(ranks, self._place, options=agreed, kinds=kinds)
        shared = ranks.broadcast("index", self._read_index)
        size = _LENGTH_BYTES + int.from_bytes(shared[:_LENGTH_BYTES], "big")
        self._beside = unpack(shared[_LENGTH_BYTES:size]) if size > _LENGTH_BYTES else {}
        self._manifest = shared[size:]
        if self._manifest:
            check_same_checkpoint(ranks, places, partial(self._fingerprint, places))
        report.seconds["index"] = time.perf_counter() - begun
        if options.only is not None or options.exclude is not None:
            ranks.reduce_alike("select", self._select, _agree_on_patterns)
        self.fit(target, self._plan_together)
        self._manifest = b""  # many tensors' manifest is large, and the read needs memory
        have_objects = ranks.all_gather("read", self._read)
        if reader.may_be_mixed:
            ranks.broadcast("compare", self._compare)
        ranks.all_gather("store", partial(self._store, alone=not any(have_objects)))

    def _place(self) -> str:
        return self._reader.place.url

    def _read_index(self) -> bytes:
        """Read the index of one commit for all ranks: an overwrite while they start must not give them two.

        Before it stands the data that features have read beside it. The index is left out where one rank
        loads alone, or each has an index of its own.
        """
        reader, alone, manifest = self._reader, self.ranks.world_size == 1, b""
        if alone or reader.place.file is not None or not saved_by_rank(reader.store):
            index = reader.read_index()
            manifest = b"" if alone else encode_manifest(index)
        packed = self.features.packed("beside", reader)
        return len(packed).to_bytes(_LENGTH_BYTES, "big") + packed + manifest

    def _fingerprint(self, places: Sequence[str]) -> bytes:
        """Return the fingerprint of the checkpoint at this rank's place; what the coordinator read there is
        not read again."""
        ranks, manifest = self.ranks, self._manifest
        if places[ranks.rank] != places[ranks.coordinator]:
            with naming_near_places(self._reader.path, self._reader.open_store):
                manifest = encode_manifest(index_at(self._reader.place))
        return blake2b(manifest).digest()

    def _set_up(self) -> View:
        """Return the checkpoint as it is shown, with the planner set up for it.

        Once a plan, because objects are asked for their state.
        """
        reader, ranks = self._reader, self.ranks
        if self._view is None:
            if self._manifest and not ranks.is_coordinator:
                reader.use_index(decode_manifest(self._manifest))
            view = View(reader.read_index(own_rank=ranks.rank))
            for feature, ask in self.features.having("view"):
                own = self._beside.get(feature.name)
                view = ask(View, view, None if own is None else unpack(own))
            self._view = view
        view = self._view
        if not self._is_set_up:
            index, values = view.index, view.index.objects.position
            names = ChainMap(*cast("list[dict[str, int]]", [index.position, values]))
            state = self._target.state(Stored(names, values, lambda: index, ranks.rank))
            self._planner.set_up_planner(state, LazyMetadata.of(lambda: index), ranks.is_coordinator)
            self._planner.adopt().view = view
            self._is_set_up = True
        return view

    def _select(self) -> bytes:
        view, call = self._set_up(), self._planner.call
        call.choose(view.index)
        return pack(dataclasses.astuple(call.matches) if call.matches is not None else None)

    def _plan_together(self) -> None:
        try:
            self.ranks.reduce_alike("plan", self._plan, self.judge)
        finally:
            self._is_set_up = False

    def _plan(self) -> bytes:
        begun = time.perf_counter()
        view, call = self._set_up(), self._planner.call
        plan, _, memory = call.plan(view.index)
        self._planned = plan, memory
        self._report.seconds["plan"] = time.perf_counter() - begun
        return self.findings(is_shared=bool(self._manifest) or self.ranks.world_size == 1)

    def _read(self) -> bytes:
        if self._planned is None or self._view is None:
            raise PlanError("a load was not planned")
        reader, call, index = self._reader, self._planner.call, self._view.index
        plan, memory = self._planned
        pieces = plan.pieces
        begun = time.perf_counter()
        with ExitStack() as stack, reader.engine(reader.read_index(), self.options.verify) as engine:
            if self.options.progress:
                volumes = row_products(pieces.lengths, pieces.box_start)
                total = int((volumes * index.itemsizes[index.chunk_tensors[pieces.chunks]]).sum())
                show = self.ranks.is_coordinator
                engine.on_bytes = stack.enter_context(
                    reporting(self.options.progress, "read", total, show=show)
                )
            read_into(engine, *self._view.reads(engine, pieces, memory), memory.tensors)
            call.read_values(reader, engine, plan)
            self.features.each("loaded", partial(read_whole, call, reader, engine))
        self._report.note(call, index, reader.stats)
        self._report.seconds["read"] = time.perf_counter() - begun
        return b"\x01" if self._target.has_objects else b""

    def _compare(self) -> bytes:
        self._reader.check_unchanged()
        return b""

    def _store(self, *, alone: bool) -> bytes:
        """Store the values; where no rank has an object to give its state to, that is all."""
        self._planner.call.store()
        self.features.each("done", self._report, is_coordinator=self.ranks.is_coordinator)
        return self._give_back(self._target) if alone else b""


def read_whole(
    call: LoadCall, reader: FileSystemReader, engine: ReadEngine, only: Sequence[str]
) -> tuple[Any, dict[str, Path]]:
    """Read parts of the engine's checkpoint whole: see `dcp.loading.feature.ReadWhole`."""
    view, whole = call.view or View(engine.index), Whole(only=only)
    index = view.index
    state = whole.state(Stored((), (), lambda: index, call.rank))
    options = LoadOptions(rename=whole.stored, weights_only=call.options.weights_only)
    none = Features((), options)
    part = LoadCall(state, LoadAttempt(), options, call.rank, call.world_size, none, flattens=False)
    plan, _, memory = part.plan(index)
    read_into(engine, *view.reads(engine, plan.pieces, memory), memory.tensors)
    part.read_values(reader, engine, plan)
    return whole.nested(), dict(whole.paths)


def _agree_on_patterns(ranks: list[bytes]) -> bytes:
    check_matches([Matches(*fields) for part in ranks if (fields := unpack(part)) is not None])
    return b""
