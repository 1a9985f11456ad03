"""Comparison of a model with a checkpoint: names, dtypes, digests and values, on any mesh.

The coordinator compares the state with the checkpoint's index, and reads stored bytes only if the index has
no digest. Nothing is written or changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dcp.calls.arguments import stateful_to_plain, works_alone
from dcp.calls.plain_errors import plain_errors
from dcp.features.saved_map import mapped_state
from dcp.inspection.values.tensor_reading import TensorReader, opened
from dcp.planners.columns import SaveColumns, SectionCache, decode_save_columns, encode_save_columns
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.load.selection import Patterns, Selection, check_patterns
from dcp.planners.per_rank import rank_holder, rank_number
from dcp.planners.rank_state import RankState, encoded_object
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.ranks.agreement import begin, check_same_checkpoint, raise_on_all_ranks
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
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
from dcp.storage.formats.index import CheckpointIndex, itemsizes
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.torch.archive import ObjectBlob
from dcp.storage.formats.torch.python_values import encode_value
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
    """Difference between a state and a checkpoint, for one entry.

    Attributes:
        kind: "missing" from the state; "unexpected" in the state; "dtype" or "shape"; "tensor": other bytes;
            "incomplete": the ranks lack elements; "overlap": two boxes share elements; "value": other value;
            "undecided": the pickles differ, and only untrusted code could compare the objects.
        ranks: Ranks with the difference; empty if all ranks have the difference.
    """

    kind: FindingKind
    fqn: str
    message: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankProof:
    """Tensors, bytes and values of a rank, and the names of its differences (``differing``)."""

    rank: int
    tensors: int
    bytes: int
    values: int
    seconds: float
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of `prove`, equal on all ranks.

    Attributes:
        tensors: Number of compared tensors.
        values: Number of compared values.
        findings: Differences.
        bytes_read: Bytes read besides the index; 0 if the manifest has digests and nothing differs.
        left: Entries of ranks that no longer exist.
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
        """True if the state equals the checkpoint."""
        return not self.findings

    def to_json(self) -> str:
        """Return the proof as JSON."""
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
    """Compare a state dict with a checkpoint. Call it on every rank of the process group.

    Compares names, dtypes, shapes, digests of tensors and values on any mesh, as `dcp.save` would store them.
    Replicas are compared on each rank. If the manifest has digests, stored bytes are read for differences
    only.

    Args:
        state_dict: State filled by `dcp.load` or saved by `dcp.save`. It is not changed.
        checkpoint_id: Path or URL of a checkpoint or file in any format.
        process_group: Ranks with the state; the default group if None.
        no_dist: Compare in this process alone.
        only: Shell patterns on flat keys, as for `dcp.load`.
        exclude: Shell patterns of entries to leave out.
        map: Map from the model definition of ``state_dict`` to that of the checkpoint, as for `dcp.save`.
            After a load through a map, pass its ``inverse``.
        timeout_seconds: Longest wait for other ranks, in seconds.
        storage_options: Options of the file system of a URL, as for `dcp.save`.

    Returns:
        A `Proof`, equal on all ranks.

    Raises:
        PlanError: The state cannot be saved, or the ranks called different operations.
        MissingKeyError, OptionError: A pattern matches nothing, or leaves nothing to compare.
        CheckpointNotFoundError: The id has no committed checkpoint.
        CorruptCheckpointError: Stored bytes differ from the committed bytes.
        CollectiveTimeoutError: Other ranks did not answer in time.
    """
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="prove")
    with raise_on_all_ranks(ranks):
        weights = None if map is None else WeightMap.of(map)
    shown = {"only": only, "exclude": exclude, "map": weights and weights.mark}
    places = begin(ranks, lambda: os.fspath(checkpoint_id), options=shown)

    def fingerprint() -> bytes:
        with opened(checkpoint_id, storage_options) as reader:
            return hashlib.blake2b(encode_manifest(reader.index)).digest()

    check_same_checkpoint(ranks, places, fingerprint)

    def local() -> bytes:
        planner = DefaultSavePlanner(replica_check="off")
        planner.rank = ranks.rank
        planner.set_up_planner(stateful_to_plain(state_dict), is_coordinator=ranks.is_coordinator)
        own = planner.create_local_columns(digests=False)
        if weights is not None:
            own = mapped_state(own, weights, is_part=ranks.world_size > 1)
        return _digests_of_rank(own)

    def compared(shown: list[bytes]) -> bytes:
        selection, seen = Selection.of(only, exclude), dict[str, None]()

        def selects(name: str) -> bool:
            seen[name] = None
            return selection is None or selection.selects(name)

        with opened(checkpoint_id, storage_options) as reader:
            proof = _compare_ranks(shown, reader, selects)
        if selection is not None:
            check_patterns(selection, list(seen))
        return proof.to_json().encode()

    return Proof.of_json(ranks.reduce_broadcast("prove", local, compared).decode())


# -- digests of a rank ---------------------------------------------------------------------------------------


def _digests_of_rank(local: RankState) -> bytes:
    """Return columns, tensor digests, value hashes, bytes and seconds of a rank's state, encoded."""
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
    return pack([encode_save_columns(columns), added, prints, size, time.perf_counter() - begun])


