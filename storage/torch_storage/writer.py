"""torch's StorageWriter over a store: `FileSystemWriter`.

It serves two callers. Stock `torch.distributed.checkpoint.save`, and custom planners, call the interface's
methods with plans made of objects. `dcp.save` with our own planner hands over columns (`WriteColumns`) and
gets columns back (`WriteOutcome`). Both end in `engine.write.DataFile` and `commit`.
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
"""Without fsync one file's inode lock bounds the page cache's copy; two files of one rank go twice as
fast."""

_TWO_FILES_MEAN_BYTES = 128 << 10
"""Threads that write smaller tensors wait for the interpreter's lock more than for the inode's."""


class WrittenItem(NamedTuple):
    """The place of one written item: the ``storage_data`` of its WriteResult, plain enough for any
    collective."""

    file: str
    record_offset: int
    record_length: int
    payload_offset: int
    payload_length: int
    crcs: tuple[int, ...]
    dtype_code: int


class NoFileSystem:
    """Refuses torch's ``fs``: who sets it, to encrypt perhaps, must not find that nothing goes through it."""

    @property
    def fs(self) -> Any:
        """Raise AttributeError: there is none."""
        raise AttributeError(f"{type(self).__name__} has no fs; its store is .store, made by open_store")

    @fs.setter
    def fs(self, value: object) -> None:
        raise PlanError(
            f"{type(self).__name__} would go past the fs that it is given, a {type(value).__name__}: give a "
            "store of your own by open_store=, or torch's own storage to dcp.save or dcp.load"
        )


