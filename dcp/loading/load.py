"""Load a checkpoint into a state dict: steps, loads on columns, and complete reads.

`dcp.engines` selects the engine; see `docs/design/loading.md`.
"""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from dcp.calls.features import Features
from dcp.inspection.entries import Entries, choose_entries
from dcp.loading.call import LoadCall
from dcp.loading.feature import LoadFeature, LoadReport, Target, View, load_features
from dcp.planners.load.plan import LoadPlan
from dcp.planners.load.selection import LoadOptions, Matches, check_matches
from dcp.progress import reporting
from dcp.ranks.agreement import begin, check_same_checkpoint, raise_on_all_ranks
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import causes_of, is_damage
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import CheckpointConflictError, CheckpointError, StorageError
from dcp.storage.formats.container_notes import notes_by_path
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening import index_at, naming_near_places, saved_by_rank
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.geometry.strides import row_products
from dcp.storage.packing import pack, unpack
from dcp.storage.tensors import LocalMemory, torch_dtype
from dcp.storage.torch_storage.destinations import read_into
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.reader import FileSystemReader

if TYPE_CHECKING:
    from dcp.default_planner import DefaultLoadPlanner

_ATTEMPTS = 3
_LENGTH_BYTES = 4
_COMPARED = ("only", "exclude", "dtype", "allow_partial_load", "weights_only")
_COMPARED_OF_PLANNERS = ("flatten_state_dict", "flatten_sharded_tensors")


class LoadEngine(ABC):
    """One load: plan, read, and pass state to objects.

    ``planner`` and ``storage`` are None for custom ones. ``options`` are those of the call, or of the
    planner. ``call`` is the load of dcp's planner, ``report`` that of the attempt.
    """

    defers_values = False
    """True to keep values until the whole load has succeeded."""
    call: LoadCall | None = None
    report: LoadReport
    _has_given_back = False

    def __init__(
        self,
        ranks: Ranks,
        options: LoadOptions,
        planner: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
        features: Sequence[type[LoadFeature]],
    ) -> None:
        self.ranks, self.planner, self.storage = ranks, planner, storage
        self._given = options
        self.options = options if planner is None else options.over(planner)
        self.features = load_features(features, self.options)

    @abstractmethod
    def run(self, target: Target) -> None:
        """Find the checkpoint, plan and fill ``target``; errors are equal on all ranks."""

    def load(self, target: Target, filled: set[str] | None = None) -> LoadReport:
        """Load into ``target``, again if the checkpoint is replaced after its index was read.

        ``filled`` are entries that a failed load may have changed, which this load must fill; on failure its
        own are added. Raises CheckpointConflictError after repeated replacements, which is not damage.
        """
        filled = filled if filled is not None else set()
        with ExitStack() as stack:
            if self.storage is not None:
                with raise_on_all_ranks(self.ranks):
                    stack.enter_context(self.storage.in_use())
            attempts = 1
            try:
                while not self._attempt(target, filled, attempts):
                    attempts += 1
            except BaseException as error:
                target.take_back()
                if self.storage is not None and (url := self.storage.store.url) not in str(error):
                    error.add_note(f"The checkpoint is {url}.")
                raise
            if target.gives_back and not self._has_given_back:

                def give_back() -> bytes:
                    target.give_back(self.call)
                    return b""

                try:
                    self.ranks.all_gather("load_state_dict", give_back)
                except BaseException:
                    if self.call is not None:
                        filled |= self.call.touched - target.made
                    raise
            return self.report

    def _attempt(self, target: Target, filled: set[str], attempts: int) -> bool:
        """Make one attempt; return False if another attempt may succeed."""
        self.report, self.call = LoadReport(attempts=attempts), None
        planner, ranks, storage = self.planner, self.ranks, self.storage
        must_fill = frozenset(filled)
        self.features.resting = ()
        if planner is not None:
            opens = partial(
                LoadCall,
                features=self.features,
                rank=ranks.rank,
                world_size=ranks.world_size,
                unasked=target.unasked,
                must_fill=must_fill,
                defers_values=self.defers_values,
            )
            planner.begin_load(opens, self._given, ranks.rank, ranks.world_size)
        try:
            self.run(target)
        except BaseException as error:
            if planner is not None:
                filled |= (must_fill if self.call is None else self.call.touched) - target.made
            if not isinstance(error, CheckpointError):
                raise
            self._look_again(error, attempts)
            return False
        finally:
            if self.call is not None:
                self.call.tell_autograd()
            if planner is not None:
                planner.opens = None
        self.report.storage = {} if storage is None else storage.traffic
        return True

    def _look_again(self, error: CheckpointError, attempts: int) -> None:
        """Raise ``error``, or a better one, unless another attempt may succeed."""
        causes, storage = causes_of(error), self.storage
        if storage is None or not all(is_damage(cause) or _is_stale(cause) for cause in causes):
            raise error

        def look() -> bytes:
            if not storage.was_replaced():
                return b""
            if attempts < _ATTEMPTS:
                return b"\x01"
            place = storage.place.url
            raise CheckpointConflictError(
                f"{place} was replaced during the load, in each of {attempts} attempts: give each save a "
                f"unique checkpoint_id, or load when no job saves there. The last attempt: {error}",
                path=place,
            ) from error

        is_replaced = bool(self.ranks.broadcast("look again", look))
        if not is_replaced and (attempts == _ATTEMPTS or not any(map(_is_stale, causes))):
            raise error

    def agreed(self) -> dict[str, Any]:
        """Return options that must be equal on all ranks.

        ``rename`` may differ, for example between pipeline stages. Options of custom planners and storages
        are unknown.
        """
        options, planner, storage = self.options, self.planner, self.storage
        found: dict[str, Any] = {}
        if planner is not None:
            found |= {name: getattr(options, name) for name in _COMPARED}
            found |= {name: getattr(planner, name) for name in _COMPARED_OF_PLANNERS}
        for name in ("only", "exclude"):  # order does not matter; a string is one pattern
            if isinstance(found.get(name), list | tuple | set | frozenset):
                patterns = sorted(found[name])
                found[name] = patterns[0] if len(patterns) == 1 else patterns
        if storage is not None:
            found["verify"] = options.verify or storage.verify
        return self.features.agreed(found)

    def fit(self, target: Target, plan: Callable[[], object]) -> None:
        """Call ``plan`` until it succeeds or ``target`` has no further state to try."""
        while True:
            try:
                plan()
            except CheckpointError as error:
                if not target.fits_after(error):
                    raise
            else:
                return

    def judge(self, parts: Sequence[bytes]) -> bytes:
        """Raise errors that follow from the packed findings of all ranks."""
        if any(parts):
            found = [unpack(part) if part else {} for part in parts]
            for feature, ask in self.features.having("judge", idle=True):
                ask(object, [unpack(own[feature.name]) if feature.name in own else None for own in found])
        return b""


