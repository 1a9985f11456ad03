"""Saves and loads by torch's protocol: plans made of objects, for planners and storages that override a step.

The sequence of calls is the one that torch documents for StorageWriter, StorageReader, SavePlanner and
LoadPlanner. Plans and results travel as `dcp.torch_protocol.plan_transport` packs them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgpack
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchQuantizedReader,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from dcp.loading.report import LoadReport
from dcp.loading.targets import Stored, Targets
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.planners.load.unexpected import unexpected_keys
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.ranks.handshake import begin, check_same_checkpoint, check_same_target
from dcp.ranks.options import of_load, of_save
from dcp.saving.rank_state import PlanOptions, warn_of_foreign, warn_of_keys
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.open import open_index
from dcp.storage.reader import FileSystemReader
from dcp.storage.torch_metadata import LazyMetadata
from dcp.storage.writer import FileSystemWriter
from dcp.torch_protocol import plan_transport

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

    from dcp.ranks.collectives import Ranks

__all__ = ["load", "save"]


def save(
    state: Callable[[], dict[str, Any]],
    writer: StorageWriter,
    ranks: Ranks,
    planner: SavePlanner,
    *,
    use_collectives: bool = True,
) -> Metadata:
    """Save what ``state`` gives with any planner and any storage; returns the metadata that the planner
    made."""
    made: list[Metadata] = []
    manner = ["by torch's protocol"] if use_collectives else ["by torch's protocol", "without collectives"]
    options = of_save(writer, PlanOptions.of(planner) if isinstance(planner, DefaultSavePlanner) else None)
    places = begin(ranks, lambda: _place_of(writer), manner=manner, options=options)
    if use_collectives:
        check_same_target(
            ranks, places, lambda: writer.store if isinstance(writer, FileSystemWriter) else None
        )
    scattered = len(set(places)) > 1

    def local_plan() -> SavePlan:
        given = state()
        _call_with_optional(
            planner.set_up_planner,
            (given,),
            {"storage_meta": writer.storage_meta(), "is_coordinator": ranks.is_coordinator},
        )
        _call_with_optional(
            writer.set_up_storage_writer,
            (ranks.is_coordinator,),
            {"rank": ranks.rank, "use_collectives": use_collectives},
        )
        plan = planner.create_local_plan()
        if ranks.is_coordinator:
            _warn_of_foreign(plan, planner.state_dict if hasattr(planner, "state_dict") else given)
            warn_of_keys(planner.foreign_keys if isinstance(planner, DefaultSavePlanner) else {})
        return writer.prepare_local_plan(plan)

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        made[:] = [metadata]
        return writer.prepare_global_plan(plans)

    def write(plan: SavePlan) -> list[WriteResult]:
        future = writer.write_data(planner.finish_plan(plan), planner)
        future.wait()
        return list(future.value())

    def finish(results: list[list[WriteResult]]) -> bytes:
        writer.finish(metadata=made[0], results=results)
        # What our writer published can be read again; a foreign storage need not be readable at all.
        return b"" if isinstance(writer, FileSystemWriter) else plan_transport.pack(made[0])

    try:
        if use_collectives:
            reply = ranks.reduce_scatter(
                "plan",
                lambda: plan_transport.pack(local_plan()),
                lambda parts: [
                    plan_transport.pack(plan)
                    for plan in global_plan([plan_transport.unpack(p) for p in parts])
                ],
            )
            published = ranks.reduce_broadcast(
                "write",
                lambda: plan_transport.pack(write(plan_transport.unpack(reply))),
                lambda parts: finish([plan_transport.unpack(part) for part in parts]),
            )
        else:
            ranks.all_gather("save", lambda: finish([write(global_plan([local_plan()])[0])]))
    except BaseException:
        if isinstance(writer, FileSystemWriter) and (
            ranks.is_coordinator or scattered or not use_collectives
        ):
            writer.discard()
        raise
    if made:
        return made[0]
    if isinstance(writer, FileSystemWriter):
        store = writer.store
        return LazyMetadata.of(lambda: open_index(store), writer.storage_meta())
    metadata: Metadata = plan_transport.unpack(published)
    return metadata


def load(
    targets: Targets,
    reader: StorageReader,
    ranks: Ranks,
    planner: LoadPlanner,
    report: LoadReport,
) -> None:
    """Load into ``targets`` with any planner and any storage; fills ``report`` as far as planner and
    storage are ours."""
    begun = time.perf_counter()
    together = True
    refuses = isinstance(planner, DefaultLoadPlanner) and planner.unexpected == "error"
    places = begin(
        ranks,
        lambda: _place_of(reader),
        manner=["by torch's protocol"],
        options=of_load(reader, planner),
        kinds=targets.kinds,
    )

    def local_plan() -> LoadPlan:
        nonlocal together
        metadata, together = _read_metadata(reader, ranks.rank)
        planner.set_up_planner(targets.state(_stored(metadata)), metadata, ranks.is_coordinator)
        _call_with_optional(
            reader.set_up_storage_reader,
            (metadata, ranks.is_coordinator),
            {"rank": ranks.rank, "use_collectives": together},
        )
        plan = planner.create_local_plan()
        if isinstance(planner, DefaultLoadPlanner):
            planner.check_chosen()
        return reader.prepare_local_plan(plan)

    def global_plan(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    reply = ranks.reduce_scatter(
        "plan",
        lambda: plan_transport.pack(local_plan()),
        lambda parts: [
            plan_transport.pack(p) for p in global_plan([plan_transport.unpack(p) for p in parts])
        ],
    )
    if isinstance(reader, FileSystemReader):  # of others nobody knows what a checkpoint is known by
        check_same_checkpoint(ranks, places, lambda: _fingerprint(reader) if together else b"")
    if isinstance(planner, DefaultLoadPlanner) and refuses:
        ranks.reduce_broadcast("unexpected", lambda: _left(planner, reader, ranks, together), _check_left)
    report.seconds["plan"] = time.perf_counter() - begun
    begun = time.perf_counter()

    def read() -> bytes:
        reader.read_data(planner.finish_plan(plan_transport.unpack(reply)), planner).wait()
        return b""

    ranks.all_gather("read", read)
    report.seconds["read"] = time.perf_counter() - begun
    if isinstance(planner, DefaultLoadPlanner):
        report.note_plan(planner)
    if isinstance(reader, FileSystemReader):
        if reader.index is not None:
            report.note_source(reader.index)
        report.note_reading(reader.stats)


def _stored(metadata: Metadata) -> Stored:
    entries = metadata.state_dict_metadata
    return Stored(entries, {name for name, kind in entries.items() if isinstance(kind, BytesStorageMetadata)})


def _left(planner: DefaultLoadPlanner, reader: StorageReader, ranks: Ranks, together: bool) -> bytes:
    """Names that this rank does not take, and those of them that it should have a place for."""
    # What a reader makes other tensors of is no tensor of the model.
    scales = set(reader._weight_scale_mapping.values()) if isinstance(reader, TorchQuantizedReader) else set()
    lost = [name for name in planner.lost_keys if name not in scales]
    names = list(planner.metadata.state_dict_metadata) if lost and planner.metadata is not None else []
    if not together and lost:
        raise unexpected_keys(names, lost)  # of metadata that this rank alone has
    return bytes(msgpack.packb([list(planner.unexpected_keys), lost, names if ranks.is_coordinator else []]))


def _check_left(ranks: list[bytes]) -> bytes:
    """As `dcp.planners.load.unexpected.check_left`, by names: each rank has read metadata of its own."""
    told = [msgpack.unpackb(part) for part in ranks]
    left = set.intersection(*(set(unexpected) for unexpected, _, _ in told))
    lost = [name for name in dict.fromkeys(name for _, lost, _ in told for name in lost) if name in left]
    if lost:
        raise unexpected_keys(max((names for _, _, names in told), key=len), lost)
    return b""


def _fingerprint(reader: FileSystemReader) -> bytes:
    return blake2b(encode_manifest(reader.read_index())).digest()


def _place_of(storage: StorageWriter | StorageReader) -> str:
    if isinstance(storage, FileSystemWriter):
        return storage.store.url
    if isinstance(storage, FileSystemReader):
        return storage.place.url
    return str(getattr(storage, "checkpoint_id", ""))


def _warn_of_foreign(plan: SavePlan, values: Mapping[str, Any]) -> None:
    """As a save on columns does, by what the planner was given; what it makes of that is its own."""
    names = (item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
    named = {name: values[name] for name in names if name in values}
    warn_of_foreign([*named], [*named.values()])


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The global metadata, or this rank's own where the checkpoint was saved without collectives."""
    try:
        return reader.read_metadata(), True
    except (OSError, CheckpointNotFoundError) as error:
        if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except (OSError, CheckpointNotFoundError):
            raise error from None
    except (EOFError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(f"the checkpoint's metadata cannot be read: {error}") from error


def _call_with_optional(method: Any, args: tuple[Any, ...], optional: dict[str, Any]) -> None:
    """Call ``method`` with those of the keywords it takes: storages and planners from before torch added
    them."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        method(*args, **optional)
        return
    method(*args, **{name: value for name, value in optional.items() if name in parameters})
