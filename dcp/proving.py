"""Proofs that a model has now what a checkpoint has: names, types, digests, values; on any mesh.

Compares what a save would take with the checkpoint's index, on the coordinator; with stored bytes where that
tells nothing. Nothing is written, and nothing changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dcp.calls.arguments import stateful_to_plain
from dcp.calls.plain_errors import plain_errors
from dcp.features.saved_map import mapped_state
from dcp.inspection.values.tensor_reading import TensorReader, open_tensors
from dcp.planners.columns import SaveColumns, SectionCache, decode_save_columns, encode_save_columns
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.load.selection import Patterns, Selection
from dcp.planners.per_rank import rank_holder, rank_number
from dcp.planners.rank_state import RankState, encoded_object
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.ranks.collectives import Ranks, begin, check_same_checkpoint, raise_on_all_ranks, works_alone
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.storage.digests import (
    KEY,
    SUM_BYTES,
    BoxDigest,
    LogicalPlaces,
    as_elements,
    logical_runs,
    power,
    product,
)
from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import itemsizes
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.torch.python_values import encode_value, python_value
from dcp.storage.formats.torch.record_reader import ObjectBlob
from dcp.storage.geometry.boxes import Box, BoxSet, disjoint, overlapping_pairs
from dcp.storage.geometry.strides import Int64, gather_rows
from dcp.storage.near_names import listed
from dcp.storage.packing import pack, unpack
from dcp.storage.tensors import byte_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PRINT_BYTES = 16
_MAX_ENCODED_BYTES = 1 << 30
_MAX_LISTED = 10

FindingKind = Literal[
    "missing", "unexpected", "dtype", "shape", "tensor", "incomplete", "overlap", "value", "undecided"
]


@dataclass(frozen=True, slots=True)
class ProofFinding:
    """One entry that is not what was saved.

    ``kind``: "missing" in the state, or "unexpected" there; another "dtype" or "shape"; "tensor": other
    bytes; "incomplete": the ranks do not have all of it; "overlap": an element is in two parts; "value":
    another value; "undecided": its pickle differs, and only code that is not trusted would tell more.
    ``ranks`` are those that have it so; none if it is of all.
    """

    kind: FindingKind
    fqn: str
    message: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankProof:
    """The holdings of a rank: tensors, bytes of its parts of them, values; ``differing`` names its
    findings."""

    rank: int
    tensors: int
    bytes: int
    values: int
    seconds: float
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Equal names, dtypes, shapes, bytes and values (``ok``), or what differs; the same on all ranks.

    ``tensors`` and ``values`` were compared, and are equal but for ``findings``. ``bytes_read`` of the
    checkpoint beside its index: 0 if its manifest has digests and nothing differs. ``left`` names entries of
    ranks that are not there any more, which no state can have.
    """

    checkpoint: str
    save_id: str | None
    world_size: int
    tensors: int
    values: int
    bytes: int
    bytes_read: int
    findings: tuple[ProofFinding, ...]
    left: tuple[str, ...]
    ranks: tuple[RankProof, ...]

    @property
    def ok(self) -> bool:
        """Return whether all is as it was saved."""
        return not self.findings

    def to_json(self) -> str:
        """Return all of it, to be kept beside a run."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    @classmethod
    def of_json(cls, text: str) -> Proof:
        """Return the inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        del fields["ok"]
        fields["findings"] = tuple(
            ProofFinding(**finding | {"ranks": tuple(finding["ranks"])}) for finding in fields["findings"]
        )
        fields["ranks"] = tuple(
            RankProof(**share | {"differing": tuple(share["differing"])}) for share in fields["ranks"]
        )
        return cls(**fields | {"left": tuple(fields["left"])})


