"""Flat state of a rank: columns, local tensors, objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.planners.by_value import by_value, encode_by_value
from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.value_digests import ReplicaCheck, digest_bytes, digest_tensors, digest_value
from dcp.storage.errors import PlanError
from dcp.storage.formats.native.record import object_record
from dcp.storage.formats.plain import encode_plain
from dcp.storage.geometry.strides import Int64, row_products
from dcp.storage.tensors import LocalMemory, narrow

OPAQUE_OBJECT_BYTES = 4 << 10
"""Assumed size of an object other than plain data, for balancing."""


_KEPT_ENCODINGS = 256


class EncodedObject(NamedTuple):
    """Encoded object: torch.save bytes, plus plain msgpack bytes for plain data, or a digest for comparison
    between ranks (`dcp.planners.value_digests`).
    """

    blob: bytes
    plain: bytes | None
    digest: int = 0


def encoded_object(
    fqn: str, value: Any, cache: dict[bytes, bytes], *, with_digest: bool = False
) -> EncodedObject:
    """Encode ``value`` unless encoded; ``cache`` serves one save.

    Plain data and values equal to plain data (`dcp.planners.by_value`) are put into a torch.save container
    without torch, once for equal values. torch pickles other values.

    Raises:
        PlanError: For values that cannot be encoded, with the name.
    """
    if type(value) is EncodedObject:
        return value
    stored, buffer = value, io.BytesIO()
    try:
        plain = encode_plain(stored)
        if plain is None:
            stored = by_value(stored)
            plain = encode_plain(stored)
        if plain is None:
            torch.save(stored, buffer)
            return EncodedObject(buffer.getvalue(), None, digest_value(value) if with_digest else 0)
        blob = cache.get(plain) or object_record(pickle.dumps(stored, protocol=2))
    except Exception as error:  # raised by pickling code of the value's class
        raise PlanError(
            f"{fqn!r}, a {type(value).__name__}, cannot be pickled: {type(error).__name__}: {error}. Remove "
            "it from the state dict, or convert it to plain data",
            fqn=fqn,
        ) from error
    if len(cache) < _KEPT_ENCODINGS:
        cache[plain] = blob
    return EncodedObject(blob, plain)


@dataclass(frozen=True, eq=False)
class RankState:
    """State dict of a rank in columns.

    ``memory`` has the local tensors by source number: the state's own, on any device, or staged copies.
    ``objects`` are values by object row, encoded if later changes must not matter. ``replicated`` (by
    item): other ranks may hold the same box. ``digested``: columns contain digests for the replica check.
    ``foreign_keys``: types of keys saved as strings, by name.
    """

    columns: SaveColumns
    memory: LocalMemory
    objects: Sequence[Any]
    replicated: npt.NDArray[np.uint8]
    digested: bool = False
    foreign_keys: Mapping[str, str] = field(default_factory=dict)

    def views(self, rows: Int64) -> list[torch.Tensor]:
        """Return the box of each item of ``rows``, or the local tensor itself if whole."""
        columns, numbers = self.columns, self.columns.item_sources[rows]
        views = [self.memory.tensors[number] for number in numbers.tolist()]
        sizes = row_products(columns.item_sizes, columns.box_start)[rows]
        for position in np.flatnonzero(sizes != self.memory.volumes[numbers]).tolist():
            row = int(rows[position])
            box = slice(int(columns.box_start[row]), int(columns.box_start[row + 1]))
            offsets, extent = columns.item_local_offsets[box].tolist(), columns.item_sizes[box].tolist()
            views[position] = narrow(views[position], offsets, extent)
        return views

    def encoded(self) -> RankState:
        """Encode all values, to be independent of later changes."""
        cache: dict[bytes, bytes] = {}
        named = zip(self.columns.objects.fqns, self.objects, strict=True)
        objects = [encoded_object(fqn, value, cache, with_digest=True) for fqn, value in named]
        return replace(self, objects=objects)

    def encoded_objects(self, rows: Int64) -> tuple[list[bytes], list[bytes | None]]:
        """Encode the values of ``rows``: torch.save bytes, and plain msgpack bytes or None."""
        cache: dict[bytes, bytes] = {}
        fqns, values = self.columns.objects.fqns, self.objects
        # Two lists, because the cyclic garbage collector would visit each of very many pairs.
        blobs: list[bytes] = []
        plains: list[bytes | None] = []
        for row in rows.tolist():
            encoded = encoded_object(fqns[row], values[row], cache)
            blobs.append(encoded.blob)
            plains.append(encoded.plain)
        return blobs, plains

    def with_digests(self, check: ReplicaCheck) -> RankState:
        """Add digests for the replica check: of replicated boxes and of values."""
        if self.digested:
            return self
        rows = np.flatnonzero(self.replicated)
        digests = np.zeros(len(self.replicated), np.uint64)
        digests[rows] = digest_tensors(self.views(rows), check)
        columns = replace(self.columns, item_digests=digests, objects=self.digested_objects(check))
        return replace(self, columns=columns, digested=True)

    def digested_objects(self, check: ReplicaCheck) -> SaveObjects:
        """Return the names of values with digests (0 if not compared) and approximate sizes."""
        fqns = self.columns.objects.fqns
        digests, sizes = np.zeros(len(fqns), np.uint64), np.zeros(len(fqns), np.int64)
        for row, value in enumerate(self.objects if check != "off" else ()):
            is_encoded = type(value) is EncodedObject
            encoded = value.plain if is_encoded else encode_by_value(value)
            if encoded is None:
                digests[row] = value.digest if is_encoded else digest_value(value)
                sizes[row] = _opaque_bytes(value)
            else:
                digests[row], sizes[row] = digest_bytes(encoded), len(encoded)
        return SaveObjects(fqns, digests, sizes)


def _opaque_bytes(value: Any) -> int:
    if type(value) is EncodedObject:
        return max(len(value.blob), OPAQUE_OBJECT_BYTES)
    return len(value) if isinstance(value, bytes | bytearray | str) else OPAQUE_OBJECT_BYTES
