"""Loads on columns: our planner and our storage, with no objects by tensor; see `docs/design/loading.md`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import ChainMap
from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

import msgpack

from dcp.loading.engine import LoadEngine
from dcp.loading.fitted_state import keys_with_empty
from dcp.loading.mapped import mapped_fills
from dcp.loading.objects import load_objects
from dcp.loading.report import LoadReport
from dcp.loading.rescaling import rescale
from dcp.loading.targets import GivenState, Stored
from dcp.planners.columns import LoadColumns
from dcp.planners.load.options import LoadOptions
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.planners.load.selection import Matches, check_matches
from dcp.planners.load.unexpected import check_left, pack_left
from dcp.planners.weight_maps.mapped_index import MappedIndex, map_all
from dcp.planners.weight_maps.model_config import model_config
from dcp.progress import reporting
from dcp.ranks.collectives import Ranks
from dcp.ranks.handshake import begin, check_same_checkpoint
from dcp.ranks.options import of_load
from dcp.storage.engine.reading.requests import ByteRuns
from dcp.storage.errors import CheckpointError, OptionError, PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening.folder import saved_by_rank
from dcp.storage.formats.opening.places_near import near_places_told
from dcp.storage.formats.opening.sources import index_at
from dcp.storage.geometry.ragged import row_products
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["ColumnLoad"]


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
        self._ready: CheckpointIndex | None = None
        self._weights = options.map
        self._mapped: MappedIndex | None = None
        self._planned: tuple[CheckpointIndex, LoadColumns, LocalMemory] | None = None

    def plan(self, targets: GivenState, report: LoadReport) -> None:
        """Index, patterns, plan; what nobody takes."""
        self._targets = targets
        self._ready = self._planned = None
        begun = time.perf_counter()
        self._reader.reset()  # it may have served another load, before another save
        chosen = self.options.only is not None or self.options.exclude is not None
        places = begin(
            self.ranks,
            lambda: self._reader.place.url,
            options=of_load(self.options, self._planner, self._reader),
            kinds=targets.kinds,
        )
        shared = self.ranks.broadcast("index", self._read_index)
        if shared:
            check_same_checkpoint(self.ranks, places, lambda: self._fingerprint(shared, places))
        if self.options.map is not None:
            config = self.ranks.broadcast("weight map", self._read_config)
            self._weights = self.options.map.beside(json.loads(config))
        report.seconds["index"] = time.perf_counter() - begun
        if chosen:
            self.ranks.reduce_alike("select", lambda: self._select(shared), _agree_on_patterns)

        def plan() -> None:
            try:
                self.ranks.reduce_alike("plan", lambda: self._plan(shared, report), self._check_left)
            except CheckpointError:
                self._ready = None
                raise

        self.plan_fitting(targets, plan)

    def read(self, report: LoadReport) -> None:
        """Tensors, and only then the values that are none."""
        have_objects = self.ranks.all_gather("read", lambda: self._read(report))
        if self._reader.may_be_mixed:
            self.ranks.broadcast("compare", self._compare)
        self.ranks.all_gather("store", lambda: self._store(alone=not any(have_objects)))

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

    def _fingerprint(self, shared: bytes, places: Sequence[str]) -> bytes:
        """The fingerprint of the checkpoint at this rank's place; what the coordinator read there is not read
        again."""
        ranks = self.ranks
        if places[ranks.rank] != places[ranks.coordinator]:
            with near_places_told(self._reader.path, self._reader.open_store):
                shared = encode_manifest(index_at(self._reader.place))
        return blake2b(shared).digest()

    def _index(self, shared: bytes) -> CheckpointIndex:
        reader, ranks = self._reader, self.ranks
        if shared and not ranks.is_coordinator:
            reader.use_index(decode_manifest(shared))
        return reader.read_index(own_rank=ranks.rank)

    def _read_config(self) -> bytes:
        """The model's ``config.json``, if it is beside the weights: sizes may be told by it."""
        return json.dumps(model_config(self._reader.store)).encode()

    def _set_up(self, shared: bytes) -> CheckpointIndex:
        """The index, behind the map if there is one, with the planner set up for it: once, because it asks
        for the state."""
        if self._ready is None:
            index, ranks = self._index(shared), self.ranks
            if self._weights is not None:
                self._mapped = map_all(index, self._weights)
                index = self._mapped.index
            values = index.objects.position
            names = ChainMap(*cast("list[dict[str, int]]", [index.position, values]))
            state = self._targets.state(
                Stored(names, values, lambda: index, ranks.rank, lambda: keys_with_empty(index))
            )
            self._planner.set_up_planner(state, LazyMetadata.of(lambda: index), ranks.is_coordinator)
            self._ready = index
        return self._ready

    def _select(self, shared: bytes) -> bytes:
        matches = self._planner.choose(self._set_up(shared))
        return bytes(msgpack.packb(dataclasses.astuple(matches) if matches is not None else None))

    def _plan(self, shared: bytes, report: LoadReport) -> bytes:
        """Plan, and tell what nobody has a place for, if nobody else has (`check_left`)."""
        begun = time.perf_counter()
        planner, ranks = self._planner, self.ranks
        index = self._set_up(shared)
        columns, memory = planner.create_load_columns(index)
        report.note_plan(planner)
        report.note_source(index)
        self._planned = index, columns, memory
        report.seconds["plan"] = time.perf_counter() - begun
        if self.options.unexpected == "ignore":
            return b""
        left = pack_left(_names(index), planner.unexpected_keys, [*planner.lost_keys, *self._not_mapped()])
        if shared or ranks.world_size == 1:
            return left
        check_left(_names(index), [left])  # an index of this rank alone
        return b""

    def _not_mapped(self) -> list[str]:
        """Tensors that no rule knows and nobody has a place for, beside others that the map is about: they
        would be lost."""
        if self._mapped is None or not self._mapped.unknown:
            return []
        unknown = self._mapped.unknown
        mapped = (tensor for tensor in self._mapped.tensors if tensor.name not in unknown)
        tops = {name.partition(".")[0] for tensor in mapped for name in tensor.sources}
        return [
            name
            for name in self._planner.unexpected_keys
            if name in self._mapped.unknown and name.partition(".")[0] in tops
        ]

    def _check_left(self, left: list[bytes]) -> bytes:
        if all(left) and self._planned is not None:
            unmapped = self._mapped.unknown if self._mapped is not None else ()
            check_left(_names(self._planned[0]), left, unmapped)
        return b""

    def _read(self, report: LoadReport) -> bytes:
        if self._planned is None:
            raise PlanError("a load was not planned")
        index, columns, memory = self._planned
        begun = time.perf_counter()
        volumes = row_products(columns.lengths, columns.box_start)
        total = int((volumes * index.itemsizes[index.chunk_tensors[columns.chunks]]).sum())
        with (
            reporting(self.options.progress, "read", total, show=self.ranks.is_coordinator) as on_bytes,
            self._reader.engine(self._reader.read_index(), self.options.verify) as engine,
        ):
            engine.on_bytes = on_bytes
            if self._mapped is None:
                stats = self._reader.read_columns(engine, columns, memory)
            else:
                fills = mapped_fills(engine, self._mapped.tensors, columns, memory)
                stats = self._reader.read_into(engine, ByteRuns.none(), fills, memory)
            load_objects(self._planner, self._reader, engine, columns)
            rescale(self._planner, self._reader, engine, weights_only=self.options.weights_only)
        report.note_reading(stats)
        report.seconds["read"] = time.perf_counter() - begun
        return b"\x01" if self._targets.has_objects else b""

    def _compare(self) -> bytes:
        self._reader.check_unchanged()
        return b""

    def _store(self, *, alone: bool) -> bytes:
        """Store the values; where no rank has an object to give its state to, that is all."""
        self._planner.store_values()
        return self._give_back(self._targets) if alone else b""


def _names(index: CheckpointIndex) -> list[str]:
    return [*index.fqns, *index.objects.fqns]


def _agree_on_patterns(ranks: list[bytes]) -> bytes:
    matches = [msgpack.unpackb(data) for data in ranks]
    check_matches([Matches(*fields) for fields in matches if fields is not None])
    return b""
