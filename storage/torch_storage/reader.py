"""torch's StorageReader over a store: `FileSystemReader`.

Serves torch's interface with plan objects, and `dcp.load` with runs and elements. Both use
`dcp.storage.engine.read.ReadEngine`.
"""

from __future__ import annotations

import io
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import ByteRuns, ReadStats, Verify
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
    ShapeMismatchError,
    StorageError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.opening import SourcePlace, index_at, locate, with_near_places
from dcp.storage.formats.registry import format_of
from dcp.storage.formats.torch.archive import LOCAL_SIGNATURE, check_entries
from dcp.storage.formats.torch.python_values import decode_value
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import FileInfo, Store, traffic_since
from dcp.storage.torch_storage.destinations import Filled, read_into
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.writer import NoFileSystem, is_supported

_BATCH_BYTES = 256 << 20
"""Maximum size of temporary tensors from resolve_tensor of custom planners at a time."""

_OBJECTS_BYTES = 64 << 20
"""Bytes of objects read at a time."""

_claims = threading.Lock()
"""Lock held briefly when a thread begins a load."""

T = TypeVar("T")


class FileSystemReader(NoFileSystem, StorageReader):
    """Reader of checkpoints of this package and of stock torch, torch.save files, safetensors files and
    Hugging Face folders.

    Args:
        path: Local folder or file, or URL of a store.
        verify: Checksum policy; see `dcp.storage.engine.requests.Verify`.
        threads: Number of reading threads; None depends on store and cores.
        open_store: Factory of the store, such as ``partial(PosixStore, follow_links=True)``.
        _extension_registry: Must be None; torch's stream extensions are not supported.

    Examples:
        dcp.load(state, storage_reader=dcp.FileSystemReader("checkpoints/step-100", verify="full"))
    """

    _user: int | None = None
    """Thread of the current load."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        verify: Verify = "blocks",
        threads: int | None = None,
        open_store: OpenStore = open_store,
    ) -> None:
        super().__init__()
        if _extension_registry is not None:
            raise OptionError(
                "stream extensions are not supported: pass torch.distributed.checkpoint.FileSystemReader to "
                "dcp.load to read a checkpoint saved with stream extensions"
            )
        self.path = path
        self.verify: Verify = verify
        self.threads = threads
        self.open_store = open_store
        self._traffic_before: dict[str, float] = {}
        self._read_as: tuple[int | None, int | None] = None, None
        FileSystemReader.reset(self)  # not the override of a subclass, which is not initialized yet

    # -- torch's interface -----------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, optionally from another id."""
        if checkpoint_id:
            self.path = checkpoint_id
        self._place: SourcePlace | None = None
        self.index: CheckpointIndex | None = None
        """Index of this load; None until read or received from the coordinator. All ranks load the same
        commit.
        """
        self.asked_verify: Verify | None = None
        """Checksum policy of a load through torch's interface; overrides the reader's."""
        self._listed: frozenset[FileInfo] | None = None
        self.stats = ReadStats()
        self.load_id = str(uuid.uuid4())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the reader for a load of this thread.

        Raises:
            OptionError: If another thread loads with this reader.
        """
        own = threading.get_ident()
        with _claims:
            before = self._user
            if before not in (None, own):
                raise OptionError(
                    f"{self.path}: another thread loads with this reader, which supports one load at a time: "
                    f"use one reader per thread, or pass checkpoint_id= instead"
                )
            self._user = own
        try:
            yield
        finally:
            self._user = before

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Path or URL of the checkpoint."""
        return self.path

    @property
    def place(self) -> SourcePlace:
        """Folder or file of the current id."""
        if self._place is None:
            self._place = locate(self.path, open_store=self.open_store)
            self._traffic_before = self._place.store.traffic()
        return self._place

    @property
    def store(self) -> Store:
        """Store of the current id; for a file, the store of its folder."""
        return self.place.store

    @property
    def traffic(self) -> dict[str, float]:
        """Requests of this load; see `Store.traffic`."""
        now = {} if self._place is None else self.store.traffic()
        return traffic_since(now, self._traffic_before) if now else {}

    def read_index(self, rank: int | None = None, *, own_rank: int | None = None) -> CheckpointIndex:
        """Return the checkpoint's index, read once per load; ``rank`` and ``own_rank`` as in `open_index`."""
        if self.index is None:
            try:
                self.index = index_at(self.place, rank=rank, own_rank=own_rank)
            except CheckpointNotFoundError as error:
                raise with_near_places(error, self.path, self.open_store) from None
            self._read_as = rank, own_rank
            self._listed = self._files() if self.may_be_mixed else None
        return self.index

    @property
    def may_be_mixed(self) -> bool:
        """True if files may be replaced individually during the load, mixing two versions."""
        if self.index is None or self.place.file is not None:
            return False
        found = format_of(self.index.format)
        return found is not None and found.is_loose

    def _files(self) -> frozenset[FileInfo]:
        names = set(self.index.files) if self.index is not None else ()
        return frozenset(info for info in self.store.list() if info.name in names)

    def check_unchanged(self) -> None:
        """Check that uncommitted files are unchanged since the index was read. Committed files are checked
        by checksums.

        Raises:
            CorruptCheckpointError: If files that `may_be_mixed` were replaced.
        """
        if self._listed is not None and self._files() != self._listed:
            raise CorruptCheckpointError(
                f"{self.store.url}: files were replaced while they were read, so the loaded values may "
                f"mix two checkpoints; load again when no process writes to the folder",
                path=self.store.url,
            )

    def was_replaced(self) -> bool:
        """Return True if another checkpoint was committed to the id since the index was read.

        Raises:
            StorageError: If the state is unknown.
        """
        if self.index is None:
            return False
        rank, own_rank = self._read_as
        if self._listed is not None and self._files() != self._listed:
            return True
        try:
            current = index_at(self.place, rank=rank, own_rank=own_rank)
            return encode_manifest(current) != encode_manifest(self.index)
        except StorageError:
            raise
        except CheckpointConflictError:  # replaced again meanwhile
            return True
        except CheckpointError:  # deleted or damaged: nothing to load instead
            return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and return the metadata; begins a load. Objects are built on access."""
        self.index = self._listed = self.asked_verify = None
        self.stats = ReadStats()
        self._traffic_before = self.store.traffic()
        index = self.read_index(kwargs.get("rank"))
        save_id = index.provenance.get("save_id")
        meta = StorageMeta(
            checkpoint_id=self.path,
            save_id=save_id if isinstance(save_id, str) else None,
            load_id=self.load_id,
        )
        return LazyMetadata.of(lambda: index, meta)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Set the metadata; metadata of this reader include the index."""
        if isinstance(metadata, LazyMetadata) and metadata.has_index:
            self.index = metadata.index

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items into tensors of the planner.

        Each rank reads and checks the index separately; files replaced at any time are detected.
        """
        index = self.read_index()
        find_row = _chunk_finder(index)
        with self.engine(index, self.asked_verify) as engine:
            objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
            blobs = self.read_objects(engine, [item.storage_index.fqn for item in objects])
            for item, blob in zip(objects, blobs, strict=True):
                planner.load_bytes(item, io.BytesIO(blob))
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            for batch in _batches(tensors, lambda item: math.prod(item.lengths) * 4, _BATCH_BYTES):
                targets = [_target(planner, item) for item in batch]
                rows = list(map(find_row, batch))
                engine.resolve(rows)
                filled = map(partial(_filled, engine), rows, batch, targets)
                read_into(engine, ByteRuns.none(), filled, targets)
                for item, target in zip(batch, targets, strict=True):
                    planner.commit_tensor(item, target)
        self.check_unchanged()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this storage can read ``checkpoint_id``."""
        return is_supported(checkpoint_id)

    # -- columns ---------------------------------------------------------------------------------------------

    def engine(self, index: CheckpointIndex, verify: Verify | None = None) -> ReadEngine:
        """Return a read engine for the checkpoint; use as a context manager. ``verify=None`` uses the
        reader's policy. Costs are added to `stats`.
        """
        threads = self.threads
        if threads is None:
            own_cores = len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            threads = self.store.read_profile.threads or max(1, min(4, own_cores))
        engine = ReadEngine(self.store, index, verify=verify or self.verify, threads=threads)
        engine.stats = self.stats
        return engine

    def read_objects(self, engine: ReadEngine, fqns: Sequence[str]) -> Iterator[bytes]:
        """Yield the checked torch.save bytes of objects in order.

        Neighbors in a file are read together, about 64 MiB at a time. Plain values without a record are
        encoded.
        """
        objects, store = engine.index.objects, self.store
        rows = []
        for fqn in fqns:
            if fqn not in objects.position:
                raise PlanError(f"{store.url}: the checkpoint has no object {fqn!r}", fqn=fqn)
            rows.append(objects.position[fqn])
        for batch in _batches(rows, lambda row: int(objects.lengths[row]), _OBJECTS_BYTES):
            stored = [row for row in batch if objects.files[row] >= 0]
            columns = (objects.files, objects.offsets, objects.lengths)
            places = zip(*(column[stored].tolist() for column in columns), strict=True)
            blobs = iter(engine.read_blobs([*places]))
            for row in batch:
                if objects.files[row] < 0:
                    buffer = io.BytesIO()
                    torch.save(decode_value(objects.values[int(objects.plain[row])]), buffer)
                    yield buffer.getvalue()
                    continue
                blob = next(blobs)
                fault = _blob_fault(blob, int(objects.crcs[row])) if engine.verify != "none" else None
                if fault is not None:
                    fqn, file = objects.fqns[row], engine.index.files[int(objects.files[row])]
                    raise CorruptCheckpointError(
                        f"{store.url}: object {fqn!r} is damaged: {fault}. Resume from another checkpoint.",
                        path=f"{store.url}/{file}",
                        fqn=fqn,
                    )
                yield blob