class FileSystemWriter(NoFileSystem, StorageWriter, BlockingAsyncStager):
    """Writes checkpoints to a local folder (or any other place `dcp.storage.stores.open_store` knows).

    The constructor's arguments are torch's. ``path`` may be a path or a ``scheme://`` URL. ``sync_files``
    makes data and commit durable before a save returns; without it a power cut within the next half minute
    or so may take the checkpoint, and the one that it replaces with it. ``thread_count`` is a lower bound for
    the files (and threads) a rank writes; without fsync a share of large tensors is written as two anyway.
    ``single_file_per_rank=False`` gives each tensor its own file. ``per_thread_copy_ahead`` is accepted for
    compatibility. As torch's it is a stager, too, and ``cache_staged_state_dict`` is for that: but
    `dcp.async_save` stages in its own way, or by the ``stage`` of a subclass. ``torch_compatible=False``
    leaves out `.metadata` and the torch.save container of each tensor: smaller, not loadable by stock torch.
    ``digests`` keeps a digest of each tensor in the manifest (`dcp digest`), computed on the way at some 0.1
    seconds of a core for 1 GiB.
    ``overwrite=False`` refuses an id that has a checkpoint. ``open_store`` makes the store of a path: give
    another one for a storage of your own, or for options such as ``partial(PosixStore, direct_io=False)``.

    Unlike torch's, it publishes atomically: data files get unique names, and nothing is visible (or, on
    overwrite, replaced) before `finish` has published the manifest.
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
                "stream extensions are torch's experiment and would hide the payloads' bytes; give "
                "torch.distributed.checkpoint.FileSystemWriter to dcp.save if you need them"
            )
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise OptionError(
                "this writer stores the dcp format; give dcp.save torch's own FileSystemWriter for "
                f"{serialization_format}"
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
        """Of the save that was begun, what `finish` is to publish: metadata of the user, and provenance."""
        self._structure: Mapping[str, Any] = {}
        self._traffic_before: dict[str, float] = {}
        FileSystemWriter.reset(self)  # not that of a subclass, which is not made yet

    # -- torch's interface -----------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to another id if one is given."""
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
        """Return where the checkpoint goes."""
        return self.path

    def stay_here(self) -> None:
        """Make a relative path absolute: the save is carried out later, when the process may be in another
        folder."""
        url = self.store.url
        if url == str(Path(self.path).absolute()):  # not so for what is no path
            self.path = url

    @property
    def store(self) -> Store:
        """Return the store of the current id."""
        if self._store is None:
            self._store = self.open_store(self.path)
            self._traffic_before = self._store.traffic()
        return self._store

    @property
    def traffic(self) -> dict[str, float]:
        """Return what this save asked of the storage's service so far: see `Store.traffic`."""
        now = {} if self._store is None else self._store.traffic()
        return traffic_since(now, self._traffic_before) if now else {}

    def storage_meta(self) -> StorageMeta:
        """Return what planners and `.metadata` learn about this save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save: learn this rank's role, from the keywords that torch passes."""
        if self._begun:  # a save id must not be used twice: failing, the second save would remove the first
            self.reset()
        self._begun = True
        self.said = {}, {}
        if self._store is not None:
            self._traffic_before = self._store.traffic()
        self.rank = int(kwargs.get("rank") or 0)
        self.use_collectives = bool(kwargs.get("use_collectives", True))
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder; without collectives also look at what the id holds now."""
        if self.is_coordinator or not self.use_collectives:
            self.prepare()
        if not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=(self.rank, self.save_id))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file names."""
        return [
            dataclasses.replace(plan, storage_data=(rank, self.save_id))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's items, each as the planner resolves it; values are where and with which CRCs."""
        self._structure = getattr(planner, "structure", {})  # torch's metadata have no place for it
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
        """Publish: ``metadata`` of the planner plus where ``results`` say the bytes are."""
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
        """Return whether this storage can take ``checkpoint_id``."""
        return is_supported(checkpoint_id)

    # -- what both callers share -----------------------------------------------------------------------------

    @property
    def names(self) -> commit.Names:
        """Return the files that publish this save."""
        return commit.Names() if self.use_collectives else commit.Names.of_rank(self.rank)

    def prepare(self) -> None:
        """Make the folder, on the coordinator before anything is written, and remember what is to be
        replaced."""
        self._made_root = not self.store.exists()
        self.store.make_root()
        if not self.use_collectives and any(map(self.store.stat, vars(commit.Names()).values())):
            raise CheckpointConflictError(
                f"{self.store.url} holds a checkpoint that ranks saved together, which readers would still "
                "load instead of what each rank saves on its own; save to another id",
                path=self.store.url,
            )
        self._previous = commit.previous_state(self.store, self.names)
        if not self.overwrite and self._previous.exists:
            raise CheckpointConflictError(
                f"{self.store.url}: Checkpoint already exists and overwrite=False; save to another id",
                path=self.store.url,
            )

    def publish(self, index: CheckpointIndex, user: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Commit ``index``, with the metadata of the ``user`` and the ``provenance`` of the save; on failure
        no file of this save remains, unless the error is ``committed``."""
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
        """Remove the data files of the current save, of all ranks, unless they are committed."""
        commit.discard(self.store, self.save_id, self.names)
        self.remove_made_root()

    def remove_made_root(self) -> None:
        """Remove the folder if this save has made it, and nothing is in it."""
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
        """Write this rank's rows and objects; the files are complete when it returns, and gone if it raises.

        ``objects`` are torch.save bytes, and plain msgpack bytes or None. ``on_bytes`` is called with the
        payload bytes of what was written, from the writing threads. ``apart``
        has a number for each local tensor: those of different numbers go into different files.
        ``observers`` see the payloads.
        """
        blobs, plain = objects
        writing = PartitionWriter(columns, memory, blobs, self._new_file, on_bytes, observers)
        own = columns.own_rows
        groups = None if apart is None else apart[columns.sources[own]]
        parts = self._partitions(own, writing.payload_bytes[own], groups, has_objects=bool(blobs))
        if not parts:
            if len(columns.shares):
                raise PlanError("every row of a write plan shares another row's payload")
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
        """Deal ``rows`` of so many ``payloads`` bytes to files, those of different ``groups`` to different
        ones; objects go into the first, which has rows of group 0 alone."""
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
    """Append an item, as ``planner`` resolves it, to ``file``."""
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
            f"the planner resolved {fqn!r} to {tensor.dtype} {tuple(tensor.shape)}, its plan says "
            f"{planned.properties.dtype} {sizes}; change the item's properties or chunk in "
            "create_local_plan too",
            fqn=fqn,
        )
    code = dtype_code(tensor.dtype, fqn=fqn)
    file.tensor(code, sizes, tensor.nbytes, byte_pieces(tensor))
    offset, length, payload_offset, payload_length, count = file.chunks[-CHUNK_COLUMNS:]
    crcs = tuple(file.crcs[len(file.crcs) - count :])
    place = WrittenItem(file.name, offset, length, payload_offset, payload_length, crcs, code)
    return WriteResult(item.index, tensor.nbytes, place)


def is_supported(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether `open_store` knows the kind of place that ``checkpoint_id`` names."""
    try:
        open_store(checkpoint_id)
    except CheckpointError:
        return False
    return True