def _check_inside(columns: SaveColumns, places: LogicalPlaces) -> None:
    """Raise PlanError for a box outside of its tensor."""
    offsets, sizes = places.offsets, places.sizes
    outside = np.flatnonzero((offsets < 0) | (sizes < 0) | (sizes > places.shapes - offsets))
    if len(outside):
        item = int(np.searchsorted(places.start, outside[0], "right")) - 1
        fqn = columns.fqns[int(columns.item_tensors[item])]
        own = slice(*places.start[item : item + 2].tolist())
        box = f"{sizes[own].tolist()} from {offsets[own].tolist()} on"
        raise PlanError(
            f"{fqn!r} has a shard, {box}, outside of its shape {places.shapes[own].tolist()}", fqn=fqn
        )


def _value_print(plain: bytes | None, blob: bytes) -> bytes:
    """Return bytes that are equal for equal values: ``v`` and a hash of the value, or ``p`` and a hash of the
    pickle.

    Pickles of equal objects may differ.
    """
    if plain is not None:
        return b"v" + _hash(plain)
    encoded: bytes | None = None
    with contextlib.suppress(CheckpointFormatError):  # objects of unknown classes
        encoded = encode_value(ObjectBlob(blob).value(), limit_bytes=_MAX_ENCODED_BYTES)
    return b"p" + _hash(blob) if encoded is None else b"v" + _hash(encoded)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_PRINT_BYTES).digest()


# -- comparison with the checkpoint --------------------------------------------------------------------------

_RanksBy = dict[bytes, list[int]]
"""Ranks grouped by a property."""

_Types = dict[tuple[int, tuple[int, ...]], list[int]]
"""Ranks by dtype code and shape."""

_Parts = dict[Box, _RanksBy]
"""For each box of a tensor, its contribution to the digest on each rank."""


def _compare_ranks(shown: Sequence[bytes], reader: TensorReader, selects: Callable[[str], bool]) -> Proof:
    """Compare the encoded states of all ranks with the checkpoint of ``reader``."""
    index, world_size = reader.index, len(shown)
    types, parts, values, shares = _gathered(shown, selects)
    stored = [fqn for fqn in (*index.fqns, *index.objects.fqns) if selects(fqn)]
    missing = [fqn for fqn in stored if fqn not in types and fqn not in values]
    left = {fqn: None for fqn in missing if rank_holder(fqn) is not None and rank_number(fqn) >= world_size}
    tensors = [fqn for fqn in types if fqn in index.position]
    objects = [fqn for fqn in values if fqn in index.objects.position]
    what = "was saved, but is missing on all ranks"
    findings = [ProofFinding("missing", fqn, f"{fqn!r} {what}") for fqn in missing if fqn not in left]
    unexpected = [fqn for fqn in types if fqn not in index.position]
    unexpected += [fqn for fqn in values if fqn not in index.objects.position]
    what = "is not in the checkpoint, or has another kind there"
    findings += [ProofFinding("unexpected", fqn, f"{fqn!r} {what}") for fqn in unexpected]
    overlapping = _overlaps({fqn: parts[fqn] for fqn in tensors})
    for fqn in tensors:
        other_types = _compare_types(index, fqn, types[fqn])
        findings += other_types or _compare_parts(reader, fqn, parts[fqn], overlapping.get(fqn))
    for fqn in objects:
        findings += _compare_value(reader, fqn, values[fqn])
    differing: list[list[str]] = [[] for _ in shown]
    for found in findings:
        for rank in found.ranks:
            differing[rank].append(found.fqn)
    return Proof(
        checkpoint=reader.name,
        save_id=index.provenance.get("save_id"),
        world_size=world_size,
        tensors=len(tensors),
        values=len(objects),
        bytes=sum(reader.tensor_bytes(index.position[fqn]) for fqn in tensors),
        bytes_read=reader.bytes_read,
        findings=tuple(findings),
        left=tuple(left),
        ranks=tuple(replace(one, differing=tuple(own)) for one, own in zip(shares, differing, strict=True)),
    )


