"""torch's StorageWriter over a store: `FileSystemWriter`.

Stock `torch.distributed.checkpoint.save` and custom planners call torch's interface with plan objects.
`dcp.save` with dcphub's planner passes columns (`WriteColumns`) and receives columns (`WriteOutcome`). Both
use `engine.write.DataFile` and `commit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp.storage import commit
from dcp.storage.engine.write import (
    CHUNK_COLUMNS,
    DataFile,
    Observer,
    WriteColumns,
    WriteOutcome,
    data_file_name,
)
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    OptionError,
    PlanError,
    check_flags,
)
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.strides import Int64
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import Store, traffic_since
from dcp.storage.tensors import LocalMemory, byte_pieces, dtype_code, finish_device_work
from dcp.storage.threads import WorkerThreads
from dcp.storage.torch_compat import StorageInfo
from dcp.storage.torch_storage import metadata as torch_metadata
from dcp.storage.torch_storage.file_partitions import PartitionWriter

__all__ = ["FileSystemWriter"]

_TWO_FILES_ABOVE_BYTES = 64 << 20
"""Minimum share of large tensors written as two files without fsync, which is faster because of the inode
lock.
"""

_TWO_FILES_MEAN_BYTES = 128 << 10
"""Minimum mean size for two files; threads for smaller tensors compete for the GIL."""


class WrittenItem(NamedTuple):
    """Position of a written item: plain ``storage_data`` of its WriteResult."""

    file: str
    record_offset: int
    record_length: int
    payload_offset: int
    payload_length: int
    crcs: tuple[int, ...]
    dtype_code: int


class NoFileSystem:
    """Replacement of torch's ``fs`` that refuses assignment, because nothing goes through it."""

    @property
    def fs(self) -> Any:
        """Raise AttributeError."""
        raise AttributeError(f"{type(self).__name__} has no attribute fs; its file access is .store")

    @fs.setter
    def fs(self, value: object) -> None:
        raise PlanError(
            f"{type(self).__name__} does not use fs, here a {type(value).__name__}: pass your own store by "
            "open_store=, or torch's storage reader or writer to dcp.load or dcp.save"
        )


