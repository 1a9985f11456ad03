"""Values that are no tensors: what they are where that is harmless, or the bytes that stock torch unpickles.

Nothing is unpickled. What the source has in its index is taken from there, blobs are decoded with the
allow-list decoder; anything else has no value here, and travels as its bytes or not at all.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError, UnsafeObjectError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.native.object_blob import ObjectBlob
from dcp.storage.formats.native.record import object_record
from dcp.storage.formats.plain import encode_plain
from dcp.storage.formats.torch.pickle_reader import DevicePickle, SizePickle
from dcp.storage.formats.torch.pickle_writer import PickledTensor, SizeValue
from dcp.storage.formats.torch.python_values import HARMLESS_MARK, decode_value, python_value
from dcp.storage.formats.torch.tensor_pickle import TensorPickle

__all__ = ["SourceValues", "torch_allows"]

_MAX_BLOB_BYTES = 256 << 20
_TORCH_KNOWS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        SizeValue,
        Dtype,
        DevicePickle,
        PickledTensor,
    }
)


class SourceValues:
    """The values of a source, read once each through ``engine``."""

    def __init__(self, engine: ReadEngine) -> None:
        self._engine = engine
        self._objects = engine.index.objects
        self._blobs: dict[tuple[int, int, int], bytes] = {}

    def value(self, row: int) -> Any:
        """The value of a row: what is harmless, with `PickledTensor` for tensors in it.

        UnsafeObjectError, a CheckpointFormatError, for any other; nothing of it is run.
        """
        number = int(self._objects.plain[row])
        if number >= 0:
            return decode_value(self._objects.values[number])
        return self._decode(self.blob(row), self._objects.fqns[row])

    def encoded(self, row: int) -> bytes | None:
        """The msgpack encoding of a plain value; None for any other."""
        number = int(self._objects.plain[row])
        if number >= 0:
            encoded = self._objects.values[number]
            return None if encoded[:1] == HARMLESS_MARK else encoded
        try:
            return encode_plain(self.value(row))
        except CheckpointFormatError:
            return None

    def blob(self, row: int) -> bytes:
        """The torch.save bytes of a row, as they are stored, or made for plain data that has none."""
        objects = self._objects
        place = int(objects.files[row]), int(objects.offsets[row]), int(objects.lengths[row])
        if place[0] < 0:
            return object_record(pickle.dumps(self.value(row), protocol=2))
        if place[2] > _MAX_BLOB_BYTES:
            raise CheckpointFormatError(
                f"the object {objects.fqns[row]!r} has {place[2]} bytes, more than the {_MAX_BLOB_BYTES} "
                "that are "
                "converted; exclude it",
                fqn=objects.fqns[row],
            )
        if place not in self._blobs:
            blob = self._engine.read_blob(*place)
            expected = int(objects.crcs[row])
            if self._engine.verify != "none" and expected >= 0 and crc32(blob) != expected:
                raise _damaged(self._engine, objects.fqns[row], crc32(blob), expected)
            self._blobs[place] = blob
        return self._blobs[place]

    @staticmethod
    def _decode(blob: bytes, fqn: str) -> Any:
        """The value of torch.save bytes; tensors in it are `PickledTensor`."""
        if blob[:1] == b"\x80":  # torch's format of before 1.6: magic number, protocol, facts, then the value
            raise UnsafeObjectError(f"object {fqn!r} is in a format that torch alone reads", fqn=fqn)
        try:
            opened = ObjectBlob(blob)
            special: dict[type, Callable[[Any], Any]] = {
                SizePickle: SizeValue,
                Dtype: _as_it_is,
                DevicePickle: _as_it_is,
            }
            special[TensorPickle] = lambda facts: _stored(facts, opened)
            return python_value(opened.decoded, opened.pickle_bytes, special)
        except CheckpointFormatError as error:
            raise type(error)(f"object {fqn!r}: {error}", **{**error.facts, "fqn": fqn}) from error


def torch_allows(value: Any) -> bool:
    """Whether `torch.load(weights_only=True)` takes what `SourceValues.value` gave."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        return all(torch_allows(part) for pair in value.items() for part in pair)
    if kind in (list, tuple, set):
        return all(map(torch_allows, value))
    return kind in _TORCH_KNOWS


def _as_it_is(value: Any) -> Any:
    return value


def _stored(facts: TensorPickle, opened: ObjectBlob) -> PickledTensor:
    return PickledTensor(
        facts.dtype_code, facts.sizes, opened.elements(facts).tobytes(), requires_grad=facts.requires_grad
    )


def _damaged(engine: ReadEngine, fqn: str, got: int, expected: int) -> Exception:
    return CorruptCheckpointError(
        f"{engine.store.url}: object {fqn!r} is damaged: CRC-32 {got:08x}, committed was {expected:08x}. "
        "Convert "
        "another checkpoint, or exclude it",
        fqn=fqn,
    )
