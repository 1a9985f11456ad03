"""Load of one rank: the entries of a state dict to fill, their sources, and their values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dcp.calls.features import Features
from dcp.loading.feature import LoadFeature, View
from dcp.planners.by_value import has_plain_types, like
from dcp.planners.columns import HeldBoxes
from dcp.planners.flatten import Flat, flatten, set_element
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import OBJECT, PLAIN, flatten_sharded, tensor_kind
from dcp.planners.load.plan import LoadPlan, plan_load
from dcp.planners.load.selection import LoadOptions, Matches, Selection, renamer
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    PlanError,
    UnexpectedKeyError,
    UnsafeObjectError,
)
from dcp.storage.formats import dtypes
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.torch.archive import ObjectBlob
from dcp.storage.formats.torch.pickle_reader import DevicePickle, SizePickle, TensorPickle
from dcp.storage.formats.torch.python_values import decode_values
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.reader import FileSystemReader

_MAX_LISTED = 10
_MAX_ALSO = 3


class LoadCall:
    """Entries of a state dict that one rank loads, their names in the checkpoint, and their destinations.

    Attributes:
        options: Options of the call, or of the planner.
        unasked: Top-level keys without a selected entry.
        must_fill: Entries that the load must fill, because a failed load may have changed them.
        defers_values: True to keep values until `store`, so that a failed load changes none.
        flat: The state dict ``root`` by flat key.
        values: Entries to load, set by `choose`.
        names: Names in the checkpoint, if renamed.
        matches: Matches of patterns, if given.
        missing, unexpected, cast, renamed_names: Facts for the report, set by `plan`.
        scales: Names of the checkpoint that the reader uses to make other tensors.
    """

    scales: Collection[str] = ()
    index: CheckpointIndex
    """Index to load from, set by `choose`."""
    view: View | None = None
    """View of the index for loads on columns."""

    def __init__(
        self,
        root: dict[str, Any],
        options: LoadOptions,
        features: Features[LoadFeature],
        *,
        rank: int,
        world_size: int,
        unasked: Sequence[str] = (),
        must_fill: frozenset[str] = frozenset(),
        defers_values: bool = False,
        flattens: bool = True,
        flattens_sharded: bool = True,
    ) -> None:
        self.root, self.options, self.features = root, options, features
        self.rank, self.world_size = rank, world_size
        self.flattens, self._flattens_sharded = flattens, flattens_sharded
        self.selection = Selection.of(options.only, options.exclude)
        self.renamed = renamer(options.rename)
        self.names: dict[str, str] | None = None
        self.matches: Matches | None = None
        self.flat = self.flattened()
        self.values: Mapping[str, Any] = self.flat.values
        self.missing: Sequence[str] = ()
        self.unexpected: Sequence[str] = ()
        self.cast: Sequence[str] = ()
        self.renamed_names: dict[str, str] = {}
        self._unasked, self._must_fill, self._defers_values = unasked, must_fill, defers_values
        self._waiting: set[str] | None = None
        self._later: list[tuple[Sequence[str], Sequence[Any]]] = []
        features.resting = ()
        for feature in features.all:
            feature.call = self
            feature.later = feature.made = feature.new = feature.whole = ()
        asked = list(features.having("takes_part"))
        features.resting = [feature for feature, takes_part in asked if not takes_part(bool)]
        features.each("state")

    def flattened(self, *, legacy: bool = False) -> Flat:
        """Return ``root`` by flat key; with the keys of torch before 2.4 if ``legacy``."""
        flat = Flat(self.root)
        if self.flattens:
            with garbage_collection_paused():
                flat = flatten(self.root, rank=self.rank, legacy=legacy)
        if self._flattens_sharded:
            flat.values = flatten_sharded(flat.values)
        return flat

    def selected(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of ``values`` selected by the patterns."""
        selection = self.selection
        if selection is None:
            return values
        return {fqn: value for fqn, value in values.items() if selection.selects(fqn)}

    def stored(self, fqn: str) -> str:
        """Return the name of an entry in the checkpoint."""
        return fqn if self.renamed is None else self.renamed(fqn)

    # -- plan ------------------------------------------------------------------------------------------------

    def choose(self, index: CheckpointIndex) -> None:
        """Select the entries to load and match the patterns.

        Planning calls it too. An earlier call lets ranks compare patterns before reading.
        """
        self.index = index
        self.features.each("names", index)
        flat, selection = self.flat.values, self.selection
        self.names = None if self.renamed is None else {fqn: self.renamed(fqn) for fqn in flat}
        self.values = self.selected(flat)
        if selection is not None:
            stored = [*index.fqns, *index.objects.fqns]
            self.matches = selection.match(flat, self._unasked, stored)
        self.features.each("entries", index)

    def plan(self, index: CheckpointIndex) -> tuple[LoadPlan, HeldBoxes, LocalMemory]:
        """Return the read plan, the boxes to fill, and local tensors by destination number.

        The tensors belong to the state dict and may require grad. Tensors that share memory may be replaced
        by others until `store`. Raises one error for everything that does not fit (see
        `dcp.planners.load.plan.plan_load`), and PlanError if the plan does not fill ``must_fill``.
        """
        with garbage_collection_paused():
            self.choose(index)
            values = self.values
            if self._defers_values:
                values = self.features.through("destinations", Mapping, values)
            local = collect_tensors(values, loading=True)
            held, memory, object_fqns = local.columns, local.memory, local.columns.objects.fqns
            plan = plan_load(
                index,
                held,
                object_fqns,
                names=self.names,
                allow_missing=bool(self.options.allow_partial_load),
                cast=self.options.dtype == "cast",
                per_rank=self.flat.owners,
                lost=self._also_lost,
            )
            self._note(plan.missing, plan.cast, plan.unexpected)
            must_fill = self._must_fill
            if stale := sorted(must_fill.intersection(plan.missing) | (must_fill - self.values.keys())):
                raise _stale(stale)
            self._waiting = set()
            if self._defers_values:
                later = map(attrgetter("later"), self.features.all)
                self._waiting.update(object_fqns, chain.from_iterable(later))
                memory = self.features.through("boxes", LocalMemory, memory, plan.pieces, index, held)
            return plan, held, memory

    def _also_lost(self, unexpected: tuple[str, ...]) -> str:
        """Return a sentence on ``unexpected`` names, for an error about other problems; "" if the load allows
        these names."""
        try:
            self._note((), (), unexpected)
            self.features.packed("findings", is_shared=False)
        except UnexpectedKeyError as error:
            lost = error.lost
            unless = "unless other ranks take them, " if self.world_size > 1 else ""
            number = "1 stored entry has" if len(lost) == 1 else f"{len(lost)} stored entries have"
            some = "" if len(lost) <= _MAX_ALSO else f" ({listed(lost, most=_MAX_ALSO)})"
            patterns = "[...]" if some else list(lost)
            return (
                f"Also, {unless}{number} no place in the state dict{some}: add the entries to it, or "
                f'pass exclude={patterns} or unexpected="ignore".'
            )
        except CheckpointError:  # of a feature: the other problems come first
            return ""
        return ""

    def _note(self, missing: Sequence[str], cast: Sequence[str], unexpected: tuple[str, ...]) -> None:
        """Record entries that the plan skips, except those left out by patterns or features."""
        flat, names, selection = self.flat.values, self.names, self.selection
        self.missing, self.cast = missing, cast
        if self.values is not flat:
            left = (fqn for fqn in flat if fqn not in self.values)
            others = set(left) if names is None else {names[fqn] for fqn in left}
            selects = selection.selects if selection is not None else lambda _: True
            unexpected = tuple(name for name in unexpected if name not in others and selects(name))
        self.unexpected = self.features.through("unexpected", tuple, unexpected)
        if names is not None:
            found = self.values.keys() - missing
            self.renamed_names = {fqn: name for fqn, name in names.items() if name != fqn and fqn in found}

    # -- values ----------------------------------------------------------------------------------------------

    def read_values(self, reader: FileSystemReader, engine: ReadEngine, plan: LoadPlan) -> None:
        """Read the planned values."""
        objects, fqns = engine.index.objects, plan.object_fqns
        plain = objects.plain[plan.objects]
        is_plain = plain >= 0
        values = decode_values(list(map(objects.values.__getitem__, plain[is_plain].tolist())))
        self.take(list(compress(fqns, is_plain.tolist())), values)
        if not is_plain.all():
            pickled = [objects.fqns[row] for row in plan.objects[~is_plain].tolist()]
            names = compress(fqns, (~is_plain).tolist())
            for fqn, blob in zip(names, reader.read_objects(engine, pickled), strict=True):
                self.take_blob(fqn, blob)

    def take(self, fqns: Sequence[str], values: Sequence[Any]) -> None:
        """Take loaded values, deferred until `store` if requested."""
        for _, accepts in self.features.having("accept"):
            left = [not accepts(bool, fqn, value) for fqn, value in zip(fqns, values, strict=True)]
            fqns, values = list(compress(fqns, left)), list(compress(values, left))
        self._later.append((fqns, values))
        if not self._defers_values:
            self.store()

    def take_blob(self, fqn: str, blob: bytes | io.BytesIO) -> None:
        """As `take`, from a value's torch.save bytes."""
        self.take([fqn], [load_object(fqn, blob, weights_only=self.options.weights_only is not False)])

    def store(self) -> None:
        """Store the values taken; all at once for a flat state dict with values of the same types."""
        root, current = self.root, self.flat.values
        # Only a dict without nested containers has the flattened keys.
        is_flat = self.flattens and type(root) is dict and list(root) == list(current)
        later, self._later = self._later, []
        for fqns, values in later:
            types = list(map(type, values)) if is_flat else []
            if is_flat and has_plain_types(types) and types == list(map(type, map(current.get, fqns))):
                root.update(zip(fqns, values, strict=True))
                continue
            for fqn, value in zip(fqns, values, strict=True):
                self.put(fqn, value)

    def put(self, fqn: str, value: Any) -> None:
        """Put a value where the state dict has ``fqn``."""
        value = like(self.flat.values.get(fqn), value)
        if self.flattens:
            set_element(self.root, self.flat.paths[fqn], value, replaces=True)
        else:
            self.root[fqn] = self.flat.values[fqn] = value

    # -- what has changed ------------------------------------------------------------------------------------

    @property
    def untouched_keys(self) -> frozenset[str]:
        """Top-level keys with entries of which none was loaded."""
        if self.values is self.flat.values:
            return frozenset()
        tops = self.flat.paths
        made = (fqn for feature in self.features.all for fqn in feature.made)
        touched, every = (
            {str(tops[fqn][0]) if fqn in tops else fqn for fqn in fqns}
            for fqns in ([*self.values, *made], self.flat.values)
        )
        return frozenset(every - touched)

    @property
    def touched(self) -> frozenset[str]:
        """Entries that the load may have changed, and those that it had to fill."""
        if self._waiting is None:
            return self._must_fill
        return self._must_fill | (self.values.keys() - {*self.missing, *self._waiting})

    def tell_autograd(self) -> None:
        """Increment the versions of filled DTensors, so that a backward pass of an earlier forward pass
        raises.
        """
        values = self.flat.values if self._waiting is not None else {}
        kinds = set(map(tensor_kind, set(map(type, values.values()))))
        if kinds <= {PLAIN, OBJECT}:
            return  # the reader increments versions of plain tensors
        touched = map(values.get, self.touched)
        increment_version([value for value in touched if isinstance(value, torch.Tensor)])