@plain_errors
def prove(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> Proof:
    """Compare a state dict with a checkpoint; every rank of the process group calls it alike.

    Names, dtypes, shapes, the bytes of tensors (by their digests) and values: of models, optimizers, data
    loaders and generators, in whatever mesh, as `dcp.save` would take them now. Replicas are compared on each
    rank. Where the manifest has digests nothing but that is read, unless something differs.

    Args:
        state_dict: What `dcp.load` has filled, or `dcp.save` has saved; nothing of it changes.
        checkpoint_id: A path or URL of a checkpoint or file of any format.
        process_group: The ranks that have the state; the default group without it.
        no_dist: This process alone has it.
        only: Shell globs on flat keys, as for `dcp.load`: what they match, and everything below.
        exclude: The same for what is left out.
        map: From the model definition of ``state_dict`` to that of the checkpoint, as for `dcp.save`: after a
            load through a map its ``inverse``. The names of all else are those behind it.
        timeout_seconds: The longest wait for other ranks.
        storage_options: Those of the file system of a URL, as for `dcp.save`.

    Returns:
        A `Proof`, the same on all ranks, with what differs on which of them.

    Raises:
        PlanError: The state could not be saved as it is, or the ranks called different operations.
        CheckpointNotFoundError: Nothing is committed there.
        CorruptCheckpointError: Bytes that had to be read are not those that were committed.
        CollectiveTimeoutError: Ranks did not answer in time.
    """
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="prove")
    with raise_on_all_ranks(ranks):
        weights = None if map is None else WeightMap.of(map)
    shown = {"only": only, "exclude": exclude, "map": weights and weights.mark}
    places = begin(ranks, lambda: os.fspath(checkpoint_id), options=shown)

    def fingerprint() -> bytes:
        with open_tensors(checkpoint_id, storage_options=storage_options) as reader:
            return hashlib.blake2b(encode_manifest(reader.index)).digest()

    check_same_checkpoint(ranks, places, fingerprint)

    def local() -> bytes:
        planner = DefaultSavePlanner(replica_check="off")
        planner.rank = ranks.rank
        planner.set_up_planner(stateful_to_plain(state_dict), is_coordinator=ranks.is_coordinator)
        own = planner.create_local_columns(digests=False)
        if weights is not None:
            own = mapped_state(own, weights, is_part=ranks.world_size > 1)
        return _digests_of_rank(own).encode()

    def compared(shown: list[bytes]) -> bytes:
        sections: SectionCache = {}
        selection = Selection.of(only, exclude)
        with open_tensors(checkpoint_id, storage_options=storage_options, verify="full") as reader:
            save_id = reader.index.provenance.get("save_id")
            decoded = [_RankDigests.decode(own, sections) for own in shown]
            return _compare_ranks(decoded, reader, selection, save_id).to_json().encode()

    return Proof.of_json(ranks.reduce_broadcast("prove", local, compared).decode())


# -- digests of a rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _RankDigests:
    """The digests of a rank: ``added`` is two words for each item of ``columns``, ``prints`` what
    `_value_print` makes of each value."""

    columns: SaveColumns
    added: npt.NDArray[np.uint64]
    prints: Sequence[bytes]
    size_bytes: int
    seconds: float

    def encode(self) -> bytes:
        """Pack it."""
        fields = [encode_save_columns(self.columns), self.added, [*self.prints]]
        return pack([*fields, self.size_bytes, self.seconds])

    @classmethod
    def decode(cls, data: bytes, sections: SectionCache) -> _RankDigests:
        """Return the inverse of `encode`; all ranks' share ``sections``."""
        columns, *others = unpack(data)
        return cls(decode_save_columns(columns, sections), *others)


def _digests_of_rank(local: RankState) -> _RankDigests:
    """Compute the digests of a rank's state; all its tensors are read."""
    begun = time.perf_counter()
    columns = local.columns
    tensors = columns.item_tensors
    shapes = gather_rows(columns.shape_values, columns.shape_start, tensors)
    sizes: Int64 = itemsizes(columns.dtype_codes[tensors])
    places = LogicalPlaces(columns.box_start, shapes, columns.item_offsets, columns.item_sizes, sizes)
    _check_inside(columns, places)
    rows = np.arange(len(columns.item_tensors), dtype=np.int64)
    values = bytearray()
    for row, view in zip(rows.tolist(), local.views(rows), strict=True):
        box = places.digest(row)
        for piece in byte_pieces(view.detach()):
            box.update(memoryview(piece))
        values += box.value().to_bytes(SUM_BYTES, "big")
    prints = []
    for fqn, value in zip(columns.objects.fqns, local.objects, strict=True):
        encoded = encoded_object(fqn, value, {})
        prints.append(_value_print(encoded.plain, encoded.blob))
    added = places.placed(as_elements(bytes(values)))
    size = int((places.volumes * places.itemsizes).sum())
    return _RankDigests(columns, added, prints, size, time.perf_counter() - begun)