def _is_stale(cause: BaseException) -> bool:
    """Return whether a file was replaced on another host after it was opened (ESTALE of NFS)."""
    return isinstance(cause, StorageError) and cause.errno == errno.ESTALE


class ColumnLoad(LoadEngine):
    """Load on columns: the coordinator reads the index; each rank plans and reads its part."""

    planner: DefaultLoadPlanner
    storage: FileSystemReader
    defers_values = True
    _target: Target
    _view: View | None
    _manifest: bytes
    _beside: dict[str, bytes]
    _ready: LoadCall | None
    _planned: tuple[LoadCall, View, LoadPlan, LocalMemory]

    def run(self, target: Target) -> None:
        """Compare options, read the index, match patterns, plan, read tensors, and store values last."""
        ranks, storage, options = self.ranks, self.storage, self.options
        self._target, self._view, self._ready = target, None, None
        begun = time.perf_counter()
        storage.reset()  # the reader may have cached another commit
        places = begin(
            ranks, partial(attrgetter("place.url"), storage), options=self.agreed, kinds=target.kinds
        )
        shared = ranks.broadcast("index", self._read_index)
        size = _LENGTH_BYTES + int.from_bytes(shared[:_LENGTH_BYTES], "big")
        self._beside = unpack(shared[_LENGTH_BYTES:size]) if size > _LENGTH_BYTES else {}
        self._manifest = shared[size:]
        if self._manifest:
            check_same_checkpoint(ranks, places, partial(self._fingerprint, places))
        self.report.seconds["index"] = time.perf_counter() - begun
        if options.only is not None or options.exclude is not None:
            ranks.reduce_alike("select", self._select, _agree_on_patterns)
        self.fit(target, partial(ranks.reduce_alike, "plan", self._make_plan, self.judge))
        # frees the manifest, which is large for many tensors, because the read needs memory
        self._manifest = b""
        have_objects = any(ranks.all_gather("read", self._read))
        if storage.may_be_mixed:
            ranks.broadcast("compare", self._compare)
        ranks.all_gather("store", partial(self._store, alone=not have_objects))

    def _read_index(self) -> bytes:
        """Read the index of one commit for all ranks, with the data of features before it.

        An overwrite during the start must not give ranks different commits. The index is omitted for a single
        rank, or if each rank has its own.
        """
        reader, alone, manifest = self.storage, self.ranks.world_size == 1, b""
        if alone or reader.place.file is not None or not saved_by_rank(reader.store):
            index = reader.read_index()
            manifest = b"" if alone else encode_manifest(index)
        packed = self.features.packed("beside", reader)
        return len(packed).to_bytes(_LENGTH_BYTES, "big") + packed + manifest

    def _fingerprint(self, places: Sequence[str]) -> bytes:
        """Return the fingerprint of this rank's checkpoint, from the index already read on the
        coordinator.
        """
        ranks, manifest = self.ranks, self._manifest
        if places[ranks.rank] != places[ranks.coordinator]:
            with naming_near_places(self.storage.path, self.storage.open_store):
                manifest = encode_manifest(index_at(self.storage.place))
        return blake2b(manifest).digest()

    def _set_up(self) -> tuple[LoadCall, View]:
        """Return the load and its view of the checkpoint."""
        ranks, storage, view = self.ranks, self.storage, self._view
        if view is None:
            if self._manifest and not ranks.is_coordinator:
                storage.index = decode_manifest(self._manifest)
            view = View(storage.read_index(own_rank=ranks.rank))
            for feature, ask in self.features.having("view"):
                own = self._beside.get(feature.name)
                view = ask(View, view, None if own is None else unpack(own))
            self._view = view
        if self._ready is None:
            index = view.index
            state = self._target.state(lambda: index, ranks.rank)
            self.planner.set_up_planner(state, LazyMetadata.of(lambda: index), ranks.is_coordinator)
            self.call = self._ready = self.planner.adopt()
            self._ready.view = view
        return self._ready, view

    def _select(self) -> bytes:
        call, view = self._set_up()
        call.choose(view.index)
        return pack(call.matches and [*call.matches])

    def _make_plan(self) -> bytes:
        begun = time.perf_counter()
        call, view = self._set_up()
        self._ready = None  # each plan asks objects for their state again
        plan, _, memory = call.plan(view.index)
        self._planned = call, view, plan, memory
        self.report.seconds["plan"] = time.perf_counter() - begun
        is_shared = bool(self._manifest) or self.ranks.world_size == 1
        return self.features.packed("findings", is_shared=is_shared)

    def _read(self) -> bytes:
        call, view, plan, memory = self._planned
        storage, index, pieces = self.storage, view.index, plan.pieces
        begun = time.perf_counter()
        with ExitStack() as stack, storage.engine(storage.read_index(), self.options.verify) as engine:
            if self.options.progress:
                volumes = row_products(pieces.lengths, pieces.box_start)
                total = int((volumes * index.itemsizes[index.chunk_tensors[pieces.chunks]]).sum())
                show = self.ranks.is_coordinator
                engine.on_bytes = stack.enter_context(
                    reporting(self.options.progress, "read", total, show=show)
                )
            read_into(engine, *view.reads(engine, pieces, memory), memory.tensors)
            call.read_values(storage, engine, plan)
            self.features.each("loaded", partial(read_whole, call, storage, engine))
        self.report.note(call, index, storage.stats)
        self.report.seconds["read"] = time.perf_counter() - begun
        return b"\x01" if self._target.has_objects else b""

    def _compare(self) -> bytes:
        self.storage.check_unchanged()
        return b""

    def _store(self, *, alone: bool) -> bytes:
        """Store the values; the end of a load without objects on any rank."""
        call = self._planned[0]
        self.features.each("put")
        call.store()
        self.features.each("done", self.report, is_coordinator=self.ranks.is_coordinator)
        if alone:
            self._target.give_back(call)
            self._has_given_back = True
        return b""