@garbage_collection_paused()
def _gathered(
    shown: Sequence[bytes], selects: Callable[[str], bool]
) -> tuple[dict[str, _Types], dict[str, _Parts], dict[str, _RanksBy], list[RankProof]]:
    """Return types and parts by tensor, prints by value, and the share of each rank without findings."""
    types: dict[str, _Types] = {}
    parts: dict[str, _Parts] = {}
    values: dict[str, _RanksBy] = {}
    shares: list[RankProof] = []
    sections: SectionCache = {}
    for rank, data in enumerate(shown):
        packed, added, prints, size_bytes, seconds = unpack(data)
        columns = decode_save_columns(packed, sections)
        fqns, names = columns.fqns, columns.objects.fqns
        shares.append(RankProof(rank, len(fqns), size_bytes, len(names), round(seconds, 6), ()))
        codes, shapes = columns.dtype_codes.tolist(), columns.shape_values.tolist()
        starts, selected = columns.shape_start.tolist(), [selects(fqn) for fqn in fqns]
        for row, fqn in enumerate(fqns):
            if selected[row]:
                of = codes[row], tuple(shapes[starts[row] : starts[row + 1]])
                types.setdefault(fqn, {}).setdefault(of, []).append(rank)
                parts.setdefault(fqn, {})
        begins, offsets = columns.box_start.tolist(), columns.item_offsets.tolist()
        sizes = columns.item_sizes.tolist()
        for item, row in enumerate(columns.item_tensors.tolist()):
            if selected[row]:
                at = slice(begins[item], begins[item + 1])
                box, value = Box(tuple(offsets[at]), tuple(sizes[at])), added[item].tobytes()
                parts[fqns[row]].setdefault(box, {}).setdefault(value, []).append(rank)
        for fqn, found in zip(names, prints, strict=True):
            if selects(fqn):
                values.setdefault(fqn, {}).setdefault(found, []).append(rank)
    return types, parts, values, shares


def _compare_types(index: CheckpointIndex, fqn: str, types: _Types) -> list[ProofFinding]:
    """Return findings for ranks with another dtype or shape."""
    row = index.position[fqn]
    dtype, shape = index.dtype(row), index.shape(row)
    found = []
    for (code, sizes), ranks in types.items():
        own = dtypes.BY_CODE[code].name
        if own != dtype.name:
            found.append(_differs("dtype", fqn, f"is {own}, but was saved as {dtype.name}", ranks))
        elif sizes != shape:
            found.append(_differs("shape", fqn, f"has shape {sizes}, but was saved with {shape}", ranks))
    return found