def _check_inside(columns: SaveColumns, places: LogicalPlaces) -> None:
    """Raise PlanError for a box that reaches outside of its tensor, as a save raises it."""
    offsets, sizes = places.offsets, places.sizes
    outside = np.flatnonzero((offsets < 0) | (sizes < 0) | (sizes > places.shapes - offsets))
    if len(outside):
        item = int(np.searchsorted(places.start, outside[0], "right")) - 1
        fqn = columns.fqns[int(columns.item_tensors[item])]
        own = slice(*places.start[item : item + 2].tolist())
        box = f"{sizes[own].tolist()} from {offsets[own].tolist()} on"
        raise PlanError(
            f"{fqn!r} has a part, {box}, outside of its shape {places.shapes[own].tolist()}", fqn=fqn
        )


def _value_print(plain: bytes | None, blob: bytes) -> bytes:
    """Return a print that is equal for equal values of equal types. It is ``v`` and a hash of the value
    or, if that has classes of the user's, ``p`` and a hash of its pickle, which may differ for equal
    values."""
    if plain is not None:
        return b"v" + _hash(plain)
    encoded: bytes | None = None
    try:
        opened = ObjectBlob(blob)
        encoded = encode_value(
            python_value(opened.decoded, opened.pickle_bytes), limit_bytes=_MAX_ENCODED_BYTES
        )
    except CheckpointFormatError:
        pass  # it has classes that are not decoded
    return b"p" + _hash(blob) if encoded is None else b"v" + _hash(encoded)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_PRINT_BYTES).digest()


_RanksBy = dict[bytes, list[int]]
"""Ranks by what they have."""


@dataclass(slots=True)
class _RanksTensor:
    """A tensor as the ranks have it: its types by rank, and by box what that adds to its sum."""

    types: dict[tuple[int, tuple[int, ...]], list[int]] = field(default_factory=dict)
    boxes: dict[Box, _RanksBy] = field(default_factory=dict)


def _compare_ranks(
    ranks: Sequence[_RankDigests], reader: TensorReader, selection: Selection | None, save_id: str | None
) -> Proof:
    """Compare what each of ``ranks`` has with ``reader``'s checkpoint."""
    comparison = _DigestComparison(ranks, reader, selection)
    findings = tuple(comparison.findings())
    differing: list[list[str]] = [[] for _ in ranks]
    for found in findings:
        for rank in found.ranks:
            differing[rank].append(found.fqn)
    shares = []
    for rank, own in enumerate(ranks):
        tensors, values = len(own.columns.fqns), len(own.columns.objects.fqns)
        seconds = round(own.seconds, 6)
        shares.append(RankProof(rank, tensors, own.size_bytes, values, seconds, tuple(differing[rank])))
    return Proof(
        checkpoint=reader.name,
        save_id=save_id,
        world_size=len(ranks),
        tensors=len(comparison.tensors),
        values=len(comparison.values),
        bytes=sum(comparison.sizes.values()),
        bytes_read=reader.bytes_read,
        findings=findings,
        left=tuple(comparison.left),
        ranks=tuple(shares),
    )


