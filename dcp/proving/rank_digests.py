"""What one rank has, as it travels: names, boxes with what each adds to a digest, values."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.encoded_objects import encoded_object
from dcp.planners.rank_state import RankState
from dcp.planners.wire.codec import SectionCache, decode_save_columns, encode_save_columns
from dcp.storage.digests.field import as_elements
from dcp.storage.digests.places import LogicalPlaces
from dcp.storage.digests.shown import SUM_BYTES
from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats.index import Int64, itemsizes
from dcp.storage.formats.native.object_blob import ObjectBlob
from dcp.storage.formats.torch.python_values import encode_value, python_value
from dcp.storage.geometry.ragged import gather_rows
from dcp.storage.tensors import byte_pieces

__all__ = ["RankDigests", "digests_of_rank", "value_print"]

_PRINT_BYTES = 16
_MAX_ENCODED_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class RankDigests:
    """What a rank has: ``added`` is two words for each item of ``columns``, ``prints`` what `value_print`
    makes of each value."""

    columns: SaveColumns
    added: npt.NDArray[np.uint64]
    prints: Sequence[bytes]
    size_bytes: int
    seconds: float

    def encode(self) -> bytes:
        """As bytes."""
        fields = [encode_save_columns(self.columns), self.added.tobytes(), list(self.prints)]
        return bytes(msgpack.packb([*fields, self.size_bytes, self.seconds]))

    @classmethod
    def decode(cls, data: bytes, sections: SectionCache) -> RankDigests:
        """The inverse of `encode`; all ranks' share ``sections``."""
        columns, added, prints, size, seconds = msgpack.unpackb(data)
        elements = as_elements(added)
        return cls(decode_save_columns(columns, sections), elements, prints, size, seconds)


def digests_of_rank(local: RankState) -> RankDigests:
    """The digests of a rank's state; all its tensors are read."""
    begun = time.perf_counter()
    columns = local.columns
    places = _places(columns)
    _check_inside(columns, places)
    rows = np.arange(len(columns.item_tensors), dtype=np.int64)
    values = bytearray()
    for row, view in zip(rows.tolist(), local.views(rows), strict=True):
        box = places.digest(row)()
        for piece in byte_pieces(view.detach()):
            box.update(memoryview(piece))
        values += box.value().to_bytes(SUM_BYTES, "big")
    prints = []
    for fqn, value in zip(columns.objects.fqns, local.objects, strict=True):
        encoded = encoded_object(fqn, value, {})
        prints.append(value_print(encoded.plain, encoded.blob))
    added = places.placed(as_elements(bytes(values)))
    size = int((places.volumes * places.itemsizes).sum())
    return RankDigests(columns, added, prints, size, time.perf_counter() - begun)


def _places(columns: SaveColumns) -> LogicalPlaces:
    tensors = columns.item_tensors
    shapes = gather_rows(columns.shape_values, columns.shape_start, tensors)
    sizes: Int64 = itemsizes(columns.dtype_codes[tensors])
    return LogicalPlaces(columns.box_start, shapes, columns.item_offsets, columns.item_sizes, sizes)


def _check_inside(columns: SaveColumns, places: LogicalPlaces) -> None:
    """PlanError for a box that reaches outside of its tensor, as a save raises it."""
    offsets, sizes = places.offsets, places.sizes
    outside = np.flatnonzero((offsets < 0) | (sizes < 0) | (sizes > places.shapes - offsets))
    if len(outside):
        item = int(np.searchsorted(places.start, outside[0], "right")) - 1
        fqn, own = (
            columns.fqns[int(columns.item_tensors[item])],
            slice(*places.start[item : item + 2].tolist()),
        )
        box = f"{sizes[own].tolist()} from {offsets[own].tolist()} on"
        raise PlanError(
            f"{fqn!r} has a part, {box}, outside of its shape {places.shapes[own].tolist()}", fqn=fqn
        )


def value_print(plain: bytes | None, blob: bytes) -> bytes:
    """Values with the same print are equal, their types too. It is ``v`` and a hash of the value or, if
    that has classes of the user's, ``p`` and a hash of its pickle, which may differ for equal values."""
    if plain is not None:
        return b"v" + _hash(plain)
    encoded: bytes | None = None
    try:
        opened = ObjectBlob(blob)
        encoded = encode_value(_value_of(opened), limit_bytes=_MAX_ENCODED_BYTES)
    except CheckpointFormatError:
        pass  # it has classes that are not decoded
    return b"p" + _hash(blob) if encoded is None else b"v" + _hash(encoded)


def _value_of(opened: ObjectBlob) -> Any:
    return python_value(opened.decoded, opened.pickle_bytes)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_PRINT_BYTES).digest()
