"""Loads from a checkpoint into a state dict: the steps of each, and those on columns.

`dcp.engines` chooses the way, once a load; see `docs/design/loading.md`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import time
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import compress
from typing import Any, cast

import msgpack
import torch

from dcp.features.base import ReadWhole, View
from dcp.features.fitted_state import keys_with_empty
from dcp.features.order import view_of
from dcp.features.stateful import GivenState, Stored
from dcp.features.strictness import check_left, pack_left
from dcp.loading.call import LoadCall
from dcp.loading.planner import DefaultLoadPlanner
from dcp.loading.report import LoadReport
from dcp.loading.whole import WholePlanner
from dcp.planners.load.options import LoadAttempt, LoadOptions
from dcp.planners.load.plan import LoadPlan
from dcp.planners.load.selection import Matches, check_matches
from dcp.planners.weight_maps.model_config import model_config
from dcp.progress import reporting
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import causes_of, is_damage
from dcp.ranks.handshake import begin, check_same_checkpoint, told_to_all
from dcp.ranks.options import of_load
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    OptionError,
    PlanError,
    StorageError,
)
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening.folder import saved_by_rank
from dcp.storage.formats.opening.places_near import near_places_told
from dcp.storage.formats.opening.sources import index_at
from dcp.storage.formats.torch.python_values import decode_values
from dcp.storage.geometry.ragged import row_products
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["ColumnLoad", "LoadEngine", "whole_reader"]

_ATTEMPTS = 3


class LoadEngine(ABC):
    """One load: plan what goes where, read it, give objects their state.

    ``planner`` and ``storage`` are None where they are not ours. ``options`` are those of the call,
    over those of the planner.
    """

    stores_later = False
    """Whether values wait for the whole load to succeed."""

    def __init__(
        self,
        ranks: Ranks,
        options: LoadOptions,
        planner: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
    ) -> None:
        self.ranks = ranks
        self.options = options if planner is None else options.over(planner)
        self._given = options
        self._ours = planner
        self._storage = storage
        self._has_given_back = False

    @abstractmethod
    def run(self, targets: GivenState, report: LoadReport) -> None:
        """Find the checkpoint, plan what of it goes where in ``targets``, and fill that; errors are of all
        ranks alike, as in each step."""

    def load(self, targets: GivenState, filled: set[str] | None = None) -> LoadReport:
        """Load into ``targets``; again where the checkpoint was replaced after its index was read.

        ``filled`` are entries that a load which failed may have filled, so that this one must; those that it
        fills are added if it fails. Raises CheckpointConflictError if the checkpoint is replaced again and
        again: it is no damage, for which an older one is taken.
        """
        filled = filled if filled is not None else set()
        with ExitStack() as stack:
            if self._storage is not None:
                with told_to_all(self.ranks):
                    stack.enter_context(self._storage.in_use())
            attempts = 0
            try:
                while (report := self._attempt(targets, filled, attempts := attempts + 1)) is None:
                    pass
            except BaseException:
                targets.take_back()
                raise
            if targets.gives_back and not self._has_given_back:
                try:
                    self.ranks.all_gather("load_state_dict", lambda: self._give_back(targets))
                except BaseException:
                    if self._ours is not None:
                        filled |= self._ours.call.touched - targets.made
                    raise
            return report

    def _attempt(self, targets: GivenState, filled: set[str], attempts: int) -> LoadReport | None:
        """The report; None where another attempt may end better."""
        report = LoadReport(attempts=attempts)
        planner, ranks = self._ours, self.ranks
        if planner is not None:
            attempt = LoadAttempt(
                options=self._given,
                unasked=targets.unasked,
                must_fill=frozenset(filled),
                stores_later=self.stores_later,
            )
            planner.begin_load(ranks.rank, ranks.world_size, attempt)
        try:
            self.run(targets, report)
        except BaseException as error:
            if planner is not None:
                filled |= planner.end_load() - targets.made
            if not isinstance(error, CheckpointError):
                raise
            self._look_again(error, attempts)
            return None
        if planner is not None:
            planner.end_load()
            for session in planner.call.sessions:
                session.done(report, is_coordinator=ranks.is_coordinator)
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

    def fit(self, targets: GivenState, plan: Callable[[], object]) -> None:
        """Call ``plan``, which asks ``targets`` for the state, until it succeeds or nothing else may fit."""
        while True:
            try:
                plan()
            except CheckpointError as error:
                if not targets.fits_after(error):
                    raise
            else:
                return

    def _give_back(self, targets: GivenState) -> bytes:
        planner = self._ours
        if planner is None:
            targets.give_back((), ())
        else:
            targets.give_back(planner.call.untouched_keys, planner.call.new)
        self._has_given_back = True
        return b""


def _is_stale(cause: BaseException) -> bool:
    """Return whether a file has been deleted or replaced on another host since it was opened, as NFS
    says it."""
    return isinstance(cause, StorageError) and cause.errno == errno.ESTALE


class ColumnLoad(LoadEngine):
    """One load on columns: the coordinator reads the index, each rank plans and reads its own part."""

    stores_later = True

    def __init__(
        self, reader: FileSystemReader, planner: DefaultLoadPlanner, ranks: Ranks, options: LoadOptions
    ) -> None:
        super().__init__(ranks, options, planner, reader)
        self._reader = reader
        self._planner = planner
        self._targets = GivenState({})
        self._report = LoadReport()
        self._shared = b""
        self._weights = options.map
        self._view: View | None = None
        self._planned: tuple[LoadPlan, LocalMemory] | None = None

    def run(self, targets: GivenState, report: LoadReport) -> None:
        """Agree, index, patterns, plan, read, store: tensors, and only then the values that are none."""
        ranks, reader, options = self.ranks, self._reader, self.options
        self._targets, self._report, self._view, self._planned = targets, report, None, None
        begun = time.perf_counter()
        reader.reset()  # it may have served another load, before another save
        told = of_load(options, self._planner, reader)
        places = begin(ranks, lambda: reader.place.url, options=told, kinds=targets.kinds)
        self._shared = ranks.broadcast("index", self._read_index)
        if self._shared:
            check_same_checkpoint(ranks, places, lambda: self._fingerprint(places))
        if options.map is not None:  # a config.json beside the weights has sizes
            config = ranks.broadcast("weight map", lambda: json.dumps(model_config(reader.store)).encode())
            self._weights = options.map.beside(json.loads(config))
        report.seconds["index"] = time.perf_counter() - begun
        if options.only is not None or options.exclude is not None:
            ranks.reduce_alike("select", self._select, _agree_on_patterns)
        self.fit(targets, lambda: ranks.reduce_alike("plan", self._plan, self._check_left))
        self._shared = b""  # many tensors' manifest is large, and the read needs memory
        have_objects = ranks.all_gather("read", self._read)
        if reader.may_be_mixed:
            ranks.broadcast("compare", self._compare)
        ranks.all_gather("store", lambda: self._store(alone=not any(have_objects)))

    def fit(self, targets: GivenState, plan: Callable[[], object]) -> None:
        """As `LoadEngine.fit`; objects are asked for their state again."""

        def anew() -> None:
            try:
                plan()
            except CheckpointError:
                self._view = None
                raise

        super().fit(targets, anew)

    def _read_index(self) -> bytes:
        """One commit for all ranks: an overwrite while they start must not give them two.

        Empty where there is nobody to share it with, or each rank has an index of its own.
        """
        reader, alone = self._reader, self.ranks.world_size == 1
        is_asked = reader.place.file is None and (not alone or self.options.map is not None)
        by_rank = is_asked and saved_by_rank(reader.store)
        if by_rank and self.options.map is not None:
            raise OptionError(
                f"{reader.store.url}: each rank has an index of its own here, and a map is about a whole "
                "model; convert the checkpoint first"
            )
        if by_rank:
            return b""
        index = reader.read_index()
        return b"" if alone else encode_manifest(index)

    def _fingerprint(self, places: Sequence[str]) -> bytes:
        """The fingerprint of the checkpoint at this rank's place; what the coordinator read there is not read
        again."""
        ranks, shared = self.ranks, self._shared
        if places[ranks.rank] != places[ranks.coordinator]:
            with near_places_told(self._reader.path, self._reader.open_store):
                shared = encode_manifest(index_at(self._reader.place))
        return blake2b(shared).digest()

    def _set_up(self) -> CheckpointIndex:
        """The index as it is shown, with the planner set up for it: once, because objects are asked for their
        state."""
        if self._view is not None:
            return self._view.index
        reader, ranks = self._reader, self.ranks
        if self._shared and not ranks.is_coordinator:
            reader.use_index(decode_manifest(self._shared))
        view = view_of(reader.read_index(own_rank=ranks.rank), self._weights)
        index, values = view.index, view.index.objects.position
        names = ChainMap(*cast("list[dict[str, int]]", [index.position, values]))
        stored = Stored(names, values, lambda: index, ranks.rank, lambda: keys_with_empty(index))
        self._planner.set_up_planner(
            self._targets.state(stored), LazyMetadata.of(lambda: index), ranks.is_coordinator
        )
        self._planner.adopt()
        self._view = view
        return index

    def _select(self) -> bytes:
        index, call = self._set_up(), self._planner.call
        call.choose(index)
        return bytes(msgpack.packb(dataclasses.astuple(call.matches) if call.matches is not None else None))

    def _plan(self) -> bytes:
        """Plan, and tell what nobody has a place for, if nobody else has (`check_left`)."""
        begun = time.perf_counter()
        index, call, report = self._set_up(), self._planner.call, self._report
        plan, _, memory = call.plan(index)
        self._planned = plan, memory
        report.note_plan(call)
        report.note_source(index)
        report.seconds["plan"] = time.perf_counter() - begun
        if self.options.unexpected == "ignore" or not call.unexpected or self._view is None:
            return b""
        names = _names(index)
        left = pack_left(names, call.unexpected, [*call.lost, *self._view.lost(call.unexpected)])
        if self._shared or self.ranks.world_size == 1:
            return left
        check_left(names, [left])  # an index of this rank alone
        return b""

    def _check_left(self, left: list[bytes]) -> bytes:
        if all(left) and self._view is not None:
            check_left(_names(self._view.index), left, self._view.unmapped)
        return b""

    def _read(self) -> bytes:
        if self._planned is None or self._view is None:
            raise PlanError("a load was not planned")
        reader, call, index = self._reader, self._planner.call, self._view.index
        plan, memory = self._planned
        pieces = plan.pieces
        begun = time.perf_counter()
        volumes = row_products(pieces.lengths, pieces.box_start)
        total = int((volumes * index.itemsizes[index.chunk_tensors[pieces.chunks]]).sum())
        with (
            reporting(self.options.progress, "read", total, show=self.ranks.is_coordinator) as on_bytes,
            reader.engine(reader.read_index(), self.options.verify) as engine,
        ):
            engine.on_bytes = on_bytes
            stats = reader.read_into(engine, *self._view.reads(engine, pieces, memory), memory.tensors)
            _read_values(call, reader, engine, plan)
            for session in call.sessions:
                session.loaded(whole_reader(call, reader, engine))
        self._report.note_reading(stats)
        self._report.seconds["read"] = time.perf_counter() - begun
        return b"\x01" if self._targets.has_objects else b""

    def _compare(self) -> bytes:
        self._reader.check_unchanged()
        return b""

    def _store(self, *, alone: bool) -> bytes:
        """Store the values; where no rank has an object to give its state to, that is all."""
        self._planner.call.store()
        return self._give_back(self._targets) if alone else b""


def whole_reader(call: LoadCall, reader: FileSystemReader, engine: ReadEngine) -> ReadWhole:
    """Reads parts of the engine's checkpoint whole, for features that need the state of all ranks."""

    def read_whole(only: Sequence[str]) -> tuple[Any, dict[str, Path]]:
        whole = WholePlanner(
            only=only,
            exclude=None,
            rename=None,
            dtype=None,
            device=torch.device("cpu"),
            weights_only=call.options.weights_only,
        )
        whole.begin_load(call.rank, call.world_size, LoadAttempt())
        flat: dict[str, Any] = {}
        whole.set_up_planner(flat, LazyMetadata.of(lambda: engine.index))
        plan, _, memory = whole.call.plan(engine.index)
        reader.read_into(engine, *View(engine.index).reads(engine, plan.pieces, memory), memory.tensors)
        _read_values(whole.call, reader, engine, plan)
        return whole.nested(flat), dict(whole.paths)

    return read_whole


def _read_values(call: LoadCall, reader: FileSystemReader, engine: ReadEngine, plan: LoadPlan) -> None:
    """Read the planned values that are no tensors, and give them to the load."""
    objects, fqns = engine.index.objects, plan.object_fqns
    plain = objects.plain[plan.objects]
    is_plain = plain >= 0
    call.take(
        fqns if is_plain.all() else list(compress(fqns, is_plain.tolist())),
        decode_values(list(map(objects.values.__getitem__, plain[is_plain].tolist()))),
    )
    pickled = [objects.fqns[row] for row in plan.objects[~is_plain].tolist()]
    names = compress(fqns, (~is_plain).tolist())
    for fqn, blob in zip(names, reader.read_objects(engine, pickled), strict=True):
        call.take_blob(fqn, blob)


def _names(index: CheckpointIndex) -> list[str]:
    return [*index.fqns, *index.objects.fqns]


def _agree_on_patterns(ranks: list[bytes]) -> bytes:
    matches = [msgpack.unpackb(data) for data in ranks]
    check_matches([Matches(*fields) for fields in matches if fields is not None])
    return b""