class _DigestComparison:
    """``tensors`` and ``values`` that both have are by name; ``sizes`` the bytes of these tensors."""

    def __init__(
        self, ranks: Sequence[_RankDigests], reader: TensorReader, selection: Selection | None
    ) -> None:
        self._reader, self._index = reader, reader.index
        selects = selection.selects if selection is not None else lambda _: True
        held = {fqn: one for fqn, one in _tensors_of(ranks).items() if selects(fqn)}
        values = {fqn: one for fqn, one in _values_of(ranks).items() if selects(fqn)}
        rows, objects = self._index.position, self._index.objects.position
        stored = [fqn for fqn in (*self._index.fqns, *self._index.objects.fqns) if selects(fqn)]
        missing = [fqn for fqn in stored if fqn not in held and fqn not in values]
        self.left = [fqn for fqn in missing if _is_of_no_rank(fqn, len(ranks))]
        self._missing = [fqn for fqn in missing if not _is_of_no_rank(fqn, len(ranks))]
        self.tensors = {fqn: one for fqn, one in held.items() if fqn in rows}
        self.values = {fqn: one for fqn, one in values.items() if fqn in objects}
        self._unexpected = [fqn for fqn in held if fqn not in rows]
        self._unexpected += [fqn for fqn in values if fqn not in objects]
        self.sizes = {
            fqn: math.prod(self._index.shape(rows[fqn])) * self._index.dtype(rows[fqn]).itemsize
            for fqn in self.tensors
        }

    def findings(self) -> Iterator[ProofFinding]:
        """Yield all that is not as it was saved."""
        for fqn in self._missing:
            yield ProofFinding("missing", fqn, f"{fqn!r} was saved, and no rank has it")
        for fqn in self._unexpected:
            yield ProofFinding(
                "unexpected", fqn, f"{fqn!r} is not in the checkpoint, or there of another kind"
            )
        overlapping = _overlaps({fqn: held.boxes for fqn, held in self.tensors.items()})
        for fqn, held in self.tensors.items():
            yield from self._types(fqn, held) or self._tensor(fqn, held, overlapping.get(fqn))
        for fqn, prints in self.values.items():
            yield from self._value(fqn, prints)

    # -- tensors ---------------------------------------------------------------------------------------------

    def _types(self, fqn: str, held: _RanksTensor) -> list[ProofFinding]:
        """Return the tensors of ranks that have not the saved dtype and shape."""
        row = self._index.position[fqn]
        dtype, shape = self._index.dtype(row), self._index.shape(row)
        found = []
        for (code, sizes), ranks in held.types.items():
            own = dtypes.BY_CODE[code].name
            if own != dtype.name:
                found.append(_differs("dtype", fqn, f"is {own}, and was saved as {dtype.name}", ranks))
            elif sizes != shape:
                found.append(_differs("shape", fqn, f"has shape {sizes}, and was saved with {shape}", ranks))
        return found

    def _tensor(
        self, fqn: str, held: _RanksTensor, overlapping: tuple[Box, Box] | None
    ) -> Iterator[ProofFinding]:
        """Compare a tensor that all ranks have in the saved dtype and shape: its parts, and their bytes."""
        row = self._index.position[fqn]
        elements = math.prod(self._index.shape(row))
        parts = sum(box.volume for box in held.boxes)
        found = parts if overlapping is None else sum(box.volume for _, box in disjoint([*held.boxes]))
        if overlapping is not None:
            ranks = sorted(
                {rank for box in overlapping for some in held.boxes[box].values() for rank in some}
            )
            what = f"has parts that overlap, {_text(overlapping[0])} and {_text(overlapping[1])}"
            yield _differs("overlap", fqn, what, ranks)
        if found != elements:
            yield ProofFinding(
                "incomplete", fqn, f"{fqn!r}: {found} of its {elements} elements are on the ranks"
            )
        if overlapping is None and found == elements and not self._has_sum(row, held):
            odd = self._odd_ranks(row, held)
            if odd:
                yield _differs("tensor", fqn, "has other bytes than were saved", odd)

    def _has_sum(self, row: int, held: _RanksTensor) -> bool:
        """Return whether all ranks agree, and on what the manifest has; False where it tells nothing."""
        expected = self._index.digests[row] if len(self._index.digests) else b""
        if not expected or any(len(found) > 1 for found in held.boxes.values()):
            return False
        total = np.zeros(2, np.uint64)
        for found in held.boxes.values():
            total ^= np.frombuffer(next(iter(found)), np.uint64)
        return total.tobytes() == expected

    def _odd_ranks(self, row: int, held: _RanksTensor) -> list[int]:
        """Return the ranks that have other bytes in a part than are stored, by reading it."""
        odd: set[int] = set()
        for box, found in held.boxes.items():
            expected = self._stored(row, box)
            odd.update(rank for added, ranks in found.items() if added != expected for rank in ranks)
        return sorted(odd)

    def _stored(self, row: int, box: Box) -> bytes:
        """Return the value that the stored elements of ``box`` add to the sum."""
        index = self._index
        runs = logical_runs(index.shape(row), box.offsets, box.sizes, index.dtype(row).itemsize)
        digest = BoxDigest(runs)
        if box.volume:
            for slab in self._reader.slabs(row, box.slices):
                digest.update(np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data)
        return product(power(KEY, runs.blocks_behind), digest.value()).to_bytes(SUM_BYTES, "big")

    # -- values ----------------------------------------------------------------------------------------------

    def _value(self, fqn: str, prints: _RanksBy) -> Iterator[ProofFinding]:
        expected = self._stored_print(fqn)
        odd = {found: ranks for found, ranks in prints.items() if found != expected}
        if odd:
            is_decided = expected[:1] == b"v" or any(found[:1] == b"v" for found in odd)
            what = "is another value than was saved"
            if not is_decided:
                what = "has another pickle than was saved; only code that is not trusted would tell more"
            ranks = sorted(rank for some in odd.values() for rank in some)
            yield _differs("value" if is_decided else "undecided", fqn, what, ranks)

    def _stored_print(self, fqn: str) -> bytes:
        objects = self._index.objects
        row = objects.position[fqn]
        if objects.plain[row] >= 0:
            return _value_print(objects.values[objects.plain[row]], b"")
        place = int(objects.files[row]), int(objects.offsets[row]), int(objects.lengths[row])
        return _value_print(None, self._reader.blob(*place))


