"""Values that are no tensors: their plain data, or the bytes that stock torch unpickles.

Nothing is unpickled. What the source has as plain data is taken from its index, small blobs are decoded with
the allow-list decoder; anything else has no value here, and travels as its bytes or not at all.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from typing import Any

from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError, UnsafeObjectError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.pickle_decoder import BuiltDict
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.formats.record import object_record
from dcp.storage.formats.tensor_pickle import TensorPickle
from dcp.storage.formats.torch_pickle import COUNTER, SizePickle, decode_torch_pickle
from dcp.storage.formats.torch_pickle_writer import SizeValue
from dcp.storage.formats.torch_zip import Window, entry_start, read_directory

__all__ = ["SourceValues"]

_MAX_BLOB_BYTES = 256 << 20
_MAX_DEPTH = 64
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class SourceValues:
    """The values of a source, read once each through ``engine``."""

    def __init__(self, engine: ReadEngine) -> None:
        self._engine = engine
        self._objects = engine.index.objects
        self._blobs: dict[tuple[int, int, int], bytes] = {}

    def value(self, row: int) -> Any:
        """The value of a row: plain data, and containers that torch.load knows.

        UnsafeObjectError, a CheckpointFormatError, for any other; nothing of it is run.
        """
        number = int(self._objects.plain[row])
        if number >= 0:
            return decode_plain(self._objects.values[number])
        return self._decode(self.blob(row), self._objects.fqns[row])

    def encoded(self, row: int) -> bytes | None:
        """The msgpack encoding of a plain value; None for any other."""
        number = int(self._objects.plain[row])
        if number >= 0:
            return self._objects.values[number]
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
        """The value of torch.save bytes without tensors."""
        if blob[:1] == b"\x80":  # torch's format of before 1.6: magic number, protocol, facts, then the value
            raise UnsafeObjectError(f"object {fqn!r} is in a format that torch alone reads", fqn=fqn)
        window = Window(lambda at, count: blob[at : at + count], 0, len(blob))
        for name, entry in read_directory(window).items():
            if name.endswith(b"/data.pkl"):
                begin = entry_start(window, entry)
                return _inert(decode_torch_pickle(blob[begin : begin + entry.size]), fqn, 0)
        raise CheckpointFormatError(f"object {fqn!r} was not written by torch.save, or is damaged", fqn=fqn)


def _inert(value: Any, fqn: str, depth: int) -> Any:
    """The value of a decoded pickle; UnsafeObjectError where it needs more than containers and plain data."""
    if depth > _MAX_DEPTH:
        raise CheckpointFormatError(f"object {fqn!r} is nested deeper than {_MAX_DEPTH} levels", fqn=fqn)
    if isinstance(value, SizePickle):
        return SizeValue(value)
    if isinstance(value, list | tuple | set):
        return type(value)(_inert(item, fqn, depth + 1) for item in value)
    if isinstance(value, dict):
        items = {_inert(key, fqn, depth + 1): _inert(item, fqn, depth + 1) for key, item in value.items()}
        if isinstance(value, BuiltDict):
            return Counter(items) if value.kind == COUNTER else OrderedDict(items)
        return items
    if type(value) in _ATOMS:
        return value
    if isinstance(value, TensorPickle):
        raise UnsafeObjectError(f"object {fqn!r} has a tensor in it", fqn=fqn)
    need = getattr(value, "kind", None) or getattr(value, "name", None) or type(value).__name__
    raise UnsafeObjectError(f"object {fqn!r} needs {need}", fqn=fqn)


def _damaged(engine: ReadEngine, fqn: str, got: int, expected: int) -> Exception:
    return CorruptCheckpointError(
        f"{engine.store.url}: object {fqn!r} is damaged: CRC-32 {got:08x}, committed was {expected:08x}. "
        "Convert "
        "another checkpoint, or exclude it",
        fqn=fqn,
    )