def _agree_on_patterns(ranks: list[bytes]) -> bytes:
    check_matches([Matches(*fields) for part in ranks if (fields := unpack(part)) is not None])
    return b""


# -- whole checkpoints ---------------------------------------------------------------------------------------

ReadDtype = torch.dtype | str | Mapping[str, torch.dtype | str]
"""Dtype for all floating-point tensors, or dtypes by shell pattern (the first match applies)."""


class Whole(Target):
    """Flat state dict of selected entries, nested again by `nested`.

    ``chosen`` are ``only``, ``exclude`` and ``rename`` for `choose_entries`. `stored` is the renaming for the
    load.
    """

    entries: Entries
    """The chosen entries, since `state`."""

    def __init__(
        self, *, dtype: ReadDtype | None = None, device: torch.device | str = "cpu", **chosen: Any
    ) -> None:
        super().__init__({})
        names: Any = None if dtype is None else str(dtype)
        if isinstance(dtype, Mapping):
            names = {glob: str(each) for glob, each in dtype.items()}
        self._chosen = chosen | {"dtype": names}
        self._device = device
        self._tied: dict[str, str] = {}

    def state(self, index_of: Callable[[], CheckpointIndex], rank: int) -> dict[str, Any]:
        """Allocate memory for the selected entries, replacing those of a failed attempt."""
        self.entries = entries = choose_entries(index_of(), **self._chosen)
        tensors, flat = entries.tensors, self.state_dict
        flat.clear()
        self._tied = {}
        for number, (entry, shape) in enumerate(zip(tensors, entries.shapes, strict=True)):
            if entry.tied_to != number:
                self._tied[entry.fqn] = tensors[entry.tied_to].fqn
            else:
                dtype = torch_dtype(entry.dtype_code)
                flat[entry.fqn] = torch.empty(shape, dtype=dtype, device=self._device)
        flat.update(dict.fromkeys(value.fqn for value in entries.values))
        flat.update(dict.fromkeys(entries.refused))  # planning raises their errors
        return flat

    def stored(self, fqn: str) -> str:
        """Return the name of an entry in the checkpoint."""
        return self.entries.source_names[fqn]

    def nested(self) -> dict[str, Any]:
        """Return the loaded entries as a nested state dict."""
        entries, flat = self.entries, self.state_dict
        structure = entries.structure()
        kinds = structure.get("values", {}) if structure is not None else {}

        def value_of(fqn: str) -> Any:
            value = flat.get(self._tied.get(fqn, fqn))
            return torch.Size(value) if kinds.get(fqn) == "torch.Size" and isinstance(value, tuple) else value

        paths = entries.paths
        found = restore_structure(structure, {**paths, **_gaps(entries, structure)}, value_of)
        return found if isinstance(found, dict) else {fqn: value_of(fqn) for fqn in paths}