def _differs(kind: FindingKind, fqn: str, what: str, ranks: Sequence[int]) -> ProofFinding:
    shown = listed([*map(str, ranks)], most=_MAX_LISTED, show=str)
    which = f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
    return ProofFinding(kind, fqn, f"{fqn!r} {what}: {which}", tuple(ranks))


def _text(box: Box) -> str:
    return f"{list(box.sizes)} from {list(box.offsets)} on"


def _is_of_no_rank(fqn: str, world_size: int) -> bool:
    return rank_holder(fqn) is not None and rank_number(fqn) >= world_size


@garbage_collection_paused()
def _tensors_of(ranks: Sequence[_RankDigests]) -> dict[str, _RanksTensor]:
    tensors: dict[str, _RanksTensor] = {}
    for rank, own in enumerate(ranks):
        columns = own.columns
        codes, shapes = columns.dtype_codes.tolist(), columns.shape_values.tolist()
        starts = columns.shape_start.tolist()
        for row, fqn in enumerate(columns.fqns):
            of = codes[row], tuple(shapes[starts[row] : starts[row + 1]])
            tensors.setdefault(fqn, _RanksTensor()).types.setdefault(of, []).append(rank)
        begins, offsets, sizes = (
            column.tolist() for column in (columns.box_start, columns.item_offsets, columns.item_sizes)
        )
        for item, row in enumerate(columns.item_tensors.tolist()):
            at = slice(begins[item], begins[item + 1])
            box, added = Box(tuple(offsets[at]), tuple(sizes[at])), own.added[item].tobytes()
            tensors[columns.fqns[row]].boxes.setdefault(box, {}).setdefault(added, []).append(rank)
    return tensors


def _values_of(ranks: Sequence[_RankDigests]) -> dict[str, _RanksBy]:
    values: dict[str, _RanksBy] = {}
    for rank, own in enumerate(ranks):
        for fqn, found in zip(own.columns.objects.fqns, own.prints, strict=True):
            values.setdefault(fqn, {}).setdefault(found, []).append(rank)
    return values


@garbage_collection_paused()
def _overlaps(boxes: Mapping[str, Collection[Box]]) -> dict[str, tuple[Box, Box]]:
    """Return two boxes that share elements, by name of the tensors that have such; ``boxes`` of one tensor
    are distinct."""
    names = [name for name, own in boxes.items() if len(own) > 1]
    by_ndim: dict[int, tuple[list[int], list[Box]]] = {}
    for number, name in enumerate(names):
        for box in boxes[name]:
            numbers, own = by_ndim.setdefault(len(box.sizes), ([], []))
            numbers.append(number)
            own.append(box)
    found: dict[str, tuple[Box, Box]] = {}
    for numbers, own in by_ndim.values():  # of a thousand ranks there are millions
        low, sizes = (np.array(column, np.int64) for column in zip(*own, strict=True))
        high = low + sizes
        pairs = overlapping_pairs(BoxSet(np.array(numbers, np.int64), low, high))
        for one, other in zip(*(side.tolist() for side in pairs), strict=True):
            found.setdefault(names[numbers[one]], (own[one], own[other]))
    return found
