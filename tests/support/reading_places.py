"""Checkpoints in storage with expensive requests, and tensors that hold a box of a larger tensor."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dcp
from dcp.storage.stores import MemoryStore, PosixStore, Store
from tests.support.recording import RecordingStore

__all__ = ["Place", "boxed", "flipped", "reader_of"]


class Place:
    """A store that any path opens: on a disk, in memory, or one that prefers few requests."""

    def __init__(self, make: Callable[[str], Store] = RecordingStore) -> None:
        self.store: Any = make(f"reading-{uuid.uuid4().hex}")

    def __call__(self, path: object) -> Store:
        """Return the store, for any path."""
        store: Store = self.store
        return store

    def take(self, folder: Path) -> Place:
        """Copy a checkpoint from a disk into the store."""
        source = PosixStore(folder)
        for info in source.list():
            with self.store.create(info.name, durable=False) as handle:
                handle.write(source.read(info.name, limit_bytes=1 << 30))
        return self

    def save(self, state: dict[str, Any], **options: Any) -> Place:
        """Save into the store, in a single process."""
        dcp.save(state, storage_writer=dcp.FileSystemWriter("x", open_store=self, **options), no_dist=True)
        return self

    def load(self, state: dict[str, Any], verify: Any = "blocks", **options: Any) -> Any:
        """Load from the store, in a single process; return the report."""
        return dcp.load(state, storage_reader=reader_of(self, verify), no_dist=True, **options)

    def forget(self) -> None:
        """Delete the files, which otherwise live as long as the process."""
        for info in MemoryStore.list(self.store):
            self.store.delete(info.name)


def reader_of(place: Callable[[Any], Store], verify: Any = "blocks") -> dcp.FileSystemReader:
    """Return a reader of the place."""
    return dcp.FileSystemReader("x", open_store=place, verify=verify)


def boxed(
    memory: torch.Tensor,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    at: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return ``memory`` as a tensor that declares its box: ``offsets`` and ``sizes`` in a tensor of
    ``shape``, stored ``at`` a position in memory."""
    local: Any = memory
    local.global_shape, local.local_sizes = tuple(shape), (tuple(sizes),)
    local.global_offsets, local.local_offsets = (tuple(offsets),), (tuple(at or [0] * len(shape)),)
    return memory


@contextmanager
def flipped(store: Store, name: str, position: int) -> Any:
    """Invert one byte of a data file during the block."""
    whole = bytearray(store.read(name, limit_bytes=1 << 30))
    for _ in range(2):
        whole[position] ^= 0xFF
        store.delete(name)
        with store.create(name, durable=False) as handle:
            handle.write(whole)
        if _ == 0:
            yield
