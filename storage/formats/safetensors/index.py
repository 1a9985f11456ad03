"""A safetensors file as a `CheckpointIndex`; only its header is read. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import MAX_DIMENSIONS, CheckpointIndex, Deferred, starts
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
    entries = list(header.entries.values())
    sizes = np.array([size for entry in entries for size in entry.sizes], dtype=np.int64)
    offsets = _shard_offsets(header, name)
    lengths = np.array([entry.end - entry.begin for entry in entries], dtype=np.int64)
    places = np.array([entry.begin for entry in entries], dtype=np.int64) + header.data_offset
    metadata = {key: value for key, value in header.metadata.items() if key != _SHARDING_KEY}
    fqns, count = list(header.entries), len(entries)
    index = CheckpointIndex(
        format=SAFETENSORS.name,
        fqns=fqns,
        dtype_codes=np.array([entry.dtype_code for entry in entries], dtype=np.uint8),
        shape_start=starts([len(entry.sizes) for entry in entries]),
        shape_values=sizes + offsets,
        requires_grad=np.zeros(count, dtype=np.uint8),
        chunk_start=np.arange(count + 1, dtype=np.int64),
        chunk_offsets=offsets,
        chunk_sizes=sizes,
        chunk_files=np.zeros(count, dtype=np.int64),
        record_offsets=places,
        record_lengths=lengths,
        payload_offsets=places,
        payload_lengths=lengths,
        crc_start=np.zeros(count + 1, dtype=np.int64),
        files=[name],
        file_sizes=np.array([size_bytes], dtype=np.int64),
        planner_data=Deferred(partial(_paths, fqns)),
        provenance={"sharded": True} if _SHARDING_KEY in header.metadata else {},
        user=metadata,
    )
    index.check()
    return index


def _paths(fqns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Nothing is nested."""
    return {fqn: (fqn,) for fqn in fqns}


def _shard_offsets(header: SafetensorsHeader, name: str) -> Any:
    """Where the tensors of the file stand in the whole ones, flat: 0, unless stock DCP noted something
    else."""
    total = sum(len(entry.sizes) for entry in header.entries.values())
    text = header.metadata.get(_SHARDING_KEY)
    if text is None:
        return np.zeros(total, dtype=np.int64)
    noted = parse_json(text.encode("utf-8", "surrogatepass"), f"{_SHARDING_KEY} of {name}")
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