class FileSystemWriter(NoFileSystem, StorageWriter, BlockingAsyncStager):
    """Writer of checkpoints to a local folder or a URL known to `dcp.storage.stores.open_store`.

    Unlike torch's writer, a save is atomic: data files have unique names, and a checkpoint becomes visible
    or is replaced only when `finish` publishes the manifest. The positional arguments are torch's.

    Args:
        path: Folder or ``scheme://`` URL.
        single_file_per_rank: False writes a file per tensor.
        sync_files: Make data and commit durable before the save returns. Without it, a power cut within
            about half a minute may lose this checkpoint and the replaced one.
        thread_count: Minimum number of files and threads per rank. Without fsync, large shares are written
            as two files.
        per_thread_copy_ahead: Ignored; for compatibility.
        cache_staged_state_dict: For staging by a subclass; `dcp.async_save` stages by itself.
        overwrite: False refuses an id with a checkpoint.
        torch_compatible: False omits `.metadata` and the torch.save containers: smaller, not loadable by
            stock torch.
        digests: Store a digest of each tensor in the manifest (`dcp digest`), at about 0.1 s of a core per
            GiB.
        open_store: Factory of the store, such as ``partial(PosixStore, direct_io=False)``.

    Examples:
        dcp.save(state, storage_writer=dcp.FileSystemWriter("checkpoints/step-100", digests=True))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        torch_compatible: bool = True,
        digests: bool = False,
        open_store: OpenStore = open_store,
    ) -> None:
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        if _extensions:
            raise OptionError(
                "stream extensions are not supported, because dcp reads ranges of plain bytes: pass "
                "torch.distributed.checkpoint.FileSystemWriter to dcp.save to use stream extensions"
            )
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise OptionError(
                "this writer stores the dcp format: pass torch.distributed.checkpoint.FileSystemWriter to "
                f"dcp.save for {serialization_format}"
            )
        check_flags(
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            overwrite=overwrite,
            torch_compatible=torch_compatible,
            digests=digests,
        )
        self.path = path
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = max(1, thread_count)
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.torch_compatible = torch_compatible
        self.digests = digests
        self.open_store = open_store
        self.rank = 0
        self.use_collectives = True
        self.said: tuple[Mapping[str, Any], Mapping[str, Any]] = {}, {}
        """User metadata and provenance for `finish` to publish."""
        self._structure: Mapping[str, Any] = {}
        self._traffic_before: dict[str, float] = {}
        FileSystemWriter.reset(self)  # not the override of a subclass, which is not initialized yet

    # -- torch's interface -----------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, optionally to another id."""
        if checkpoint_id:
            self.path = checkpoint_id
        self._store: Store | None = None
        self._previous: commit.Previous | None = None
        self.index: CheckpointIndex | None = None
        self._begun = False
        self._made_root = False
        self._files_written = 0
        self.save_id = uuid.uuid4().hex[:8]

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Path or URL of the checkpoint."""
        return self.path

    def stay_here(self) -> None:
        """Make a relative path absolute, because the save may run after a change of directory."""
        url = self.store.url
        if url == str(Path(self.path).absolute()):  # only for paths
            self.path = url

    @property
    def store(self) -> Store:
        """Store of the current id."""
        if self._store is None:
            self._store = self.open_store(self.path)
            self._traffic_before = self._store.traffic()
        return self._store

    @property
    def traffic(self) -> dict[str, float]:
        """Requests of this save; see `Store.traffic`."""
        now = {} if self._store is None else self._store.traffic()
        return traffic_since(now, self._traffic_before) if now else {}

    def storage_meta(self) -> StorageMeta:
        """Return the description of this save for planners and `.metadata`."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save with this rank's role."""
        if self._begun:  # save ids are unique, because a failed save removes all files with its id
            self.reset()
        self._begun = True
        self.said = {}, {}
        if self._store is not None:
            self._traffic_before = self._store.traffic()
        self.rank = int(kwargs.get("rank") or 0)
        self.use_collectives = bool(kwargs.get("use_collectives", True))
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder; without collectives, also read the present state of the id."""
        if self.is_coordinator or not self.use_collectives:
            self.prepare()
        if not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=(self.rank, self.save_id))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign file names to each rank."""
        return [
            dataclasses.replace(plan, storage_data=(rank, self.save_id))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's items as resolved by the planner; return positions and CRCs."""
        self._structure = getattr(planner, "structure", {})  # torch's metadata has no field for it
        if plan.storage_data is not None:
            self.rank, self.save_id = plan.storage_data
            if self.store.stat(data_file_name(self.rank, 0, self.save_id)) is not None:
                # torch's plan cache repeats the storage_data of an earlier save to the same id
                self.save_id = uuid.uuid4().hex[:8]
        parts = [plan.items] if self.single_file_per_rank else [[item] for item in plan.items]
        results, files = list[WriteResult](), list[DataFile]()
        try:
            for part in filter(None, parts):
                # values are small, and known only later
                data = [item.tensor_data for item in part if item.tensor_data is not None]
                sizes = [math.prod(each.chunk.sizes) * each.properties.dtype.itemsize for each in data]
                files.append(self._new_file(self._files_written, sum(sizes), len(part)))
                self._files_written += 1
                results += [_write_item(files[-1], planner, item) for item in part]
                files[-1].finish()
            if self.sync_files:
                self.store.sync()
        except BaseException:
            for file in files:
                file.abort()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the planner's ``metadata`` with the positions in ``results``."""
        index = torch_metadata.index_from_results(metadata, results)
        index = dataclasses.replace(index, provenance=self._structure)
        user, provenance = self.said
        self.publish(index, user, provenance)
        metadata.version = torch_metadata.VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {
            result.index: StorageInfo(
                result.storage_data.file, result.storage_data.record_offset, result.storage_data.record_length
            )
            for rank_results in results
            for result in rank_results
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this storage supports ``checkpoint_id``."""
        return is_supported(checkpoint_id)

    # -- what both callers share -----------------------------------------------------------------------------

    @property
    def names(self) -> commit.Names:
        """Names of the files that publish this save."""
        return commit.Names() if self.use_collectives else commit.Names.of_rank(self.rank)

    def prepare(self) -> None:
        """Create the folder and read the present state, on the coordinator before any write."""
        self._made_root = not self.store.exists()
        self.store.make_root()
        if not self.use_collectives and any(map(self.store.stat, vars(commit.Names()).values())):
            raise CheckpointConflictError(
                f"{self.store.url} holds a checkpoint of all ranks, which readers would load instead of the "
                "rank's own checkpoint: save to another id",
                path=self.store.url,
            )
        self._previous = commit.previous_state(self.store, self.names)
        if not self.overwrite and self._previous.exists:
            raise CheckpointConflictError(
                f"{self.store.url}: Checkpoint already exists and overwrite=False; save to another id",
                path=self.store.url,
            )

    def publish(self, index: CheckpointIndex, user: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Commit ``index`` with the metadata of ``user`` and ``provenance``. On failure no file of this
        save remains, unless the error is ``committed``.
        """
        own = {"save_id": self.save_id, "time": time.time(), **provenance}
        if not self.sync_files:
            own["durable"] = False
        index = dataclasses.replace(index, provenance={**index.provenance, **own}, user=dict(user))
        try:
            self.index = commit.commit(
                self.store,
                index,
                self._previous or commit.previous_state(self.store, self.names),
                names=self.names,
                save_id=self.save_id,
                durable=self.sync_files,
                torch_compatible=self.torch_compatible,
            )
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the data files of the current save, of all ranks, unless committed."""
        commit.discard(self.store, self.save_id, self.names)
        self.remove_made_root()

    def remove_made_root(self) -> None:
        """Remove the folder if created by this save and empty."""
        if self._made_root:
            with contextlib.suppress(CheckpointError):
                self.store.remove_root()

    def _new_file(self, number: int, payload_bytes: int, records: int) -> DataFile:
        return DataFile(
            self.store,
            data_file_name(self.rank, number, self.save_id),
            durable=self.sync_files,
            torch_compatible=self.torch_compatible,
            payload_bytes=payload_bytes,
            records=records,
        )

    # -- columns ---------------------------------------------------------------------------------------------

    def write_columns(
        self,
        columns: WriteColumns,
        memory: LocalMemory,
        objects: tuple[Sequence[bytes], Sequence[bytes | None]],
        on_bytes: Callable[[int], None] | None = None,
        apart: Int64 | None = None,
        observers: Sequence[Observer] = (),
    ) -> WriteOutcome:
        """Write this rank's rows and objects; the files are complete on return, and removed on failure.

        Args:
            columns: Rows to write.
            memory: Local tensors.
            objects: torch.save bytes and plain msgpack bytes (or None) of each object.
            on_bytes: Receives the number of written payload bytes, from the writing threads.
            apart: Number per local tensor; tensors of different numbers go to different files.
            observers: Receive the payloads.
        """
        blobs, plain = objects
        writing = PartitionWriter(columns, memory, blobs, self._new_file, on_bytes, observers)
        own = columns.own_rows
        groups = None if apart is None else apart[columns.sources[own]]
        parts = self._partitions(own, writing.payload_bytes[own], groups, has_objects=bool(blobs))
        if not parts:
            if len(columns.shares):
                raise PlanError("every item of the write plan shares the payload of another item")
            return WriteOutcome()
        numbers = range(self._files_written, self._files_written + len(parts))
        self._files_written += len(parts)
        with_objects = [True] + [False] * (len(parts) - 1)
        try:
            if len(parts) == 1:
                writing.write(numbers[0], parts[0], True)
            else:
                finish_device_work(memory.tensors)
                with WorkerThreads(min(len(parts), max(2, self.thread_count)), "dcp-write") as pool:
                    list(pool.map(writing.write, numbers, parts, with_objects))
            if self.sync_files:
                self.store.sync()
        except BaseException:
            for file in writing.files.values():
                file.abort()
            raise
        return writing.outcome(parts, plain)

    def _partitions(
        self, rows: Int64, payloads: Int64, groups: Int64 | None, *, has_objects: bool
    ) -> list[Int64]:
        """Distribute ``rows`` with ``payloads`` bytes to files by ``groups``; objects go to the first file,
        with rows of group 0 only.
        """
        total, count = int(payloads.sum()), min(self.thread_count, len(rows))
        if not self.sync_files and total >= max(_TWO_FILES_ABOVE_BYTES, len(rows) * _TWO_FILES_MEAN_BYTES):
            count = min(max(count, 2), len(rows))
        if not self.single_file_per_rank:
            numbers = np.arange(len(rows)) + has_objects
        elif count <= 1 and groups is None:
            return [rows] if len(rows) or has_objects else []
        else:
            numbers = np.minimum(count - 1, (np.cumsum(payloads) - payloads) * count // max(total, 1))
        if groups is not None:
            numbers = numbers + groups * (len(rows) + 1)
        order = np.argsort(numbers, kind="stable")
        found = np.unique(np.append(numbers, 0) if has_objects else numbers)
        begins = np.searchsorted(numbers[order], found)
        return np.split(rows[order], begins[1:]) if len(found) else []


def _write_item(file: DataFile, planner: SavePlanner, item: WriteItem) -> WriteResult:
    """Append an item, as resolved by ``planner``, to ``file``."""
    fqn, planned, data = item.index.fqn, item.tensor_data, planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise PlanError(f"the planner resolved {fqn!r} to {type(data).__name__}, not BytesIO", fqn=fqn)
        ((offset, length, crc),) = file.blobs([data.getvalue()])
        place = WrittenItem(file.name, offset, length, offset, length, (crc,), 0)
        return WriteResult(item.index, length, place)
    if not isinstance(data, torch.Tensor) or planned is None:
        raise PlanError(f"the planner resolved tensor {fqn!r} to {type(data).__name__}", fqn=fqn)
    tensor, sizes = data.detach(), tuple(planned.chunk.sizes)
    if tuple(tensor.shape) != sizes or tensor.dtype != planned.properties.dtype:
        raise PlanError(
            f"the planner resolved {fqn!r} to {tensor.dtype} {tuple(tensor.shape)}, but its plan has "
            f"{planned.properties.dtype} {sizes}: change the item's properties or chunk in create_local_plan "
            "too",
            fqn=fqn,
        )
    code = dtype_code(tensor.dtype, fqn=fqn)
    file.tensor(code, sizes, tensor.nbytes, byte_pieces(tensor))
    offset, length, payload_offset, payload_length, count = file.chunks[-CHUNK_COLUMNS:]
    crcs = tuple(file.crcs[len(file.crcs) - count :])
    place = WrittenItem(file.name, offset, length, payload_offset, payload_length, crcs, code)
    return WriteResult(item.index, tensor.nbytes, place)


def is_supported(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return True if `open_store` knows the kind of place of ``checkpoint_id``."""
    try:
        open_store(checkpoint_id)
    except CheckpointError:
        return False
    return True
