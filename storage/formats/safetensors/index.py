"""A safetensors file as a `CheckpointIndex`; only its header is read. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import MAX_DIMENSIONS, CheckpointIndex, WholeTensor
from dcp.storage.formats.safetensors.file import SafetensorsHeader, parse_header
from dcp.storage.formats.safetensors.format import SAFETENSORS
from dcp.storage.formats.safetensors.json_documents import parse_json

__all__ = ["index_of_safetensors_file"]

_SHARDING_KEY: Final = "DCP_SHARDING_INFO"
_HEAD_BYTES: Final = 64 << 10


def index_of_safetensors_file(
    read: Callable[[int, int], bytes], size_bytes: int, name: str
) -> CheckpointIndex:
    """The index of one safetensors file, of which ``read(offset, length)`` reads exactly that.

    The header is checked as the format's specification demands (see `dcp.storage.formats.safetensors.file`).
    """
    head = read(0, min(size_bytes, _HEAD_BYTES))

    def read_header(at: int, count: int) -> bytes:
        return head[at : at + count] if at + count <= len(head) else read(at, count)

    header = parse_header(read_header, size_bytes)
    tensors = [
        WholeTensor(fqn, entry.dtype_code, entry.sizes, name, header.data_offset + entry.begin)
        for fqn, entry in header.entries.items()
    ]
    index = CheckpointIndex.of_whole_tensors(SAFETENSORS.name, tensors, {name: size_bytes})
    metadata, provenance = dict(header.metadata), {}
    if metadata.pop(_SHARDING_KEY, None) is not None:
        offsets, provenance = _shard_offsets(header, name), {"sharded": True}
        index = replace(index, shape_values=index.shape_values + offsets, chunk_offsets=offsets)
        index.check()
    return replace(index, provenance=provenance, user=metadata)


def _shard_offsets(header: SafetensorsHeader, name: str) -> Any:
    """Return where the tensors of the file stand in the whole ones, flat: 0, unless stock DCP noted it."""
    text = header.metadata[_SHARDING_KEY].encode("utf-8", "surrogatepass")
    noted = parse_json(text, f"{_SHARDING_KEY} of {name}")
    offsets: list[int] = []
    for fqn, entry in header.entries.items():
        info = noted.get(fqn)
        saved = [0] * len(entry.sizes) if info is None else None
        if isinstance(info, dict):
            saved = info.get("saved_offsets")
        if (
            not isinstance(saved, list)
            or len(saved) != len(entry.sizes) <= MAX_DIMENSIONS
            or not all(type(offset) is int and 0 <= offset < 1 << 62 for offset in saved)
        ):
            raise CheckpointFormatError(
                f"{name}: {_SHARDING_KEY} has no offsets for {fqn[:200]!r} that fit its shape", fqn=fqn
            )
        offsets += saved
    return np.array(offsets, dtype=np.int64)