def _blob_fault(blob: bytes, expected: int) -> str | None:
    """Return a description of wrong bytes of an object; without a committed CRC-32, the zip's CRC is
    checked.
    """
    if expected == UNKNOWN:
        if blob.startswith(LOCAL_SIGNATURE):
            try:
                check_entries(blob)
            except (CorruptCheckpointError, CheckpointFormatError) as error:
                return str(error)
    elif crc32(blob) != expected:
        return f"CRC-32 {crc32(blob):08x}, expected {expected:08x}"
    return None


def _chunk_finder(index: CheckpointIndex) -> Callable[[ReadItem], int]:
    """Return a function from a ReadItem to the index row of its chunk."""

    @cache
    def rows_of(fqn: str) -> dict[tuple[int, ...], int]:
        if fqn not in index.position:
            raise PlanError(f"the load plan reads {fqn!r}, but this checkpoint has no such tensor", fqn=fqn)
        return {index.box(row)[0]: row for row in index.chunks(index.position[fqn])}

    def find(item: ReadItem) -> int:
        wanted = item.storage_index
        row = rows_of(wanted.fqn).get(tuple(wanted.offset or ()))
        if row is None:
            raise PlanError(
                f"the load plan reads {wanted.fqn!r} at {wanted.offset}, where the checkpoint has no chunk",
                fqn=wanted.fqn,
            )
        return row

    return find


def _batches(items: Sequence[T], size_bytes: Callable[[T], int], limit_bytes: int) -> Iterator[list[T]]:
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_bytes(item)
        if size >= limit_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _target(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise ShapeMismatchError(
            f"the planner resolved {item.dest_index.fqn!r} to shape {tuple(target.shape)}, but its read item "
            f"has {tuple(item.lengths)}",
            fqn=item.dest_index.fqn,
        )
    return target


def _filled(engine: ReadEngine, chunk: int, item: ReadItem, target: torch.Tensor) -> Filled:
    if len(item.storage_offsets) != len(item.lengths):
        raise PlanError("a read item of the load plan has offsets and lengths of different dimensions")
    elements, order = engine.elements(chunk, item.storage_offsets, item.lengths)
    return elements, target.permute(order)