def _gaps(entries: Entries, structure: Mapping[str, Any] | None) -> dict[str, Path]:
    """Return placeholder entries for list positions left out, so that other positions stay."""
    noted = notes_by_path(structure)
    # an untrusted checkpoint may contain any number
    most = entries.index.tensor_count + len(entries.index.objects) + len(noted)
    chosen: dict[Path, set[int]] = {}
    for path in entries.paths.values():
        for depth, part in enumerate(path):
            if isinstance(part, int):
                chosen.setdefault(path[:depth], set()).add(part)
    places = (
        (*path, position)
        for path, positions in chosen.items()
        if max(positions) < most
        for position in range(max(positions))
        if position not in positions
    )
    return {".".join(map(str, place)): place for place in places if place not in noted}


def read_whole(
    call: LoadCall, reader: FileSystemReader, engine: ReadEngine, only: Sequence[str]
) -> tuple[Any, dict[str, Path]]:
    """Read parts of the engine's checkpoint whole: see `dcp.loading.feature.ReadWhole`."""
    view, whole = call.view or View(engine.index), Whole(only=only)
    index = view.index
    state = whole.state(lambda: index, call.rank)
    options = LoadOptions(rename=whole.stored, weights_only=call.options.weights_only)
    features = Features(LoadFeature)
    part = LoadCall(state, options, features, rank=call.rank, world_size=call.world_size, flattens=False)
    plan, _, memory = part.plan(index)
    read_into(engine, *view.reads(engine, plan.pieces, memory), memory.tensors)
    part.read_values(reader, engine, plan)
    return whole.nested(), dict(whole.entries.paths)
