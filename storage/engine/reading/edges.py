"""Both ends of many records by few requests: foreign records say there where their payload is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dcp.storage.engine.reading.joining import NO_CHUNK, RequestPiece
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.stores.base import ReadHandle

__all__ = ["MAX_RECORDS", "Edges"]

MAX_RECORDS = 4096
"""Records whose ends are worth holding at a time: 32 MiB."""

_EDGE_BYTES = 4096
"""`torch.save` has its pickle and the payload's header within the first, its directory within the last."""


class Edges:
    """The ends of the records of ``chunks``, as far as their files reach; `pieces` is what is to be read."""

    def __init__(
        self, index: CheckpointIndex, chunks: Iterable[int], handle: Callable[[int], ReadHandle]
    ) -> None:
        self._handle = handle
        self._parts: dict[tuple[int, int], bytes] = {}
        self._others: dict[tuple[int, int, int], bytes] = {}
        self.pieces: list[RequestPiece] = []
        for chunk in chunks:
            file = int(index.chunk_files[chunk])
            begin, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
            if begin + length > handle(file).size_bytes:
                continue  # whoever opens the record says what is wrong
            for at, count in _ends(begin, length):
                put = partial(self._keep, (file, at))
                self.pieces.append(RequestPiece(file, at, count, NO_CHUNK, 0, 0, put))
        self.pieces.sort(key=lambda piece: piece[:3])

    def reader(self, index: CheckpointIndex, chunk: int) -> Callable[[int, int], bytes]:
        """Reads (offset, length) of the chunk's file: from what is here, or else from the file."""
        file = int(index.chunk_files[chunk])
        ends = _ends(int(index.record_offsets[chunk]), int(index.record_lengths[chunk]))
        parts = [(at, data) for at, _ in ends if (data := self._parts.get((file, at))) is not None]

        def read(offset: int, length: int) -> bytes:
            for at, data in parts:
                if at <= offset and offset + length <= at + len(data):
                    return data[offset - at : offset - at + length]
            key = file, offset, length
            if key not in self._others:  # one header serves all records of a safetensors blob
                self._others[key] = self._handle(file).pread(length, offset)
            return self._others[key]

        return read

    def _keep(self, key: tuple[int, int], data: memoryview) -> None:
        self._parts[key] = bytes(data)


def _ends(begin: int, length: int) -> Sequence[tuple[int, int]]:
    """Offset and length of a record's both ends, or of all of it."""
    if length <= 2 * _EDGE_BYTES:
        return [(begin, length)]
    return [(begin, _EDGE_BYTES), (begin + length - _EDGE_BYTES, _EDGE_BYTES)]