def _stale(names: Sequence[str]) -> PlanError:
    """Return the error for entries that a failed load may have changed and this load does not fill."""
    return PlanError(
        f"a failed load may have filled {listed(names, most=_MAX_LISTED)} from another checkpoint, "
        "and this checkpoint lacks these entries, so the state would mix two checkpoints; build the "
        "state again and load this checkpoint only",
        fqns=names[:_MAX_LISTED],
    )


# -- values from their torch.save bytes ----------------------------------------------------------------------
#
# Harmless values that torch refuses are decoded without running a pickle. `torch.serialization.safe_globals`
# would allow some of them, but it is global to the process: other threads would load with it too, and numpy's
# functions do not check their arguments.


def load_object(fqn: str, blob: bytes | io.BytesIO, *, weights_only: bool) -> Any:
    """Decode bytes of torch.save.

    ``weights_only`` allows the types of `torch.load(weights_only=True)` and further harmless ones
    (`dcp.storage.formats.torch.python_values`), such as NumPy arrays, dates and paths. Raises
    UnsafeObjectError for other classes and functions, CheckpointFormatError for damaged bytes.
    """
    buffer = io.BytesIO(blob) if isinstance(blob, bytes | bytearray | memoryview) else blob
    begin = buffer.tell()
    head = buffer.read(2)
    buffer.seek(begin)
    if head != b"PK" and head[:1] != b"\x80":
        raise CheckpointFormatError(f"object {fqn!r} was not written by torch.save, or is damaged", fqn=fqn)
    try:
        return torch.load(buffer, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        refused = _refused(fqn, str(error), weights_only=weights_only)
        if weights_only and head == b"PK":
            try:
                return _safe_object(buffer.getvalue()[begin:])
            except CheckpointFormatError:  # raise torch's reason, which users know
                raise refused from error
        raise refused from error
    except Exception as error:
        if not weights_only:  # an error raised by classes of the checkpoint
            raise
        # Damaged bytes can raise any error in torch's unpickler, such as ValueError, IndexError and KeyError.
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointFormatError(f"object {fqn!r} is damaged: {text}", fqn=fqn) from error


def _refused(fqn: str, text: str, *, weights_only: bool) -> CheckpointFormatError:
    reason = next((line.strip() for line in text.splitlines() if "nsupported" in line), "")
    if not weights_only or not reason:
        return CheckpointFormatError(f"object {fqn!r} cannot be unpickled: {text[:300]}", fqn=fqn)
    return UnsafeObjectError(
        f"object {fqn!r} needs more than plain data to load ({reason[:300]}). If you trust the checkpoint, "
        "load with weights_only=False, or allow the class with torch.serialization.add_safe_globals",
        fqn=fqn,
    )


def _safe_object(blob: bytes) -> Any:
    """Decode bytes of torch.save with harmless types only, tensors included.

    Raises UnsafeObjectError for other types, and CheckpointFormatError for damaged bytes and for values too
    large for their bytes.
    """
    opened = ObjectBlob(blob)

    def tensor(facts: TensorPickle) -> torch.Tensor:
        name = dtypes.BY_CODE[facts.dtype_code].name
        elements = opened.elements(facts)
        try:
            dtype: torch.dtype = getattr(torch, name)
            data = torch.frombuffer(elements, dtype=dtype) if elements.size else torch.empty(0, dtype=dtype)
            return data.reshape(facts.sizes).requires_grad_(facts.requires_grad)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointFormatError(f"torch cannot create such a tensor of dtype {name}") from error

    special: dict[type, Callable[[Any], Any]] = {
        TensorPickle: tensor,
        SizePickle: torch.Size,
        Dtype: lambda dtype: getattr(torch, dtype.name),
        DevicePickle: _device,
    }
    return opened.value(special)


def _device(device: DevicePickle) -> torch.device:
    try:
        return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
    except (RuntimeError, ValueError) as error:
        raise CheckpointFormatError(f"device {device.type[:40]!r} is not available") from error