def _compare_parts(
    reader: TensorReader, fqn: str, parts: _Parts, overlapping: tuple[Box, Box] | None
) -> Iterator[ProofFinding]:
    """Yield findings for the boxes and bytes of a tensor with the saved dtype and shape."""
    row = reader.index.position[fqn]
    elements = math.prod(reader.index.shape(row))
    found = sum(box.volume for box in parts)
    if overlapping is not None:
        found = sum(box.volume for _, box in disjoint([*parts]))
        ranks = {rank for box in overlapping for some in parts[box].values() for rank in some}
        what = f"has overlapping shards, {_text(overlapping[0])} and {_text(overlapping[1])}"
        yield _differs("overlap", fqn, what, sorted(ranks))
    if found != elements:
        message = f"{fqn!r}: {found} of its {elements} elements are on the ranks"
        yield ProofFinding("incomplete", fqn, message)
    elif overlapping is None and not _has_sum(reader.index, row, parts):
        odd: set[int] = set()
        for box, by in parts.items():
            expected = _stored_value(reader, row, box)
            odd.update(rank for added, ranks in by.items() if added != expected for rank in ranks)
        if odd:
            yield _differs("tensor", fqn, "has bytes that differ from the saved ones", sorted(odd))


def _has_sum(index: CheckpointIndex, row: int, parts: _Parts) -> bool:
    """Return whether the digests of all ranks agree with the manifest; False without a stored digest."""
    expected = index.digests[row] if len(index.digests) else b""
    if not expected or any(len(found) > 1 for found in parts.values()):
        return False
    total = np.zeros(2, np.uint64)
    for found in parts.values():
        total ^= np.frombuffer(next(iter(found)), np.uint64)
    return total.tobytes() == expected


def _stored_value(reader: TensorReader, row: int, box: Box) -> bytes:
    """Read the stored elements of ``box`` and return their contribution to the digest."""
    index = reader.index
    runs = logical_runs(index.shape(row), box.offsets, box.sizes, index.dtype(row).itemsize)
    digest = BoxDigest(runs)
    if box.volume:
        for slab in reader.slabs(row, box.slices):
            digest.update(np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data)
    return product(power(KEY, runs.blocks_behind), digest.value()).to_bytes(SUM_BYTES, "big")


def _compare_value(reader: TensorReader, fqn: str, prints: _RanksBy) -> Iterator[ProofFinding]:
    objects = reader.index.objects
    row = objects.position[fqn]
    if objects.plain[row] >= 0:
        expected = _value_print(objects.values[objects.plain[row]], b"")
    else:
        place = int(objects.files[row]), int(objects.offsets[row]), int(objects.lengths[row])
        expected = _value_print(None, reader.blob(*place))
    odd = {found: ranks for found, ranks in prints.items() if found != expected}
    if odd:
        is_decided = expected[:1] == b"v" or any(found[:1] == b"v" for found in odd)
        what = "differs from the saved value"
        if not is_decided:
            what = (
                "has a pickle that differs from the saved one; comparing the objects would run untrusted code"
            )
        ranks = sorted(rank for some in odd.values() for rank in some)
        yield _differs("value" if is_decided else "undecided", fqn, what, ranks)


def _differs(kind: FindingKind, fqn: str, what: str, ranks: Sequence[int]) -> ProofFinding:
    shown = listed([*map(str, ranks)], most=_MAX_LISTED, show=str)
    which = f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
    return ProofFinding(kind, fqn, f"{fqn!r} {what}: {which}", tuple(ranks))


def _text(box: Box) -> str:
    return f"{list(box.sizes)} from {list(box.offsets)} on"


@garbage_collection_paused()
def _overlaps(boxes: Mapping[str, Collection[Box]]) -> dict[str, tuple[Box, Box]]:
    """Return two boxes that share elements, for each tensor with an overlap. The boxes of a tensor must be
    distinct.
    """
    names = [name for name, own in boxes.items() if len(own) > 1]
    by_ndim: dict[int, tuple[list[int], list[Box]]] = {}
    for number, name in enumerate(names):
        for box in boxes[name]:
            numbers, own = by_ndim.setdefault(len(box.sizes), ([], []))
            numbers.append(number)
            own.append(box)
    found: dict[str, tuple[Box, Box]] = {}
    for numbers, own in by_ndim.values():  # a thousand ranks have millions of boxes
        low, sizes = (np.array(column, np.int64) for column in zip(*own, strict=True))
        high = low + sizes
        pairs = overlapping_pairs(BoxSet(np.array(numbers, np.int64), low, high))
        for one, other in zip(*(side.tolist() for side in pairs), strict=True):
            found.setdefault(names[numbers[one]], (own[one], own[other]))
    return found
